import math

import dp_accounting
import pytest
import torch

from lightning_fedq.mechanisms import GaussianNoise, LaplaceNoise, PerCoordinateGaussian, PerCoordinateLaplace
from lightning_fedq.mechanisms.bases.calibration import gaussian_noise_multiplier, laplace_noise_multiplier
from lightning_fedq.mechanisms.interface import Adversary, GaussianLoss, LaplaceLoss
from lightning_fedq.privacy.accounting import spent
from tests.one_round import decode, encode, make_context


def _errors(mechanism, dim=100_000, radius=1.0):
    context = make_context(mechanism, (3,), (dim,), radius=radius)
    symbols = encode(mechanism, torch.zeros(1, dim), context).symbols
    return decode(mechanism, symbols, (3,), context).double()


# ---- how much noise ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mechanism, variance, tolerance",
    [
        (PerCoordinateLaplace(1.0), 8.0, 0.03),
        (PerCoordinateLaplace(5.0), 0.32, 0.03),
        (PerCoordinateGaussian(1.0, 1e-5), 55.7, 0.03),
        (PerCoordinateGaussian(5.0, 1e-5), 3.18, 0.03),
        (GaussianNoise(0.25, noise_multiplier=2.0), 1.0, 0.03),
        (LaplaceNoise(0.25, noise_multiplier=2.0), 2.0, 0.03),
    ],
    ids=repr,
)
def test_variances_of_single_clients(mechanism, variance, tolerance):
    """Spec, section 10 (units of radius^2); 100,000 draws: 3% is over 4 standard errors."""
    assert _errors(mechanism).var().item() == pytest.approx(variance, rel=tolerance)


@pytest.mark.parametrize("epsilon, rounds", [(0.5, 1), (4.0, 50), (8.0, 300)])
def test_the_gaussian_budget_holds_by_another_accountant(epsilon, rounds):
    """The exact (PLD) epsilon of the noise: within the budget, and not 0.3% below it."""
    s = gaussian_noise_multiplier(epsilon, 1e-5, rounds)
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(s / math.sqrt(rounds)))
    spent = accountant.get_epsilon(1e-5)
    assert 0.997 * epsilon < spent <= epsilon


@pytest.mark.parametrize("epsilon, rounds", [(1.0, 1), (4.0, 50)])
def test_the_laplace_budget_holds_by_another_accountant(epsilon, rounds):
    b = laplace_noise_multiplier(epsilon, 1e-5, rounds)
    pld = dp_accounting.pld.PLDAccountant()
    pld.compose(dp_accounting.LaplaceDpEvent(b), rounds)
    assert 0.997 * epsilon < pld.get_epsilon(1e-5) <= epsilon


@pytest.mark.filterwarnings("ignore::UserWarning:opacus", "ignore::RuntimeWarning")  # Opacus's own
def test_a_budget_asks_for_no_more_noise_than_opacus_s_tightest_accountant():
    """By its PRV accountant 3.293 at epsilon 8, by Renyi orders 3.496."""
    from opacus.accountants.utils import get_noise_multiplier

    budget = {"target_epsilon": 8.0, "target_delta": 1e-5, "sample_rate": 1.0, "steps": 30}
    theirs = get_noise_multiplier(**budget, accountant="prv")
    assert gaussian_noise_multiplier(8.0, 1e-5, 30) == pytest.approx(theirs, rel=2e-3)


def test_a_pure_budget_is_the_sum_of_the_rounds():
    assert laplace_noise_multiplier(4.0, 0.0, 50) == 12.5


def test_advanced_composition_needs_less_noise_than_the_pure_bound():
    assert laplace_noise_multiplier(4.0, 1e-5, 500) < 0.5 * 500 / 4.0


# ---- what is clipped, what is claimed ---------------------------------------------------------------


@pytest.mark.parametrize("mechanism, order", [(GaussianNoise(1.0, 1e-4), 2), (LaplaceNoise(1.0, 1e-4), 1)])
def test_long_updates_end_on_the_sphere_and_short_ones_where_they_were(mechanism, order):
    """The noise is 2e-4 a coordinate here, so norms show through."""
    updates = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    updates[1] *= 0.5 / torch.linalg.vector_norm(updates[1], order)
    context = make_context(mechanism, (0, 1), (50,), center=0.0)
    message = encode(mechanism, updates, context)
    decoded = [decode(mechanism, message.symbols[i : i + 1], (i,), context) for i in (0, 1)]
    assert torch.linalg.vector_norm(decoded[0], order).item() == pytest.approx(1.0, abs=0.02)
    torch.testing.assert_close(decoded[1], updates[1], atol=5e-3, rtol=0)
    assert message.num_clipped == 50


def test_what_is_clipped_is_the_distance_from_the_centre():
    mechanism = GaussianNoise(0.1, 1e-3)
    context = make_context(mechanism, (0,), (4,), center=5.0)
    message = encode(mechanism, torch.full((1, 4), 5.0), context)
    assert message.num_clipped == 0
    decoded = decode(mechanism, message.symbols, (0,), context)
    torch.testing.assert_close(decoded, torch.full((4,), 5.0), atol=1e-2, rtol=0)


def test_claims_say_whole_vector_or_coordinate():
    for mechanism, loss, compositions in (
        (GaussianNoise(1.0, 0.7), GaussianLoss, 1),
        (LaplaceNoise(1.0, 0.7), LaplaceLoss, 1),
        (PerCoordinateGaussian(1.0, 1e-5), GaussianLoss, 8),
        (PerCoordinateLaplace(2.0), LaplaceLoss, 8),
    ):
        for claim in mechanism.claims(make_context(mechanism, (0, 1))):
            assert isinstance(claim.loss, loss)
            # of two clients, the sum of Gaussian messages has both noises
            summed = claim.adversary in (Adversary.SECAGG_SERVER, Adversary.OUTSIDER)
            noises = 2 if summed and loss is GaussianLoss else 1
            assert claim.loss.noise_multiplier == mechanism.multiplier * math.sqrt(noises)
            assert claim.compositions == compositions
            assert any("total variation" in line for line in claim.assumptions)
    assert PerCoordinateLaplace(2.0).multiplier == 0.5


@pytest.mark.parametrize(
    "mechanism",
    [
        GaussianNoise(1.0, gaussian_noise_multiplier(8.0, 1e-5, 100)),
        LaplaceNoise(1.0, laplace_noise_multiplier(8.0, 1e-5, 100)),
    ],
    ids=lambda mechanism: mechanism.law,
)
@pytest.mark.parametrize("dim", [10, 10_000_000])
def test_the_sampler_costs_next_to_nothing_at_ten_million_coordinates(mechanism, dim):
    """2 k r is 0.0009 (Gaussian) and 0.0036 (Laplace) for 1e9 coordinates and rounds; delta pays 1e-23."""
    claim = mechanism.claims(make_context(mechanism, range(100), (dim,)))[0]
    loose = spent(claim.loss, 1e-5, rounds=100, slack=claim.slack).epsilon
    assert loose <= min(8.0, spent(claim.loss, 1e-5, rounds=100).epsilon + 0.005)
