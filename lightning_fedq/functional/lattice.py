"""Lattices Z, A2, D4 and E8: nearest points, finite codebooks, dither over the Voronoi cell, nesting.

Source: Lang et al., CPA, definitions 2.2 to 2.6, and Conway and Sloane's decoders. Departures, each
because the printed form is wrong: the scalar quantiser has exactly N levels; a nested quantiser
decomposes the *fine* point (`Q_f = Q_c + Q_n(x - Q_c)` is false in general); second moments are those
of the Voronoi cell, not of the parallelogram that coordinate-wise rounding of G^-1 x has.

All lattices are at unit scale (generators below). A block is the last axis of a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, get_args

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LatticeName = Literal["Z", "A2", "D4", "E8"]
MAX_CODEBOOK = 1 << 16
_ROOT3 = math.sqrt(3.0)
TIE_SHIFT = 1e-7 * np.sqrt(np.array([2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0]))
"""Fixed and generic: ties between coarse points break the same way after any lattice translation."""


@dataclass(frozen=True)
class Lattice:
    """Constants of one lattice at unit scale.

    Args:
        name: Its name.
        units: Every point's coordinate j is an integer multiple of `units[j]`.
        generator: Basis vectors, one per *row* (the columns of the usual G), lower triangular; D4's first
            one is (2, 0, 0, 0) for the spec's (-1, -1, 0, 0), which spans the same lattice.
        volume: Volume of a cell, |det G|.
        second_moment: E ||u||^2 of u uniform on the Voronoi cell.
        covering_radius: Largest norm in the Voronoi cell.
        shortest: Smallest nonzero norm; the Voronoi cell's facets belong to the vectors of this norm.
    """

    name: LatticeName
    units: tuple[float, ...]
    generator: tuple[tuple[float, ...], ...]
    volume: float
    second_moment: float
    covering_radius: float
    shortest: float

    @property
    def dim(self) -> int:
        """L, the length of a block."""
        return len(self.units)

    @property
    def normalized_second_moment(self) -> float:
        """E ||u||^2 / (L volume^(2/L)): 1/12 for Z, smaller is better."""
        return self.second_moment / (self.dim * math.pow(self.volume, 2.0 / self.dim))

    @property
    def sides(self) -> tuple[float, ...]:
        """Sides of a box that tiles space under the lattice: the diagonal of the triangular generator."""
        return tuple(abs(row[j]) for j, row in enumerate(self.generator))


_LATTICES = (
    Lattice("Z", (1.0,), ((1.0,),), 1.0, 1 / 12, 0.5, 1.0),
    Lattice("A2", (0.5, _ROOT3 / 2), ((1.0, 0.0), (0.5, _ROOT3 / 2)), _ROOT3 / 2, 5 / 36, 1 / _ROOT3, 1.0),
    Lattice(
        "D4",
        (1.0,) * 4,
        ((2.0, 0.0, 0.0, 0.0), (1.0, -1.0, 0.0, 0.0), (0.0, 1.0, -1.0, 0.0), (0.0, 0.0, 1.0, -1.0)),
        2.0,
        13 / 30,
        1.0,
        math.sqrt(2.0),
    ),
    Lattice(
        "E8",
        (0.5,) * 8,
        (
            (2.0, *(0.0,) * 7),
            *(tuple(-1.0 if j == i else float(j == i + 1) for j in range(8)) for i in range(6)),
            (0.5,) * 8,
        ),
        1.0,
        929 / 1620,
        1.0,
        math.sqrt(2.0),
    ),
)


def lattice(name: str) -> Lattice:
    """Return the constants of a lattice.

    Raises:
        ValueError: If the name is not known.
    """
    for candidate in _LATTICES:
        if candidate.name == name:
            return candidate
    raise ValueError(f"lattice must be one of {', '.join(get_args(LatticeName))}, got {name!r}")


# ---- nearest points -----------------------------------------------------------------------------------


def _nearest_in_checkerboard(x: Tensor) -> Tensor:
    """Nearest integer vector with an even sum: if rounding gives an odd one, re-round the worst."""
    rounded = torch.floor(x + 0.5)
    error = x - rounded
    worst = error.abs().argmax(-1, keepdim=True)
    step = torch.where(error.gather(-1, worst) >= 0, 1.0, -1.0).to(x.dtype)
    odd = rounded.sum(-1, keepdim=True).remainder(2.0)
    return rounded.scatter_add(-1, worst, step * odd)


def _nearer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    further = (x - first).square().sum(-1, keepdim=True) > (x - second).square().sum(-1, keepdim=True)
    return torch.where(further, second, first)


def nearest_point(x: Tensor, name: str) -> Tensor:
    """Return the nearest lattice point of every block.

    Args:
        x: `(..., L)` floats; float64 keeps ties where exact arithmetic has them.
        name: Lattice.

    Returns:
        Tensor of the same shape and dtype.

    Raises:
        ValueError: If the lattice is not known or the last axis is not L.

    Example:
        >>> nearest_point(torch.tensor([0.9, 0.8, 0.7, 0.4]), "D4")
        tensor([1., 1., 1., 1.])
    """
    if x.shape[-1] != (dim := lattice(name).dim):
        raise ValueError(f"blocks of {name} have length {dim}, got {tuple(x.shape)}")
    if name == "Z":
        return torch.floor(x + 0.5)
    if name == "D4":
        return _nearest_in_checkerboard(x)
    if name == "E8":
        return _nearer(x, _nearest_in_checkerboard(x), _nearest_in_checkerboard(x - 0.5) + 0.5)
    sides = x.new_tensor([1.0, _ROOT3])
    first = torch.floor(x / sides + 0.5) * sides
    second = (torch.floor((x - sides / 2) / sides + 0.5)) * sides + sides / 2
    return _nearer(x, first, second)


def voronoi_dither(uniforms: Tensor, name: str) -> Tensor:
    """Map `(..., L)` uniforms on [0, 1) to points uniform on the Voronoi cell.

    A point uniform on any region that tiles space under the lattice, less its nearest lattice point. The
    region is a box here, not the parallelepiped G z: the law is the same and the box costs L products.
    """
    point = uniforms * uniforms.new_tensor(lattice(name).sides)
    return point - nearest_point(point, name)


# ---- scalar quantiser and its digits --------------------------------------------------------------------


def scalar_levels(count: int, gamma: float) -> Tensor:
    """The `count` levels (l - (count - 1)/2) step, step = 2 gamma / count, whose cells tile [-gamma, gamma].

    Raises:
        ValueError: If count < 2 or gamma is not > 0.
    """
    if count < 2:
        raise ValueError(f"a codebook needs at least 2 levels, got {count}")
    if not gamma > 0:
        raise ValueError(f"gamma must be > 0, got {gamma}")
    return (torch.arange(count, dtype=torch.float64) - (count - 1) / 2) * (2.0 * gamma / count)


def scalar_index(x: Tensor, count: int, gamma: float) -> Tensor:
    """Index of the level whose cell holds x, int64; what lies outside [-gamma, gamma] gets the end levels."""
    step = 2.0 * gamma / count
    return torch.floor(x.double() / step + count / 2).clamp(0, count - 1).to(torch.int64)


def scalar_digits(index: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Mixed-radix digits of a fine index, coarsest first: a nested scalar quantiser of any depth.

    Args:
        index: Integers in [0, prod(counts)).
        counts: Levels of each stage, coarsest first.
    """
    digits: list[Tensor] = []
    for count in reversed(counts):
        digits.append(index.remainder(count))
        index = index.div(count, rounding_mode="floor")
    return tuple(reversed(digits))


