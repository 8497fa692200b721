"""Losses of the exact-error family against dp_accounting, numerical integration and closed forms."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy import stats

from lightning_fedq.functional.divergences import gaussian_delta, gaussian_epsilon
from lightning_fedq.privacy.accounting import Rounds, composed_grid, spent, spent_together
from lightning_fedq.privacy.grid import loss_grid
from lightning_fedq.privacy.losses import (
    ConcentratedLoss,
    GaussianLoss,
    LaplaceLoss,
    SampledGaussianLoss,
    concentrated_epsilon,
)


def test_sampling_everybody_is_the_gaussian():
    epsilons = np.linspace(-2, 2, 9)
    sampled, plain = (loss.curve(epsilons) for loss in (SampledGaussianLoss(1.3, 1.0), GaussianLoss(1.3)))
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
    assert bool((ConcentratedLoss(0.5).curve(epsilons) >= GaussianLoss(1.0).curve(epsilons)).all())


# ---- composition -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("multiplier", "probability"), [(0.8, 0.3), (2.0, 0.05)])
def test_two_sampled_gaussians_by_integration_in_the_plane(multiplier, probability):
    """Delta of two coordinates on 2,000 x 2,000 cells; ours is never below, and the one grid for both orders
    of each coordinate costs an eighth of delta at most."""
    z, g = multiplier, probability
    edges = np.linspace(-9.0 * z, 9.0 * z + 1.0, 2001)
    q = np.diff(stats.norm.cdf(edges, 0, z))
    p = (1 - g) * q + g * np.diff(stats.norm.cdf(edges, 1, z))
    grid = composed_grid(SampledGaussianLoss(z, g), 1e-6, 2, 1)
    for epsilon in (0.0, 0.2, 0.7, 1.5):
        # cells are post-processing, so this is a lower bound, close to the truth
        planes = np.outer(p, p), np.outer(q, q)
        wanted = max(np.maximum(a - math.exp(epsilon) * b, 0.0).sum() for a, b in (planes, planes[::-1]))
        found = grid.delta(epsilon)
        assert wanted - 1e-12 <= found <= 1.125 * wanted + 2e-4


@pytest.mark.parametrize("rho", [1e-4, 0.02, 0.5, 8.0])
def test_the_grid_of_a_concentrated_loss_is_a_pair_of_laws(rho):
    """Not so without the lower hull: the minimum of bounds over orders is not convex in e^epsilon."""
    grid = loss_grid(ConcentratedLoss(rho), 1e-9)
    assert grid.masses.min() >= 0.0
    assert grid.masses.sum() + grid.infinite == pytest.approx(1.0, abs=1e-9)
    shown = grid.losses > -20.0  # beyond, a rounding error of a mass is multiplied by more than 1e8
    assert float(np.exp(-grid.losses[shown]) @ grid.masses[shown]) <= 1.0 + 1e-6
    raw = ConcentratedLoss(rho).curve(grid.losses)
    rises = np.diff(np.diff(raw) / np.diff(np.exp(grid.losses)))
    assert (rises < -1e-9 * abs(rises).max()).any()


@pytest.mark.parametrize("rho", [1e-4, 0.02, 0.5, 8.0])
@pytest.mark.parametrize("copies", [1, 2, 10])
def test_a_concentrated_grid_dominates_the_gaussian_however_it_is_composed(rho, copies):
    """The Gaussian of mu = sqrt(2 rho) is rho-concentrated; copies of the grid and the grid of the sum."""
    mu = math.sqrt(2 * rho * copies)
    composed = loss_grid(ConcentratedLoss(rho), 1e-9).composed(copies, 1e-9)
    summed = composed_grid(ConcentratedLoss(rho), 1e-6, copies, 1)
    for epsilon in mu * np.array([0.0, 0.3, 1.0, 2.0, 4.0]):
        exact = gaussian_delta(mu, epsilon)
        assert composed.delta(epsilon) >= exact and summed.delta(epsilon) >= exact


def test_a_concentrated_grid_dominates_laplace_and_discrete_losses():
    """A pure epsilon is epsilon^2 / 2 concentrated, Laplace of scale b is 1 / (2 b^2) concentrated."""
    for level in (0.1, 1.0, 3.0):
        grid = loss_grid(ConcentratedLoss(level**2 / 2), 1e-9)
        high = 1 / (1 + math.exp(-level))
        for epsilon in np.linspace(-level, level, 9):
            response = max(high - math.exp(epsilon) * (1 - high), -math.expm1(epsilon), 0.0)
            laplace = LaplaceLoss(1 / level).curve(np.array([epsilon]))[0]
            assert grid.delta(epsilon) >= max(response, laplace) - 1e-12


def test_rhos_add_up_before_they_are_converted():
    kinds = {Rounds(ConcentratedLoss(0.01), 3): 5, Rounds(ConcentratedLoss(0.2)): 1}
    assert spent_together(kinds, 1e-5) == concentrated_epsilon(0.35, 1e-5)


def test_concentrated_and_gaussian_rounds_add_up_soundly():
    """Gaussians in disguise: never below their exact sum, and within a quarter of it."""
    kinds = {Rounds(ConcentratedLoss(0.02)): 5, Rounds(GaussianLoss(3.0)): 4}
    exact = gaussian_epsilon(math.sqrt(2 * 0.1 + 4 / 9), 1e-5)
    assert exact <= spent_together(kinds, 1e-5) <= 1.25 * exact
