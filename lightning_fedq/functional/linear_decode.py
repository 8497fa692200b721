"""Decoding of integer sums in one pass: base + slope (multiple * sum - shift), with constants per segment.

Integer arithmetic is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.segments import segment_lines

_BLOCK = 1 << 12
"""Coordinates whose sums stay in the processor's nearest cache."""
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.bool)
_MOST_NARROW_ROWS = 1 << 15  # fewer rows of 16 bits have sums below 2^30, which int32 holds


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _add_rows(rows: NDArray[np.integer], start: int, part: NDArray[Any]) -> None:
    part[:] = 0
    for i in range(rows.shape[0]):
        row = rows[i, start : start + part.size]  # a slice per row is what lets LLVM vectorise
        for j in range(part.size):
            part[j] += row[j]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _sum_rows(rows: NDArray[np.integer], total: NDArray[Any], out: NDArray[np.float64]) -> None:
    """Fill in `out`. `total` is a block of scratch."""
    for start in range(0, out.size, _BLOCK):
        sums = out[start : start + _BLOCK]
        part = total[: sums.size]
        _add_rows(rows, start, part)
        for j in range(sums.size):
            sums[j] = np.float64(part[j])


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _decode(
    rows: NDArray[np.integer],
    lines: NDArray[np.float64],
    multiple: int,
    shift: int,
    total: NDArray[Any],
    out: NDArray[np.float32],
) -> None:
    """Fill in `out`. `lines` is `(3, segments)`: ends, bases and slopes. `total` is a block of scratch."""
    for start in range(0, out.size, _BLOCK):
        stop = min(start + _BLOCK, out.size)
        part = total[: stop - start]
        _add_rows(rows, start, part)
        first = start
        for segment in range(lines.shape[1]):
            last = min(int(lines[0, segment]), stop)
            if first >= last:
                continue
            base, slope = lines[1, segment], lines[2, segment]
            sums, decoded = part[first - start : last - start], out[first:last]
            for j in range(sums.size):
                # in int64, then one conversion, exact below 2^53
                decoded[j] = base + slope * np.float64(multiple * np.int64(sums[j]) - shift)
            first = last


def _rows(symbols: Tensor) -> tuple[NDArray[np.integer], NDArray[Any]]:
    """Messages as rows, and a block of integers that hold their sums."""
    rows = symbols.detach().reshape(-1, symbols.shape[-1]).contiguous()
    if rows.dtype is torch.bool:
        rows = rows.view(torch.uint8)
    narrow = rows.dtype in _NARROW and len(rows) < _MOST_NARROW_ROWS
    return rows.numpy(), np.empty(_BLOCK, np.int32 if narrow else np.int64)


def sum_of_rows(symbols: Tensor) -> Tensor:
    """Return the sum of messages, `(dim,)` float64.

    Args:
        symbols: Integers, one message a row, `(n, dim)`, or their sum, `(dim,)`. Sums are below 2^53.

    Examples:
        >>> sum_of_rows(torch.tensor([[1, 0], [1, 1]]))
        tensor([2., 1.], dtype=torch.float64)
    """
    rows, block = _rows(symbols)
    out = np.empty(rows.shape[1])
    _sum_rows(rows, block, out)
    return torch.from_numpy(out)


def decode_sum(
    symbols: Tensor, segments: Sequence[int], base: Tensor, slope: Tensor, multiple: int = 1, shift: int = 0
) -> Tensor:
    """Decode the sum of messages: base + slope (multiple * sum - shift), in float64, rounded to float32.

    Args:
        symbols: `(n, dim)` integers, one message a row, or their sum `(dim,)`.
        segments: Segment lengths, which sum to dim.
        base: `(len(segments),)`.
        slope: `(len(segments),)`.
        multiple: Integer.
        shift: Integer.

    Returns:
        `(dim,)` float32.
    """
    base, slope = base.double(), slope.double()
    rows, block = _rows(symbols)
    out = np.empty(rows.shape[1], np.float32)
    table = segment_lines(segments, base, slope)
    _decode(rows, table, multiple, shift, block, out)
    return torch.from_numpy(out)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _decode_total(total: NDArray[np.float64], lines: NDArray[np.float64], out: NDArray[np.float32]) -> None:
    start = 0
    for segment in range(lines.shape[1]):
        stop, base, slope = int(lines[0, segment]), lines[1, segment], lines[2, segment]
        part, decoded = total[start:stop], out[start:stop]
        for j in range(part.size):
            decoded[j] = base + slope * part[j]
        start = stop


def decode_total(total: Tensor, segments: Sequence[int], base: Tensor, slope: Tensor) -> Tensor:
    """Decode a sum that is no integer any more: base + slope * total, in float64, rounded to float32.

    Args:
        total: `(dim,)` float64.
        segments: Segment lengths, which sum to dim.
        base: `(len(segments),)`.
        slope: `(len(segments),)`.

    Returns:
        `(dim,)` float32.
    """
    out = np.empty(len(total), np.float32)
    _decode_total(total.numpy(), segment_lines(segments, base, slope), out)
    return torch.from_numpy(out)
