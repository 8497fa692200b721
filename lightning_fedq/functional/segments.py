"""Values that are constant in each segment, and updates in units of each segment, for compiled loops."""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def segment_lines(segments: Sequence[int], *values: Tensor) -> NDArray[np.float64]:
    """Return the end and the values of each segment for compiled loops, `(1 + len(values), segments)`.

    Args:
        segments: Their lengths.
        *values: `(segments,)` each.
    """
    lines = np.empty((1 + len(values), len(segments)))
    np.add.accumulate(np.asarray(segments), out=lines[0])  # ends as float64, exact below 2^53
    for line, value in zip(lines[1:], values, strict=True):
        line[:] = value.detach().cpu().numpy()
    return lines


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def normalise_segments(
    values: NDArray[np.floating],
    first: int,
    lines: NDArray[np.float64],
    divide: bool,
    units: NDArray[np.float64],
) -> int:
    """Write the distances from the centre in units of each segment, clipped to +-1, for a stretch of a row.

    Args:
        values: `(dim,)`.
        first: First coordinate of the stretch.
        lines: `(3, segments)`: ends, centres, and units (`divide`) or their inverses.
        divide: Whether to divide by the unit instead of multiplying by its inverse.
        units: `(n,)`, overwritten.

    Returns:
        Number of values beyond +-1.
    """
    outside, start, end = 0, first, first + units.size
    for segment in range(lines.shape[1]):
        stop = min(int(lines[0, segment]), end)
        if start >= stop:
            continue
        center, factor = lines[1, segment], lines[2, segment]
        part, put = values[start:stop], units[start - first : stop - first]
        if divide:
            for j in range(part.size):
                put[j] = (np.float64(part[j]) - center) / factor
        else:
            for j in range(part.size):
                put[j] = (np.float64(part[j]) - center) * factor
        for j in range(put.size):
            outside += (put[j] > 1.0) | (put[j] < -1.0)
            put[j] = min(max(put[j], -1.0), 1.0)
        start = stop
    return outside


def num_kept(share: float, dim: int) -> int:
    """Return the number of coordinates that are sent: a share of all, at least one.

    Examples:
        >>> num_kept(0.01, 7850)
        78
    """
    return max(round(share * dim), 1)
