"""Compiled loops of the aggregate Gaussian: selection of special coordinates, quantisation, decoding.

All core coordinates have the same step and offset 0. Special coordinates (1 in 20 for ten clients) have
individual steps and offsets, so they are listed, and no full array of steps is made.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.exact_error.depths import BLOCK, draw_depths
from lightning_fedq.functional.exact_error.dither import LARGEST
from lightning_fedq.functional.exact_error.tables import evaluate

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
Words = NDArray[np.uint64]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _list_undecided(words: Words, sure: int, product: float, places: Places) -> int:
    """List the coordinates that the first pass does not put into the core, and return their number."""
    shift, undecided = np.uint64(11), 0
    is_open = np.empty(BLOCK, np.bool_)
    for start in range(0, words.size // 4, BLOCK):
        drawn = words[4 * start : 4 * (start + BLOCK)]
        here = drawn.size // 4
        for j in range(here):
            coin = np.int64(drawn[4 * j] >> shift)
            first_tail = np.float64(np.int64(drawn[4 * j + 1] >> shift))
            second_tail = np.float64(np.int64(drawn[4 * j + 2] >> shift))
            is_open[j] = (coin >= sure) | (first_tail * second_tail <= product)
        for j in range(here):
            places[undecided] = start + j  # without a branch: the next j overwrites it unless j is open
            undecided += is_open[j]
    return undecided


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def special_radii(
    words: Words,
    gaussian: bool,
    coefficients: Floats,
    width: float,
    sure: int,
    product: float,
    places: Places,
    radii: Floats,
) -> int:
    """List the special coordinates and the radii of their layers.

    A coordinate belongs to the core if its random word (the coin) is below the table's probability at the
    radius of its layer. A first pass avoids logarithms. It takes the smallest probability up to some radius.
    If the coin is below it, and the product of the two tails shows that the layer is no wider, the coordinate
    belongs to the core.

    Args:
        words: Words of the layers, `(4 n,)`.
        gaussian: Gaussian target if true, else Laplace.
        coefficients: Table of the core's probability by radius.
        width: Width of the table's cells.
        sure: Smallest probability up to the radius of the first pass, times 2^53, rounded down.
        product: Product of tails, in units of 2^-106, above which the layer is within this radius.
        places: Numbers of the special coordinates, ascending, `(n + 1,)`, overwritten.
        radii: Radii of the special coordinates, `(n,)`, overwritten.

    Returns:
        Number of special coordinates.
    """
    undecided = _list_undecided(words, sure, product, places)
    taken, depths, count = np.empty(4 * BLOCK, np.uint64), np.empty(BLOCK), 0
    for start in range(0, undecided, BLOCK):
        here = min(BLOCK, undecided - start)
        for j in range(here):
            for k in range(4):
                taken[4 * j + k] = words[4 * places[start + j] + k]
        draw_depths(taken, gaussian, depths[:here])
        for j in range(here):
            layer = np.sqrt(2.0 * depths[j]) if gaussian else depths[j] * 0.7071067811865476
            coin = np.float64(taken[4 * j] >> np.uint64(11)) * 2.0**-53
            places[count] = places[start + j]  # count <= start + j, so no unread place is overwritten
            radii[count] = layer
            count += coin >= evaluate(coefficients, width, layer)
    return count


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def cut_once(
    cuts: Floats,
    words: Words,
    unit: Floats,
    wanted: Places,
    level: int,
    least: float,
    active: Places,
    scale: Floats,
    shift: Floats,
) -> int:
    """Cut a copy of the core out of every active uniform and continue with the remainder on one side.

    Args:
        cuts: Place of each cut, in widths of the uniform, `(m,)`. Values above 1/2 count as 1/2.
        words: Words whose last bit selects the side, `(m,)`.
        unit: Scale of each special coordinate before any cut, `(k,)`.
        wanted: Number of cuts of each special coordinate, `(k,)`.
        level: Number of this cut, from 1.
        least: Smallest scale. Coordinates below it are not cut again.
        active: Special coordinates to cut, `(m,)`, changed in place. Coordinates to cut again are moved to
            the front.
        scale: Scale of each special coordinate, `(k,)`, changed in place.
        shift: Shift of each special coordinate, `(k,)`, changed in place.

    Returns:
        Number of coordinates to cut again.
    """
    left_over = 0
    for i in range(active.size):
        j = active[i]
        place = min(cuts[i], 0.5)
        sign = 1.0 - 2.0 * np.float64(words[i] & np.uint64(1))
        shift[j] += scale[j] * sign * (place + 0.5) / 2.0
        scale[j] *= 0.5 - place
        active[left_over] = j
        left_over += (scale[j] * unit[j] >= least) & (wanted[j] > level)
    return left_over


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def quantize_with_step(
    values: NDArray[np.floating], scale: float, words: Words, step: float, symbols: NDArray[np.signedinteger]
) -> float:
    """Quantise with one step. Equals `dither_quantize(scale * values, centred_dither(words), step)`.

    Args:
        values: `(n,)` float32 or float64.
        scale: Factor on the values (clipping), in [0, 1].
        words: `(n,)` uniform words.
        step: Step > 0.
        symbols: Signed integers, `(n,)`, overwritten. A symbol that is too large is set to 0.

    Returns:
        The largest |M|.
    """
    shift, half_cells, floats, too_large = np.uint64(11), np.int64(1 << 52), np.empty(BLOCK), 0.0
    most, least = np.int64(0), np.int64(0)
    for start in range(0, words.size, BLOCK):
        drawn, part, put = words[start : start + BLOCK], values[start : start + BLOCK], symbols[start:]
        for j in range(drawn.size):
            dither = (np.float64(np.int64(drawn[j] >> shift) - half_cells) + 0.5) * 2.0**-53
            floats[j] = np.floor(np.float64(part[j]) * scale / step + dither + 0.5)
        beyond = 0
        for j in range(drawn.size):
            fits = abs(floats[j]) < LARGEST
            symbol = np.int64(floats[j] if fits else 0.0)
            beyond += not fits
            most, least = max(most, symbol), min(least, symbol)
            put[j] = symbol
        if beyond:
            for j in range(drawn.size):
                too_large = max(too_large, abs(floats[j]))
    return max(np.float64(max(most, -least)), too_large)


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def quantize_places(
    values: NDArray[np.floating],
    scale: float,
    words: Words,
    first: int,
    places: Places,
    steps: Floats,
    symbols: NDArray[np.signedinteger],
) -> float:
    """Quantise the listed coordinates of a stretch, each with a separate step.

    Args:
        values: `(n,)` float32 or float64.
        scale: Factor on the values.
        words: `(n,)` uniform words of the dithers.
        first: Number of the stretch's first coordinate.
        places: Numbers of the listed coordinates, `(m,)`.
        steps: Steps > 0 of the listed coordinates, `(m,)`.
        symbols: Symbols, `(n,)`, overwritten at the listed coordinates.

    Returns:
        The largest |M|.
    """
    largest, half_cells = 0.0, np.int64(1 << 52)
    for i in range(places.size):
        j = places[i] - first
        dither = (np.float64(np.int64(words[j] >> np.uint64(11)) - half_cells) + 0.5) * 2.0**-53
        symbol = np.floor(np.float64(values[j]) * scale / steps[i] + dither + 0.5)
        largest = max(largest, abs(symbol))
        symbols[j] = np.int64(symbol) if abs(symbol) < LARGEST else 0
    return largest


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def add_dequantized_with_step(
    symbols: NDArray[np.integer],
    dither: Floats,
    step: float,
    places: Places,
    steps: Floats,
    offsets: Floats,
    total: Floats,
) -> None:
    """Add (M - U) w + offset, with separate steps and offsets for the listed coordinates.

    Args:
        symbols: Symbols M, `(n,)`.
        dither: Dithers U, `(n,)`.
        step: Step w of all other coordinates, whose offset is 0.
        places: Numbers of the listed coordinates, each once, `(m,)`.
        steps: Steps of the listed coordinates, `(m,)`.
        offsets: Offsets of the listed coordinates, `(m,)`.
        total: Running sum, `(n,)`, changed in place.
    """
    before = total[places]
    for j in range(symbols.size):
        total[j] += (symbols[j] - dither[j]) * step
    for i in range(places.size):
        j = places[i]
        total[j] = before[i] + ((symbols[j] - dither[j]) * steps[i] + offsets[i])
