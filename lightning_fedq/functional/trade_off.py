"""Leakage of an update, in the measure of Zhang, Chen, Yang (2022/23).

Leakage is sqrt(JS(belief, prior)), where JS is the Jensen-Shannon divergence in nats. Belief and prior are an
attacker's probabilities over a list of candidates. Leakage is in [0, sqrt(ln 2)]. xi is the largest
|log(belief / prior)|, and C2 = (exp(2 xi) - 1) / 2. These measures are not differential privacy, because they
describe the average belief of one attacker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy  # its parts are imported when used
from numpy.typing import NDArray

Array = NDArray[np.float64]
Counts = NDArray[np.int64]

LARGEST_LEAKAGE = math.sqrt(math.log(2.0))
"""sqrt(JS) of two beliefs that exclude each other."""


def jensen_shannon(p: Sequence[float], q: Sequence[float]) -> float:
    """Return the Jensen-Shannon divergence of two probability mass functions, in nats, at most ln 2.

    Examples:
        >>> round(jensen_shannon([0.9, 0.1], [0.5, 0.5]), 9)
        0.101749225
    """
    total = 0.0
    for a, b in zip(p, q, strict=True):
        middle = 0.5 * (a + b)
        total += 0.5 * sum(x * math.log(x / middle) for x in (a, b) if x > 0.0)
    return max(total, 0.0)


def recovery_leakage(hit_rate: float, num_candidates: int) -> float:
    """Return the leakage of an attack that finds the truth with a known frequency.

    A hit puts all belief on the truth, and a miss leaves the uniform prior. Leakage rises with the hit rate.

    Args:
        hit_rate: Frequency of hits, in [0, 1].
        num_candidates: Length of the attacker's list, >= 2.

    Raises:
        ValueError: If an argument is out of its range.

    Examples:
        >>> round(recovery_leakage(1.0, 100), 9)
        0.815534434
    """
    if not 0.0 <= hit_rate <= 1.0:
        raise ValueError(f"hit_rate must be in [0, 1], got {hit_rate}")
    if num_candidates < 2:
        raise ValueError(f"num_candidates must be >= 2, got {num_candidates}. Add candidates to the list.")
    n = num_candidates
    other = (1.0 - hit_rate) / n
    belief = [hit_rate + other] + [other] * (n - 1)
    return math.sqrt(jensen_shannon(belief, [1.0 / n] * n))


def log_ratio(hit_rate: float, num_candidates: int) -> float:
    """Return xi, the largest |log(belief / prior)| of the attack of `recovery_leakage`.

    It is infinite at hit rate 1.

    Examples:
        >>> round(log_ratio(0.5, 10), 3)
        1.705
    """
    recovery_leakage(hit_rate, num_candidates)
    if hit_rate == 1.0:
        return math.inf
    return max(math.log1p(hit_rate * (num_candidates - 1)), -math.log1p(-hit_rate))


def clopper_pearson(hits: int, attempts: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact two-sided confidence limits of a probability, given `hits` in `attempts`.

    Raises:
        ValueError: If the counts or the confidence are out of range.

    Examples:
        >>> tuple(round(end, 3) for end in clopper_pearson(9, 10))
        (0.555, 0.997)
    """
    if not 0 <= hits <= attempts or attempts < 1:
        raise ValueError(f"need 0 <= hits <= attempts and attempts >= 1, got {hits} of {attempts}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    low, high = binomial_bounds(np.array(hits), attempts, 0.5 * (1.0 - confidence))
    return float(low), float(high)


def binomial_bounds(hits: Counts, draws: Counts | int, alpha: float) -> tuple[Array, Array]:
    """Return one-sided lower and upper bounds of probabilities, each wrong with probability <= `alpha`.

    Args:
        hits: Numbers of draws in an event.
        draws: Numbers of draws.
        alpha: Error probability of one bound.

    References:
        Clopper, Pearson, The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial,
        Biometrika 1934.

    Examples:
        >>> low, high = binomial_bounds(np.array([0, 9]), 10, 0.025)
        >>> low.round(3).tolist(), high.round(3).tolist()
        ([0.0, 0.555], [0.308, 0.997])
    """
    misses = draws - hits
    lower: Array = np.where(hits > 0, scipy.special.betaincinv(np.maximum(hits, 1), misses + 1, alpha), 0.0)
    # use the other tail because 1 - alpha loses digits, and SciPy before 1.12 finds no root there
    rest = np.where(misses > 0, scipy.special.betaincinv(np.maximum(misses, 1), hits + 1, alpha), 0.0)
    upper: Array = 1.0 - rest
    return lower, upper


def leakage_factor(xi: float) -> float:
    """Return C2 = (exp(2 xi) - 1) / 2, or infinity if it exceeds float64.

    Examples:
        >>> round(leakage_factor(0.5), 3)
        0.859
    """
    return 0.5 * math.expm1(2.0 * xi) if xi < 350.0 else math.inf
