"""Clipping of vectors with a norm bound that holds exactly for the result, in spite of rounding."""

from __future__ import annotations

import math

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SUMS = 256
"""Number of parallel partial sums, enough for the compiler to vectorise the loop."""


def unit_ball_factors(rows: Tensor, clip_norm: float, order: int) -> tuple[Tensor, Tensor]:
    """Return factors that scale rows into the unit ball of a norm, and which rows exceed `clip_norm`.

    A factor is 1 / `clip_norm` for rows inside the bound, and 1 / norm for longer rows. Norms are computed in
    float64 and rounded up by more than the rounding errors of summation and multiplication. So the product,
    truncated toward zero on any grid, provably has norm <= 1.

    Args:
        rows: Finite floats, `(n, dim)`.
        clip_norm: Clipping bound > 0, in units of the rows.
        order: Order of the norm, 1 or 2.

    Returns:
        Factors, `(n,)` float64, and whether each row was longer than the bound, `(n,)` bool.
    """
    if rows.dtype in (torch.float32, torch.float64):
        norms = torch.from_numpy(_norms(rows.detach().contiguous().numpy(), order))
    else:
        norms = torch.linalg.vector_norm(rows, order, dim=1, dtype=torch.float64)
    clipped = norms > clip_norm
    slack = 1.0 + (rows.shape[1] + 16) * 2.0**-52  # above the (dim + 1) 2^-53 of a sum
    return 1.0 / (norms.clamp(min=clip_norm) * slack), clipped


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _norms(rows: NDArray[np.floating], order: int) -> NDArray[np.float64]:
    """Return the l1 or l2 norms of `(n, dim)` rows.

    They are computed in float64, in many partial sums. All terms are positive, so the relative error of a sum
    is at most (dim + 1) 2^-53 for any order of summation.
    """
    norms, sums = np.empty(rows.shape[0]), np.empty(_SUMS)
    whole = rows.shape[1] // _SUMS * _SUMS
    for i in range(rows.shape[0]):
        sums[:] = 0.0
        for start in range(0, whole, _SUMS):
            part = rows[i, start : start + _SUMS]
            for k in range(_SUMS):
                value = abs(np.float64(part[k]))
                sums[k] += value * value if order == 2 else value
        for k in range(whole, rows.shape[1]):
            value = abs(np.float64(rows[i, k]))
            sums[0] += value * value if order == 2 else value
        norms[i] = math.sqrt(sums.sum()) if order == 2 else sums.sum()
    return norms


def unit_ball_factor(values: NDArray[np.float32], clip_norm: float) -> tuple[float, bool]:
    """Return the clipping factor of `unit_ball_factors` for one row and the l2 norm.

    Args:
        values: Finite values with finite squares, `(dim,)`.
        clip_norm: Bound, > 0, in units of the values.

    Returns:
        The factor, and whether the row was longer than the bound.
    """
    norm = float(_norms(values[None], 2)[0])
    slack = 1.0 + (values.size + 16) * 2.0**-52  # as for many rows
    return 1.0 / (max(norm, clip_norm) * slack), norm > clip_norm


def float32_range(row: NDArray[np.float32]) -> tuple[NDArray[np.float32], float]:
    """Scale one row by a power of two, without rounding, so that sums of squares stay within float32.

    Infinite values become the largest float32 number, and NaN becomes 0. So the norm of any row can be
    clipped.

    Args:
        row: Row of values, `(1, dim)`.

    Returns:
        The scaled row, and the power of two.

    Examples:
        >>> float32_range(np.float32([[3e30, -1e30]]))[0].round(3)
        array([[ 0.592, -0.197]], dtype=float32)
    """
    norm = float(_norms(row, 2)[0])  # in float64, which holds the square of any float32
    if not math.isfinite(norm):
        return float32_range(np.nan_to_num(row))
    if norm == 0.0 or 1e-15 < norm < 1e15:
        return row, 1.0
    scale = math.ldexp(1.0, -math.frexp(norm)[1])
    return (row.astype(np.float64) * scale).astype(np.float32), scale
