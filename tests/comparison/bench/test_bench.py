"""Tasks of the bench, the results that ship, and the tool that writes its page and checks them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lightning_fedq.comparison.bench.cells import Cell, Row, append, read, reference, score_of, word_of
from lightning_fedq.comparison.bench.samples import Samples
from lightning_fedq.comparison.bench.tasks import MeanEstimation, Training, scaled, tasks
from lightning_fedq.comparison.comparison import Comparison
from lightning_fedq.mechanisms import DistributedDiscreteGaussian, RotatedCoins
from lightning_fedq.mechanisms.interface import Adversary
from tests.loaded import loaded

SMALL = MeanEstimation("small", 60, 1, "unit", 64)
ROOT = Path(__file__).parents[3]


def rows_of(
    folder: Path, names: Sequence[str], epsilon: float = 4.0, seeds: int = 1, task: MeanEstimation = SMALL
) -> list[Row]:
    """Rows of mechanisms on a small task, FedAvg's left out."""
    asked = Comparison.of(task, names, "secagg_server", [epsilon], seeds, baselines=False)
    return [row for row in asked.run(folder) if row.cell.mechanism != "FedAvg"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """`benchmarks/bench.py`, which is no package."""
    return loaded("benchmarks/bench.py")


@pytest.mark.parametrize("kind", ["unit", "sparse", "heavy"])
def test_vectors_have_norm_one_and_are_alike_as_planned(kind: str) -> None:
    task = MeanEstimation("t", 400, 1, kind, 1024)  # type: ignore[arg-type]
    rows = task._vectors(tuple(range(400)), 3)
    assert rows.norm(dim=1).sub(1).abs().max() < 1e-5
    assert 0.2 < float(rows.mean(0).square().sum()) < 0.4
    assert (rows != 0).float().mean() < 0.05 or kind != "sparse"


def test_the_error_is_the_planned_one_where_the_plan_is_exact(tmp_path: Path) -> None:
    """Gaussian noise: R of the run and R of the plan, 64 coordinates, 60 clients; three runs."""
    for row in rows_of(tmp_path, ["GaussianNoise"], seeds=3):
        assert row.result is not None and row.result.planned is not None
        assert row.result.seen == row.result.score
        assert row.result.score == pytest.approx(row.result.planned, rel=0.8)


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


TRAININGS = ("digits", "mnist-linear", "mnist-cnn", "cifar10-cnn", "mnist-linear-10k", "text-lora")


@pytest.mark.parametrize(
    ("task", "epsilon"),
    [(task, e) for task in TRAININGS for e in (2.0, 4.0, 8.0) if (task, e) != ("mnist-linear", 4.0)],
)
def test_the_first_choice_of_the_readme_follows_from_the_table(
    task: str, epsilon: float, tool: ModuleType
) -> None:
    """Behind masks, in a training: the fewest bits within two points of the best."""
    groups = tool.grouped(reference())
    rows = {k[1]: v for k, v in groups.items() if (k[0], k[2], k[3]) == (task, "secagg_server", epsilon)}
    scores = {name: score[0] for name, group in rows.items() if (score := score_of(group)) is not None}
    near = [name for name, score in scores.items() if score >= max(scores.values()) - 0.02]
    assert min(near, key=lambda name: rows[name][0].result.bits).startswith("RotatedCoins")
    line = "| `RotatedCoins` | private sums behind secure aggregation: the first choice |"
    assert line in (ROOT / "README.md").read_text()


def test_the_reference_has_todays_names() -> None:
    rows = reference()
    assert {row.cell.adversary for row in rows} <= {who.name.lower() for who in Adversary}
    assert not any(who.name in row.reason for who in Adversary for row in rows if "_" in who.name)


def test_a_training_is_tuned_over_rates_and_clips_to_twice_nothing() -> None:
    task = Training("t", 479, 20)
    assert [t.rate for t in task.tunings(RotatedCoins(1.0))] == [0.1, 0.25, 0.5, 1.0]
    assert task.dim == 4060
    half = scaled(DistributedDiscreteGaussian(1.0, 0.5, 0.01), 0.5)
    assert (half.clip_norm, half.local_sigma, half.granularity) == (0.5, 0.25, 0.005)  # type: ignore[attr-defined]


def test_images_need_a_folder(tmp_path: Path) -> None:
    assert "mnist-linear" not in tasks(None) and "mnist-linear" in tasks(tmp_path)


def test_the_reference_that_ships_can_be_read() -> None:
    rows = reference()
    assert len(rows) > 100
    assert len({row.cell for row in rows}) == len(rows)
    assert {row.cell.task for row in rows} >= {"mean-unit-1024", "digits"}
    assert Cell("digits", "RotatedCoins", "secagg_server", 1.0, 0) in {row.cell for row in rows}


def test_tables_go_into_the_marked_part_of_a_page(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of two seeds, the better mechanism first. What stands around stays, a rerun changes nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tool, "every_task", lambda data: {"small": SMALL})
    rows = rows_of(tmp_path / "own", ["LDPQ", "GaussianNoise"], seeds=2)
    page = Path("page.md")
    page.write_text(f"before\n\n{tool.BEGIN}\nold\n{tool.END}\n\nafter\n")
    asked = ["page.md", "--cells", "own", "--tasks", "small"]
    assert tool.main(asked) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert '<img src="page_bench.png"' in text and 'srcset="page_bench_dark.png"' in text
    assert min(Path(name).stat().st_size for name in ("page_bench_dark.png", "page_bench.png")) > 5000
    score = word_of(score_of(rows[2:]))
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[0] == "| mechanism | bits a parameter at ε 4 | ε 4 |"
    assert lines[2].startswith("| GaussianNoise | ") and lines[2].endswith(f" | {score} |")
    assert lines[3].startswith("| LDPQ | ")
    assert tool.main(asked) == 0
    assert page.read_text() == text
    page.write_text("mine\n")
    with pytest.raises(ValueError, match=r"page\.md has no part to renew"):
        tool.main(asked)
    with pytest.raises(ValueError, match="there is no result to write"):
        tool.main([*asked, "--adversaries", "outsider"])
    assert page.read_text() == "mine\n"


def test_who_has_no_result_at_the_largest_epsilon_comes_last(tool: ModuleType, tmp_path: Path) -> None:
    cells = [("GaussianNoise", 2.0), ("LaplaceNoise", 4.0)]
    rows = [row for name, epsilon in cells for row in rows_of(tmp_path / name, [name], epsilon)]
    assert score_of(rows[:1]) < score_of(rows[1:])  # type: ignore[operator]
    found = tool.ranked(tool.grouped(rows), "small", "secagg_server", True)
    assert [name for name, _ in found] == ["LaplaceNoise", "GaussianNoise"]


def test_check_says_whether_reference_cells_are_met(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "every_task", lambda data: {"small": SMALL})
    rows = rows_of(tmp_path, ["LDPQ"], seeds=2)
    monkeypatch.setattr(tool, "reference", lambda: rows)
    assert tool.main(["--check", "2"]) == 0
    assert "2 of 2 cells are met bit for bit" in capsys.readouterr().out
    monkeypatch.setattr(
        tool, "reference", lambda: [rows[0], Row(rows[1].cell, rows[0].result, rows[1].tuning)]
    )
    assert tool.main(["--check", "2"]) == 1
    assert "1 of 2 cells are met bit for bit" in capsys.readouterr().out


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    """And one whose last line was cut off on its way, without that line, which the next one replaces."""
    rows, table = rows_of(tmp_path / "own", ["GaussianNoise"], seeds=2), tmp_path / "t.csv"
    append(table, rows[:1])
    append(table, rows[1:])
    whole = table.read_text()
    assert read(table) == rows
    for length in (len(whole) - 1, len(whole) - 30):
        table.write_text(whole[:length])
        assert read(table) == rows[:1]
        append(table, rows[1:])
        assert table.read_text() == whole
    table.write_text(whole[:20])
    assert read(table) == []
    for text in ("a,b\n1,2\n", whole.replace(str(rows[0].cell.epsilon), "much"), "mine"):
        table.write_text(text)
        with pytest.raises(ValueError, match="is no table of `fedq compare`; name another folder"):
            read(table)
        assert table.read_text() == text


def test_the_page_that_chooses_takes_the_bits_of_the_epsilon_that_it_names():
    """It had the score at epsilon 8 beside the bits at 4."""
    page = (ROOT / "docs" / "guides" / "choose_a_mechanism.md").read_text()
    known = {
        (r.cell.mechanism, r.cell.seed): r.result
        for r in reference()
        if r.cell.epsilon == 8.0
        and r.result
        and (r.cell.task, r.cell.adversary) == ("digits", "secagg_server")
    }
    for name, before, bits in (
        ("RotatedCoins", "digits, 479 clients, epsilon 8: ", "{:.1f} bits"),
        ("GaussianNoise", "`GaussianNoise` ", "{:.0f}"),
    ):
        found = [result for (of, _), result in known.items() if of == name]
        score, deviation = statistics.mean(r.score for r in found), statistics.stdev(r.score for r in found)
        assert f"{before}{score:.3f} ± {deviation:.1g} at {bits.format(found[0].bits)}" in page
