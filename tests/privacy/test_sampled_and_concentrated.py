"""Losses of the exact-error family against dp_accounting and numerical integration."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy import integrate, stats

from lightning_fedq.core import ConcentratedLoss, GaussianLoss, SampledGaussianLoss
from lightning_fedq.privacy.accounting import concentrated_epsilon, spent
from lightning_fedq.privacy.losses import worst_curve


def test_the_sampled_curve_by_integration():
    loss = SampledGaussianLoss(0.8, 0.3)
    p = lambda x: 0.7 * stats.norm.pdf(x, 0, 0.8) + 0.3 * stats.norm.pdf(x, 1, 0.8)  # noqa: E731
    q = lambda x: stats.norm.pdf(x, 0, 0.8)  # noqa: E731
    for epsilon in (-1.0, -0.3, 0.0, 0.3, 1.5):
        wanted = max(
            integrate.quad(
                lambda x, a=a, b=b, e=epsilon: max(a(x) - math.exp(e) * b(x), 0.0), -9, 10, limit=400
            )[0]
            for a, b in ((p, q), (q, p))
        )
        assert worst_curve(loss, np.array([epsilon]))[0] == pytest.approx(wanted, abs=1e-7)


def test_sampling_everybody_is_the_gaussian():
    epsilons = np.linspace(-2, 2, 9)
    sampled, plain = (
        worst_curve(loss, epsilons) for loss in (SampledGaussianLoss(1.3, 1.0), GaussianLoss(1.3))
    )
    np.testing.assert_allclose(sampled, plain, atol=1e-14)


# specification, section 11: noise multipliers of SIGM for d = 100, delta = 1e-5 (PLD)
@pytest.mark.parametrize(
    ("probability", "multiplier", "epsilon"),
    [(0.3, 11.3275, 1.0), (0.3, 3.4088, 4.0), (0.5, 18.7459, 1.0), (1.0, 37.3063, 1.0)],
)
def test_published_multipliers(probability, multiplier, epsilon):
    found = spent(SampledGaussianLoss(multiplier, probability), 1e-5, compositions=100).epsilon
    # one grid for both orders of each coordinate: at most 5% above, never below
    assert epsilon * (1 - 1e-4) <= found <= 1.05 * epsilon


def test_dp_accounting_agrees():
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_event.PoissonSampledDpEvent(0.2, dp_event.GaussianDpEvent(2.0)), 50)
    found = spent(SampledGaussianLoss(2.0, 0.2), 1e-6, compositions=50).epsilon
    assert accountant.get_epsilon(1e-6) * (1 - 1e-3) <= found <= 1.06 * accountant.get_epsilon(1e-6)


def test_concentrated_losses_cover_the_gaussian_and_convert_closely():
    # a Gaussian with multiplier z is 1/(2 z^2)-zCDP; the conversion costs a little
    exact = spent(GaussianLoss(1.0), 1e-5, compositions=4).epsilon
    found = spent(ConcentratedLoss(0.5), 1e-5, compositions=4)
    assert exact <= found.epsilon <= 1.08 * exact
    assert found.epsilon == concentrated_epsilon(2.0, 1e-5)
    epsilons = np.linspace(-3, 6, 19)
    assert bool(
        (worst_curve(ConcentratedLoss(0.5), epsilons) >= worst_curve(GaussianLoss(1.0), epsilons)).all()
    )
