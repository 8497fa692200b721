"""Subtractive dithering: rounding to a randomly shifted grid, with an error that is independent of the input.

Let w be the step and U a dither that is uniform on an interval of length 1. With M = floor(x / w + U + 1/2)
and Y = (M - U) w, the error Y - x is exactly uniform on (-w/2, w/2] for every x. The dither here is centred,
U in (-1/2, 1/2). Then M = 0 is the message of x = 0, and |M| is as small as possible.

There are two rules for floats. Encoding and decoding run in float64, because in float32 the law is already
wrong at |x| / sigma = 6e4. Rounding is floor(. + 1/2) on both sides, never half-to-even.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024, section 2.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGEST = float(2**62)
"""Limit on the size of symbols. A sum of larger symbols could exceed int64."""


def centred_dither(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Map 64-bit words to dithers on the open interval (-1/2, 1/2): the midpoints of 2^53 equal cells.

    Args:
        words: Uniform 64-bit words, of which the top 53 bits are used.
    """
    cells = (words >> np.uint64(11)).astype(np.int64) - 2**52  # at most 2^52 in size, so + 0.5 is exact
    centred: NDArray[np.float64] = (cells.astype(np.float64) + 0.5) * 2.0**-53
    return centred


def dither_quantize_row(
    values: NDArray[np.floating],
    scale: float,
    dither: NDArray[np.float64],
    step: NDArray[np.float64],
    symbols: NDArray[np.signedinteger],
) -> float:
    """Quantise one row to M = floor(scale x / w + U + 1/2).

    Args:
        values: x, `(n,)` float32 or float64.
        scale: Factor on the values (clipping), in [0, 1].
        dither: U, uniform on (-1/2, 1/2), `(n,)`.
        step: w, `(n,)`, > 0.
        symbols: Signed integers, `(n,)`, overwritten. A symbol that is too large is set to 0.

    Returns:
        The largest |M|, which the caller must compare with the range of the type of `symbols`.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        exact = np.floor(values.astype(np.float64) * scale / step + dither + 0.5)
    sizes = np.abs(exact)
    symbols[:] = np.where(sizes < LARGEST, exact, 0.0)  # casting a larger float or a NaN is undefined
    return float(np.fmax.reduce(sizes, initial=0.0))


def round_to_grid(values: Tensor, grid: float) -> Tensor:
    """Round to multiples of a public power of two, so that an output's low bits carry no information.

    Args:
        values: Floats. Use float64 if values must be much finer than the grid.
        grid: A power of two, much larger than the values' rounding errors.
    """
    return torch.floor(values / grid + 0.5) * grid  # quotient and product are exact for a power of two


def release_grid(std: float, bits: int) -> float:
    """Return the largest power of two that is at most 2^-bits times the std of the noise.

    Examples:
        >>> release_grid(1.0, 5)
        0.03125
    """
    return float(2.0 ** (math.floor(math.log2(std)) - bits))
