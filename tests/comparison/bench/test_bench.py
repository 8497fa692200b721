"""`fedq bench`: equal epsilon, one rule of tuning, resumption, and the same cells again bit for bit."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from lightning_fedq.cli import main
from lightning_fedq.commands.plan import candidates
from lightning_fedq.comparison.bench import markdown, tasks as tasks_module
from lightning_fedq.comparison.bench.cells import Cell, append, fill, grouped, read, rerun, score_of, word_of
from lightning_fedq.comparison.bench.samples import Samples
from lightning_fedq.comparison.bench.tasks import (
    KAPPA,
    RANGES,
    MeanEstimation,
    Training,
    Tuning,
    scaled,
    tasks,
)
from lightning_fedq.comparison.commands import bench
from lightning_fedq.mechanisms import DistributedDiscreteGaussian, RotatedCoins
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.planning import Option

SMALL = MeanEstimation("small", 60, 1, "unit", 64)
SECAGG = Adversary.SECAGG_SERVER


class Counts(MeanEstimation):
    """Says how often it ran."""

    runs: ClassVar[list[tuple[str, Tuning, int]]] = []

    def run(self, option: Option, target: object, tuning: Tuning, seed: int) -> tasks_module.Result:
        self.runs.append((option.name, tuning, seed))
        return super().run(option, target, tuning, seed)  # type: ignore[arg-type]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, Tuning, int]]:
    """A bench of one small task, in an empty folder."""
    Counts.runs = []
    task = Counts("small", 60, 1, "unit", 64)
    monkeypatch.setattr(bench, "every_task", lambda data: {"small": task})
    monkeypatch.setattr(bench, "reference", list)
    monkeypatch.chdir(tmp_path)
    return Counts.runs


QUICK = ["--tasks", "small", "--adversaries", "secagg_server", "--epsilons", "4", "--seeds", "2"]


@pytest.mark.parametrize("kind", ["unit", "sparse", "heavy"])
def test_vectors_have_norm_one_and_are_alike_as_planned(kind: str) -> None:
    task = MeanEstimation("t", 400, 1, kind, 1024)  # type: ignore[arg-type]
    rows = task._vectors(tuple(range(400)), 3)
    assert rows.norm(dim=1).sub(1).abs().max() < 1e-5
    assert 0.2 < float(rows.mean(0).square().sum()) < 0.4
    assert (rows != 0).float().mean() < 0.05 or kind != "sparse"


def test_the_error_is_the_planned_one_where_the_plan_is_exact() -> None:
    """Gaussian noise: R of the run and R of the plan, 64 coordinates, 60 clients; three runs."""
    rows = list(fill(SMALL, "GaussianNoise", SECAGG, 4.0, range(3)))
    for row in rows:
        assert row.result is not None and row.result.planned is not None
        assert row.result.seen == row.result.score
        assert row.result.score == pytest.approx(row.result.planned, rel=0.8)


def test_ranges_are_tuned_with_another_seed_and_only_where_coordinates_are_clipped() -> None:
    task = Counts("small", 60, 1, "unit", 64)
    Counts.runs = []
    list(fill(task, "LDPQ", SECAGG, 4.0, [0]))
    assert [(tuning.range, seed) for _, tuning, seed in Counts.runs[:3]] == [(r, 1000) for r in RANGES]
    assert len(Counts.runs) == 4 and Counts.runs[3][2] == 0
    Counts.runs = []
    list(fill(task, "GaussianNoise", SECAGG, 4.0, [0]))
    assert [(tuning.range, seed) for _, tuning, seed in Counts.runs] == [(KAPPA, 0)]


def test_a_target_that_cant_be_met_is_a_row_with_its_reason() -> None:
    [row] = fill(SMALL, "CorBin", SECAGG, 4.0, [0])
    assert row.result is None and "can't meet epsilon 4" in row.reason


def test_the_same_cell_again_is_the_same_bit_for_bit() -> None:
    [row] = fill(SMALL, "LDPQ", SECAGG, 4.0, [5])
    again = rerun(row, SMALL)
    assert row.result is not None and again.result is not None
    assert (again.result.score, again.result.bits) == (row.result.score, row.result.bits)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [*fill(SMALL, "LDPQ", SECAGG, 4.0, [0]), *fill(SMALL, "CorBin", SECAGG, 4.0, [0])]
    append(tmp_path / "t.csv", rows[:1])
    append(tmp_path / "t.csv", rows[1:])
    assert read(tmp_path / "t.csv") == rows
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="is no table of `fedq bench`"):
        read(tmp_path / "other.csv")


def test_it_goes_on_where_it_stopped(small: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["CPA", "--tasks", "small", "--adversaries", "server", "--epsilons", "4", "--seeds"]
    assert main(["bench", *asked, "2"]) == 0
    count = len(small)
    assert count >= 4  # two settings of the class, two seeds
    assert main(["bench", *asked, "2"]) == 0
    assert len(small) == count
    assert main(["bench", *asked, "3"]) == 0
    assert [seed for *_, seed in small[count:] if seed < 1000] == [2, 2]  # type: ignore[misc]
    printed = capsys.readouterr().out
    assert "small, against server" in printed and "CPA, some blocks" in printed
    rows = json.loads(Path("bench/bench.json").read_text())["rows"]
    assert len(rows) == 6 and {row["cell"]["seed"] for row in rows} == {0, 1, 2}
    page = Path("bench/bench.html").read_text()
    assert "<svg" in page and "http" not in re.sub(r'xmlns="[^"]*"', "", page)
    mean, _ = score_of([row for row in read(Path("bench/bench.csv")) if row.cell.mechanism == "CPA"])  # type: ignore[misc]
    assert word_of((mean, math.nan)) in page, (word_of((mean, math.nan)), f"{mean:.3f}" in page)


def test_an_estimate_that_is_worse_than_none_is_marked(
    small: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    """One bit of every coordinate at epsilon 0.1 towards the server: its error is far above 1."""
    noisy = ["--epsilons", "0.1", "--tasks", "small", "--seeds", "1", "--adversaries", "server"]
    assert main(["bench", "LDPQ", *noisy]) == 0
    score, _ = score_of(read(Path("bench/bench.csv")))  # type: ignore[misc]
    assert score > 1.0
    for text in (capsys.readouterr().out, Path("bench/bench.html").read_text()):
        assert "* worse than the estimate 0, whose error is 1" in text
    assert word_of((0.999, math.nan), MeanEstimation("mean", 60, 1)) == "0.999"


def test_a_quick_run_takes_ranges_from_the_reference_and_searches_for_others(
    small: list[tuple[str, Tuning, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has the same score, to the bit, as the rule's own search."""
    task = Counts("small", 60, 1, "unit", 64)
    searched = [row for name in ("LDPQ", "SignRR") for row in fill(task, name, SECAGG, 4.0, [0])]
    monkeypatch.setattr(bench, "reference", lambda: searched[:1])
    small.clear()
    assert main(["bench", "LDPQ", "SignRR", "--quick", *QUICK[:-2]]) == 0
    assert [seed for name, _, seed in small if name == "LDPQ"] == [0]
    assert [seed for name, _, seed in small if name == "SignRR"] == [1000, 1000, 1000, 0]
    found = {row.cell.mechanism: row for row in read(Path("bench/bench.csv"))}
    for row in searched:
        again = found[row.cell.mechanism]
        assert again.result is not None and row.result is not None
        assert (again.result.score, again.tuning) == (row.result.score, row.tuning)
    assert "this quick run searched only" in Path("bench/bench.html").read_text()


