"""Decoding of integer sums: base + slope (multiple * sum - shift), with constants per segment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def _summed(symbols: Tensor) -> Tensor:
    """Return the sum of messages, `(dim,)` int64. NumPy needs no copy of them as int64."""
    rows = symbols.detach().reshape(-1, symbols.shape[-1])
    return torch.from_numpy(rows.numpy().sum(0, dtype=np.int64))


def sum_of_rows(symbols: Tensor) -> Tensor:
    """Return the sum of messages, `(dim,)` float64.

    Args:
        symbols: Integers, one message a row, `(n, dim)`, or their sum, `(dim,)`. Sums are below 2^53.

    Examples:
        >>> sum_of_rows(torch.tensor([[1, 0], [1, 1]]))
        tensor([2., 1.], dtype=torch.float64)
    """
    return _summed(symbols).double()


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
    return decode_total((multiple * _summed(symbols) - shift).double(), segments, base, slope)


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
    parts = torch.split(total, list(segments))
    lines = zip(parts, base.tolist(), slope.tolist(), strict=True)
    return torch.cat([offset + factor * part for part, offset, factor in lines]).float()
