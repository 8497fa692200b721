"""One unknown round of a block: the specification's vectors, quadrature, simulation, and what breaks it."""

import math

import numpy as np
import pytest
from scipy import stats

from lightning_fedq.mechanisms.interface import Neighbours
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.losses import AllocatedGaussianLoss, GaussianLoss
from lightning_fedq.privacy.sampled import secret_epsilon

# std over the clip, rounds, epsilon at 1e-5, and how far above it is told
VECTORS = [
    (2.0, 2, 2.9433, 1e-3),
    (1.0, 2, 6.5730, 5e-3),
    (2.0, 10, 1.2043, 1e-3),
    (1.0, 10, 2.8451, 1e-3),
    (2.0, 100, 0.3426, 1e-3),
    (1.0, 100, 0.8254, 1e-3),
    (0.7, 100, 2.2996, 2e-3),
    (4.0, 100, 0.1601, 1e-3),
    (1.0, 1000, 0.2268, 2e-3),
]


def loss_of(std, rounds):
    """By std over the clip: between two updates lie two clips."""
    return AllocatedGaussianLoss(std / 2.0, rounds)


@pytest.mark.parametrize(("std", "rounds", "epsilon", "within"), VECTORS)
def test_the_vectors(std, rounds, epsilon, within):
    loss = loss_of(std, rounds)
    assert loss.delta(epsilon * (1.0 - within) - 1e-4) > 1e-5 >= loss.delta(epsilon * (1.0 + within))


def quadrature(m, epsilon):
    """delta of two rounds by the two-dimensional integral of the pair itself."""
    y = np.linspace(-11.0, 11.0, 2201)
    up, down, none = (stats.norm.pdf(y, mean) for mean in (m, -m, 0.0))
    p = 0.5 * (np.outer(up, none) + np.outer(none, up))
    q = 0.5 * (np.outer(down, none) + np.outer(none, down))
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum() * (y[1] - y[0]) ** 2)


@pytest.mark.parametrize("m", [0.5, 1.0])
def test_two_rounds_are_the_integral_of_the_pair_from_above(m):
    loss = loss_of(1.0 / m, 2)
    for epsilon in (0.0, 0.5, 1.0, 2.0):
        exact = quadrature(m, epsilon)
        assert exact - 2e-6 <= loss.delta(epsilon) <= exact + 2e-5


def test_any_strategy_of_two_rounds_is_within_the_pair():
    """The second round's two updates follow from the first release; unequal chances of rounds, too."""
    draws = np.random.default_rng(0)
    y = np.linspace(-9.0, 9.0, 301)
    cell, none = y[1] - y[0], stats.norm.pdf(y)
    first, second = y[:, None], y[None, :]
    worst = 0.0
    for _ in range(80):
        m, chance = draws.choice([0.5, 1.0, 2.0]), draws.choice([0.5, 0.5, 0.2])
        epsilon = draws.choice([0.0, 0.3, 1.0, 2.0])

        def world(at, later, weight):
            one = stats.norm.pdf(first, at) * none[None, :]
            other = none[:, None] * stats.norm.pdf(second, later[:, None])
            return np.asarray(weight * one + (1.0 - weight) * other)

        def followed(m):
            return m * np.clip(draws.normal() * y + draws.normal(), -1.0, 1.0)

        p, q = (world(m * draws.uniform(-1.0, 1.0), followed(m), chance) for _ in range(2))
        full = np.full_like(y, m)
        most = np.maximum(world(m, full, chance) - math.exp(epsilon) * world(-m, -full, chance), 0.0).sum()
        found = np.maximum(p - math.exp(epsilon) * q, 0.0).sum()
        assert found * cell**2 <= most * cell**2 + 1e-9
        worst = max(worst, found / most)
    assert 0.3 < worst <= 1.0 + 1e-9


