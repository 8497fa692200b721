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
    """Round |value| * factor randomly to an integer without bias, and give it the value's sign.

    It is rounded up with the probability of its fraction. The uniform of a word is an odd multiple of 2^-53
    in (0, 1), as in `Stream.uniforms`.

    Args:
        values: Values, `(n,)`.
        factor: Number of levels in one unit of the values.
        largest: Largest level. The product may exceed it by rounding and is then set to it.
        words: Uniform 64-bit words, `(n,)`.
        levels: Levels, `(n,)`, overwritten.
    """
    for j in range(values.size):
        units = min(abs(values[j]) * factor, largest)
        floor = np.floor(units)
        # the difference is exact, and a uniform is never below 0, so an exact level stays unchanged
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
    """Find the cell of each value * factor, and multiply the value by the level of its cell.

    Args:
        values: Values, `(n,)`, overwritten by the products.
        factor: Number of units of the edges in one unit of the values.
        edges: Inner edges of the cells in ascending order. An edge belongs to the cell below it.
        levels: Level of each cell.
        picked: Numbers of the cells, `(n,)`, overwritten.
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
    """Write scale * levels[picked] to `out`, `(n,)`."""
    scaled = scale * levels
    for j in range(picked.size):
        out[j] = scaled[picked[j]]
