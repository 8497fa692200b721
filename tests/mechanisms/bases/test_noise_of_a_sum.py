"""The noise of a sum of Gaussian messages: sqrt(n) times one's own, on the grid that is shipped."""

import math

import numpy as np
import pytest
from scipy import stats

from lightning_fedq.audit import audit
from lightning_fedq.functional.noise.grid_noise import GridNoise
from lightning_fedq.mechanisms import GaussianNoise, PerCoordinateGaussian
from lightning_fedq.mechanisms.interface import Adversary
from tests.described import Setting
from tests.privacy.test_setting import context

EPSILONS = np.array([0.0, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0])


def claims_of(mechanism, clients, **settings):
    known = Setting(context(mechanism, clients), 1, 1e-5, secure_aggregation=True, **settings)
    return known.claims(mechanism)


def symbol_law(noise, value):
    """Chances of one client's symbols by the normal distribution function alone, and the first symbol."""
    fine = round(value * 2**30)
    first, last = (math.floor((fine * 2.0**-30 + s * 12 * noise.scale) / noise.step) for s in (-1, 1))
    # symbol k: fine + round(noise) + half a coarse step in [k, k + 1) coarse steps
    half = 1 << noise.shift >> 1
    ends = (np.arange(first, last + 2) * 2.0**noise.shift - half - fine - 0.5) * 2.0**-30
    return np.diff(stats.norm.cdf(ends / noise.scale)), first


def law_of_sum(noise, values):
    law, first = np.ones(1), 0
    for value in values:
        one, start = symbol_law(noise, value)
        law, first = np.convolve(law, one), first + start
    return {first + k: chance for k, chance in enumerate(law.tolist())}


@pytest.mark.parametrize("clients", [2, 3, 10])
@pytest.mark.parametrize("multiplier", [0.3, 0.51, 1.7])
def test_rounding_every_message_costs_the_sum_nothing(clients, multiplier):
    """All symbols of the sum counted, the others anywhere on their grids: below and near the claim.

    A sum of cells is the cell of a Gaussian with n variances and n - 1 uniforms on top, so it is
    post-processing of the one that is claimed.
    """
    mechanism = GaussianNoise(1.0, multiplier)
    others = [0.37, -0.91, 0.0123, 1.0, -0.5, 0.77, 0.2, -1.0, 0.05][: clients - 1]
    high, low = (law_of_sum(mechanism.noise, [value, *others]) for value in (1.0, -1.0))
    loss = claims_of(mechanism, clients)[Adversary.SECAGG_SERVER].loss
    curve = loss.curve(EPSILONS)
    keys = sorted(high.keys() | low.keys())
    p, q = (np.array([law.get(k, 0.0) for k in keys]) for law in (high, low))
    for epsilon, claimed in zip(EPSILONS, curve, strict=True):
        for one, other in ((p, q), (q, p)):
            exact = np.maximum(one - math.exp(epsilon) * other, 0.0).sum()
            assert exact <= claimed + 1e-12
            assert exact >= 0.93 * claimed - 1e-9


def test_who_hides_whom():
    """Outsider: all n; curious client: n - 1; behind secure aggregation: those that do not collude."""
    mechanism = GaussianNoise(1.0, 2.0)
    noise = {who: claim.loss.noise_multiplier for who, claim in claims_of(mechanism, 100).items()}
    assert noise[Adversary.SERVER] == noise[Adversary.EAVESDROPPER] == 2.0
    assert noise[Adversary.OUTSIDER] == noise[Adversary.SECAGG_SERVER] == pytest.approx(20.0)
    assert noise[Adversary.CLIENT] == pytest.approx(2.0 * math.sqrt(99))
    colluding = claims_of(mechanism, 100, max_colluding_fraction=0.3)
    assert colluding[Adversary.SECAGG_SERVER].loss.noise_multiplier == pytest.approx(2.0 * math.sqrt(70))
    assert colluding[Adversary.OUTSIDER].loss.noise_multiplier == pytest.approx(20.0)
    lying = claims_of(mechanism, 100, max_colluding_fraction=0.3, min_survivors=67)
    assert lying[Adversary.SECAGG_SERVER].loss.noise_multiplier == pytest.approx(2.0 * math.sqrt(37))


def test_the_victims_own_noise_is_always_there():
    for settings in ({"max_colluding_fraction": 0.99}, {"max_colluding_fraction": 0.5, "min_survivors": 1}):
        loss = claims_of(GaussianNoise(1.0, 2.0), 4, **settings)[Adversary.SECAGG_SERVER].loss
        assert loss.noise_multiplier == 2.0
    assert claims_of(GaussianNoise(1.0, 2.0), 2)[Adversary.CLIENT].loss.noise_multiplier == 2.0


def test_dropouts_take_noise_away_and_half_of_delta():
    """Except with a fourth of 1e-5 a round so many others answer, by the binomial law of scipy."""
    claims = claims_of(GaussianNoise(1.0, 2.0), 100, dropout_probability=0.3)
    loss = claims[Adversary.SECAGG_SERVER].loss
    answers = int(stats.binom.ppf(1e-5 / 2, 99, 0.7))
    assert loss.noise_multiplier == pytest.approx(2.0 * math.sqrt(1 + answers))
    assert any("half of delta" in text for text in claims[Adversary.SECAGG_SERVER].assumptions)


def test_dropouts_that_may_leave_the_victim_alone_fall_back_on_its_message():
    claims = claims_of(GaussianNoise(1.0, 2.0), 3, dropout_probability=0.5)
    assert claims[Adversary.OUTSIDER].loss == claims[Adversary.SERVER].loss


def test_every_clients_sampler_is_paid_for():
    mechanism = PerCoordinateGaussian(1.0, 1e-3)
    claims = claims_of(mechanism, 50)
    one, all_ = (claims[who].slack for who in (Adversary.SERVER, Adversary.OUTSIDER))
    assert all_.log_ratio == pytest.approx(50 * one.log_ratio)
    assert 50 * one.distance < all_.distance <= 50 * (one.distance + 10 * 2.0**-63)


def test_the_audit_does_not_refute_the_sum():
    findings = audit(GaussianNoise(1.0, 0.5), 100_000)
    assert {"the sum of all messages", "a curious client"} <= {finding.view for finding in findings}
    assert not [finding for finding in findings if finding.alarm]


def test_a_grid_noise_is_hardly_ever_cut_off():
    noise = GridNoise("gaussian", 1.0)
    assert 0.0 < noise.clipped <= 2.0**-63
    far = (2.0 ** (noise.bits - 1) - 2.0) * noise.step - 1.0
    assert noise.clipped >= 2.0 * stats.norm.sf(far)
