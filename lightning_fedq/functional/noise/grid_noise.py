"""Gaussian and Laplace noise on a grid: integers in, integers out, and how far the sampler is from the law.

Values are integers on a fine grid of 2^-30 units (the caller's unit is its clipping bound). Adding
round(noise) to an integer is post-processing of the exact mechanism on integer inputs, so the low bits of
floats can't leak anything. The sum is then rounded to a coarse grid, again post-processing, whose
step is 1/16 to 1/8 of the noise: fewer bits on the wire, and fewer cells in which sampler and law can differ.

Noise comes from the quantile function of a tail in float64, on either side, so that far tails are as finely
resolved as the centre. A tail is an odd multiple of 2^-65; below 2^-11, where that would be too coarse for
53 significant bits, a second word makes it one of 2^-129. The distribution function at z is off by

* at most 2^-129, the finer grid of tails, which sums to `GridNoise.total_variation`;
* |z| f(z) times 2^-50 (Gaussian) or 2^-51 (Laplace): the relative error of the quantile, 2^-50.8 and 2^-52.8
  as measured against 40 digits down to the smallest tail, and of its product with the scale, 2^-53;
* 2^-51 times the tail: 2^-65 is at most 2^-54 of a tail above 2^-11, two roundings are 2^-53 of it each.

The last two change the probability of every coarse cell by a factor within e^(+-`GridNoise.log_ratio`).

A sum too far out for its symbol becomes the last symbol, which is post-processing again. That takes noise of
more than 9.16 standard deviations or 44.4 mean absolute values: a chance below 2^-64.

References:
    Mironov, On Significance of the Least Significant Bits for Differential Privacy, CCS 2012, for the fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = Callable[[int], NDArray[np.uint64]]

FINE_BITS = 30
_LARGEST = {"gaussian": 13.11, "laplace": 88.73}
"""No noise is larger, in scales: the quantiles at 2^-129."""
_SENT = {"gaussian": 9.16, "laplace": 44.4}
"""Noise that every symbol can hold, in scales: the quantiles at 2^-65."""
_SECOND_WORD_BELOW = np.uint64(1 << 53)
_LOG_RATIO = {"gaussian": 2.0**-41, "laplace": 2.0**-39}
_STEPS_PER_SCALE = 8


def signed_tails(count: int, words64: Words) -> tuple[Tensor, Tensor]:
    """Draw tail probabilities and sides. Larger words lie further to the right.

    With k the number of words between a word and the nearer end, the tail is (k + 1/2) 2^-64. Where
    k < 2^53, which one word in 2^10 has, it is (k + (j + 1/2) 2^-64) 2^-64; these second words j are read
    after all first ones. What is read depends on the stream alone, never on data.

    Args:
        words64: Gives the next uniform 64-bit words of a stream, as many as it is asked for.

    Returns:
        `(count,)` float64 in [2^-129, 1/2], and `(count,)` bool: is it the right tail?
    """
    words = words64(count)
    others = ~words  # 2^64 - 1 - word: what lies between a word and the upper end
    nearer = np.minimum(words, others)
    tails = nearer.astype(np.float64) + 0.5
    few = np.flatnonzero(nearer < _SECOND_WORD_BELOW)
    tails[few] = nearer[few].astype(np.float64) + (words64(len(few)).astype(np.float64) + 0.5) * 2.0**-64
    return torch.from_numpy(tails * 2.0**-64), torch.from_numpy(words > others)


def quantile(law: str, tails: Tensor) -> Tensor:
    """Quantiles of a law of scale 1 at tails up to 1/2, so that none is positive. float64.

    Example:
        >>> quantile("gaussian", torch.tensor([0.025], dtype=torch.float64))
        tensor([-1.9600], dtype=torch.float64)
    """
    return torch.special.ndtri(tails) if law == "gaussian" else torch.log(2.0 * tails)


def rounded_noise(law: str, scale: float, count: int, words64: Words) -> Tensor:
    """Nearest integers to `scale` times a variable of a law of scale 1.

    They are at most 13.11 (Gaussian) or 88.73 (Laplace) times the scale, and 1.

    Args:
        law: "gaussian" or "laplace".
        scale: Standard deviation (Gaussian) or mean absolute value (Laplace), in integers.
        count: Number of draws.
        words64: Source of uniform 64-bit words, as for `signed_tails`.

    Returns:
        `(count,)` int64.
    """
    tails, right = signed_tails(count, words64)
    below = torch.round(quantile(law, tails) * scale).to(torch.int64)
    return torch.where(right, -below, below)  # integers are mirrored: both sides have one law


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
        """Width of a signed symbol, for a clipped value and all noise but 2^-64 of it."""
        largest = (1.0 + _SENT[self.law] * self.scale) / self.step + 2.0
        return math.ceil(math.log2(largest + 1.0)) + 1

    @property
    def variance(self) -> float:
        """Upper bound on the variance of a released coordinate, rounding included, in squared bounds."""
        exact = self.scale**2 if self.law == "gaussian" else 2.0 * self.scale**2
        return exact + self.step**2 / 4.0

    @property
    def total_variation(self) -> float:
        """Distance of one released coordinate's law from the exact mechanism's, at most, `log_ratio` aside.

        Half the sum over cells of what both ends are off is the sum over ends, each off by 2^-129; beyond
        the last one lies less than 2^-128.
        """
        ends = 2.0 * _LARGEST[self.law] * self.scale / self.step + 2.0
        return ends * 2.0**-129 + 2.0**-128

    @property
    def log_ratio(self) -> float:
        """Largest |ln| of the ratio that the float errors make in any cell's probability.

        A cell from a to a + h, 1/16 <= h <= 1/8 in scales, has at least f(a) (1 - e^(-a h)) / a e^(-h^2 / 2)
        (Gaussian) or f(a) (1 - e^-h) (Laplace), and its ends are off by 2^-50 or 2^-51 of z f(z) and 2^-51 of
        the tail each: less than 2^-41 of it for a up to 13.11 (Gaussian), 2^-39 for a up to 88.73 (Laplace).
        """
        return _LOG_RATIO[self.law]

    @property
    def clipped(self) -> float:
        """Chance that Gaussian noise is cut off by the symbol's width, at most."""
        room = ((1 << self.bits - 1) - 2) * self.step - 1.0
        return 1.001 * math.erfc(room / self.scale * math.sqrt(0.5))  # erfc is not exact to the last digits

    def add(self, values: Tensor, words64: Words) -> Tensor:
        """Add noise to integers on the fine grid, round the sums to the coarse one and cut them to `bits`.

        Args:
            values: `(n,)` int64, at most 2^30 in size.
            words64: Source of uniform 64-bit words, as for `signed_tails`.

        Returns:
            `(n,)` int64 in [-2^(bits - 1), 2^(bits - 1)).
        """
        noise = rounded_noise(self.law, self.scale * 2.0**FINE_BITS, len(values), words64)
        # below 2^57 at a scale of 1e6; >> rounds down, so half a step makes it the nearest
        sums = (values + noise + (1 << self.shift >> 1)) >> self.shift
        return sums.clamp_(-(1 << self.bits - 1), (1 << self.bits - 1) - 1)


@lru_cache(maxsize=256)
def analytic_gaussian_multiplier(epsilon: float, delta: float) -> float:
    """Smallest std / sensitivity for which the Gaussian mechanism is (epsilon, delta)-DP, rounded up.

    It solves Phi(1/(2s) - epsilon s) - e^epsilon Phi(-1/(2s) - epsilon s) = delta by bisection.

    Args:
        epsilon: > 0, in nats.
        delta: In (0, 1).

    References:
        Balle, Wang, Improving the Gaussian Mechanism for Differential Privacy, ICML 2018, Theorem 8.

    Example:
        >>> round(analytic_gaussian_multiplier(1.0, 1e-5), 3)
        3.731
    """

    def spent(s: float) -> float:
        ends = torch.tensor([0.5 / s - epsilon * s, -0.5 / s - epsilon * s], dtype=torch.float64)
        first, second = torch.special.log_ndtr(ends).tolist()  # Phi itself is 0 where e^epsilon is large
        return math.exp(first) - math.exp(epsilon + second)

    low, high = 1e-9, 1.0
    while spent(high) > delta:
        high *= 2.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high
