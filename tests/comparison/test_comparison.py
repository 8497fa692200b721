"""`Comparison` and `fedq compare --mechanisms`: names, cells, resumption, Opacus, loggers."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fedq._lightning import pl
from lightning_fedq.cli import main
from lightning_fedq.comparison import comparison as module, processes
from lightning_fedq.comparison.baselines import gaussian_by_opacus, laplace_by_opacus
from lightning_fedq.comparison.cells import RANGES, Task
from lightning_fedq.comparison.comparison import Comparison
from lightning_fedq.comparison.table import describe_calibration
from lightning_fedq.privacy.planning import KAPPA
from tests import forked
from tests.callbacks.test_wandb_rounds import finished_records_of
from tests.test_cli import configuration

OPACUS = ["GaussianNoise, by Opacus", "LaplaceNoise, by Opacus"]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of two rounds, masked, with keys from a seed, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    path = configuration(tmp_path, num_clients=10)
    config = yaml.safe_load(path.read_text())
    config["trainer"]["callbacks"][0]["init_args"].update(secure_aggregation={"simulation": "masked"}, seed=3)
    path.write_text(yaml.safe_dump(config))
    return path


def on_small(names: list[str], **more: Any) -> Comparison:
    """A comparison on it at epsilon 8 with one seed, without Opacus's rows."""
    given = {"epsilons": (8.0,), "seeds": 1, "baselines": False, "delta": 1e-2, **more}
    return Comparison.from_names("small.yaml", names, **given)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of Gaussian noise that has ended."""
    folder = tmp_path_factory.mktemp("ended")
    given = "{class_path: GaussianNoise, init_args: {clip_norm: 1.0, noise_multiplier: 1.0}}"
    more = ["--trainer.callbacks+=RunFolder", f"--trainer.callbacks.root={folder / 'runs'}", "--set"]
    more += [f"Federated.mechanism={given}", "Federated.secure_aggregation={simulation: masked}"]
    with processes.quiet():
        assert main(["fit", str(configuration(folder, num_clients=10)), *more]) == 0
    return next((folder / "runs").iterdir())


@pytest.fixture
def runs(ended: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What runs: no run is trained, its folder is a copy of one that has ended, scored by its range."""
    names: list[str] = []

    def copied(waiting: Mapping[Path, Any], jobs: int) -> Iterator[tuple[Path, str]]:
        for file in waiting:
            config = yaml.safe_load(file.read_text())
            [folder] = [c for c in config["trainer"]["callbacks"] if c["class_path"].endswith(".RunFolder")]
            names.append(folder["init_args"]["name"])
            made = Path(folder["init_args"]["root"]) / names[-1]
            shutil.copytree(ended, made)
            summary = json.loads((made / "summary.json").read_text())
            summary["metrics"]["val_acc"] = float("range_1.5" in names[-1])
            (made / "summary.json").write_text(json.dumps(summary))
            file.with_suffix(processes.DONE).write_text(made.name)
            yield file, ""

    monkeypatch.setattr(module, "train_all", copied)
    return names


def test_ranges_are_searched_with_another_seed_and_only_where_coordinates_are_clipped(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.TASKS, "digits", Task((0.3,)))
    settings = {"epsilons": [5.0], "seeds": 2, "baselines": False}
    asked = Comparison.from_names("digits", ["LDPQ", "GaussianNoise"], **settings)
    asked.run(tmp_path / "out")
    rows = ("FedAvg", "LDPQ", "GaussianNoise")
    by_row = {row: [name for name in runs if name.startswith(f"{row}/")] for row in rows}
    tried = [f"LDPQ/epsilon_5/seed_1000_range_{value:g}_rate_0.3" for value in RANGES]
    assert by_row["LDPQ"] == [*tried, "LDPQ/epsilon_5/seed_0", "LDPQ/epsilon_5/seed_1"]
    assert by_row["GaussianNoise"] == [f"GaussianNoise/epsilon_5/seed_{seed}" for seed in (0, 1)]
    assert len(by_row["FedAvg"]) == 4 + 2
    for name, span in (("LDPQ", 1.5), ("GaussianNoise", KAPPA)):
        config = yaml.safe_load((tmp_path / f"out/runs/{name}/epsilon_5/seed_0.yaml").read_text())
        [federated] = [c for c in config["trainer"]["callbacks"] if c["class_path"].endswith("Federated")]
        assert federated["init_args"]["ranges"]["init_args"]["radius"] == span * 0.3 / math.sqrt(4060)
        assert config["model"]["init_args"]["lr"] == 0.3


