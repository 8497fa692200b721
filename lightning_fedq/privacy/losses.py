"""Privacy losses: what a claim says about one composition, as accountants need it.

`Loss` is the interface. Every accountant, report and audit asks a loss through it and knows no kind by name,
so that a new kind is one class in one file, anywhere: a subclass with a privacy curve (`curve`), or a
`RenyiLoss` where a bound on Renyi divergences is all that is known. What a kind knows better than the
defaults it overrides: closed forms over many compositions, infinite mass, a pure epsilon, what dropouts
change. The file is long because it holds all kinds that ship, side by side.

The curve of a claim is the largest of the curves of its pairs, in both orders, at every epsilon; a maximum of
convex curves is the curve of some pair again, and that pair dominates every case.

A loss of Renyi divergences has no curve of its own, only bounds on it, one per order (`bounds_only`). Their
minimum is no hockey-stick curve, because it is not convex in e^epsilon; the true curve is, so it lies below
the lower convex hull of the bounds too, and that hull is what accountants put on a grid. Composing such grids
is sound but loose: divergences are added up first (`composed`, `plus`).

References:
    Canonne, Kamath, Steinke, The Discrete Gaussian for Differential Privacy, 2020, proposition 12 (from Renyi
    divergences to epsilon and delta).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from lightning_fedq.functional.divergences import (
    gaussian_epsilon,
    gaussian_mu,
    hockey_stick,
    randomized_response_epsilon,
)
from lightning_fedq.functional.one_bit.privacy import coin_count_quantile, coin_splits, coin_sum_pmf

Array = NDArray[np.float64]
Law = tuple[Array, Array, float]

_AIM = 8.0
"""The epsilon that advice aims at: above it a guarantee is hardly one."""


def composed_mass(mass: float, count: float) -> float:
    """Chance that an event of probability `mass` occurs at least once in `count` trials."""
    return -math.expm1(count * math.log1p(-mass)) if mass < 1.0 else 1.0


class Loss(ABC):
    """The privacy loss of one composition, worst over inputs and over both orders of the two worlds.

    Children are frozen, hashable values. `curve` is all that a new kind must define.

    Attributes:
        note: Where the loss comes from, one line for the report.
        bounds_only: Is `curve` a bound without the convexity of a hockey-stick curve? Then a grid takes its
            lower hull.
        every_round: Are rounds without the client charged as if it had been there? Renyi losses do, so that
            they add up in closed form.
        counts_answers: Does the loss rest on how many clients answer, as `after_dropouts` and `left_out` say?
    """

    note: str
    bounds_only: ClassVar[bool] = False
    every_round: ClassVar[bool] = False
    counts_answers: ClassVar[bool] = False

    @abstractmethod
    def curve(self, epsilons: Array) -> Array:
        """delta of one composition, or an upper bound, at every epsilon, worst over cases and both orders.

        Args:
            epsilons: `(m,)` any real numbers in ascending order, in nats.

        Returns:
            `(m,)` float64, falling, at least max(0, 1 - e^epsilon).
        """

    @property
    def infinite_mass(self) -> float:
        """Largest probability of an outcome that only one of the two worlds can produce."""
        return 0.0

    @property
    def pure_epsilon(self) -> float:
        """The largest loss. Infinite where there is infinite mass or an unbounded density."""
        return math.inf

    @property
    def scale(self) -> tuple[float, float]:
        """About the root mean square of the loss, and its largest finite value: they set the grid's step.

        The default finds where the curve has fallen to a tenth, which is 0.9 standard deviations for a small
        Gaussian loss. A bad guess costs precision toward more privacy, never soundness.
        """
        top = self.pure_epsilon
        if top == 0.0:
            return 0.0, 0.0
        low, high = -30.0, 6.0  # logs of epsilon
        aim = 0.1 * float(self.curve(np.zeros(1))[0])
        for _ in range(50):
            middle = 0.5 * (low + high)
            above = float(self.curve(np.array([math.exp(middle)]))[0]) > aim
            low, high = (middle, high) if above else (low, middle)
        return min(math.exp(high), top), top

    @property
    def method(self) -> str:
        """Name of the closed form of `epsilon`.

        "" where there is none, and a grid is used.
        """
        return ""

    def epsilon(self, delta: float, count: int) -> float:
        """Epsilon of `count` compositions at `delta` in closed form. Asked only where there is a `method`."""
        raise NotImplementedError(f"{type(self).__name__} names a method, but has no closed form")

    def divergence(self, order: float) -> float:
        """A bound on the Renyi divergence of an order > 1, both ways round. Infinite where none is known."""
        return math.inf

    def composed(self, count: int) -> Loss | None:
        """`count` compositions as one loss of this kind. None where that is not of this kind."""
        return None

    def plus(self, other: Loss) -> Loss | None:
        """This loss and an independent other one, as one loss. None where there is no closed form."""
        return None

    def spread(self, dim: int) -> Loss:
        """The loss of one coordinate, where `dim` coordinates differ equally and have independent noise.

        If every coordinate lost more than this, the whole vector would lose more than this loss.

        Raises:
            TypeError: If it is not known how the loss divides.
        """
        raise TypeError(f"a {type(self).__name__} of a whole vector can't be divided over its coordinates")

    def after_dropouts(
        self, group_sizes: Sequence[int], probability: float, failure: float, num_corrupt: int = 0
    ) -> Loss | None:
        """The loss when clients of a sum may not answer. None where it needs every answer.

        Args:
            group_sizes: Sizes of all groups of the round.
            probability: Chance that a client does not answer, independent of everything, caused by nobody.
            failure: Probability that goes to delta, per round.
            num_corrupt: Clients that tell the server all they know.
        """
        return None

    def left_out(self, count: int) -> Loss | None:
        """The loss when a lying server leaves `count` honest clients, of its choice, out of a sum.

        None where it needs every answer.
        """
        return None

    def advice(self, steps: float, delta: float) -> str:
        """Setting that would bring `steps` compositions to a useful epsilon at `delta`, in words.

        "" if unknown.
        """
        return ""


@dataclass(frozen=True)
class NonPrivate(Loss):
    """No guarantee against this adversary, with the reason in words. There is nothing to add up."""

    reason: str
    note: str = ""

    def curve(self, epsilons: Array) -> Array:
        """Refused.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"there is no guarantee to account for: {self.reason}")

    @property
    def infinite_mass(self) -> float:
        """Refused, as `curve` is."""
        raise ValueError(f"there is no guarantee to account for: {self.reason}")


