"""Losses known by the laws of their worst pairs: mass functions, and sums of coins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from lightning_fedq.functional.divergences import gaussian_mu, hockey_stick, randomized_response_epsilon
from lightning_fedq.functional.one_bit.privacy import coin_count_quantile, coin_splits, coin_sum_pmf
from lightning_fedq.privacy.losses.loss import _AIM, Array, Law, Loss, composed_mass


class _OfPairs(Loss):
    """A loss dominated by the worst of some pairs of pmfs, each with a chance that the worlds differ."""

    def _laws(self) -> Iterator[Law]:
        """All (P, Q, weight), in both orders."""
        raise NotImplementedError

    def curve(self, epsilons: Array) -> Array:
        # exact for the pmfs given
        worst = -np.expm1(np.minimum(epsilons, 0.0))  # max(0, 1 - e^epsilon), below which no curve lies
        floor = worst.copy()
        for p, q, weight in self._laws():
            # where the worlds agree, and this is known, the curve is the floor
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
        return self._extremes[0]

    @property
    def pure_epsilon(self) -> float:
        return self._extremes[1]

    @property
    def scale(self) -> tuple[float, float]:
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
        pairs: `(p, q)` pairs, in either order, as both are looked at; each p and q sums to 1.
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
        level = self._response_level
        assert level is not None
        return randomized_response_epsilon(level, count, delta)

    def advice(self, steps: float, delta: float) -> str:
        # by the rule of thumb that many small losses add up to a Gaussian one
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
                victim, num_coins=coin_count_quantile((1,) * victim.num_coins + others, probability, failure)
            )
            for victim in self.victims
        ]
        fewest = min(victim.num_coins for victim in victims)
        alone = HiddenPair((self.high, self.low), (self.low, self.high), fewest)
        return CoinSum(self.low, self.high, (*victims, alone), f"{self.note}, after dropouts")

    def left_out(self, count: int) -> CoinSum:
        # lone clients go first, and a victim whose partner goes is one itself
        victims = [replace(victim, num_coins=max(victim.num_coins - count, 0)) for victim in self.victims]
        fewest = min(victim.num_coins for victim in victims)
        alone = HiddenPair((self.high, self.low), (self.low, self.high), fewest)
        return CoinSum(
            self.low, self.high, (*victims, alone), f"{self.note}, without {count} who are left out"
        )

    def advice(self, steps: float, delta: float) -> str:
        # how many clients that work alone would do
        half_level = 0.5 * math.log(self.high / self.low)
        coins = math.ceil((2.0 * math.sinh(half_level) / gaussian_mu(_AIM, delta)) ** 2 * steps)
        mass = (self.high - self.low) * steps / delta
        coins = max(coins, math.ceil(math.log(max(mass, 1.0)) / -math.log(self.high)))
        return (
            f"about {coins:.3g} clients that work alone in every round would bring epsilon to about {_AIM:g}"
        )