def test_what_is_known_is_not_searched(runs: list[str], tmp_path: Path) -> None:
    """Unless it is asked for."""
    for tune, searches in ((False, 0), (True, 4)):
        runs.clear()
        settings = {"epsilons": [8.0], "seeds": 1, "baselines": False, "tune": tune}
        asked = Comparison.from_names("digits", ["RotatedCoins"], **settings)
        asked.run(tmp_path / str(tune))
        assert sum(name.startswith("RotatedCoins/") for name in runs) == searches + 1


def test_it_goes_on_where_it_stopped(runs: list[str], tmp_path: Path) -> None:
    """What was begun and has not ended runs again, in a folder of its own; epsilons and seeds add to it."""
    asked = on_small(["GaussianNoise"], epsilons=(4.0,), seeds=2)
    whole = asked.run(tmp_path / "out")
    (tmp_path / "out/runs/GaussianNoise/epsilon_4/seed_1.done").unlink()  # as a run that was killed
    shutil.move(tmp_path / "out/runs/GaussianNoise/epsilon_4/seed_1", tmp_path / "half")
    runs.clear()
    assert asked.run(tmp_path / "out") == whole and runs == ["GaussianNoise/epsilon_4/seed_1"]
    more = on_small(["GaussianNoise"], epsilons=(4.0, 8.0), seeds=3)
    runs.clear()
    assert len(more.run(tmp_path / "out")) == 3 + 6 and len(runs) == 1 + 1 + 3
    begun: list[tuple[int, int]] = []
    more.run(tmp_path / "out", begins=lambda *counts: begun.append(counts))
    assert begun == [(0, 0)]


def test_a_folder_is_of_one_comparison(runs: list[str], tmp_path: Path) -> None:
    asked, out = on_small(["GaussianNoise"]), tmp_path / "out"
    asked.run(out)
    words = r"holds another comparison \(adversary secagg_server, not outsider\)\. Name another folder"
    with pytest.raises(ValueError, match=words):
        on_small(["GaussianNoise"], adversary="outsider").run(out)
    with pytest.raises(ValueError, match=r"comparison \(rounds 2, not 3\)\. Name another folder"):
        on_small(["GaussianNoise"], rounds=3).run(out)
    config = Path("small.yaml").read_text()
    Path("small.yaml").write_text(config.replace("num_clients: 10", "num_clients: 9"))
    with pytest.raises(ValueError, match=r"comparison \(Federated\.num_clients 10, not 9\)\. Name another"):
        on_small(["GaussianNoise"]).run(out)
    Path("small.yaml").write_text(config)
    for spoil in (lambda path: path.write_text("{"), Path.unlink):
        spoil(out / "comparison.yaml")
        with pytest.raises(ValueError, match=r"comparison\.yaml is damaged\. Name another folder"):
            asked.run(out)


