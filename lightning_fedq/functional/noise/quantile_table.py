"""Table of Gaussian and Laplace quantiles with an error below 2^-20 of a scale, for compiled loops."""

from __future__ import annotations

from functools import lru_cache

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fedq.functional.noise.grid_noise import quantile

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
