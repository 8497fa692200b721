"""Hypergeometric law: the number of marked items among items that are drawn without replacement."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special


def num_marked(fraction: float, items: int) -> int:
    """Return the number of marked items: the fraction of all, rounded down, but at least 1 if it is above 0.

    Examples:
        >>> num_marked(0.1, 25)
        2
    """
    if fraction == 0.0:
        return 0
    return min(max(math.floor(fraction * items + 1e-9), 1), items)  # 0.29 * 100 is a little below 29


def hypergeometric_quantile(items: int, marked: int, drawn: int, chance: float) -> int:
    """Return the number of marked items among the drawn that is exceeded with probability <= `chance`.

    Examples:
        >>> hypergeometric_quantile(1000, 20, 100, 1e-6)
        10
    """
    counts = np.arange(min(marked, drawn), 0, -1)
    # in log-probabilities, because scipy's quantile takes 1 - chance, which loses 1e-16 and less
    beyond = np.logaddexp2.accumulate(log2_hypergeometric(items, marked, drawn, counts))
    return len(counts) - int((beyond <= math.log2(chance)).sum())


def log2_choose(n: ArrayLike, k: ArrayLike) -> NDArray[np.float64]:
    """Return log2 of the binomial coefficient of n >= 0 over k, or -inf outside of 0 <= k <= n."""
    n, k = np.asarray(n, float), np.asarray(k, float)
    ways = special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)
    return np.asarray(ways / math.log(2))


def log2_hypergeometric(items: int, marked: ArrayLike, drawn: int, counts: ArrayLike) -> NDArray[np.float64]:
    """Return log2 of the probability that exactly `counts` of the drawn items are marked."""
    rest = log2_choose(items - np.asarray(marked), drawn - np.asarray(counts))
    return log2_choose(marked, counts) + rest - log2_choose(items, drawn)
