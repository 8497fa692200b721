"""Unbiased quantisation to k levels on a randomly shifted grid, with one uniform word per coordinate.

Let y be in [0, 1]. For k = 2 the levels are 0 and 1. For k >= 3 the levels are c + beta {0, ..., k - 1}, with
beta = (k + 1) / (k (k - 1)). The shift c = -v / k is uniform on [-1/k, 0) and known to the decoder. It makes
the distance to the level below uniform, which the error bound of the paper needs. y is rounded up if the word
is below 2^32 times this distance, by an integer comparison.

References:
    Suresh et al., Correlated Quantization for Distributed Mean Estimation and Optimization, ICML 2022.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.one_bit.threshold_coin import WORD_BITS


def level_step(levels: int) -> float:
    """Return the distance of two levels in units of the radius: 2 beta, or 2 for two levels.

    Examples:
        >>> level_step(5)
        0.6
    """
    return 2.0 if levels == 2 else 2.0 * (levels + 1) / (levels * (levels - 1))


def multi_level_shifts(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return the shift v in (0, 1) of each coordinate, from 32-bit words."""
    shifts: NDArray[np.float64] = (words.astype(np.float64) + 0.5) / 2.0**WORD_BITS
    return shifts


def multi_level_quantize(
    units: NDArray[np.float64], words: NDArray[np.uint32], shifts: NDArray[np.float64], levels: int
) -> NDArray[np.uint8]:
    """Round each coordinate at random to the level below or above it, without bias.

    Args:
        units: Values in [-1, 1], in units of the radius, `(n,)`.
        words: Uniform 32-bit words, `(n,)`.
        shifts: Shifts of `multi_level_shifts`, or zeros for two levels, `(n,)`.
        levels: Number of levels k >= 2.

    Returns:
        Symbols in [0, levels), `(n,)`.
    """
    places = (units + 1.0 + shifts * (2.0 / levels)) / level_step(levels)
    fixed = np.floor(places * 2.0**32 + 0.5).astype(np.int64)  # the level, and 32 bits of the fraction
    return ((fixed >> 32) + (words < (fixed & (2**32 - 1)))).astype(np.uint8)


def multi_level_dequantize_sum(
    total: NDArray[np.float64], count: int, shifts: NDArray[np.float64], levels: int
) -> NDArray[np.float64]:
    """Estimate the sum of `count` values, in units of the radius, from the sum of their symbols.

    Args:
        total: Sum of the symbols, `(dim,)`.
        count: Number of symbols summed.
        shifts: Shifts that the quantiser used, `(dim,)`.
        levels: Number of levels k >= 2.
    """
    return total * level_step(levels) - count * (1.0 + shifts * (2.0 / levels))
