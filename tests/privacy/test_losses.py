"""Worst curves of every kind of loss, against closed forms and dp_accounting."""

import math
from itertools import pairwise

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld

from lightning_fedq.core import CoinSum, GaussianLoss, HiddenPair, LaplaceLoss, NonPrivate, PmfPairs
from lightning_fedq.privacy.losses import infinite_mass, loss_grid, pure_epsilon, worst_curve

LOW, HIGH = 1 / (1 + math.e), math.e / (1 + math.e)
BIT = PmfPairs((((HIGH, LOW), (LOW, HIGH)),))


def test_one_bit():
    points = np.array([-0.5, 0.0, 0.5, 1.0])
    expected = np.maximum(HIGH - np.exp(points) * LOW, -np.expm1(points))
    np.testing.assert_allclose(worst_curve(BIT, points), expected, atol=1e-15)
    assert pure_epsilon(BIT) == pytest.approx(1.0, abs=1e-15)
    assert infinite_mass(BIT) == 0.0


def test_pairs_count_in_both_orders():
    lopsided = PmfPairs((((0.9, 0.1), (1.0, 0.0)),))
    assert infinite_mass(lopsided) == pytest.approx(0.1)
    assert pure_epsilon(lopsided) == math.inf
    turned = PmfPairs((((1.0, 0.0), (0.9, 0.1)),))
    points = np.linspace(-1, 1, 9)
    np.testing.assert_allclose(worst_curve(lopsided, points), worst_curve(turned, points))


def test_without_coins_a_sum_is_the_bit_itself():
    points = np.linspace(-1.5, 1.5, 13)
    alone = CoinSum(LOW, HIGH, (HiddenPair((HIGH, LOW), (LOW, HIGH), 0),))
    np.testing.assert_allclose(worst_curve(alone, points), worst_curve(BIT, points), atol=1e-15)


def test_more_coins_hide_more():
    points = np.linspace(0.0, 1.0, 9)
    curves = [
        worst_curve(CoinSum(LOW, HIGH, (HiddenPair((HIGH, LOW), (LOW, HIGH), n),)), points) for n in range(6)
    ]
    for fewer, more in pairwise(curves):
        assert (more <= fewer + 1e-15).all()


def test_weight_is_the_chance_that_the_worlds_differ():
    certain = CoinSum(LOW, HIGH, (HiddenPair((0.0, 1.0), (1.0, 0.0), 5),))
    seldom = CoinSum(LOW, HIGH, (HiddenPair((0.0, 1.0), (1.0, 0.0), 5, 0.25),))
    points = np.linspace(0.0, 2.0, 9)
    np.testing.assert_allclose(worst_curve(seldom, points), 0.25 * worst_curve(certain, points), atol=1e-15)
    assert infinite_mass(seldom) == pytest.approx(0.25 * infinite_mass(certain))


@pytest.mark.parametrize(
    ("loss", "reference"),
    [
        (GaussianLoss(2.0), pld.from_gaussian_mechanism(2.0)),
        (LaplaceLoss(2.0), pld.from_laplace_mechanism(2.0)),
    ],
)
def test_closed_curves_agree_with_dp_accounting(loss, reference):
    for epsilon in (0.0, 0.2, 0.45):
        ours = worst_curve(loss, np.array([epsilon]))[0]
        assert ours == pytest.approx(reference.get_delta_for_epsilon(epsilon), rel=2e-4)
    below, above = worst_curve(loss, np.array([-0.3, 0.3]))
    assert below == pytest.approx(1 - math.exp(-0.3) + math.exp(-0.3) * above, rel=1e-12)
    assert infinite_mass(loss) == 0.0


def test_pure_levels():
    assert pure_epsilon(LaplaceLoss(0.5)) == 2.0
    assert pure_epsilon(GaussianLoss(0.5)) == math.inf


def test_grid_dominates_the_curve():
    loss = CoinSum(LOW, HIGH, (HiddenPair((HIGH, LOW), (LOW, HIGH), 9),))
    grid = loss_grid(loss, 1e-9)
    points = np.linspace(-0.9, 0.95, 40)
    curve = worst_curve(loss, points)
    for epsilon, exact in zip(points, curve, strict=True):
        assert exact - 1e-14 <= grid.delta(epsilon) <= exact + 2e-4


def test_a_pair_without_finite_loss_is_only_mass():
    grid = loss_grid(PmfPairs((((0.7, 0.3, 0.0), (0.7, 0.0, 0.3)),)), 1e-9)
    assert grid.infinite == pytest.approx(0.3)
    assert grid.delta(0.0) == pytest.approx(0.3)


def test_nothing_to_account_for():
    with pytest.raises(ValueError, match="no guarantee to account for: sent in the clear"):
        worst_curve(NonPrivate("sent in the clear"), np.array([0.0]))


def test_unknown_losses_are_refused():
    with pytest.raises(TypeError, match="unknown loss str"):
        loss_grid("trust me", 1e-9)
