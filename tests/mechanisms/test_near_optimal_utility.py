"""NearOptimalUtility: refusals, claims, exact utility loss; the noise's law is tested with its base."""

import math

import pytest
import torch

from lightning_fedq.mechanisms import GaussianNoise, NearOptimalUtility
from lightning_fedq.mechanisms.interface import Adversary, GaussianLoss, NonPrivate
from tests.one_round import decode, encode, make_context


def make(**changes):
    settings = {"clip_norm": 2.0, "leakage_budget": 0.3, "noise_std": 0.1, "measured_leakage": 0.25}
    return NearOptimalUtility(**{**settings, **changes})


def test_it_claims_no_differential_privacy_against_anybody():
    mechanism = make()
    for claim in mechanism.claims(make_context(mechanism, (1, 2))):
        assert isinstance(claim.loss, NonPrivate)
        for words in ("not differential privacy", "0.25", "a better attack"):
            assert words in claim.loss.reason


def test_a_public_calibration_leaves_the_gaussian_mechanism():
    mechanism = make(public_calibration=True)
    context = make_context(mechanism, (1, 2))
    same = GaussianNoise(clip_norm=2.0, noise_multiplier=0.1 / 4.0)
    claims = mechanism.claims(context)
    assert {claim.adversary for claim in claims} == set(Adversary)
    losses = {claim.adversary: claim.loss for claim in claims}
    assert all(isinstance(loss, GaussianLoss) for loss in losses.values())
    for who in (Adversary.EAVESDROPPER, Adversary.SERVER, Adversary.SERVER_AND_PARTNER, Adversary.CLIENT):
        assert losses[who].noise_multiplier == pytest.approx(0.025, rel=1e-6)
    for who in (Adversary.SECAGG_SERVER, Adversary.OUTSIDER):  # both clients' noise is in the sum
        assert losses[who].noise_multiplier == pytest.approx(0.025 * math.sqrt(2), rel=1e-6)
    updates = 0.01 * torch.arange(16.0).reshape(2, 8)
    assert torch.equal(encode(mechanism, updates, context).symbols, encode(same, updates, context).symbols)


def test_the_utility_loss_is_dim_times_the_variance():
    """Chi-square with 20,000 degrees of freedom: relative std 1%; 5% alarms with probability 1e-6."""
    mechanism, dim = make(noise_std=0.05), 20_000
    context = make_context(mechanism, (0,), (dim,))
    update = torch.full((1, dim), 1e-3)
    error = decode(mechanism, encode(mechanism, update, context).symbols, (0,), context) - update[0]
    assert error.double().square().sum().item() == pytest.approx(dim * 0.05**2, rel=0.05)
    assert math.isclose(mechanism.noise_variance(context, (0,))[0].item(), 0.05**2, rel_tol=0.01)
