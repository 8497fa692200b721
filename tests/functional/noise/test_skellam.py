"""The Skellam law: exact thresholds, sampler, and the divergence bound against exact divergences."""

import math

import numpy as np
import pytest
from scipy import special, stats

from lightning_fedq.functional.noise.inversion import thresholds
from lightning_fedq.functional.noise.skellam import skellam, skellam_divergence, skellam_weights
from lightning_fedq.keys.randomness import Stream


@pytest.mark.parametrize("variance", [1e-3, 0.3, 1.0, 25.0, 4096.0])
def test_the_distribution_function_is_scipy_s(variance):
    """To 1e-9: scipy's own goes through a noncentral chi-square."""
    largest, found = thresholds(skellam_weights, variance, 64)
    ours = np.array([float(value) for value in found]) / 2.0**64
    points = np.arange(-largest, largest)
    assert len(points) == len(ours)
    logs = np.log(special.ive(np.abs(points).astype(float), variance))
    np.testing.assert_allclose(ours, np.cumsum(np.exp(logs)), atol=1e-9)
    assert ours[largest - 1] == pytest.approx(1.0 - ours[largest], abs=1e-15)  # symmetric


@pytest.mark.parametrize("variance", [0.5, 9.0])
def test_more_bits_refine_the_same_thresholds(variance):
    coarse_end, coarse = thresholds(skellam_weights, variance, 64)
    fine_end, fine = thresholds(skellam_weights, variance, 128)
    offset = fine_end - coarse_end
    for place in range(coarse_end // 2, 3 * coarse_end // 2):
        assert fine[place + offset] >> 64 == coarse[place]


@pytest.mark.parametrize("variance", [0.5, 9.0])
def test_draws_follow_the_law(variance):
    """Chi-square over 100,000 draws; a fresh key alarms with chance 1e-4, this one does not."""
    drawn = skellam(variance, 100_000, Stream(b"s" * 32).words64)
    ends = np.arange(-4, 5)
    counts = np.array([(drawn <= -5).sum(), *((drawn == z).sum() for z in ends), (drawn >= 5).sum()])
    inner = np.exp(np.log(special.ive(np.abs(ends).astype(float), variance)))
    outer = 0.5 * (1.0 - inner.sum())
    assert stats.chisquare(counts, 100_000 * np.array([outer, *inner, outer])).pvalue > 1e-4


@pytest.mark.parametrize("variance", [0.0, -1.0, math.nan, 2.0**33])
def test_a_variance_without_a_sampler_is_refused(variance):
    with pytest.raises(ValueError, match=r"the variance must be in \(0, 4.29497e\+09\] squared steps"):
        skellam(variance, 1, Stream(bytes(32)).words64)


def log_law(largest, variance):
    """ln P(z) for z = 0, ..., largest, also where it is far below the smallest float.

    By the ratios I_k / I_(k-1) = 1 / (2 k / v + I_(k+1) / I_k), from outside inwards, where errors die out.
    """
    ratios, ratio = [], 0.0
    for k in range(2 * largest + 60, 0, -1):
        ratio = 1.0 / (2.0 * k / variance + ratio)
        ratios.append(ratio)
    steps = np.log(np.array(ratios[::-1][:largest]))
    return np.concatenate([[0.0], np.cumsum(steps)]) + math.log(special.ive(0.0, variance))


def test_the_log_law_is_scipy_s_where_scipy_has_one():
    z = np.arange(60)
    np.testing.assert_allclose(log_law(59, 25.0), np.log(special.ive(z.astype(float), 25.0)), rtol=1e-11)


def exact_divergence(order, shift, variance):
    """ln of the sum over z of P(z - shift)^a Q(z)^(1 - a), over (a - 1), far into both tails."""
    # the tilted law has its middle between the shift and a times the shift
    reach = 60 + order * shift + int(20 * math.sqrt(variance))
    z, law = np.arange(-reach, reach + 1), log_law(reach + shift, variance)
    terms = order * law[np.abs(z - shift)] + (1 - order) * law[np.abs(z)]
    assert max(terms[0], terms[-1]) < terms.max() - 30.0
    return float(special.logsumexp(terms)) / (order - 1)


@pytest.mark.parametrize("variance", [0.05, 0.5, 4.0, 25.0, 400.0, 1e4])
@pytest.mark.parametrize("order", [2, 3, 8, 32, 256])
def test_the_bound_holds_and_is_tight_for_much_noise(order, variance):
    """Not tight in the large: there the Gaussian's part is far above what Poisson tails leak."""
    for shift in (1, 2, 5, 17):
        exact = exact_divergence(order, shift, variance)
        bound = skellam_divergence(order, shift, shift, variance)
        assert exact <= bound * (1.0 + 1e-9) + 1e-12
        if order * shift < 0.1 * variance:
            assert bound <= 1.35 * exact and exact >= 0.98 * order * shift**2 / (2.0 * variance)


def test_a_vector_costs_no_more_than_its_coordinates():
    """Divergences of independent coordinates add up, to no more than the bound of the vector."""
    for shift in ([3, 0, -1, 2], [1] * 16, [7]):
        norm, one_norm = math.sqrt(sum(x * x for x in shift)), sum(map(abs, shift))
        exact = sum(exact_divergence(4, abs(x), 30.0) for x in shift if x)
        assert exact <= skellam_divergence(4, norm, one_norm, 30.0)
