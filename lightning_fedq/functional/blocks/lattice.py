"""Lattices Z and A2: nearest points, dither over the Voronoi cell, nesting.

The source is Lang et al., CPA, definitions 2.2 to 2.6. There are three departures, because the printed forms
are wrong. The scalar quantiser has exactly N levels. A nested quantiser decomposes the *fine* point, because
`Q_f = Q_c + Q_n(x - Q_c)` is false in general. Second moments are those of the Voronoi cell, not those of the
parallelogram of coordinate-wise rounding of G^-1 x.

All lattices are at unit scale (generators below). A block is the last axis of a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

LatticeName = Literal["Z", "A2"]
_ROOT3 = math.sqrt(3.0)
TIE_SHIFT = 1e-7 * np.sqrt(np.array([2.0, 3.0]))
"""Fixed generic shift, with which ties between coarse points break equally after any lattice translation."""


@dataclass(frozen=True)
class Lattice:
    """Constants of one lattice at unit scale.

    Args:
        units: Coordinate j of every point is an integer multiple of `units[j]`.
        generator: Basis vectors, one per *row* (the columns of the usual G), lower triangular.
        volume: Volume of a cell, |det G|.
        second_moment: E ||u||^2 for u uniform on the Voronoi cell.
        covering_radius: Largest norm in the Voronoi cell.
        shortest: Smallest nonzero norm. The Voronoi cell's facets belong to the vectors of this norm.
    """

    units: tuple[float, ...]
    generator: tuple[tuple[float, ...], ...]
    volume: float
    second_moment: float
    covering_radius: float
    shortest: float

    @property
    def dim(self) -> int:
        """Length L of a block."""
        return len(self.units)

    @property
    def sides(self) -> tuple[float, ...]:
        """Sides of a box that tiles space under the lattice: the diagonal of the triangular generator."""
        return tuple(abs(row[j]) for j, row in enumerate(self.generator))


_LATTICES = {
    "Z": Lattice((1.0,), ((1.0,),), 1.0, 1 / 12, 0.5, 1.0),
    "A2": Lattice((0.5, _ROOT3 / 2), ((1.0, 0.0), (0.5, _ROOT3 / 2)), _ROOT3 / 2, 5 / 36, 1 / _ROOT3, 1.0),
}


def lattice(name: str) -> Lattice:
    """Return the constants of a lattice.

    Raises:
        ValueError: If the name is not known.
    """
    if name not in _LATTICES:
        raise ValueError(f"lattice must be one of {', '.join(_LATTICES)}, got {name!r}")
    return _LATTICES[name]


# ---- nearest points -----------------------------------------------------------------------------------


def nearest_point(x: Tensor, name: str) -> Tensor:
    """Return the nearest lattice point of every block.

    Args:
        x: Blocks of floats, `(..., L)`. In float64, ties are where exact arithmetic has them.
        name: Lattice.

    Returns:
        Tensor of the same shape and dtype.

    Raises:
        ValueError: If the lattice is not known or the last axis is not L.

    Examples:
        >>> nearest_point(torch.tensor([1.3, 0.8]), "A2")
        tensor([1.5000, 0.8660])
    """
    if x.shape[-1] != (dim := lattice(name).dim):
        raise ValueError(f"blocks of {name} have length {dim}, got {tuple(x.shape)}")
    if name == "Z":
        return torch.floor(x + 0.5)
    sides = x.new_tensor([1.0, _ROOT3])
    first = torch.floor(x / sides + 0.5) * sides
    second = (torch.floor((x - sides / 2) / sides + 0.5)) * sides + sides / 2
    further = (x - first).square().sum(-1, keepdim=True) > (x - second).square().sum(-1, keepdim=True)
    return torch.where(further, second, first)


def nested_split(fine: Tensor, name: str, ratio: int) -> tuple[Tensor, Tensor]:
    """Split lattice points into a point of `ratio` times the lattice and a remainder. They add up exactly.

    The remainder depends only on the coset of the fine point. So it is always one of the ratio^L points of
    `lattice_codebook.voronoi_codebook`.

    Args:
        fine: `(..., L)` lattice points, float64.
        name: Lattice.
        ratio: Nesting ratio >= 2.

    Returns:
        Coarse points and remainders, both of `fine`'s shape.
    """
    shift = torch.from_numpy(TIE_SHIFT[: fine.shape[-1]]).to(fine)
    coarse = ratio * nearest_point((fine + shift) / ratio, name)
    return coarse, fine - coarse


# ---- scalar quantiser and its digits --------------------------------------------------------------------


def scalar_levels(count: int, gamma: float) -> Tensor:
    """Return the levels (l - (count - 1)/2) step, step = 2 gamma / count, whose cells tile [-gamma, gamma].

    Raises:
        ValueError: If count < 2 or gamma is not > 0.

    Examples:
        >>> scalar_levels(3, 1.0)
        tensor([-0.6667,  0.0000,  0.6667], dtype=torch.float64)
    """
    if count < 2:
        raise ValueError(f"a codebook needs at least 2 levels, got {count}")
    if not gamma > 0:
        raise ValueError(f"gamma must be > 0, got {gamma}")
    return (torch.arange(count, dtype=torch.float64) - (count - 1) / 2) * (2.0 * gamma / count)
