"""Gaussian and Laplace noise on a grid of integers, with a bound on the sampler's distance from the law.

Values are integers on a fine grid of 2^-30 units, where a unit is the caller's clipping bound. Adding
round(noise) to an integer is post-processing of the exact mechanism on integer inputs, so the low bits of
floats can't leak information. The sum is then rounded to a coarse grid, which is also post-processing. The
coarse step is 1/16 to 1/8 of the noise. It needs fewer bits on the wire, and has fewer cells in which sampler
and law can differ.

Noise is the float64 quantile of a tail probability on either side, so far tails are resolved as finely as the
centre. A tail is an odd multiple of 2^-65. Below 2^-11 this would be too coarse for 53 significant bits, so a
second word makes the tail an odd multiple of 2^-129. The distribution function at z has three errors:

* At most 2^-129, from the finer grid of tails. Over all cells it sums to `GridNoise.total_variation`.
* |z| f(z) times 2^-50 (Gaussian) or 2^-51 (Laplace). The relative error of the quantile is 2^-50.8 and
  2^-52.8, measured against 40 digits down to the smallest tail. The product with the scale adds 2^-53.
* 2^-51 times the tail. 2^-65 is at most 2^-54 of a tail above 2^-11, and each of two roundings adds 2^-53.

The last two change the probability of every coarse cell by a factor within e^(+-`GridNoise.log_ratio`).

A sum that exceeds the range of symbols becomes the last symbol, which is also post-processing. This takes
noise of more than 9.16 standard deviations or 44.4 mean absolute values, with a probability below 2^-64.

References:
    Mironov, On Significance of the Least Significant Bits for Differential Privacy, CCS 2012, for the leak.
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
"""Largest possible noise in scales: the quantiles at 2^-129."""
_SENT = {"gaussian": 9.16, "laplace": 44.4}
"""Largest noise in scales for which symbols have room: the quantiles at 2^-65."""
_SECOND_WORD_BELOW = np.uint64(1 << 53)
_LOG_RATIO = {"gaussian": 2.0**-41, "laplace": 2.0**-39}
_STEPS_PER_SCALE = 8


def signed_tails(count: int, words64: Words) -> tuple[Tensor, Tensor]:
    """Draw tail probabilities and sides. Larger words are further to the right.

    Let k be the number of words between a word and the nearer end of the range of words. The tail is
    (k + 1/2) 2^-64. For one word in 2^10, k < 2^53, and a second word j makes the tail
    (k + (j + 1/2) 2^-64) 2^-64. Second words are read after all first words. The number of words read depends
    only on the stream, never on data.

    Args:
        count: Number of draws.
        words64: Function that returns the next uniform 64-bit words of a stream, given their number.

    Returns:
        Tails, `(count,)` float64 in [2^-129, 1/2], and whether each is a right tail, `(count,)` bool.
    """
    words = words64(count)
    others = ~words  # 2^64 - 1 - word, the number of words between a word and the upper end
    nearer = np.minimum(words, others)
    tails = nearer.astype(np.float64) + 0.5
    few = np.flatnonzero(nearer < _SECOND_WORD_BELOW)
    tails[few] = nearer[few].astype(np.float64) + (words64(len(few)).astype(np.float64) + 0.5) * 2.0**-64
    return torch.from_numpy(tails * 2.0**-64), torch.from_numpy(words > others)


def quantile(law: str, tails: Tensor) -> Tensor:
    """Return the float64 quantiles, which are at most 0, of a law of scale 1 at left tails up to 1/2.

    Examples:
        >>> quantile("gaussian", torch.tensor([0.025], dtype=torch.float64))
        tensor([-1.9600], dtype=torch.float64)
    """
    return torch.special.ndtri(tails) if law == "gaussian" else torch.log(2.0 * tails)


def rounded_noise(law: str, scale: float, count: int, words64: Words) -> Tensor:
    """Draw integers: `scale` times a variable of a law of scale 1, rounded to the nearest integer.

    Their size is at most 13.11 (Gaussian) or 88.73 (Laplace) times the scale, plus 1.

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
    return torch.where(right, -below, below)  # mirroring integers gives both sides the same law


