"""`fedq attack` writes a table and a picture, and refuses with a reason."""

import csv
import json

import pytest

from lightning_fedq.cli import main

SMALL = [
    "--attempts",
    "60",
    "--candidates",
    "50",
    "--inversions",
    "2",
    "--model",
    "linear",
    "--attack",
    "idlg",
]


def test_table_and_picture(tmp_path, capsys):
    assert main(["attack", *SMALL, "--budgets", "0.6", "--out", str(tmp_path)]) == 0
    with (tmp_path / "table.csv").open() as file:
        rows = {row["mechanism"]: row for row in csv.DictReader(file)}
    assert len(rows) == 7
    assert float(rows["vanilla"]["inverted"]) == float(rows["vanilla"]["matched"]) == 1.0
    assert float(rows["near-optimal tau=0.6"]["leakage"]) < float(rows["vanilla"]["leakage"])
    for row in rows.values():
        assert float(row["leakage_low"]) <= float(row["leakage"]) <= float(row["leakage_high"])
    assert (tmp_path / "grid.png").stat().st_size > 1000
    assert "not differential privacy" in json.loads((tmp_path / "table.json").read_text())["note"]
    assert "table.csv" in capsys.readouterr().out


def test_a_budget_that_cannot_be_shown(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["attack", *SMALL, "--budgets", "0.05", "--out", str(tmp_path)])
    assert "a budget of 0.05 can't be shown with 60 attempts" in capsys.readouterr().err
