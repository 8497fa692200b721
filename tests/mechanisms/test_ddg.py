"""The distributed discrete Gaussian: published settings, error, wrapping, claims."""

import math

import pytest
import torch

from lightning_fedq.functional.noise.discrete_gaussian import concentration
from lightning_fedq.mechanisms import DistributedDiscreteGaussian
from lightning_fedq.mechanisms.interface import Adversary, ConcentratedLoss
from lightning_fedq.privacy.accounting import spent
from reproductions.exact.formulas import ddg_for_budget
from tests.one_round import decode, encode, make_context


# specification, section 11: n = 500, d = 75, c = 10, delta = 1e-5
@pytest.mark.parametrize(
    ("bits", "epsilon", "grid", "sigma"),
    [(12, 1.0, 0.433619, 1.90963), (18, 10.0, 0.00674399, 0.240314), (10, 4.0, 1.73225, 1.39018)],
)
def test_published_settings(bits, epsilon, grid, sigma):
    mechanism = ddg_for_budget(epsilon, 1e-5, 10.0, 500, 75, bits)
    assert 10.0 * mechanism.granularity == pytest.approx(grid, rel=1e-5)
    assert 10.0 * mechanism.local_sigma == pytest.approx(sigma, rel=1e-5)


def test_the_error_is_the_published_one():
    # specification 7.5: MSE 7.39e-3 per coordinate at b = 12, epsilon = 1; 75 coordinates x 2 rounds: std 12%
    mechanism, size = ddg_for_budget(1.0, 1e-5, 10.0, 500, 75, 12), 500
    rows = torch.randn(size, 75, generator=torch.Generator().manual_seed(0))
    rows = rows * (10.0 / rows.norm(dim=1, keepdim=True))
    errors = []
    for round in range(2):
        context = make_context(mechanism, range(size), (75,), round=round)
        symbols = encode(mechanism, rows, context).symbols
        assert symbols.shape == (size, 128)
        mean = decode(mechanism, symbols.sum(0) % 4096, context.cohort, context) / size
        errors.append((mean - rows.mean(0)).square().mean().item())
    assert sum(errors) / 2 == pytest.approx(7.39e-3, rel=0.48)
    assert mechanism.noise_variance(context, context.cohort).item() == pytest.approx(7.39e-3, rel=0.1)


def test_a_sum_beyond_half_the_modulus_wraps_around():
    mechanism = DistributedDiscreteGaussian(1.0, 0.01, 0.01, bits=4)
    context = make_context(mechanism, range(1), (1,))
    symbols = encode(mechanism, torch.ones(1, 1), context).symbols
    assert decode(mechanism, symbols, (0,), context).abs().item() <= 0.081


def test_who_sees_what():
    mechanism = DistributedDiscreteGaussian(1.0, 0.5, 0.05, max_dropped_clients=2)
    context = make_context(mechanism, range(10), (64,))
    claims = {c.adversary: c for c in mechanism.claims(context)}
    norm = 2 * mechanism.bound(context)
    for who, summands in (
        (Adversary.SERVER, 1),
        (Adversary.SECAGG_SERVER, 8),
        (Adversary.OUTSIDER, 8),
        (Adversary.CLIENT, 7),
    ):
        loss = claims[who].loss
        assert isinstance(loss, ConcentratedLoss)
        assert loss.rho == concentration(norm, min(8 * norm, norm**2), 64, summands, 10.0)
    assert "at least 8 of 10 clients answer" in claims[Adversary.OUTSIDER].assumptions[1]
    # the Gaussian mechanism with the same noise, up to rounding:
    rho = claims[Adversary.OUTSIDER].loss.rho
    # 400 grid steps squared, and 40 more for rounding (64 / 4 + 20 + 8 / 2)
    assert rho == pytest.approx(0.5 * (2.0 / (math.sqrt(8) * 0.5)) ** 2 * 440 / 400)
    assert spent(claims[Adversary.OUTSIDER].loss, 1e-5).epsilon > 0


@pytest.mark.parametrize(("clients", "max_dropped_clients"), [(2, 1), (2, 0), (3, 3), (1, 0)])
def test_whoever_is_in_a_sum_has_its_own_noise_in_it(clients, max_dropped_clients):
    """With nobody else left, a client is hidden as well as in a message of its own."""
    mechanism = DistributedDiscreteGaussian(1.0, 0.5, 0.05, max_dropped_clients=max_dropped_clients)
    claims = {c.adversary: c.loss for c in mechanism.claims(make_context(mechanism, range(clients), (8,)))}
    own = claims[Adversary.SERVER].rho
    assert claims[Adversary.CLIENT].rho == own
    assert (claims[Adversary.OUTSIDER].rho == own) == (clients - max_dropped_clients <= 1)


def test_a_modulus_without_room_is_refused():
    with pytest.raises(ValueError, match=r"no grid fits a modulus of 2\^2"):
        ddg_for_budget(1.0, 1e-5, 10.0, 500, 75, 2)
