import math
from bisect import bisect_right

import numpy as np
import pytest
from scipy import stats

from lightning_fedq.functional.noise.discrete_gaussian import (
    concentration,
    conditional_rounding,
    discrete_gaussian,
    discrete_gaussian_variance,
    gaussian_weights,
    rounded_norm_bound,
    sum_gap,
)
from lightning_fedq.functional.noise.inversion import thresholds
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from reproductions.exact.formulas import renyi_divergence


def words(purpose="discrete"):
    return PublicRandomness(SeededKeys(9), 0).public(purpose).words64


@pytest.mark.parametrize("sigma", [0.3, 0.5, 1.0, 4.7, 35.6])
def test_the_law_is_the_discrete_gaussian(sigma):
    # chi-square over cells with >= 20 expected; false alarm 1e-4 per case
    count = 400_000
    drawn = discrete_gaussian(sigma, count, words(f"{sigma}"))
    z = np.arange(-500, 501)
    law = np.exp(-(z**2) / (2 * sigma**2))
    expected = count * law / law.sum()
    common = expected >= 20
    seen = np.array([(drawn == value).sum() for value in z[common]])
    rest, rest_expected = count - seen.sum(), count - expected[common].sum()
    chi = ((seen - expected[common]) ** 2 / expected[common]).sum()
    chi += (rest - rest_expected) ** 2 / max(rest_expected, 1)
    assert stats.chi2(common.sum()).sf(chi) > 1e-4


@pytest.mark.parametrize(("sigma", "variance"), [(0.3, 0.0076725), (0.5, 0.2150127), (1.0, 1.0)])
def test_its_variance_is_below_sigma_squared_when_sigma_is_small(sigma, variance):
    assert discrete_gaussian_variance(sigma) == pytest.approx(variance, abs=3e-7)


def taken_from(queue):
    """Words in the order in which they are asked for."""
    return lambda count: np.array([queue.pop(0) for _ in range(count)], np.uint64)


def test_a_word_on_a_threshold_is_decided_by_more_bits():
    sigma = 1.0
    largest, coarse = thresholds(gaussian_weights, sigma, 64)
    _, fine = thresholds(gaussian_weights, sigma, 128)
    place = largest  # the threshold of P(X <= 0)
    offset = (len(fine) - len(coarse)) // 2
    low_bits = fine[place + offset] - (coarse[place] << 64)
    assert 0 < low_bits < 2**64
    for extra, wanted in ((low_bits - 1, 0), (low_bits + 1, 1)):
        queue = [coarse[place], extra]
        assert discrete_gaussian(sigma, 1, taken_from(queue)).tolist() == [wanted] and not queue


def test_extreme_words_stay_in_the_tails():
    low, high = discrete_gaussian(2.0, 2, taken_from([0, 2**64 - 1, 12345, 2**64 - 12345]))
    assert -28 <= low < -15 and 15 < high <= 28


@pytest.mark.parametrize("sigma", [0.3, 4.7, 100.0])
def test_every_threshold_parts_the_words_beside_it(sigma):
    largest, found = thresholds(gaussian_weights, sigma, 64)
    beside = {word + step for word in (0, *found, 2**64 - 1) for step in (-1, 0, 1)}
    decided = sorted(word for word in beside - set(found) if 0 <= word < 2**64)
    drawn = discrete_gaussian(sigma, len(decided), lambda n: np.array(decided, np.uint64))
    assert drawn.tolist() == [bisect_right(found, word) - largest for word in decided]


def test_a_tail_thinner_than_any_word_is_no_overflow():
    assert not discrete_gaussian(0.05, 1000, words()).any()


# section 11 of the specification: n = 500, d = 128, c = 10, beta = e^-0.5
@pytest.mark.parametrize(
    ("grid", "sigma", "tau", "norm"),
    [
        (0.433619, 1.90963, 7.4e-83, 10.5554),
        (0.00674399, 0.240314, 0.0, 10.0035),
        (1.73225, 1.39018, 0.0379, 15.1763),
    ],
)
def test_published_numbers(grid, sigma, tau, norm):
    assert grid * rounded_norm_bound(10 / grid, 128, math.exp(-0.5)) == pytest.approx(norm, abs=6e-5)
    assert sum_gap(500, sigma / grid) == pytest.approx(tau, rel=0.01, abs=1e-100)


def test_conditional_rounding_is_unbiased_and_bounded():
    # mean of 4,000 roundings: 4.5 standard errors, false alarm 4e-4 over 64 coordinates
    values = np.random.default_rng(0).normal(size=64)
    bound = rounded_norm_bound(float(np.linalg.norm(values)), 64, math.exp(-0.5))
    draw = words("rounding")
    rounded = np.empty((4000, 64), np.int64)
    for row in rounded:
        conditional_rounding(values, bound, draw, row)
    assert np.sqrt((rounded**2).sum(1)).max() <= bound
    assert np.abs(rounded - values).max() < 1.0
    # conditioning shifts the mean by less than 0.02 at this bound
    assert np.abs(rounded.mean(0) - values).max() < 4.5 * 0.5 / math.sqrt(4000) + 0.02


def test_renyi_bound_covers_one_discrete_gaussian():
    # n = 1: closed form of the Renyi divergence of N_Z(0, s^2) from its shift by 1, by summation
    sigma, z = 0.8, np.arange(-40, 41)
    log_p, log_q = -(z**2) / (2 * sigma**2), -((z - 1) ** 2) / (2 * sigma**2)
    log_p, log_q = log_p - np.log(np.exp(log_p).sum()), log_q - np.log(np.exp(log_q).sum())
    for order in (1.5, 2.0, 8.0):
        exact = math.log(np.exp(order * log_p + (1 - order) * log_q).sum()) / (order - 1)
        bound = renyi_divergence(order, 1.0, 1.0, 1, 1, sigma)
        assert exact <= bound * (1 + 1e-12)
        assert bound <= order * concentration(1.0, 1.0, 1, 1, sigma) * (1 + 1e-12)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"sigma must be in \(0, 65536\] integer steps, got 0.0"):
        discrete_gaussian(0.0, 1, words())
    with pytest.raises(ValueError, match="1,000 roundings"):
        conditional_rounding(np.full(4, 5.5), 1.0, words(), np.empty(4, np.int64))
