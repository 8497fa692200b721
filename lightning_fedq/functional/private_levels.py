"""Private quantisers of a few levels in compiled passes: coins of a matrix, Laplace noise with a dither."""

from __future__ import annotations

import math

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.noise.quantile_table import SMALLEST_TAIL, TABLE_ERROR, Table, look_up

_BLOCK = 1 << 10
_CELL_BITS = 10
_CELLS, _UNSURE = 1 << _CELL_BITS, 255


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def draw_outputs(
    units: NDArray[np.float64],
    up: NDArray[np.uint32],
    words: NDArray[np.uint32],
    low: float,
    half: float,
    edges: NDArray[np.uint32],
    outputs: NDArray[np.uint8],
) -> None:
    """Round to a knot at random, and draw an output from the knot's law.

    Knots are the ends of the range and the integers between. P(up) = ceil(fraction 2^32) / 2^32, the fraction
    of the way from one to the next: the grid's own coin, private only because the outputs' are.

    Args:
        units: `(n,)` in [-1, 1].
        up: `(n,)` uniform words, for the grid.
        words: `(n,)` uniform words, for the outputs.
        low: Place of -1 on the grid.
        half: Half of the range, in steps of the grid.
        edges: `(knots, outputs - 1)`: chances over 2^32, summed, of the outputs up to each one.
        outputs: `(n,)`, overwritten.
    """
    high, flat, size = 2.0 * half + low, edges.reshape(-1), edges.shape[1]
    first, last = np.floor(low), np.ceil(high) - 1.0
    lefts = np.maximum(np.arange(first, last + 1.0), low)
    widths = np.minimum(np.arange(first + 1.0, last + 2.0), high) - lefts
    knots = np.empty(_BLOCK, np.int32)
    for start in range(0, units.size, _BLOCK):
        unit, coin = units[start : start + _BLOCK], up[start : start + _BLOCK]
        word, put = words[start : start + _BLOCK], outputs[start : start + _BLOCK]
        for j in range(unit.size):
            place = (unit[j] + 1.0) * half + low
            cell = np.int32(min(np.floor(place), last) - first)  # the upper end is in the last cell
            fraction = (place - lefts[cell]) / widths[cell]
            knots[j] = (cell + (np.float64(coin[j]) < np.ceil(fraction * 4294967296.0))) * size
        for j in range(unit.size):
            number = 0
            for k in range(size):
                number += word[j] >= flat[knots[j] + k]
            put[j] = number


