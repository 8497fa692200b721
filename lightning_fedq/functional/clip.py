"""Clipping whole vectors so that the bound holds for what comes out, not just nearly."""

from __future__ import annotations

import torch
from torch import Tensor


def unit_ball_factors(rows: Tensor, clip_norm: float, order: int) -> tuple[Tensor, Tensor]:
    """Factors that bring rows into the unit ball of a norm, and which rows are shortened for it.

    Rows inside `clip_norm` are divided by it; longer ones by their own norm. Norms are taken in float64
    and rounded up by more than summation and multiplication can lose, so that the product, truncated
    toward zero on any grid, provably has norm <= 1.

    Args:
        rows: `(n, dim)` finite floats.
        clip_norm: Bound, > 0, in units of the rows.
        order: 1 or 2.

    Returns:
        `(n,)` float64 factors and `(n,)` bool, true where a row was longer than the bound.
    """
    norms = torch.linalg.vector_norm(rows, order, dim=1, dtype=torch.float64)
    clipped = norms > clip_norm
    slack = 1.0 + (rows.shape[1] + 16) * 2.0**-52
    return 1.0 / (norms.clamp(min=clip_norm) * slack), clipped


def truncate_to_grid(values: Tensor, bits: int) -> Tensor:
    """Integers values * 2^bits, rounded toward zero: no norm of a vector grows.

    Args:
        values: float64 in [-1, 1].
        bits: Grid of 2^-bits.

    Returns:
        int64 tensor of the same shape.
    """
    return (values * 2.0**bits).to(torch.int64)
