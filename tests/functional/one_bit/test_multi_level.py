from itertools import product

import numpy as np
import pytest

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
    shifts = multi_level_shifts(np.array([0, 2**31, 2**32 - 1], np.uint32))
    if levels == 2:
        shifts = np.zeros(1)

    def quantize(value, word, v):
        return int(multi_level_quantize(np.array([value]), np.array([word], np.uint32), v, levels)[0])

    for value, shift in product([-1.0, -0.83, 0.0, 0.2, 0.999, 1.0], shifts):
        v = np.array([shift])
        lowest, low, high = quantize(value, 2**32 - 1, v), 0, 2**32 - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if quantize(value, middle, v) > lowest else (low, middle)
        mean = lowest + low / 2**32
        decoded = multi_level_dequantize_sum(np.array([mean]), 1, v, levels)
        assert decoded.item() == pytest.approx(value, abs=3e-9)
        assert 0 <= lowest <= quantize(value, 0, v) <= levels - 1
