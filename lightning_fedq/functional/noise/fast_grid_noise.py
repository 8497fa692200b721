"""Fast form of `GridNoise.add` for rows of updates, with identical symbols.

A symbol is the floor of value plus noise, in coarse steps. The quantile of the noise is first read from a
table, with an error of at most 2^-20 of a scale. If no error of this size changes the floor, the floor is the
symbol. Otherwise, and in tails below 2^-11, `GridNoise.add` computes the symbol. This happens for one
coordinate in a thousand. It depends on the stream and on the position of the sum between two coarse steps. A
step is at most an eighth of the noise. So this position is uniform for every value, up to e^-600 (Gaussian)
or 4e-4 (Laplace), and the running time reveals as little about the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.noise.grid_noise import FINE_BITS, GridNoise, Words, quantile
from lightning_fedq.functional.segments import normalise_segments, segment_lines

CHUNK = 1 << 16
"""Coordinates per chunk. In the stream, the second words of a chunk follow its first words."""
_BLOCK = 1 << 10
TABLE_ERROR = 2.0**-20
"""Claimed error of a quantile of scale 1. The measured error is below 2^-27, at 64 places of every cell."""
SMALLEST_TAIL = 2.0**53
"""Smallest tail in the table, as a number of words (2^-11 of all words)."""
_CELLS_PER_OCTAVE = 64
_MANTISSA, _PLACE_BITS = 52, 46
_FIRST_EXPONENT, _LAST_EXPONENT = 53, 63
_DEGREE = 3

Table = NDArray[np.float64]


@lru_cache(maxsize=2)
def quantile_table(law: str) -> Table:
    """Return the coefficients of a cubic in each cell, `(4, cells)`.

    There are 64 cells between successive powers of two of the tail.
    """
    # Chebyshev nodes on [0, 1]
    nodes = 0.5 - 0.5 * np.cos((np.arange(_DEGREE + 1) + 0.5) * np.pi / (_DEGREE + 1))
    through = np.linalg.inv(np.vander(nodes, increasing=True))
    cells = np.arange(_CELLS_PER_OCTAVE) / _CELLS_PER_OCTAVE
    points = 1.0 + cells[:, None] + nodes / _CELLS_PER_OCTAVE
    octaves = [points * 2.0 ** (exponent - 64) for exponent in range(_FIRST_EXPONENT, _LAST_EXPONENT + 1)]
    levels = np.minimum(np.concatenate(octaves), 1.0 - 1e-9)  # beyond 1/2, only the first place is used
    values: Table = quantile(law, torch.from_numpy(levels)).numpy()
    return np.ascontiguousarray((values @ through.T).T)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def look_up(
    words: NDArray[np.uint64], table: Table, tails: NDArray[np.float64], found: NDArray[np.float64]
) -> None:
    """Look up the quantiles of words. The loops are short, so that LLVM vectorises them.

    Args:
        words: Uniform 64-bit words, `(n,)`. Larger words are further to the right.
        table: Quantile table of a law.
        tails: Number of words between each word and the nearer end, `(n,)`, overwritten.
        found: Quantiles, `(n,)`, overwritten. They are not valid for tails below `SMALLEST_TAIL`.
    """
    bits, base = tails.view(np.int64), np.int64(1023 + _FIRST_EXPONENT) << (_MANTISSA - _PLACE_BITS)
    c0, c1, c2, c3 = table[0], table[1], table[2], table[3]
    for j in range(words.size):
        tails[j] = np.float64(min(words[j], ~words[j]))
    for j in range(words.size):
        # exponent and 6 bits of the mantissa: 64 cells an octave
        cell = max((bits[j] >> _PLACE_BITS) - base, np.int64(0))
        t = np.float64(bits[j] & ((np.int64(1) << _PLACE_BITS) - 1)) * 0.5**_PLACE_BITS
        found[j] = ((c3[cell] * t + c2[cell]) * t + c1[cell]) * t + c0[cell]
    for j in range(words.size):
        found[j] = -found[j] if words[j] >> np.uint64(63) else found[j]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _add(
    values: NDArray[np.floating],
    first: int,
    words: NDArray[np.uint64],
    lines: NDArray[np.float64],
    table: Table,
    steps: float,
    shift: int,
    most: int,
    out: NDArray[np.signedinteger],
    places: NDArray[np.int64],
    held: NDArray[np.int64],
    left: NDArray[np.uint64],
) -> tuple[int, int, int]:
    """Write the symbols that the table decides. List place, fine value and word of all other coordinates.

    Returns:
        Number of undecided coordinates, number of those that need a second word, number of values beyond +-1.
    """
    undecided, seconds, outside = 0, 0, 0
    half, unit = (np.int64(1) << shift) >> 1, 0.5**shift
    tolerance = TABLE_ERROR * steps + 0.51 * unit  # noise is rounded to the fine grid
    tails, fine, sums = np.empty(_BLOCK), np.empty(_BLOCK, np.int64), np.empty(_BLOCK)
    near, z = np.empty(_BLOCK, np.bool_), np.empty(_BLOCK)
    for start in range(0, words.size, _BLOCK):
        drawn = words[start : start + _BLOCK]
        size = drawn.size
        outside += normalise_segments(values, first + start, lines, False, sums[:size])
        for j in range(size):
            fine[j] = np.int64(sums[j] * 1073741824.0)  # truncated toward zero
        look_up(drawn, table, tails[:size], z[:size])
        for j in range(size):
            # `half` is added, so that floor rounds to the nearest
            sums[j] = z[j] * steps + np.float64(fine[j] + half) * unit
        for j in range(size):
            rest = sums[j] - np.floor(sums[j])
            near[j] = (rest < tolerance) | (rest > 1.0 - tolerance) | (tails[j] < SMALLEST_TAIL)
        symbols = out[first + start : first + start + size]
        for j in range(size):
            # clamped to the range first, because casting a larger float is undefined
            symbols[j] = np.int32(min(max(np.floor(sums[j]), -most - 1.0), np.float64(most)))
        for j in range(size):
            if near[j]:
                places[undecided], held[undecided], left[undecided] = first + start + j, fine[j], drawn[j]
                seconds += tails[j] < SMALLEST_TAIL
                undecided += 1
    return undecided, seconds, outside


def add_to_rows(
    rows: Tensor,
    segments: Sequence[int],
    center: Tensor,
    factors: Tensor,
    noise: GridNoise,
    sources: Iterable[Words],
    out: Tensor,
) -> int:
    """Turn rows into noisy symbols.

    Args:
        rows: Updates, `(n, dim)` float32 or float64.
        segments: Segment lengths, which sum to dim.
        center: Centre of each segment, `(segments,)`.
        factors: Factors that convert distances from the centres to clipping bounds, `(n, segments)` float64.
            Values beyond +-1 are clipped.
        noise: Noise law and grid.
        sources: Source of uniform 64-bit words for each row, as in `grid_noise.signed_tails`.
        out: Symbols, `(n, dim)`, contiguous integers of at least `noise.bits` bits, overwritten.

    Returns:
        Number of clipped values.
    """
    table, most, dim = quantile_table(noise.law), (1 << noise.bits - 1) - 1, rows.shape[1]
    shift, steps = noise.shift, noise.scale * 2.0 ** (FINE_BITS - noise.shift)
    size = min(CHUNK, dim)
    scratch = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.uint64)
    lines = segment_lines(segments, center, torch.zeros_like(center))
    values, symbols, scales = rows.detach().contiguous().numpy(), out.numpy(), factors.numpy()
    pieces: list[list[NDArray[Any]]] = []
    outside = 0
    for row, words64 in enumerate(sources):
        lines[2] = scales[row]
        for first in range(0, dim, CHUNK):
            words = words64(min(CHUNK, dim - first))
            count, seconds, beyond = _add(
                values[row], first, words, lines, table, steps, shift, most, symbols[row], *scratch
            )
            outside += beyond
            place, value, left = (part[:count].copy() for part in scratch)
            pieces.append([place + row * dim, value, left, words64(seconds)])
    places, held, *read = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    decided = noise.add(torch.from_numpy(held), _sequential_words(read))
    symbols.reshape(-1)[places] = decided.numpy()
    return outside


def _sequential_words(words: list[NDArray[np.uint64]]) -> Words:
    """Return a source of words that returns the given arrays one after another."""
    arrays = iter(words)
    return lambda count: next(arrays)