def test_it_is_above_what_is_simulated():
    """Ten rounds, epsilon 1: 0.02972 by 400,000 draws of the pair, whose standard error is 1.1e-4."""
    draws, m, rounds = np.random.default_rng(1), 1.0, 10
    y = draws.normal(size=(400_000, rounds))
    y[:, 0] += m
    p, q = (np.exp(sign * m * y - 0.5 * m * m).mean(1) for sign in (1.0, -1.0))
    simulated = np.maximum(1.0 - math.e * q / p, 0.0)
    assert simulated.mean() == pytest.approx(loss_of(1.0, 10).delta(1.0), abs=6e-4)  # false alarm below 1e-5


def test_blocks_compose_and_are_no_longer_block():
    """Through the loss grid: one block to 0.3%, and two blocks of ten far above one of twenty."""
    loss = loss_of(1.0, 10)
    one, two = (spent(loss, 1e-5, rounds=blocks).epsilon for blocks in (1, 2))
    assert 2.8450 < one < 1.003 * 2.8451
    assert one < two < 2.0 * one
    assert loss_of(1.0, 20).delta(two / 1.5) < 1e-5
    assert GaussianLoss(0.5).epsilon(1e-5, 1) == pytest.approx(9.9973, abs=1e-4)


def test_it_is_below_cohorts_of_a_fixed_size_and_above_nothing():
    fixed = secret_epsilon(
        GaussianLoss(0.5), 1e-5, drawn=10, population=100, rounds=10, neighbours=Neighbours.SUBSTITUTION
    )
    assert fixed > 12.0 > 4.0 * spent(loss_of(1.0, 10), 1e-5).epsilon
    assert loss_of(1.0, 1).delta(3.0) == pytest.approx(float(GaussianLoss(0.5).curve(np.array([3.0]))[0]))


def test_dealt_into_equal_cohorts_is_another_thing():
    """Two clients, two rounds, one each, the other sends -C: 23.6 times the delta of independent draws."""
    m, epsilon = 0.5, 3.0
    y = np.linspace(-11.0, 11.0, 2201)
    up, down = stats.norm.pdf(y, m), stats.norm.pdf(y, -m)
    p = 0.5 * (np.outer(up, down) + np.outer(down, up))
    q = np.outer(down, down)
    dealt = float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum() * (y[1] - y[0]) ** 2)
    assert dealt == pytest.approx(1.677e-4, rel=1e-3)
    assert dealt > 20.0 * loss_of(1.0 / m, 2).delta(epsilon)


def test_the_curve_is_above_its_nodes_and_never_above_a_known_round():
    loss, places = loss_of(1.0, 10), np.linspace(-4.0, 14.0, 60)
    curve = loss.curve(places)
    assert (np.diff(curve) <= 1e-12).all()
    assert (curve <= GaussianLoss(0.5).curve(places) + 1e-12).all()
    some = np.array([0.0, 0.005, 0.3, 1.5, 2.9, 4.1])
    for place, value in zip(some, loss.curve(some), strict=True):
        assert value >= loss.delta(float(place)) - 1e-9


@pytest.mark.parametrize(("multiplier", "rounds"), [(0.01, 10), (0.03, 10), (1.0, 100_000)])
def test_what_no_transform_holds_is_the_known_round(multiplier, rounds):
    loss, known = AllocatedGaussianLoss(multiplier, rounds), GaussianLoss(multiplier)
    epsilons = np.array([-1.0, 0.0, 1.0, 50.0])
    assert np.array_equal(loss.curve(epsilons), known.curve(epsilons))
    assert loss.delta(1.0) == known.curve(np.array([1.0]))[0]


@pytest.mark.parametrize(("multiplier", "rounds"), [(0.0, 10), (math.inf, 10), (1.0, 0)])
def test_senseless_numbers_are_refused(multiplier, rounds):
    with pytest.raises(ValueError, match=r"noise_multiplier > 0 and rounds >= 1 are needed"):
        AllocatedGaussianLoss(multiplier, rounds)
