from itertools import product

import pytest
import torch

from lightning_fedq.functional.one_bit.multi_level import (
    level_step,
    multi_level_dequantize_sum,
    multi_level_quantize,
    multi_level_shifts,
)


def test_steps_of_the_paper():
    """beta = (k + 1) / (k (k - 1)), in units of half the range twice that; one bit spans the range."""
    assert level_step(2) == 2.0
    assert level_step(3) == pytest.approx(2 * 4 / 6)
    assert level_step(16) == pytest.approx(2 * 17 / 240)


@pytest.mark.parametrize("levels", [2, 3, 4, 7, 256])
def test_the_mean_over_words_is_the_value(levels):
    """The two words around the threshold, found by bisection, give P(up) exactly to 2^-32."""
    words32 = torch.tensor([0, 2**31, 2**32 - 1], dtype=torch.int64)
    shifts = multi_level_shifts(words32, levels, 3)
    for value, shift in product([-1.0, -0.83, 0.0, 0.2, 0.999, 1.0, 5.0, -7.0], shifts):
        x, v = torch.tensor([value], dtype=torch.float64), shift[None]
        symbol = lambda word: multi_level_quantize(x, torch.tensor([word]), v, levels).item()  # noqa: B023, E731
        low, high = 0, 2**32
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if symbol(middle) > symbol(2**32 - 1) else (low, middle)
        mean = symbol(2**32 - 1) + low / 2**32
        decoded = multi_level_dequantize_sum(torch.tensor([mean], dtype=torch.float64), 1, v, levels)
        assert decoded.item() == pytest.approx(min(max(value, -1.0), 1.0), abs=3e-9)
        assert 0 <= symbol(2**32 - 1) <= symbol(0) <= levels - 1


def test_two_levels_have_no_shift():
    assert multi_level_shifts(torch.empty(0), 2, 4).tolist() == [0.0] * 4
