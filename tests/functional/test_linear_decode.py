"""Decoded sums: integers of every type, added exactly."""

import pytest
import torch

from lightning_fedq.functional.linear_decode import decode_sum, sum_of_rows

SEGMENTS = (3, 5000, 1, 9000)
BASE = torch.tensor([0.1, -3.0, 0.0, 7.0], dtype=torch.float64)
SLOPE = torch.tensor([1.0, 0.3, 1e-9, 1e9], dtype=torch.float64)
TYPES = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64]


def drawn(dtype):
    high = {torch.bool: 2, torch.uint8: 256, torch.int16: 2**15}.get(dtype, 2**31 - 1)
    return torch.randint(0, high, (33, sum(SEGMENTS)), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_equals_the_formula_bit_for_bit(dtype):
    sizes, symbols = torch.tensor(SEGMENTS), drawn(dtype)
    total = symbols.sum(0, dtype=torch.int64)
    exact = BASE.repeat_interleave(sizes) + SLOPE.repeat_interleave(sizes) * (2 * total - 33).double()
    for sent in (symbols, total, symbols.T.contiguous().T):
        assert torch.equal(decode_sum(sent, SEGMENTS, BASE, SLOPE, 2, 33), exact.float())
        assert torch.equal(sum_of_rows(sent), total.double())


def test_sums_of_many_narrow_symbols_do_not_overflow():
    symbols = torch.full((70_000, 1), 2**15 - 1, dtype=torch.int16)
    one = torch.ones(1, dtype=torch.float64)
    assert decode_sum(symbols, (1,), 0 * one, one).item() == pytest.approx(70_000 * (2**15 - 1), rel=1e-7)
