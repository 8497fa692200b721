"""Public random rotation of a vector: two sign flips and two Walsh-Hadamard transforms, in O(D log D).

R = H D2 H D1 / D on a vector padded with zeros to a power of two, D1 and D2 random signs, H the matrix of
+-1. R is orthonormal. Two rounds are enough for a rotated coordinate of any vector to be close to Gaussian
with variance |x|^2 / D; one round leaves sparse vectors on few values (Ailon and Chazelle's HD is such a
round).

Compiled for the CPU, in single precision, in place, cache block by cache block: additions in a fixed order,
so that every machine gets the same bits. What has to hold exactly (a norm) is enforced on the result by
whoever needs it; the rotation itself may err in the last digits.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.hadamard import padded_size

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

_BLOCK = 1 << 12
"""Coordinates whose first 12 stages are done while they are in a first-level cache."""


def sign_words(size: int) -> int:
    """Number of uniform 32-bit words that give the signs of a rotation of `size` coordinates."""
    return 2 * ((size + 31) // 32)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _flip(bits: Words, words: Words) -> None:
    """Change the sign of float k, given by its bits, where bit k of the words is one."""
    whole = bits.size // 32
    for i in range(whole):
        word = words[i]
        for j in range(32):
            bits[32 * i + j] ^= ((word >> np.uint32(j)) & np.uint32(1)) << np.uint32(31)
    for k in range(32 * whole, bits.size):
        bits[k] ^= ((words[whole] >> np.uint32(k - 32 * whole)) & np.uint32(1)) << np.uint32(31)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _stages_of_8(x: Floats) -> None:
    """The first three stages, neighbours with neighbours."""
    for k in range(0, x.size, 8):
        a, b, c, d = x[k], x[k + 1], x[k + 2], x[k + 3]
        e, f, g, h = x[k + 4], x[k + 5], x[k + 6], x[k + 7]
        a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
        a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
        x[k], x[k + 1], x[k + 2], x[k + 3] = a + e, b + f, c + g, d + h
        x[k + 4], x[k + 5], x[k + 6], x[k + 7] = a - e, b - f, c - g, d - h


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _stages_of_64(x: Floats) -> None:
    """Three stages at distances 8, 16 and 32. The inner loop is one vector of 8."""
    for s in range(0, x.size, 64):
        for k in range(s, s + 8):
            a, b, c, d = x[k], x[k + 8], x[k + 16], x[k + 24]
            e, f, g, h = x[k + 32], x[k + 40], x[k + 48], x[k + 56]
            a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
            a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
            x[k], x[k + 8], x[k + 16], x[k + 24] = a + e, b + f, c + g, d + h
            x[k + 32], x[k + 40], x[k + 48], x[k + 56] = a - e, b - f, c - g, d - h


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _three_stages(x: Floats, half: int) -> None:
    """Three stages at distances half, 2 half and 4 half, in one pass."""
    for s in range(0, x.size, 8 * half):
        x0, x1 = x[s : s + half], x[s + half : s + 2 * half]
        x2, x3 = x[s + 2 * half : s + 3 * half], x[s + 3 * half : s + 4 * half]
        x4, x5 = x[s + 4 * half : s + 5 * half], x[s + 5 * half : s + 6 * half]
        x6, x7 = x[s + 6 * half : s + 7 * half], x[s + 7 * half : s + 8 * half]
        for k in range(half):
            a, b, c, d, e, f, g, h = x0[k], x1[k], x2[k], x3[k], x4[k], x5[k], x6[k], x7[k]
            a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
            a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
            x0[k], x1[k], x2[k], x3[k] = a + e, b + f, c + g, d + h
            x4[k], x5[k], x6[k], x7[k] = a - e, b - f, c - g, d - h


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _stage(x: Floats, half: int) -> None:
    for s in range(0, x.size, 2 * half):
        p, q = x[s : s + half], x[s + half : s + 2 * half]
        for k in range(half):
            a, b = p[k], q[k]
            p[k], q[k] = a + b, a - b


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _transform(x: Floats) -> None:
    """Walsh-Hadamard transform of a power of two of values, in place, not normalised."""
    size, done = x.size, 1
    if size >= _BLOCK:
        for start in range(0, size, _BLOCK):
            block = x[start : start + _BLOCK]
            _stages_of_8(block)
            _stages_of_64(block)
            _three_stages(block, 64)
            _three_stages(block, 512)
        done = _BLOCK
    while done < size:
        if 8 * done <= size:
            _three_stages(x, done)
            done *= 8
        else:
            _stage(x, done)
            done *= 2


def _signs(size: int, words: Words) -> tuple[Words, Words]:
    """The words of the first and of the second flip.

    Raises:
        ValueError: If their number doesn't fit.
    """
    if words.shape != (sign_words(size),):
        raise ValueError(f"{size} coordinates need {sign_words(size)} words of signs, got {words.shape}")
    return words[: len(words) // 2], words[len(words) // 2 :]


def rotate(rows: Floats, words: Words, keep: int | None = None) -> Floats:
    """Pad rows with zeros to a power of two and rotate them.

    Args:
        rows: `(n, dim)` float32; sums of D^(3/2) of them must be finite.
        words: `(sign_words(D),)` uniform words, the same for everybody who adds up or rotates back.
        keep: First coordinates to return, a power of two; None is all D.

    Returns:
        `(n, keep)` float32.

    Raises:
        ValueError: If the number of words or `keep` doesn't fit.
    """
    size = padded_size(rows.shape[1])
    first, second = _signs(size, words)
    kept = _kept(size, keep)
    rotated = np.empty((len(rows), kept), np.float32)
    values = np.empty(size, np.float32)
    for row, out in zip(rows, rotated, strict=True):
        values[: len(row)], values[len(row) :] = row, 0.0
        _flip(values.view(np.uint32), first)
        _transform(values)
        _flip(values.view(np.uint32), second)
        # the first rows of H repeat: fold what they see alike
        out[:] = values if kept == size else values.reshape(-1, kept).sum(0)
        _transform(out)
        out *= np.float32(1.0 / size)
    return rotated


def rotate_back(values: Floats, words: Words, dim: int) -> Floats:
    """Transpose of `rotate`. Its inverse if all coordinates are there.

    Args:
        values: `(keep,)` rotated coordinates.
        words: As in `rotate`.
        dim: Coordinates before padding.

    Returns:
        `(dim,)` float32.

    Raises:
        ValueError: If the number of words or of values doesn't fit.
    """
    size = padded_size(dim)
    first, second = _signs(size, words)
    kept = _kept(size, len(values))
    folded = values.astype(np.float32)
    _transform(folded)
    whole = np.tile(folded, size // kept)
    _flip(whole.view(np.uint32), second)
    _transform(whole)
    _flip(whole.view(np.uint32), first)
    return whole[:dim] * np.float32(1.0 / size)


def _kept(size: int, keep: int | None) -> int:
    kept = size if keep is None else keep
    if not 1 <= kept <= size or kept & (kept - 1):
        raise ValueError(f"keep must be a power of two up to {size}, got {kept}")
    return kept