# ---- finite codebooks -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Codebook:
    """Finitely many lattice points in a reproducible order.

    Args:
        name: The lattice.
        points: `(N, L)` float64.
        keys: `(N,)` sorted int64, one per point (`point_keys`).
        order: `(N,)` int64, index of the point with that key.
        slots: `(>= 4 N, 2)` int64, an open hash table of (key, index), index -1 where empty.
    """

    name: LatticeName
    points: NDArray[np.float64]
    keys: NDArray[np.int64] = field(repr=False)
    order: NDArray[np.int64] = field(repr=False)
    slots: NDArray[np.int64] = field(repr=False)

    def __len__(self) -> int:
        return len(self.points)

    def index(self, points: Tensor) -> Tensor:
        """Index of every lattice point `(..., L)`, int64; -1 where it is not in the codebook."""
        keys = point_keys(points, self.name)
        known, order = (torch.from_numpy(a).to(points.device) for a in (self.keys, self.order))
        at = torch.searchsorted(known, keys).clamp(max=len(self) - 1)
        return torch.where(known[at] == keys, order[at], -1)


def point_keys(points: Tensor, name: str) -> Tensor:
    """One int64 per lattice point: its integer coordinates (in `units`), 62 // L bits each."""
    units = points.new_tensor(lattice(name).units)
    bits = 62 // len(units)
    places = torch.arange(len(units), device=points.device) * bits
    return ((torch.round(points / units).to(torch.int64) + (1 << bits - 1)) << places).sum(-1)


