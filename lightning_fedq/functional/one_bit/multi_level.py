"""Unbiased quantisation to k levels with one uniform word a coordinate, on a grid that is shifted at random.

With y in [0, 1], k = 2 levels are 0 and 1. For k >= 3 the levels are c + beta {0, ..., k - 1}, beta =
(k + 1) / (k (k - 1)), c = -v / k uniform on [-1/k, 0) and known to the decoder: the shift makes the
distance to the level below uniform, which the error bound of the paper needs. y is rounded up iff the
word is below 2^32 times that distance, an integer comparison.

References:
    Suresh et al., Correlated Quantization for Distributed Mean Estimation and Optimization, ICML 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedq.functional.one_bit.threshold_coin import WORD_BITS


def level_step(levels: int) -> float:
    """Distance of two levels in units of the radius (half of the range): 2 beta, and 2 for one bit."""
    return 2.0 if levels == 2 else 2.0 * (levels + 1) / (levels * (levels - 1))


def multi_level_shifts(words: Tensor, levels: int, dim: int) -> Tensor:
    """Return v in (0, 1) of each coordinate, from 32-bit words. Zeros for two levels, which have no shift.

    Args:
        words: `(dim,)` uint32; not read for two levels.
        levels: k >= 2.
        dim: Number of coordinates.

    Returns:
        `(dim,)` float64.
    """
    if levels == 2:
        return torch.zeros(dim, dtype=torch.float64)
    shifts: Tensor = (words.double() + 0.5) / 2.0**WORD_BITS
    return shifts


def multi_level_quantize(x: Tensor, words: Tensor, shifts: Tensor, levels: int) -> Tensor:
    """Round each coordinate to the level below or above it, up with the probability that makes it unbiased.

    Args:
        x: `(n,)` float64 in units of the radius; clipped to [-1, 1].
        words: `(n,)` int64, uniform on [0, 2^32).
        shifts: `(n,)` float64 of `multi_level_shifts`.
        levels: k >= 2.

    Returns:
        `(n,)` uint8 in [0, levels).
    """
    place = (x.clamp(-1.0, 1.0) + 1.0 + shifts * (2.0 / levels)) / level_step(levels)
    fixed = torch.floor(place * 2.0**WORD_BITS + 0.5).to(torch.int64)
    below, rest = fixed >> WORD_BITS, fixed & (2**WORD_BITS - 1)
    return torch.add(below, words < rest).to(torch.uint8)


def multi_level_dequantize_sum(total: Tensor, count: int, shifts: Tensor, levels: int) -> Tensor:
    """Estimate the sum of `count` values, in units of the radius, from the sum of their symbols.

    Args:
        total: `(dim,)` integers.
        count: Number of symbols summed.
        shifts: `(dim,)` float64 of `multi_level_shifts`.
        levels: k >= 2.

    Returns:
        `(dim,)` float64.
    """
    return total.double() * level_step(levels) - count * (1.0 + shifts * (2.0 / levels))
