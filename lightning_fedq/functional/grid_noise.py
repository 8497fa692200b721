"""Gaussian and Laplace noise on a grid: integers in, integers out, and how far the sampler is from the law.

Values are integers on a fine grid of 2^-30 units (the caller's unit is its clipping bound). Adding
round(noise) to an integer is post-processing of the exact mechanism on integer inputs, so the low bits of
floats can't leak anything. The sum is then rounded to a coarse grid, again post-processing, whose
step is 1/16 to 1/8 of the noise: fewer bits on the wire, and fewer cells in which sampler and law can differ.

Noise comes from the quantile function in float64 at odd multiples of 2^-53. Its distribution function is
off by at most 2^-53 (the grid of uniforms) plus |z| f(z) times the relative error of the quantile, below
2^-50 (measured against 40 digits: 2^-50.8). Summed over the ends of all coarse cells this is
`GridNoise.total_variation`, the distance of one released coordinate's law from the exact mechanism's: below
2^-44 for Gaussian noise and 2^-42 for Laplace.

References:
    Mironov, On Significance of the Least Significant Bits for Differential Privacy, CCS 2012, for the fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FINE_BITS = 30
_LARGEST = {"gaussian": 8.21, "laplace": 36.1}
_MEAN_SIZE = {"gaussian": math.sqrt(2.0 / math.pi), "laplace": 1.0}
_STEPS_PER_SCALE = 8


def rounded_gaussian(uniforms: Tensor, sigma: float) -> Tensor:
    """Nearest integers to sigma times the normal quantile; |result| <= 8.21 sigma + 1.

    Args:
        uniforms: float64 odd multiples of 2^-53 in (0, 1).
        sigma: Standard deviation, in integers.

    Returns:
        int64 tensor.
    """
    return torch.round(torch.special.ndtri(uniforms) * sigma).to(torch.int64)


def rounded_laplace(uniforms: Tensor, scale: float) -> Tensor:
    """Nearest integers to `scale` times the quantile of the Laplace law; |result| <= 36.1 scale + 1.

    Args:
        uniforms: float64 odd multiples of 2^-53 in (0, 1).
        scale: Mean absolute value, in integers.

    Returns:
        int64 tensor.
    """
    tail = torch.minimum(uniforms, 1.0 - uniforms)
    size = torch.log(2.0 * tail) * (-scale)
    return torch.round(torch.where(uniforms < 0.5, -size, size)).to(torch.int64)


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
        """Distance of one released coordinate's law from the exact mechanism's, at most.

        Half the sum over cells of what both ends are off is, at most, the sum over ends: each by 2^-53 plus
        2^-50 |z| f(z). The latter, a lobe on either side, sums to its integral over the step plus twice its
        maximum, below 1/2. Beyond the last end lies less than 2^-52.
        """
        ends = 2.0 * _LARGEST[self.law] * self.scale / self.step + 2.0
        sizes = _MEAN_SIZE[self.law] * self.scale / self.step + 0.5
        return ends * 2.0**-53 + sizes * 2.0**-50 + 2.0**-52

    def add(self, values: Tensor, uniforms: Tensor) -> Tensor:
        """Add noise to integers on the fine grid and round the sums to the coarse one.

        Args:
            values: `(n,)` int64, at most 2^30 in size.
            uniforms: `(n,)` float64 odd multiples of 2^-53 in (0, 1).

        Returns:
            `(n,)` int64 in [-2^(bits - 1), 2^(bits - 1)).
        """
        draw = rounded_gaussian if self.law == "gaussian" else rounded_laplace
        noise = draw(uniforms, self.scale * 2.0**FINE_BITS)
        return (values + noise.to(values.device) + (1 << self.shift >> 1)) >> self.shift


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
