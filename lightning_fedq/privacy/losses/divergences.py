"""Losses known by bounds on their Renyi divergences: concentrated, and one bound an order.

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
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy import optimize

from lightning_fedq.privacy.losses.loss import Array, Loss, both_sides


def _curve_of_divergences(orders: Array, divergences: Array, epsilons: Array) -> Array:
    """Smallest of the bounds exp((a - 1)(D_a - e)) (1 - 1/a)^a / (a - 1) over the orders a > 1."""
    size = np.abs(epsilons)
    logs = (orders - 1.0)[:, None] * (divergences[:, None] - size[None, :])
    # Canonne, Kamath, Steinke, proposition 12
    logs += (orders * np.log1p(-1.0 / orders) - np.log(orders - 1.0))[:, None]
    return both_sides(epsilons, np.exp(np.minimum(logs.min(0), 0.0)))


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
        # a bound
        orders = 1.0 + np.logspace(-4, 6, 601)
        return _curve_of_divergences(orders, orders * self.rho, epsilons)

    @property
    def scale(self) -> tuple[float, float]:
        return math.sqrt(2.0 * self.rho), math.inf

    @property
    def method(self) -> str:
        return "zero-concentrated differential privacy, every round counted"

    def epsilon(self, delta: float, count: int) -> float:
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
        return order * self.rho

    def spread(self, dim: int) -> ConcentratedLoss:
        """Concentrated losses of independent coordinates add up."""
        return ConcentratedLoss(self.rho / dim, self.note)


def concentrated_epsilon(rho: float, delta: float) -> float:
    """Smallest epsilon at delta over all orders: a rho + ln(1 - 1/a) - (ln delta + ln a) / (a - 1), a > 1.

    References:
        Canonne, Kamath, Steinke, The Discrete Gaussian for Differential Privacy, 2020, proposition 12.

    Example:
        >>> round(concentrated_epsilon(0.5, 1e-5), 2)
        4.73
    """

    def bound(log_order_minus_1: float) -> float:
        r = math.exp(log_order_minus_1)
        return (1.0 + r) * rho + math.log(r / (1.0 + r)) - (math.log(delta) + math.log1p(r)) / r

    best = min((0.1 * k for k in range(-92, 139)), key=bound)  # any order is a bound: a poor minimum is sound
    refined = optimize.minimize_scalar(bound, bounds=(best - 0.1, best + 0.1), method="bounded")
    return max(min(bound(best), float(refined.fun)), 0.0)


@dataclass(frozen=True)
class RenyiLoss(_OfDivergences):
    """A curve of Renyi divergences over some orders, e.g. of a subsampled or shuffled mechanism.

    Args:
        orders: Ascending, each > 1.
        divergences: The larger of D_a(P || Q) and D_a(Q || P), or a bound, at every order; >= 0, in nats. An
            infinite one leaves its order out.

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
        # a bound
        return _curve_of_divergences(np.array(self.orders), np.array(self.divergences), epsilons)

    @property
    def scale(self) -> tuple[float, float]:
        # a Gaussian's divergence of order a is a / 2 times its variance
        smallest = min(d / a for a, d in zip(self.orders, self.divergences, strict=True))
        return math.sqrt(2.0 * smallest) if smallest < math.inf else 1.0, math.inf

    @property
    def method(self) -> str:
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
        # Linear in (a - 1) D_a, which is convex, between two orders. Below the first order its divergence,
        # because divergences rise; above the last infinite.
        if order <= self.orders[0]:
            return self.divergences[0]
        if order > self.orders[-1]:
            return math.inf
        moments = [(a - 1.0) * value for a, value in zip(self.orders, self.divergences, strict=True)]
        return float(np.interp(order, self.orders, moments)) / (order - 1.0)

    def spread(self, dim: int) -> RenyiLoss:
        """Divergences of independent coordinates add up."""
        return RenyiLoss(self.orders, tuple(value / dim for value in self.divergences), self.note)
