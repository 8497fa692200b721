"""The private choice of one of K public random directions: which chance each has, what its decoder is worth.

The k directions g_j that lie closest to a unit vector u are sent with chance p_top each, the K - k others
with chance p_low each, p_top = e^epsilon p_low: two levels, so a message is exactly epsilon-LDP whatever the
directions are. Over the draw of independent directions the sent one has mean m u, m = (p_top - p_low) A_k,
A_k the expected sum of the k largest of K independent <g_j, u>, so the sent one over m is unbiased.

This is PrivUnit on a finite codebook: with K to infinity k / K is the share q of its cap, and m its m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from lightning_fedq.functional.axis_choice import WORD_BITS, binomial_cdf, top_threshold

_NODES = 300
_FAR = 12.0
"""Beyond this many standard deviations a normal has no mass that float64 would notice."""


@dataclass(frozen=True)
class DirectionChoice:
    """Law of a private choice among K directions in `dim` dimensions.

    Args:
        dim: Dimension of the directions.
        num_directions: K.
        num_top: k, in [1, K / 2].
        threshold: A 64-bit word below it picks one of the k, any other one of the K - k.
        mean_length: m: length of the mean of what is sent.
        mean_square: Expected squared length of what is sent.
    """

    dim: int
    num_directions: int
    num_top: int
    threshold: int
    mean_length: float
    mean_square: float

    @property
    def top_probability(self) -> float:
        """Chance that one of the k is sent."""
        return self.threshold / 2.0**WORD_BITS

    @property
    def other_probability(self) -> float:
        """Chance that one of a given k of the K - k others is sent."""
        rest = self.num_top * ((1 << WORD_BITS) - self.threshold)  # in integers: 1 - top may round to 0
        return rest / ((self.num_directions - self.num_top) << WORD_BITS)

    @property
    def mean_squared_error(self) -> float:
        """Of one decoded message, for a unit vector, summed over the coordinates."""
        return self.mean_square / self.mean_length**2 - 1.0


def _projections(dim: int, normals: NDArray[np.float64], spherical: bool) -> NDArray[np.float64]:
    """Quantiles of <g, u> where a standard normal has `normals`."""
    if not spherical:
        return normals
    tail = 2.0 * special.ndtr(-np.abs(normals))  # of |<g, u>|, as the law is symmetric
    # 1 - <g, u>^2 has the law Beta((dim - 1) / 2, 1/2)
    return np.asarray(np.sign(normals) * np.sqrt(1.0 - special.betaincinv((dim - 1) / 2.0, 0.5, tail)))


def top_moments(dim: int, num_directions: int, num_top: int, spherical: bool) -> tuple[float, float]:
    """Expected sums of the k largest of K independent <g_j, u>, and of the squares of these k.

    K times the integral of x and x^2, weighted by the chance that at most k - 1 of the K - 1 others exceed x.
    Gauss-Legendre in the normal quantile, on both sides of the point where K Q = k, where the weight falls.
    """
    bend = float(special.ndtri(1.0 - num_top / num_directions))
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    first = second = 0.0
    for start, stop in ((-_FAR, bend), (bend, _FAR)):
        half = 0.5 * (stop - start)
        z = start + half * (nodes + 1.0)
        density = np.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)
        among = density * binomial_cdf(num_top - 1, num_directions - 1, special.ndtr(-z))
        x = _projections(dim, z, spherical)
        first += half * num_directions * float(weights @ (x * among))
        second += half * num_directions * float(weights @ (x * x * among))
    return first, second


@lru_cache(maxsize=256)
def best_direction_choice(dim: int, num_directions: int, epsilon: float, spherical: bool) -> DirectionChoice:
    """The choice with the longest mean.

    Args:
        dim: Dimension of the directions, >= 2.
        num_directions: K, >= 2.
        epsilon: Level of one message, > 0 and finite, in nats.
        spherical: Directions of length one, or of independent standard normals.

    Raises:
        ValueError: If a number is out of its range.

    Example:
        >>> best_direction_choice(1024, 256, 8.0, True).num_top
        1
    """
    if not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be > 0 and finite, got {epsilon}")
    if dim < 2 or num_directions < 2:
        raise ValueError(f"a choice needs two dimensions and directions, got {dim} and {num_directions}")

    def choice(num_top: int) -> DirectionChoice:
        threshold = top_threshold(num_directions, num_top, epsilon)
        share = threshold / 2**WORD_BITS
        low = (1.0 - share) / (num_directions - num_top)
        gap = share / num_top - low
        first, second = top_moments(dim, num_directions, num_top, spherical)
        # all K squares along u add up to K (K / dim on the sphere); across u nothing is chosen
        square = 1.0 if spherical else (dim - 1.0) + gap * second + low * num_directions
        return DirectionChoice(dim, num_directions, num_top, threshold, gap * first, square)

    low, high = 1, num_directions // 2  # the length is unimodal in k, and flat at its top
    while high - low > 2:
        third = (high - low) // 3
        if choice(low + third).mean_length < choice(high - third).mean_length:
            low += third
        else:
            high -= third
    return max((choice(k) for k in range(low, high + 1)), key=lambda c: c.mean_length)
