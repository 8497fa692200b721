"""Worst-case error of a decoded block in closed form, in units of the radius.

A bit b of a word with weights W decodes to offset + scale b W. The second moment of its random part does not
depend on the point. Its variance is this moment minus the square of (point - offset).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from lightning_fedq.functional.blocks.codeword import WordTable
from lightning_fedq.functional.blocks.design import BlockDesign
from lightning_fedq.functional.blocks.lattice import lattice
from lightning_fedq.functional.blocks.scalar_loops import Floats

Dither = Literal["subtractive", "plain", "none"]
Decoder = Literal["unbiased", "paper", "authors_code"]


def lift(table: WordTable, keep: Floats, decoder: Decoder) -> tuple[Floats, Floats]:
    """Return the scales of b W, one for each `keep` = tanh(epsilon / 2), and the offset of the decoder.

    The decoder "paper" leaves out the correction for correlated words. "authors_code" also leaves out the
    correction for randomised response.
    """
    if decoder == "unbiased":
        return table.gain / keep, table.offset
    return (1.0 / keep if decoder == "paper" else np.ones_like(keep)), np.zeros_like(table.offset)


def _moments(table: WordTable, keep: float, decoder: Decoder) -> tuple[Floats, Floats]:
    """Return the second moment of the random part in every coordinate, and the offset."""
    scales, offset = lift(table, np.array([keep]), decoder)
    moments: Floats = scales[0] ** 2 * np.square(table.weights).mean(0)
    return moments, offset


def worst_variance(design: BlockDesign, dither: Dither, decoder: Decoder, keep: float) -> float:
    """Return an upper bound on the variance of one decoded coordinate over all inputs in range."""
    cell = lattice(design.name)
    total = {
        "subtractive": cell.second_moment / cell.dim,
        "plain": 0.25 if design.name == "Z" else (2.0 * cell.covering_radius) ** 2,
        "none": 0.0,
    }[dither] * design.step**2
    for table in design.tables:
        moments, offset = _moments(table, keep, decoder)
        if decoder == "unbiased":
            moments = moments - np.square(table.points - offset).min(0)
        total += float(moments.max())
    return float(total)


def worst_second_moment(design: BlockDesign, dither: Dither, keep: float) -> float:
    """Return an upper bound on the second moment of one unbiased decoded coordinate over all inputs in range.

    Let the point q be the sum of the stages' q_s. The moment is sum_s (moment_s - (q_s - offset_s)^2) + q^2,
    plus the second moment of a cell if a dither is subtracted. For one stage, q^2 cancels and the bound is
    attained.
    """
    cell = lattice(design.name)
    total = cell.second_moment / cell.dim * design.step**2 * (dither == "subtractive")
    reach = [np.abs(table.points).max(0) for table in design.tables]
    bound = np.square(np.sum(reach, 0)) - np.sum(np.square(reach), 0)
    for table in design.tables:
        moments, offset = _moments(table, keep, "unbiased")
        bound = bound + moments + (2.0 * offset * table.points - offset**2).max(0)
    return float(total + bound.max())


def longest_pull(design: BlockDesign, decoder: Decoder, keep: float) -> float:
    """Return the largest norm that any bits of one block can add to the decoded sum."""
    pull = 0.0
    for table in design.tables:
        scales, offset = lift(table, np.array([keep]), decoder)
        longest = scales[0] * np.linalg.norm(table.weights, axis=1).max()
        pull += float(longest + np.linalg.norm(offset))
    return pull
