"""Every kind of loss against closed forms and dp_accounting, and a kind from outside."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from lightning_fedq.privacy.accounting import Rounds, spent, spent_together
from lightning_fedq.privacy.grid import loss_grid
from lightning_fedq.privacy.losses import (
    CoinSum,
    ConcentratedLoss,
    GaussianLoss,
    HiddenPair,
    LaplaceLoss,
    Loss,
    PmfPairs,
    RenyiLoss,
    SampledGaussianLoss,
)

LOW, HIGH = 1 / (1 + math.e), math.e / (1 + math.e)
BIT = PmfPairs((((HIGH, LOW), (LOW, HIGH)),))


def test_pairs_count_in_both_orders():
    lopsided = PmfPairs((((0.9, 0.1), (1.0, 0.0)),))
    assert lopsided.infinite_mass == pytest.approx(0.1)
    assert lopsided.pure_epsilon == math.inf
    turned = PmfPairs((((1.0, 0.0), (0.9, 0.1)),))
    points = np.linspace(-1, 1, 9)
    np.testing.assert_allclose(lopsided.curve(points), turned.curve(points))


def test_without_coins_a_sum_is_the_bit_itself():
    points = np.linspace(-1.5, 1.5, 13)
    alone = CoinSum(LOW, HIGH, (HiddenPair((HIGH, LOW), (LOW, HIGH), 0),))
    np.testing.assert_allclose(alone.curve(points), BIT.curve(points), atol=1e-15)


def test_weight_is_the_chance_that_the_worlds_differ():
    certain = CoinSum(LOW, HIGH, (HiddenPair((0.0, 1.0), (1.0, 0.0), 5),))
    seldom = CoinSum(LOW, HIGH, (HiddenPair((0.0, 1.0), (1.0, 0.0), 5, 0.25),))
    points = np.linspace(0.0, 2.0, 9)
    np.testing.assert_allclose(seldom.curve(points), 0.25 * certain.curve(points), atol=1e-15)
    assert seldom.infinite_mass == pytest.approx(0.25 * certain.infinite_mass)


def test_pure_levels():
    assert LaplaceLoss(0.5).pure_epsilon == 2.0
    assert GaussianLoss(0.5).pure_epsilon == math.inf


@pytest.mark.parametrize(
    ("p", "q", "half"),
    [
        ((HIGH, LOW), (LOW, HIGH), True),
        ((0.2, 0.6, 0.2), (0.4, 0.2, 0.4), True),
        ((0.7, 0.3), (0.2, 0.8), False),
    ],
)
def test_half_of_the_splits_stands_for_all_where_they_mirror_each_other(p, q, half):
    coins, points = 9, np.linspace(-1.0, 1.0, 21)
    laws = list(HiddenPair(p, q, coins).laws(LOW, HIGH))
    assert len(laws) == (2 * 6 if half else 2 * (coins + 1))
    worst = np.zeros(len(points))
    for ones in range(coins + 1):
        noise = np.ones(1)
        for coin in range(coins):
            chance = HIGH if coin < ones else LOW
            noise = np.convolve(noise, (1.0 - chance, chance))
        both = np.convolve(noise, p), np.convolve(noise, q)
        for one, other in (both, both[::-1]):
            delta = np.maximum(one - np.exp(points)[:, None] * other, 0.0).sum(1)
            worst = np.maximum(worst, delta)
    assert CoinSum(LOW, HIGH, (HiddenPair(p, q, coins),)).curve(points) == pytest.approx(worst, abs=1e-12)


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.8), (0.6, 0.4), (0.0, 1.0)])
def test_coins_that_do_not_mirror_each_other_are_refused(low, high):
    """All that is computed of a sum of coins takes a mirrored low coin for a high one."""
    with pytest.raises(ValueError, match="high = 1 - low"):
        CoinSum(low, high, (HiddenPair((0.8, 0.2), (0.2, 0.8), 9),))


def test_a_pair_without_finite_loss_is_only_mass():
    grid = loss_grid(PmfPairs((((0.7, 0.3, 0.0), (0.7, 0.0, 0.3)),)), 1e-9)
    assert grid.infinite == pytest.approx(0.3)
    assert grid.delta(0.0) == pytest.approx(0.3)


# ---- open to other kinds -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Staircase(Loss):
    """A kind that the package does not know: pure epsilon 1, by its curve alone."""

    note: str = ""

    def curve(self, epsilons):
        return BIT.curve(epsilons)


def test_a_curve_is_enough_for_a_new_kind():
    for rounds in (1, 20):
        wanted = spent(BIT, 1e-6, rounds=rounds).epsilon
        assert wanted <= spent(Staircase(), 1e-6, rounds=rounds).epsilon <= 1.02 * wanted
    half = spent(Staircase(), 1e-6, rounds=20, participation=0.5)
    assert 0.0 < half.epsilon < spent(Staircase(), 1e-6, rounds=20).epsilon
    both = spent_together({Rounds(Staircase(), 3): 1, Rounds(GaussianLoss(5.0)): 2}, 1e-6)
    assert both > spent(GaussianLoss(5.0), 1e-6, rounds=2).epsilon
    assert (Staircase().infinite_mass, Staircase().pure_epsilon) == (0.0, math.inf)


ORDERS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)


def gaussian_divergences(mu, orders=ORDERS):
    return RenyiLoss(orders, tuple(0.5 * mu * mu * a for a in orders))


@pytest.mark.parametrize("mu", [0.05, 0.5, 2.0])
def test_a_renyi_curve_converts_as_google_does(mu):
    from dp_accounting.rdp import compute_epsilon

    loss = gaussian_divergences(mu)
    wanted, _ = compute_epsilon(ORDERS, np.array(loss.divergences), 1e-5)
    found = spent(loss, 1e-5)
    assert found.epsilon == pytest.approx(wanted, rel=1e-9)
    assert found.method == "Renyi differential privacy, every round counted"
    assert found.epsilon >= spent(GaussianLoss(1 / mu), 1e-5).epsilon


def test_renyi_curves_add_up():
    once = gaussian_divergences(0.2)
    many = spent(once, 1e-5, compositions=3, rounds=7)
    assert many.epsilon == gaussian_divergences(0.2).composed(21).epsilon(1e-5, 1)
    assert spent(once, 1e-5, compositions=3, rounds=7, participation=0.1).epsilon == many.epsilon
    other = gaussian_divergences(0.1, (1.25, 2.5, 5.0, 10.0, 20.0, 200.0))
    kinds = {Rounds(once): 2, Rounds(ConcentratedLoss(0.02)): 1, Rounds(other): 1}
    mixed, exact = spent_together(kinds, 1e-5), gaussian_divergences(math.sqrt(0.13)).epsilon(1e-5, 1)
    assert exact <= mixed <= 1.05 * exact
    assert spent_together({**kinds, Rounds(GaussianLoss(5.0)): 1}, 1e-5) > mixed


def test_orders_in_between_are_bounded_by_convexity():
    loss = RenyiLoss((2.0, 4.0), (1.0, 1.2))
    assert loss.divergence(1.1) == loss.divergence(2.0) == 1.0
    assert loss.divergence(3.0) == pytest.approx((0.5 * 1.0 + 0.5 * 3.6) / 2.0)
    assert loss.divergence(5.0) == math.inf
    assert loss.spread(4).divergences == (0.25, 0.3)


def test_the_grid_of_a_renyi_curve_dominates_the_gaussian():
    grid = loss_grid(gaussian_divergences(0.7), 1e-9)
    for epsilon in (0.0, 0.5, 1.5, 3.0):
        assert grid.delta(epsilon) >= GaussianLoss(1 / 0.7).curve(np.array([epsilon]))[0]


@pytest.mark.parametrize(
    ("orders", "divergences", "match"),
    [
        ((), (), "orders must be one or more ascending"),
        ((1.0, 2.0), (0.1, 0.1), "orders must be one or more ascending"),
        ((3.0, 2.0), (0.1, 0.1), "orders must be one or more ascending"),
        ((2.0, 3.0), (0.1,), "Expected one divergence >= 0 for each of 2"),
        ((2.0,), (math.nan,), "Expected one divergence >= 0"),
        ((2.0,), (-0.1,), "Expected one divergence >= 0"),
    ],
)
def test_renyi_curves_that_make_no_sense(orders, divergences, match):
    with pytest.raises(ValueError, match=match):
        RenyiLoss(orders, divergences)


@pytest.mark.parametrize("share", [0.001, 0.0997123, 0.5, 0.931, 1.0])
def test_the_curve_of_a_sampled_gaussian_falls_to_nothing(share):
    """One side was a difference of numbers of the size of exp(epsilon): deltas of 1e257, now and then."""
    curve = SampledGaussianLoss(1.5, share).curve(np.linspace(0.0, 700.0, 7001))
    assert (np.diff(curve) <= 0.0).all() and 0.0 <= curve[-1] < 1e-300 and curve[0] < 0.3


@pytest.mark.parametrize(("z", "share"), [(1.0, 0.01), (1.0, 0.3), (0.8, 0.3), (1.0, 0.9)])
def test_both_orders_of_a_sampled_gaussian_are_its_integrals(z, share):
    x = np.linspace(-12.0, 13.0, 2_000_001)
    plain, moved = (stats.norm.pdf(x, shift, z) for shift in (0.0, 1.0))
    mixed = (1.0 - share) * plain + share * moved
    for epsilon in (-1.0, -0.5, 0.0, 0.1, 1.0, 3.0):
        orders = [np.maximum(p - math.exp(epsilon) * q, 0.0) for p, q in ((mixed, plain), (plain, mixed))]
        exact = max(float(order.sum()) * (x[1] - x[0]) for order in orders)
        found = SampledGaussianLoss(z, share).curve(np.array([epsilon]))
        assert found[0] == pytest.approx(exact, abs=1e-9)


def test_a_named_method_needs_a_closed_form():
    class Boastful(Staircase):
        method = "by magic"

    with pytest.raises(NotImplementedError, match="Boastful names a method"):
        spent(Boastful(), 1e-5)