def _make_codebook(name: LatticeName, points: NDArray[np.float64]) -> Codebook:
    rounded = np.round(points, 9) + 0.0
    columns = [*rounded.T[::-1], np.round(np.square(points).sum(1), 9)]
    points = points[np.lexsort(columns)]
    keys = point_keys(torch.from_numpy(points), name).numpy()
    order = np.argsort(keys).astype(np.int64)
    return Codebook(name, points, keys[order], order, _hash_table(keys))


def _hash_table(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Insert key i with index i at the top bits of key * golden ratio, or the next free slot."""
    size = 1 << (4 * len(keys) - 1).bit_length()
    slots = np.full((size, 2), -1, np.int64)
    starts = (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    for index, (key, start) in enumerate(zip(keys.tolist(), starts.tolist(), strict=True)):
        at = start & (size - 1)
        while slots[at, 1] >= 0:
            at = (at + 1) & (size - 1)
        slots[at] = key, index
    return slots


def _points_within(name: LatticeName, radius: float) -> NDArray[np.float64]:
    units, bound = lattice(name).units, radius**2 * (1 + 1e-12) + 1e-12
    found = []
    for parity in (0, 1):
        counts = np.zeros((1, 0), np.int64)
        stride = 2 if name == "E8" else 1
        for unit in units:
            reach = int(math.sqrt(bound) / unit)
            values = np.arange(-reach, reach + 1)
            if stride == 2:
                values = values[values % 2 == parity]
            counts = np.concatenate(
                [counts.repeat(len(values), 0), np.tile(values, len(counts))[:, None]], axis=1
            )
            norms = np.square(counts * np.array(units[: counts.shape[1]])).sum(1)
            counts = counts[norms <= bound]
        sums = counts.sum(1)
        member = {"Z": sums == sums, "A2": sums % 2 == 0, "D4": sums % 2 == 0, "E8": sums % 4 == 0}[name]
        found.append(counts[member] * np.array(units))
        if stride == 1:
            break
    return np.concatenate(found)


@lru_cache(maxsize=64)
def finite_codebook(name: LatticeName, radius: float) -> Codebook:
    """All lattice points of norm <= radius, sorted by norm, then by coordinates.

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
            f"radius {radius} gives about {size:.3g} points of {name}; "
            f"choose a smaller radius, at most {MAX_CODEBOOK} points"
        )
    return _make_codebook(name, _points_within(name, radius))


@lru_cache(maxsize=64)
def voronoi_codebook(name: LatticeName, ratio: int) -> Codebook:
    """The ratio^L points of the lattice in the (half-open) Voronoi cell of `ratio` times the lattice.

    Raises:
        ValueError: If ratio < 2, or there would be more than 65,536 points.
    """
    cell = lattice(name)
    if ratio < 2:
        raise ValueError(f"the nesting ratio must be >= 2, got {ratio}")
    if ratio**cell.dim > MAX_CODEBOOK:
        raise ValueError(f"ratio {ratio} gives {ratio}^{cell.dim} points; choose a smaller ratio")
    digits = np.stack(np.unravel_index(np.arange(ratio**cell.dim), (ratio,) * cell.dim), axis=1)
    cosets = torch.from_numpy(digits.astype(np.float64) @ np.array(cell.generator))
    return _make_codebook(name, nested_split(cosets, name, ratio)[1].numpy())


