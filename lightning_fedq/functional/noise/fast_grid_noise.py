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
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.noise.grid_noise import FINE_BITS, GridNoise, Words
from lightning_fedq.functional.noise.quantile_table import (
    SMALLEST_TAIL,
    TABLE_ERROR,
    Table,
    look_up,
    quantile_table,
)
from lightning_fedq.functional.segments import normalise_segments, segment_lines

CHUNK = 1 << 16
"""Coordinates per chunk. In the stream, the second words of a chunk follow its first words."""
_BLOCK = 1 << 10


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
