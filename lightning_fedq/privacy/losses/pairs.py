"""Losses known by the distributions of their worst pairs: mass functions, and sums of random bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from lightning_fedq.functional.divergences import gaussian_mu, hockey_stick, randomized_response_epsilon
from lightning_fedq.functional.one_bit.privacy import coin_count_quantile, coin_splits, coin_sum_pmf
from lightning_fedq.privacy.losses.loss import _AIM, Array, Law, Loss, composed_mass


class _OfPairs(Loss):
    """A loss dominated by the worst of some pairs of mass functions.

    Each pair has a probability that its two inputs differ at all.
    """

    def _laws(self) -> Iterator[Law]:
        """Yield all (P, Q, weight), in both orders.

        The two inputs differ with probability `weight`.
        """
        raise NotImplementedError

    def curve(self, epsilons: Array) -> Array:
        # every curve is at least max(0, 1 - e^epsilon)
        worst = -np.expm1(np.minimum(epsilons, 0.0))
        floor = worst.copy()
        for p, q, weight in self._laws():
            # with probability 1 - weight both inputs have the same outcomes, so the curve is the floor
            worst = np.maximum(worst, weight * hockey_stick(p, q, epsilons) + (1.0 - weight) * floor)
        return worst

    @cached_property
    def _extremes(self) -> tuple[float, float, float, float]:
        """Infinite mass, largest loss, and root mean square and largest size of the finite losses."""
        extremes = [(weight * float(p[q <= 0].sum()), *_largest(p, q)) for p, q, weight in self._laws()]
        mass, pure, std, top = (max(column) for column in zip(*extremes, strict=True))
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
    """Return the largest loss, and the root mean square and largest absolute value of the finite losses."""
    both = (p > 0) & (q > 0)
    losses = np.log(p[both] / q[both])
    pure = math.inf if bool((q[p > 0] <= 0).any()) else float(losses.max())
    if not losses.size:
        return pure, 0.0, 0.0
    return pure, math.sqrt(float(p[both] @ losses**2)), float(np.abs(losses).max())


@dataclass(frozen=True)
class PmfPairs(_OfPairs):
    """Loss dominated, at every epsilon, by the worst of some pairs of probability mass functions.

    Args:
        pairs: Pairs `(p, q)` of mass functions, each of which sums to 1. Both orders of a pair count.
        note: Source of the loss, one line for the report.
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
        """Epsilon of the randomised response that the loss is, or None if it is another loss."""
        if len(self.pairs) == 1:
            p, q = self.pairs[0]
            if len(p) == 2 and p == q[::-1] and min(p) > 0.0:
                return abs(math.log(p[0] / p[1]))
        return None

    @property
    def method(self) -> str:
        """Name of the closed form of a randomised response. "" for other losses."""
        return "" if self._response_level is None else "exact binomial composition"

    def epsilon(self, delta: float, count: int) -> float:
        level = self._response_level
        assert level is not None
        return randomized_response_epsilon(level, count, delta)

    def advice(self, steps: float, delta: float) -> str:
        # rule of thumb: many small losses add up to a Gaussian loss
        if composed_mass(self.infinite_mass, steps) > delta:
            return ""
        level = gaussian_mu(_AIM, delta) / math.sqrt(steps)
        return f"an epsilon of about {level:.2g} per loss would bring it to about {_AIM:g}"


@dataclass(frozen=True)
class HiddenPair:
    """Two distributions of one group's part of a sum, hidden by independent bits of other clients.

    Args:
        p: Mass function on {0, 1, ...} for one input. Both orders of (p, q) count.
        q: Mass function for the neighbouring input, of the same length.
        num_coins: Number of independent randomised bits that hide the group, >= 0.
        weight: Probability, in (0, 1], that the two inputs lead to different distributions at all, if the
            adversary learns whether they do.

    Raises:
        ValueError: If a number is out of range, or the mass functions have different lengths.
    """

    p: tuple[float, ...]
    q: tuple[float, ...]
    num_coins: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.num_coins < 0 or not 0.0 < self.weight <= 1.0 or len(self.p) != len(self.q):
            raise ValueError(
                f"Expected num_coins >= 0, weight in (0, 1] and p and q of equal length, got {self}"
            )

    def laws(self, low: float, high: float) -> Iterator[Law]:
        """Yield (P, Q, weight) of the sum in both orders, for all splits of the other bits.

        A split says how many of the other bits have probability `high`. If exchanging zeros and ones swaps p
        and q, or leaves both unchanged, a split and its mirror image give the same pair, so half of the
        splits suffice.

        Args:
            low: Smallest probability of a one.
            high: Largest probability of a one.
        """
        mirrored = {self.p[::-1], self.q[::-1]} == {self.p, self.q}
        max_high = (self.num_coins + 1) // 2 if mirrored else self.num_coins
        for num_coins, num_high in coin_splits(self.num_coins):
            if num_high > max_high:
                break
            noise = coin_sum_pmf(num_coins, num_high, low, high)
            p, q = np.convolve(noise, self.p), np.convolve(noise, self.q)
            yield p, q, self.weight
            yield q, p, self.weight


