"""The accountant against dp_accounting's own mechanisms, case by case: never below their optimistic estimate.

A case is a loss, a number of compositions and a delta. dp_accounting rounds the same loss toward less privacy
("optimistic") and toward more ("pessimistic"); the truth lies between the two, and so must we, or above where
one grid serves several pairs. Closed forms, where dp_accounting has them, are met to 1e-9.
"""

import math

import numpy as np
import pytest
from dp_accounting.dp_event import ZCDpEvent
from dp_accounting.pld import privacy_loss_distribution as pld, privacy_loss_mechanism as plm
from dp_accounting.rdp import RdpAccountant
from hypothesis import HealthCheck, given, settings, strategies as st

from lightning_fedq.functional.divergences import gaussian_epsilon
from lightning_fedq.mechanisms.interface import (
    CoinSum,
    ConcentratedLoss,
    GaussianLoss,
    HiddenPair,
    LaplaceLoss,
    PmfPairs,
    SampledGaussianLoss,
)
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.losses import concentrated_epsilon

TOLERANCE = 1e-6
"""Relative, and of epsilon: their convolutions by FFT err by 1e-16 a cell, which a small delta feels."""

GRID = 1e-3
"""How far our grid of 64 points a standard deviation may lie above, per epsilon or standard deviation."""

positive = {"allow_nan": False, "allow_infinity": False}
cases = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["response", "gaussian", "laplace", "sampled", "coins", "pair", "zcdp"]),
        "level": st.floats(0.02, 2.0, **positive),
        "count": st.integers(1, 40),
        "exponent": st.floats(2.0, 8.0, **positive),
        "share": st.floats(0.01, 0.99, **positive),
        "coins": st.integers(1, 10),
    }
)


def response(level):
    return 1 / (1 + math.exp(level)), 1 / (1 + math.exp(-level))


def theirs(p, q, step, optimistic):
    logs = [{k: math.log(x) for k, x in enumerate(law) if x > 0} for law in (q, p)]
    return pld.from_two_probability_mass_functions(
        *logs, pessimistic_estimate=not optimistic, value_discretization_interval=step
    )


def epsilon_of(one, count, delta):
    return float(one.self_compose(count).get_epsilon_for_delta(delta))


def rounded(pessimistic, step):
    given = {"pessimistic_estimate": pessimistic, "use_connect_dots": pessimistic}
    return {**given, "value_discretization_interval": step}


def bounds(case):
    """The loss, dp_accounting's optimistic epsilon, and an upper bound of it or infinity."""
    kind, level, count, share = case["kind"], case["level"], case["count"], case["share"]
    delta, low_high = 10.0 ** -case["exponent"], response(level)
    low, high = low_high
    if kind == "response":
        pair = ((high, low), (low, high))
        made = [pld.from_randomized_response(2 * low, 2, o, level / 4) for o in (False, True)]
        return PmfPairs((pair,)), *(epsilon_of(one, count, delta) for one in made)
    if kind == "gaussian":
        std = 1 / level
        made = [pld.from_gaussian_mechanism(std, **rounded(o, level / 10)) for o in (False, True)]
        return GaussianLoss(std), *(epsilon_of(one, count, delta) for one in made)
    if kind == "laplace":
        made = [pld.from_laplace_mechanism(1 / level, **rounded(o, level / 16)) for o in (False, True)]
        # up to a thousandth of delta goes to truncated tails, twice
        most = epsilon_of(made[1], count, 0.998 * delta)
        return LaplaceLoss(1 / level), epsilon_of(made[0], count, delta), most
    if kind == "sampled":
        std = 0.5 + 1 / level
        step = min(share / std, 1 / std) / 6
        one = pld.from_gaussian_mechanism(std, sampling_prob=share, **rounded(False, step))
        return SampledGaussianLoss(std, share), epsilon_of(one, count, delta), math.inf
    if kind == "coins":
        coins = case["coins"]
        noise = np.ones(1)
        for _ in range(coins):
            noise = np.convolve(noise, [1 - low, low])
        p, q = np.convolve(noise, [low, high]), np.convolve(noise, [high, low])
        loss = CoinSum(low, high, (HiddenPair((low, high), (high, low), coins),))
        return loss, epsilon_of(theirs(p, q, level / 20, True), count, delta), count * level
    if kind == "pair":
        p, q = (share, 1 - share), (1 - share * low, share * low)
        largest = max(abs(math.log(a / b)) for a, b in zip(p, q, strict=True))
        made = [theirs(*pair, max(largest / 20, 1e-3), True) for pair in ((p, q), (q, p))]
        return PmfPairs(((p, q),)), max(epsilon_of(one, count, delta) for one in made), count * largest
    accountant = RdpAccountant(orders=1.0 + np.logspace(-3, 4, 150)).compose(ZCDpEvent(level**2), count)
    gaussian = gaussian_epsilon(level * math.sqrt(2 * count), delta)  # is level^2-concentrated
    return ConcentratedLoss(level**2), gaussian, accountant.get_epsilon(delta)


def check(case):
    loss, least, most = bounds(case)
    delta, count, level = 10.0 ** -case["exponent"], case["count"], case["level"]
    ours = spent(loss, delta, compositions=count).epsilon
    assert ours >= least * (1 - TOLERANCE) - TOLERANCE, (ours, least)
    above = GRID * max(most, level * math.sqrt(count)) if case["kind"] == "laplace" else TOLERANCE * most
    assert ours <= most + above + TOLERANCE, (ours, most)
    if case["kind"] == "gaussian":
        law = plm.GaussianPrivacyLoss(1 / level / math.sqrt(count))
        check_closed_form(law.get_delta_for_epsilon, ours, delta)
    if case["kind"] == "response":
        check_closed_form(lambda epsilon: response_delta(level, count, epsilon), ours, delta)
    if case["kind"] == "laplace" and count == 1:
        assert plm.LaplacePrivacyLoss(1 / level).get_delta_for_epsilon(ours) <= delta * (1 + 1e-9)
    if case["kind"] == "zcdp":
        assert ours == concentrated_epsilon(count * level**2, delta)


def check_closed_form(exact, ours, delta):
    """Epsilon is enough for delta, and a billionth less is not."""
    assert exact(ours) <= delta * (1 + 1e-9)
    assert ours == 0.0 or exact(ours * (1 - 1e-9) - 1e-12) >= delta * (1 - 1e-12)


def response_delta(level, count, epsilon):
    """Sum over all outcomes, in logarithms, so that no difference of large numbers is taken."""
    low, high = response(level)
    total = 0.0
    for ones in range(count + 1):
        loss = (2 * ones - count) * level
        if loss > epsilon:
            mass = math.comb(count, ones) * high**ones * low ** (count - ones)
            total -= mass * math.expm1(epsilon - loss)
    return total


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases)
def test_some_cases(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases)
def test_ten_thousand_cases(case):
    check(case)
