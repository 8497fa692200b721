"""Compiled loops of mechanisms that send only some coordinates: selection, rounding and noise.

Their results equal those of the same NumPy expressions bit for bit.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def add_below(words: NDArray[np.uint32], threshold: int, total: NDArray[Any]) -> None:
    """Count coordinates whose word is below a threshold, total += words < threshold.

    Args:
        words: `(n,)` uniform 32-bit words.
        threshold: In [0, 2^32).
        total: `(n,)` integers, changed in place.
    """
    bound = np.uint32(threshold)
    for j in range(words.size):
        total[j] += words[j] < bound


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def round_selected(
    units: Floats, words: NDArray[np.uint32], selected: Mask, cells: int, symbols: NDArray[np.int32]
) -> int:
    """Round to one of `cells` + 1 levels from -1 to 1 at random, without bias.

    Args:
        units: `(n,)` in [-1, 1].
        words: `(n,)` uniform 32-bit words.
        selected: `(n,)`, true where something is sent.
        cells: Levels - 1.
        symbols: `(n,)`, overwritten: 1 for the lowest level and up, 0 where nothing is sent.

    Returns:
        How many are sent.
    """
    sent, half, last = 0, 0.5 * cells, np.float64(cells - 1)
    for j in range(units.size):
        place = (units[j] + 1.0) * half
        floor = min(np.floor(place), last)
        # at +1 the fraction is 1, and 2^32 above every word
        up = np.int64(words[j]) < np.int64((place - floor) * 4294967296.0)
        symbol = np.int32(floor) + np.int32(up) + np.int32(1)
        symbols[j] = symbol if selected[j] else np.int32(0)
        sent += selected[j]
    return sent


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def take_words(words: NDArray[np.uint64], selected: Mask, out: NDArray[np.uint64]) -> int:
    """Copy the four words of each selected coordinate, words.reshape(n, 4)[selected].

    Args:
        words: `(4 n,)`.
        selected: `(n,)`.
        out: `(4 n + 4,)`, overwritten.

    Returns:
        How many coordinates are selected.
    """
    count = 0
    for j in range(selected.size):
        for k in range(4):
            out[4 * count + k] = words[4 * j + k]  # overwritten by the next one unless it is selected
        count += selected[j]
    return count


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def take_scaled(
    units: Floats, counts: NDArray[np.int32], scales: Floats, selected: Mask, values: Floats, factors: Floats
) -> None:
    """Copy values = units[selected] and factors = scales[counts[selected]], without a branch.

    Args:
        units: `(n,)`.
        counts: `(n,)` places in `scales`.
        scales: One a count.
        selected: `(n,)`.
        values: `(n + 1,)`, overwritten.
        factors: `(n + 1,)`, overwritten.
    """
    place = 0
    for j in range(selected.size):
        values[place] = units[j]
        factors[place] = scales[counts[j]]
        place += selected[j]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def put_selected(sent: NDArray[np.int32], selected: Mask, symbols: NDArray[np.int32]) -> None:
    """Spread sent symbols over their coordinates, zeros elsewhere.

    Args:
        sent: `(number of selected + 1,)`, its last value not used.
        selected: `(n,)`.
        symbols: `(n,)`, overwritten.
    """
    place = 0
    for j in range(selected.size):
        symbols[j] = sent[place] if selected[j] else np.int32(0)
        place += selected[j]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def add_decoded_selected(
    symbols: NDArray[np.integer],
    selected: Mask,
    counts: NDArray[np.int32],
    scales: Floats,
    dither: Floats,
    step: Floats,
    offset: Floats,
    probability: float,
    total: Floats,
) -> None:
    """Add ((M - U) w + offset) / probability where selected, w and offset times scales[counts].

    Args:
        symbols: `(n,)` M.
        selected: `(n,)`.
        counts: `(n,)` places in `scales`.
        scales: One a count.
        dither: `(number of selected,)` U.
        step: w of the same, before scaling.
        offset: Offsets of the same, before scaling.
        probability: Chance of being selected.
        total: `(n,)`, changed in place.
    """
    place = 0
    for j in range(selected.size):
        if selected[j]:
            scale = scales[counts[j]]
            decoded = (symbols[j] - dither[place]) * (step[place] * scale) + offset[place] * scale
            total[j] += decoded / probability
            place += 1


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def subtract_noise(selected: Mask, dither: Floats, step: Floats, total: Floats) -> None:
    """Add -U w where selected.

    Args:
        selected: `(n,)`.
        dither: `(number of selected,)` U.
        step: w of the same.
        total: `(n,)`, changed in place.
    """
    place = 0
    for j in range(selected.size):
        if selected[j]:
            total[j] += -dither[place] * step[place]
            place += 1
