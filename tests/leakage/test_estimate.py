"""Leakage from counts: values of the specification, limits, and what the smoothing avoids."""

import math

import pytest

from lightning_fedq.leakage import LeakageEstimate


def test_values_and_limits():
    estimate = LeakageEstimate(50, 100, 100)
    assert estimate.hit_rate == 0.5
    assert estimate.leakage == pytest.approx(0.442579216, abs=1e-9)
    low, high = estimate.leakage_limits
    assert low < estimate.leakage < high
    # exact limits of 50 in 100, Clopper and Pearson 1934: 0.398 to 0.602
    assert estimate.hit_rate_limits == pytest.approx((0.398, 0.602), abs=1e-3)


def test_certain_recovery_has_a_finite_factor():
    estimate = LeakageEstimate(100, 100, 100)
    assert estimate.leakage == pytest.approx(0.815534434, abs=1e-9)
    assert math.isfinite(estimate.c2)
    assert estimate.c2 > 1000  # the paper's necessary distance is then nearly zero


def test_refusals():
    with pytest.raises(ValueError, match="0 <= hits <= attempts"):
        LeakageEstimate(2, 1, 10)
    with pytest.raises(ValueError, match="num_candidates must be >= 2"):
        LeakageEstimate(1, 1, 1)