def test_runs_in_processes_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another metric of them needs no run."""
    monkeypatch.setattr(module, "STARTS", 0.0)  # however short they are
    asked = on_small(["GaussianNoise"], seeds=2)
    one, two = asked.run(tmp_path / "one"), asked.run(tmp_path / "two", jobs=2)

    def figures(lines: list[dict[str, Any]]) -> list[object]:
        return [[line[name] for name in ("mechanism", "seed", "score", "bits_up", "R")] for line in lines]

    assert figures(one) == figures(two) and len(one) == 4
    counts: list[int] = []
    other = on_small(["GaussianNoise"], seeds=2, monitor="val_loss")
    lines = other.run(tmp_path / "two", begins=lambda runs, searches: counts.append(runs))
    assert counts == [0] and all(line["score"] > 1.0 for line in lines)


def test_workers_end_with_who_started_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STARTS", 0.0)
    long = on_small(["GaussianNoise"], seeds=99)
    child = forked.begin(lambda: long.run(tmp_path / "killed", jobs=2))
    try:
        wait_for(lambda: len(list((tmp_path / "killed").rglob("*.done"))) > 2)
        others = children_of(child.pid)
        assert len(others) >= 2
        child.kill()
        child.join()
        wait_for(lambda: not any(map(is_alive, others)))
    finally:
        child.kill()


def test_an_interruption_does_not_wait_for_the_other_runs(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the generator is what Ctrl-C does to it. The second run would take minutes."""
    config = yaml.safe_load(small.read_text())
    config["trainer"]["callbacks"].append({"class_path": "lightning_fedq.callbacks.RunFolder"})
    files: dict[Path, dict[str, Any]] = {}
    for name, rounds in (("short", 1), ("long", 1000)):
        config["trainer"]["max_epochs"] = rounds
        config["trainer"]["callbacks"][-1]["init_args"] = {"name": name, "root": str(tmp_path)}
        files[tmp_path / f"{name}.yaml"] = {}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    before = set(active_children())
    runs = processes.train_all(files, jobs=2)
    assert next(runs) == (tmp_path / "short.yaml", "")
    assert len(set(active_children()) - before) == 2
    runs.close()
    assert set(active_children()) <= before and not (tmp_path / "long.done").exists()


