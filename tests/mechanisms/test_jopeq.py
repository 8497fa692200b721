import math

import numpy as np
import pytest
import torch
from scipy.stats import laplace

from lightning_fedq.mechanisms.interface import Adversary, PrivacyClaim, Unit
from lightning_fedq.mechanisms.jopeq import JoPEQ
from lightning_fedq.privacy.losses import LaplaceLoss, NonPrivate
from tests.audit.enumeration_words import enumerate_words, exact_law
from tests.one_round import decode, encode, make_context


def index_law(mechanism, x):
    """Law of the level for input x, by numerical integration over the dither."""
    u = (np.arange(4000) + 0.5) / 4000 - 0.5
    edges = (np.arange(1, mechanism.levels) - mechanism.levels / 2)[:, None]
    cdf = laplace.cdf((edges - u) * mechanism.step - x, scale=mechanism.noise_scale)
    cdf = np.vstack([np.zeros_like(u), cdf, np.ones_like(u)])
    return np.diff(cdf, axis=0), u


@pytest.mark.parametrize(("epsilon", "levels"), [(0.5, 2), (0.5, 3), (2.0, 5), (3.0, 9)])
@pytest.mark.parametrize("x", [0.0, 0.8])
def test_law_and_stated_bias(epsilon, levels, x):
    mechanism, dim = JoPEQ(epsilon, levels), 40_000
    law, u = index_law(mechanism, x)
    context = make_context(mechanism, (0,), (dim,), radius=2.0, center=-1.0)
    symbols = encode(mechanism, torch.full((1, dim), 2.0 * x - 1.0), context).symbols
    counts = torch.bincount(symbols[0], minlength=levels).numpy()
    expected = law.mean(1) * dim
    # Chi-square with up to 8 degrees of freedom: beyond 50 with probability 5e-8, 8 cases.
    assert ((counts - expected) ** 2 / expected).sum() < 50
    estimate = decode(mechanism, symbols, (0,), context).double()
    values = mechanism.step * (np.arange(levels) - (levels - 1) / 2)[:, None] - mechanism.step * u
    mean = (law * values).sum(0).mean()
    assert abs(estimate.mean() - (2.0 * mean - 1.0)) < 5 * estimate.std() / math.sqrt(dim)  # 5e-6 in all
    assert estimate.var() <= 1.05 * mechanism.noise_variance(context, (0,)).item()


def test_constants_of_the_specification():
    """Section 9: at epsilon = .5 and rate 1 (3 levels) the level is .523, not .5."""
    mechanism = JoPEQ(epsilon_per_coordinate=0.5, levels=3)
    assert mechanism.attained_epsilon == pytest.approx(0.523, abs=5e-4)
    assert mechanism.step == pytest.approx(2 * 1.5 * math.sqrt(33) / 3)
    total = 2 * mechanism.noise_scale**2 + mechanism.step**2 / 12
    assert total == pytest.approx(2 * (2 / 0.5) ** 2)


def test_claims_state_the_attained_level():
    mechanism = JoPEQ(epsilon_per_coordinate=0.5, levels=3)
    claims = mechanism.claims(make_context(mechanism, (0, 1), (9,)))
    assert [claim.adversary for claim in claims] == list(Adversary)
    for claim in claims:
        assert isinstance(claim.loss, LaplaceLoss) and claim.compositions == 9
        assert 1 / claim.loss.noise_multiplier == pytest.approx(0.523, abs=5e-4)
    # The index's law, for every dither, is within the claim (and above the nominal epsilon).
    ratio = np.abs(np.log(index_law(mechanism, 1.0)[0] / index_law(mechanism, -1.0)[0])).max()
    assert 0.5 < ratio <= 1 / claims[0].loss.noise_multiplier + 1e-12


def test_bits_on_the_wire():
    for levels, bits in ((2, 1), (3, 2), (5, 3)):
        mechanism = JoPEQ(epsilon_per_coordinate=1.0, levels=levels)
        context = make_context(mechanism, (0,), (50,))
        assert encode(mechanism, torch.zeros(1, 50), context).num_bits == 50 * bits


@pytest.mark.parametrize(
    ("epsilon", "levels"), [(0.001, 65), (12.0, 17), (12.0, 65), (12.0, 4096), (14.0, 65), (18.0, 65)]
)
def test_the_exact_law_in_whole_words_is_within_the_claim(epsilon, levels):
    """Every level's chance, counted over the 2^52 words that the encoder reads, for three dithers."""
    mechanism = JoPEQ(epsilon, levels)
    loss = mechanism.claims(make_context(mechanism, (0, 1), (9,)))[0].loss
    assert isinstance(loss, LaplaceLoss)
    for dither in (0, 1 << 50, (1 << 52) - 1):
        high, low = (exact_law(mechanism, value, dither) for value in (4.0, -4.0))
        assert high.keys() == low.keys()
        worst = max(abs(math.log(high[level] / low[level])) for level in high)
        assert worst <= loss.pure_epsilon
    assert loss.pure_epsilon == pytest.approx(mechanism.attained_epsilon, rel=1e-3)


@pytest.mark.parametrize("epsilon", [25.0, 30.0, 60.0])
def test_levels_that_the_noise_does_not_resolve_are_promised_to_nobody(epsilon):
    """From 30 on some levels are out of reach of the floats: their loss is infinite."""
    for claim in JoPEQ(epsilon, 65).claims(make_context(JoPEQ(1.0), (0, 1), (9,))):
        assert isinstance(claim.loss, NonPrivate)
        assert "do not resolve" in claim.loss.reason and "smaller epsilon" in claim.loss.reason


def test_the_enumeration_sees_an_excess_at_a_large_epsilon():
    """Its slack is relative: (1 + e^epsilon) 2^-40 would hide the missing tails of today's floats."""

    class Boast(JoPEQ):
        def claims(self, context):
            loss = LaplaceLoss(self.noise_scale / 2.0)
            return tuple(PrivacyClaim(who, loss, context.dim, unit=Unit.COORDINATE) for who in Adversary)

    assert enumerate_words(Boast(25.0, 65))
    assert not enumerate_words(JoPEQ(12.0, 65))