# ---- laws of few outcomes ---------------------------------------------------------------------------------


class _OfPairs(Loss):
    """A loss dominated by the worst of some pairs of pmfs, each with a chance that the worlds differ."""

    def _laws(self) -> Iterator[Law]:
        """All (P, Q, weight), in both orders."""
        raise NotImplementedError

    def curve(self, epsilons: Array) -> Array:
        """See `Loss.curve`. Exact for the pmfs given."""
        worst = -np.expm1(np.minimum(epsilons, 0.0))
        floor = worst.copy()
        for p, q, weight in self._laws():
            worst = np.maximum(worst, weight * hockey_stick(p, q, epsilons) + (1.0 - weight) * floor)
        return worst

    @cached_property
    def _extremes(self) -> tuple[float, float, float, float]:
        """Infinite mass, largest loss, root mean square and size of the finite losses."""
        found = [(weight * float(p[q <= 0].sum()), *_largest(p, q)) for p, q, weight in self._laws()]
        mass, pure, std, top = (max(column) for column in zip(*found, strict=True))
        return mass, pure, std, top

    @property
    def infinite_mass(self) -> float:
        """See `Loss.infinite_mass`."""
        return self._extremes[0]

    @property
    def pure_epsilon(self) -> float:
        """See `Loss.pure_epsilon`."""
        return self._extremes[1]

    @property
    def scale(self) -> tuple[float, float]:
        """See `Loss.scale`."""
        return self._extremes[2:]


def _largest(p: Array, q: Array) -> tuple[float, float, float]:
    """Largest loss, and root mean square and largest absolute value of the finite ones."""
    both = (p > 0) & (q > 0)
    losses = np.log(p[both] / q[both])
    pure = math.inf if bool((q[p > 0] <= 0).any()) else float(losses.max())
    if not losses.size:
        return pure, 0.0, 0.0
    return pure, math.sqrt(float(p[both] @ losses**2)), float(np.abs(losses).max())


