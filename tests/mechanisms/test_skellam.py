"""The Skellam mechanism: what its claims say and count, and how it compares with the discrete Gaussian."""

import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from lightning_fedq.functional.noise.skellam import skellam_divergence
from lightning_fedq.lab.audit import audit
from lightning_fedq.mechanisms import DistributedDiscreteGaussian, Skellam
from lightning_fedq.mechanisms.interface import Adversary, AuditCase, RenyiLoss
from lightning_fedq.privacy.target import PrivacyTarget
from tests.described import Setting, calibrate
from tests.one_round import context_of, decode, encode


def test_who_sees_whose_noise():
    mechanism = Skellam(1.0, 0.5, 0.05, max_dropped=2)
    context = context_of(mechanism, range(10), (64,))
    claims = {claim.adversary: claim for claim in mechanism.claims(context)}
    norm = 2 * mechanism.bound(context)
    for who, summands in (
        (Adversary.EAVESDROPPER, 1),
        (Adversary.SERVER, 1),
        (Adversary.SECAGG_SERVER, 8),
        (Adversary.OUTSIDER, 8),
        (Adversary.CLIENT, 7),
    ):
        loss = claims[who].loss
        assert isinstance(loss, RenyiLoss)
        bound = skellam_divergence(8, norm, min(8 * norm, norm**2), summands * 100.0)
        assert loss.divergence(8) == pytest.approx(bound, rel=1e-12)
    behind = {claim.adversary: claim for claim in mechanism.claims(replace(context, num_corrupt=3))}
    assert behind[Adversary.SECAGG_SERVER].loss.divergence(8) == pytest.approx(
        skellam_divergence(8, norm, min(8 * norm, norm**2), 500.0), rel=1e-12
    )


def test_on_a_fine_grid_it_costs_what_the_discrete_gaussian_costs():
    """And never less: its bound is the Gaussian's and a term in the l1 norm."""
    ratios = []
    for granularity in (0.1, 0.01, 0.001):
        pair = [kind(1.0, 1.0, granularity, bits=20) for kind in (Skellam, DistributedDiscreteGaussian)]
        context = context_of(pair[0], range(100), (1000,))
        ours, theirs = (
            next(c for c in m.claims(context) if c.adversary is Adversary.SECAGG_SERVER).loss for m in pair
        )
        ratios.append(ours.epsilon(1e-5, 10) / theirs.epsilon(1e-5, 10))
    assert ratios[0] > ratios[1] > ratios[2] >= 1.0 - 1e-3
    assert ratios[2] < 1.01


def test_the_error_of_the_mean_is_the_noise_and_the_rounding():
    """1,024 coordinates, 20 clients: the variance's standard deviation is 4.4%."""
    mechanism = Skellam(1.0, 0.3, 0.05)
    context = context_of(mechanism, range(20), (1024,))
    rows = torch.randn(20, 1024, generator=torch.Generator().manual_seed(0))
    rows = rows / rows.norm(dim=1, keepdim=True)
    symbols = encode(mechanism, rows, context).symbols.sum(0) % 2**16
    error = decode(mechanism, symbols, context.cohort, context) / 20 - rows.mean(0)
    bound = mechanism.noise_variance(context, context.cohort).item()
    assert bound == pytest.approx((0.3**2 + 0.05**2 / 4) / 20)
    assert error.square().mean().item() == pytest.approx(bound, rel=0.22)


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_a_target_sets_its_noise(epsilon):
    mechanism = Skellam(1.0, 1.0, 0.01)
    setting = Setting(context_of(mechanism, range(1000), (500,)), 10, 1e-5, secure_aggregation=True)
    target = PrivacyTarget(epsilon, 1e-5, Adversary.SECAGG_SERVER, "run")
    found = calibrate(target, mechanism, setting, 10)
    assert isinstance(found.mechanism, Skellam)
    assert 0.99 * epsilon <= found.epsilon <= epsilon
    other = calibrate(target, DistributedDiscreteGaussian(1.0, 1.0, 0.01), setting, 10)
    assert found.mechanism.local_sigma == pytest.approx(other.mechanism.local_sigma, rel=0.05)


def test_the_audit_sees_noise_that_is_left_out():
    """The plant adds none; the right one at the same draws is not refuted."""
    case = Skellam(1.0, 1.0, 0.01).audit_cases(1024)[0]
    assert isinstance(case, AuditCase)
    assert not any(finding.alarm for finding in audit(case, 20_000, alpha=1e-3))
    none = patch.object(Skellam, "_noise", lambda self, count, words: np.zeros(count, np.int64))
    with none:
        assert any(finding.alarm for finding in audit(case, 20_000, alpha=1e-3))


def test_orders_reach_small_and_large_epsilons():
    """The best order is inside the list for epsilons from 0.1 to 30: the ends bind beyond."""
    mechanism = Skellam(1.0, 1.0, 0.001, bits=20)
    for clients, rounds in ((20_000, 1), (100, 1), (4, 3)):
        context = context_of(mechanism, range(clients), (64,))
        (loss,) = (c.loss for c in mechanism.claims(context) if c.adversary is Adversary.OUTSIDER)
        orders, total = np.array(loss.orders), rounds * np.array(loss.divergences)
        bounds = total + np.log1p(-1 / orders) - (math.log(1e-5) + np.log(orders)) / (orders - 1)
        assert 0 < bounds.argmin() < len(orders) - 1