def nested_split(fine: Tensor, name: str, ratio: int) -> tuple[Tensor, Tensor]:
    """Split lattice points into a point of `ratio` times the lattice and the rest; the two add up exactly.

    Fine first: the rest depends on the coset of the fine point alone, so it is always one of the
    ratio^L points of `voronoi_codebook`.

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


def nearest_codeword(x: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """Index of the codebook point of every block, and where the quantiser is overloaded.

    Inside the codebook's cells it is the nearest lattice point. Overloaded blocks get the nearest of
    all points if N L <= 4096; else they are shrunk to the codebook's outer norm and stepped back along
    their ray, 2 percent at a time, until their nearest lattice point is in the codebook.

    Args:
        x: `(..., L)` float64.
        codebook: The codebook.

    Returns:
        int64 indices and bool flags, both of shape `x.shape[:-1]`.
    """
    index = codebook.index(nearest_point(x, codebook.name))
    overloaded = index < 0
    if not bool(overloaded.any()):
        return index, overloaded
    points = torch.from_numpy(codebook.points).to(x)
    far = x[overloaded]
    if points.numel() <= 4096:
        index[overloaded] = torch.cdist(far, points).argmin(-1)
        return index, overloaded
    far = far * (points.norm(dim=-1).max() / far.norm(dim=-1, keepdim=True)).clamp(max=1.0)
    found = codebook.index(nearest_point(far, codebook.name))
    while bool((found < 0).any()):
        far = torch.where((found < 0)[:, None], 0.98 * far, far)
        found = codebook.index(nearest_point(far, codebook.name))
    index[overloaded] = found
    return index, overloaded


# ---- how far the range without overload goes --------------------------------------------------------------


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _squared_distance_to_cell(
    point: NDArray[np.float64], normals: NDArray[np.float64], bounds: NDArray[np.float64], sweeps: int
) -> float:
    """Squared distance from a point to {x: normals x <= bounds} by Hildreth's dual ascent, from below."""
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
    """Largest norm at which a block can't be overloaded.

    A quantiser whose output differs from its input by a vector in `cells` times the Voronoi cell V
    (1 without dither, 2 with a dither that is not seen, more when nested) reaches a point p only from
    p - cells V. So the safe ball is as large as the distance from the nearest point outside the
    codebook to cells V. The distance comes from a dual bound: it can only be too small.

    Args:
        name: Lattice.
        radius: Radius of `finite_codebook`.
        cells: Size of the uncertainty, in Voronoi cells.

    Returns:
        The radius, >= 0; zero if even the zero block can be overloaded.
    """
    cell = lattice(name)
    reach = cells * cell.covering_radius
    normals = np.ascontiguousarray(finite_codebook(name, cell.shortest).points[1:])
    bounds = cells * np.square(normals).sum(1) / 2
    best, outer = math.inf, radius
    while outer < best + reach:
        inner, outer = outer, math.sqrt(outer**2 + 2.0)
        points = _points_within(name, outer)
        points = points[np.sqrt(np.square(points).sum(1)) > inner * (1 + 1e-9)]
        if cell.dim > 2:  # permutations and pairs of sign flips are symmetries of D4 and E8
            sign = np.where((points < 0).sum(1) % 2, -1.0, 1.0)
            points = np.sort(np.abs(points), axis=1)
            points[:, 0] *= sign
            points = np.unique(points, axis=0)
        for point in points:
            squared = _squared_distance_to_cell(point, normals, bounds, 400)
            best = min(best, math.sqrt(max(squared, 0.0)))
    return best if best > 1e-6 else 0.0
