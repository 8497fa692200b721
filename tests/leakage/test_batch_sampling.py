"""Variance of sampled batches, and the sampling probability: vectors, and simulated coins."""

import math

import pytest
import torch

from lightning_fedq.leakage.batch_sampling import GradientMoments, solve_probability, update_variance


def test_variance_vectors():
    one = GradientMoments(50, 10.0, 9.0, 0.02)
    assert update_variance(one, 0.2, 0.1) == pytest.approx(0.0001654461800524984, rel=1e-12)
    assert update_variance(one, 0.2) == pytest.approx(0.01654461800524984, rel=1e-12)


def test_variance_of_simulated_batches():
    """The trace over 20,000 batches has a relative error near 1%; 6% alarms with probability below 1e-6."""
    generator = torch.Generator().manual_seed(3)
    gradients = torch.randn(12, 4, generator=generator, dtype=torch.float64) + 0.5
    coins = (torch.rand(20_000, 12, generator=generator) < 0.3).double()
    updates = 0.1 * coins @ gradients / coins.sum(1).clamp(min=1)[:, None]
    expected = update_variance(GradientMoments.from_gradients(gradients, 12), 0.3, 0.1)
    assert updates.var(0).sum().item() == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("share", [0.1, 0.6, 0.95])
def test_the_chosen_probability_reaches_the_variance(share):
    moments = GradientMoments(40, 25.0, 20.0, 0.125)
    wanted = share * max(update_variance(moments, p / 40, 0.1) for p in range(1, 40))
    found = solve_probability(moments, wanted, 0.1)
    assert found.feasible
    assert update_variance(moments, found.value, 0.1) == pytest.approx(wanted, rel=1e-6)


def test_no_probability_can_meet_it_and_the_reason_says_so():
    found = solve_probability(GradientMoments(40, 25.0, 20.0, 0.125), 1e3, 0.1)
    assert not found.feasible
    assert "Lower the noise" in found.reason
    zero = solve_probability(GradientMoments(40, 0.0, 0.0, 0.0), 1.0, 0.1)
    assert not zero.feasible
    assert math.isinf(zero.needed)
    assert "all gradients are zero" in zero.reason


def test_no_distortion_is_no_constraint():
    assert solve_probability(GradientMoments(40, 25.0, 20.0, 0.125), 0.0).value == 1 / 40


def test_refusals():
    moments = GradientMoments(4, 1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="wanted must be >= 0 and finite"):
        solve_probability(moments, math.nan)
    with pytest.raises(ValueError, match="learning_rate must be > 0"):
        solve_probability(moments, 1.0, 0.0)
    with pytest.raises(ValueError, match=r"shape \(probe, dim\)"):
        GradientMoments.from_gradients(torch.zeros(0, 3), 4)
    with pytest.raises(ValueError, match="must be finite"):
        GradientMoments.from_gradients(torch.full((1, 3), math.inf), 4)
