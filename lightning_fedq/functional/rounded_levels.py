"""Random rounding of a vector to integer levels, in one compiled pass."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def round_to_levels(
    values: NDArray[np.float64],
    factor: float,
    largest: float,
    words: NDArray[np.uint64],
    levels: NDArray[np.int32],
) -> None:
    """Round |value| factor up with the chance of its fraction, else down, and give it the value's sign.

    The uniform of a word is an odd multiple of 2^-53 in (0, 1), as `Stream.uniforms` has it.

    Args:
        values: `(n,)`.
        factor: Levels in one unit of the values.
        largest: Levels beyond this one become it, as the product may round to a little more.
        words: `(n,)` uniform words.
        levels: `(n,)`, overwritten.
    """
    for j in range(values.size):
        units = min(abs(values[j]) * factor, largest)
        floor = np.floor(units)
        # the difference is exact, and 0 is never below it: a level stays one
        up = np.float64(words[j] >> np.uint64(12)) * 2.0**-52 + 2.0**-53 < units - floor
        level = np.int64(floor) + up
        levels[j] = -level if values[j] < 0.0 else level


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def pick_levels(
    values: NDArray[np.float64],
    factor: float,
    edges: NDArray[np.float64],
    levels: NDArray[np.float64],
    picked: NDArray[np.int32],
) -> None:
    """Give each value the number of the cell in which value factor lies, and multiply it by the cell's level.

    Args:
        values: `(n,)`, overwritten.
        factor: Units in one of the values.
        edges: Inner edges in rising order; one belongs to the cell below it.
        levels: Level of each cell.
        picked: `(n,)`, overwritten.
    """
    for j in range(values.size):
        units, cell = values[j] * factor, 0
        for edge in edges:
            cell += units > edge
        picked[j] = cell
        values[j] *= levels[cell]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def levels_at_scale(
    picked: NDArray[np.integer], levels: NDArray[np.float64], scale: float, out: NDArray[np.float64]
) -> None:
    """Write the picked levels, scaled, `(n,)`."""
    scaled = scale * levels
    for j in range(picked.size):
        out[j] = scaled[picked[j]]
