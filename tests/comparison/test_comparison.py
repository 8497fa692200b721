"""`Comparison` and `fedq compare --mechanisms`: names, cells, resumption, Opacus, loggers."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import ClassVar

import pytest

from lightning_fedq.cli import main
from lightning_fedq.comparison import comparison as module
from lightning_fedq.comparison.baselines import gaussian_by_opacus, laplace_by_opacus
from lightning_fedq.comparison.bench.cells import read
from lightning_fedq.comparison.bench.tasks import KAPPA, RANGES, Job, MeanEstimation, Result, Training
from lightning_fedq.comparison.comparison import Comparison
from tests import forked
from tests.callbacks.test_wandb_rounds import finished_records_of

MEAN = "mean-unit-1024"
OPACUS = ["GaussianNoise, by Opacus", "LaplaceNoise, by Opacus"]


class Counts(MeanEstimation):
    """Says how often it ran."""

    runs: ClassVar[list[tuple[str, float, int]]] = []

    def run(self, job: Job) -> Result:
        self.runs.append((job.option.name, job.tuning.range, job.seed))
        return super().run(job)


@pytest.fixture
def small() -> Counts:
    """A task that counts."""
    Counts.runs = []
    return Counts("small", 60, 1, "unit", 64)


TINY = Training("tiny", 30, 2, samples=4, rates=(0.3,), delta=1e-3)


def test_ranges_are_searched_with_another_seed_and_only_where_coordinates_are_clipped(
    small: Counts, tmp_path: Path
) -> None:
    asked = Comparison.of(small, ["LDPQ", "GaussianNoise"], epsilons=[4.0], seeds=1, baselines=False)
    asked.run(tmp_path)
    found = {name: [(r, s) for of, r, s in Counts.runs if of == name] for name in ("LDPQ", "GaussianNoise")}
    assert found["LDPQ"][:3] == [(value, 1000) for value in RANGES]
    assert len(found["LDPQ"]) == 4 and found["LDPQ"][3][1] == 0
    assert found["GaussianNoise"] == [(KAPPA, 0)]
    tried = {row.tuning: row.result.validation for row in read(tmp_path / "cells.csv")[:3] if row.result}
    [chosen] = [row for row in read(tmp_path / "cells.csv") if row.cell.mechanism == "LDPQ"][3:]
    assert tried[chosen.tuning] == min(tried.values())


def test_it_goes_on_where_it_stopped(small: Counts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails ends it, what is there stays; more epsilons and seeds add to it."""
    asked = Comparison.of(small, ["LDPQ"], epsilons=[4.0], seeds=2, baselines=False)
    whole = asked.run(tmp_path / "whole")
    Counts.runs = []
    run, ends = Counts.run, 4

    def fails(self: Counts, job: Job) -> Result:
        if len(Counts.runs) == ends:
            raise KeyboardInterrupt
        return run(self, job)

    monkeypatch.setattr(Counts, "run", fails)
    with pytest.raises(KeyboardInterrupt):
        asked.run(tmp_path / "stopped")
    monkeypatch.setattr(Counts, "run", run)
    again = asked.run(tmp_path / "stopped")
    assert len(Counts.runs) == len(set(Counts.runs)) == 3 + 2 + 2  # FedAvg's cells, the search, the cells
    assert [(r.cell, r.result and r.result.score) for r in again] == [
        (r.cell, r.result and r.result.score) for r in whole
    ]
    more = Comparison.of(small, ["LDPQ"], epsilons=[4.0, 8.0], seeds=3, baselines=False)
    done = len(Counts.runs)
    assert len(more.run(tmp_path / "stopped")) == 3 + 6
    assert len(Counts.runs) == done + 1 + 1 + 3 + 3
    said: list[tuple[str, int]] = []
    more.run(tmp_path / "stopped", begins=lambda words, runs: said.append((words, runs)))
    assert said == [("every run is there", 0)]


def test_a_folder_is_of_one_comparison(small: Counts, tmp_path: Path) -> None:
    asked = Comparison.of(small, ["GaussianNoise"], epsilons=[4.0], seeds=1, baselines=False)
    asked.run(tmp_path)
    other = Comparison.of(small, ["GaussianNoise"], "outsider", epsilons=[4.0], seeds=1, baselines=False)
    kept = (tmp_path / "cells.csv").read_bytes()
    words = r"holds another comparison \(adversary secagg_server, not outsider\); name another folder"
    with pytest.raises(ValueError, match=words):
        other.run(tmp_path)
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(ValueError, match=r"comparison\.json is damaged; name another folder"):
        asked.run(tmp_path)
    (tmp_path / "comparison.json").unlink()
    with pytest.raises(ValueError, match="holds runs of no known settings; name another folder"):
        asked.run(tmp_path)
    assert (tmp_path / "cells.csv").read_bytes() == kept