@dataclass(frozen=True)
class GridNoise:
    """Noise law with its fine and coarse grid.

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
                f"the noise must be between 1e-6 and 1e6 clipping bounds, got {self.scale}. Smaller noise "
                "protects nobody (use FedAvg), larger noise leaves no signal (loosen the budget)."
            )

    @property
    def shift(self) -> int:
        """Number of low bits that are dropped from the fine grid after the noise is added."""
        return math.floor(math.log2(self.scale * 2.0**FINE_BITS / _STEPS_PER_SCALE))

    @property
    def step(self) -> float:
        """Step of the coarse grid, in clipping bounds."""
        return 2.0 ** (self.shift - FINE_BITS)

    @property
    def bits(self) -> int:
        """Width of a signed symbol. A clipped value plus noise exceeds it with probability below 2^-64."""
        largest = (1.0 + _SENT[self.law] * self.scale) / self.step + 2.0
        return math.ceil(math.log2(largest + 1.0)) + 1

    @property
    def variance(self) -> float:
        """Upper bound on the variance of a released coordinate, rounding included, in squared bounds."""
        exact = self.scale**2 if self.law == "gaussian" else 2.0 * self.scale**2
        return exact + self.step**2 / 4.0

    @property
    def total_variation(self) -> float:
        """Bound on the distance of a released coordinate's law from the exact mechanism, next to `log_ratio`.

        Each end of a cell has an error of 2^-129. The distance is half the sum over cells of the errors at
        both ends, which is the sum over ends. The mass beyond the last end is below 2^-128.
        """
        ends = 2.0 * _LARGEST[self.law] * self.scale / self.step + 2.0
        return ends * 2.0**-129 + 2.0**-128

    @property
    def log_ratio(self) -> float:
        """Bound on |ln| of the factor by which float errors change the probability of any cell.

        Take a cell from a to a + h, with 1/16 <= h <= 1/8 in scales. Its probability is at least
        f(a) (1 - e^(-a h)) / a e^(-h^2 / 2) (Gaussian) or f(a) (1 - e^-h) (Laplace). Each end has an error of
        2^-50 or 2^-51 times z f(z), and 2^-51 times the tail. This is less than 2^-41 of the probability for
        a up to 13.11 (Gaussian), and less than 2^-39 for a up to 88.73 (Laplace).
        """
        return _LOG_RATIO[self.law]

    @property
    def clipped(self) -> float:
        """Chance that Gaussian noise is cut off by the symbol's width, at most."""
        room = ((1 << self.bits - 1) - 2) * self.step - 1.0
        return 1.001 * math.erfc(room / self.scale * math.sqrt(0.5))  # erfc is not exact to the last digits

    def add(self, values: Tensor, words64: Words) -> Tensor:
        """Add noise to integers on the fine grid, round the sums to the coarse grid and clamp them to `bits`.

        Args:
            values: Integers of at most 2^30 in size, `(n,)` int64.
            words64: Source of uniform 64-bit words, as for `signed_tails`.

        Returns:
            `(n,)` int64 in [-2^(bits - 1), 2^(bits - 1)).
        """
        noise = rounded_noise(self.law, self.scale * 2.0**FINE_BITS, len(values), words64)
        # sums are below 2^57 at a scale of 1e6. >> rounds down, so half a step is added to round to nearest
        sums = (values + noise + (1 << self.shift >> 1)) >> self.shift
        return sums.clamp_(-(1 << self.bits - 1), (1 << self.bits - 1) - 1)


@lru_cache(maxsize=256)
def analytic_gaussian_multiplier(epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier with which the Gaussian mechanism is (epsilon, delta)-DP.

    The multiplier s = std / sensitivity is rounded up. It solves
    Phi(1/(2s) - epsilon s) - e^epsilon Phi(-1/(2s) - epsilon s) = delta by bisection.

    Args:
        epsilon: Target epsilon > 0, in nats.
        delta: Target delta in (0, 1).

    References:
        Balle, Wang, Improving the Gaussian Mechanism for Differential Privacy, ICML 2018, Theorem 8.

    Examples:
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
