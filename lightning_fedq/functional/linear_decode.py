"""Decoded sums of integers, in one pass: base + slope (multiple * sum - shift) with one line a segment.

All integers are exact, and the three float64 operations are the same on every device, so that devices agree
bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK = 1 << 12
"""Coordinates whose sums stay in the processor's nearest cache."""
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.bool)
_MOST_NARROW_ROWS = 1 << 15


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _decode(
    rows: NDArray[np.integer],
    lines: NDArray[np.float64],
    multiple: int,
    shift: int,
    total: NDArray[Any],
    out: NDArray[np.float32],
) -> None:
    """Fill in `out`. `lines` is `(3, segments)`: ends, bases and slopes; `total` is a block of scratch."""
    for start in range(0, out.size, _BLOCK):
        stop = min(start + _BLOCK, out.size)
        part = total[: stop - start]
        part[:] = 0
        for i in range(rows.shape[0]):
            row = rows[i, start:stop]  # a slice per row is what lets LLVM vectorise
            for j in range(part.size):
                part[j] += row[j]
        first = start
        for segment in range(lines.shape[1]):
            last = min(int(lines[0, segment]), stop)
            if first >= last:
                continue
            base, slope = lines[1, segment], lines[2, segment]
            sums, decoded = part[first - start : last - start], out[first:last]
            for j in range(sums.size):
                decoded[j] = base + slope * np.float64(multiple * np.int64(sums[j]) - shift)
            first = last


def decode_sum(
    symbols: Tensor,
    segments: Sequence[int],
    base: Tensor,
    slope: Tensor,
    multiple: int = 1,
    shift: int = 0,
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
        `(dim,)` float32, where the symbols are.
    """
    base, slope = base.double(), slope.double()
    if symbols.device.type != "cpu":
        total = symbols.sum(0, dtype=torch.int64) if symbols.dim() == 2 else symbols.to(torch.int64)
        sizes = torch.tensor(segments)
        lines = [t.cpu().repeat_interleave(sizes).to(symbols.device) for t in (base, slope)]
        return (lines[0] + lines[1] * (multiple * total - shift).double()).float()
    rows = symbols.detach().reshape(-1, symbols.shape[-1]).contiguous()
    if rows.dtype is torch.bool:
        rows = rows.view(torch.uint8)
    narrow = rows.dtype in _NARROW and len(rows) < _MOST_NARROW_ROWS
    out = np.empty(rows.shape[1], np.float32)
    table = np.stack([np.cumsum(segments), base.cpu().numpy(), slope.cpu().numpy()])
    total_part = np.empty(_BLOCK, np.int32 if narrow else np.int64)
    _decode(rows.numpy(), table, multiple, shift, total_part, out)
    return torch.from_numpy(out)
