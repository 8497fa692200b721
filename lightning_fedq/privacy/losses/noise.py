"""Losses of added noise, by their closed curves: Gaussian, Laplace, Gaussian of a sample, Poisson cohorts."""

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
    """The Gaussian mechanism with `noise_multiplier` = std / l2 sensitivity, > 0."""

    noise_multiplier: float
    note: str = ""

    def curve(self, epsilons: Array) -> Array:
        mu, size = 1.0 / self.noise_multiplier, np.abs(epsilons)
        # Balle and Wang, 2018, theorem 8; in logs, as far tails underflow
        upper = special.log_ndtr(mu / 2.0 - size / mu)
        lower = special.log_ndtr(-mu / 2.0 - size / mu) + size
        # rounding may make the second term the larger one
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
        """Many Gaussian losses are one."""
        return GaussianLoss(self.noise_multiplier / math.sqrt(count), self.note)

    def spread(self, dim: int) -> GaussianLoss:
        """An l2 difference D is D / sqrt(dim) in each coordinate."""
        return GaussianLoss(self.noise_multiplier * math.sqrt(dim), self.note)


@dataclass(frozen=True)
class GaussianSumLoss(GaussianLoss):
    """A sum to which several clients add Gaussian noise of one size each, the victim among them.

    Args:
        noise_multiplier: Std of all of it over the sensitivity, > 0: sqrt(num_noises) times one client's.
        num_noises: Clients whose noise the adversary does not know, >= 1.
    """

    num_noises: int = 1
    counts_answers: ClassVar[bool] = True

    @classmethod
    def from_noises(cls, noise_multiplier: float, num_noises: int, note: str) -> GaussianLoss:
        """The loss of clients that add `noise_multiplier` each. The victim's own noise is always there."""
        if num_noises <= 1:
            return GaussianLoss(noise_multiplier, note)
        return cls(noise_multiplier * math.sqrt(num_noises), note, num_noises)

    def _with(self, num_noises: int, reason: str) -> GaussianLoss:
        one = self.noise_multiplier / math.sqrt(self.num_noises)
        return self.from_noises(one, num_noises, f"{self.note}, {reason}")

    def after_dropouts(
        self, group_sizes: Sequence[int], probability: float, failure: float, num_corrupt: int = 0
    ) -> GaussianLoss | None:
        """Less noise: except with probability `failure` a round, so many others answer. None if none may."""
        others = coin_count_quantile((1,) * (self.num_noises - 1), probability, failure)
        return self._with(1 + others, "after dropouts") if others else None

    def left_out(self, count: int) -> GaussianLoss:
        return self._with(self.num_noises - count, f"without {count} who are left out")


@dataclass(frozen=True)
class LaplaceLoss(Loss):
    """The Laplace mechanism with `noise_multiplier` = scale / l1 sensitivity, > 0."""

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
        """An l1 difference D is D / dim in each coordinate."""
        return LaplaceLoss(self.noise_multiplier * dim, self.note)


@dataclass(frozen=True)
class SampledGaussianLoss(Loss):
    """One Gaussian coordinate that takes part with some probability, by a coin that the adversary never sees.

    Args:
        noise_multiplier: Std over the coordinate's contribution when it takes part, > 0.
        sampling_probability: In (0, 1].
    """

    noise_multiplier: float
    sampling_probability: float
    note: str = ""

    def _forward(self, values: Array) -> Array:
        """Hockey stick of (1 - g) N(0, z^2) + g N(1, z^2) over N(0, z^2)."""
        z, g = self.noise_multiplier, self.sampling_probability
        odds = (np.expm1(values) + g) / g  # likelihood ratio of the shifted part where the two laws cross
        cut = np.where(odds > 0.0, z * z * np.log(np.maximum(odds, 1e-300)) + 0.5, -np.inf)
        away, near = special.ndtr(-cut / z), special.ndtr((1.0 - cut) / z)
        mixture = (1.0 - g) * away + g * near - np.exp(values) * away
        return np.where(odds > 0.0, mixture, -np.expm1(values))

    def _backward(self, values: Array) -> Array:
        """Hockey stick of N(0, z^2) over (1 - g) N(0, z^2) + g N(1, z^2)."""
        z, g = self.noise_multiplier, self.sampling_probability
        odds = (np.expm1(-values) + g) / g
        cut = np.where(odds > 0.0, z * z * np.log(np.maximum(odds, 1e-300)) + 0.5, -np.inf)
        away, near = special.ndtr(cut / z), special.ndtr((cut - 1.0) / z)
        # as 1 - e^x + e^x forward(-x) it would be the rounding of e^x, any number at all from x = 40 on
        below: Array = away - np.exp(values) * ((1.0 - g) * away + g * near)
        return below

    def curve(self, epsilons: Array) -> Array:
        # the larger of both orders
        # exp overflows beyond; the curve falls, so its value there is an upper bound
        epsilons = np.clip(epsilons, -700.0, 700.0)
        floor = np.maximum(-np.expm1(epsilons), 0.0)
        return np.maximum(np.maximum(self._forward(epsilons), self._backward(epsilons)), floor)

    @property
    def scale(self) -> tuple[float, float]:
        rest = self.sampling_probability * math.sqrt(math.expm1(min(self.noise_multiplier**-2, 50.0)))
        return min(rest, 1.0 / self.noise_multiplier), math.inf