def test_fedavg_is_said_in_the_heading_and_has_no_row(
    small: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainings run it unless mechanisms are named; what it reaches has no epsilon."""
    task = Training("small", 30, 2, samples=4, rates=(0.3,))
    monkeypatch.setattr(bench, "every_task", lambda data: {"small": task})
    monkeypatch.setattr(bench, "candidates", lambda dim: {"GaussianNoise": candidates(dim)["GaussianNoise"]})
    monkeypatch.setattr(tasks_module, "DELTA", 1e-3)
    assert main(["bench", *QUICK[:-2], "--seeds", "1"]) == 0
    [plain, _] = read(Path("bench/bench.csv"))
    assert plain.cell.mechanism == "FedAvg" and plain.cell.epsilon == math.inf and plain.result is not None
    assert plain.result.bits == 32.0 and plain.tuning.rate in (0.01, 0.03, 0.1, 0.3)
    words = f"{word_of((plain.result.score, math.nan))} without privacy, by FedAvg"
    assert words in " ".join(capsys.readouterr().out.split())
    assert words in Path("bench/bench.html").read_text()
    assert words in markdown.tables(read(Path("bench/bench.csv")), {"small": task})
    assert "| FedAvg" not in markdown.tables(read(Path("bench/bench.csv")), {"small": task})


def test_networks_of_the_tasks() -> None:
    """GroupNorm behind each convolution; of the language model only the adapter trains."""
    normed = Training("t", 10, 1, "cifar10", "cnn_gn")._network(0)
    kinds = [type(layer).__name__ for layer in normed]
    assert kinds[:4] == ["Conv2d", "GroupNorm", "ReLU", "MaxPool2d"] and kinds.count("GroupNorm") == 2
    task = tasks(None)["text-lora"]
    assert isinstance(task, Training) and task.dim == 8 * (256 + 128) + 8 * (128 + 128)
    one, other = task._network(0), task._network(1)
    trained = {name for name, p in one.named_parameters() if p.requires_grad}
    assert trained == {f"{place}.{part}.weight" for place in (2, 4) for part in ("down", "up")}
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs) == ("down" not in name)
    samples = Samples("text", "", 16, 160, 0)
    samples.setup("fit")
    inputs, labels = samples.train_set[:]  # type: ignore[index]
    assert len(labels) == 160 and inputs.shape == (160, 16)
    assert all(chr(code).isalpha() for code in labels.tolist())
    with torch.no_grad():
        guessed = one(inputs).argmax(1)
    assert (guessed == labels).float().mean() < 0.05  # it has not seen upper and lower case exchanged


def test_a_mechanism_of_ones_own_stands_among_the_reference(
    small: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = list(fill(Counts("small", 60, 1, "unit", 64), "LDPQ", SECAGG, 4.0, [0, 1]))
    monkeypatch.setattr(bench, "reference", lambda: others)
    small.clear()
    assert main(["bench", "lightning_fedq.mechanisms.GaussianNoise", *QUICK]) == 0
    assert {name for name, *_ in small} == {"GaussianNoise"}  # type: ignore[misc]
    printed = capsys.readouterr().out
    assert "LDPQ" in printed and "GaussianNoise" in printed


TRAININGS = ("digits", "mnist-linear", "mnist-cnn", "cifar10-cnn", "mnist-linear-10k", "text-lora")


@pytest.mark.parametrize(
    ("task", "epsilon"),
    [(task, e) for task in TRAININGS for e in (2.0, 4.0, 8.0) if (task, e) != ("mnist-linear", 4.0)],
)
def test_the_first_choice_of_the_readme_follows_from_the_table(task: str, epsilon: float) -> None:
    """Behind masks, in a training: the fewest bits within two points of the best."""
    groups = grouped(bench.reference())
    rows = {k[1]: v for k, v in groups.items() if (k[0], k[2], k[3]) == (task, "secagg_server", epsilon)}
    scores = {name: score[0] for name, group in rows.items() if (score := score_of(group)) is not None}
    near = [name for name, score in scores.items() if score >= max(scores.values()) - 0.02]
    assert min(near, key=lambda name: rows[name][0].result.bits).startswith("RotatedCoins")  # type: ignore[union-attr]
    line = "| `RotatedCoins` | private sums behind secure aggregation: the first choice |"
    assert line in (Path(__file__).parents[3] / "README.md").read_text()


def test_the_reference_has_todays_names() -> None:
    rows = bench.reference()
    assert {row.cell.adversary for row in rows} <= {who.name.lower() for who in Adversary}
    assert not any(who.name in row.reason for who in Adversary for row in rows if "_" in who.name)


def test_why_ones_own_mechanism_is_in_no_table_is_said(
    small: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    """CPA's messages are no sum."""
    assert main(["bench", "CPA", *QUICK]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "CPA is not in this table: CPA is not homomorphic" in printed
    assert "leave out secure_aggregation or choose a homomorphic mechanism" in printed


def test_check_says_whether_reference_cells_are_met(
    small: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list(fill(Counts("small", 60, 1, "unit", 64), "LDPQ", SECAGG, 4.0, [0, 1]))
    monkeypatch.setattr(bench, "reference", lambda: rows)
    assert main(["bench", "--check", "2"]) == 0
    assert "2 of 2 cells are met bit for bit" in capsys.readouterr().out
    wrong = [rows[0], rows[1].__class__(rows[1].cell, rows[0].result, rows[1].tuning)]
    monkeypatch.setattr(bench, "reference", lambda: wrong)
    assert main(["bench", "--check", "2"]) == 1
    assert "1 of 2 cells are met bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "imagenet"], "there is no task imagenet; there are"),
        (["--tasks", "mnist-linear"], "need --data FOLDER"),
        (["NoSuchMechanism"], "there is no mechanism NoSuchMechanism"),
        (["FedAvg"], "no target can set FedAvg"),
        (["--adversaries", "everybody"], "adversary must be one of"),
    ],
)
def test_wrong_arguments_are_answered_in_a_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_training_is_tuned_over_rates_and_clips_to_twice_nothing() -> None:
    task = Training("t", 479, 20)
    assert [t.rate for t in task.tunings(RotatedCoins(1.0))] == [0.1, 0.25, 0.5, 1.0]
    assert task.dim == 4060
    half = scaled(DistributedDiscreteGaussian(1.0, 0.5, 0.01), 0.5)
    assert (half.clip_norm, half.local_sigma, half.granularity) == (0.5, 0.25, 0.005)  # type: ignore[attr-defined]


def test_images_need_a_folder(tmp_path: Path) -> None:
    assert "mnist-linear" not in tasks(None) and "mnist-linear" in tasks(tmp_path)


def test_the_reference_that_ships_can_be_read() -> None:
    rows = bench.reference()
    assert len(rows) > 100
    assert len({row.cell for row in rows}) == len(rows)
    assert {row.cell.task for row in rows} >= {"mean-unit-1024", "digits"}
    assert Cell("digits", "RotatedCoins", "secagg_server", 1.0, 0) in {row.cell for row in rows}


def test_tables_go_into_the_marked_part_of_a_page(small: object, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of two seeds, the better mechanism first. What stands around stays, a rerun changes nothing."""
    rows = [row for name in ("LDPQ", "GaussianNoise") for row in fill(SMALL, name, SECAGG, 4.0, range(2))]
    append(Path("bench/bench.csv"), rows)
    page = Path("page.md")
    page.write_text(f"before\n\n{markdown.BEGIN}\nold\n{markdown.END}\n\nafter\n")
    assert main(["bench", "--tables", "page.md"]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert '<img src="page_bench.png"' in text and 'srcset="page_bench_dark.png"' in text
    assert Path("page_bench_dark.png").stat().st_size > 5000
    assert Path("page_bench.png").stat().st_size > 5000
    score = word_of(score_of(rows[2:]))
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[0] == "| mechanism | bits a parameter | ε 4 |"
    assert lines[2].startswith("| GaussianNoise | ")
    assert lines[2].endswith(f" | {score} |")
    assert lines[3].startswith("| LDPQ | ")
    assert main(["bench", "--tables", "page.md"]) == 0
    assert page.read_text() == text


def test_a_page_without_a_marked_part_is_not_overwritten(
    small: object, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path("page.md")
    page.write_text("mine\n")
    assert main(["bench", "--tables", "page.md"]) == 2
    assert "there is no result to write" in capsys.readouterr().err
    append(Path("bench/bench.csv"), fill(SMALL, "LDPQ", SECAGG, 4.0, range(1)))
    assert main(["bench", "--tables", "page.md"]) == 2
    assert "page.md has no part to renew" in capsys.readouterr().err
    assert page.read_text() == "mine\n"


def test_a_page_can_have_some_tasks_adversaries_and_epsilons(small: object) -> None:
    for epsilon in (4.0, 8.0):
        append(Path("bench/bench.csv"), fill(SMALL, "LDPQ", SECAGG, epsilon, range(1)))
    assert main(["bench", "--tables", "page.md", "--tasks", "small", "--epsilons", "8"]) == 0
    assert "| ε 8 |" in Path("page.md").read_text()
    assert "ε 4" not in Path("page.md").read_text()
    assert main(["bench", "--tables", "page.md", "--adversaries", "outsider"]) == 2


def test_who_has_no_result_at_the_largest_epsilon_comes_last() -> None:
    cells = [("GaussianNoise", 2.0), ("LaplaceNoise", 4.0)]
    rows = [row for name, epsilon in cells for row in fill(SMALL, name, SECAGG, epsilon, range(1))]
    assert score_of(rows[:1]) < score_of(rows[1:])  # type: ignore[operator]
    found = markdown.ranked(grouped(rows), "small", "secagg_server", True)
    assert [name for name, _ in found] == ["LaplaceNoise", "GaussianNoise"]
