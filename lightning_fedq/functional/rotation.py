"""Public random rotation of a vector: two sign flips and two Walsh-Hadamard transforms, in O(D log D).

R = H D2 H D1 / D on a vector padded with zeros to a power of two, D1 and D2 random signs, H the matrix of
+-1. R is orthonormal. Two rounds are enough for a rotated coordinate of any vector to be close to Gaussian
with variance |x|^2 / D; one round leaves sparse vectors on few values (Ailon and Chazelle's HD is such a
round).

In single precision on the CPU, additions in a fixed order (`hadamard.transform`). What has to hold exactly (a
norm) is enforced on the result by whoever needs it; the rotation itself may err in the last digits.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.hadamard import NEAR, near_stages, padded_size, stages, transform

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
Bytes = NDArray[np.uint8]
Octets = NDArray[np.uint64]


def sign_words(size: int) -> int:
    """Number of uniform 32-bit words that give the signs of a rotation of `size` coordinates."""
    return 2 * ((size + 31) // 32)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _spread(packed: Bytes, flags: Octets) -> None:
    """Bit k of the packed bytes to the top of byte k of the flags, eight at a time.

    A byte times 0x0101... is eight copies. Of copy j bit j is left, and the addition carries it to the top.
    """
    copies, pick = np.uint64(0x0101010101010101), np.uint64(0x8040201008040201)
    carry, top = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(0x8080808080808080)
    for i in range(flags.size):
        flags[i] = (((np.uint64(packed[i]) * copies) & pick) + carry) & top


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _flip(block: Floats, packed: Bytes, flags: Octets, scale: np.float32) -> None:
    """Multiply a block by a power of two, and float k of it by -1 where bit k of the packed bytes is one.

    Args:
        block: Its length is a power of two.
        packed: Bytes of little-endian words.
        flags: Scratch, an octet for eight floats at least.
        scale: The power of two.
    """
    _spread(packed, flags[: (block.size + 7) // 8])
    bits, both = flags.view(np.uint8), scale / np.float32(64.0)  # 2 scale / 128
    for k in range(block.size):
        block[k] *= scale - np.float32(bits[k]) * both


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _rotate(row: Floats, first: Bytes, second: Bytes, values: Floats, out: Floats) -> None:
    """Rotate one row, block by block, each of them in a cache for all that is done to it.

    Args:
        row: The row.
        first: Bytes of the first flip.
        second: Bytes of the second one.
        values: `(D,)`, overwritten; `out` itself if that has D values.
        out: `(keep,)`, overwritten.
    """
    size, kept = values.size, out.size
    step, scale = min(NEAR, size), np.float32(1.0 / size)  # a power of two: exact wherever it is done
    flags = np.empty((step + 7) // 8, np.uint64)
    for start in range(0, size, step):
        block, part = values[start : start + step], row[start : start + step]
        block[: part.size] = part
        block[part.size :] = 0.0
        if part.size:
            _flip(block, first[start // 8 :], flags, np.float32(1.0))
            near_stages(block)
    stages(values, step)
    if kept < size:
        out[:] = 0.0
    for start in range(0, size, step):
        block = values[start : start + step]
        _flip(block, second[start // 8 :], flags, scale)
        if kept == size:
            near_stages(block)
        elif kept >= step:  # the first rows of H repeat: fold what they see alike
            out[start % kept : start % kept + step] += block
        else:
            for k in range(0, step, kept):
                out += block[k : k + kept]
    if kept == size:
        stages(out, step)
    else:
        transform(out)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _rotate_back(values: Floats, first: Bytes, second: Bytes) -> None:
    """Both flips and both transforms in reverse, in place."""
    size = values.size
    step = min(NEAR, size)
    flags = np.empty((step + 7) // 8, np.uint64)
    for start in range(0, size, step):
        block = values[start : start + step]
        _flip(block, second[start // 8 :], flags, np.float32(1.0))
        near_stages(block)
    stages(values, step)
    for start in range(0, size, step):
        _flip(values[start : start + step], first[start // 8 :], flags, np.float32(1.0 / size))


def _signs(size: int, words: Words) -> tuple[Bytes, Bytes]:
    """The bytes of the first and of the second flip.

    Raises:
        ValueError: If their number doesn't fit.
    """
    if words.shape != (sign_words(size),):
        raise ValueError(f"{size} coordinates need {sign_words(size)} words of signs, got {words.shape}")
    packed = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return packed[: len(packed) // 2], packed[len(packed) // 2 :]


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
    for row, out in zip(rows, rotated, strict=True):
        values = out if kept == size else np.empty(size, np.float32)
        _rotate(row, first, second, values, out)
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
    transform(folded)
    whole = np.tile(folded, size // kept)
    _rotate_back(whole, first, second)
    return whole[:dim]


def _kept(size: int, keep: int | None) -> int:
    kept = size if keep is None else keep
    if not 1 <= kept <= size or kept & (kept - 1):
        raise ValueError(f"keep must be a power of two up to {size}, got {kept}")
    return kept
