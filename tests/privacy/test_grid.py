"""The loss grid against exact compositions and dp_accounting."""

import math

import numpy as np
import pytest
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from lightning_fedq.functional.divergences import gaussian_epsilon, hockey_stick, randomized_response_epsilon
from lightning_fedq.privacy.grid import LossGrid, grid_from_curve, loss_grid
from lightning_fedq.privacy.losses import GaussianLoss


def response(epsilon, half=1):
    high = 1.0 / (1.0 + math.exp(-epsilon))
    step = epsilon / half
    points = step * np.arange(-half, half + 1)
    p, q = np.array([high, 1 - high]), np.array([1 - high, high])
    return grid_from_curve(step, -half, hockey_stick(p, q, points))


def theirs(grid):
    pmf = pld_pmf.DensePLDPmf(grid.step, grid.lowest, grid.masses, grid.infinite, True)
    return PrivacyLossDistribution(pmf)


def test_randomised_response_is_two_atoms_on_any_step():
    grid = response(0.5, half=5)
    high = 1.0 / (1.0 + math.exp(-0.5))
    np.testing.assert_allclose(grid.masses[[0, -1]], [1 - high, high], rtol=1e-12)
    assert np.abs(grid.masses[1:-1]).max() < 1e-14
    assert grid.infinite < 1e-15


@pytest.mark.parametrize(("epsilon", "count"), [(0.1, 1000), (0.01, 10_000), (0.5, 37), (1e-3, 10_000_000)])
def test_composition_is_pessimistic_and_within_a_thousandth(epsilon, count):
    exact = randomized_response_epsilon(epsilon, count, 1e-5)
    ours = response(epsilon).composed(count, 1e-9).epsilon(1e-5)
    assert exact * (1.0 - 1e-7) <= ours <= exact * 1.001


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_composition_equals_dp_accounting(count):
    grid = response(0.2, half=4)
    expected = theirs(grid).self_compose(count).get_epsilon_for_delta(1e-6)
    assert grid.composed(count, 1e-15).epsilon(1e-6) == pytest.approx(expected, rel=1e-9)


def test_curve_discretisation_equals_dp_accounting():
    step, half = 0.05, 80
    points = step * np.arange(-half, half + 1)
    curve = np.maximum(-np.expm1(points), 0.0) + 0.01 * np.exp(-np.abs(points))
    curve = np.minimum(curve, 1.0)
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, -half, half, curve)
    ours = grid_from_curve(step, -half, curve)
    for epsilon in (0.0, 0.3, 1.7):
        assert ours.delta(epsilon) == pytest.approx(pmf.get_delta_for_epsilon(epsilon), rel=1e-9)


def test_epsilon_and_delta_are_inverse():
    grid = response(0.3).composed(50, 1e-12)
    for delta in (0.1, 1e-3, 1e-7):
        assert grid.delta(grid.epsilon(delta)) == pytest.approx(delta, rel=1e-9)
        assert grid.epsilon(delta) == pytest.approx(theirs(grid).get_epsilon_for_delta(delta), rel=1e-9)


def test_coarsening_keeps_both_masses_and_never_helps():
    grid = response(0.3, half=7).composed(30, 1e-12)
    coarse = grid.on(grid.step * 5.3)
    assert coarse.masses.sum() == pytest.approx(grid.masses.sum(), rel=1e-12)
    q, q_coarse = (np.exp(-g.losses) @ g.masses for g in (grid, coarse))
    assert q_coarse == pytest.approx(q, rel=1e-12)
    for epsilon in np.linspace(-2.0, 4.0, 50):
        assert coarse.delta(epsilon) >= grid.delta(epsilon) - 1e-14


def test_infinite_mass_composes_and_ends_in_an_infinite_epsilon():
    grid = LossGrid(0.1, 0, np.array([0.99]), 0.01)
    assert grid.composed(3, 1e-12).infinite == pytest.approx(1 - 0.99**3, abs=1e-11)
    assert grid.epsilon(0.001) == math.inf
    assert grid.epsilon(0.02) == 0.0


def test_rounds_that_do_not_happen_cost_nothing():
    grid = response(1.0, half=3)
    assert grid.sometimes(0.0).epsilon(1e-9) == 0.0
    assert grid.sometimes(1.0).epsilon(1e-9) == pytest.approx(grid.epsilon(1e-9), rel=1e-12)
    half = grid.sometimes(0.5)
    for epsilon in (0.0, 0.4):
        assert half.delta(epsilon) == pytest.approx(0.5 * grid.delta(epsilon), rel=1e-12)


def test_gaussian_limit_of_a_billion_copies():
    epsilon, count = 1e-4, 10**9
    ours = response(epsilon).composed(count, 1e-9).epsilon(1e-5)
    assert ours == pytest.approx(gaussian_epsilon(epsilon * math.sqrt(count), 1e-5), rel=2e-3)


def test_what_is_infinite_already_stays_infinite():
    everything = LossGrid(0.1, -1, np.zeros(3), 1.0)
    assert everything.std == 0.0
    for count in (2, 10**6):
        assert everything.composed(count, 1e-9).infinite == 1.0
    assert everything.composed(3, 1e-9).epsilon(0.5) == math.inf


def test_deltas_at_which_rounding_shows_give_no_epsilon():
    grid = loss_grid(GaussianLoss(1.0), 1e-16)
    assert grid.epsilon(1e-12) < math.inf
    assert grid.epsilon(0.9e-12) == math.inf
