"""Divergences against their definitions and the specification's test vectors."""

import math

import numpy as np
import pytest

from lightning_fedq.functional.divergences import (
    gaussian_delta,
    gaussian_epsilon,
    hockey_stick,
    randomized_response_delta,
    randomized_response_epsilon,
)

GRID = np.linspace(-3.0, 6.0, 61)


def test_hockey_stick_is_the_sum_of_the_positive_parts():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(12)), rng.dirichlet(np.ones(12))
    q[3] = 0.0
    expected = [np.maximum(p - math.exp(e) * q, 0.0).sum() for e in GRID]
    np.testing.assert_allclose(hockey_stick(p, q, GRID), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("epsilon_bit", "count", "expected"),
    [(0.1, 100, 4.30679137252), (0.1, 1000, 17.7871284497), (0.01, 10_000, 4.37638450926)],
)
def test_randomised_response_composes_exactly(epsilon_bit, count, expected):
    assert randomized_response_epsilon(epsilon_bit, count, 1e-5) == pytest.approx(expected, rel=1e-10)


def test_randomised_response_delta():
    assert randomized_response_delta(0.1, 100, 3.0) == pytest.approx(0.00136139869483, rel=1e-10)
    assert randomized_response_delta(1.0, 3, 3.5) == 0.0
    assert randomized_response_epsilon(0.1, 1, 0.9) == 0.0


@pytest.mark.parametrize(("epsilon", "sigma"), [(1.0, 3.73063163482), (5.0, 0.891868264952)])
def test_gaussian_epsilon_inverts_the_analytic_calibration(epsilon, sigma):
    assert gaussian_epsilon(1.0 / sigma, 1e-5) == pytest.approx(epsilon, rel=1e-9)
    assert gaussian_epsilon(1e-9, 1e-5) == 0.0
    assert gaussian_delta(1e-9, 5.0) == 0.0
