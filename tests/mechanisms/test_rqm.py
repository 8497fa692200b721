"""RQM: its channel is the paper's algorithm, set of kept levels by set of kept levels."""

import math
from itertools import product

import numpy as np
import pytest
from scipy import special, stats

from lightning_fedq.audit.enumeration_words import exact_law
from lightning_fedq.mechanisms import RQM
from lightning_fedq.mechanisms.rqm import rqm_channel


def algorithm_2(x, levels, keep, reach):
    """The law of algorithm 2, summed over all sets of kept levels."""
    grid, law = np.linspace(-reach, reach, levels), np.zeros(levels)
    for inner in product((False, True), repeat=levels - 2):
        kept = [0, *(i + 1 for i, there in enumerate(inner) if there), levels - 1]
        chance = math.prod(keep if there else 1.0 - keep for there in inner)
        above = min(i for i in kept if grid[i] > x)
        below = max(i for i in kept if grid[i] <= x)
        up = (x - grid[below]) / (grid[above] - grid[below])
        law[above] += chance * up
        law[below] += chance * (1.0 - up)
    return law


@pytest.mark.parametrize(("levels", "keep", "reach"), [(2, 0.5, 2.0), (5, 0.4, 1.8), (10, 0.42, 2.0)])
def test_the_channel_is_algorithm_2(levels, keep, reach):
    """At every knot, and halfway between two, where a law is a mixture: 2^-32 of rounding apart."""
    channel = rqm_channel(levels, keep, reach)
    x = channel.knots
    laws = np.array([algorithm_2(value, levels, keep, reach) for value in x])
    np.testing.assert_allclose(channel.laws, laws, atol=levels * 2.0**-32)
    halves = (x[1:] + x[:-1]) / 2
    laws = np.array([algorithm_2(value, levels, keep, reach) for value in halves])
    np.testing.assert_allclose((channel.laws[1:] + channel.laws[:-1]) / 2, laws, atol=levels * 2.0**-32)
    np.testing.assert_allclose(channel.laws @ channel.values, x, atol=1e-8)
    assert channel.epsilon <= math.log(2.0 * reach / (reach - 1.0)) - (levels - 2) * math.log1p(-keep)


@pytest.mark.parametrize("theta", [0.15, 0.25, 0.35])
def test_it_beats_poisson_binomial_coins_as_published(theta):
    """Against the mechanism that the paper compares with, m = 16 coins of 1/2 +- theta, at q = 0.42 and the X
    of the same mean: smaller Renyi divergences, alone and behind seven others, and a smaller error."""
    channel = rqm_channel(16, 0.42, 0.5 / theta)
    coins = stats.binom.pmf(np.arange(17), 16, 0.5 + theta)
    assert channel.worst_variance < 16 / 4 / (16 * theta) ** 2

    def divergence(law, order, others):
        p, q = law, law[::-1]
        for _ in range(others):
            p, q = np.convolve(p, law), np.convolve(q, law)
        return special.logsumexp(order * np.log(p) - (order - 1.0) * np.log(q)) / (order - 1.0)

    for order, others in ((1.5, 0), (2.0, 0), (8.0, 0), (32.0, 0), (2.0, 7)):
        assert divergence(channel.laws[-1], order, others) < divergence(coins, order, others)


def test_two_levels_are_randomised_response_and_any_level_is_met():
    law = exact_law(RQM(1.0, levels=2), 4.0)
    assert float(law[1]) == pytest.approx(1.0 / (1.0 + math.exp(-1.0)), abs=1e-9)
    for epsilon in (1e-4, 0.1, 12.0):
        assert (1.0 - 1e-5) * epsilon < RQM(epsilon).channel.epsilon <= epsilon
