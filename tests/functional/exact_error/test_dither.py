import numpy as np
import pytest
import torch
from scipy import stats

from lightning_fedq.functional.exact_error.dither import (
    centred_dither,
    dither_quantize_row,
    release_grid,
    round_to_grid,
)
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from tests.functional.exact_error.reference import dither_dequantize, dither_quantize


def stream(purpose="test"):
    return PublicRandomness(SeededKeys(11), 0).public(purpose)


@pytest.mark.parametrize("value", [0.0, 0.37, -12345.678, 0.5])
def test_the_error_is_uniform_whatever_the_input(value):
    # false alarm 1e-4 per case
    dither = torch.from_numpy(centred_dither(stream().words64(200_000)))
    symbols = dither_quantize(torch.full((200_000,), value), dither, 1.7)
    error = (dither_dequantize(symbols, dither, 1.7) - np.float32(value)) / 1.7
    assert stats.kstest(error.numpy(), stats.uniform(-0.5, 1.0).cdf).pvalue > 1e-4
    assert error.abs().max() <= 0.5 + 1e-9


def test_the_dither_is_centred_and_never_at_an_end():
    words = np.array([0, 2**64 - 1, 2**63], np.uint64)
    low, high, middle = centred_dither(words)
    assert low > -0.5 and high < 0.5 and low == -high
    assert middle == 2.0**-54


def test_zero_is_sent_as_zero():
    dither = torch.from_numpy(centred_dither(stream().words64(1000)))
    assert not dither_quantize(torch.zeros(1000), dither, 0.01).any()


def test_a_row_is_quantised_by_the_formula():
    rng = np.random.default_rng(0)
    values, step = rng.normal(size=1000).astype(np.float32), rng.uniform(0.1, 2, 1000)
    dither, symbols = centred_dither(stream().words64(1000)), np.empty(1000, np.int32)
    largest = dither_quantize_row(values, 0.5, dither, step, symbols)
    scaled = torch.from_numpy(values).double() * 0.5
    wanted = dither_quantize(scaled, torch.from_numpy(dither), torch.from_numpy(step))
    assert torch.equal(torch.from_numpy(symbols).long(), wanted) and largest == wanted.abs().max()


def test_a_symbol_beyond_int64_is_reported_not_wrapped():
    symbols = np.ones(1, np.int64)
    one = np.ones(1)
    assert dither_quantize_row(np.array([1e300]), 1.0, 0.0 * one, one, symbols) >= 2.0**62
    assert symbols[0] == 0


def test_rounding_to_the_grid():
    values = torch.tensor([0.3, -0.126, 0.125], dtype=torch.float64)
    assert round_to_grid(values, 0.25).tolist() == [0.25, -0.25, 0.25]
    assert release_grid(3.0, 5) == 2.0 / 32.0
    assert release_grid(2.0, 5) == 2.0 / 32.0
