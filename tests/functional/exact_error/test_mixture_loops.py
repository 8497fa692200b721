"""The compiled loops of the aggregate Gaussian against slower ways to the same numbers, bit for bit."""

import numpy as np
import pytest

from lightning_fedq.functional.exact_error.decompose import decomposition, draw_special
from lightning_fedq.functional.exact_error.depths import draw_depths
from lightning_fedq.functional.exact_error.dither import (
    add_centred_dither,
    add_dequantized_row,
    dither_quantize_row,
)
from lightning_fedq.functional.exact_error.mixture_loops import (
    add_dequantized_with_step,
    quantize_places,
    quantize_with_step,
    special_radii,
)
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from reproductions.exact.formulas import draw_mixture


def words(purpose):
    return PublicRandomness(SeededKeys(2), 0).public(purpose).words64


@pytest.mark.parametrize(
    ("n", "target"), [(1, "gaussian"), (3, "gaussian"), (10, "laplace"), (300, "gaussian")]
)
def test_most_coordinates_need_no_logarithm_and_none_is_decided_otherwise(n, target):
    """Where the coin and a product of tails decide, the exact radius and its coin decide the same."""
    plan, drawn = decomposition(n, target), words(f"sure {n}{target}")(4 * 200_000)
    depths = np.concatenate([_depths(part, target) for part in np.split(drawn, 1600)])
    radius = np.sqrt(2.0 * depths) if target == "gaussian" else depths * 0.7071067811865476
    coin = (drawn[::4] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    wanted = np.flatnonzero(coin >= plan.coin(radius))
    places, radii = np.empty(200_001, np.int64), np.empty(200_001)
    table = plan.coin.coefficients, plan.coin.width
    found = special_radii(drawn, target == "gaussian", *table, *plan.sure, places, radii)
    assert np.array_equal(places[:found], wanted)
    assert np.array_equal(radii[:found], radius[wanted])
    # without the short way, too; a threshold that is too generous is found out
    none = special_radii(drawn, target == "gaussian", *table, 0, np.inf, places, radii)
    assert none == found
    if n == 3:
        assert special_radii(drawn, True, *table, plan.sure[0] * 2, plan.sure[1], places, radii) < found


def _depths(drawn, target):
    depths = np.empty(len(drawn) // 4)
    draw_depths(drawn, target == "gaussian", depths)
    return depths


def test_special_coordinates_are_those_of_the_mixture():
    plan = decomposition(10)
    special = draw_special(plan, 100_000, words("listed"))
    scale, shift = draw_mixture(plan, 100_000, words("listed"))
    assert np.array_equal(np.flatnonzero((scale != 1.0) | (shift != 0.0)), special.places)
    assert len(special.places) == pytest.approx(100_000 * (1.0 - plan.core), rel=0.1)
    assert np.array_equal(scale[special.places], special.scale)
    assert np.array_equal(shift[special.places], special.shift)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_step_and_a_few_others(dtype):
    """As with an array of steps, to the last bit, in a stretch that begins at coordinate 1,000."""
    generator, drawn = np.random.default_rng(0), words("dither")(1300)
    values, places = generator.normal(size=1300).astype(dtype), np.array([1000, 1600, 2299])
    steps, offsets = np.array([1e-9, 0.3, 5.0]), generator.normal(size=3)
    symbols, dither, step, offset = (
        np.empty(1300, np.int64),
        np.zeros(1300),
        np.full(1300, 0.7),
        np.zeros(1300),
    )
    largest = quantize_with_step(values, 0.9, drawn, 0.7, symbols)
    largest = max(largest, quantize_places(values, 0.9, drawn, 1000, places, steps, symbols))
    add_centred_dither(drawn, dither)
    step[places - 1000], offset[places - 1000] = steps, offsets
    wanted = np.empty(1300, np.int64)
    assert largest == dither_quantize_row(values, 0.9, dither, step, wanted)
    assert np.array_equal(symbols, wanted)
    total = generator.normal(size=1300)
    by_row = total.copy()
    add_dequantized_row(symbols, dither, step, offset, by_row)
    add_dequantized_with_step(symbols, dither, 0.7, places - 1000, steps, offsets, total)
    assert np.array_equal(total, by_row)


def test_a_symbol_beyond_62_bits_is_reported():
    symbols = np.empty(3, np.int64)
    largest = quantize_with_step(np.array([1.0, -3.0, 0.0]), 1.0, words("dither")(3), 2.0**-62, symbols)
    assert largest == 3.0 * 2.0**62
    assert symbols.tolist() == [0, 0, symbols[2]]
