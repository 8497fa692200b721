"""The benchmark of means: its tasks, its table, and the tool that writes a page of it."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lightning_fedq.commands.resolver import resolved
from lightning_fedq.mechanisms.interface import Adversary
from tests.loaded import loaded

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # as a script there has it
import mean_estimation as means  # noqa: E402

SMALL = means.MeanEstimation("small", 60, "unit", 64)


def rows_of(name: str, epsilon: float = 4.0, seeds: int = 1) -> list[means.Row]:
    """Rows of a mechanism on a small task."""
    mechanism = resolved([name], SMALL.dim).rows[name]
    return means.rows_of(SMALL, name, mechanism, Adversary.SECAGG_SERVER, epsilon, range(seeds))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """`benchmarks/bench.py`, which is no package."""
    return loaded("benchmarks/bench.py")


@pytest.mark.parametrize("kind", ["unit", "sparse", "heavy"])
def test_vectors_have_norm_one_and_are_alike_as_planned(kind: str) -> None:
    task = means.MeanEstimation("t", 400, kind, 1024)  # type: ignore[arg-type]
    rows = task._vectors(tuple(range(400)), 3)
    assert rows.norm(dim=1).sub(1).abs().max() < 1e-5
    assert 0.2 < float(rows.mean(0).square().sum()) < 0.4
    assert (rows != 0).float().mean() < 0.05 or kind != "sparse"


def test_the_error_is_the_planned_one_where_the_plan_is_exact() -> None:
    """Gaussian noise: R of the run and R of the plan, 64 coordinates, 60 clients; three runs."""
    for row in rows_of("GaussianNoise", seeds=3):
        assert row.result is not None and row.result.planned is not None
        assert row.result.seen == row.result.score
        assert row.result.score == pytest.approx(row.result.planned, rel=0.8)


def test_the_range_is_the_best_one_of_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, run = [], means.MeanEstimation.run

    def watch(
        self: means.MeanEstimation, option: object, masked: bool, span: float, seed: int
    ) -> means.Result:
        found = run(self, option, masked, span, seed)  # type: ignore[arg-type]
        tried.append((found.validation, span, seed))
        return found

    monkeypatch.setattr(means.MeanEstimation, "run", watch)
    [row] = rows_of("LDPQ")
    assert [seed for _, _, seed in tried] == [1000] * 3 + [0] and row.range == min(tried[:3])[1]
    tried.clear()
    rows_of("GaussianNoise")
    assert [seed for _, _, seed in tried] == [0]


TRAININGS = ("digits", "mnist-linear", "mnist-cnn", "cifar10-cnn", "mnist-linear-10k", "text-lora")


@pytest.mark.parametrize(
    ("task", "epsilon"),
    [(task, e) for task in TRAININGS for e in (2.0, 4.0, 8.0) if (task, e) != ("mnist-linear", 4.0)],
)
def test_the_first_choice_of_the_guide_follows_from_the_table(
    task: str, epsilon: float, tool: ModuleType
) -> None:
    """Behind masks, in a training: the fewest bits within two points of the best."""
    groups = tool.grouped(means.reference())
    rows = {k[1]: v for k, v in groups.items() if (k[0], k[2], k[3]) == (task, "secagg_server", epsilon)}
    scores = {name: score[0] for name, group in rows.items() if (score := means.score_of(group)) is not None}
    near = [name for name, score in scores.items() if score >= max(scores.values()) - 0.02]
    assert min(near, key=lambda name: rows[name][0].result.bits).startswith("RotatedCoins")
    line = "| client-level privacy, secure aggregation, few bits | `RotatedCoins`;"
    assert line in (ROOT / "docs" / "guides" / "choose_a_mechanism.md").read_text()


def test_the_reference_has_every_cell_once_by_todays_names() -> None:
    rows = means.reference()
    assert len({row.cell for row in rows}) == len(rows) > 100
    assert {row.cell.task for row in rows} >= {"mean-unit-1024", "digits"}
    assert means.Cell("digits", "RotatedCoins", "secagg_server", 1.0, 0) in {row.cell for row in rows}
    assert {row.cell.adversary for row in rows} <= {who.name.lower() for who in Adversary}
    assert not any(who.name in row.reason for who in Adversary for row in rows if "_" in who.name)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [*rows_of("GaussianNoise", seeds=2), *rows_of("CPA")]
    assert rows[-1].result is None and "not homomorphic" in rows[-1].reason
    means.write(tmp_path / "t.csv", rows)
    assert means.read(tmp_path / "t.csv") == rows


def test_tables_go_into_the_marked_part_of_a_page(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of two seeds, the better mechanism first. What stands around stays, a rerun changes nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tool, "KNOWN", {"small": SMALL})
    rows = [row for name in ("LDPQ", "GaussianNoise") for row in rows_of(name, seeds=2)]
    means.write(Path("own.csv"), rows)
    page = Path("page.md")
    page.write_text(f"before\n\n{tool.BEGIN}\nold\n{tool.END}\n\nafter\n")
    asked = ["page.md", "--cells", "own.csv", "--tasks", "small"]
    assert tool.main(asked) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert '<img src="page_bench.png"' in text and 'srcset="page_bench_dark.png"' in text
    assert min(Path(name).stat().st_size for name in ("page_bench_dark.png", "page_bench.png")) > 5000
    score = means.word_of(means.score_of(rows[2:]))
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


def test_who_has_no_result_at_the_largest_epsilon_comes_last(tool: ModuleType) -> None:
    cells = [("GaussianNoise", 2.0), ("LaplaceNoise", 4.0)]
    rows = [row for name, epsilon in cells for row in rows_of(name, epsilon)]
    assert means.score_of(rows[:1]) < means.score_of(rows[1:])  # type: ignore[operator]
    found = tool.ranked(tool.grouped(rows), "small", "secagg_server", True)
    assert [name for name, _ in found] == ["LaplaceNoise", "GaussianNoise"]


def test_check_says_whether_reference_cells_are_met(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "KNOWN", {"small": SMALL})
    rows = rows_of("LDPQ", seeds=2)
    monkeypatch.setattr(tool, "reference", lambda: rows)
    assert tool.main(["--check", "2"]) == 0
    assert "2 of 2 cells are met bit for bit" in capsys.readouterr().out
    monkeypatch.setattr(tool, "reference", lambda: [rows[0], rows[1]._replace(result=rows[0].result)])
    assert tool.main(["--check", "2"]) == 1
    assert "1 of 2 cells are met bit for bit" in capsys.readouterr().out


def test_the_page_that_chooses_takes_the_bits_of_the_epsilon_that_it_names():
    """It had the score at epsilon 8 beside the bits at 4."""
    page = (ROOT / "docs" / "guides" / "choose_a_mechanism.md").read_text()
    rows = [row for row in means.reference() if row.result and row.cell.epsilon == 8.0]
    asked = "digits", "secagg_server"
    for name, before, bits in (
        ("RotatedCoins", "digits, 479 clients, epsilon 8: ", "{:.1f} bits"),
        ("GaussianNoise", "`GaussianNoise` ", "{:.0f}"),
    ):
        found = [r.result for r in rows if r.cell[:3] == (asked[0], name, asked[1])]
        score, deviation = statistics.mean(r.score for r in found), statistics.stdev(r.score for r in found)
        assert f"{before}{score:.3f} ± {deviation:.1g} at {bits.format(found[0].bits)}" in page


def test_a_table_of_fedq_compare_is_read(tool: ModuleType, tmp_path: Path) -> None:
    """Its columns by name; a cell without a run has its reason."""
    lines = """task,mechanism,adversary,epsilon,seed,score,bits_up,bits_keys,R,setting,seconds,reason
digits,A,secagg_server,8.0,0,0.5,2.0,0.5,0.1,A(),1.0,
digits,B,secagg_server,8.0,0,,,,,,,no
"""
    (tmp_path / "table.csv").write_text(lines)
    made, none = tool.read_table(tmp_path / "table.csv")
    assert (made.result.score, made.result.bits, made.result.all_bits) == (0.5, 2.0, 2.5)
    assert none.result is None and none.reason == "no"
