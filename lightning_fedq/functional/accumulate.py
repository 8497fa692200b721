"""Sums over many rows without a `(rows, columns)` copy."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK = 1 << 13


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _add_rows(rows: NDArray[Any], total: NDArray[Any]) -> None:
    for start in range(0, total.size, _BLOCK):
        part = total[start : start + _BLOCK]
        for i in range(rows.shape[0]):
            row = rows[i, start : start + _BLOCK]  # a slice per row is what lets LLVM vectorise
            for j in range(part.size):
                part[j] += row[j]


def add_rows(rows: Tensor, total: Tensor) -> None:
    """Add every row of a tensor to a running sum, in place, one after the other.

    Args:
        rows: Integers or floats, `(n, m)`.
        total: Running sum, `(m,)`, integers wide enough for the sum or float64, changed in place.
    """
    # NumPy has no bfloat16, numba no float16 on a CPU
    if rows.device.type == "cpu" and (rows.itemsize > 2 or not rows.is_floating_point()):
        _add_rows(rows.detach().numpy(), total.numpy())
    else:
        total += rows.sum(0, dtype=total.dtype)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _add_keeping(values: NDArray[Any], total: NDArray[Any], rest: NDArray[Any]) -> None:
    for i in range(total.size):  # Knuth's TwoSum, whose error term fastmath would simplify to 0
        value, old = values[i], total[i]
        new = old + value
        seen = new - old
        rest[i] += (old - (new - seen)) + (value - seen)
        total[i] = new


class FloatSum:
    """Sum of floats whose rounding does not depend on the order of its terms, in two float64 per coordinate.

    The second float64 stores the rounding errors of the first. A sum of n terms is exact and rounded once if
    n^2 times the largest term is below 2^105 times the last binary place of the smallest term. Otherwise its
    error is below n^3 2^-105 times the largest term.

    Args:
        size: Number of coordinates.

    Attributes:
        parts: Rounded sum, and sum of its rounding errors, `(2, size)` float64.

    Examples:
        >>> total = FloatSum(1)
        >>> for value in (1e30, 1.0, -1e30):
        ...     total.add(torch.tensor([value]))
        >>> total.value()
        tensor([1.], dtype=torch.float64)

    References:
        Knuth, The Art of Computer Programming, volume 2, 4.2.2, theorem B.
    """

    def __init__(self, size: int) -> None:
        self.parts = torch.zeros(2, size, dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """Add `(size,)` floats on the CPU."""
        _add_keeping(values.detach().double().numpy(), *self.parts.numpy())

    def add_sum(self, parts: Tensor) -> None:
        """Add the `parts` of another such sum."""
        self.add(parts[0])
        self.parts[1] += parts[1]

    def value(self) -> Tensor:
        """Return the sum, `(size,)` float64."""
        return self.parts[0] + self.parts[1]


# `reassoc` allows any order of summation, so that LLVM can vectorise the loop
@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _squares(values: NDArray[np.floating]) -> float:
    total = 0.0
    for i in range(values.size):
        value = np.float64(values[i])
        total += value * value
    return total


def sum_of_squares(values: Tensor) -> float:
    """Return the squared l2 norm of a floating point tensor, summed in float64.

    PyTorch's norm is several times slower with float64 sums, and loses digits without them.

    Examples:
        >>> sum_of_squares(torch.tensor([3.0, 4.0]))
        25.0
    """
    if values.device.type != "cpu" or values.dtype not in (torch.float32, torch.float64):
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
        return norm * norm  # infinite where ** 2 would raise
    return float(_squares(values.detach().reshape(-1).numpy()))
