"""Rows on their way to noisy symbols, `GridNoise.add` bit for bit, at many times its speed.

A symbol is the floor of a sum in coarse steps. The quantile in it is first taken from a table, to 2^-20 of a
scale. Where the floor would be the same for any error of that size, it is the symbol. Elsewhere, and in tails
below 2^-11, `GridNoise.add` decides: for one coordinate in a thousand. Which ones follows from the stream and
from where the sum lies between two coarse steps; as a step is an eighth of the noise at most, that place is
uniform up to e^-600 (Gaussian) or 4e-4 (Laplace) whatever the value is, and so is the time it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.noise.grid_noise import FINE_BITS, GridNoise, Words, quantile

CHUNK = 1 << 16
"""Coordinates whose second words follow their first ones in the stream."""
_BLOCK = 1 << 10
_CELLS_PER_OCTAVE = 64
_MANTISSA, _PLACE_BITS = 52, 46
_FIRST_EXPONENT = 53
"""Tails below 2^53 words, 2^-11, are not in the table."""
_LAST_EXPONENT = 63
_TABLE_ERROR = 2.0**-20
"""Of a quantile of scale 1; that of the table is below 2^-27, at 64 places of every cell."""
_DEGREE = 3

Table = NDArray[np.float64]


@lru_cache(maxsize=2)
def quantile_table(law: str) -> Table:
    """Cubics of the place in a cell, `(4, cells)`: 64 cells from each power of two of words to the next."""
    nodes = 0.5 - 0.5 * np.cos((np.arange(_DEGREE + 1) + 0.5) * np.pi / (_DEGREE + 1))
    through = np.linalg.inv(np.vander(nodes, increasing=True))
    cells = np.arange(_CELLS_PER_OCTAVE) / _CELLS_PER_OCTAVE
    points = 1.0 + cells[:, None] + nodes / _CELLS_PER_OCTAVE
    octaves = [points * 2.0 ** (exponent - 64) for exponent in range(_FIRST_EXPONENT, _LAST_EXPONENT + 1)]
    levels = np.minimum(np.concatenate(octaves), 1.0 - 1e-9)  # beyond 1/2 only the first place is ever used
    values: Table = quantile(law, torch.from_numpy(levels)).numpy()
    return np.ascontiguousarray((values @ through.T).T)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _to_grid(
    values: NDArray[np.floating], first: int, lines: NDArray[np.float64], fine: NDArray[np.int64]
) -> int:
    """Put (value - centre) factor on the fine grid, truncated toward zero. How many were beyond +-1."""
    outside, start, end = 0, first, first + fine.size
    for segment in range(lines.shape[1]):
        stop = min(int(lines[0, segment]), end)
        if start >= stop:
            continue
        center, factor = lines[1, segment], lines[2, segment]
        part, put = values[start:stop], fine[start - first : stop - first]
        for j in range(part.size):
            x = (np.float64(part[j]) - center) * factor
            outside += (x > 1.0) | (x < -1.0)
            put[j] = np.int64(min(max(x, -1.0), 1.0) * 1073741824.0)
        start = stop
    return outside


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
    which: NDArray[np.int64],
    held: NDArray[np.int64],
) -> tuple[int, int]:
    """Write the symbols that the table decides. Places and fine values of the others go to `which`, `held`.

    Returns:
        How many are undecided, and how many values were beyond +-1.
    """
    undecided, outside = 0, 0
    half, unit = (np.int64(1) << shift) >> 1, 0.5**shift
    tolerance = _TABLE_ERROR * steps + 0.51 * unit  # noise is rounded to the fine grid
    tails, fine, places = np.empty(_BLOCK), np.empty(_BLOCK, np.int64), np.empty(_BLOCK)
    near, bits = np.empty(_BLOCK, np.bool_), tails.view(np.int64)
    base = np.int64(1023 + _FIRST_EXPONENT) << (_MANTISSA - _PLACE_BITS)
    c0, c1, c2, c3 = table[0], table[1], table[2], table[3]
    for start in range(0, words.size, _BLOCK):  # short loops are what LLVM vectorises
        drawn = words[start : start + _BLOCK]
        size = drawn.size
        outside += _to_grid(values, first + start, lines, fine[:size])
        for j in range(size):
            tails[j] = np.float64(min(drawn[j], ~drawn[j]))
        for j in range(size):
            cell = max((bits[j] >> _PLACE_BITS) - base, np.int64(0))
            t = np.float64(bits[j] & ((np.int64(1) << _PLACE_BITS) - 1)) * 0.5**_PLACE_BITS
            places[j] = ((c3[cell] * t + c2[cell]) * t + c1[cell]) * t + c0[cell]
        for j in range(size):
            z = -places[j] if drawn[j] >> np.uint64(63) else places[j]
            places[j] = z * steps + np.float64(fine[j] + half) * unit
        for j in range(size):
            rest = places[j] - np.floor(places[j])
            near[j] = (rest < tolerance) | (rest > 1.0 - tolerance) | (tails[j] < 9007199254740992.0)
        symbols = out[first + start : first + start + size]
        for j in range(size):
            symbols[j] = np.int32(min(max(np.floor(places[j]), -most - 1.0), np.float64(most)))
        for j in range(size):
            if near[j]:
                which[undecided], held[undecided] = first + start + j, fine[j]
                undecided += 1
    return undecided, outside


def add_to_row(
    row: Tensor, lines: NDArray[np.float64], noise: GridNoise, words64: Words, out: NDArray[Any]
) -> int:
    """Turn one row into noisy symbols.

    Args:
        row: `(dim,)` float32 or float64 on the CPU.
        lines: `(3, segments)` float64: where each segment ends, its centre, and its factor, which turns a
            distance from the centre into clipping bounds. Values beyond +-1 are cut off.
        noise: The noise.
        words64: See `grid_noise.signed_tails`.
        out: `(dim,)` integers of `noise.bits` at least, overwritten.

    Returns:
        How many values were cut off.
    """
    values, outside = row.detach().numpy(), 0
    size = min(CHUNK, len(values))
    which, held = np.empty(size, np.int64), np.empty(size, np.int64)
    table, most = quantile_table(noise.law), (1 << noise.bits - 1) - 1
    steps = noise.scale * 2.0 ** (FINE_BITS - noise.shift)
    for first in range(0, len(values), CHUNK):
        words = words64(min(CHUNK, len(values) - first))
        count, beyond = _add(values, first, words, lines, table, steps, noise.shift, most, out, which, held)
        outside += beyond
        if count:
            place = which[:count]
            again = _given(words[place - first], words64)
            out[place] = noise.add(torch.from_numpy(held[:count]), again).numpy()
    return outside


def _given(first: NDArray[np.uint64], words64: Words) -> Callable[[int], NDArray[np.uint64]]:
    """Words that were read already, and then those that follow in the stream."""
    left = [first]
    return lambda count: left.pop() if left else words64(count)