def test_a_full_disk_ends_it_and_keeps_what_is_there(
    small: Counts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything runs, if nothing can be written at all."""
    asked = Comparison.of(small, ["GaussianNoise"], epsilons=[4.0], seeds=2, baselines=False)
    for fits, runs in ((0, 0), (3, 3)):
        Counts.runs = []
        synced = iter([True] * fits)

        def sync(file: int) -> None:
            if not next(synced, False):  # noqa: B023 (called at once)
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", sync)
        with pytest.raises(OSError, match=r"No space left on device: '.*cells\.csv'"):
            asked.run(tmp_path / str(fits))
        assert len(Counts.runs) == runs and len(read(tmp_path / str(fits) / "cells.csv")) == max(runs - 1, 0)
    monkeypatch.undo()
    assert len(asked.run(tmp_path / "3")) == 4 and len(Counts.runs) == 3 + 2


def test_processes_give_the_same_rows_and_end_with_who_started_them(tmp_path: Path) -> None:
    asked = Comparison.of(TINY, ["GaussianNoise"], epsilons=[8.0], seeds=2, baselines=False)
    assert math.isnan(asked._seconds(["GaussianNoise"], {}))  # short runs that are known to be have one
    one = asked.run(tmp_path / "one")
    with forked.forks():
        two = asked.run(tmp_path / "two", processes=2)

    def figures(rows: list[module.Row]) -> list[object]:
        return [(row.cell, row.result and (row.result.score, row.result.bits)) for row in rows]

    assert figures(one) == figures(two)
    long = Comparison.of("mean-unit-65536", ["GaussianNoise"], seeds=99, baselines=False)
    child = forked.begin(lambda: long.run(tmp_path / "killed", processes=2))  # and that one starts real ones
    table = tmp_path / "killed" / "cells.csv"
    try:
        wait_for(lambda: table.exists() and len(table.read_text().splitlines()) > 2)
        others = children_of(child.pid)
        assert len(others) >= 2
        child.kill()
        child.join()
        wait_for(lambda: not any(map(is_alive, others)))
    finally:
        child.kill()
    assert all(row.result is not None for row in read(table))


class Dies(MeanEstimation):
    """Its process ends in the middle of the second seed."""

    def run(self, job: Job) -> Result:
        if job.seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(job)


def test_a_process_that_is_killed_ends_it_with_a_cure(tmp_path: Path) -> None:
    task = Dies("dies", 60, 1, "unit", 64)
    asked = Comparison.of(task, ["GaussianNoise"], epsilons=[4.0], seeds=2, baselines=False)
    words = r"ended in the middle of a run.*with fewer --jobs"
    with forked.forks(), pytest.raises(RuntimeError, match=words):
        asked.run(tmp_path, processes=2)
    assert read(tmp_path / "cells.csv") == [] or read(tmp_path / "cells.csv")[0].cell.seed == 0


def wait_for(condition: object, seconds: float = 90.0) -> None:
    """Wait until something holds."""
    ends = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < ends, "it took too long"
        time.sleep(0.1)


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def children_of(process: int) -> list[int]:
    """Processes that a process has started."""
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(part) for part in text.split()]


def test_opacus_noise_is_more_and_what_is_spent_is_ours(tmp_path: Path) -> None:
    """8 asked for, 7.44 spent over 20 rounds; its conversion against the exact curve of each."""
    asked = Comparison.of("digits", ["GaussianNoise"], epsilons=[8.0], seeds=1)
    groups = {name: asked._group(name, 8.0, {}).option for name in asked.names}
    spent = {name: option.epsilon for name, option in groups.items() if option is not None}
    assert spent["GaussianNoise, by Opacus"] == pytest.approx(7.44, abs=0.01)
    assert 7.6 < spent["LaplaceNoise, by Opacus"] < 7.8
    assert 7.99 < spent["GaussianNoise"] <= 8.0
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(gaussian_by_opacus(8.0, 1e-5, 20), 1.0, 20)]
    assert 7.98 < accountant.get_epsilon(1e-5) <= 8.0
    assert laplace_by_opacus(8.0, 1e-5, 1) == pytest.approx(1.0 / 8.0, rel=0.02)  # one release: pure
    few = Comparison.of("digits", ["GaussianNoise"], epsilons=[8.0], seeds=1, baselines=False)
    assert list(few.names) == ["GaussianNoise"]
    named = Comparison.of("digits", [OPACUS[0]], epsilons=[8.0], seeds=1, baselines=False)
    assert list(named.names) == OPACUS[:1]


def test_the_command_says_what_it_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row or a sentence for every name; a row of figures for every run; FedAvg has no finite epsilon."""
    monkeypatch.chdir(tmp_path)
    asked = ["--mechanisms", "GaussianNoise", "CorBin", "Nonsense", "CPA", "FedAvg"]
    more = ["--on", "mean-unit-1024", "--epsilon", "8", "4", "--seeds", "2", "--jobs", "1"]
    assert main(["compare", *asked, *more]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "runs, 1 at a time: about " in said
    assert "Nonsense is left out: there is no mechanism Nonsense" in said
    assert "CPA at epsilon 4, 8 is left out: CPA is not homomorphic" in said
    assert "CorBin at epsilon 4 is left out: CorBin can't meet epsilon 4" in said
    assert "FedAvg, no finite ε" in said and "FedAvg is left out" not in said
    with Path("runs/compare/table.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = {row["mechanism"] for row in rows if row["score"]}
    assert names == {"FedAvg", "GaussianNoise", *OPACUS}
    assert {row["epsilon_spent"] for row in rows if row["mechanism"] == "FedAvg"} == {"inf"}
    gaussian = [row for row in rows if row["mechanism"] == "GaussianNoise"]
    assert [(row["epsilon"], row["seed"]) for row in gaussian] == [
        (epsilon, seed) for epsilon in ("4.0", "8.0") for seed in "01"
    ]
    for row in gaussian:
        ways = sum(float(row[name]) for name in ("bits_up", "bits_keys", "bits_down"))
        assert float(row["bits_both_ways"]) == pytest.approx(ways)
        assert float(row["epsilon_spent"]) <= float(row["epsilon"])
    assert Path("runs/compare/compare.png").stat().st_size > 5000
    assert Path("runs/compare/compare_dark.png").exists()
    assert (
        main(["compare", "--mechanisms", "LDPQ", *more[:2], "--epsilon", "0.1", "--out", "w", "--bare"]) == 0
    )
    assert " * " in capsys.readouterr().out  # worse than no estimate


def test_a_setting_without_a_finite_epsilon_is_no_winner(tmp_path: Path) -> None:
    asked = Comparison.of(TINY, ["GaussianNoise"], epsilons=[4.0, 8.0], seeds=2, baselines=False)
    rows = asked.run(tmp_path)
    by_epsilon, by_up, by_both = asked.picture(rows).axes
    labels = {line.get_label(): line for line in by_epsilon.get_lines()}
    line = labels["FedAvg: no privacy, no finite ε"]
    assert line.get_linestyle() == "--" and line.get_color() == "0.5"
    for axes in (by_up, by_both):
        assert "FedAvg, no finite ε" in {text.get_text() for text in axes.texts}
    assert not any(
        line.get_label() == "FedAvg" for axes in (by_epsilon, by_up, by_both) for line in axes.lines
    )


IDLE = (
    *(["--on", "digits"], ["--data", "here"], ["--logger", "csv"], ["--jobs", "2"], ["--bare"], ["--tune"]),
    *(["--seeds", "1"], ["--delta", "1e-4"]),
)
"""What says nothing about runs that have ended."""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name finished runs, or mechanisms"),
        (["a", "--mechanisms", "CorBin"], "--on CONFIG for a configuration"),
        (["--mechanisms", "Nonsense"], "no mechanism is left. Nonsense is left out: there is no mechanism"),
        (["--mechanisms", "CorBin", "--epsilon", "1"], "no mechanism is left. CorBin: CorBin can't meet"),
        (["--mechanisms", "CorBin", "--epsilon", "0"], "an epsilon must be > 0 and finite, got 0"),
        (["--mechanisms", "CorBin", "--epsilon", "8", "-1"], "an epsilon must be > 0 and finite, got -1"),
        (["--mechanisms", "CorBin", "--epsilon", "inf"], "an epsilon must be > 0 and finite, got inf"),
        (["--mechanisms", "CorBin", "--epsilon", "nan"], "an epsilon must be > 0 and finite, got nan"),
        (["--mechanisms", "CorBin", "--seeds", "0"], "seeds and an epsilon are needed, got 0"),
        (["--mechanisms", "CorBin", "--jobs", "0"], "--jobs must be >= 1, got 0"),
        (["--mechanisms", "CorBin", "--rounds", "0"], "--rounds must be >= 1, got 0"),
        (["--mechanisms", "CorBin", "--delta", "1"], "delta must be"),
        (["--mechanisms", "CorBin", "--adversary", "everybody"], "adversary must be one of"),
        (["--mechanisms", "CorBin", "--on", "imagenet"], "there is no task imagenet; there are mean"),
        (
            ["--epsilon", "8", "--on", "mean-unit-1024", "--logger", "csv"],
            "trains nothing that could be logged",
        ),
        (["--epsilon", "8", "--on", "mean-unit-1024", "--tune"], "has none to search; leave --tune out"),
        (["--epsilon", "8", "--on", "mean-unit-1024", "--monitor", "x"], "has its score; leave them out"),
        (["--epsilon", "8", "--on", "mean-unit-1024", "--mode", "min"], "has its score; leave them out"),
        (
            ["--epsilon", "8", "--on", "digits_ldpq", "--data", "here"],
            "says where its data are; leave it out",
        ),
        *((["digits_ldpq", *idle], f"{idle[0]}: runs that have ended") for idle in IDLE),
    ],
)
def test_wrong_arguments_are_answered_in_a_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_images_need_a_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("FEDQ_DATA", raising=False)
    assert main(["compare", "--mechanisms", "CorBin", "--on", "mnist-linear"]) == 2
    assert "a task on images, and those need --data FOLDER" in capsys.readouterr().err


def test_a_logger_has_a_run_for_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B offline, record by record: the cell, what it cost, and the figures of every round."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    asked = Comparison.of(TINY, ["GaussianNoise"], epsilons=[8.0], seeds=2)
    rows = asked.run(tmp_path, logger="wandb")
    found = {}
    for folder in sorted((tmp_path / "wandb" / "wandb").glob("offline-run-*")):
        records = finished_records_of(folder_of(folder, tmp_path))
        config = [item for record in records if record.HasField("config") for item in record.config.update]
        [cell] = [json.loads(item.value_json) for item in config if item.key == "compare"]
        summary = {
            "/".join((item.key, *item.nested_key)): json.loads(item.value_json)
            for record in records
            if record.HasField("summary")
            for item in record.summary.update
        }
        rounds = [record for record in records if record.HasField("history")]
        keys = {item.key or "/".join(item.nested_key) for record in rounds for item in record.history.item}
        assert {"fed/bits_per_parameter", "fed/val_acc"} & keys and len(rounds) >= TINY.rounds
        run = next(record.run for record in records if record.HasField("run"))
        assert run.run_group == "tiny, secagg_server" and run.project == "fedq-compare"
        found[cell["mechanism"], cell["seed"]] = cell, summary
    assert len(found) == len(rows) == 8
    for row in rows:
        cell, summary = found[row.cell.mechanism, row.cell.seed]
        assert row.result is not None and row.result.down is not None
        assert summary["compare/score"] == row.result.score
        assert (
            summary["compare/bits_up"] == row.result.bits and summary["compare/bits_down"] == row.result.down
        )
        assert summary["compare/bits_both_ways"] == row.result.all_bits + row.result.down
        assert cell["task"] == "tiny" and cell["delta"] == 1e-3 and cell["setting"]
        private = row.cell.epsilon < math.inf
        assert cell["epsilon"] == (8.0 if private else None)
        assert summary.get("compare/epsilon_spent") == (row.result.spent if private else None)
        assert cell["calibrated_by"] == module._by(row.cell.mechanism)


def folder_of(run: Path, scratch: Path) -> Path:
    """A folder that holds one offline run alone, as the reader of its records wants it."""
    home = scratch / "alone" / run.name
    (home / "wandb").mkdir(parents=True)
    (home / "wandb" / run.name).symlink_to(run)
    return home


def test_a_cell_that_was_stopped_leaves_no_second_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logger's folder is begun anew, also where it is a file of rows."""
    asked = Comparison.of(TINY, ["GaussianNoise"], epsilons=[8.0], seeds=1, baselines=False)
    monkeypatch.setattr("lightning_fedq.comparison.bench.tasks.told", stop)
    for kind in ("wandb", "csv"):
        with pytest.raises(KeyboardInterrupt):
            asked.run(tmp_path / kind, logger=kind)  # type: ignore[arg-type]
    monkeypatch.undo()
    monkeypatch.setenv("WANDB_MODE", "offline")
    for kind in ("wandb", "csv"):
        asked.run(tmp_path / kind, logger=kind)  # type: ignore[arg-type]
    assert len(list((tmp_path / "wandb/wandb/wandb").glob("offline-run-*"))) == 2
    tables = list((tmp_path / "csv/csv").glob("*/metrics.csv"))
    assert len(tables) == 2
    for table in tables:
        with table.open() as file:
            assert sum(bool(row["compare/score"]) for row in csv.DictReader(file)) == 1


def stop(loggers: object, job: Job, result: Result) -> None:
    """Ctrl-C at the end of a run."""
    import wandb

    wandb.finish()
    raise KeyboardInterrupt
