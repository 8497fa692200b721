"""Public random rotation of a vector: two sign flips and two Walsh-Hadamard transforms, in O(D log D).

R = H D2 B D1 / c acts on a vector that is padded with zeros to an order D (`hadamard`). D1 and D2 are random
signs, and H is the Hadamard matrix of +-1. B = H up to 65,536 coordinates, and c makes R orthonormal. A
rotated coordinate is a randomly signed sum of the coordinates of B D1 x, so its variance is |x|^2 / D for any
x. After two rounds its law is close to Gaussian. One round (HD of Ailon and Chazelle) leaves sparse vectors
on few values. With probability 1 - beta every coordinate is at most |x| sqrt(2 ln(2 D / beta) / D). So a
quantiser can use one range for all coordinates and wastes little of it.

Beyond 65,536 coordinates B has blocks of up to 65,536 on its diagonal. A sum of so many signs is close enough
to Gaussian, and a block stays in a cache for all its steps. If only a part of the rotated coordinates is
kept, B = H at any size, because the kept subspace must treat all pairs of coordinates equally.

The computation has the precision of the rows and adds in a fixed order (`hadamard.transform`). The rotation
may err in the last digits. A caller that needs an exact bound on the norm enforces it on the result.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.hadamard import (
    Floats,
    kernel_order,
    near_size,
    near_stages,
    padded_size,
    stages,
    transform,
)

Words = NDArray[np.uint32]
Bytes = NDArray[np.uint8]
Octets = NDArray[np.uint64]


def sign_words(size: int) -> int:
    """Number of uniform 32-bit words that give the signs of a rotation of `size` coordinates.

    Examples:
        >>> sign_words(1280)
        80
    """
    return 2 * ((size + 31) // 32)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _spread(packed: Bytes, flags: Octets) -> None:
    """Move bit k of the packed bytes to the top bit of byte k of the flags, eight bits at a time.

    A byte times 0x0101... gives eight copies. The mask keeps bit j of copy j, and the addition carries it to
    the top.
    """
    copies, pick = np.uint64(0x0101010101010101), np.uint64(0x8040201008040201)
    carry, top = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(0x8080808080808080)
    for i in range(flags.size):
        # each byte has at most one bit, so + 0x7f never carries into the next byte
        flags[i] = (((np.uint64(packed[i]) * copies) & pick) + carry) & top


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _flip(block: Floats, packed: Bytes, flags: Octets, factor: float) -> None:
    """Multiply a block by a factor, and float k of it by -1 where bit k of the packed bytes is one.

    Args:
        block: The floats.
        packed: Bytes of little-endian words.
        flags: Scratch memory, at least one octet for eight floats.
    """
    _spread(packed, flags[: (block.size + 7) // 8])
    bits, scale = flags.view(np.uint8), block.dtype.type(factor)
    both = scale / block.dtype.type(64.0)  # 2 scale / 128
    for k in range(block.size):
        block[k] *= scale - block.dtype.type(bits[k]) * both  # bits are 0 or 128: exactly +-scale


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _copy_padded(part: Floats, block: Floats) -> bool:
    """Copy a part of a row, fill up with zeros, and return whether the part has any coordinates."""
    block[: part.size] = part
    block[part.size :] = 0.0
    return part.size > 0


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _rotate(row: Floats, first: Bytes, second: Bytes, out: Floats) -> None:
    """Rotate one row into D coordinates, block by block.

    Args:
        first: Bytes of the first flip.
        out: `(D,)`, overwritten.
    """
    step = near_size(out.size)
    # columns of H have norm sqrt(D), columns of a block sqrt(step)
    scale = 1.0 / np.sqrt(step * out.size)
    flags = np.empty((step + 7) // 8, np.uint64)
    for start in range(0, out.size, step):
        block = out[start : start + step]
        if _copy_padded(row[start : start + step], block):
            _flip(block, first[start // 8 :], flags, 1.0)
            near_stages(block)
            _flip(block, second[start // 8 :], flags, scale)
            near_stages(block)
    stages(out, step)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _rotate_and_keep(row: Floats, first: Bytes, second: Bytes, values: Floats, out: Floats) -> None:
    """Rotate one row and keep the first coordinates.

    Args:
        first: Bytes of the first flip.
        values: `(D,)`, overwritten.
        out: `(keep,)`, fewer than D, overwritten.
    """
    size, kept = values.size, out.size
    step, scale = near_size(size), 1.0 / size  # H twice, whose columns are sqrt(D) long
    flags = np.empty((step + 7) // 8, np.uint64)
    for start in range(0, size, step):
        block = values[start : start + step]
        if _copy_padded(row[start : start + step], block):
            _flip(block, first[start // 8 :], flags, 1.0)
            near_stages(block)
    stages(values, step)
    out[:] = 0.0
    width = min(step, kept)
    for start in range(0, size, step):
        block = values[start : start + step]
        _flip(block, second[start // 8 :], flags, scale)
        for k in range(0, step, width):  # the first rows of H have period `kept`, so fold the periods
            place = (start + k) % kept
            out[place : place + width] += block[k : k + width]
    transform(out)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _rotate_back(values: Floats, first: Bytes, second: Bytes, whole: bool) -> None:
    """Reverse both flips and the first transform, in place.

    Args:
        values: Coordinates after the reversed second transform, `(D,)`.
        first: Bytes of the first flip.
        second: Bytes of the second flip.
        whole: Whether all coordinates were kept, so that B has blocks.
    """
    size = values.size
    step = near_size(size)
    scale = 1.0 / (np.sqrt(step * size) if whole else size)
    flags = np.empty((step + 7) // 8, np.uint64)
    for start in range(0, size, step):
        block = values[start : start + step]
        _flip(block, second[start // 8 :], flags, 1.0)
        near_stages(block)
    if not whole:
        stages(values, step)
    for start in range(0, size, step):
        _flip(values[start : start + step], first[start // 8 :], flags, scale)


def _signs(size: int, words: Words) -> tuple[Bytes, Bytes]:
    """Return the bytes of the first and of the second flip.

    Raises:
        ValueError: If the number of words does not fit the size.
    """
    if words.shape != (sign_words(size),):
        raise ValueError(f"{size} coordinates need {sign_words(size)} words of signs, got {words.shape}")
    packed = np.ascontiguousarray(words, "<u4").view(np.uint8)  # the same bytes on any machine
    return packed[: len(packed) // 2], packed[len(packed) // 2 :]


def rotate(rows: Floats, words: Words, keep: int | None = None) -> Floats:
    """Pad rows with zeros to an order and rotate them.

    Args:
        rows: Vectors, `(n, dim)` float32 or float64. Sums of D^(3/2) values must be finite.
        words: Uniform words, `(sign_words(D),)`, equal for all parties that add or rotate back.
        keep: Number of first coordinates to return, D divided by a power of two. None returns all D.

    Returns:
        `(n, keep)` of the type of the rows.

    Raises:
        ValueError: If the number of words or `keep` doesn't fit.

    Examples:
        >>> words = np.arange(sign_words(4), dtype=np.uint32)
        >>> rows = np.array([[3.0, 4.0, 0.0]])
        >>> np.linalg.norm(rotate(rows, words)).round(6)
        np.float64(5.0)
        >>> rotate_back(rotate(rows, words)[0], words, 3).round(6)
        array([3., 4., 0.])
    """
    size = padded_size(rows.shape[1])
    first, second = _signs(size, words)
    kept = _check_kept_size(size, keep)
    rotated = np.empty((len(rows), kept), rows.dtype)
    for row, out in zip(rows, rotated, strict=True):
        if kept == size:
            _rotate(row, first, second, out)
        else:
            _rotate_and_keep(row, first, second, np.empty(size, rows.dtype), out)
    return rotated


def rotate_back(values: Floats, words: Words, dim: int) -> Floats:
    """Apply the transpose of `rotate`, which is its inverse if all coordinates were kept.

    Args:
        values: `(keep,)` rotated coordinates, float32 or float64.
        words: Random words that `rotate` was given.
        dim: Coordinates before padding.

    Returns:
        `(dim,)` of the type of the values.

    Raises:
        ValueError: If the number of words or of values doesn't fit.
    """
    size = padded_size(dim)
    first, second = _signs(size, words)
    kept = _check_kept_size(size, len(values))
    folded = values.copy()
    transform(folded)
    whole = folded if kept == size else np.tile(folded, size // kept)  # columns of the first rows of H repeat
    _rotate_back(whole, first, second, kept == size)
    return whole[:dim]


def _check_kept_size(size: int, keep: int | None) -> int:
    kept = size if keep is None else keep
    if not (1 <= kept <= size and kernel_order(kept) == kernel_order(size)):
        raise ValueError(f"keep must be {size} over a power of two, an order itself, got {kept}")
    return kept
