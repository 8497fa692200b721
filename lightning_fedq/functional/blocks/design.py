"""Geometry of block coding: the lattice points of a block, the nested stages and the quantiser.

A block x of L numbers, in units of the radius, is quantised to one of finitely many lattice points. Before, a
dither that is uniform on the lattice's cell may be added. Nested stages are the digits of the point. A block
can't be overloaded within |x| <= 1 for Z, where N levels are spread over [-1, 1]. For A2 the range is
||x|| <= sqrt(L), which contains the square. A block beyond the range is shrunk to it.

The source is Lang et al., CPA, definitions 2.2 to 2.6, with the departures of `lattice`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.blocks.codeword import Words, WordTable, word_table
from lightning_fedq.functional.blocks.lattice import TIE_SHIFT, LatticeName, lattice, scalar_levels
from lightning_fedq.functional.blocks.lattice_codebook import (
    MAX_CODEBOOK,
    Codebook,
    finite_codebook,
    safe_radius,
    voronoi_codebook,
)
from lightning_fedq.functional.blocks.lattice_loops import quantize_lattice
from lightning_fedq.functional.blocks.scalar_loops import Floats, Indices, Keys, quantize_scalar
from lightning_fedq.functional.checks import check_at_least

_MOST_LEVELS = 1 << 40
"""Largest number of levels of all stages together. Float64 places so many exactly, with bits to spare."""
_RADIUS = 1.0
"""Default radius of codebooks."""


@dataclass(frozen=True, eq=False)
class BlockDesign:
    """Points and words of every stage, in units of the radius, with their quantiser.

    Args:
        name: Lattice, "Z" or "A2".
        tables: Words of every stage, coarsest first.
        step: Scale of the finest lattice.
        limit: Largest norm of a block in range.
        dithered: Whether a dither is added before quantisation.
        ratio: Nesting ratio, not used with one stage.
        books: Codebooks of the coarsest stage and of the finer stages, or None for Z.
    """

    name: LatticeName
    tables: tuple[WordTable, ...]
    step: float
    limit: float
    dithered: bool
    ratio: int
    books: tuple[Codebook, Codebook] | None

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of points of every stage."""
        return tuple(len(table.points) for table in self.tables)

    @property
    def block_dim(self) -> int:
        """Length L of a block."""
        return lattice(self.name).dim

    def quantize(self, values: NDArray[Any], ranges: Floats, keys: Keys, first: int, out: Indices) -> int:
        """Write the indices of some blocks of some rows. Arguments are those of `quantize_lattice`.

        Returns:
            Number of blocks that were out of range.
        """
        clipped: int
        if self.books is None:
            counts = np.array(self.counts)
            clipped = quantize_scalar(values, ranges, counts, self.dithered, keys, first, out)
            return clipped
        cell, (top, inner) = lattice(self.name), self.books
        geometry = cell.sides, tuple(1.0 / unit for unit in cell.units), TIE_SHIFT[: cell.dim]
        scales, slots = (self.limit, 1.0 / self.step, float(self.ratio)), (top.slots, inner.slots)
        clipped = quantize_lattice(
            values, ranges, *geometry, *scales, *slots, self.dithered, keys, first, out
        )
        return clipped


@lru_cache(maxsize=64)
def block_design(
    name: LatticeName,
    levels: int | None,
    codebook_radius: float | None,
    stages: int,
    nesting: int | None,
    words: Words,
    dithered: bool,
) -> BlockDesign:
    """Design a block code.

    Args:
        name: Lattice, "Z" or "A2".
        levels: Levels of the coarsest stage, for Z only. None is 2.
        codebook_radius: Norm of the outermost points of the coarsest stage at unit scale, for A2 only. None
            is 1, which gives 7 points.
        stages: Number of stages >= 1, which is the number of bits per block.
        nesting: Nesting ratio, only for stages > 1. Each further stage splits a cell into nesting^L. None
            is 2.
        words: Family of random words.
        dithered: Whether a dither is added before quantisation.

    Raises:
        ValueError: If an argument does not suit the lattice or the number of stages, or there are too many
            levels or points.
    """
    cell = lattice(name)
    check_at_least(1, stages=stages)
    if name == "Z" and codebook_radius is not None:
        raise ValueError(f"Z takes levels, not codebook_radius, got {codebook_radius}")
    if name != "Z" and levels is not None:
        raise ValueError(f"{name} takes codebook_radius, not levels, got {levels}")
    if stages == 1 and nesting is not None:
        raise ValueError(f"nesting = {nesting} has no effect with one stage. Choose stages >= 2.")
    ratio = 2 if nesting is None else nesting
    if name == "Z":
        counts = (2 if levels is None else levels,) + (ratio,) * (stages - 1)
        total = math.prod(counts)
        if max(counts) > MAX_CODEBOOK or total > _MOST_LEVELS:
            raise ValueError(
                f"{stages} stage(s) of {counts[0]} and then {ratio} levels are too fine. "
                f"Choose at most {MAX_CODEBOOK} levels a stage and {_MOST_LEVELS} in all."
            )
        step, points = 2.0 / (total - 1) if total > 1 else 1.0, []
        for stage, count in enumerate(counts):
            width = step * math.prod(counts[stage + 1 :])
            points.append(scalar_levels(count, width * count / 2)[:, None].numpy())
        tables = tuple(word_table(p, words) for p in points)
        return BlockDesign(name, tables, step, 1.0, dithered, ratio, None)
    radius = _RADIUS if codebook_radius is None else codebook_radius
    top = finite_codebook(name, radius)
    inner = voronoi_codebook(name, ratio) if stages > 1 else top
    growth = float(ratio) ** (stages - 1)
    cells = (1.0 if dithered else 0.0) + sum(float(ratio) ** k for k in range(stages))
    safe = safe_radius(name, radius, cells / growth) * (1 - 1e-9)
    limit = math.sqrt(cell.dim)
    coarse = limit / safe
    widths = [coarse, *(coarse / float(ratio) ** k for k in range(1, stages))]
    books = [top] + [inner] * (stages - 1)
    tables = tuple(word_table(w * b.points, words) for w, b in zip(widths, books, strict=True))
    return BlockDesign(name, tables, coarse / growth, limit, dithered, ratio, (top, inner))
