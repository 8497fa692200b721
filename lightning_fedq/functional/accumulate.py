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
        rows: `(n, m)` integers, or floats.
        total: `(m,)` integers wide enough for the sum, or float64; overwritten.
    """
    # NumPy has no bfloat16, numba no float16 on a CPU
    if rows.device.type == "cpu" and (rows.itemsize > 2 or not rows.is_floating_point()):
        _add_rows(rows.detach().numpy(), total.numpy())
    else:
        total += rows.sum(0, dtype=total.dtype)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _add_keeping(values: NDArray[Any], total: NDArray[Any], rest: NDArray[Any]) -> None:
    for i in range(total.size):  # Knuth's TwoSum; fastmath would take what it keeps for zero
        value, old = values[i], total[i]
        new = old + value
        seen = new - old
        rest[i] += (old - (new - seen)) + (value - seen)
        total[i] = new


class FloatSum:
    """A sum of floats whose rounding does not depend on the order of its terms: two float64 a coordinate.

    What a float64 sum loses is kept beside it. A sum of n terms is exact, and rounded once, where n^2 times
    the largest is below 2^105 times the last binary place of the smallest. Of terms further apart it is
    within n^3 2^-105 of the largest.

    Args:
        size: Number of coordinates.

    Attributes:
        parts: `(2, size)` float64: the rounded sum, and what it lacks.

    Example:
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
        """The sum `(size,)` in float64."""
        return self.parts[0] + self.parts[1]


# sums may be taken in any order, which is what lets LLVM vectorise
@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _squares(values: NDArray[np.floating]) -> float:
    total = 0.0
    for i in range(values.size):
        value = np.float64(values[i])
        total += value * value
    return total


def sum_of_squares(values: Tensor) -> float:
    """Squared l2 norm of all numbers of a floating point tensor, added up in float64.

    PyTorch's own norm is several times slower with float64 sums, and loses digits without them.

    Example:
        >>> sum_of_squares(torch.tensor([3.0, 4.0]))
        25.0
    """
    if values.device.type != "cpu" or values.dtype not in (torch.float32, torch.float64):
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
        return norm * norm  # infinite where ** 2 would raise
    return float(_squares(values.detach().reshape(-1).numpy()))
