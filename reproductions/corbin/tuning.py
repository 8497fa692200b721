"""Tuning by validation on the first seed, every seed with what was chosen, and verdicts over the seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from reproductions.bench import Row

Choice = TypeVar("Choice")


def tune(train: Callable[[Choice, int], Row], grid: Sequence[Choice], seeds: Sequence[int]) -> list[Row]:
    """Train the whole grid with the first seed, and the best of it by validation with the other seeds.

    Args:
        train: Gives the row of a choice and a seed; its `best_val` decides.
        grid: Choices.
        seeds: One or more.

    Returns:
        A row for every seed, all of the same choice.

    Raises:
        ValueError: If there is no seed or no choice.
    """
    if not seeds or not grid:
        raise ValueError(f"seeds and grid need one value or more, got {list(seeds)} and {list(grid)}")
    tried = [train(choice, seeds[0]) for choice in grid]
    best = max(range(len(grid)), key=lambda place: float(tried[place]["best_val"]))
    return [tried[best], *(train(grid[best], seed) for seed in seeds[1:])]


def mean_test(rows: Sequence[Row]) -> float:
    """Mean test accuracy in percent."""
    return float(np.mean([row["test"] for row in rows]))


def spread(rows: Sequence[Row]) -> str:
    """Mean test accuracy, standard deviation over seeds, and the chosen lambda."""
    scatter = f" +- {np.std([row['test'] for row in rows], ddof=1):.2f}" if len(rows) > 1 else ""
    return f"{mean_test(rows):.2f}{scatter} (lambda {rows[0]['smoothing']:g})"


def above(better: str, ours: Sequence[Row], worse: str, theirs: Sequence[Row], test_images: int) -> str:
    """Verdict on "the first is above the second", by differences of runs with the same seed.

    Args:
        better: Name of the first.
        ours: Its rows, one a seed.
        worse: Name of the second.
        theirs: Its rows, in the order of the same seeds.
        test_images: How many a test accuracy is of: the least that it scatters by.
    """
    gaps = np.array([a["test"] - b["test"] for a, b in zip(ours, theirs, strict=True)])
    rate = mean_test(ours) / 100
    variance = 2e4 * rate * (1 - rate) / test_images
    if len(gaps) > 1:  # a few seeds may agree by chance
        variance = max(variance, float(gaps.var(ddof=1)))
    gap, error = float(gaps.mean()), math.sqrt(variance / len(gaps))
    word = "held" if gap > 2 * error else "NOT held" if gap < -2 * error else "not told apart"
    if len(gaps) == 1:
        word = "one seed, no verdict"
    return f"{better} above {worse}: {gap:+.2f} points, standard error {error:.2f}: {word}"
