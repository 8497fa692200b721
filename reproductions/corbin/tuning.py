"""Tuning by validation on the first seed, every seed with what was chosen, and differences over the seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from reproductions.bench import Row, every

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


class Gap(NamedTuple):
    """How far one method is above another, over seeds that both were run with.

    Args:
        first: Name of the one.
        second: Name of the other.
        points: Mean difference of test accuracies, in points.
        error: Its standard error.
        num_seeds: Differences.
    """

    first: str
    second: str
    points: float
    error: float
    num_seeds: int

    @property
    def words(self) -> str:
        """The difference in words, and what it tells apart."""
        side = "first above" if self.above else "first below" if self.above is False else "not told apart"
        word = "one seed" if self.num_seeds == 1 else side
        return (
            f"{self.first} minus {self.second} {self.points:+.2f} (standard error {self.error:.2f}, {word})"
        )

    @property
    def above(self) -> bool | None:
        """Is the first above the second, by two standard errors? None for one seed, or if not told apart."""
        if self.num_seeds == 1 or abs(self.points) <= 2 * self.error:
            return None
        return self.points > 0

    def loses_less(self, margin: float) -> bool | None:
        """Is the first less than a margin of points below the second, by two standard errors?"""
        if self.num_seeds == 1 or abs(self.points + margin) <= 2 * self.error:
            return None
        return self.points > -margin

    def almost_equal(self, margin: float) -> bool | None:
        """Are the two less than a margin of points apart, whichever is above?"""
        other = self._replace(points=-self.points)
        return every([self.loses_less(margin), other.loses_less(margin)])


def gap(first: str, ours: Sequence[Row], second: str, theirs: Sequence[Row], test_images: int) -> Gap:
    """Difference of test accuracies, from runs with the same seed.

    Args:
        first: Name of the first.
        ours: Its rows, one a seed.
        second: Name of the second.
        theirs: Its rows, in the order of the same seeds.
        test_images: How many a test accuracy is of: the least that it scatters by.
    """
    gaps = np.array([a["test"] - b["test"] for a, b in zip(ours, theirs, strict=True)])
    rate = mean_test(ours) / 100
    variance = 2e4 * rate * (1 - rate) / test_images
    if len(gaps) > 1:  # a few seeds may agree by chance
        variance = max(variance, float(gaps.var(ddof=1)))
    return Gap(first, second, float(gaps.mean()), math.sqrt(variance / len(gaps)), len(gaps))
