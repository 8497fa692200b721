"""Loss of a vector of coins behind a sum: Renyi divergences, or a Gaussian above it where that says less.

Both hold for the same coins, so the smaller epsilon does. Renyi divergences
(`functional.one_bit.hidden_coin`) lose a tenth or more when they become an epsilon, and in small cohorts a
third. The Gaussian (`functional.one_bit.gaussian_cover`) is found on grids and composed as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_fedq.functional.divergences import Array, gaussian_epsilon
from lightning_fedq.functional.one_bit.gaussian_cover import (
    MOST_COINS,
    gaps_down_to,
    gaussian_cover,
    gaussian_curve,
)
from lightning_fedq.privacy.losses import Loss, RenyiLoss

_SPARE = 0.2
"""Part of delta that pays for the slack of the cover, at most, and a quarter of it at least."""
_SMALLEST = 0.02
"""Part of the squared gaps that rounding the smallest ones up may add."""
_MOST_GAPS = 60
_LOWEST = 0.1
"""Smallest probability (a level of 2.2) down to which a cover is looked for: it takes seconds, below more."""
_MASSES = (1e-4, 1e-8)
"""Parts of delta at which the curve is looked at."""


@dataclass(frozen=True)
class CoveredCoins(RenyiLoss):
    """A vector of coins, each hidden by other coins, whose probabilities move by a bounded length.

    Args:
        orders: Renyi orders, as in `RenyiLoss`.
        divergences: Divergences of the whole vector, or bounds, at the orders.
        low: Smallest probability of a one, in (0, 1/2); the largest is `high`.
        high: 1 - low.
        num_others: Other coins in each coordinate's sum that the adversary can't predict, >= 0.
        coordinates: Coins of the victim, >= 1.
        square: Sum of the squares by which their probabilities move between two worlds, at most.

    Raises:
        ValueError: If the numbers make no sense.
    """

    low: float = 0.25
    high: float = 0.75
    num_others: int = 0
    coordinates: int = 1
    square: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.low < 0.5 or self.num_others < 0 or self.coordinates < 1 or not self.square >= 0.0:
            raise ValueError(
                "low in (0, 1/2), num_others >= 0, coordinates >= 1 and square >= 0 are needed, got "
                f"{self.low}, {self.num_others}, {self.coordinates} and {self.square}"
            )

    @property
    def method(self) -> str:
        return "a Gaussian above the sums of coins, or Renyi differential privacy; every round counted"

    def epsilon(self, delta: float, count: int) -> float:
        """The smaller of both, see `Loss.epsilon`."""
        by_renyi = 0.0 if self.square == 0.0 else super().epsilon(delta, count)
        if by_renyi == 0.0:
            return 0.0
        mu, mass = self._cover(_SPARE * delta, count)
        return by_renyi if mu == math.inf else min(by_renyi, gaussian_epsilon(mu, delta - mass))

    def curve(self, epsilons: Array) -> Array:
        # a bound
        found = super().curve(epsilons)
        for most in _MASSES:
            mu, mass = self._cover(most, 1)
            if 0.0 < mu < math.inf:
                # at a negative epsilon by the other order of the worlds
                covered = np.maximum(-np.expm1(epsilons), 0.0)
                covered += np.exp(np.minimum(epsilons, 0.0)) * gaussian_curve(np.abs(epsilons), mu)
                found = np.minimum(found, covered + mass)
        return found

    def _cover(self, most: float, count: int) -> tuple[float, float]:
        """(mu, mass): `count` vectors lose at most what mu-Gaussian DP loses, and delta = mass <= `most`."""
        if self.num_others > MOST_COINS or self.low < _LOWEST or self.square == 0.0:
            return math.inf, 0.0
        gap = self.high - self.low
        share = math.sqrt(min(_SMALLEST * self.square / self.coordinates / gap**2, 0.25))
        num_gaps, share = gaps_down_to(share, _MOST_GAPS)
        smallest = share * gap
        budget = count * (self.square + self.coordinates * smallest * smallest) * (1.0 + 1e-9)
        slack = 4.0 ** math.floor(math.log(most / budget, 4.0))
        if slack * smallest * smallest < 1e-16:
            return math.inf, 0.0
        return _sigma(self.low, self.high, self.num_others, num_gaps, slack, budget), slack * budget

    def composed(self, count: int) -> CoveredCoins:
        """Divergences and squares add up."""
        divergences = tuple(count * value for value in self.divergences)
        return CoveredCoins(
            self.orders,
            divergences,
            self.note,
            self.low,
            self.high,
            self.num_others,
            count * self.coordinates,
            count * self.square,
        )

    def plus(self, other: Loss) -> Loss | None:
        """Squares add up where the coins are the same, else divergences alone do."""
        added = super().plus(other)
        same = isinstance(other, CoveredCoins) and (self.low, self.high, self.num_others) == (
            other.low,
            other.high,
            other.num_others,
        )
        if not same or not isinstance(added, RenyiLoss):
            return added
        assert isinstance(other, CoveredCoins)
        return CoveredCoins(
            added.orders,
            added.divergences,
            self.note,
            self.low,
            self.high,
            self.num_others,
            self.coordinates + other.coordinates,
            self.square + other.square,
        )


@lru_cache(maxsize=1024)
def _sigma(low: float, high: float, num_others: int, num_gaps: int, slack: float, budget: float) -> float:
    cover = gaussian_cover(low, high, num_others, num_gaps, slack)
    return math.sqrt(cover.variance(budget))
