"""Compiled loops of block coding: scalar indices, one bit per index, and the decoded sums.

Each loop processes several messages at once. Tests check that it equals a few lines of tensor code in
`lattice` and `codeword`. The generator's word for a block is computed when it is needed, so there is no array
of code words. Lattices of more than one dimension are in `lattice_loops`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.blocks.codeword import GOLD, MIX1, MIX2

Floats = NDArray[np.float64]
Indices = NDArray[np.int32]
Keys = NDArray[np.uint64]

_GOLD, _MIX1, _MIX2 = np.uint64(GOLD), np.uint64(MIX1), np.uint64(MIX2)
_TILE = 1 << 11
"""Blocks whose sum stays in the fastest cache while all messages are added to it."""


# ---- the public generator ---------------------------------------------------------------------------------


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
def uniform_word(base: np.uint64, at: int) -> float:
    """Return word number `at` of a key as a uniform in [0, 1)."""
    return float(np.int64(_word(base, at) >> np.uint64(11))) * 2.0**-53


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def _dither_word(base: np.uint64, at: int) -> float:
    """Return u - floor(u + 1/2), where u is the uniform of `uniform_word`, by reading the word as signed."""
    return float(np.int64(_word(base, at)) >> np.int64(11)) * 2.0**-53


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def choose_blocks(key: np.uint64, num_blocks: int, out: NDArray[np.int64]) -> None:
    """Draw a uniform subset of {0, ..., num_blocks - 1}, in ascending order, by Floyd's algorithm.

    The probability of a subset has a relative error of num_blocks 2^-53 per element.

    Args:
        key: Key of the words that draw it, uint64.
        num_blocks: Number of blocks, >= out.size.
        out: Array that is overwritten with the subset.
    """
    taken = np.zeros(num_blocks, np.uint8)
    for i in range(out.size):
        last = num_blocks - out.size + i
        drawn = int(uniform_word(key, i) * (last + 1))
        at = last if drawn > last or taken[drawn] else drawn
        out[i], taken[at] = at, 1
    out.sort()


# ---- scalar indices ---------------------------------------------------------------------------------------


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def quantize_scalar(
    values: NDArray[Any],
    ranges: Floats,
    counts: NDArray[np.int64],
    dithered: bool,
    keys: Keys,
    first: int,
    out: Indices,
) -> int:
    """Write the digits of the fine level of every coordinate, coarsest stage first.

    Values out of range are clipped. In units of the radius the step is 2 / (N - 1), where N is the product of
    `counts`. So the outermost levels are -1 and 1, and no dithered x in [-1, 1] leaves the outermost cells.

    Args:
        values: `(rows, dim)` float32 or float64, C-contiguous.
        ranges: `(3, segments)`: where each segment ends, its centre, one over its radius.
        counts: `(stages,)` levels of each stage.
        dithered: Whether a dither from word j of the row's key is added to coordinate j.
        keys: `(rows,)` keys of the dither words.
        first: Coordinate where the stretch begins.
        out: `(stages, rows, n)`, C-contiguous, overwritten.

    Returns:
        Number of clipped coordinates.
    """
    total = 1
    for count in counts:
        total *= count
    half, middle, top, clipped = 0.5 * (total - 1), 0.5 * total, float(total - 1), 0
    end = first + out.shape[2]
    fine = np.empty(out.shape[2])
    for row in range(out.shape[1]):
        start, key = first, keys[row]
        for segment in range(ranges.shape[1]):
            stop = min(int(ranges[0, segment]), end)
            if start >= stop:
                continue
            center, inverse = ranges[1, segment], ranges[2, segment]
            part, places = values[row, start:stop], fine[start - first : stop - first]
            if dithered:
                for j in range(part.size):
                    x = (np.float64(part[j]) - center) * inverse
                    clipped += (x > 1.0) | (x < -1.0)
                    place = min(max(x, -1.0), 1.0) * half + _dither_word(key, start + j) + middle
                    places[j] = min(max(np.floor(place), 0.0), top)
            else:
                for j in range(part.size):
                    x = (np.float64(part[j]) - center) * inverse
                    clipped += (x > 1.0) | (x < -1.0)
                    place = min(max(x, -1.0), 1.0) * half + middle
                    places[j] = min(max(np.floor(place), 0.0), top)
            start = stop
        for stage in range(len(counts) - 1, 0, -1):
            count, one_over, digits = float(counts[stage]), 1.0 / counts[stage], out[stage, row]
            for j in range(fine.size):
                coarse = np.floor((fine[j] + 0.5) * one_over)
                digits[j] = np.int32(fine[j] - coarse * count)
                fine[j] = coarse
        digits = out[0, row]
        for j in range(fine.size):
            digits[j] = np.int32(fine[j])
    return clipped


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def subtract_scalar_dithers(keys: Keys, step: float, total: Floats) -> None:
    """Subtract step u_j from total[j] for the dithers u of every key of `quantize_scalar`."""
    for start in range(0, total.size, _TILE):
        part = total[start : min(start + _TILE, total.size)]
        for key in keys:
            for j in range(part.size):
                part[j] -= step * _dither_word(key, start + j)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def subtract_scalar_dithers_per_message(keys: Keys, step: float, totals: Floats) -> None:
    """Subtract step u_j from totals[k, j], where u is the dither of key k of `quantize_scalar`."""
    for k in range(totals.shape[0]):
        subtract_scalar_dithers(keys[k : k + 1], step, totals[k])


# ---- bits -----------------------------------------------------------------------------------------------


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def encode_bits(
    index: Indices,
    signs: NDArray[np.int8],
    num_rows: int,
    keys: Keys,
    first: int,
    flips_below: NDArray[np.uint32],
    coins: NDArray[np.uint32],
    stage: int,
    bits: NDArray[np.uint8],
) -> None:
    """Encode each index as one bit: the sign of its word at the index (1 for +1), with randomised response.

    Args:
        index: `(messages, n)` indices of points.
        signs: `(num_rows, N)` words, or `(0, N)` for Hadamard words, which are computed on the spot.
        num_rows: Number of words.
        keys: `(messages,)` keys of the words that draw the rows.
        first: Number of index[:, 0] in the message.
        flips_below: `(messages,)`: a bit is flipped where its coin is below this threshold.
        coins: `(messages, n)` private 32-bit words.
        stage: Stage that the index is of.
        bits: Encoded bits, `(messages, stages, blocks)`. The stretch of the stage is overwritten.
    """
    packed, width = np.uint64(0), signs.shape[1]
    if 0 < signs.size <= 64:  # all words in one integer: a shift is cheaper than a look-up
        for row in range(num_rows):
            for i in range(width):
                packed |= np.uint64(signs[row, i] > 0) << np.uint64(row * width + i)
    for k in range(index.shape[0]):
        points, drawn, threshold, base = index[k], coins[k], flips_below[k], keys[k]
        out = bits[k, stage, first : first + points.size]
        if 0 < signs.size <= 64:
            for i in range(points.size):
                at = np.uint64(_row(base, first + i, num_rows) * width + points[i])
                out[i] = np.uint8((packed >> at) & np.uint64(1)) ^ np.uint8(drawn[i] < threshold)
        elif signs.shape[0]:
            for i in range(points.size):
                sign = signs[_row(base, first + i, num_rows), points[i]]
                out[i] = np.uint8(sign > 0) ^ np.uint8(drawn[i] < threshold)
        elif num_rows == 1:
            for i in range(points.size):
                out[i] = np.uint8(points[i] == 0) ^ np.uint8(drawn[i] < threshold)
        else:
            for i in range(points.size):
                parity = np.int32(_row(base, first + i, num_rows) + 1) & points[i]
                parity ^= parity >> np.int32(8)
                parity ^= parity >> np.int32(4)
                even = (np.int32(0x9669) >> (parity & np.int32(15))) & np.int32(1)
                out[i] = np.uint8(even) ^ np.uint8(drawn[i] < threshold)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def add_decoded(
    bits: NDArray[np.uint8],
    stage: int,
    weights: Floats,
    keys: Keys,
    scales: Floats,
    offset: Floats,
    total: Floats,
) -> None:
    """Add offset + scale b weights[row], b = +-1, to total[block] for every message.

    Args:
        bits: `(messages, stages, n)`.
        stage: The stage to decode.
        weights: `(num_rows, L)`.
        keys: `(messages,)` keys of the words that drew the rows.
        scales: Scale of each message's decoder, as in `error.lift`, `(messages,)`.
        offset: Offset of the decoder, `(L,)`.
        total: `(n L,)`, changed in place.
    """
    num_rows, size = weights.shape
    for start in range(0, bits.shape[2], _TILE):
        stop = min(start + _TILE, bits.shape[2])
        part = total[start * size : stop * size]
        for k in range(bits.shape[0]):
            sent, scale, base = bits[k, stage, start:stop], scales[k], keys[k]
            if num_rows == 1 and size == 1:
                weight, constant = scale * weights[0, 0], offset[0]
                for i in range(sent.size):
                    part[i] += constant + (2.0 * sent[i] - 1.0) * weight
            elif size == 1:
                constant = offset[0]
                for i in range(sent.size):
                    row = _row(base, start + i, num_rows)
                    part[i] += constant + (2.0 * sent[i] - 1.0) * scale * weights[row, 0]
            else:
                for i in range(sent.size):
                    row, signed = _row(base, start + i, num_rows), (2.0 * sent[i] - 1.0) * scale
                    for j in range(size):
                        part[i * size + j] += offset[j] + signed * weights[row, j]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def add_decoded_per_message(
    bits: NDArray[np.uint8],
    stage: int,
    weights: Floats,
    keys: Keys,
    scales: Floats,
    offset: Floats,
    totals: Floats,
) -> None:
    """Add each message to a separate row of `totals`, as `add_decoded` does."""
    for k in range(totals.shape[0]):
        add_decoded(bits[k : k + 1], stage, weights, keys[k : k + 1], scales[k : k + 1], offset, totals[k])


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def add_votes(bits: NDArray[np.uint8], stage: int, keys: Keys, scales: Floats, votes: Floats) -> None:
    """Add scale b, b = +-1, to votes[i, row] for every message, for decoding by a histogram.

    Args:
        bits: `(messages, stages, n)`.
        stage: The stage to decode.
        keys: `(messages,)` keys of the words that drew the rows.
        scales: `(messages,)` weights.
        votes: `(n, num_rows)`, changed in place.
    """
    for k in range(bits.shape[0]):
        sent = bits[k, stage]
        for i in range(sent.size):
            votes[i, _row(keys[k], i, votes.shape[1])] += (2.0 * sent[i] - 1.0) * scales[k]
