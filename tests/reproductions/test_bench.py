import csv
import json
import math

import pytest

from reproductions.bench import Rows, curve, curve_values


def counted(calls, name):
    def compute():
        calls.append(name)
        return {"acc": 1 / 3, "published": math.nan, "val_acc_by_round": curve([1.5, 2.25])}

    return compute


def table_of(rows):
    with (rows.folder / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_is_on_disk_after_every_row(tmp_path):
    rows = Rows(str(tmp_path / "run"), {"seed": 0}, resume=False)
    rows.add({"method": "a", "lr": 0.1}, counted([], "a"))
    assert [row["method"] for row in table_of(rows)] == ["a"]
    rows.add({"method": "b", "lr": 0.1}, counted([], "b"))
    summary = rows.finish(["fine"], "title")
    assert [row["method"] for row in table_of(rows)] == ["a", "b"]
    assert json.loads((rows.folder / "summary.json").read_text())["verdicts"] == ["fine"]
    assert summary["table"] == rows.rows and summary["settings"] == {"seed": 0}


def test_a_resumed_experiment_computes_only_what_is_missing(tmp_path):
    calls = []
    out = str(tmp_path / "run")
    first = Rows(out, {"seed": 0, "seeds": (1, 2)}, resume=False)
    old = first.add({"method": "a", "lr": 1.0}, counted(calls, "a"))
    first.add({"method": "later", "lr": 1.0}, counted(calls, "later"))
    again = Rows(out, {"seed": 0, "seeds": (1, 2)}, resume=True)
    row = again.add({"method": "a", "lr": 1.0}, counted(calls, "again"))
    again.add({"method": "a", "lr": 0.1}, counted(calls, "new"))
    assert calls == ["a", "later", "new"]
    assert row["acc"] == old["acc"] and math.isnan(row["published"]) and row["method"] == "a"
    assert curve_values(row["val_acc_by_round"]) == [1.5, 2.25]
    found = [(line["method"], line["lr"]) for line in table_of(again)]
    assert found == [("a", "1.0"), ("a", "0.1"), ("later", "1.0")]  # what was not asked for stays
    assert [r["lr"] for r in again.rows] == [1.0, 0.1]


def test_without_resume_a_taken_folder_is_left_alone(tmp_path):
    out = str(tmp_path / "run")
    Rows(out, {}, resume=False).add({"method": "a"}, counted([], "a"))
    assert Rows(out, {}, resume=False).folder.name == "run-2"


def test_rows_of_other_settings_are_refused(tmp_path):
    out = str(tmp_path / "run")
    Rows(out, {"rounds": 30}, resume=False)
    with pytest.raises(ValueError, match=r"holds rows of other settings: rounds = 30 \(here 2\); use those"):
        Rows(out, {"rounds": 2}, resume=True)
