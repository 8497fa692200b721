"""Finite lattice codebooks: their points in a fixed order, a look-up table, and the radius without overload.

Points are at unit scale and in a fixed order, so that indices are the same everywhere. A codebook has all
points in a ball (`finite_codebook`) or in a cell of a coarser lattice (`voronoi_codebook`). The source is
Lang et al., CPA, definitions 2.3 to 2.6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.blocks.lattice import LatticeName, lattice, nested_split

MAX_CODEBOOK = 1 << 16


@dataclass(frozen=True, eq=False)
class Codebook:
    """Finitely many lattice points in a reproducible order.

    Args:
        points: `(N, L)` float64.
        slots: `(>= 4 N, 2)` int64, an open hash table of (key, index), index -1 where empty.
    """

    points: NDArray[np.float64]
    slots: NDArray[np.int64] = field(repr=False)


def point_keys(points: Tensor, name: str) -> Tensor:
    """Return one int64 key per lattice point: its integer coordinates in `units`, 62 // L bits each."""
    units = points.new_tensor(lattice(name).units)
    bits = 62 // len(units)
    places = torch.arange(len(units)) * bits
    return ((torch.round(points / units).to(torch.int64) + (1 << bits - 1)) << places).sum(-1)


def _make_codebook(name: LatticeName, points: NDArray[np.float64]) -> Codebook:
    rounded = np.round(points, 9) + 0.0
    columns = [*rounded.T[::-1], np.round(np.square(points).sum(1), 9)]
    points = points[np.lexsort(columns)]
    keys = point_keys(torch.from_numpy(points), name).numpy()
    # an open hash table: a key's slot is the top bits of key * golden ratio, or the next free slot
    size = 1 << (4 * len(keys) - 1).bit_length()
    slots = np.full((size, 2), -1, np.int64)
    starts = (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    for index, (key, start) in enumerate(zip(keys.tolist(), starts.tolist(), strict=True)):
        at = start & (size - 1)
        while slots[at, 1] >= 0:
            at = (at + 1) & (size - 1)
        slots[at] = key, index
    return Codebook(points, slots)


def _points_within(name: LatticeName, radius: float) -> NDArray[np.float64]:
    units, bound = lattice(name).units, radius**2 * (1 + 1e-12) + 1e-12
    counts = np.zeros((1, 0), np.int64)
    for unit in units:
        reach = int(math.sqrt(bound) / unit)
        values = np.arange(-reach, reach + 1)
        columns = counts.repeat(len(values), 0), np.tile(values, len(counts))[:, None]
        counts = np.concatenate(columns, axis=1)
        norms = np.square(counts * np.array(units[: counts.shape[1]])).sum(1)
        counts = counts[norms <= bound]
    if name == "A2":
        counts = counts[counts.sum(1) % 2 == 0]
    points: NDArray[np.float64] = counts * np.array(units)
    return points


@lru_cache(maxsize=64)
def finite_codebook(name: LatticeName, radius: float) -> Codebook:
    """Return all lattice points of norm <= radius, sorted by norm, then by coordinates.

    Raises:
        ValueError: If the lattice is not known, or the ball holds no point but zero, or more than 65,536.
    """
    cell = lattice(name)
    if not radius >= cell.shortest * (1 - 1e-9):
        raise ValueError(
            f"a codebook of {name} needs a radius >= its shortest vector {cell.shortest:.6g}, got {radius}"
        )
    half = cell.dim / 2
    size = math.pi**half / math.gamma(half + 1) * radius**cell.dim / cell.volume
    if not size <= MAX_CODEBOOK:
        raise ValueError(
            f"radius {radius} gives about {size:.3g} points of {name}, at most {MAX_CODEBOOK} are allowed. "
            "Choose a smaller radius."
        )
    return _make_codebook(name, _points_within(name, radius))


@lru_cache(maxsize=64)
def voronoi_codebook(name: LatticeName, ratio: int) -> Codebook:
    """Return the ratio^L lattice points in the (half-open) Voronoi cell of `ratio` times the lattice.

    Raises:
        ValueError: If ratio < 2, or there would be more than 65,536 points.
    """
    cell = lattice(name)
    if ratio < 2:
        raise ValueError(f"the nesting ratio must be >= 2, got {ratio}")
    if ratio**cell.dim > MAX_CODEBOOK:
        raise ValueError(f"ratio {ratio} gives {ratio}^{cell.dim} points. Choose a smaller ratio.")
    digits = np.stack(np.unravel_index(np.arange(ratio**cell.dim), (ratio,) * cell.dim), axis=1)
    cosets = torch.from_numpy(digits.astype(np.float64) @ np.array(cell.generator))
    return _make_codebook(name, nested_split(cosets, name, ratio)[1].numpy())


# ---- radius without overload ------------------------------------------------------------------------------


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _squared_distance_to_cell(
    point: NDArray[np.float64], normals: NDArray[np.float64], bounds: NDArray[np.float64], sweeps: int
) -> float:
    """Return a lower bound on the squared distance from a point to {x: normals x <= bounds}.

    The bound is the dual objective after `sweeps` rounds of Hildreth's dual ascent.
    """
    weights, rest = np.zeros(len(bounds)), point.copy()
    for _ in range(sweeps):
        for i in range(len(bounds)):
            normal = normals[i]
            step = max((normal @ rest - bounds[i]) / (normal @ normal), -weights[i])
            weights[i] += step
            rest -= step * normal
    moved = point - rest
    return float(2.0 * (weights @ (normals @ point - bounds)) - moved @ moved)


@lru_cache(maxsize=64)
def safe_radius(name: LatticeName, radius: float, cells: float) -> float:
    """Return the largest norm at which a block can't be overloaded.

    Let the quantiser's output differ from its input by a vector in `cells` times the Voronoi cell V. `cells`
    is 1 without dither, 2 with a dither that the receiver does not subtract, and more with nesting. The
    quantiser reaches a point p only from p - cells V. So the radius is the distance from cells V to the
    nearest point outside the codebook. A dual bound gives this distance, so it can only be too small.

    Args:
        name: Lattice.
        radius: Radius of `finite_codebook`.
        cells: Size of the uncertainty, in Voronoi cells.

    Returns:
        Radius >= 0. It is 0 if even the zero block can be overloaded.
    """
    cell = lattice(name)
    reach = cells * cell.covering_radius
    # V is {x: p x <= |p|^2 / 2} over the shortest lattice vectors p, without the zero vector
    normals = np.ascontiguousarray(finite_codebook(name, cell.shortest).points[1:])
    bounds = cells * np.square(normals).sum(1) / 2
    nearest, outer = math.inf, radius
    while outer < nearest + reach:  # points of a farther shell are farther from the cells
        inner, outer = outer, math.sqrt(outer**2 + 2.0)
        points = _points_within(name, outer)
        shell = points[np.sqrt(np.square(points).sum(1)) > inner * (1 + 1e-9)]
        for point in shell:
            squared = _squared_distance_to_cell(point, normals, bounds, 400)
            nearest = min(nearest, math.sqrt(max(squared, 0.0)))
    return nearest if nearest > 1e-6 else 0.0
