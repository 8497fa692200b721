"""The bounds, the division of claims over coordinates, and what a view says of laws that are known."""

import math

import numpy as np
import pytest
from scipy import special, stats

from lightning_fedq.audit.views import View, proven_divergence
from lightning_fedq.functional.trade_off import binomial_bounds
from lightning_fedq.mechanisms.interface import (
    ConcentratedLoss,
    GaussianLoss,
    LaplaceLoss,
    PmfPairs,
    SampledGaussianLoss,
)


def test_bounds_are_clopper_and_pearson():
    for hits, draws in [(0, 10), (3, 10), (10, 10), (500, 100_000)]:
        low, high = binomial_bounds(np.array([hits]), draws, 0.01)
        exact = stats.binomtest(hits, draws).proportion_ci(0.98, method="exact")
        assert low[0] == pytest.approx(exact.low, rel=1e-9)
        assert high[0] == pytest.approx(exact.high, rel=1e-9)


@pytest.mark.parametrize("level", [1e-3, 1e-7, 1e-11])
def test_what_was_never_seen_is_bounded_at_every_level(level):
    _, high = binomial_bounds(np.array([0]), np.array([4600]), level)
    # SciPy before 1.12 is right to 2e-6, today's to 1e-12
    assert high[0] == pytest.approx(-math.expm1(math.log(level) / 4600), rel=1e-5)


def test_no_draws_prove_nothing():
    low, high = binomial_bounds(np.array([0]), np.array([0]), 0.01)
    assert (low[0], high[0]) == (0.0, 1.0)


def test_a_share_of_a_loss_adds_up_to_the_whole():
    assert GaussianLoss(0.5).spread(16).noise_multiplier == 2.0  # sixteen of them are one of 0.5 again
    assert LaplaceLoss(0.5).spread(16).noise_multiplier == 8.0
    assert ConcentratedLoss(8.0).spread(16).rho == 0.5
    with pytest.raises(TypeError, match="can't be divided over its coordinates"):
        SampledGaussianLoss(1.0, 0.5).spread(16)


def response(probability, claimed, draws=40_000, positions=1, seed=0):
    """A view of randomised response with one probability, claimed to have another."""
    pair = ((claimed, 1.0 - claimed), (1.0 - claimed, claimed))
    view = View("response", PmfPairs((pair,)), 1, positions, 2)
    rng = np.random.default_rng(seed)
    for half in (0, 1):
        for label, p in ((0, probability), (1, 1.0 - probability)):
            ones = rng.binomial(draws, p, positions)
            view.counts[half, label, :, 0], view.counts[half, label, :, 1] = ones, draws - ones
    return view


def test_a_kept_claim_is_met_closely_and_a_broken_one_is_an_alarm():
    kept, broken = response(0.7, 0.7).judge(1e-3), response(0.72, 0.7).judge(1e-3)
    assert kept.alarm == "" and kept.claim == pytest.approx(math.log(7 / 3))
    assert 0.95 * kept.claim < kept.lower_bound <= kept.claim
    assert broken.lower_bound > broken.claim
    assert broken.alarm == (
        "update 'first' gives one of 1 outputs with frequency 0.7196, update 'second' with frequency 0.2790 "
        "(40000 and 40000 draws). So epsilon is at least 0.904, and the claim is 0.847"
    )


def test_one_bad_position_among_many_is_named():
    view = response(0.7, 0.75, draws=2000, positions=50)
    view.counts[:, 0, 17], view.counts[:, 1, 17] = (2000, 0), (0, 2000)
    assert "position 17" in view.judge(1e-3).alarm


def test_a_curve_is_tested_at_several_epsilons_and_a_tail_alone_is_an_alarm():
    """A law that keeps the Gaussian's delta at 0 and breaks its tail: one in fifty shows its label."""
    view = View("tail", GaussianLoss(1.0), 1, 1, 3)
    assert view.epsilons[0] == 0.0 and len(view.epsilons) == 4
    falls = [view.allowed(epsilon) / view.allowed(0.0) for epsilon in view.epsilons[1:]]
    assert falls == pytest.approx([0.5, 0.1, 0.01], rel=1e-2)
    view.counts[:, 0, 0], view.counts[:, 1, 0] = (2000, 0, 98_000), (0, 2000, 98_000)
    alarm = "So delta at epsilon 2.69 is at least 0.0168, and the claim is 0.00383"
    assert view.judge(1e-3).alarm.endswith(alarm)


def test_two_gaussian_looks_are_one_with_less_noise():
    view = View("two", GaussianLoss(2.0), 2, 1, 2)
    assert view.allowed(0.0) == pytest.approx(2.0 * special.ndtr(math.sqrt(2.0) / 4.0) - 1.0)


@pytest.mark.slow
def test_false_alarms_are_as_rare_as_stated():
    """3,000 clean views at alpha = 2%: at most 60 alarms expected; more than 90 has probability 1e-4."""
    alarms = sum(bool(response(0.7, 0.7, 1000, 20, seed).judge(0.02).alarm) for seed in range(3000))
    assert alarms <= 90


def shifted(shift, draws=200_000, seed=0):
    """Counts of a Gaussian of std 1 in 32 bins, around 0 and around `shift`: `(2, outcomes)`."""
    edges = stats.norm(shift / 2).ppf(np.arange(1, 32) / 32)
    rng = np.random.default_rng(seed)
    return np.stack(
        [np.bincount(np.searchsorted(edges, rng.normal(at, 1, draws)), minlength=32) for at in (0.0, shift)]
    )


@pytest.mark.parametrize("order", [1.25, 2.0])
def test_a_divergence_is_bounded_closely_from_below(order):
    """Of N(0, 1) and N(s, 1) it is a s^2 / 2. Never above in 200 experiments at alpha 1e-3."""
    exact = order * 0.7**2 / 2
    for seed in range(200):
        first, second = shifted(0.7, 20_000, 2 * seed), shifted(0.7, 20_000, 2 * seed + 1)
        assert proven_divergence(order, (first + 0.5) / first.sum(), second, 1e-3) <= exact
    first, second = shifted(0.7, seed=5), shifted(0.7, seed=6)
    assert proven_divergence(order, (first + 0.5) / first.sum(), second, 1e-3) >= 0.85 * exact


def test_a_divergence_above_the_claimed_one_is_an_alarm():
    """A loss of a tenth less noise; the curve of a concentrated loss alone would not show it."""
    for shift, alarm in ((1.0, False), (1.0 / 0.9, True)):
        view = View("sum", ConcentratedLoss(0.5), 1, 1, 32)
        for half in (0, 1):
            view.counts[half, :, 0] = shifted(shift, seed=half)
        found = view.judge(1e-3)
        assert bool(found.alarm) == alarm and found.order is not None
    assert "the divergence of order" in found.alarm


def test_few_draws_prove_no_divergence():
    assert proven_divergence(2.0, np.full((2, 2), 0.5), np.array([[500, 0], [0, 500]]), 1e-3) == 0.0
