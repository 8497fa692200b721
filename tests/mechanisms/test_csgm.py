"""CSGM's claims against the laws of what it sends, by integration and by simulation."""

import itertools
import math
from functools import lru_cache

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats

from lightning_fedq.audit import audit
from lightning_fedq.mechanisms import CSGM
from lightning_fedq.mechanisms.interface import Adversary, Neighbours
from lightning_fedq.privacy.accounting import spent
from tests.one_round import decode, encode, make_context

EPSILONS = np.array([0.0, 0.1, 0.3, 1.0, 2.0, 4.0, 6.0, 8.0])
DRAWS = 20_000


@lru_cache(maxsize=256)
def levels_of(mechanism, value):
    """What a coordinate of `value` is sent as, and how often, by messages of the shipped encoder.

    Chances are those that leave the value unbiased; what was sent is within 6 standard errors of them.
    """
    context = make_context(mechanism, (0,), (DRAWS,))
    symbols = encode(mechanism, torch.full((1, DRAWS), value), context).symbols.numpy().ravel()
    symbols = symbols[symbols > 0]
    found, counts = np.unique(symbols, return_counts=True)
    top = 2**mechanism.bits - (1 if mechanism.rounding == "odd" else 0)
    places = np.linspace(-1.0, 1.0, top)[found - 1]
    if len(places) == 1:
        return {float(places[0]): 1.0}
    low, high = places
    up = float((value - low) / (high - low))
    assert abs(counts[1] / len(symbols) - up) <= 6.0 * math.sqrt(up * (1.0 - up) / len(symbols))
    return {float(low): 1.0 - up, float(high): up}


def worst_of(p, q, z, gamma, epsilons=EPSILONS):
    """Largest hockey stick of both orders, by integration; a coordinate is sent with gamma."""

    def density(law):
        return lambda x: (
            (1 - gamma) * stats.norm.pdf(x, 0, z)
            + gamma * sum(chance * stats.norm.pdf(x, place, z) for place, chance in law.items())
        )

    x = np.linspace(-1 - 12 * z, 1 + 12 * z, 20_001)
    pairs = list(itertools.permutations((density(p)(x), density(q)(x))))
    excess = [[np.maximum(a - math.exp(epsilon) * b, 0.0) for a, b in pairs] for epsilon in epsilons]
    return np.max(integrate.trapezoid(excess, x), 1)


def outsiders_loss(mechanism):
    claims = mechanism.claims(make_context(mechanism, range(3), (1,)))
    return next(claim.loss for claim in claims if claim.adversary is Adversary.OUTSIDER)


SETTINGS = [("odd", 2), ("odd", 3), ("even", 1), ("even", 2)]


@pytest.mark.parametrize("gamma", [0.1, 0.3, 0.5, 0.6, 0.8, 1.0])
@pytest.mark.parametrize(("levels", "bits"), SETTINGS)
def test_the_claims_hold_for_every_selection_probability(levels, bits, gamma):
    """Zero against the values that are sent without a coin, and one that is not, at much and little noise."""
    for z in (0.3, 1.0, 3.0):
        mechanism = CSGM(1.0, z, gamma, bits, rounding=levels)
        claims = {c.adversary: c for c in mechanism.claims(make_context(mechanism, range(3), (1,)))}
        zero = levels_of(mechanism, 0.0)
        for value in (1.0, -1.0, 0.7, 1.0 / 3.0):
            sent = levels_of(mechanism, value)
            outsider = worst_of(sent, zero, z, gamma)
            assert (claims[Adversary.OUTSIDER].loss.curve(EPSILONS) >= outsider - 1e-6).all()
            # the curious client knows the selection and its own third of the noise
            client = worst_of(sent, zero, z * math.sqrt(2 / 3), 1.0)
            assert (claims[Adversary.CLIENT].loss.curve(EPSILONS) >= client - 1e-6).all()


@pytest.mark.parametrize("gamma", [0.1, 0.5, 0.9])
def test_without_a_level_zero_a_hidden_selection_counts(gamma):
    """One coordinate, z = 4, delta 1e-5. The farthest levels alone are 1.27, whatever gamma is."""
    mechanism = CSGM(1.0, 4.0, gamma, 2, rounding="even")
    found = spent(outsiders_loss(mechanism), 1e-5).epsilon
    sent = levels_of(mechanism, 1.0), levels_of(mechanism, 0.0)
    exact = optimize.brentq(lambda epsilon: worst_of(*sent, 4.0, gamma, [epsilon])[0] - 1e-5, 1e-3, 5.0)
    assert exact < found < 1.4 * exact


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_zero_is_a_level_and_is_sent_as_zero(bits):
    mechanism = CSGM(0.7, 1.0, 0.5, bits)
    assert levels_of(mechanism, 0.0) == {0.0: 1.0}
    claims = mechanism.claims(make_context(mechanism, (0, 1), (9,)))
    assert {claim.neighbours for claim in claims} == {Neighbours.ZERO_OUT}
    context = make_context(mechanism, (0,), (DRAWS,))
    zeros = encode(mechanism, torch.zeros(1, DRAWS), context).symbols
    silent = decode(mechanism, torch.zeros_like(zeros), (0,), context)
    assert torch.equal(decode(mechanism, zeros, (0,), context), silent)


def test_the_claim_is_sharp_at_the_largest_value():
    """Equality with the sampled Gaussian: the odd form's claim could not be smaller."""
    exact = worst_of({1.0: 1.0}, {0.0: 1.0}, 1.0, 0.5)
    assert outsiders_loss(CSGM(1.0, 1.0, 0.5)).curve(EPSILONS) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("settings", [{}, {"rounding": "even", "bits": 1}, {"rounding": "even", "bits": 2}])
def test_the_audit_raises_no_alarm_where_everybody_is_selected(settings):
    findings = audit(CSGM(1.0, 1.0, **settings), 100_000)
    assert findings and not [finding.view for finding in findings if finding.alarm]
