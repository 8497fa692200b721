"""Compiled loops of block coding on A2: nearest points, dither over the cell, look-ups.

They process several messages at once and make no array larger than one stretch of blocks. Tests check that
they equal the tensor code in `lattice` and `lattice_codebook`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.blocks.codeword import GOLD
from lightning_fedq.functional.blocks.lattice import lattice
from lightning_fedq.functional.blocks.scalar_loops import (
    Floats,
    Indices,
    Keys,
    subtract_scalar_dithers,
    subtract_scalar_dithers_per_message,
    uniform_word,
)

_ROOT3 = np.sqrt(3.0)

# `sides` is a tuple, so that its length is a constant for the compiler, which then unrolls the loops.


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _nearest(x: Floats, out: Floats) -> None:
    """Nearest lattice point of one block."""
    a, b = np.floor(x[0] + 0.5), np.floor(x[1] / _ROOT3 + 0.5) * _ROOT3
    c, d = np.floor(x[0]) + 0.5, np.floor(x[1] / _ROOT3) * _ROOT3 + _ROOT3 / 2
    one = (x[0] - a) * (x[0] - a) + (x[1] - b) * (x[1] - b)
    two = (x[0] - c) * (x[0] - c) + (x[1] - d) * (x[1] - d)
    out[0] = c if one > two else a
    out[1] = d if one > two else b


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _dither(base: np.uint64, block: int, out: Floats, box: Floats, sides: tuple[float, ...]) -> None:
    """Draw a point that is uniform on the Voronoi cell.

    A point that is uniform on a box that tiles space, minus its nearest lattice point, has this law.
    """
    for j in range(len(sides)):
        box[j] = uniform_word(base, block * len(sides) + j) * sides[j]
    _nearest(box, out)
    for j in range(len(sides)):
        out[j] = box[j] - out[j]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _find(point: Floats, inverse_units: tuple[float, ...], slots: NDArray[np.int64]) -> int:
    """Look up the index of a lattice point by its key, in an open hash table of (key, index) rows."""
    bits, key = 62 // len(inverse_units), np.int64(0)
    for j in range(len(inverse_units)):
        whole = np.int64(np.floor(point[j] * inverse_units[j] + 0.5)) + (np.int64(1) << np.int64(bits - 1))
        key += whole << np.int64(j * bits)
    mask = slots.shape[0] - 1
    at = np.int64((np.uint64(key) * np.uint64(GOLD)) >> np.uint64(40)) & mask
    while slots[at, 0] != key and slots[at, 1] >= 0:
        at = (at + 1) & mask
    return int(slots[at, 1])


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _normalize(values: NDArray[Any], ranges: Floats, start: int, out: Floats) -> None:
    """out = (values[start:] - centre) / radius, segment by segment. Zero beyond the last coordinate."""
    end, done = start + out.size, start
    for segment in range(ranges.shape[1]):
        stop = min(int(ranges[0, segment]), end)
        for j in range(done, stop):
            out[j - start] = (np.float64(values[j]) - ranges[1, segment]) * ranges[2, segment]
        done = stop if stop > done else done
    for j in range(done, end):
        out[j - start] = 0.0


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def gather_blocks(
    values: NDArray[Any], ranges: Floats, limit: float, chosen: NDArray[np.int64], out: Floats
) -> int:
    """Copy some blocks of every row, in units of the radius.

    Args:
        values: `(rows, dim)` float32 or float64, C-contiguous.
        ranges: `(3, segments)`: where each segment ends, its centre, one over its radius.
        limit: Largest norm of a block in range.
        chosen: `(rows, n)` numbers of blocks.
        out: `(rows, n, L)`, overwritten.

    Returns:
        How many of all blocks were out of range.
    """
    size, outside, bound = out.shape[2], 0, limit * limit * (1.0 + 1e-12)
    blocks = -(-values.shape[1] // size)
    x = np.empty(blocks * size)
    for row in range(out.shape[0]):
        _normalize(values[row], ranges, 0, x)
        if size == 1:
            for i in range(blocks):
                outside += (x[i] > 1.0) | (x[i] < -1.0)
        else:
            for i in range(blocks):
                squared = 0.0
                for j in range(size):
                    squared += x[i * size + j] * x[i * size + j]
                outside += squared > bound
        for i in range(out.shape[1]):
            for j in range(size):
                out[row, i, j] = x[chosen[row, i] * size + j]
    return outside


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def quantize_lattice(
    values: NDArray[Any],
    ranges: Floats,
    sides: tuple[float, ...],
    inverse_units: tuple[float, ...],
    shift: Floats,
    limit: float,
    scale: float,
    ratio: float,
    top: NDArray[np.int64],
    inner: NDArray[np.int64],
    dithered: bool,
    keys: Keys,
    first: int,
    out: Indices,
) -> int:
    """Write the indices of every block's nested lattice points, coarsest stage first.

    A block whose norm exceeds `limit` is scaled down to it. The last block is padded with zeros.

    Args:
        values: `(rows, dim)` float32 or float64, C-contiguous.
        ranges: `(3, segments)`: where each segment ends, its centre, one over its radius.
        sides: Sides of the lattice's box.
        inverse_units: One over each unit of the lattice.
        shift: Shift that breaks ties between coarse points.
        limit: Largest norm of a block that can't be overloaded, in units of the radius.
        scale: Factor from units of the radius to units of the finest lattice.
        ratio: Nesting ratio between neighbouring stages.
        top: Hash table of the coarsest stage's codebook, at unit scale.
        inner: Hash table of the finer stages' codebook. It is the same with one stage.
        dithered: Whether a dither is added.
        keys: `(rows,)` keys of the dither words.
        first: Number of the first block in the message.
        out: Indices, `(stages, rows, n)` int32, overwritten. A block outside the codebook would give -1,
            which `limit` excludes.

    Returns:
        Number of blocks that were scaled down.
    """
    size, clipped, bound = len(sides), 0, limit * limit * (1.0 + 1e-12)
    box, point, fine, u = np.zeros((4, size))
    x = np.empty(out.shape[2] * size)
    for row in range(out.shape[1]):
        _normalize(values[row], ranges, first * size, x)
        for i in range(out.shape[2]):
            squared, factor = 0.0, scale
            for j in range(size):
                squared += x[i * size + j] * x[i * size + j]
            if squared > bound:
                clipped += 1
                factor = scale * limit / np.sqrt(squared)
            if dithered:
                _dither(keys[row], first + i, u, box, sides)
                for j in range(size):
                    point[j] = x[i * size + j] * factor + u[j]
            else:
                for j in range(size):
                    point[j] = x[i * size + j] * factor
            _nearest(point, fine)
            for stage in range(out.shape[0] - 1, 0, -1):
                for j in range(size):
                    point[j] = (fine[j] + shift[j]) / ratio
                _nearest(point, u)
                for j in range(size):
                    point[j] = fine[j] - ratio * u[j]
                    fine[j] = u[j]
                out[stage, row, i] = _find(point, inverse_units, inner)
            out[0, row, i] = _find(fine, inverse_units, top)
    return clipped


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _subtract_lattice_dithers(keys: Keys, step: float, total: Floats, sides: tuple[float, ...]) -> None:
    size = len(sides)
    box, u = np.zeros((2, size))
    for key in keys:
        for i in range(total.size // size):
            _dither(key, i, u, box, sides)
            for j in range(size):
                total[i * size + j] -= step * u[j]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _subtract_lattice_dithers_per_message(
    keys: Keys, step: float, totals: Floats, sides: tuple[float, ...]
) -> None:
    for k in range(totals.shape[0]):
        _subtract_lattice_dithers(keys[k : k + 1], step, totals[k], sides)


def subtract_dithers_per_message(name: str, keys: Keys, step: float, totals: Floats) -> None:
    """Subtract step u_block from totals[k, block], where u is the dither under key k.

    Args:
        name: Lattice.
        keys: `(messages,)`.
        step: Scale of the finest lattice.
        totals: `(messages, n L)`, changed in place.
    """
    if name == "Z":
        subtract_scalar_dithers_per_message(keys, step, totals)
    else:
        _subtract_lattice_dithers_per_message(keys, step, totals, lattice(name).sides)


def subtract_dithers(name: str, keys: Keys, step: float, total: Floats) -> None:
    """Subtract step u_block from total[block] for the dithers u under every key.

    Args:
        name: Lattice.
        keys: `(messages,)` keys of the dither words.
        step: Scale of the finest lattice, in units of `total`.
        total: `(n L,)`, changed in place.
    """
    if name == "Z":
        subtract_scalar_dithers(keys, step, total)
    else:
        _subtract_lattice_dithers(keys, step, total, lattice(name).sides)
