"""The vertex theorem against brute force, the specification's vectors and exact compositions."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from lightning_fedq.functional.divergences import gaussian_epsilon, hockey_stick
from lightning_fedq.functional.one_bit.hidden_coin import ORDERS, _of_a_split, hidden_coin_moments
from lightning_fedq.privacy.losses import RenyiLoss


def extremes(t):
    return (1.0 - t) / 2.0, (1.0 + t) / 2.0


@pytest.mark.parametrize(
    ("others", "t", "wanted"),
    [
        (9, math.tanh(0.25), (0.4462297455, 1.395691742, 2.951336692, 20.15921077, 463.6455425)),
        (0, 0.5, (5.333333333, 23.11111111, 77.03703704, 6557.000457, 43046717)),
        (99, 0.1, (0.04043640183, 0.1213903821, 0.2429921593, 1.1402191, 4.989322689)),
    ],
)
def test_vectors_of_the_specification(others, t, wanted):
    found = hidden_coin_moments(*extremes(t), others, (2.0, 3.0, 4.0, 8.0, 16.0))
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


def law_of(probabilities):
    law = np.ones(1)
    for q in probabilities:
        law = np.convolve(law, [1.0 - q, q])
    return law


@pytest.mark.parametrize("others", [0, 1, 2, 5])
@pytest.mark.parametrize("t", [0.1, 0.5, 0.9])
def test_no_inputs_exceed_the_theorem_and_some_reach_it(others, t):
    """Any inputs of the others, any two of the victim, both orders: never above, and tight."""
    low, high = extremes(t)
    rng = np.random.default_rng(others)
    orders = (2.0, 3.0, 3.5, 8.0, 20.0)
    bound = hidden_coin_moments(low, high, others, orders)
    largest = np.zeros(len(orders))
    inputs = [tuple(v) for v in itertools.combinations_with_replacement((low, high), others)]
    inputs += [tuple(rng.uniform(low, high, others)) for _ in range(20)]
    points = np.linspace(low, high, 9)
    points = np.concatenate([points, [low + 1e-3 * t, high - 1e-3 * t]])
    for known in inputs:
        noise = law_of(known)
        laws = [np.convolve(noise, [1.0 - q, q]) for q in points]
        for (q, p_law), (other, q_law) in itertools.permutations(zip(points, laws, strict=True), 2):
            u = p_law / q_law - 1.0
            for k, a in enumerate(orders):
                excess = float(q_law @ (np.expm1(a * np.log1p(u)) - a * u))
                largest[k] = max(largest[k], excess / (q - other) ** 2)
    assert (largest <= bound * (1 + 1e-9)).all()
    assert (largest >= 0.99 * bound).all()


@pytest.mark.parametrize("others", [1, 3, 6])
@pytest.mark.parametrize("t", [0.1, 0.6])
def test_a_pair_that_rounds_with_complementary_words_shows_no_more(others, t):
    """`others` independent coins beside the pair; the pair's joint law from its shared word and two coins."""
    low, high = extremes(t)
    orders = (2.0, 3.0, 5.0, 16.0)
    bound = hidden_coin_moments(low, high, others + 1, orders)

    def of_the_pair(first, second):
        tau = first + second - 1.0
        both, none = max(tau, 0.0), max(-tau, 0.0)
        two, one, zero = law_of((high, high)), law_of((high, low)), law_of((low, low))
        return both * two + none * zero + (1.0 - abs(tau)) * one

    points = np.linspace(0.0, 1.0, 9)
    worst = np.zeros(len(orders))
    for ones in range(others + 1):
        noise = law_of((high,) * ones + (low,) * (others - ones))
        for partner in points:
            laws = [np.convolve(noise, of_the_pair(x, partner)) for x in points]
            for (x, p_law), (y, q_law) in itertools.permutations(zip(points, laws, strict=True), 2):
                u = p_law / q_law - 1.0
                gap = t * (x - y)
                for k, a in enumerate(orders):
                    excess = float(q_law @ (np.expm1(a * np.log1p(u)) - a * u))
                    worst[k] = max(worst[k], excess / gap**2)
    assert (worst <= bound * (1 + 1e-9)).all()
    assert (worst >= 0.9 * bound).all()


def test_bounds_of_stretches_lose_little():
    """1,200 coins in stretches of three splits, against splits one by one."""
    low, high = extremes(0.3)
    orders = np.array([2.0, 8.0, 32.0])
    found = hidden_coin_moments(low, high, 1200, tuple(orders))
    exact = np.max([_of_a_split(low, high, 1200, j, orders) for j in range(0, 1201, 7)], 0)
    assert (found >= exact).all() and (found <= 1.003 * exact).all()


def test_a_change_spread_in_any_way_spends_no_more():
    """A change of Delta in l2, equal in 4, 25 or 100 coordinates; the number of ones says all: exact."""
    low, high = extremes(math.tanh(0.5))
    sensitivity, rounds, delta = 0.8, 3, 1e-5
    moments = hidden_coin_moments(low, high, 0)
    step = sensitivity * (high - low) / 2.0
    loss = RenyiLoss(ORDERS, tuple(moments * step**2 / (np.array(ORDERS) - 1.0)))
    bound, exact = loss.epsilon(delta, rounds), []
    for dim in (4, 25, 100):
        ones = np.arange(dim * rounds + 1)
        p, q = (stats.binom.pmf(ones, dim * rounds, x) for x in (low, low + step / math.sqrt(dim)))
        for first, second in ((p, q), (q, p)):
            epsilons = np.linspace(0.0, 8.0, 4001)
            exact.append(epsilons[hockey_stick(first, second, epsilons) > delta].max())
    assert 0.5 * bound < max(exact) <= bound


def test_many_coins_come_near_the_normal_limit_from_above():
    """mu^2 = T (Delta t / (2 r))^2 / (n q (1 - q)); the conversion costs about a sixth of mu^2."""
    low, high = extremes(0.2193)
    distance = 0.2193 * math.sqrt(8192) / 4.5
    moments = hidden_coin_moments(low, high, 999)
    loss = RenyiLoss(ORDERS, tuple(moments * distance**2 / (np.array(ORDERS) - 1.0)))
    normal = gaussian_epsilon(distance * math.sqrt(30 / (1000 * low * high)), 1e-5)
    assert normal < loss.epsilon(1e-5, 30) < 1.1 * normal


def test_a_biased_coin_alone_has_large_orders_that_say_nothing():
    found = hidden_coin_moments(*extremes(math.tanh(2.0)), 3)
    assert np.isfinite(found[:10]).all() and not np.isnan(found).any() and found[-1] == math.inf


def test_orders_that_the_theorem_does_not_cover_are_refused():
    with pytest.raises(ValueError, match="orders must be 2 or >= 3"):
        hidden_coin_moments(0.4, 0.6, 3, (2.5,))
