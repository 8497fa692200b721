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


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def saturate(
    rows: NDArray[np.float32], lines: NDArray[np.float64], zero_is_positive: bool, out: NDArray[np.float32]
) -> int:
    """Move every value to two radii from the centre, on its side. A value at the centre stays.

    Args:
        rows: `(n, dim)`.
        lines: `(3, segments)`: ends, centres, radii.
        zero_is_positive: Whether a value at the centre moves to the right instead.
        out: `(n, dim)`, overwritten.

    Returns:
        Number of values that were farther from the centre than a radius.
    """
    outside = 0
    for i in range(rows.shape[0]):
        start = 0
        for segment in range(lines.shape[1]):
            stop, center, radius = int(lines[0, segment]), lines[1, segment], lines[2, segment]
            left, right = np.float32(center - 2.0 * radius), np.float32(center + 2.0 * radius)
            part, put = rows[i, start:stop], out[i, start:stop]
            for j in range(part.size):
                distance = np.float64(part[j]) - center
                outside += abs(distance) > radius
                side = right if distance > 0.0 or zero_is_positive else part[j]
                put[j] = left if distance < 0.0 else side
            start = stop
    return outside


def num_kept(share: float, dim: int) -> int:
    """Return the number of coordinates that are sent: a share of all, at least one.

    Examples:
        >>> num_kept(0.01, 7850)
        78
    """
    return max(round(share * dim), 1)
