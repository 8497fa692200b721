"""Gaussian and Laplace noise on a grid: integers in, integers out, and how far the sampler is from the law.

Values are integers on a fine grid of 2^-30 units (the caller's unit is its clipping bound). Adding
round(noise) to an integer is post-processing of the exact mechanism on integer inputs, so the low bits of
floats can't leak anything. The sum is then rounded to a coarse grid, again post-processing, whose
step is 1/16 to 1/8 of the noise: fewer bits on the wire, and fewer cells in which sampler and law can differ.

Noise comes from the quantile function of a tail in float64, at odd multiples of 2^-65 rounded to 53
significant bits, on either side, so that far tails are as finely resolved as the centre. Its
distribution function at z is off by at most 2^-65 (the grid of tails) plus |z| f(z) 2^-50 (the quantile's
relative error, measured against 40 digits: 2^-50.8) plus 2^-52 times the tail (its rounding). The first sums
to `GridNoise.total_variation`, the other two change the probability of every coarse cell by a factor within
e^(+-`GridNoise.log_ratio`).

References:
    Mironov, On Significance of the Least Significant Bits for Differential Privacy, CCS 2012, for the fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FINE_BITS = 30
_LARGEST = {"gaussian": 9.16, "laplace": 44.4}
_LOG_RATIO = {"gaussian": 2.0**-41, "laplace": 2.0**-39}
_STEPS_PER_SCALE = 8


def signed_tails(words: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
    """Turn uniform 64-bit words into tail probabilities and sides; larger words lie further to the right.

    Returns:
        `(n,)` float64 (k + 1/2) 2^-64 in (0, 1/2], k words away from the nearer end, and `(n,)` bool: is it
        the right tail?
    """
    others = ~words
    tails = (np.minimum(words, others).astype(np.float64) + 0.5) * 2.0**-64
    return torch.from_numpy(tails), torch.from_numpy(words > others)


def rounded_gaussian(words: NDArray[np.uint64], sigma: float) -> Tensor:
    """Nearest integers to sigma times a normal variable; |result| <= 9.16 sigma + 1.

    Args:
        words: `(n,)` uniform.
        sigma: Standard deviation, in integers.

    Returns:
        `(n,)` int64.
    """
    tails, right = signed_tails(words)
    below = torch.round(torch.special.ndtri(tails) * sigma).to(torch.int64)
    return torch.where(right, -below, below)


def rounded_laplace(words: NDArray[np.uint64], scale: float) -> Tensor:
    """Nearest integers to `scale` times a Laplace variable; |result| <= 44.4 scale + 1.

    Args:
        words: `(n,)` uniform.
        scale: Mean absolute value, in integers.

    Returns:
        `(n,)` int64.
    """
    tails, right = signed_tails(words)
    below = torch.round(torch.log(2.0 * tails) * scale).to(torch.int64)
    return torch.where(right, -below, below)


@dataclass(frozen=True)
class GridNoise:
    """One noise law on its grid.

    Args:
        law: "gaussian" or "laplace".
        scale: Standard deviation (Gaussian) or mean absolute value (Laplace), in units of the clipping bound.

    Raises:
        ValueError: If the scale is not in [1e-6, 1e6].
    """

    law: Literal["gaussian", "laplace"]
    scale: float

    def __post_init__(self) -> None:
        if not 1e-6 <= self.scale <= 1e6:
            raise ValueError(
                f"the noise must be between 1e-6 and 1e6 clipping bounds, got {self.scale}; less protects "
                "nobody (use FedAvg), more leaves no signal (loosen the budget)"
            )

    @property
    def shift(self) -> int:
        """Bits dropped from the fine grid after the noise is added."""
        return math.floor(math.log2(self.scale * 2.0**FINE_BITS / _STEPS_PER_SCALE))

    @property
    def step(self) -> float:
        """Step of the coarse grid, in clipping bounds."""
        return 2.0 ** (self.shift - FINE_BITS)

    @property
    def bits(self) -> int:
        """Width of a signed symbol that holds every possible sum of a clipped value and noise."""
        largest = (1.0 + _LARGEST[self.law] * self.scale) / self.step + 2.0
        return math.ceil(math.log2(largest + 1.0)) + 1

    @property
    def variance(self) -> float:
        """Upper bound on the variance of a released coordinate, rounding included, in squared bounds."""
        exact = self.scale**2 if self.law == "gaussian" else 2.0 * self.scale**2
        return exact + self.step**2 / 4.0

    @property
    def total_variation(self) -> float:
        """Distance of one released coordinate's law from the exact mechanism's, at most, `log_ratio` aside.

        Half the sum over cells of what both ends are off is the sum over ends, each off by 2^-65; beyond the
        last one lies less than 2^-64.
        """
        ends = 2.0 * _LARGEST[self.law] * self.scale / self.step + 2.0
        return ends * 2.0**-65 + 2.0**-64

    @property
    def log_ratio(self) -> float:
        """Largest |ln| of the ratio that the float errors make in any cell's probability.

        A cell from a to a + h, 1/16 <= h <= 1/8 in scales, has at least h f(a + h), and its ends are off by
        2^-50 z f(z) and 2^-52 of the tail each: less than 2^-41 of it for a up to 9.16 (Gaussian), 2^-39 for
        a up to 44.4 (Laplace).
        """
        return _LOG_RATIO[self.law]

    def add(self, values: Tensor, words: NDArray[np.uint64]) -> Tensor:
        """Add noise to integers on the fine grid and round the sums to the coarse one.

        Args:
            values: `(n,)` int64, at most 2^30 in size.
            words: `(n,)` uniform.

        Returns:
            `(n,)` int64 in [-2^(bits - 1), 2^(bits - 1)).
        """
        draw = rounded_gaussian if self.law == "gaussian" else rounded_laplace
        noise = draw(words, self.scale * 2.0**FINE_BITS)
        return (values + noise.to(values.device) + (1 << self.shift >> 1)) >> self.shift


@lru_cache(maxsize=256)
def analytic_gaussian_multiplier(epsilon: float, delta: float) -> float:
    """Smallest std / sensitivity for which the Gaussian mechanism is (epsilon, delta)-DP, rounded up.

    It solves Phi(1/(2s) - epsilon s) - e^epsilon Phi(-1/(2s) - epsilon s) = delta by bisection.

    Args:
        epsilon: > 0, in nats.
        delta: In (0, 1).

    References:
        Balle, Wang, Improving the Gaussian Mechanism for Differential Privacy, ICML 2018, Theorem 8.
    """

    def spent(s: float) -> float:
        ends = torch.tensor([0.5 / s - epsilon * s, -0.5 / s - epsilon * s], dtype=torch.float64)
        first, second = torch.special.log_ndtr(ends).tolist()
        return math.exp(first) - math.exp(epsilon + second)

    low, high = 1e-9, 1.0
    while spent(high) > delta:
        high *= 2.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high
