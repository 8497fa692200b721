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

import numba
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


def dither_quantize(values: Tensor, dither: Tensor, step: Tensor | float) -> Tensor:
    """Quantise to M = floor(x / w + U + 1/2).

    Args:
        values: Floats, `(..., dim)`.
        dither: Dithers that are uniform on (-1/2, 1/2), in the shape of `values`.
        step: Step w > 0, broadcastable, in units of `values`.

    Returns:
        int64 tensor of `values`' shape.
    """
    return torch.floor(values.double() / step + dither + 0.5).to(torch.int64)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def add_centred_dither(words: NDArray[np.uint64], total: NDArray[np.float64]) -> None:
    """Add `centred_dither(words)` to a running sum, in one pass."""
    shift, half_cells = np.uint64(11), np.int64(1 << 52)
    for j in range(words.size):
        total[j] += (np.float64(np.int64(words[j] >> shift) - half_cells) + 0.5) * 2.0**-53


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def add_uniforms(words: NDArray[np.uint64], total: NDArray[np.float64]) -> None:
    """Add `Stream.uniforms` minus 1/2 to a running sum, in one pass."""
    for j in range(words.size):
        total[j] += np.float64(np.int64(words[j] >> np.uint64(12))) * 2.0**-52 + 2.0**-53 - 0.5


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def dither_levels(
    units: NDArray[np.float64], words: NDArray[np.uint64], levels: int, out: NDArray[np.int32]
) -> None:
    """Quantise to integers from -levels to levels.

    It equals `dither_quantize(levels * units, centred_dither(words), 1)`, clamped.

    Args:
        units: `(n,)` in [-1, 1].
        words: `(n,)` uniform words.
        levels: The largest integer.
        out: `(n,)`, overwritten.
    """
    shift, half_cells, last = np.uint64(11), np.int64(1 << 52), np.float64(levels)
    for j in range(words.size):
        dither = (np.float64(np.int64(words[j] >> shift) - half_cells) + 0.5) * 2.0**-53
        out[j] = np.int32(min(max(np.floor(units[j] * last + dither + 0.5), -last), last))


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def dither_quantize_row(
    values: NDArray[np.floating],
    scale: float,
    dither: NDArray[np.float64],
    step: NDArray[np.float64],
    symbols: NDArray[np.signedinteger],
) -> float:
    """Quantise one row in one pass. Equals `dither_quantize(scale * values, dither, step)`.

    Args:
        values: `(n,)` float32 or float64.
        scale: Factor on the values (clipping), in [0, 1].
        dither: `(n,)`.
        step: `(n,)`, > 0.
        symbols: Signed integers, `(n,)`, overwritten. A symbol that is too large is set to 0.

    Returns:
        The largest |M|, which the caller must compare with the range of the type of `symbols`.
    """
    largest = 0.0
    for j in range(values.size):
        symbol = np.floor(np.float64(values[j]) * scale / step[j] + dither[j] + 0.5)
        largest = max(largest, abs(symbol))
        # casting a larger float or a NaN is undefined
        symbols[j] = np.int64(symbol) if abs(symbol) < LARGEST else 0
    return largest


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def add_dequantized_row(
    symbols: NDArray[np.integer],
    dither: NDArray[np.float64],
    step: NDArray[np.float64],
    offset: NDArray[np.float64],
    total: NDArray[np.float64],
) -> None:
    """Add (M - U) w + offset to a running float64 sum, in one pass."""
    for j in range(symbols.size):
        total[j] += (symbols[j] - dither[j]) * step[j] + offset[j]


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
