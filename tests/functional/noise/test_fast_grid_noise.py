import numpy as np
import pytest
import torch

from lightning_fedq.functional.noise import fast_grid_noise
from lightning_fedq.functional.noise.fast_grid_noise import CHUNK, add_to_rows, quantile_table
from lightning_fedq.functional.noise.grid_noise import FINE_BITS, GridNoise, quantile
from lightning_fedq.keys.randomness import Stream
from tests.functional.grid import truncate_to_grid

LAWS = ["gaussian", "laplace"]
SCALES = [1e-6, 3e-3, 0.4, 1.0, 7.3, 2e4, 1e6]


def streams(count):
    return [Stream(bytes([row]) * 32).words64 for row in range(count)]


def fast(rows, segments, center, factors, noise, sources):
    """Symbols of all rows, and how many values were cut off."""
    out = torch.empty(rows.shape, dtype=torch.int32)
    return out, add_to_rows(rows, segments, center, factors, noise, sources, out)


def slow(rows, segments, center, factors, noise, sources):
    """The same, every coordinate by `GridNoise.add`."""
    sizes, found, outside = torch.tensor(segments), [], 0
    for row, factor, words64 in zip(rows, factors, sources, strict=True):
        units = (row.double() - center.repeat_interleave(sizes)) * factor.repeat_interleave(sizes)
        fine = truncate_to_grid(units.clamp(-1.0, 1.0), FINE_BITS)
        found.append(torch.cat([noise.add(part, words64) for part in fine.split(CHUNK)]))
        outside += int((units.abs() > 1.0).sum())
    return torch.stack(found).int(), outside


def lines(*pairs):
    """Centres and factors of segments."""
    center, factors = torch.tensor(pairs, dtype=torch.float64).T
    return center, factors[None]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("scale", SCALES)
def test_symbols_are_those_of_the_slow_way(law, scale):
    """In 200,000 coordinates some 400 have tails below 2^-11 or lie next to a step of the coarse grid."""
    rows = torch.randn(1, 200_000, generator=torch.Generator().manual_seed(0))
    play = rows, [1, 149_999, 50_000], *lines((0.0, 1.0), (0.1, 0.7), (-0.2, 1e-3)), GridNoise(law, scale)
    found, outside = fast(*play, streams(1))
    symbols, expected = slow(*play, streams(1))
    assert torch.equal(found, symbols)
    assert outside == expected > 10_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 1023, 1025, CHUNK, CHUNK + 1])
def test_neither_type_nor_length_nor_the_other_rows_matter(dtype, size):
    rows = torch.linspace(-1.5, 1.5, 3 * size, dtype=dtype).reshape(3, size)
    factors = torch.tensor([[1.0], [0.5], [3.0]], dtype=torch.float64)
    play = rows, [size], torch.zeros(1), factors, GridNoise("laplace", 0.3)
    found, outside = fast(*play, streams(3))
    symbols, expected = slow(*play, streams(3))
    assert torch.equal(found, symbols)
    assert outside == expected


@pytest.mark.parametrize("law", LAWS)
def test_the_ends_of_the_words_and_of_the_table_are_no_exception(law):
    """Words around each power of two and around the cells next to it, on both sides of the middle."""
    near = [2**k + d for k in range(1, 64) for d in (-1, 0, 1, 2 ** max(k - 7, 0))]
    first = np.array([*near, *(2**64 - 1 - word for word in near), 0, 2**64 - 1, 2**63], np.uint64)
    rows = torch.linspace(-1.0, 1.0, len(first), dtype=torch.float64)[None]

    def words():
        drawn = [first, np.arange(len(first), dtype=np.uint64) << np.uint64(50)]
        return [lambda count: drawn.pop(0)[:count]]

    play = rows, [len(first)], *lines((0.0, 1.0)), GridNoise(law, 1.0)
    assert torch.equal(fast(*play, words())[0], slow(*play, words())[0])


@pytest.mark.parametrize("law", LAWS)
def test_the_table_is_far_better_than_it_has_to_be(law):
    """At 64 places of each cell: 2^-27, where 2^-20 is allowed for."""
    table, places = quantile_table(law), np.arange(64) / 64.0
    octave, cell = np.divmod(np.arange(table.shape[1]), 64)
    levels = (1.0 + (cell[:, None] + places) / 64.0) * 2.0 ** (octave[:, None] + 53.0 - 64.0)
    used = levels <= 0.5  # no tail is larger
    found = np.einsum("kc,pk->cp", table, np.vander(places, 4, increasing=True))
    exact = quantile(law, torch.from_numpy(levels)).numpy()
    assert np.abs(found - exact)[used].max() < 2.0**-27


def test_what_the_table_leaves_open_matters(monkeypatch):
    """Some hundred symbols change sign where the slow way is given the words of the other side."""
    given = fast_grid_noise._sequential_words
    monkeypatch.setattr(fast_grid_noise, "_sequential_words", lambda words: given([~words[0], words[1]]))
    play = torch.zeros(1, 200_000), [200_000], *lines((0.0, 1.0)), GridNoise("gaussian", 1.0)
    different = fast(*play, streams(1))[0] != slow(*play, streams(1))[0]
    assert 100 < different.count_nonzero() < 1000
