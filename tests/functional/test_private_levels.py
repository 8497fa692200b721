import numpy as np
import pytest

from lightning_fedq.functional.noise.quantile_table import quantile_table
from lightning_fedq.functional.private_levels import draw_outputs, noisy_levels, sum_of_outputs
from lightning_fedq.keys.randomness import Stream

TABLE = quantile_table("laplace")
COUNT = 200_000


def units():
    return np.concatenate([[-1.0, 1.0, 0.0], np.random.default_rng(0).uniform(-1.0, 1.0, COUNT - 3)])


def noisy(scale, step, levels, private, shared):
    """Levels as NumPy computes them."""
    centered = ((private >> np.uint64(12)).astype(np.float64) * 2.0**-52 + 2.0**-53) - 0.5
    noise = -scale * np.sign(centered) * np.log1p(-2.0 * np.abs(centered))
    dither = ((shared >> np.uint64(12)).astype(np.float64) * 2.0**-52 + 2.0**-53) - 0.5
    place = (units()[: len(private)] + noise) / step + dither
    return np.clip(np.floor(place + levels / 2), 0, levels - 1)


@pytest.mark.parametrize("scale, step, levels", [(2.0, 1.5, 3), (0.4, 0.01, 513), (100.0, 30.0, 2)])
def test_levels_are_those_without_a_table(scale, step, levels):
    private, shared = (Stream(key * 32).words64(COUNT) for key in (b"p", b"s"))
    near = [2**k + d for k in range(1, 64) for d in (-1, 0, 1)]
    ends = np.array([*near, *(2**64 - 1 - word for word in near), 0, 2**64 - 1], np.uint64)
    private[: len(ends)] = ends
    out = np.empty(COUNT, np.int32)
    noisy_levels(units(), private, shared, scale, step, levels, TABLE, out)
    assert np.array_equal(out, noisy(scale, step, levels, private, shared))


def test_a_table_that_is_wrong_is_found_out():
    """A table off by 1e-3: the test above has teeth."""
    private, shared = (Stream(key * 32).words64(COUNT) for key in (b"p", b"s"))
    out = np.empty(COUNT, np.int32)
    noisy_levels(units(), private, shared, 0.4, 0.01, 513, TABLE + 1e-3, out)
    assert np.count_nonzero(out != noisy(0.4, 0.01, 513, private, shared)) > 100


@pytest.mark.parametrize("points, outputs", [(2, 2), (4, 4), (16, 13)])
def test_outputs_are_the_formula_bit_for_bit(points, outputs):
    counts = np.random.default_rng(1).dirichlet(np.ones(outputs), points)
    edges = np.floor(np.cumsum(counts, axis=1)[:, :-1] * 2.0**32).astype(np.uint32)
    up, words = (Stream(key * 32).words(COUNT) for key in (b"u", b"w"))
    place = (units() + 1.0) * (0.5 * (points - 1))
    below = np.floor(place)
    point = (below + (up < np.ceil((place - below) * 2.0**32))).astype(np.int64)
    out = np.empty(COUNT, np.uint8)
    draw_outputs(units(), up, words, edges, out)
    assert np.array_equal(out, (words[:, None] >= edges[point]).sum(1))


@pytest.mark.parametrize("points", [2, 3])
def test_outputs_have_exactly_their_law(points):
    """All 2^8 top bytes of both words stand for 2^24 words each where counts are multiples of them."""
    counts = np.array([[100, 50, 106], [30, 200, 26], [6, 50, 200]])[:points]
    knots = np.linspace(-1.0, 1.0, points)
    edges = np.cumsum(counts, axis=1)[:, :-1].astype(np.uint32) << np.uint32(24)
    up, words = (w.ravel().astype(np.uint32) << np.uint32(24) for w in np.mgrid[:256, :256])
    for value in (-1.0, -0.5, 0.25, 1.0):
        out = np.empty(len(up), np.uint8)
        draw_outputs(np.full(len(up), value), up, words, edges, out)
        wanted = [np.interp(value, knots, 256 * column) for column in counts.T]
        assert np.array_equal(np.bincount(out, minlength=3), wanted)


@pytest.mark.parametrize("dim", [1, 2048, 5000])
def test_sums_of_outputs_go_row_by_row(dim):
    generator = np.random.default_rng(0)
    rows, values = generator.integers(0, 5, (7, dim), np.uint8), generator.normal(size=5)
    total = np.zeros(dim)
    sum_of_outputs(rows, values, total)
    wanted = np.zeros(dim)
    for row in rows:
        wanted += values[row]
    assert np.array_equal(total, wanted)