class Dies(pl.Callback):
    """Ends the process of a worker."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # trials run the hooks of the start, too
        if Path("first").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        Path("first").touch()


def test_a_process_that_is_killed_ends_it_with_a_cure(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STARTS", 0.0)
    config = yaml.safe_load(small.read_text())
    config["trainer"]["callbacks"].append({"class_path": "tests.comparison.test_comparison.Dies"})
    small.write_text(yaml.safe_dump(config))
    with pytest.raises(RuntimeError, match=r"ended during a run.*with fewer --jobs"):
        on_small(["GaussianNoise"], seeds=2).run(tmp_path / "out", jobs=2)
    assert len(list((tmp_path / "out").rglob("*.done"))) == 1


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
    texts = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/children")]
    return [int(part) for text in texts for part in text.split()]


def test_opacus_noise_is_more_and_what_is_spent_is_ours() -> None:
    """8 asked for, 7.44 spent over 20 rounds; its conversion against the exact curve of each."""
    asked = Comparison.from_names("digits", ["GaussianNoise"], epsilons=[8.0], seeds=1)
    spent = {name: asked.option(name, 8.0).epsilon for name in asked.names}
    assert spent["GaussianNoise, by Opacus"] == pytest.approx(7.44, abs=0.01)
    assert 7.6 < spent["LaplaceNoise, by Opacus"] < 7.8
    assert 7.99 < spent["GaussianNoise"] <= 8.0
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(gaussian_by_opacus(8.0, 1e-5, 20), 1.0, 20)]
    assert 7.98 < accountant.get_epsilon(1e-5) <= 8.0
    assert laplace_by_opacus(8.0, 1e-5, 1) == pytest.approx(1.0 / 8.0, rel=0.02)  # one release: pure
    few = Comparison.from_names("digits", ["GaussianNoise"], epsilons=[8.0], seeds=1, baselines=False)
    assert list(few.names) == ["GaussianNoise"]
    named = Comparison.from_names("digits", [OPACUS[0]], epsilons=[8.0], seeds=1, baselines=False)
    assert list(named.names) == OPACUS[:1]


def test_the_command_says_what_it_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row or a sentence for every name; a row of figures for every run; FedAvg has no finite epsilon."""
    monkeypatch.setenv("COLUMNS", "150")
    asked = ["--mechanisms", "GaussianNoise", "Nonsense", "CPA", "FedAvg"]
    more = ["--on", "small.yaml", "--epsilon", "8", "4", "--seeds", "2", "--jobs", "1", "--delta", "1e-2"]
    more += ["--picture", "paper/figure.pdf", "--drop-checkpoints"]
    assert main(["compare", *asked, *more]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "14 runs" in said and "13 more runs, 1 at a time: about " in said
    for line in (
        "Nonsense is left out: there is no mechanism Nonsense",
        "CPA at epsilon 4, 8 is left out: CPA is not homomorphic",
    ):
        assert said.count(line) == 2 and said.index(line) < said.index("14 runs")
    assert not list(Path("runs").rglob("*.ckpt"))
    assert "FedAvg, no finite ε" in said and "FedAvg is left out" not in said
    with Path("runs/compare/table.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = {row["mechanism"] for row in rows if row["score"]}
    assert names == {"FedAvg", "GaussianNoise", *OPACUS}
    assert {row["epsilon_spent"] for row in rows if row["mechanism"] == "FedAvg"} == {"inf"}
    gaussian = [row for row in rows if row["mechanism"] == "GaussianNoise"]
    found = [(row["epsilon"], row["seed"]) for row in gaussian]
    assert found == [(epsilon, seed) for epsilon in ("4.0", "8.0") for seed in "01"]
    for row in gaussian:
        ways = sum(float(row[name]) for name in ("bits_up", "bits_keys", "bits_down"))
        assert float(row["bits_both_ways"]) == pytest.approx(ways)
        assert float(row["epsilon_spent"]) <= float(row["epsilon"])
    assert Path("runs/compare/compare.png").stat().st_size > 5000
    assert Path("runs/compare/compare_dark.png").exists()
    assert Path("paper/figure.pdf").read_bytes().startswith(b"%PDF") and said.count("paper/figure.pdf") == 1


def test_a_setting_without_a_finite_epsilon_is_no_winner(runs: list[str], tmp_path: Path) -> None:
    asked = on_small(["GaussianNoise"], epsilons=(4.0, 8.0), seeds=2)
    by_epsilon, by_up, by_both = asked.picture(asked.run(tmp_path / "out")).axes
    labels = {line.get_label(): line for line in by_epsilon.get_lines()}
    row = asked.picture(asked.lines(tmp_path / "out"), row=True)
    assert row.get_figwidth() == 7.0 and len({axes.get_ylabel() for axes in row.axes[1:]} | {""}) == 1
    line = labels["FedAvg: no privacy, no finite ε"]
    assert line.get_linestyle() == "--" and line.get_color() == "0.5"
    for axes in (by_up, by_both):
        assert "FedAvg, no finite ε" in {text.get_text() for text in axes.texts}
    lines = [line for axes in (by_epsilon, by_up, by_both) for line in axes.lines]
    assert not any(line.get_label() == "FedAvg" for line in lines)


IDLE = (
    *(["--on", "digits"], ["--data", "here"], ["--logger", "csv"], ["--jobs", "2"], ["--bare"], ["--tune"]),
    *(["--seeds", "1"], ["--delta", "1e-4"], ["--drop-checkpoints"]),
)
"""What says nothing about runs that have ended."""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Give either finished runs or mechanisms"),
        (["a", "--mechanisms", "CorBin"], "configuration needs --on CONFIG"),
        (["--mechanisms", "Nonsense"], "No mechanism is left. Nonsense is left out: there is no mechanism"),
        (["--mechanisms", "CorBin", "--epsilon", "1"], "No mechanism is left. CorBin: CorBin can't meet"),
        (["--mechanisms", "CorBin", "--epsilon", "0"], "An epsilon must be > 0 and finite, got 0"),
        (["--mechanisms", "CorBin", "--epsilon", "8", "-1"], "An epsilon must be > 0 and finite, got -1"),
        (["--mechanisms", "CorBin", "--epsilon", "inf"], "An epsilon must be > 0 and finite, got inf"),
        (["--mechanisms", "CorBin", "--epsilon", "nan"], "An epsilon must be > 0 and finite, got nan"),
        (["--mechanisms", "CorBin", "--seeds", "0"], "seeds and an epsilon are needed, got 0"),
        (["--mechanisms", "CorBin", "--jobs", "0"], "--jobs must be >= 1, got 0"),
        (["--mechanisms", "CorBin", "--rounds", "0"], "--rounds must be >= 1, got 0"),
        (["--mechanisms", "CorBin", "--delta", "1"], "delta must be"),
        (
            ["--mechanisms", "CorBin", "--picture", "figure.jpg"],
            "must end with .pdf, .svg or .png, got figure.jpg",
        ),
        (["run", "--picture", "figure.jpg"], "must end with .pdf, .svg or .png, got figure.jpg"),
        (["--mechanisms", "CorBin", "--adversary", "everybody"], "adversary must be one of"),
        (["--mechanisms", "CorBin", "--on", "imagenet"], "There is no task imagenet, only digits"),
        (["--epsilon", "8", "--on", "small.yaml", "--tune"], "has none to search. Omit --tune."),
        (["--epsilon", "8", "--on", "small.yaml", "--monitor", "wer"], "No run has a metric wer. --monitor"),
        (["--epsilon", "8", "--on", "digits_ldpq", "--data", "here"], "sets its own data. Omit --data."),
        *((["digits_ldpq", *idle], f"{idle[0]} can't be used with finished runs") for idle in IDLE),
    ],
)
def test_wrong_arguments_are_answered_in_a_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("delta", [0.0, 1.5, 1e-20])
def test_a_wrong_delta_is_refused_before_data_is_read(delta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_sizes", lambda *_: pytest.fail("the configuration was read"))
    with pytest.raises(ValueError, match=r"delta must be >"):
        on_small(["GaussianNoise"], delta=delta)


def test_images_need_a_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("FEDQ_DATA", raising=False)
    assert main(["compare", "--mechanisms", "CorBin", "--on", "mnist-linear"]) == 2
    assert "a task on images and needs --data FOLDER" in capsys.readouterr().err


def test_a_logger_has_a_run_for_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B offline, record by record: the cell, what it cost, and the figures of every round."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    asked = Comparison.from_names("small.yaml", ["GaussianNoise"], epsilons=[8.0], seeds=2, delta=1e-2)
    rows = asked.run(tmp_path, logger="wandb")
    found = {}
    for folder in sorted((tmp_path / "wandb" / "wandb").glob("offline-run-*")):
        records = finished_records_of(folder_of(folder, tmp_path))
        config = [item for record in records if record.HasField("config") for item in record.config.update]
        [cell] = [json.loads(item.value_json) for item in config if item.key == "compare"]
        updates = [record.summary.update for record in records if record.HasField("summary")]
        items = [item for update in updates for item in update]
        summary = {"/".join((one.key, *one.nested_key)): json.loads(one.value_json) for one in items}
        rounds = [record for record in records if record.HasField("history")]
        keys = {item.key or "/".join(item.nested_key) for record in rounds for item in record.history.item}
        assert {"fed/bits_per_parameter", "fed/val_acc"} & keys and len(rounds) >= 2
        run = next(record.run for record in records if record.HasField("run"))
        assert run.run_group == "small, secagg_server" and run.project == "fedq-compare"
        found[cell["mechanism"], cell["seed"]] = cell, summary
    assert len(found) == len(rows) == 8
    for row in rows:
        cell, summary = found[row["mechanism"], row["seed"]]
        for name in ("score", "bits_up", "bits_keys", "bits_down", "bits_both_ways"):
            assert summary[f"compare/{name}"] == row[name]
        assert cell["task"] == "small" and cell["delta"] == 1e-2 and cell["setting"]
        private = row["epsilon"] < math.inf
        assert cell["epsilon"] == (8.0 if private else None)
        assert summary.get("compare/epsilon_spent") == (row["epsilon_spent"] if private else None)
        assert cell["calibrated_by"] == describe_calibration(row["mechanism"])


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
    asked = on_small(["GaussianNoise"])
    monkeypatch.setattr("lightning_fedq.comparison.table.log_figures", stop)
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


def stop(*told: object) -> None:
    """Ctrl-C at the end of a run."""
    import wandb

    wandb.finish()
    raise KeyboardInterrupt