def table_of_tilted(weights: NDArray[np.float64], slopes: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Tabulate outputs by value and word, where these tell them.

    An output grows with the word, and with the value, because slopes do not fall: a cell whose lowest and
    highest corner have the same output has no other. Corners are moved apart by far more than chances err.

    Args:
        weights: `(k,)`, > 0.
        slopes: `(k,)`, not falling.

    Returns:
        `(values, words)`: an output, or one that there is not.
    """
    knots = np.linspace(0.0, 1.0, _CELLS + 1)
    logs = np.log(weights) + np.outer(2.0 * knots - 1.0, slopes)
    chances = np.exp(logs - logs.max(1, keepdims=True))  # the largest is 1: no overflow
    below = (chances.cumsum(1) / chances.sum(1, keepdims=True))[:, :-1]
    lowest = np.stack([np.searchsorted(row, knots[:-1] - 2.0**-40, "right") for row in below[:-1]])
    highest = np.stack([np.searchsorted(row, knots[1:] + 2.0**-40, "right") for row in below[1:]])
    return np.where(lowest == highest, lowest, _UNSURE).astype(np.uint8)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def draw_tilted(
    values: NDArray[np.float32],
    factor: float,
    words: NDArray[np.uint64],
    weights: NDArray[np.float64],
    slopes: NDArray[np.float64],
    table: NDArray[np.uint8],
    outputs: NDArray[np.uint8],
) -> None:
    """Draw outputs of chances w_k exp(s_k x) / Z(x), x = factor times a value, held to [-1, 1].

    Args:
        values: `(n,)`.
        factor: Inverse of the range.
        words: `(n,)` uniform words, of which the top 52 bits count.
        weights: `(k,)`, > 0, symmetric.
        slopes: `(k,)`, antisymmetric, not falling.
        table: `table_of_tilted` of these; where it is not sure, chances are computed.
        outputs: `(n,)`, overwritten. An output grows with its word.
    """
    size = weights.size
    half = size // 2
    chances = np.empty(size)
    for j in range(values.size):
        x = min(max(np.float64(values[j]) * factor, -1.0), 1.0)
        cell = max(0, min(int((x + 1.0) * (_CELLS / 2)), _CELLS - 1))
        outputs[j] = table[cell, words[j] >> np.uint64(64 - _CELL_BITS)]
        if outputs[j] != _UNSURE:
            continue
        total = 0.0
        for k in range(half, size):
            up = math.exp(slopes[k] * x)
            chances[k], chances[size - 1 - k] = weights[k] * up, weights[k] / up
            total += chances[k] + chances[size - 1 - k]
        # times Z, rather than every chance over Z
        place = (np.float64(words[j] >> np.uint64(12)) + 0.5) * 2.0**-52 * total
        number, below = 0, 0.0
        for k in range(size - 1):
            below += chances[k]
            number += place >= below
        outputs[j] = number


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _noisy_place(unit: float, private: np.uint64, dither: float, scale: float, step: float) -> float:
    centered = np.float64(private >> np.uint64(12)) * 2.0**-52 + 2.0**-53 - 0.5
    size = scale * math.log1p(-2.0 * abs(centered))  # ln(2 tail) <= 0, finite as |centered| < 1/2
    return (unit + (-size if centered > 0.0 else size)) / step + dither - 0.5


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def noisy_levels(
    units: NDArray[np.float64],
    private: NDArray[np.uint64],
    shared: NDArray[np.uint64],
    scale: float,
    step: float,
    levels: int,
    table: Table,
    out: NDArray[np.int32],
) -> None:
    """Add Laplace noise, then quantise with a subtractive dither.

    The noise is the quantile of the top 52 bits of a word. It is first taken from a table; where that might
    not give the same level, and in tails below 2^-11, it is computed.

    Args:
        units: `(n,)` in [-1, 1].
        private: `(n,)` uniform words, for the noise.
        shared: `(n,)` uniform words, for the dither.
        scale: Mean absolute value of the noise.
        step: Distance of two levels.
        table: Laplace quantiles.
        out: `(n,)`, overwritten.
    """
    middle, last, tolerance = levels / 2.0, np.float64(levels - 1), TABLE_ERROR * (1.0 + scale / step)
    tails, dithers, places = np.empty(_BLOCK), np.empty(_BLOCK), np.empty(_BLOCK)
    near = np.empty(_BLOCK, np.bool_)
    for start in range(0, units.size, _BLOCK):
        unit, drawn = units[start : start + _BLOCK], private[start : start + _BLOCK]
        dither, put = shared[start : start + _BLOCK], out[start : start + _BLOCK]
        size = unit.size
        look_up(drawn, table, tails[:size], places[:size])
        for j in range(size):
            dithers[j] = np.float64(dither[j] >> np.uint64(12)) * 2.0**-52 + 2.0**-53
        for j in range(size):
            places[j] = (unit[j] + scale * places[j]) / step + dithers[j] - 0.5 + middle
        for j in range(size):
            rest = places[j] - np.floor(places[j])
            near[j] = (rest < tolerance) | (rest > 1.0 - tolerance) | (tails[j] < SMALLEST_TAIL)
        for j in range(size):
            if near[j]:
                places[j] = _noisy_place(unit[j], drawn[j], dithers[j], scale, step) + middle
        for j in range(size):
            put[j] = np.int32(min(max(np.floor(places[j]), 0.0), last))


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def sum_of_outputs(
    rows: NDArray[np.unsignedinteger], values: NDArray[np.float64], total: NDArray[np.float64]
) -> None:
    """Add up what the symbols of messages stand for, row after row.

    Args:
        rows: `(n, dim)`.
        values: Value of each symbol.
        total: `(dim,)`, to which they are added.
    """
    for start in range(0, total.size, 2048):
        part = total[start : start + 2048]
        for i in range(rows.shape[0]):
            row = rows[i, start : start + 2048]
            for j in range(part.size):
                part[j] += values[row[j]]
