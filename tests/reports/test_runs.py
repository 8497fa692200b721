import errno
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_fedq.reports.runs import (
    first_metric,
    fresh_folder,
    metric_stage,
    plot_progress,
    read_rows,
    save_figure,
    summary_lines,
    totals,
    write_atomically,
    write_rows,
    write_summary,
)

BITS = {"uplink_bits": 8e6, "downlink_bits": 16e6, "setup_bits": 0.0}
METRICS = {"val_acc": 0.5, "sim_mse": 0.1, "radius_min": 0.2}
ROWS = [
    {"round": 0.0, **BITS, "setup_bits": 4e6, "protocol_bits": 2e6, "num_received": 3.0, "seconds": 1.0},
    {"round": 1.0, **BITS, "num_received": 2.0, "seconds": 2.0, **METRICS},
]


def test_rows_survive_the_round_trip(tmp_path):
    write_rows(tmp_path / "a" / "metrics.csv", ROWS)
    assert read_rows(tmp_path / "a" / "metrics.csv") == ROWS
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "metrics.csv"], "nothing half-written"


def test_totals_add_up():
    megabytes = {"uplink": 2, "downlink": 4, "setup": 0.5, "protocol": 0.25}
    expected = {f"{name}_megabytes": value for name, value in megabytes.items()}
    assert totals(ROWS) == {**expected, "seconds": 3, "messages": 5}


def test_summary_is_strict_json(tmp_path):
    write_summary(tmp_path / "s.json", {"a": math.nan, "b": [math.inf, 1], "c": {"d": "x"}})
    text = (tmp_path / "s.json").read_text()
    assert json.loads(text) == {"a": None, "b": [None, 1], "c": {"d": "x"}} and "NaN" not in text


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_atomically(path, "old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/f'"):
        write_atomically(path, "new")


def test_a_summary_says_nothing_twice():
    summary = {"mechanism": "LDPQ(1.0)", "num_clients": 2, "rounds": 1, "target": "updates", "best": {}}
    summary |= {"metrics": {"val_acc": 0.5, "val_loss": 1.0, "epsilon": 0.8831}, "keys": "from a seed"}
    summary |= {"bits_per_parameter": 1.0, "uplink_megabytes": 1.0, "downlink_megabytes": 1.0}
    lines = dict(summary_lines({**summary, "setup_megabytes": 0.0, "seconds": 1.25}))
    assert lines["val"] == "val_acc 0.5, val_loss 1" and lines["epsilon"] == "0.884"
    assert lines["seconds"] == "1.2 in rounds, without set-up and writing of files"


def test_folders_are_never_reused(tmp_path):
    assert fresh_folder(tmp_path / "deep" / "run") == tmp_path / "deep" / "run"
    write_atomically(tmp_path / "deep" / "run-2" / "x", "1")
    assert fresh_folder(tmp_path / "deep" / "run") == tmp_path / "deep" / "run-3"


def test_of_runs_that_ask_at_once_each_has_a_folder_of_its_own(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: fresh_folder(tmp_path / "run"), range(40)))
    assert len(set(found)) == 40 and all(path.is_dir() for path in found)


def test_pictures_are_drawn_from_what_there_is(tmp_path):
    progress = plot_progress({"a": ROWS, "never": ROWS[:1]}, "val_acc")
    line, nothing = progress.axes[1].lines
    assert line.get_xydata().tolist() == [[2.5, 0.5]]  # megabytes up, with the set-up of round 0
    assert len(nothing.get_xydata()) == 0
    save_figure(progress, tmp_path / "progress.png")
    assert (tmp_path / "progress.png").read_bytes()[:4] == b"\x89PNG"


def drawn(figure, tmp_path):
    save_figure(figure, tmp_path / "drawn.png")  # ticks are set when a figure is drawn


def test_rounds_are_whole_numbers_from_one(tmp_path):
    rows = [{**ROWS[1], "round": float(number)} for number in (1, 2, 3)]
    figure = plot_progress({"a": rows}, "val_acc", "a title")
    drawn(figure, tmp_path)
    ticks = figure.axes[0].get_xticks()
    assert all(tick == round(tick) for tick in ticks), ticks
    assert figure.get_suptitle() == "a title"


def test_log_axes_have_plain_numbers(tmp_path):
    rows = [{**ROWS[1], "round": float(number)} for number in (1, 2, 3)]
    small = [{**row, "uplink_bits": row["uplink_bits"] / 100, "setup_bits": 0.0} for row in rows]
    figure = plot_progress({"a": rows, "b": small}, "val_acc")
    drawn(figure, tmp_path)
    axis = figure.axes[1].xaxis
    labels = [label.get_text() for label in axis.get_ticklabels()]
    assert axis.get_scale() == "log" and all(float(text) > 0 for text in labels), labels
    assert not any(label.get_text() for label in axis.get_ticklabels(minor=True))


def test_a_legend_only_where_there_is_something_to_tell_apart():
    one = plot_progress({"a": ROWS}, "val_acc")
    assert one.axes[0].get_legend() is None and one.axes[1].get_xscale() == "linear"
    lined = plot_progress({"a": ROWS}, "val_acc", baseline=0.9)
    assert [text.get_text() for text in lined.axes[0].get_legend().texts] == ["a", "baseline 0.9"]
    two = plot_progress({"a": ROWS, "b": ROWS}, "val_acc", dashed={"b"})
    assert [line.get_linestyle() for line in two.axes[0].lines] == ["-", "--"]


def test_a_picture_has_a_dark_twin_and_nothing_is_cut(tmp_path):
    """As narrow as a telephone, with long names: whatever is drawn lies inside the paper."""
    long = [f"run {place} (DistributedDiscreteGaussian, epsilon 8)" for place in range(5)]
    figure = plot_progress(dict.fromkeys(long, ROWS), "val_acc", "accuracy", 0.9)
    save_figure(figure, tmp_path / "one.png", twin=True)
    assert {path.name for path in tmp_path.iterdir()} == {"one.png", "one_dark.png"}
    assert figure.get_figwidth() < 5 and max(figure.get_facecolor()[:3]) < 0.2
    found, paper = figure.axes[0].get_legend().get_window_extent(), figure.bbox
    assert found.x0 >= paper.x0 and found.x1 <= paper.x1 and found.y1 <= paper.y1


def test_a_missing_metric_is_named_in_the_picture():
    figure = plot_progress({"a": [{**ROWS[1], "val_loss": 1.0}]}, "accuracy")
    (text,) = figure.axes[0].texts
    assert "a never logged accuracy. It logged" in text.get_text() and "val_loss" in text.get_text()


def test_metrics_with_a_slash_are_of_a_stage_too():
    rows = [{"round": 1.0, "train/loss": 1.0, "val/loss": 2.0, "val/acc": 0.5}]
    assert first_metric(rows) == "val/acc"
    assert first_metric([{"validation_f1": 0.5}]) == "validation_f1"
    assert [metric_stage(name) for name in ("val/acc", "valid_acc", "test/acc", "value", "acc")] == [
        "val", "val", "test", "", "",
    ]  # fmt: skip


def test_the_first_metric():
    assert first_metric([{"train_acc": 1.0, "val_loss": 2.0}, {"val_acc": 1.0}]) == "val_acc"
    assert first_metric([{"train_acc": 1.0, "val_iou": 2.0, "val_loss": 2.0}]) == "val_iou"
    assert first_metric([{"train_acc": 1.0}]) is None
