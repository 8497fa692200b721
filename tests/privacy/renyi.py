"""Conversion from Renyi divergences, as an upper bound to compare with."""

import math

import numpy as np

from lightning_fedq.privacy.accounting import _TAIL_SHARE, check_delta, composed_mass, loss_grid


def renyi(grid, order):
    """ln E_P[e^((a-1) loss)] / (a - 1) over the finite losses, a > 1."""
    exponents = (order - 1.0) * grid.losses + np.log(np.maximum(grid.masses, 1e-300))
    top = exponents.max()
    return float(top + math.log(np.exp(exponents - top).sum())) / (order - 1.0)


def epsilon_by_rdp(loss, delta, compositions):
    """The same by Renyi divergences of the finite part, infinite mass added to delta: looser, never slow.

    Used as a cross-check: it can only exceed the grid's epsilon.
    """
    check_delta(delta)
    grid = loss_grid(loss, _TAIL_SHARE * delta / compositions)
    rest = delta - composed_mass(grid.infinite, compositions)
    if rest <= 0.0:
        return math.inf
    best = math.inf
    for exponent in range(-140, 60):
        order = 1.0 + 10.0 ** (exponent / 20.0)
        bound = compositions * renyi(grid, order) + math.log1p(-1.0 / order)
        bound -= math.log(order * rest) / (order - 1.0)
        best = min(best, bound)
    return max(best, 0.0)
