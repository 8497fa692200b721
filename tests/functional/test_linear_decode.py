"""Decoded sums in one pass."""

import pytest
import torch

from lightning_fedq.functional.linear_decode import decode_sum, decode_total, sum_of_rows

SEGMENTS = (3, 5000, 1, 9000)
BASE = torch.tensor([0.1, -3.0, 0.0, 7.0], dtype=torch.float64)
SLOPE = torch.tensor([1.0, 0.3, 1e-9, 1e9], dtype=torch.float64)


def formula(symbols, multiple, shift):
    sizes = torch.tensor(SEGMENTS)
    total = multiple * symbols.to(torch.int64).sum(0) - shift
    return (BASE.repeat_interleave(sizes) + SLOPE.repeat_interleave(sizes) * total.double()).float()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_equals_the_formula_bit_for_bit(dtype, num_rows):
    high = {torch.bool: 2, torch.uint8: 256, torch.int16: 2**15}.get(dtype, 2**31 - 1)
    generator = torch.Generator().manual_seed(0)
    symbols = torch.randint(0, high, (num_rows, sum(SEGMENTS)), generator=generator).to(dtype)
    wanted = formula(symbols, 2, num_rows)
    assert torch.equal(decode_sum(symbols, SEGMENTS, BASE, SLOPE, 2, num_rows), wanted)
    total = symbols.sum(0, dtype=torch.int64)
    assert torch.equal(decode_sum(total, SEGMENTS, BASE, SLOPE, 2, num_rows), wanted)
    across = symbols.T.contiguous().T
    assert torch.equal(decode_sum(across, SEGMENTS, BASE, SLOPE, 2, num_rows), wanted)


def test_sums_of_many_narrow_symbols_do_not_overflow():
    symbols = torch.full((70_000, 1), 2**15 - 1, dtype=torch.int16)
    one = torch.ones(1, dtype=torch.float64)
    assert decode_sum(symbols, (1,), 0 * one, one).item() == pytest.approx(70_000 * (2**15 - 1), rel=1e-7)


def test_float32_lines_are_widened():
    symbols = torch.ones(1, sum(SEGMENTS), dtype=torch.uint8)
    found = decode_sum(symbols, SEGMENTS, BASE.float(), SLOPE.float())
    sizes = torch.tensor(SEGMENTS)
    wanted = (BASE.float().double() + SLOPE.float().double()).float().repeat_interleave(sizes)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_sums_of_rows_are_exact(dtype):
    high = {torch.bool: 2, torch.uint8: 256, torch.int16: 2**15}.get(dtype, 2**31 - 1)
    symbols = torch.randint(0, high, (33, 9001), generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = symbols.sum(0, dtype=torch.int64).double()
    assert torch.equal(sum_of_rows(symbols), wanted)
    assert torch.equal(sum_of_rows(symbols.T.contiguous().T), wanted)
    assert torch.equal(sum_of_rows(wanted.to(torch.int64)), wanted)


def test_totals_are_decoded_by_the_formula_bit_for_bit():
    total = torch.randn(sum(SEGMENTS), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = torch.tensor(SEGMENTS)
    wanted = (BASE.repeat_interleave(sizes) + SLOPE.repeat_interleave(sizes) * total).float()
    assert torch.equal(decode_total(total, SEGMENTS, BASE, SLOPE), wanted)
