"""Hockey-stick divergences of discrete laws, and the exact curves of randomised response and Gaussian noise.

References:
    Dong, Roth, Su, Gaussian differential privacy, JRSS-B 2022 (`gaussian_delta`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numba
import numpy as np
import scipy  # its parts are imported when used: `stats` takes half a second
from numpy.typing import NDArray

Array = NDArray[np.float64]


Pmf = tuple[float, ...]


PmfPair = tuple[Pmf, Pmf]


def randomized_response_pair(low: float, high: float) -> PmfPair:
    """Return the laws of one randomised bit at the two extreme inputs.

    Examples:
        >>> randomized_response_pair(0.25, 0.75)
        ((0.75, 0.25), (0.25, 0.75))
    """
    return (high, low), (low, high)


def erasure_pair(mass: float) -> PmfPair:
    """Return the pair of laws that reveals the input with probability `mass` and nothing otherwise.

    It dominates every adversary's view of a threshold coin with t <= mass. The words do not depend on the
    input, and the bit changes only if the word is between the two thresholds (monotone coupling).

    Examples:
        >>> erasure_pair(0.25)
        ((0.75, 0.25, 0.0), (0.75, 0.0, 0.25))
    """
    return (1.0 - mass, mass, 0.0), (1.0 - mass, 0.0, mass)


def hockey_stick(p: Array, q: Array, epsilons: Array) -> Array:
    """Return the hockey-stick divergence H_eps(P || Q) = sum (P - e^eps Q)_+ at every epsilon.

    The sum of P (1 - e^(eps - loss)) runs from the largest loss down and contains no difference of large
    sums. So the error is relative to the divergence, as a billion copies of a loss of 1e-4 require.

    Args:
        p: Pmf P, `(k,)`.
        q: Pmf Q on the same outcomes, `(k,)`. The loss is infinite where q is 0 and p is not.
        epsilons: Finite real numbers in ascending order, in nats, `(m,)`.

    Returns:
        `(m,)` float64 in [0, 1].
    """
    shown = p > 0
    p, q = p[shown], q[shown]
    certain = q <= 0
    infinite = float(p[certain].sum())
    p, q = p[~certain], q[~certain]
    losses = np.log(p / q)
    order = losses.argsort()
    curve: Array = np.empty(len(epsilons))
    _descend(p[order], losses[order], np.asarray(epsilons, np.float64), curve)
    return curve + infinite


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _descend(masses: Array, losses: Array, epsilons: Array, curve: Array) -> None:
    """Write curve[k] = sum over losses > epsilons[k] of masses (1 - e^(epsilon - loss)).

    `losses` and `epsilons` are ascending.
    """
    mass, value, place = 0.0, 0.0, len(losses) - 1
    for k in range(len(epsilons) - 1, -1, -1):
        if k + 1 < len(epsilons):
            shrink = -np.expm1(epsilons[k] - epsilons[k + 1])
            # mass - value is the sum of masses e^(epsilon - loss), whose terms all change by one factor
            value += shrink * (mass - value)
        while place >= 0 and losses[place] > epsilons[k]:
            value -= masses[place] * np.expm1(epsilons[k] - losses[place])
            mass += masses[place]
            place -= 1
        curve[k] = value


def find_smallest(exceeds: Callable[[float], bool], high: float, tolerance: float = 1e-12) -> float:
    """Return the smallest value in [0, high] that does not exceed a budget, rounded up, by bisection.

    Args:
        exceeds: Whether a value exceeds the budget. Larger values do not if a smaller one does not.
        high: Value that does not exceed it.
        tolerance: Largest relative error of the result.
    """
    low = 0.0
    while high - low > tolerance * high:
        middle = 0.5 * (low + high)
        if exceeds(middle):
            low = middle
        else:
            high = middle
    return high


def randomized_response_delta(epsilon_bit: float, count: int, epsilon: float) -> float:
    """Return the exact delta, at `epsilon`, of `count` randomised responses of level `epsilon_bit` each.

    The total privacy loss is (2 X - count) epsilon_bit with X ~ Binomial(count, high). It exceeds epsilon if
    X >= k0 = floor((epsilon / epsilon_bit + count) / 2) + 1.

    Examples:
        >>> round(randomized_response_delta(0.1, 100, 4.0), 6)
        3.4e-05
    """
    k = math.floor((epsilon / epsilon_bit + count) / 2.0)
    high = 1.0 / (1.0 + math.exp(-epsilon_bit))
    upper, lower = _log_tail(k, count, high), _log_tail(k, count, 1.0 - high)
    if upper == -math.inf:
        return 0.0
    gap = epsilon + lower - upper
    # e^upper - e^(epsilon + lower), without a difference of nearly equal numbers
    return max(-math.exp(upper) * math.expm1(gap), 0.0) if gap < 0.0 else 0.0


@lru_cache(maxsize=1024)
def _log_tail(k: int, count: int, probability: float) -> float:
    """Return ln P(X > k), X ~ Binomial(count, probability). Cached, as a bisection repeats the same k."""
    return float(scipy.stats.binom.logsf(k, count, probability))


@lru_cache(maxsize=1024)
def randomized_response_epsilon(epsilon_bit: float, count: int, delta: float) -> float:
    """Return the smallest epsilon >= 0 at which `count` randomised responses are (epsilon, delta)-DP.

    The composition is exact. Bisection stops at a relative error of 1e-12 and rounds up.

    Examples:
        >>> round(randomized_response_epsilon(0.1, 100, 1e-5), 3)
        4.307
    """
    if randomized_response_delta(epsilon_bit, count, 0.0) <= delta:
        return 0.0

    def exceeds(epsilon: float) -> bool:
        return randomized_response_delta(epsilon_bit, count, epsilon) > delta

    return find_smallest(exceeds, count * epsilon_bit)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the delta of mu-Gaussian DP at epsilon: Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu).

    Examples:
        >>> round(gaussian_delta(1.0, 1.0), 4)
        0.1269
    """
    upper = float(scipy.special.log_ndtr(mu / 2.0 - epsilon / mu))
    lower = float(scipy.special.log_ndtr(-mu / 2.0 - epsilon / mu)) + epsilon
    return math.exp(upper) * -math.expm1(lower - upper) if lower < upper else 0.0


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon >= 0 at which mu-Gaussian DP is (epsilon, delta)-DP, rounded up.

    Examples:
        >>> round(gaussian_epsilon(1.0, 1e-5), 3)
        4.377
    """
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    # Phi(-z) <= e^(-z^2 / 2), so z = sqrt(-2 ln delta) gives at most delta
    high = mu * mu / 2.0 + mu * (math.sqrt(-2.0 * math.log(delta)) + 1.0)
    return find_smallest(lambda epsilon: gaussian_delta(mu, epsilon) > delta, high)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu for which mu-Gaussian DP is (epsilon, delta)-DP, rounded down.

    Examples:
        >>> round(gaussian_mu(4.377, 1e-5), 3)
        1.0
    """
    low, high = 1e-9, 50.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if gaussian_epsilon(middle, delta) <= epsilon else (low, middle)
    return low


def gaussian_curve(x: Array, mu: float | Array) -> Array:
    """Return the hockey-stick divergence of N(mu, 1) from N(0, 1) at every epsilon x >= -30.

    x is a float64 array of any shape.
    """
    far = -0.5 * mu - x / mu
    beyond = np.exp(np.minimum(x, 700.0) + scipy.special.log_ndtr(far))
    curve: Array = scipy.special.ndtr(0.5 * mu - x / mu) - beyond
    return curve