@dataclass(frozen=True)
class CoinSum(_OfPairs):
    """Loss of a sum of randomised bits: the worst of some pairs, each hidden by independent bits.

    Every bit is a one with some probability in [low, high] that the adversary picks. So the loss is the worst
    over 0 <= j <= num_coins of Binomial(j, high) + Binomial(num_coins - j, low). Beyond 400 bits, splits are
    bounded in stretches (`coin_splits`), so the loss is an upper bound for any number of bits.

    Args:
        low: Smallest probability of a one, in (0, 1/2).
        high: Largest probability of a one, 1 - low.
        victims: One pair for every place that the victim may have in the round.
        note: Source of the loss, one line for the report.
        hiding: Clients whose bits hide the victim, as `advice` names them.

    Raises:
        ValueError: If low is not in (0, 1/2), or high is not 1 - low.
    """

    low: float
    high: float
    victims: tuple[HiddenPair, ...]
    note: str = ""
    hiding: str = field(default="unpaired clients", compare=False)
    counts_answers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 < self.low < 0.5 or abs(self.low + self.high - 1.0) > 1e-12:
            raise ValueError(f"Expected low in (0, 1/2) and high = 1 - low, got {self.low} and {self.high}")

    def _laws(self) -> Iterator[Law]:
        for victim in self.victims:
            yield from victim.laws(self.low, self.high)

    def after_dropouts(
        self, group_sizes: Sequence[int], probability: float, failure: float, num_colluding: int = 0
    ) -> CoinSum:
        """Return the loss with the bits of the clients that answer.

        At least so many clients answer, except with probability `failure` a round.

        The bits of a group with colluding clients hide nobody.
        """
        pairs = [size for size in group_sizes if size > 1]
        # the groups of the victim and of a curious client hide nobody: leave out those that would hide most
        pairs.sort(key=lambda size: size * probability ** (size - 1), reverse=True)
        hiding = tuple(pairs[1 + max(num_colluding, 1) :])

        def answering(victim: HiddenPair) -> int:
            return coin_count_quantile((1,) * victim.num_coins + hiding, probability, failure)

        return self._with_coins(map(answering, self.victims), "after dropouts")

    def left_out(self, count: int) -> CoinSum:
        # the server leaves out unpaired clients first, and a victim without its partner is unpaired itself
        coins = (max(victim.num_coins - count, 0) for victim in self.victims)
        return self._with_coins(coins, f"without {count} who are left out")

    def _with_coins(self, coins: Iterable[int], note: str) -> CoinSum:
        """Return the loss with other numbers of hiding bits, for clients that may be missing.

        A victim whose partner is missing sends a single bit, so that place is added.

        Args:
            coins: Number of bits that hide each victim.
            note: Words on the missing clients.
        """
        victims = [replace(victim, num_coins=n) for victim, n in zip(self.victims, coins, strict=True)]
        fewest = min(victim.num_coins for victim in victims)
        alone = HiddenPair((self.high, self.low), (self.low, self.high), fewest)
        return CoinSum(self.low, self.high, (*victims, alone), f"{self.note}, {note}", self.hiding)

    def advice(self, steps: float, delta: float) -> str:
        # number of unpaired clients that would suffice
        half_level = 0.5 * math.log(self.high / self.low)
        coins = math.ceil((2.0 * math.sinh(half_level) / gaussian_mu(_AIM, delta)) ** 2 * steps)
        mass = (self.high - self.low) * steps / delta
        coins = max(coins, math.ceil(math.log(max(mass, 1.0)) / -math.log(self.high)))
        return f"about {coins:.3g} {self.hiding} in every round would bring epsilon to about {_AIM:g}"
