import itertools
import math

import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import trim_mean

from lightning_fedq.algorithms.byzantine.robust import (
    breakdown_point,
    bucketing,
    centered_clipping,
    check_breakdown,
    finite_rows,
    geometric_median,
    krum,
    mean,
    median,
    multi_krum,
    trimmed_mean,
)

LIARS = 3
RULES = {
    "median": median,
    "trimmed_mean": lambda rows: trimmed_mean(rows, LIARS),
    "krum": lambda rows: krum(rows, LIARS),
    "multi_krum": lambda rows: multi_krum(rows, LIARS),
    "geometric_median": geometric_median,
    "centered_clipping": centered_clipping,
}
every_rule = pytest.mark.parametrize("rule", RULES)


def honest_rows(count=11, dim=6, seed=0):
    return 5.0 + torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


@every_rule
@pytest.mark.parametrize("liar", [math.nan, math.inf, -math.inf, 1e38, -1e30])
@pytest.mark.parametrize("liars", [1, LIARS])
def test_liars_do_not_break_a_rule(rule, liar, liars):
    """11 rows around 5 of which up to 3 lie: the result stays among the honest rows."""
    rows = honest_rows()
    rows[:liars] = liar
    result = RULES[rule](rows)
    honest = rows[liars:]
    assert torch.isfinite(result).all()
    spread = honest.max(0).values - honest.min(0).values
    assert (result >= honest.min(0).values - spread).all()
    assert (result <= honest.max(0).values + spread).all()


@every_rule
def test_one_poisoned_coordinate_is_a_whole_bad_row(rule):
    rows = honest_rows()
    rows[4, 2] = math.nan
    clean = rows.clone()
    clean[4] = 0.0
    torch.testing.assert_close(RULES[rule](rows), RULES[rule](clean))


@every_rule
def test_equal_rows_give_that_row(rule):
    row = torch.tensor([1.0, -2.0, 0.0])
    torch.testing.assert_close(RULES[rule](row.expand(9, 3)), row)


@every_rule
def test_order_does_not_matter(rule):
    rows = honest_rows()
    rows[0] = 1e6
    shuffled = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]
    torch.testing.assert_close(RULES[rule](shuffled), RULES[rule](rows))


@every_rule
def test_all_rows_bad_gives_zero(rule):
    assert torch.equal(RULES[rule](torch.full((9, 4), math.nan)), torch.zeros(4))


def test_the_mean_does_break():
    rows = honest_rows()
    rows[0] = 1e30
    assert mean(rows).abs().max() > 1e28
    assert mean(torch.tensor([[math.nan], [2.0]])).item() == 1.0


@pytest.mark.parametrize("count", [6, 7])
def test_median_and_trimmed_mean_against_outside_references(count):
    rows = honest_rows(count)
    torch.testing.assert_close(median(rows), rows.quantile(0.5, dim=0))
    expected = torch.from_numpy(trim_mean(rows.numpy(), 2 / count, axis=0))
    torch.testing.assert_close(trimmed_mean(rows, 2), expected)


def test_krum_by_hand():
    """Scores of every row, with Python loops, as in the paper."""
    rows, liars = honest_rows(9, 3, seed=2), 2
    scores = []
    for i in range(9):
        others = sorted(((rows[i] - rows[j]) ** 2).sum().item() for j in range(9) if j != i)
        scores.append(sum(others[: 9 - liars - 2]))
    best = sorted(range(9), key=scores.__getitem__)
    torch.testing.assert_close(krum(rows, liars), rows[best[0]])
    torch.testing.assert_close(multi_krum(rows, liars, 4), rows[best[:4]].mean(0))


def test_geometric_median_minimises_the_sum_of_distances():
    rows = honest_rows(8, 3, seed=3)
    objective = lambda p: sum(math.dist(p, row) for row in rows.tolist())  # noqa: E731
    fit = minimize(
        objective, rows.mean(0).tolist(), method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-12}
    )
    torch.testing.assert_close(geometric_median(rows).double(), torch.tensor(fit.x), atol=1e-4, rtol=0)


def test_centered_clipping_bounds_every_row():
    rows = torch.zeros(10, 2)
    rows[0] = torch.tensor([1e9, 0.0])
    torch.testing.assert_close(centered_clipping(rows, radius=1.0, iterations=1), torch.tensor([0.1, 0.0]))


def test_bucketing_spoils_one_bucket():
    rows = honest_rows(10)
    rows[7] = math.nan
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    buckets = bucketing(rows, order, 3)
    assert buckets.shape == (4, 6)
    spoilt = order.tolist().index(7) // 3
    for bucket, part in enumerate(order.split(3)):
        if bucket != spoilt:
            torch.testing.assert_close(buckets[bucket], rows[part].mean(0))


def test_breakdown_points_and_their_warning():
    assert [breakdown_point(rule, 11, 3) for rule in ("mean", "median", "trimmed_mean")] == [0, 5, 3]
    assert [breakdown_point(rule, 11, 9) for rule in ("krum", "multi_krum")] == [4, 4]
    assert [breakdown_point(rule, 10) for rule in ("geometric_median", "centered_clipping")] == [4, 4]
    check_breakdown("median", 11, 0.45)
    with pytest.warns(
        UserWarning, match="trimmed_mean of 10 rows tolerates 1 Byzantine clients, but 2 are expected"
    ):
        check_breakdown("trimmed_mean", 10, 0.2, num_byzantine=1)
    with pytest.raises(ValueError, match=r"fraction must be in \[0, 1\), got 1.0"):
        check_breakdown("median", 10, 1.0)


def test_finite_rows_are_left_alone():
    rows = honest_rows()
    assert finite_rows(rows) is rows


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: median(torch.zeros(3)), r"rows must be \(n, dim\)"),
        (lambda: median(torch.zeros(0, 3)), "n >= 1"),
        (lambda: trimmed_mean(torch.zeros(4, 1), 2), "n > 2 num_byzantine, got n = 4 and num_byzantine = 2"),
        (lambda: trimmed_mean(torch.zeros(4, 1), -1), "num_byzantine must be >= 0"),
        (lambda: krum(torch.zeros(4, 1), 2), "n >= num_byzantine \\+ 3"),
        (lambda: multi_krum(torch.zeros(5, 1), 1, 6), r"count must be in \[1, n = 5\]"),
        (lambda: centered_clipping(torch.zeros(4, 1), radius=0.0), "radius must be > 0"),
        (lambda: centered_clipping(torch.zeros(4, 1), iterations=0), "iterations must be >= 1"),
        (lambda: bucketing(torch.zeros(4, 1), torch.arange(4), 0), "size must be >= 1"),
        (lambda: bucketing(torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64), 2), "permutation of 4 rows"),
    ],
)
def test_arguments_are_checked(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_one_liar_can_not_move_the_median_out_of_the_honest_hull():
    """Exhaustive on a grid: 4 honest values, 1 liar anywhere."""
    for honest in itertools.combinations(range(5), 4):
        for liar in (-1e30, -1.0, 2.0, 1e30, math.nan):
            result = median(torch.tensor([[float(v)] for v in honest] + [[liar]])).item()
            assert min(honest) <= result <= max(honest)
