"""The compiled loops of block coding: indices of blocks, one bit per index, and the sums on the other side.

Each loop equals a few lines of tensor code in `lattice` and `codeword`, which the tests hold it to. The
generator's word for any block is computed on the spot: no array of codewords exists.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.codeword import GOLD, MIX1, MIX2
from lightning_fedq.functional.lattice import TIE_SHIFT, lattice
from lightning_fedq.functional.lattice_codebook import Codebook

Floats = NDArray[np.float64]
Indices = NDArray[np.int32]

_GOLD, _MIX1, _MIX2 = np.uint64(GOLD), np.uint64(MIX1), np.uint64(MIX2)
_ROOT3 = np.sqrt(3.0)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _word(base: np.uint64, at: int) -> np.uint64:
    z = base + _GOLD * np.uint64(at + 1)
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _row(base: np.uint64, at: int, num_rows: int) -> np.int64:
    return np.int64(((_word(base, at) >> np.uint64(40)) * np.uint64(num_rows)) >> np.uint64(24))


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _uniform(base: np.uint64, at: int) -> float:
    return float(np.int64(_word(base, at) >> np.uint64(11))) * 2.0**-53


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def normalize_row(update: NDArray[np.float32], center: float, inverse: float, out: Floats) -> None:
    """out = (update - center) inverse, for one segment."""
    for j in range(update.size):
        out[j] = (np.float64(update[j]) - center) * inverse


# ---- scalar ---------------------------------------------------------------------------------------------


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def quantize_scalar(
    x: Floats, counts: NDArray[np.int64], dithered: bool, base: np.uint64, first: int, out: Indices
) -> int:
    """Digits of the fine level of every x in [-1, 1], coarsest stage first; what lies outside is clipped.

    The step is 2 / (N - 1), N the product of `counts`: the outermost levels are -1 and 1 and no dithered
    x in [-1, 1] leaves the outermost cells.

    Args:
        x: `(n,)`, in units of the radius; overwritten.
        counts: `(stages,)` levels of each stage.
        dithered: Whether a dither from word `first + i` of `base` is added.
        base: Key of the dither words, uint64.
        first: Number of x[0] in the message.
        out: `(stages, n)`, overwritten.

    Returns:
        How many were clipped.
    """
    total = 1
    for count in counts:
        total *= count
    half, middle, top, clipped = 0.5 * (total - 1), 0.5 * total, float(total - 1), 0
    if dithered:
        for i in range(x.size):
            clipped += (x[i] > 1.0) | (x[i] < -1.0)
            u = _uniform(base, first + i)
            place = min(max(x[i], -1.0), 1.0) * half + (u - np.floor(u + 0.5)) + middle
            x[i] = min(max(np.floor(place), 0.0), top)
    else:
        for i in range(x.size):
            clipped += (x[i] > 1.0) | (x[i] < -1.0)
            place = min(max(x[i], -1.0), 1.0) * half + middle
            x[i] = min(max(np.floor(place), 0.0), top)
    for stage in range(len(counts) - 1, 0, -1):
        count, inverse = float(counts[stage]), 1.0 / counts[stage]
        for i in range(x.size):
            coarse = np.floor((x[i] + 0.5) * inverse)
            out[stage, i] = np.int32(x[i] - coarse * count)
            x[i] = coarse
    for i in range(x.size):
        out[0, i] = np.int32(x[i])
    return clipped


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def subtract_scalar_dither(base: np.uint64, step: float, total: Floats) -> None:
    """total[i] -= step u_i, u the dither of `quantize_scalar`."""
    for i in range(total.size):
        u = _uniform(base, i)
        total[i] -= step * (u - np.floor(u + 0.5))


# ---- lattices -------------------------------------------------------------------------------------------
# `sides` is a tuple, so that its length is a constant for the compiler, which then unrolls the loops.


@numba.njit(cache=True, nogil=True, fastmath={"reassoc"})  # type: ignore[untyped-decorator]
def _nearest_d4(x: Floats, out: Floats, spare: Floats, sides: tuple[float, ...]) -> None:
    """Round; if the sum is odd, re-round the coordinate with the largest error."""
    parity, worst, largest = np.int64(0), 0, -1.0
    for j in range(len(sides)):
        rounded = np.floor(x[j] + 0.5)
        spare[j] = x[j] - rounded
        size = abs(spare[j])
        worst = j if size > largest else worst
        largest = size if size > largest else largest
        parity ^= np.int64(rounded)
        out[j] = rounded
    if parity & 1:
        out[worst] += 1.0 if spare[worst] >= 0.0 else -1.0


@numba.njit(cache=True, nogil=True, fastmath={"reassoc"})  # type: ignore[untyped-decorator]
def _nearest_e8(x: Floats, out: Floats, spare: Floats, sides: tuple[float, ...]) -> None:
    """Both cosets of D8 in one pass: with errors e to the integers, those to the half-integers are 1/2 - |e|.

    So the coordinate that an odd sum re-rounds has the largest |e| in D8 and the smallest in D8 + 1/2.
    """
    parity, half_parity, worst, best = np.int64(0), np.int64(0), np.int64(-1), np.int64(1) << np.int64(60)
    squared, half_squared = 0.0, 0.0
    for j in range(len(sides)):
        whole = np.floor(x[j])
        fraction = x[j] - whole
        up = np.int64(fraction >= 0.5)
        size = 0.5 - abs(fraction - 0.5)
        spare[j] = fraction
        out[j] = whole
        squared += size * size
        half_squared += (0.5 - size) * (0.5 - size)
        # size and coordinate in one integer, so that the largest and the smallest are plain reductions
        ranked = (np.int64(size * 2.0**50) << np.int64(3)) | np.int64(j)
        worst = max(worst, ranked)
        best = min(best, ranked)
        half_parity ^= np.int64(whole)
        parity ^= np.int64(whole) + up
    worst, best = worst & 7, best & 7
    largest, smallest = 0.5 - abs(spare[worst] - 0.5), 0.5 - abs(spare[best] - 0.5)
    odd, half_odd = parity & 1, half_parity & 1
    squared += float(odd) * (1.0 - 2.0 * largest)
    half_squared += float(half_odd) * (2.0 * smallest)
    if squared > half_squared:
        for j in range(len(sides)):
            out[j] += 0.5
        if half_odd:
            out[best] += 1.0 if spare[best] >= 0.5 else -1.0
    else:
        for j in range(len(sides)):
            out[j] += 1.0 if spare[j] >= 0.5 else 0.0
        if odd:
            out[worst] += -1.0 if spare[worst] >= 0.5 else 1.0


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _nearest(x: Floats, out: Floats, spare: Floats, sides: tuple[float, ...]) -> None:
    """Nearest lattice point of one block; the number of sides says which lattice."""
    if len(sides) == 8:
        _nearest_e8(x, out, spare, sides)
    elif len(sides) == 4:
        _nearest_d4(x, out, spare, sides)
    else:
        a, b = np.floor(x[0] + 0.5), np.floor(x[1] / _ROOT3 + 0.5) * _ROOT3
        c, d = np.floor(x[0]) + 0.5, np.floor(x[1] / _ROOT3) * _ROOT3 + _ROOT3 / 2
        one = (x[0] - a) * (x[0] - a) + (x[1] - b) * (x[1] - b)
        two = (x[0] - c) * (x[0] - c) + (x[1] - d) * (x[1] - d)
        out[0] = c if one > two else a
        out[1] = d if one > two else b


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _dither(
    base: np.uint64, block: int, out: Floats, box: Floats, spare: Floats, sides: tuple[float, ...]
) -> None:
    """Point uniform on the Voronoi cell: uniform on a box that tiles space, less its nearest point."""
    for j in range(len(sides)):
        box[j] = _uniform(base, block * len(sides) + j) * sides[j]
    _nearest(box, out, spare, sides)
    for j in range(len(sides)):
        out[j] = box[j] - out[j]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _find(point: Floats, inverse_units: tuple[float, ...], slots: NDArray[np.int64]) -> int:
    """Index of a lattice point: a look-up of its key in an open hash table of (key, index) rows."""
    bits, key = 62 // len(inverse_units), np.int64(0)
    for j in range(len(inverse_units)):
        whole = np.int64(np.floor(point[j] * inverse_units[j] + 0.5)) + (np.int64(1) << np.int64(bits - 1))
        key += whole << np.int64(j * bits)
    mask = slots.shape[0] - 1
    at = np.int64((np.uint64(key) * _GOLD) >> np.uint64(40)) & mask
    while slots[at, 0] != key and slots[at, 1] >= 0:
        at = (at + 1) & mask
    return int(slots[at, 1])


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _quantize_lattice(
    x: Floats,
    sides: tuple[float, ...],
    inverse_units: tuple[float, ...],
    shift: Floats,
    limit: float,
    scale: float,
    ratio: float,
    top: NDArray[np.int64],
    inner: NDArray[np.int64],
    dithered: bool,
    base: np.uint64,
    first: int,
    out: Indices,
) -> int:
    size, clipped, bound = len(sides), 0, limit * limit * (1.0 + 1e-12)
    spare, box, point, fine, u = np.zeros((5, size))
    for i in range(out.shape[1]):
        squared, factor = 0.0, scale
        for j in range(size):
            squared += x[i * size + j] * x[i * size + j]
        if squared > bound:
            clipped += 1
            factor = scale * limit / np.sqrt(squared)
        if dithered:
            _dither(base, first + i, u, box, spare, sides)
            for j in range(size):
                point[j] = x[i * size + j] * factor + u[j]
        else:
            for j in range(size):
                point[j] = x[i * size + j] * factor
        _nearest(point, fine, spare, sides)
        for stage in range(out.shape[0] - 1, 0, -1):
            for j in range(size):
                point[j] = (fine[j] + shift[j]) / ratio
            _nearest(point, u, spare, sides)
            for j in range(size):
                point[j] = fine[j] - ratio * u[j]
                fine[j] = u[j]
            out[stage, i] = _find(point, inverse_units, inner)
        out[0, i] = _find(fine, inverse_units, top)
    return clipped


def quantize_lattice(
    x: Floats,
    top: Codebook,
    inner: Codebook,
    ratio: int,
    limit: float,
    scale: float,
    dither: tuple[bool, int, int],
    out: Indices,
) -> int:
    """Indices of every block's nested lattice points, coarsest stage first.

    A block whose norm exceeds `limit` is shrunk to it along its ray.

    Args:
        x: `(n L,)`, n blocks after each other, in units of the radius.
        top: Codebook of the coarsest stage, at unit scale.
        inner: `voronoi_codebook` of the finer stages; unused (pass `top`) with one stage.
        ratio: Nesting ratio between neighbouring stages.
        limit: Largest norm of a block that can't be overloaded.
        scale: What takes units of the radius to units of the finest lattice.
        dither: Whether there is one, the key of its words, and the number of the first block in the message.
        out: `(stages, n)` int32, overwritten; -1 for a block outside the codebook, which `limit` excludes.

    Returns:
        How many blocks were shrunk.
    """
    cell = lattice(top.name)
    clipped: int = _quantize_lattice(
        x,
        cell.sides,
        tuple(1.0 / unit for unit in cell.units),
        TIE_SHIFT[: cell.dim],
        limit,
        scale,
        float(ratio),
        top.slots,
        inner.slots,
        dither[0],
        np.uint64(dither[1]),
        dither[2],
        out,
    )
    return clipped


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _subtract_lattice_dither(base: np.uint64, step: float, total: Floats, sides: tuple[float, ...]) -> None:
    size = len(sides)
    spare, box, u = np.zeros((3, size))
    for i in range(total.size // size):
        _dither(base, i, u, box, spare, sides)
        for j in range(size):
            total[i * size + j] -= step * u[j]


def subtract_dither(name: str, base: int, step: float, total: Floats) -> None:
    """total[block] -= step u_block, the dither of block 0, 1, ... under one key.

    Args:
        name: Lattice.
        base: Key of the dither words.
        step: Scale of the finest lattice, in units of `total`.
        total: `(n L,)`, changed in place.
    """
    if name == "Z":
        subtract_scalar_dither(np.uint64(base), step, total)
    else:
        _subtract_lattice_dither(np.uint64(base), step, total, lattice(name).sides)


# ---- bits -----------------------------------------------------------------------------------------------


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def encode_bits(
    index: Indices,
    signs: NDArray[np.int8],
    num_rows: int,
    base: np.uint64,
    first: int,
    flips_below: int,
    coins: NDArray[np.uint32],
    bits: NDArray[np.uint8],
) -> None:
    """One bit per index: its word's sign there (1 for +1), flipped where the private coin says so.

    Args:
        index: `(n,)` points' indices.
        signs: `(num_rows, N)` words, or `(0, N)` for Hadamard words, which are computed on the spot.
        num_rows: Number of words.
        base: Key of the words that draw the rows, uint64.
        first: Number of index[0] in the message.
        flips_below: A bit is flipped where its coin is below this threshold.
        coins: `(n,)` private 32-bit words.
        bits: `(n,)`, overwritten.
    """
    threshold = np.uint32(flips_below)
    if signs.shape[0]:
        for i in range(index.size):
            bits[i] = (signs[_row(base, first + i, num_rows), index[i]] > 0) ^ (coins[i] < threshold)
    elif num_rows == 1:
        for i in range(index.size):
            bits[i] = (index[i] == 0) ^ (coins[i] < threshold)
    else:
        for i in range(index.size):
            parity = np.int32(_row(base, first + i, num_rows) + 1) & index[i]
            parity ^= parity >> np.int32(8)
            parity ^= parity >> np.int32(4)
            even = (np.int32(0x9669) >> (parity & np.int32(15))) & np.int32(1)
            bits[i] = np.uint8(even) ^ np.uint8(coins[i] < threshold)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def add_decoded(
    bits: NDArray[np.uint8], weights: Floats, base: np.uint64, scale: float, offset: Floats, total: Floats
) -> None:
    """total[block] += offset + scale b weights[row], block by block, b = +-1.

    Args:
        bits: `(n,)` of one message.
        weights: `(num_rows, L)`.
        base: Key of the words that drew the rows, uint64.
        scale: What the decoder divides and multiplies by.
        offset: `(L,)`.
        total: `(n L,)`, changed in place.
    """
    num_rows, size = weights.shape
    if size == 1:
        constant = offset[0]
        if num_rows == 1:
            weight = scale * weights[0, 0]
            for i in range(bits.size):
                total[i] += constant + (2.0 * bits[i] - 1.0) * weight
        else:
            for i in range(bits.size):
                total[i] += constant + (2.0 * bits[i] - 1.0) * scale * weights[_row(base, i, num_rows), 0]
        return
    for i in range(bits.size):
        row, signed = _row(base, i, num_rows), (2.0 * bits[i] - 1.0) * scale
        for j in range(size):
            total[i * size + j] += offset[j] + signed * weights[row, j]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def add_votes(bits: NDArray[np.uint8], base: np.uint64, scale: float, votes: Floats) -> None:
    """votes[i, row] += scale b, b = +-1: the histogram's way of decoding.

    Args:
        bits: `(n,)` of one message.
        base: Key of the words that drew the rows, uint64.
        scale: Weight of one message.
        votes: `(n, num_rows)`, changed in place.
    """
    for i in range(bits.size):
        votes[i, _row(base, i, votes.shape[1])] += (2.0 * bits[i] - 1.0) * scale