@dataclass(frozen=True)
class PoissonGaussianLoss(Loss):
    """One round of a client that takes part by a secret coin of its own, behind a trusted adder's noise.

    What is released is the sum of those who take part, each at most C long, and N(0, std^2 I), whoever is
    there. With m = C / std two updates are told apart no better than (1 - q) N(0, 1) + q N(m, 1) from (1 - q)
    N(0, 1) + q N(-m, 1).

    Proof, std = 1. Others' coins are independent of hers: give them to the adversary and subtract what they
    send. Over N(0, I) the densities are P = 1 - q + q L(x, y) and Q with x', for L(x, y) = exp(<x, y> -
    |x|^2 / 2), so P - a Q = c + q L(x, y) - a q L(x', y). (i) Let a hyperplane through 0 have x and x' on one
    side, s its reflection. F = c + q L(x, .) and g = a q L(x', .) are both larger on that side, so exchanging
    g(y) and g(s y) does not lower the sum of [F - g]_+ over the two, by convexity: x' may be reflected until
    it is -|x'| x / |x|. (ii) In one dimension {P > a Q} = {y > tau}; the value is maximal in tau, rises with
    |x| and falls with P(N > tau + |x'|): both lengths become C. Rounds compose: their coins are independent.

    Not covered, and false: noise of the clients (one who is missing takes it away), a divisor or a length
    that follows who is there, cohorts of a fixed size.

    Args:
        noise_multiplier: Std of the noise over twice the clip, > 0, as in `GaussianLoss`.
        chance: Chance q of taking part in a round, in (0, 1].

    Raises:
        ValueError: If a number is out of range.

    Example:
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
                "noise_multiplier > 0 and a chance in (0, 1] are needed, "
                f"got {self.noise_multiplier} and {self.chance}"
            )

    def curve(self, epsilons: Array) -> Array:
        # the ratio of the two laws rises in y, so the best test is a tail of it
        m, q = 0.5 / self.noise_multiplier, self.chance
        e = np.minimum(np.abs(epsilons), 700.0)  # the curve falls: beyond, its value there is above it
        with np.errstate(divide="ignore"):
            # u = e^(m y) solves c u^2 - (1 - q) (e^e - 1) u - c e^e = 0, c = q e^(-m^2 / 2)
            log_c, log_b = math.log(q) - 0.5 * m * m, np.log1p(-q) + np.log(-np.expm1(-e))
        # b = (1 - q) (1 - e^-e): e^e is taken out of the root, and comes back in y
        log_root = 0.5 * np.logaddexp(2.0 * log_b, 2.0 * (math.log(2.0) + log_c) - e)
        y = (e + np.logaddexp(log_b, log_root) - math.log(2.0) - log_c) / m
        there = special.ndtr(m - y) - np.exp(e + special.log_ndtr(-m - y))
        away = np.exp(special.log_ndtr(-y) + e) * -np.expm1(-e)
        return both_sides(epsilons, np.maximum(q * there - (1.0 - q) * away, 0.0))

    @property
    def scale(self) -> tuple[float, float]:
        small = 2.0 * self.chance * math.sqrt(math.sinh(min(0.25 * self.noise_multiplier**-2, 50.0)))
        return min(small, 1.0 / self.noise_multiplier), math.inf
