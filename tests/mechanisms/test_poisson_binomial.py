"""The Poisson binomial mechanism, as a setting of `RotatedCoins`."""

import math

import numpy as np
import pytest
from scipy import stats

from lightning_fedq.functional.one_bit.hidden_coin import hidden_coin_moments
from lightning_fedq.mechanisms import RotatedCoins
from tests.one_round import make_context

ORDERS = (2.0, 3.0, 8.0)
VECTORS = [
    (10, 1, 0.1, (0.017039606, 0.02579704, 0.071340232), 4),
    (10, 4, 0.1, (0.067750937, 0.10256613, 0.28379632), 6),
    (100, 1, 0.05, (0.00040428229, 0.00060658382, 0.001619668), 7),
    (100, 16, 0.05, (0.0064673011, 0.0097035161, 0.025909798), 11),
]


def divergences(clients, coins, theta, highs):
    """Of the sum, if one client goes from end to end of the range and `highs` others are at the top."""
    low = (clients - 1 - highs) * coins
    lows = stats.binom.pmf(np.arange(low + 1), low, 0.5 - theta)
    tops = stats.binom.pmf(np.arange(highs * coins + 1), highs * coins, 0.5 + theta)
    law, own = np.convolve(lows, tops), np.arange(coins + 1)
    p, q = (np.convolve(law, stats.binom.pmf(own, coins, 0.5 + sign * theta)) for sign in (1, -1))
    seen = np.minimum(p, q) > 1e-200  # the rest adds nothing that float64 would notice
    pairs = [(p[seen], q[seen]), (q[seen], p[seen])]
    return [max(math.log(float(a @ (a / b) ** (o - 1))) / (o - 1) for a, b in pairs) for o in ORDERS]


@pytest.mark.parametrize("clients, coins, theta, worst, bits", VECTORS)
def test_the_claim_is_no_stronger_than_the_exact_divergences(clients, coins, theta, worst, bits):
    """Exact laws of the sum for a full flip, worst case of the others; the claim composes k single coins."""
    splits = {0, clients // 2, clients - 1}
    exact = np.max([divergences(clients, coins, theta, highs) for highs in splits], 0)
    assert exact == pytest.approx(worst, rel=1e-5)
    mechanism = RotatedCoins(
        1.0, math.log((0.5 + theta) / (0.5 - theta)), bits_per_coordinate=coins, wrap_probability=0.0
    )
    low, high = mechanism.coin.probabilities
    assert (low, high) == pytest.approx((0.5 - theta, 0.5 + theta), abs=1e-9)
    moments = hidden_coin_moments(low, high, clients - 1, ORDERS)
    claimed = coins * np.log1p(moments * (2 * theta) ** 2) / (np.array(ORDERS) - 1)
    assert (claimed >= exact * (1 - 1e-6)).all() and (claimed <= 1.2 * exact).all()
    modulus = mechanism.symbol_modulus(make_context(mechanism, range(clients), (64,)))[0]
    assert modulus == 2**bits and modulus > clients * coins
