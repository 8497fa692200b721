import math

import numpy as np
import pytest
import torch
from scipy import stats

from reproductions.exact.langevin import (
    missing_variance,
    rounding_round_trip,
    shifted_round_trip,
    shifted_sigma,
)

RNG = np.random.default_rng(1)


def words(count):
    return RNG.integers(0, 2**64, count, dtype=np.uint64)


@pytest.mark.parametrize(
    ("bits", "sigma"), [(2, 0.424661), (3, 0.141554), (4, 0.0606658), (6, 0.0136987), (8, 0.00334379)]
)
def test_sigma_equals_the_specification_s(bits, sigma):
    assert shifted_sigma(bits) == pytest.approx(sigma, rel=3e-6)


@pytest.mark.parametrize("bits", [2, 5])
def test_the_error_is_gaussian_with_the_stated_variance(bits):
    values = torch.linspace(-3.0, 3.0, 100_000, dtype=torch.float64).repeat(2, 1)
    values[1] *= 10.0
    decoded, variances = shifted_round_trip(values, bits, words(800_000))
    assert variances.sqrt().tolist() == pytest.approx([3 * shifted_sigma(bits), 30 * shifted_sigma(bits)])
    errors = ((decoded - values) / variances.sqrt()[:, None]).numpy()
    # Kolmogorov-Smirnov at 1e-4 per row, a fixed seed
    assert all(stats.kstest(row, "norm").pvalue > 1e-4 for row in errors)
    # the error forgets the input: 4.5 standard errors of a correlation
    assert abs(np.corrcoef(errors[0], values[0])[0, 1]) < 4.5 / math.sqrt(100_000)


def test_rounding_is_unbiased_and_stays_inside():
    values = torch.tensor([[0.3, -1.7, 2.0, 0.0]], dtype=torch.float64).repeat(20_000, 1)
    decoded = rounding_round_trip(values, 3, words(80_000))
    assert decoded.abs().max() <= 2.0 + 1e-12
    # a cell is 4 / 7, so a std is at most 2 / 7: 4.5 standard errors, 4 means
    assert (decoded.mean(0) - values[0]).abs().max() < 4.5 * (2 / 7) / math.sqrt(20_000)


def test_a_row_of_zeros_stays_zero():
    decoded, variances = shifted_round_trip(torch.zeros(1, 5), 4, words(20))
    assert not decoded.any() and not variances.any()


def test_missing_variance_completes_the_noise_and_is_never_negative():
    found = missing_variance(0.1, torch.tensor([0.0, 5.0, 20.0, 30.0]))
    assert found.tolist() == pytest.approx([0.2, 0.15, 0.0, 0.0], abs=1e-7)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"bits must be in \[2, 24\], got 1"):
        shifted_sigma(1)
    with pytest.raises(ValueError, match=r"vectors must be a finite \(clients, dim\) tensor"):
        shifted_round_trip(torch.tensor([[1.0, math.nan]]), 4, words(8))
    with pytest.raises(ValueError, match=r"20 words are needed, got shape \(5,\)"):
        shifted_round_trip(torch.ones(1, 5), 4, words(5))
    with pytest.raises(ValueError, match=r"step_size must be > 0, got 0"):
        missing_variance(0.0, torch.zeros(1))
