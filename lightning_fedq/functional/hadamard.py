"""Flatten a vector by a randomised Hadamard transform: pad to a power of two, flip signs, rotate.

Afterwards every coordinate is at most ||x|| sqrt(2 ln(2 D / beta) / D) with probability 1 - beta over the
signs, so a quantiser with one range for all coordinates wastes little of it. The transform is
orthonormal and its own inverse.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK = 1 << 13
"""Values that are transformed while they are in the cache."""
_WIDTH = 32
"""Columns that cross the blocks together, so that memory is passed over twice whatever the size."""


def padded_size(dim: int) -> int:
    """Smallest power of two >= dim.

    Raises:
        ValueError: If dim < 1.
    """
    if dim < 1:
        raise ValueError(f"dim must be >= 1, got {dim}")
    return int(1 << (dim - 1).bit_length())


def hadamard(values: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension, in O(D log D).

    Args:
        values: `(..., D)` floats, D a power of two.

    Raises:
        ValueError: If D is no power of two.
    """
    size = values.shape[-1]
    if size < 1 or size & (size - 1):
        raise ValueError(f"the last dimension must be a power of two, got {size}; pad with zeros first")
    flat = values.reshape(-1, size)
    if flat.device.type == "cpu" and flat.dtype in (torch.float32, torch.float64):
        rows = flat.detach().numpy().copy()
        _transform_rows(rows)
        return torch.from_numpy(rows).div_(math.sqrt(size)).view(values.shape)
    half = 1
    while half < size:
        pairs = flat.view(flat.shape[0], size // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        flat = torch.stack([first + second, first - second], 2).view(flat.shape)
        half *= 2
    return (flat / math.sqrt(size)).view(values.shape)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _butterflies(values: NDArray[Any], count: int, width: int) -> None:
    """All stages over `count` rows of `width` values, in place: two at a time, and one more if it is odd."""
    half = 1
    while 4 * half <= count:
        step = half * width
        for start in range(0, count * width, 4 * step):
            a, b = values[start : start + step], values[start + step : start + 2 * step]
            c, d = values[start + 2 * step : start + 3 * step], values[start + 3 * step : start + 4 * step]
            for j in range(step):
                p, q, r, s = a[j] + b[j], a[j] - b[j], c[j] + d[j], c[j] - d[j]
                a[j], b[j], c[j], d[j] = p + r, q + s, p - r, q - s
        half *= 4
    if half < count:
        step = half * width
        for start in range(0, count * width, 2 * step):
            a, b = values[start : start + step], values[start + step : start + 2 * step]
            for j in range(step):
                a[j], b[j] = a[j] + b[j], a[j] - b[j]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _transform_rows(rows: NDArray[Any]) -> None:
    """Transform each row `(D,)` of a C-contiguous array in place, times sqrt(D): inside blocks, then across.

    The sums are those of the plain loop, in its order, so both roads agree to the last bit.
    """
    size = rows.shape[1]
    inner = min(size, _BLOCK)
    outer = size // inner
    columns = np.empty(outer * _WIDTH, rows.dtype)
    for row in range(rows.shape[0]):
        values = rows[row]
        for start in range(0, size, inner):
            block = values[start : start + inner]
            if inner < 64:
                _butterflies(block, inner, 1)
                continue
            for i in range(0, inner, 8):  # the first three stages, whose strides are too short for vectors
                a, b, c, d = block[i], block[i + 1], block[i + 2], block[i + 3]
                e, f, g, h = block[i + 4], block[i + 5], block[i + 6], block[i + 7]
                a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
                a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
                block[i], block[i + 1], block[i + 2], block[i + 3] = a + e, b + f, c + g, d + h
                block[i + 4], block[i + 5], block[i + 6], block[i + 7] = a - e, b - f, c - g, d - h
            _butterflies(block, inner // 8, 8)
        if outer == 1:
            continue
        for first in range(0, inner, _WIDTH):
            for o in range(outer):
                columns[o * _WIDTH : (o + 1) * _WIDTH] = values[
                    o * inner + first : o * inner + first + _WIDTH
                ]
            _butterflies(columns, outer, _WIDTH)
            for o in range(outer):
                values[o * inner + first : o * inner + first + _WIDTH] = columns[
                    o * _WIDTH : (o + 1) * _WIDTH
                ]


def rotate(values: Tensor, signs: Tensor) -> Tensor:
    """Pad with zeros to len(signs), flip signs, transform.

    Args:
        values: `(..., dim)` floats.
        signs: `(D,)` of +1 and -1, D = padded_size(dim), the same on both sides.

    Raises:
        ValueError: If the lengths don't fit.
    """
    dim, size = values.shape[-1], signs.shape[-1]
    if size != padded_size(dim):
        raise ValueError(f"{dim} coordinates need {padded_size(dim)} signs, got {size}")
    padded = torch.nn.functional.pad(values, (0, size - dim))
    return hadamard(padded * signs)


def rotate_back(values: Tensor, signs: Tensor, dim: int) -> Tensor:
    """Inverse of `rotate` for vectors of `dim` coordinates."""
    return (hadamard(values) * signs)[..., :dim]


def flatness_bound(size: int, beta: float) -> float:
    """Largest coordinate of a rotated unit vector, exceeded with probability at most beta.

    Args:
        size: D, after padding.
        beta: In (0, 1).
    """
    return min(math.sqrt(2.0 * math.log(2.0 * size / beta) / size), 1.0)