@dataclass(frozen=True)
class PmfPairs(_OfPairs):
    """A loss dominated, at every epsilon, by the worst of some pairs of probability mass functions.

    Args:
        pairs: `(p, q)` pairs, both orders listed where they differ; each p and q sums to 1.
        note: Where the pairs come from, one line for the report.
    """

    pairs: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]
    note: str = ""

    def _laws(self) -> Iterator[Law]:
        for pair in self.pairs:
            p, q = np.array(pair[0]), np.array(pair[1])
            yield p, q, 1.0
            yield q, p, 1.0

    @property
    def _response_level(self) -> float | None:
        """Level of a randomised response, if the loss is one."""
        if len(self.pairs) == 1:
            p, q = self.pairs[0]
            if len(p) == 2 and p == q[::-1] and min(p) > 0.0:
                return abs(math.log(p[0] / p[1]))
        return None

    @property
    def method(self) -> str:
        """A randomised response has a closed form."""
        return "" if self._response_level is None else "exact binomial composition"

    def epsilon(self, delta: float, count: int) -> float:
        """See `Loss.epsilon`."""
        level = self._response_level
        assert level is not None
        return randomized_response_epsilon(level, count, delta)

    def advice(self, steps: float, delta: float) -> str:
        """See `Loss.advice`. By the rule of thumb that many small losses add up to a Gaussian one."""
        if composed_mass(self.infinite_mass, steps) > delta:
            return ""
        level = gaussian_mu(_AIM, delta) / math.sqrt(steps)
        return f"an epsilon of about {level:.2g} a loss would bring it to about {_AIM:g}"


@dataclass(frozen=True)
class HiddenPair:
    """Two laws of one group's part of a sum, to be hidden by `num_coins` independent coins of other clients.

    Args:
        p: Pmf on {0, 1, ...} in one world; both orders of (p, q) are meant.
        q: Pmf in the other world, of the same length.
        num_coins: Independent coins added to it, >= 0.
        weight: Chance in (0, 1] that the two worlds differ at all, if the adversary learns whether they do.
    """

    p: tuple[float, ...]
    q: tuple[float, ...]
    num_coins: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.num_coins < 0 or not 0.0 < self.weight <= 1.0 or len(self.p) != len(self.q):
            raise ValueError(
                f"a hidden pair needs num_coins >= 0, weight in (0, 1] and pmfs of one length, got {self}"
            )

    def laws(self, low: float, high: float) -> Iterator[Law]:
        """(P, Q, weight) of the sum in both orders, for all splits of the other coins.

        Where zeros and ones exchanged turn a low coin into a high one, and one world into the other or both
        into themselves, a split and its mirror image show the same, and half of the splits are enough.
        """
        mirrored = {self.p[::-1], self.q[::-1]} == {self.p, self.q}
        most = (self.num_coins + 1) // 2 if mirrored else self.num_coins
        for num_coins, num_high in coin_splits(self.num_coins):
            if num_high > most:
                break
            noise = coin_sum_pmf(num_coins, num_high, low, high)
            p, q = np.convolve(noise, self.p), np.convolve(noise, self.q)
            yield p, q, self.weight
            yield q, p, self.weight


