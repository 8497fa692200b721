import json
import math
from pathlib import Path

import pytest

from lightning_fedq.reports import (
    fresh_folder,
    plot_aggregate,
    plot_progress,
    read_rows,
    save_figure,
    totals,
    write_atomically,
    write_rows,
    write_summary,
)

ROWS = [
    {
        "round": 0.0,
        "uplink_bits": 8e6,
        "downlink_bits": 16e6,
        "setup_bits": 4e6,
        "num_received": 3.0,
        "seconds": 1.0,
    },
    {
        "round": 1.0,
        "uplink_bits": 8e6,
        "downlink_bits": 16e6,
        "setup_bits": 0.0,
        "num_received": 2.0,
        "seconds": 2.0,
    }
    | {"val_acc": 0.5, "sim_mse": 0.1, "radius_min": 0.2},
]


def test_rows_survive_the_round_trip(tmp_path: Path) -> None:
    write_rows(tmp_path / "a" / "metrics.csv", ROWS)
    assert read_rows(tmp_path / "a" / "metrics.csv") == ROWS
    assert [path.name for path in (tmp_path / "a").iterdir()] == [
        "metrics.csv"
    ]  # nothing half-written is left


def test_a_missing_run_names_the_cure(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"folder of a run that had the RunFolder callback"):
        read_rows(tmp_path / "metrics.csv")


def test_totals_add_up() -> None:
    expected = {
        "uplink_megabytes": 2,
        "downlink_megabytes": 4,
        "setup_megabytes": 0.5,
        "seconds": 3,
        "messages": 5,
    }
    assert totals(ROWS) == expected


def test_summary_is_strict_json(tmp_path: Path) -> None:
    write_summary(tmp_path / "s.json", {"a": math.nan, "b": [math.inf, 1], "c": {"d": "x"}})
    text = (tmp_path / "s.json").read_text()
    assert json.loads(text) == {"a": None, "b": [None, 1], "c": {"d": "x"}} and "NaN" not in text


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_atomically(path, "old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_folders_are_never_reused(tmp_path: Path) -> None:
    assert fresh_folder(tmp_path / "run") == tmp_path / "run"
    write_atomically(tmp_path / "run" / "x", "1")
    write_atomically(tmp_path / "run-2" / "x", "1")
    assert fresh_folder(tmp_path / "run") == tmp_path / "run-3"


def test_pictures_are_drawn_from_what_there_is(tmp_path: Path) -> None:
    progress = plot_progress({"a": ROWS, "never": ROWS[:1]}, "val_acc")
    line, nothing = progress.axes[1].lines
    assert line.get_xydata().tolist() == [[2.5, 0.5]]  # megabytes up, with the set-up of round 0
    assert len(nothing.get_xydata()) == 0
    save_figure(progress, tmp_path / "progress.png")
    save_figure(plot_aggregate(ROWS), tmp_path / "aggregate.png")
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in ("progress.png", "aggregate.png"))
