import numpy as np
import pytest
import torch

from lightning_fedq.functional.clip import truncate_to_grid
from lightning_fedq.functional.noise import fast_grid_noise
from lightning_fedq.functional.noise.fast_grid_noise import CHUNK, add_to_row, quantile_table
from lightning_fedq.functional.noise.grid_noise import FINE_BITS, GridNoise, quantile
from lightning_fedq.randomness import Stream

LAWS = ["gaussian", "laplace"]
SCALES = [1e-6, 3e-3, 0.4, 1.0, 7.3, 2e4, 1e6]


def slowly(row, ends, centers, factors, noise, words64):
    """Every coordinate by `GridNoise.add`."""
    sizes = torch.tensor([ends[0], *np.diff(ends).tolist()])
    centers, factors = (
        torch.tensor(t, dtype=torch.float64).repeat_interleave(sizes) for t in (centers, factors)
    )
    units = (row.double() - centers) * factors
    fine = truncate_to_grid(units.clamp(-1.0, 1.0), FINE_BITS)
    parts = [noise.add(fine[first : first + CHUNK], words64) for first in range(0, len(row), CHUNK)]
    return torch.cat(parts), int((units.abs() > 1.0).sum())


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("scale", SCALES)
def test_symbols_are_those_of_the_slow_way(law, scale):
    """In 200,000 coordinates some 400 have tails below 2^-11 or lie next to a step of the coarse grid."""
    noise, generator = GridNoise(law, scale), torch.Generator().manual_seed(0)
    row = torch.randn(200_000, generator=generator)
    lines = [1, 150_000, 200_000], [0.0, 0.1, -0.2], [1.0, 0.7, 1e-3]
    out = np.empty(len(row), np.int32)
    outside = add_to_row(row, np.array(lines, np.float64), noise, Stream(b"s" * 32).words64, out)
    symbols, expected = slowly(row, *lines, noise, Stream(b"s" * 32).words64)
    assert np.array_equal(out, symbols.numpy())
    assert outside == expected > 10_000


@pytest.mark.parametrize("law", LAWS)
def test_the_ends_of_the_words_and_of_the_table_are_no_exception(law):
    """Words around each power of two and around the cells next to it, on both sides of the middle."""
    noise = GridNoise(law, 1.0)
    near = [2**k + d for k in range(1, 64) for d in (-1, 0, 1, 2 ** max(k - 7, 0))]
    first = np.array([*near, *(2**64 - 1 - word for word in near), 0, 2**64 - 1, 2**63], np.uint64)
    row = torch.linspace(-1.0, 1.0, len(first), dtype=torch.float64)

    def words():
        drawn = [first, np.arange(len(first), dtype=np.uint64) << np.uint64(50)]
        return lambda count: drawn.pop(0)[:count]

    out = np.empty(len(first), np.int16)
    add_to_row(row, np.array([[len(row)], [0.0], [1.0]]), noise, words(), out)
    expected, _ = slowly(row, [len(row)], [0.0], [1.0], noise, words())
    assert np.array_equal(out, expected.numpy())


@pytest.mark.parametrize("law", LAWS)
def test_the_table_is_far_better_than_it_has_to_be(law):
    """At 64 places of each cell: 2^-27, where 2^-20 is allowed for."""
    table = quantile_table(law)
    places = np.arange(64) / 64.0
    cells = np.arange(table.shape[1])
    octave, cell = cells // 64, cells % 64
    levels = (1.0 + (cell[:, None] + places) / 64.0) * 2.0 ** (octave[:, None] + 53.0 - 64.0)
    used = levels <= 0.5  # no tail is larger
    found = np.einsum("kc,pk->cp", table, np.vander(places, 4, increasing=True))
    exact = quantile(law, torch.from_numpy(levels)).numpy()
    assert np.abs(found - exact)[used].max() < 2.0**-27


def test_what_the_table_leaves_open_matters(monkeypatch):
    """Some hundred symbols change sign where the slow way is given the words of the other side."""
    given = fast_grid_noise._given
    monkeypatch.setattr(fast_grid_noise, "_given", lambda first, words64: given(~first, words64))
    noise, row = GridNoise("gaussian", 1.0), torch.zeros(200_000)
    out = np.empty(len(row), np.int16)
    add_to_row(row, np.array([[len(row)], [0.0], [1.0]]), noise, Stream(b"s" * 32).words64, out)
    expected, _ = slowly(row, [len(row)], [0.0], [1.0], noise, Stream(b"s" * 32).words64)
    assert 100 < np.count_nonzero(out != expected.numpy()) < 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neither_type_nor_length_matters(dtype):
    noise = GridNoise("laplace", 0.3)
    for size in (1, 1023, 1025, CHUNK, CHUNK + 1):
        row = torch.linspace(-1.5, 1.5, size, dtype=dtype)
        out, lines = np.empty(size, np.int32), np.array([[size], [0.0], [1.0]])
        add_to_row(row, lines, noise, Stream(b"t" * 32).words64, out)
        expected, _ = slowly(row, [size], [0.0], [1.0], noise, Stream(b"t" * 32).words64)
        assert np.array_equal(out, expected.numpy())
