"""Leakage: the specification's vectors."""

import math

import pytest
import torch

from lightning_fedq.functional.trade_off import (
    clopper_pearson,
    jensen_shannon,
    leakage_factor,
    log_ratio,
    recovery_leakage,
)


@pytest.mark.parametrize(
    "p, q, expected",
    [
        ([0.9, 0.1], [0.5, 0.5], 0.101749225),
        ([1.0, 0.0], [0.5, 0.5], 0.215761554),
        ([0.2, 0.3, 0.5], [1 / 3] * 3, 0.017250981),
        ([1.0, 0.0], [0.0, 1.0], 0.693147181),
    ],
)
def test_divergence_vectors(p, q, expected):
    assert jensen_shannon(p, q) == pytest.approx(expected, abs=6e-10)
    assert jensen_shannon(q, p) == pytest.approx(expected, abs=6e-10)


@pytest.mark.parametrize(
    "rate, candidates, expected",
    [
        *((1.0, 100, 0.815534434), (0.5, 100, 0.442579216), (0.1, 100, 0.159307966)),
        *((1.0, 10, 0.724980915), (0.0, 100, 0.0)),
    ],
)
def test_leakage_vectors(rate, candidates, expected):
    assert recovery_leakage(rate, candidates) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(
    "xi, expected", [(0.05, 0.052585459), (0.5, 0.859140914), (1, 3.194528049), (3, 201.214396746)]
)
def test_factor_vectors(xi, expected):
    assert leakage_factor(xi) == pytest.approx(expected, abs=1e-9)


def test_the_root_is_a_metric():
    generator = torch.Generator().manual_seed(2)
    for _ in range(300):
        laws = torch.rand(3, 6, generator=generator, dtype=torch.float64)
        a, b, c = (laws / laws.sum(1, keepdim=True)).tolist()
        ab, bc, ac = (math.sqrt(jensen_shannon(*pair)) for pair in ((a, b), (b, c), (a, c)))
        assert ac <= ab + bc + 1e-12


def test_clopper_pearson_covers():
    """Known limits (scipy's documentation of binomtest, exact method, agrees) and exact coverage."""
    from scipy.stats import binom, binomtest

    for hits, attempts in ((0, 10), (3, 20), (20, 20)):
        expected = binomtest(hits, attempts).proportion_ci(0.9, "exact")
        assert clopper_pearson(hits, attempts, 0.9) == pytest.approx((expected.low, expected.high))
    limits = [clopper_pearson(k, 30) for k in range(31)]
    assert sum(binom.pmf(k, 30, 0.2) for k, (low, high) in enumerate(limits) if low <= 0.2 <= high) >= 0.95


def test_a_factor_of_a_log_ratio():
    assert leakage_factor(log_ratio(0.9, 100)) == pytest.approx(4059, rel=1e-3)


def test_refusals():
    with pytest.raises(ValueError, match="hit_rate must be in"):
        recovery_leakage(1.1, 10)
    with pytest.raises(ValueError, match="confidence must be in"):
        clopper_pearson(1, 2, 1.0)
