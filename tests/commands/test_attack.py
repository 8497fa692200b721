"""`fedq attack` writes a table and a picture, and refuses with a reason."""

import csv
import json
from pathlib import Path

import pytest

from lightning_fedq.cli import main
from lightning_fedq.commands import attack

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
CONFIGS = Path(__file__).parents[2] / "configs"

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


def test_the_model_data_and_mechanism_of_a_configuration(tmp_path, capsys):
    small = ["--attempts", "10", "--candidates", "30", "--inversions", "1", "--attack", "idlg", "--budgets"]
    config = str(CONFIGS / "digits_corbin.yaml")
    assert main(["attack", config, *small, "--local-steps", "2", "--out", str(tmp_path)]) == 0
    with (tmp_path / "table.csv").open() as file:
        names = [row["mechanism"] for row in csv.DictReader(file)]
    assert names[-2:] == ["as configured, one uplink", "as configured, group"]
    title = json.loads((tmp_path / "table.json").read_text())["title"]
    assert title == "digits_corbin, idlg, batch 1, 2 local steps"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["attack", "nowhere.yaml", "--out", str(tmp_path / "other")])
    assert "no configuration nowhere.yaml" in capsys.readouterr().err


def flat(options, original=attack.built_in):
    setting = original(options)
    return setting._replace(inputs=setting.inputs.flatten(1))


def test_inputs_that_are_no_pictures_give_a_table_without_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(attack, "built_in", flat)
    assert main(["attack", *SMALL, "--budgets", "--out", str(tmp_path)]) == 0
    assert "no pictures: inputs of shape (2, 64) have no picture form" in capsys.readouterr().out
    assert (tmp_path / "table.csv").is_file()
    assert not (tmp_path / "grid.png").exists()
