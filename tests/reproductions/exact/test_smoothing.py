import pytest
import torch

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
