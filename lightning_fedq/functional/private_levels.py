"""Compiled private quantisers with few levels: draws from a probability matrix, dithered Laplace noise."""

from __future__ import annotations

import math

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.noise.quantile_table import SMALLEST_TAIL, TABLE_ERROR, Table, look_up

_BLOCK = 1 << 10


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def draw_outputs(
    units: NDArray[np.float64],
    up: NDArray[np.uint32],
    words: NDArray[np.uint32],
    edges: NDArray[np.uint32],
    outputs: NDArray[np.uint8],
) -> None:
    """Round each value at random to a knot, and draw an output from the knot's law.

    Knots are evenly spaced on [-1, 1]. A value is rounded up with P(up) = ceil(fraction 2^32) / 2^32, where
    fraction is its relative position between two knots. This rounding gives no privacy, the draw of the
    output does.

    Args:
        units: Values in [-1, 1], `(n,)`.
        up: Uniform 32-bit words for the rounding, `(n,)`.
        words: Uniform 32-bit words for the outputs, `(n,)`.
        edges: Cumulative probabilities of the outputs of each knot, times 2^32, `(knots, outputs - 1)`.
        outputs: Numbers of the outputs, `(n,)`, overwritten.
    """
    flat, last, size = edges.reshape(-1), edges.shape[0] - 2, edges.shape[1]
    half = 0.5 * (edges.shape[0] - 1)
    knots = np.empty(_BLOCK, np.int32)
    for start in range(0, units.size, _BLOCK):
        unit, coin = units[start : start + _BLOCK], up[start : start + _BLOCK]
        word, put = words[start : start + _BLOCK], outputs[start : start + _BLOCK]
        for j in range(unit.size):
            place = (unit[j] + 1.0) * half
            cell = np.int32(min(np.floor(place), last))  # the upper end is in the last cell
            fraction = place - cell
            knots[j] = (cell + (np.float64(coin[j]) < np.ceil(fraction * 4294967296.0))) * size
        for j in range(unit.size):
            number = 0
            for k in range(size):
                number += word[j] >= flat[knots[j] + k]
            put[j] = number


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

    The noise is the quantile of the top 52 bits of a word. It is first read from a table. If the table's
    error could change the level, or the tail is below 2^-11, the quantile is computed instead.

    Args:
        units: Values in [-1, 1], `(n,)`.
        private: Uniform 64-bit words for the noise, `(n,)`.
        shared: Uniform 64-bit words for the dither, `(n,)`.
        scale: Mean absolute value of the noise.
        step: Distance of two levels.
        levels: Number of levels.
        table: Table of Laplace quantiles.
        out: Numbers of the levels, `(n,)`, overwritten.
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
    """Add the values of the symbols of messages to a running sum, row after row.

    Args:
        rows: Symbols of the messages, `(n, dim)`.
        values: Value of each symbol.
        total: Running sum, `(dim,)`, changed in place.
    """
    for start in range(0, total.size, 2048):
        part = total[start : start + 2048]
        for i in range(rows.shape[0]):
            row = rows[i, start : start + 2048]
            for j in range(part.size):
                part[j] += values[row[j]]
