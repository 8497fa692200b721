"""`fedq compare --on mine.yaml`: cells are the configuration's own runs; what all of them cost is written."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fedq.cli import main
from lightning_fedq.comparison import processes
from lightning_fedq.reports.runs import read_rows
from tests.configurations import written
from tests.test_cli import configuration

ASKED = ["--mechanisms", "GaussianNoise", "--epsilon", "8", "--jobs", "1"]
ON = ["--on", "small.yaml", "--delta", "1e-2"]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of two rounds, masked, with keys from a seed, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return changed(configuration(tmp_path, num_clients=10), seed=3)


def changed(path: Path, **federated: Any) -> Path:
    """The file with other arguments of `Federated`."""
    config = yaml.safe_load(path.read_text())
    of = config["trainer"]["callbacks"][0]["init_args"]
    of.update({"secure_aggregation": {"simulation": "masked"}, **federated})
    of["mechanism"] = written("mechanisms.GaussianNoise", clip_norm=0.5, noise_multiplier=1.0)
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.filterwarnings("ignore:the keys come from a seed")
def test_cells_are_the_runs_that_fedq_fit_makes_of_their_configurations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Scores, bits and epsilon to the last digit; the person's module, data and clip."""
    assert main(["compare", *ASKED, *ON, "--seeds", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in ("8 runs", "7 more runs, 1 at a time: about ", "small: test_acc, against the server behind"):
        assert words in said
    assert "Keys come from a seed, so the runs are not private" in said
    assert not Path("runs/compare/all_runs.md").exists()
    with Path("runs/compare/table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and len({row["score"] for row in rows}) > 4
    for row in rows:
        if row["mechanism"] == "LaplaceNoise, by Opacus":
            continue
        name = row["mechanism"].replace(", ", "_").replace(" ", "_")
        cell = f"{name}/epsilon_{float(row['epsilon']):g}/seed_{row['seed']}"
        folder = Path("runs/compare/runs") / cell
        again = yaml.safe_load((folder / "config.yaml").read_text())
        assert again["seed_everything"] == int(row["seed"])
        again["trainer"]["callbacks"][-1]["init_args"].update(root="again", name=row["seed"])
        Path("again.yaml").write_text(yaml.safe_dump(again))
        before = set(Path().glob("again/*"))
        assert main(["fit", "again.yaml"]) == 0
        (made,) = set(Path().glob("again/*")) - before
        last, was = (read_rows(each / "metrics.csv")[-1]["val_acc"] for each in (made, folder))
        assert last == was
        summary = yaml.safe_load((made / "summary.json").read_text())
        assert summary["metrics"]["test_acc"] == float(row["score"])
        assert summary["bits_per_parameter"] == float(row["bits_up"]) + float(row["bits_keys"])
        assert ("clip_norm=0.5" in row["setting"]) == (row["mechanism"] != "FedAvg")
        spent = float(row["epsilon_spent"])
        assert spent <= 8.0 if row["mechanism"] != "FedAvg" else spent == math.inf


def test_with_secret_keys_the_page_of_all_runs_is_there_before_the_first(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that began counts although it never ended, and the last line says what all have cost."""
    changed(small, seed=None)
    train, pages = processes.train, []

    def watch(file: Path, settings: Any) -> str:
        pages.append(Path("runs/compare/all_runs.md").read_text())
        if len(pages) == 3:
            raise KeyboardInterrupt
        return train(file, settings)

    monkeypatch.setattr(processes, "train", watch)
    assert main(["compare", *ASKED, *ON, "--seeds", "2", "--bare"]) == 130
    assert "4 runs with the same clients compose" in pages[0]  # FedAvg's and those of the noise
    assert len(list(Path("runs/compare").rglob("*.done"))) == 2
    begun = Path("runs/compare/runs/GaussianNoise/epsilon_8/seed_0")
    begun.mkdir(parents=True)  # as a killed run leaves it
    (begun / "config.yaml").write_text("of a run that never ended")
    assert main(["compare", *ASKED, *ON, "--seeds", "2", "--bare"]) == 0
    said = capsys.readouterr().out.strip().splitlines()
    assert "3 runs with the same clients. Against" in said[-1] and "at delta 0.01" in said[-1]
    assert "The 2 runs of FedAvg give no privacy" in said[-1]
    assert len(list(Path("runs/compare").rglob("*.done"))) == 4
    assert begun.with_name("seed_0-2").is_dir()
    page = Path("runs/compare/all_runs.md").read_text()
    one = float(next(line for line in said[-1].split() if line.replace(".", "").isdigit() and "." in line))
    assert 16.0 < one < 24.0 and f"| {one:g} |" in page
