"""Sums over many rows."""

import math

import pytest
import torch

from lightning_fedq.functional.accumulate import FloatSum, sum_of_squares


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 4099), (3, 100_003)])
def test_squares_are_added_up_in_float64(shape, dtype):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    exact = math.fsum(value * value for value in values.flatten().tolist())
    assert sum_of_squares(values) == pytest.approx(exact, rel=1e-12)
    assert sum_of_squares(values.T) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 1, 5000, 9999])
def test_one_number_that_is_not_finite_shows(bad, dtype, place):
    values = torch.ones(10_000, dtype=dtype)
    values[place] = bad
    values[(place + 1) % 10_000] = -bad  # what a plain sum turns into a NaN, at the latest
    assert not math.isfinite(sum_of_squares(values))


def test_float32_up_to_its_largest_has_a_finite_sum():
    assert math.isfinite(sum_of_squares(torch.full((1000,), torch.finfo(torch.float32).max)))


@pytest.mark.parametrize("spread", [0.0, 8.0])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_floats_add_up_to_the_same_bits_in_any_parts_and_order(spread, ranks):
    first, second = torch.randn(2, 300, 500, generator=torch.Generator().manual_seed(1))
    terms = first * (spread * second).exp()
    whole, parts = FloatSum(500), [FloatSum(500) for _ in range(ranks)]
    for i, term in enumerate(terms):
        whole.add(term)
        parts[i % ranks].add(term)
    together = FloatSum(500)
    for part in reversed(parts):
        together.add_sum(part.parts)
    assert torch.equal(whole.value(), together.value())
    assert whole.value().tolist() == [math.fsum(column) for column in terms.T.tolist()]
