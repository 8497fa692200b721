"""Hockey-stick divergences of discrete laws, and the exact curves of randomised response and Gaussian noise.

References:
    Dong, Roth, Su, Gaussian differential privacy, JRSS-B 2022 (`gaussian_delta`).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numba
import numpy as np
import scipy  # its parts are imported when used: `stats` takes half a second
from numpy.typing import NDArray

Array = NDArray[np.float64]


Pmf = tuple[float, ...]


PmfPair = tuple[Pmf, Pmf]


def randomized_response_pair(low: float, high: float) -> PmfPair:
    """Laws of one bit at the two extreme inputs. The reverse order is its mirror image.

    Example:
        >>> randomized_response_pair(0.25, 0.75)
        ((0.75, 0.25), (0.25, 0.75))
    """
    return (high, low), (low, high)


def erasure_pair(mass: float) -> PmfPair:
    """The pair that shows everything with probability `mass` and nothing otherwise.

    It dominates every view of a threshold coin with t <= mass: the words do not depend on the input, and
    the bit changes only where the word falls between two thresholds (monotone coupling).

    Example:
        >>> erasure_pair(0.25)
        ((0.75, 0.25, 0.0), (0.75, 0.0, 0.25))
    """
    return (1.0 - mass, mass, 0.0), (1.0 - mass, 0.0, mass)


def hockey_stick(p: Array, q: Array, epsilons: Array) -> Array:
    """H_eps(P || Q) = sum (P - e^eps Q)_+ at every epsilon, exact for the pmfs given.

    Summed as P (1 - e^(eps - loss)) from the largest loss down, without a difference of large sums, so that
    the error is relative to the divergence: a billion copies of a loss of 1e-4 need that.

    Args:
        p: `(k,)` pmf.
        q: `(k,)` pmf on the same outcomes; where it is 0 and p is not, the loss is infinite.
        epsilons: `(m,)` finite real numbers in ascending order, in nats.

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
    """curve[k] = sum over losses > epsilons[k] of masses (1 - e^(epsilon - loss)). All ascending."""
    mass, value, place = 0.0, 0.0, len(losses) - 1
    for k in range(len(epsilons) - 1, -1, -1):
        if k + 1 < len(epsilons):
            shrink = -np.expm1(epsilons[k] - epsilons[k + 1])
            # mass - value = sum of masses e^(epsilon - loss): one factor for all
            value += shrink * (mass - value)
        while place >= 0 and losses[place] > epsilons[k]:
            value -= masses[place] * np.expm1(epsilons[k] - losses[place])
            mass += masses[place]
            place -= 1
        curve[k] = value


def randomized_response_delta(epsilon_bit: float, count: int, epsilon: float) -> float:
    """Exact delta of `count` randomised responses of level `epsilon_bit` each, at `epsilon`.

    The total loss is (2 X - count) epsilon_bit, X ~ Binomial(count, high); the worst outcomes are those
    with X >= k0 = floor((epsilon / epsilon_bit + count) / 2) + 1.

    Example:
        >>> round(randomized_response_delta(0.1, 100, 4.0), 6)
        3.4e-05
    """
    k = math.floor((epsilon / epsilon_bit + count) / 2.0)
    high = 1.0 / (1.0 + math.exp(-epsilon_bit))
    upper, lower = _log_tail(k, count, high), _log_tail(k, count, 1.0 - high)
    if upper == -math.inf:
        return 0.0
    gap = epsilon + lower - upper
    # e^upper - e^(epsilon + lower), no difference of near numbers
    return max(-math.exp(upper) * math.expm1(gap), 0.0) if gap < 0.0 else 0.0


@lru_cache(maxsize=1024)
def _log_tail(k: int, count: int, probability: float) -> float:
    """ln P(X > k), X ~ Binomial(count, probability). A bisection ends in many steps of one k."""
    return float(scipy.stats.binom.logsf(k, count, probability))


@lru_cache(maxsize=1024)
def randomized_response_epsilon(epsilon_bit: float, count: int, delta: float) -> float:
    """Smallest epsilon >= 0 at which `count` randomised responses are (epsilon, delta)-DP, rounded up.

    Exact composition by bisection, to 1e-12 relative.

    Example:
        >>> round(randomized_response_epsilon(0.1, 100, 1e-5), 3)
        4.307
    """
    low, high = 0.0, count * epsilon_bit
    if randomized_response_delta(epsilon_bit, count, 0.0) <= delta:
        return 0.0
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        if randomized_response_delta(epsilon_bit, count, middle) > delta:
            low = middle
        else:
            high = middle
    return high


def gaussian_delta(mu: float, epsilon: float) -> float:
    """delta of mu-Gaussian DP at epsilon: Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu).

    Example:
        >>> round(gaussian_delta(1.0, 1.0), 4)
        0.1269
    """
    upper = float(scipy.special.log_ndtr(mu / 2.0 - epsilon / mu))
    lower = float(scipy.special.log_ndtr(-mu / 2.0 - epsilon / mu)) + epsilon
    return math.exp(upper) * -math.expm1(lower - upper) if lower < upper else 0.0


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon >= 0 at which mu-Gaussian DP is (epsilon, delta)-DP, by bisection, rounded up.

    Example:
        >>> round(gaussian_epsilon(1.0, 1e-5), 3)
        4.377
    """
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    # Phi(-z) <= e^(-z^2 / 2): at z = sqrt(-2 ln delta) delta is reached
    low, high = 0.0, mu * mu / 2.0 + mu * (math.sqrt(-2.0 * math.log(delta)) + 1.0)
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        if gaussian_delta(mu, middle) > delta:
            low = middle
        else:
            high = middle
    return high


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Largest mu whose Gaussian DP reaches `epsilon` at `delta`, rounded down.

    Example:
        >>> round(gaussian_mu(4.377, 1e-5), 3)
        1.0
    """
    low, high = 1e-9, 50.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if gaussian_epsilon(middle, delta) <= epsilon else (low, middle)
    return low


def gaussian_curve(x: Array, mu: float | Array) -> Array:
    """Hockey-stick divergence of N(mu, 1) from N(0, 1) at every x >= -30 (float64, any shape)."""
    far = -0.5 * mu - x / mu
    found: Array = scipy.special.ndtr(0.5 * mu - x / mu) - np.exp(
        np.minimum(x, 700.0) + scipy.special.log_ndtr(far)
    )
    return found
