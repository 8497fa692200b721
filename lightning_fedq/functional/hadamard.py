"""Flatten a vector by a randomised Hadamard transform: pad to a power of two, flip signs, rotate.

Afterwards every coordinate is at most ||x|| sqrt(2 ln(2 D / beta) / D) with probability 1 - beta over the
signs, so a quantiser with one range for all coordinates wastes little of it. The transform is
orthonormal and its own inverse.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
    flat, half = values.reshape(-1, size), 1
    while half < size:
        pairs = flat.view(flat.shape[0], size // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        flat = torch.stack([first + second, first - second], 2).view(flat.shape)
        half *= 2
    return (flat / math.sqrt(size)).view(values.shape)


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
