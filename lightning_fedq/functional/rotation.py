"""Public random rotation of a vector: two sign flips and two Walsh-Hadamard transforms, in O(D log D).

R = H D2 B D1 / c on a vector padded with zeros to an order D (`hadamard`), D1 and D2 random signs, H the
matrix of +-1, B = H up to 65,536 coordinates, c the number that makes R orthonormal. A rotated coordinate is
a sum of what B D1 made of the vector, with random signs: its variance is |x|^2 / D for any vector. Two rounds
are enough for it to be close to Gaussian, too; one round leaves sparse vectors on few values (Ailon and
Chazelle's HD is such a round). Every coordinate is at most |x| sqrt(2 ln(2 D / beta) / D) with probability
1 - beta, so a quantiser with one range for all coordinates wastes little of it.

Beyond 65,536 coordinates B has blocks of up to 65,536 on its diagonal: a sum of that many signs is Gaussian
enough, and a block stays in a cache for all that is done to it. Where only a part of the rotated coordinates
is kept, B = H at any size: a subspace must not see some pairs of coordinates more than others.

In the precision of the rows, additions in a fixed order (`hadamard.transform`). A norm, which has to hold
exactly, is enforced on the result by whoever needs it; the rotation itself may err in the last digits.
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

    Example:
        >>> sign_words(1280)
        80
    """
    return 2 * ((size + 31) // 32)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _spread(packed: Bytes, flags: Octets) -> None:
    """Bit k of the packed bytes to the top of byte k of the flags, eight at a time.

    A byte times 0x0101... is eight copies. Of copy j bit j is left, and the addition carries it to the top.
    """
    copies, pick = np.uint64(0x0101010101010101), np.uint64(0x8040201008040201)
    carry, top = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(0x8080808080808080)
    for i in range(flags.size):
        # a byte is one bit or none, so that + 0x7f never carries into the next byte
        flags[i] = (((np.uint64(packed[i]) * copies) & pick) + carry) & top


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _flip(block: Floats, packed: Bytes, flags: Octets, factor: float) -> None:
    """Multiply a block by a factor, and float k of it by -1 where bit k of the packed bytes is one.

    Args:
        block: The floats.
        packed: Bytes of little-endian words.
        flags: Scratch, an octet for eight floats at least.
    """
    _spread(packed, flags[: (block.size + 7) // 8])
    bits, scale = flags.view(np.uint8), block.dtype.type(factor)
    both = scale / block.dtype.type(64.0)  # 2 scale / 128
    for k in range(block.size):
        block[k] *= scale - block.dtype.type(bits[k]) * both  # bits are 0 or 128: exactly +-scale


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _rotate(row: Floats, first: Bytes, second: Bytes, out: Floats) -> None:
    """Rotate one row into D coordinates, block by block.

    Args:
        first: Bytes of the first flip.
        out: `(D,)`, overwritten.
    """
    step = near_size(out.size)
    # columns of H are sqrt(D) long, those of a block sqrt(step)
    scale = 1.0 / np.sqrt(step * out.size)
    flags = np.empty((step + 7) // 8, np.uint64)
    for start in range(0, out.size, step):
        block, part = out[start : start + step], row[start : start + step]
        block[: part.size] = part
        block[part.size :] = 0.0
        if part.size:
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
        block, part = values[start : start + step], row[start : start + step]
        block[: part.size] = part
        block[part.size :] = 0.0
        if part.size:
            _flip(block, first[start // 8 :], flags, 1.0)
            near_stages(block)
    stages(values, step)
    out[:] = 0.0
    for start in range(0, size, step):  # the first rows of H repeat: fold what they see alike
        block = values[start : start + step]
        _flip(block, second[start // 8 :], flags, scale)
        if kept >= step:
            out[start % kept : start % kept + step] += block
        else:
            for k in range(0, step, kept):
                out += block[k : k + kept]
    transform(out)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _rotate_back(values: Floats, first: Bytes, second: Bytes, whole: bool) -> None:
    """Both flips and the first transform in reverse, in place.

    Args:
        values: `(D,)`, transformed back by H.
        first: Bytes of the first flip.
        whole: Is B of blocks?
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
    """The bytes of the first and of the second flip.

    Raises:
        ValueError: If their number doesn't fit.
    """
    if words.shape != (sign_words(size),):
        raise ValueError(f"{size} coordinates need {sign_words(size)} words of signs, got {words.shape}")
    packed = np.ascontiguousarray(words, "<u4").view(np.uint8)  # the same bytes on any machine
    return packed[: len(packed) // 2], packed[len(packed) // 2 :]


def rotate(rows: Floats, words: Words, keep: int | None = None) -> Floats:
    """Pad rows with zeros to an order and rotate them.

    Args:
        rows: `(n, dim)` float32 or float64; sums of D^(3/2) of them must be finite.
        words: `(sign_words(D),)` uniform words, the same for everybody who adds up or rotates back.
        keep: First coordinates to return, D over a power of two; None is all D.

    Returns:
        `(n, keep)` of the type of the rows.

    Raises:
        ValueError: If the number of words or `keep` doesn't fit.

    Example:
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
    """Transpose of `rotate`. Its inverse if all coordinates are there.

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
