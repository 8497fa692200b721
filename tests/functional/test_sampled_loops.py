"""The compiled loops against NumPy, bit for bit."""

import numpy as np
import pytest

from lightning_fedq.functional import sampled_loops as loops


@pytest.fixture(params=[0.0, 0.3, 1.0])
def drawn(request):
    """500 coordinates, some of them selected."""
    generator = np.random.default_rng(0)
    selected = generator.random(500) < request.param
    return generator, selected


def test_counting(drawn):
    generator, _ = drawn
    words, total = generator.integers(0, 2**32, 500, np.uint32), np.ones(500, np.int32)
    loops.add_below(words, 2**31, total)
    assert np.array_equal(total, 1 + (words < 2**31))
    mask = np.zeros(500, np.bool_)
    loops.add_below(words, 2**31, mask)
    assert np.array_equal(mask, words < 2**31)


@pytest.mark.parametrize("cells", [1, 2, 6, 2**16 - 2])
def test_rounding(drawn, cells):
    generator, selected = drawn
    units, words = generator.uniform(-1.0, 1.0, 500), generator.integers(0, 2**32, 500, np.uint32)
    units[:4] = -1.0, 1.0, 0.0, 1.0
    words[1:4] = 2**32 - 1
    symbols = np.empty(500, np.int32)
    sent = loops.round_selected(units, words, selected, cells, symbols)
    place = (units + 1.0) * (0.5 * cells)
    floor = np.minimum(np.floor(place), cells - 1)
    up = words.astype(np.uint64) < ((place - floor) * 2.0**32).astype(np.uint64)
    assert np.array_equal(symbols, np.where(selected, floor + up + 1, 0))
    assert sent == selected.sum()


def test_taking_and_putting_back(drawn):
    generator, selected = drawn
    count, scales = selected.sum(), np.array([1.0, 0.5, 0.25])
    words, taken = generator.integers(0, 2**64, 2000, np.uint64), np.empty(2004, np.uint64)
    assert loops.take_words(words, selected, taken) == count
    assert np.array_equal(taken[: 4 * count], words.reshape(500, 4)[selected].ravel())
    units, counts = generator.normal(size=500), generator.integers(0, 3, 500, np.int32)
    values, factors = np.empty(501), np.empty(501)
    loops.take_scaled(units, counts, scales, selected, values, factors)
    assert np.array_equal(values[:count], units[selected])
    assert np.array_equal(factors[:count], scales[counts[selected]])
    sent, symbols = generator.integers(-9, 9, count + 1).astype(np.int32), np.full(500, 77, np.int32)
    loops.put_selected(sent, selected, symbols)
    assert np.array_equal(symbols[selected], sent[:count])
    assert not symbols[~selected].any()


def test_decoding(drawn):
    generator, selected = drawn
    count, scales = selected.sum(), np.array([1.0, 0.3, 0.2])
    symbols, counts = generator.integers(-9, 9, 500).astype(np.int32), generator.integers(0, 3, 500, np.int32)
    dither, step, offset = generator.normal(size=(3, count))
    total = generator.normal(size=500)
    wanted = total.copy()
    by = scales[counts[selected]]
    wanted[selected] += ((symbols[selected] - dither) * (step * by) + offset * by) / 0.4
    loops.add_decoded_selected(symbols, selected, counts, scales, dither, step, offset, 0.4, total)
    assert np.array_equal(total, wanted)
    wanted[selected] -= dither * step
    loops.subtract_noise(selected, dither, step, total)
    assert np.array_equal(total, wanted)
