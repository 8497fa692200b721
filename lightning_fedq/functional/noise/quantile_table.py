"""Quantiles of Gaussian and Laplace variables from a table, to 2^-20 of a scale, for compiled passes."""

from __future__ import annotations

from functools import lru_cache

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fedq.functional.noise.grid_noise import quantile

TABLE_ERROR = 2.0**-20
"""Of a quantile of scale 1; that of the table is below 2^-27, at 64 places of every cell."""
SMALLEST_TAIL = 2.0**53
"""Tails of fewer words, 2^-11, are not in the table."""
_CELLS_PER_OCTAVE = 64
_MANTISSA, _PLACE_BITS = 52, 46
_FIRST_EXPONENT, _LAST_EXPONENT = 53, 63
_DEGREE = 3

Table = NDArray[np.float64]


@lru_cache(maxsize=2)
def quantile_table(law: str) -> Table:
    """Cubics of the place in a cell, `(4, cells)`: 64 cells from each power of two of words to the next."""
    # Chebyshev's, on [0, 1]
    nodes = 0.5 - 0.5 * np.cos((np.arange(_DEGREE + 1) + 0.5) * np.pi / (_DEGREE + 1))
    through = np.linalg.inv(np.vander(nodes, increasing=True))
    cells = np.arange(_CELLS_PER_OCTAVE) / _CELLS_PER_OCTAVE
    points = 1.0 + cells[:, None] + nodes / _CELLS_PER_OCTAVE
    octaves = [points * 2.0 ** (exponent - 64) for exponent in range(_FIRST_EXPONENT, _LAST_EXPONENT + 1)]
    levels = np.minimum(np.concatenate(octaves), 1.0 - 1e-9)  # beyond 1/2 only the first place is ever used
    values: Table = quantile(law, torch.from_numpy(levels)).numpy()
    return np.ascontiguousarray((values @ through.T).T)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def look_up(
    words: NDArray[np.uint64], table: Table, tails: NDArray[np.float64], found: NDArray[np.float64]
) -> None:
    """Quantiles of words. Short loops are what LLVM vectorises.

    Args:
        words: `(n,)` uniform words; larger ones lie further to the right.
        table: Quantile table of a law.
        tails: `(n,)`, overwritten: the number of words from each to the nearer end.
        found: `(n,)`, overwritten; nothing is promised where the tail is below `SMALLEST_TAIL`.
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
