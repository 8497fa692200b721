"""Marked items among those that are drawn without replacement: how many there are, and how many at most."""

from __future__ import annotations

import math

from scipy import stats


def num_marked(fraction: float, items: int) -> int:
    """Marked ones of so many items: the fraction, rounded down, and at least one where it is above 0.

    Example:
        >>> num_marked(0.1, 25)
        2
    """
    if fraction == 0.0:
        return 0
    return min(max(math.floor(fraction * items + 1e-9), 1), items)  # 0.29 * 100 is a little below 29


def most_drawn(items: int, marked: int, drawn: int, chance: float) -> int:
    """Marked ones among the drawn, which are exceeded with probability `chance` at most (hypergeometric).

    Example:
        >>> most_drawn(1000, 20, 100, 1e-6)
        10
    """
    return int(stats.hypergeom.isf(chance, items, marked, drawn))
