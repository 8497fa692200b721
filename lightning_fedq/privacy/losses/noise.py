"""Losses of added noise in closed form: Gaussian, Laplace, Gaussian of a sample, Poisson cohorts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy import special

from lightning_fedq.functional.divergences import gaussian_epsilon
from lightning_fedq.functional.one_bit.privacy import coin_count_quantile
from lightning_fedq.privacy.losses.loss import Array, Loss, both_sides


@dataclass(frozen=True)
class GaussianLoss(Loss):
    """Loss of the Gaussian mechanism.

    Args:
        noise_multiplier: Standard deviation of the noise over the l2 sensitivity, > 0.
        note: Source of the loss, one line for the report.
    """

    noise_multiplier: float
    note: str = ""

    def curve(self, epsilons: Array) -> Array:
        mu, size = 1.0 / self.noise_multiplier, np.abs(epsilons)
        # Balle and Wang, 2018, theorem 8, with logarithms because far tails underflow
        upper = special.log_ndtr(mu / 2.0 - size / mu)
        lower = special.log_ndtr(-mu / 2.0 - size / mu) + size
        # after rounding, the second term may be the larger one
        return both_sides(epsilons, np.exp(upper) * -np.expm1(np.minimum(lower - upper, 0.0)))

    @property
    def scale(self) -> tuple[float, float]:
        return 1.0 / self.noise_multiplier, math.inf

    @property
    def method(self) -> str:
        return "Gaussian differential privacy, exact"

    def epsilon(self, delta: float, count: int) -> float:
        return gaussian_epsilon(math.sqrt(count) / self.noise_multiplier, delta)

    def composed(self, count: int) -> GaussianLoss:
        """Return the loss of `count` compositions, which is Gaussian with a smaller noise multiplier."""
        return GaussianLoss(self.noise_multiplier / math.sqrt(count), self.note)

    def spread(self, dim: int) -> GaussianLoss:
        """Return the loss of one of `dim` coordinates, where an l2 difference D is D / sqrt(dim)."""
        return GaussianLoss(self.noise_multiplier * math.sqrt(dim), self.note)


@dataclass(frozen=True)
class GaussianSumLoss(GaussianLoss):
    """Loss of a sum to which several clients, the victim among them, add Gaussian noise of equal size.

    Args:
        noise_multiplier: Standard deviation of the total noise over the sensitivity, > 0. It is
            sqrt(num_noises) times that of one client.
        num_noises: Number of clients whose noise the adversary does not know, >= 1.
        note: Source of the loss, one line for the report.
    """

    num_noises: int = 1
    counts_answers: ClassVar[bool] = True

    @classmethod
    def from_noises(cls, noise_multiplier: float, num_noises: int, note: str) -> GaussianLoss:
        """Return the loss of a sum in which each of `num_noises` clients adds noise of `noise_multiplier`.

        The victim's own noise is always in the sum, so fewer than one noise counts as one.
        """
        if num_noises <= 1:
            return GaussianLoss(noise_multiplier, note)
        return cls(noise_multiplier * math.sqrt(num_noises), note, num_noises)

    def _with(self, num_noises: int, reason: str) -> GaussianLoss:
        """Return the loss with another number of noises, and a reason in its note."""
        noise_of_client = self.noise_multiplier / math.sqrt(self.num_noises)
        return self.from_noises(noise_of_client, num_noises, f"{self.note}, {reason}")

    def after_dropouts(
        self, group_sizes: Sequence[int], probability: float, failure: float, num_colluding: int = 0
    ) -> GaussianLoss | None:
        """Return the loss with the noises of the clients that answer.

        At least so many clients answer, except with probability `failure` a round.

        None if the number of other clients that are sure to answer is zero.
        """
        others = coin_count_quantile((1,) * (self.num_noises - 1), probability, failure)
        return self._with(1 + others, "after dropouts") if others else None

    def left_out(self, count: int) -> GaussianLoss:
        return self._with(self.num_noises - count, f"without {count} who are left out")


@dataclass(frozen=True)
class LaplaceLoss(Loss):
    """Loss of the Laplace mechanism.

    Args:
        noise_multiplier: Scale of the noise over the l1 sensitivity, > 0.
        note: Source of the loss, one line for the report.
    """

    noise_multiplier: float
    note: str = ""

    def curve(self, epsilons: Array) -> Array:
        # delta = 1 - e^((e - 1 / b) / 2) up to e = 1 / b
        half = 0.5 * (np.abs(epsilons) - 1.0 / self.noise_multiplier)
        return both_sides(epsilons, np.maximum(-np.expm1(half), 0.0))

    @property
    def pure_epsilon(self) -> float:
        return 1.0 / self.noise_multiplier

    @property
    def scale(self) -> tuple[float, float]:
        return 1.0 / self.noise_multiplier, 1.0 / self.noise_multiplier

    def spread(self, dim: int) -> LaplaceLoss:
        """Return the loss of one of `dim` coordinates, where an l1 difference D is D / dim."""
        return LaplaceLoss(self.noise_multiplier * dim, self.note)


@dataclass(frozen=True)
class SampledGaussianLoss(Loss):
    """Loss of one Gaussian coordinate that takes part with some probability.

    The adversary never observes whether it takes part.

    Args:
        noise_multiplier: Standard deviation over the coordinate's contribution when it takes part, > 0.
        sampling_probability: Probability of taking part, in (0, 1].
        note: Source of the loss, one line for the report.
    """

    noise_multiplier: float
    sampling_probability: float
    note: str = ""

    def _forward(self, values: Array) -> Array:
        """Return the hockey-stick divergence of (1 - g) N(0, z^2) + g N(1, z^2) from N(0, z^2)."""
        z, g = self.noise_multiplier, self.sampling_probability
        odds = (np.expm1(values) + g) / g  # likelihood ratio of the shifted part where the two laws cross
        cut = np.where(odds > 0.0, z * z * np.log(np.maximum(odds, 1e-300)) + 0.5, -np.inf)
        away, near = special.ndtr(-cut / z), special.ndtr((1.0 - cut) / z)
        mixture = (1.0 - g) * away + g * near - np.exp(values) * away
        return np.where(odds > 0.0, mixture, -np.expm1(values))

    def _backward(self, values: Array) -> Array:
        """Return the hockey-stick divergence of N(0, z^2) from (1 - g) N(0, z^2) + g N(1, z^2)."""
        z, g = self.noise_multiplier, self.sampling_probability
        odds = (np.expm1(-values) + g) / g
        cut = np.where(odds > 0.0, z * z * np.log(np.maximum(odds, 1e-300)) + 0.5, -np.inf)
        away, near = special.ndtr(cut / z), special.ndtr((cut - 1.0) / z)
        # the identity 1 - e^x + e^x forward(-x) would lose all digits to the rounding of e^x from x = 40 on
        below: Array = away - np.exp(values) * ((1.0 - g) * away + g * near)
        return below

    def curve(self, epsilons: Array) -> Array:
        # exp overflows beyond 700, and the curve falls, so its value at 700 bounds larger epsilons
        epsilons = np.clip(epsilons, -700.0, 700.0)
        floor = np.maximum(-np.expm1(epsilons), 0.0)
        return np.maximum(np.maximum(self._forward(epsilons), self._backward(epsilons)), floor)

    @property
    def scale(self) -> tuple[float, float]:
        rest = self.sampling_probability * math.sqrt(math.expm1(min(self.noise_multiplier**-2, 50.0)))
        return min(rest, 1.0 / self.noise_multiplier), math.inf


@dataclass(frozen=True)
class PoissonGaussianLoss(Loss):
    """Loss of one round in which a client takes part by a secret random draw, behind a trusted adder's noise.

    The adder releases the sum of the updates of participating clients, each of length at most C, plus N(0,
    std^2 I) in every round. With m = C / std, two updates of one client can be distinguished no better than
    (1 - q) N(0, 1) + q N(m, 1) from (1 - q) N(0, 1) + q N(-m, 1).

    Proof, for std = 1. The other clients' draws are independent of the victim's, so give them to the
    adversary and subtract their updates. Over N(0, I) the densities are P = 1 - q + q L(x, y), and Q with x'
    in place of x, where L(x, y) = exp(<x, y> - |x|^2 / 2). So P - a Q = c + q L(x, y) - a q L(x', y). (i)
    Take a hyperplane through 0 with x and x' on one side, and let s be its reflection. F = c + q L(x, .) and
    g = a q L(x', .) are both larger on that side. Exchanging g(y) and g(s y) therefore does not lower the sum
    of [F - g]_+ over the two points, by convexity. So x' may be reflected until it is -|x'| x / |x|. (ii) In
    one dimension {P > a Q} = {y > tau}. The value is maximal in tau, rises with |x| and falls with P(N > tau
    + |x'|), so both lengths become C. Rounds compose, because their draws are independent.

    The statement does not cover noise that clients add (a missing client removes its noise), a divisor or a
    length that depends on which clients take part, and cohorts of a fixed size. It would be false for them.

    Args:
        noise_multiplier: Standard deviation of the noise over twice the clipping norm, > 0, as in
            `GaussianLoss`.
        chance: Probability q of taking part in a round, in (0, 1].
        note: Source of the loss, one line for the report.

    Raises:
        ValueError: If a number is out of range.

    Examples:
        >>> from lightning_fedq.privacy.accounting import spent
        >>> round(spent(PoissonGaussianLoss(0.5, 0.1), 1e-5, rounds=10).epsilon, 2)
        3.43
    """

    noise_multiplier: float
    chance: float
    note: str = ""

    def __post_init__(self) -> None:
        if not (0.0 < self.noise_multiplier < math.inf and 0.0 < self.chance <= 1.0):
            raise ValueError(
                "Expected noise_multiplier > 0 and chance in (0, 1], "
                f"got {self.noise_multiplier} and {self.chance}"
            )

    def curve(self, epsilons: Array) -> Array:
        # the ratio of the two densities rises with y, so the best test is {y > threshold}
        shift, q = 0.5 / self.noise_multiplier, self.chance
        # the curve falls, so its value at 700 bounds larger epsilons
        size = np.minimum(np.abs(epsilons), 700.0)
        # P is e^size times Q at the outcome y = threshold: with m = 1 / (2 z), c = q e^(-m^2 / 2) and
        # b = (1 - q) (1 - e^-size), u = e^(m y) solves c u^2 - b e^size u - c e^size = 0. So
        # u = e^size (b + sqrt(b^2 + 4 c^2 e^-size)) / (2 c)
        with np.errstate(divide="ignore"):
            log_c, log_b = math.log(q) - 0.5 * shift * shift, np.log1p(-q) + np.log(-np.expm1(-size))
        log_root = 0.5 * np.logaddexp(2.0 * log_b, 2.0 * (math.log(2.0) + log_c) - size)
        threshold = (size + np.logaddexp(log_b, log_root) - math.log(2.0) - log_c) / shift
        # P - e^size Q beyond the threshold: of the rounds with the client, and of those without
        drawn = special.ndtr(shift - threshold) - np.exp(size + special.log_ndtr(-shift - threshold))
        absent = np.exp(special.log_ndtr(-threshold) + size) * -np.expm1(-size)
        return both_sides(epsilons, np.maximum(q * drawn - (1.0 - q) * absent, 0.0))

    @property
    def scale(self) -> tuple[float, float]:
        small = 2.0 * self.chance * math.sqrt(math.sinh(min(0.25 * self.noise_multiplier**-2, 50.0)))
        return min(small, 1.0 / self.noise_multiplier), math.inf