@dataclass(frozen=True)
class CoinSum(_OfPairs):
    """Loss of a sum of bits: the worst of some pairs, each with independent coins on top.

    Every coin is a one with some probability in [low, high] that the adversary picks, so the loss is
    the worst over 0 <= j <= num_coins of Binomial(j, high) + Binomial(num_coins - j, low). Beyond 400 coins
    splits are bounded in stretches (`coin_splits`), so that this is a certificate for any number of coins.

    Args:
        low: Smallest probability of a one, in (0, 1/2).
        high: Largest, 1 - low.
        victims: One pair for every place that the victim may have in the round.
        note: Where the pairs come from, one line for the report.

    Raises:
        ValueError: If low is not in (0, 1/2), or high is not 1 - low.
    """

    low: float
    high: float
    victims: tuple[HiddenPair, ...]
    note: str = ""
    counts_answers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 < self.low < 0.5 or abs(self.low + self.high - 1.0) > 1e-12:
            raise ValueError(
                f"a sum of coins needs low in (0, 1/2) and high = 1 - low, got {self.low} and {self.high}"
            )

    def _laws(self) -> Iterator[Law]:
        for victim in self.victims:
            yield from victim.laws(self.low, self.high)

    def after_dropouts(
        self, group_sizes: Sequence[int], probability: float, failure: float, num_corrupt: int = 0
    ) -> CoinSum:
        """Fewer coins hide the victim: except with probability `failure` a round, at least so many answer.

        A victim whose partner dropped out is a lone coin itself, so that place is added. A coin of a group of
        colluding clients hides nobody.
        """
        groups = [size for size in group_sizes if size > 1]
        # the victim's group and a curious client's do not count; which they are is unknown, so the best go
        groups.sort(key=lambda size: size * probability ** (size - 1), reverse=True)
        others = tuple(groups[1 + max(num_corrupt, 1) :])
        victims = [
            replace(
                victim,
                num_coins=coin_count_quantile((1,) * victim.num_coins + others, probability, failure),
            )
            for victim in self.victims
        ]
        fewest = min(victim.num_coins for victim in victims)
        alone = HiddenPair((self.high, self.low), (self.low, self.high), fewest)
        return CoinSum(self.low, self.high, (*victims, alone), f"{self.note}, after dropouts")

    def left_out(self, count: int) -> CoinSum:
        """See `Loss.left_out`: lone clients go first, and a victim whose partner goes is one itself."""
        victims = [replace(victim, num_coins=max(victim.num_coins - count, 0)) for victim in self.victims]
        fewest = min(victim.num_coins for victim in victims)
        alone = HiddenPair((self.high, self.low), (self.low, self.high), fewest)
        return CoinSum(
            self.low, self.high, (*victims, alone), f"{self.note}, without {count} who are left out"
        )

    def advice(self, steps: float, delta: float) -> str:
        """See `Loss.advice`: how many clients that work alone would do."""
        half_level = 0.5 * math.log(self.high / self.low)
        coins = math.ceil((2.0 * math.sinh(half_level) / gaussian_mu(_AIM, delta)) ** 2 * steps)
        mass = (self.high - self.low) * steps / delta
        coins = max(coins, math.ceil(math.log(max(mass, 1.0)) / -math.log(self.high)))
        return (
            f"about {coins:.3g} clients that work alone in every round would bring epsilon to about {_AIM:g}"
        )


# ---- closed curves -----------------------------------------------------------------------------------------


def _both_sides(epsilons: Array, curve: Array) -> Array:
    """A symmetric loss's curve from its values at |epsilon|: H(-e) = 1 - exp(-e) + exp(-e) H(e)."""
    size = np.abs(epsilons)
    below: Array = -np.expm1(-size) + np.exp(-size) * curve
    return np.where(epsilons >= 0.0, curve, below)


@dataclass(frozen=True)
class GaussianLoss(Loss):
    """The Gaussian mechanism with `noise_multiplier` = std / l2 sensitivity, > 0."""

    noise_multiplier: float
    note: str = ""

    def curve(self, epsilons: Array) -> Array:
        """See `Loss.curve`."""
        mu, size = 1.0 / self.noise_multiplier, np.abs(epsilons)
        upper = special.log_ndtr(mu / 2.0 - size / mu)
        lower = special.log_ndtr(-mu / 2.0 - size / mu) + size
        return _both_sides(epsilons, np.exp(upper) * -np.expm1(np.minimum(lower - upper, 0.0)))

    @property
    def scale(self) -> tuple[float, float]:
        """See `Loss.scale`."""
        return 1.0 / self.noise_multiplier, math.inf

    @property
    def method(self) -> str:
        """See `Loss.method`."""
        return "Gaussian differential privacy, exact"

    def epsilon(self, delta: float, count: int) -> float:
        """See `Loss.epsilon`."""
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
        note: Where the noise comes from.
        num_noises: Clients whose noise the adversary does not know, >= 1.
    """

    num_noises: int = 1
    counts_answers: ClassVar[bool] = True

    @classmethod
    def of(cls, noise_multiplier: float, num_noises: int, note: str) -> GaussianLoss:
        """The loss of clients that add `noise_multiplier` each. The victim's own noise is always there."""
        if num_noises <= 1:
            return GaussianLoss(noise_multiplier, note)
        return cls(noise_multiplier * math.sqrt(num_noises), note, num_noises)

    def _with(self, num_noises: int, why: str) -> GaussianLoss:
        one = self.noise_multiplier / math.sqrt(self.num_noises)
        return self.of(one, num_noises, f"{self.note}, {why}")

    def after_dropouts(
        self, group_sizes: Sequence[int], probability: float, failure: float, num_corrupt: int = 0
    ) -> GaussianLoss | None:
        """Less noise: except with probability `failure` a round, so many others answer. None if none may."""
        others = coin_count_quantile((1,) * (self.num_noises - 1), probability, failure)
        return self._with(1 + others, "after dropouts") if others else None

    def left_out(self, count: int) -> GaussianLoss:
        """See `Loss.left_out`."""
        return self._with(self.num_noises - count, f"without {count} who are left out")


