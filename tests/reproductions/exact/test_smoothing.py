import math

import numpy as np
import pytest
import torch
from scipy import stats

from reproductions.exact.accelerated_smoothing import accelerated_smoothing, compressed_copies
from reproductions.exact.smoothing import AbsoluteRegression, exact_smoothing


def test_closed_forms_agree_with_autograd_and_the_limit():
    problem = AbsoluteRegression(30, 4, 1)
    point = torch.randn(4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert problem.smoothed(point, 1e-9) == pytest.approx(problem.value(point), rel=1e-8)
    step = torch.zeros(4, dtype=torch.float64)
    for j in range(4):
        step[j] = 1e-5
        slope = (problem.smoothed(point + step, 0.3) - problem.smoothed(point - step, 0.3)) / 2e-5
        assert problem.smoothed_gradient(point, 0.3)[j].item() == pytest.approx(slope, rel=1e-5)
        step[j] = 0.0


def test_the_minimum_is_one():
    problem = AbsoluteRegression(40, 3, 0)
    best, generator = problem.minimum(), torch.Generator().manual_seed(3)
    # the least value of 2,000 random points is above it
    points = 3.0 * torch.randn(2000, 3, generator=generator, dtype=torch.float64)
    assert min(problem.value(point) for point in points) >= best
    assert best > 0.0


def test_quickly(tmp_path):
    result = exact_smoothing((0.5,), ((50, 5), (200, 10)), 200, out=str(tmp_path / "smoothing"))
    claims = result["claims"]
    # the closed form is met within 4.5 standard errors: false alarm 7e-6, a fixed seed
    assert [claim["held"] for claim in claims[:3]] == [True, True, True]
    # ten copies cost more than one float does, and a fixed s has a floor of 0.0387 (section 9.5)
    assert [claim["held"] for claim in claims[3:]] == [False, False]
    assert result["rows"][1]["gap"] > 0.0


def test_steps_are_checked():
    with pytest.raises(ValueError, match=r"steps must be >= 2, got 1"):
        exact_smoothing(steps=1)


# ---- accelerated smoothing -----------------------------------------------------------------------------
RNG = np.random.default_rng(2)


def words(count):
    return RNG.integers(0, 2**64, count, dtype=np.uint64)


def test_copies_are_the_point_plus_independent_gaussians():
    point = torch.tensor([3.7, -0.2, 120.0], dtype=torch.float64)
    copies = compressed_copies(point, 0.25, 30_000, words)
    errors = ((copies.points - point) / 0.25).numpy()
    # Kolmogorov-Smirnov at 1e-4 per coordinate, a fixed seed
    assert all(stats.kstest(column, "norm").pvalue > 1e-4 for column in errors.T)
    off_diagonal = np.corrcoef(errors.T)[np.triu_indices(3, 1)]
    assert np.abs(off_diagonal).max() < 4.5 / math.sqrt(30_000)


def test_points_follow_from_what_both_ends_hold():
    copies = compressed_copies(torch.ones(4), 1.0, 2, words)
    again = (copies.symbols - copies.dither) * copies.step
    assert np.array_equal(again, copies.points.numpy())


def test_descent_reaches_a_smooth_minimum():
    # |x - 1| in five coordinates, smoothed gradient erf: no noise, so no tolerance but the method's own
    wanted = torch.full((5,), 1.0, dtype=torch.float64)
    slope = lambda y, s: torch.erf((y - wanted) / (s * math.sqrt(2.0)))  # noqa: E731
    found = accelerated_smoothing(slope, 0.0 * wanted, 3.0, math.sqrt(5.0), 1, 400)
    assert (found - wanted).abs().max() < 0.02


def test_bad_input_is_refused():
    point = torch.zeros(2)
    with pytest.raises(ValueError, match=r"sigma must be > 0 and finite, got 0"):
        compressed_copies(point, 0.0, 1, words)
    with pytest.raises(ValueError, match=r"copies must be >= 1, got 0"):
        compressed_copies(point, 1.0, 0, words)
    with pytest.raises(ValueError, match=r"point must be a finite \(dim,\) tensor"):
        compressed_copies(point / 0.0, 1.0, 1, words)
    with pytest.raises(ValueError, match=r"copies and steps >= 1, got 1.0, 1.0, 1 and 0"):
        accelerated_smoothing(lambda y, s: y, point, 1.0, 1.0, 1, 0)
