"""The geometry of block coding: which points a block can become, in how many stages, and how it gets there.

A block x of L numbers, in units of the radius, becomes one of finitely many points of a lattice, after a
dither that is uniform on the lattice's cell; nested stages are the digits of that point. The range that can't
be overloaded is |x| <= 1 for Z, where N levels are spread over [-1, 1], and ||x|| <= sqrt(L), which holds the
square, for A2; a block beyond it is shrunk to it.

Source: Lang et al., CPA, definitions 2.2 to 2.6; the departures are those of `lattice`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.blocks.codeword import Words, WordTable, word_table
from lightning_fedq.functional.blocks.lattice import LatticeName, lattice, scalar_levels
from lightning_fedq.functional.blocks.lattice_codebook import (
    MAX_CODEBOOK,
    Codebook,
    finite_codebook,
    safe_radius,
    voronoi_codebook,
)
from lightning_fedq.functional.blocks.lattice_loops import quantize_lattice
from lightning_fedq.functional.blocks.scalar_loops import Floats, Indices, Keys, quantize_scalar

_MOST_LEVELS = 1 << 40
"""Levels of all stages together that float64 places exactly, with bits to spare."""
_RADIUS = 1.0
"""Of codebooks for which nobody gave one."""


@dataclass(frozen=True, eq=False)
class BlockDesign:
    """Points and words of every stage, in units of the radius, and the quantiser that goes with them.

    Args:
        name: The lattice.
        tables: Words of every stage, coarsest first.
        step: Scale of the finest lattice.
        limit: Largest norm of a block in range.
        dithered: Is a dither added before quantisation?
        ratio: Nesting ratio; unused with one stage.
        books: For lattices but Z: codebook of the coarsest stage and of the finer ones.
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
        """Points of every stage."""
        return tuple(len(table.points) for table in self.tables)

    @property
    def block_dim(self) -> int:
        """L."""
        return lattice(self.name).dim

    def quantize(self, values: NDArray[Any], ranges: Floats, keys: Keys, first: int, out: Indices) -> int:
        """Indices of some blocks of some rows. Arguments as in `quantize_lattice`.

        Returns:
            How many blocks were out of range.
        """
        if self.books is None:
            counts = np.array(self.counts)
            clipped: int = quantize_scalar(values, ranges, counts, self.dithered, keys, first, out)
            return clipped
        scale = 1.0 / self.step
        return quantize_lattice(
            values, ranges, self.books, self.ratio, self.limit, scale, self.dithered, keys, first, out
        )


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
    """Design a code.

    Args:
        levels: Levels of the coarsest stage, for Z only; 2 if None.
        codebook_radius: Norm of the outermost points of the coarsest stage at unit scale, for A2 only; 1 if
            None, which are 7 points.
        stages: Bits per block, >= 1.
        nesting: Every further stage splits a cell into nesting^L; 2 if None. Only with stages > 1.
        words: Family of random words.
        dithered: Is there a dither?

    Raises:
        ValueError: If there is no such code.
    """
    cell = lattice(name)
    if stages < 1:
        raise ValueError(f"stages must be >= 1, got {stages}")
    if name == "Z" and codebook_radius is not None:
        raise ValueError(f"Z takes levels, not codebook_radius, got {codebook_radius}")
    if name != "Z" and levels is not None:
        raise ValueError(f"{name} takes codebook_radius, not levels, got {levels}")
    if stages == 1 and nesting is not None:
        raise ValueError(f"nesting = {nesting} does nothing with one stage; choose stages >= 2")
    ratio = 2 if nesting is None else nesting
    if name == "Z":
        counts = (2 if levels is None else levels,) + (ratio,) * (stages - 1)
        total = math.prod(counts)
        if max(counts) > MAX_CODEBOOK or total > _MOST_LEVELS:
            raise ValueError(
                f"{stages} stage(s) of {counts[0]} and then {ratio} levels are too fine; "
                f"choose at most {MAX_CODEBOOK} levels a stage and {_MOST_LEVELS} in all"
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