@dataclass(frozen=True)
class LaplaceLoss(Loss):
    """The Laplace mechanism with `noise_multiplier` = scale / l1 sensitivity, > 0."""

    noise_multiplier: float
    note: str = ""

    def curve(self, epsilons: Array) -> Array:
        """See `Loss.curve`."""
        half = 0.5 * (np.abs(epsilons) - 1.0 / self.noise_multiplier)
        return _both_sides(epsilons, np.maximum(-np.expm1(half), 0.0))

    @property
    def pure_epsilon(self) -> float:
        """See `Loss.pure_epsilon`."""
        return 1.0 / self.noise_multiplier

    @property
    def scale(self) -> tuple[float, float]:
        """See `Loss.scale`."""
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
        note: Where it comes from, one line for the report.
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
        """See `Loss.curve`. The larger of both orders."""
        # exp overflows beyond; the curve falls, so its value there is an upper bound
        epsilons = np.clip(epsilons, -700.0, 700.0)
        floor = np.maximum(-np.expm1(epsilons), 0.0)
        return np.maximum(np.maximum(self._forward(epsilons), self._backward(epsilons)), floor)

    @property
    def scale(self) -> tuple[float, float]:
        """See `Loss.scale`."""
        rest = self.sampling_probability * math.sqrt(math.expm1(min(self.noise_multiplier**-2, 50.0)))
        return min(rest, 1.0 / self.noise_multiplier), math.inf


# ---- Renyi divergences -------------------------------------------------------------------------------------


def _curve_of_divergences(orders: Array, divergences: Array, epsilons: Array) -> Array:
    """Smallest of the bounds exp((a - 1)(D_a - e)) (1 - 1/a)^a / (a - 1) over the orders a > 1."""
    size = np.abs(epsilons)
    logs = (orders - 1.0)[:, None] * (divergences[:, None] - size[None, :])
    logs += (orders * np.log1p(-1.0 / orders) - np.log(orders - 1.0))[:, None]
    return _both_sides(epsilons, np.exp(np.minimum(logs.min(0), 0.0)))


class _OfDivergences(Loss):
    """A loss known by bounds on its Renyi divergences, the larger of both orders of the two worlds."""

    bounds_only: ClassVar[bool] = True
    every_round: ClassVar[bool] = True


@dataclass(frozen=True)
class ConcentratedLoss(_OfDivergences):
    """Zero-concentrated: the Renyi divergence of every order alpha > 1 is at most rho alpha, both ways
    round."""

    rho: float
    note: str = ""

    def curve(self, epsilons: Array) -> Array:
        """See `Loss.curve`. A bound."""
        orders = 1.0 + np.logspace(-4, 6, 601)
        return _curve_of_divergences(orders, orders * self.rho, epsilons)

    @property
    def scale(self) -> tuple[float, float]:
        """See `Loss.scale`."""
        return math.sqrt(2.0 * self.rho), math.inf

    @property
    def method(self) -> str:
        """See `Loss.method`."""
        return "zero-concentrated differential privacy, every round counted"

    def epsilon(self, delta: float, count: int) -> float:
        """See `concentrated_epsilon`."""
        return concentrated_epsilon(count * self.rho, delta)

    def composed(self, count: int) -> ConcentratedLoss:
        """Rhos add up."""
        return ConcentratedLoss(count * self.rho, self.note)

    def plus(self, other: Loss) -> Loss | None:
        """Rhos add up. A `RenyiLoss` takes in this one."""
        if isinstance(other, ConcentratedLoss):
            return ConcentratedLoss(self.rho + other.rho, self.note)
        return other.plus(self) if isinstance(other, RenyiLoss) else None

    def divergence(self, order: float) -> float:
        """See `Loss.divergence`."""
        return order * self.rho

    def spread(self, dim: int) -> ConcentratedLoss:
        """Concentrated losses of independent coordinates add up."""
        return ConcentratedLoss(self.rho / dim, self.note)


def concentrated_epsilon(rho: float, delta: float) -> float:
    """Smallest epsilon at delta over all orders: a rho + ln(1 - 1/a) - (ln delta + ln a) / (a - 1), a > 1.

    References:
        Canonne, Kamath, Steinke, The Discrete Gaussian for Differential Privacy, 2020, proposition 12.
    """

    def bound(log_rest: float) -> float:
        r = math.exp(log_rest)
        return (1.0 + r) * rho + math.log(r / (1.0 + r)) - (math.log(delta) + math.log1p(r)) / r

    best = min((0.1 * k for k in range(-92, 139)), key=bound)
    refined = optimize.minimize_scalar(bound, bounds=(best - 0.1, best + 0.1), method="bounded")
    return max(min(bound(best), float(refined.fun)), 0.0)


@dataclass(frozen=True)
class RenyiLoss(_OfDivergences):
    """A curve of Renyi divergences over some orders, e.g. of a subsampled, shuffled or Skellam mechanism.

    Args:
        orders: Ascending, each > 1.
        divergences: The larger of D_a(P || Q) and D_a(Q || P), or a bound, at every order; >= 0, in nats. An
            infinite one leaves its order out.
        note: Where the curve comes from, one line for the report.

    Raises:
        ValueError: If there is no order, or the numbers make no sense.

    Example:
        >>> orders = (2.0, 4.0, 8.0, 16.0, 32.0)
        >>> RenyiLoss(orders, tuple(0.01 * a for a in orders)).epsilon(delta=1e-5, count=10)
        2.01...
    """

    orders: tuple[float, ...]
    divergences: tuple[float, ...]
    note: str = ""

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.orders, self.orders[1:], strict=False))
        if not self.orders or not ascending or self.orders[0] <= 1.0 or math.isinf(self.orders[-1]):
            raise ValueError(f"orders must be ascending, finite and > 1, at least one, got {self.orders}")
        if len(self.divergences) != len(self.orders) or not all(value >= 0.0 for value in self.divergences):
            raise ValueError(
                f"one divergence >= 0 is needed for each of {len(self.orders)} orders, got {self.divergences}"
            )

    def curve(self, epsilons: Array) -> Array:
        """See `Loss.curve`. A bound."""
        return _curve_of_divergences(np.array(self.orders), np.array(self.divergences), epsilons)

    @property
    def scale(self) -> tuple[float, float]:
        """See `Loss.scale`. A Gaussian's divergence of order a is a / 2 times its variance."""
        smallest = min(d / a for a, d in zip(self.orders, self.divergences, strict=True))
        return math.sqrt(2.0 * smallest) if smallest < math.inf else 1.0, math.inf

    @property
    def method(self) -> str:
        """See `Loss.method`."""
        return "Renyi differential privacy, every round counted"

    def epsilon(self, delta: float, count: int) -> float:
        """Smallest of D + ln(1 - 1/a) - (ln delta + ln a) / (a - 1) over the orders, D = count D_a."""
        orders, total = np.array(self.orders), count * np.array(self.divergences)
        bounds = total + np.log1p(-1.0 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1.0)
        return max(float(bounds.min()), 0.0)

    def composed(self, count: int) -> RenyiLoss:
        """Divergences add up."""
        return RenyiLoss(self.orders, tuple(count * value for value in self.divergences), self.note)

    def plus(self, other: Loss) -> Loss | None:
        """Divergences add up, at the orders of this curve. None for a loss without any there."""
        added = [other.divergence(order) for order in self.orders]
        if min(added) == math.inf:
            return None
        total = zip(self.divergences, added, strict=True)
        return RenyiLoss(self.orders, tuple(a + b for a, b in total), self.note)

    def divergence(self, order: float) -> float:
        """See `Loss.divergence`. Linear in (a - 1) D_a, which is convex, between two orders.

        Below the first order its divergence, because divergences rise; above the last infinite.
        """
        if order <= self.orders[0]:
            return self.divergences[0]
        if order > self.orders[-1]:
            return math.inf
        moments = [(a - 1.0) * value for a, value in zip(self.orders, self.divergences, strict=True)]
        return float(np.interp(order, self.orders, moments)) / (order - 1.0)

    def spread(self, dim: int) -> RenyiLoss:
        """Divergences of independent coordinates add up."""
        return RenyiLoss(self.orders, tuple(value / dim for value in self.divergences), self.note)
