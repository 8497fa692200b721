"""Losses known by bounds on their Renyi divergences: one bound per order, or zero-concentrated.

Such a loss has no exact curve, only one bound on it per order (`bounds_only`). The minimum of the bounds is
no hockey-stick curve, because it is not convex in e^epsilon. The true curve is convex, so it also lies below
the lower convex hull of the bounds, and accountants put that hull on a grid. Composing such grids is sound
but loose, so divergences are added first (`composed`, `plus`).

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
    """Return the smallest of the bounds exp((a - 1)(D_a - e)) (1 - 1/a)^a / (a - 1) over the orders a > 1."""
    size = np.abs(epsilons)
    logs = (orders - 1.0)[:, None] * (divergences[:, None] - size[None, :])
    # Canonne, Kamath, Steinke, proposition 12
    logs += (orders * np.log1p(-1.0 / orders) - np.log(orders - 1.0))[:, None]
    return both_sides(epsilons, np.exp(np.minimum(logs.min(0), 0.0)))


class _OfDivergences(Loss):
    """A loss known by bounds on its Renyi divergences, each the larger of the two directions."""

    bounds_only: ClassVar[bool] = True
    every_round: ClassVar[bool] = True


@dataclass(frozen=True)
class ConcentratedLoss(_OfDivergences):
    """Loss of zero-concentrated privacy: Renyi divergences of order a are at most rho a, both ways.

    Args:
        rho: Divergence per order, >= 0, in nats.
        note: Source of the loss, one line for the report.
    """

    rho: float
    note: str = ""

    def curve(self, epsilons: Array) -> Array:
        # every order gives a valid bound, so a finite set of orders suffices
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
        """Return the loss of `count` compositions, whose rho is `count` times as large."""
        return ConcentratedLoss(count * self.rho, self.note)

    def plus(self, other: Loss) -> Loss | None:
        """Return the sum of this loss and an independent other one. A `RenyiLoss` takes this one in."""
        if isinstance(other, ConcentratedLoss):
            return ConcentratedLoss(self.rho + other.rho, self.note)
        return other.plus(self) if isinstance(other, RenyiLoss) else None

    def divergence(self, order: float) -> float:
        return order * self.rho

    def spread(self, dim: int) -> ConcentratedLoss:
        """Return the loss of one of `dim` independent coordinates, whose rhos add up to this one."""
        return ConcentratedLoss(self.rho / dim, self.note)


def concentrated_epsilon(rho: float, delta: float) -> float:
    """Return the smallest epsilon at delta over all orders a > 1 of zero-concentrated privacy.

    The bound of order a is a rho + ln(1 - 1/a) - (ln delta + ln a) / (a - 1).

    Args:
        rho: Divergence per order, >= 0.
        delta: Delta of the statement, in (0, 1).

    References:
        Canonne, Kamath, Steinke, The Discrete Gaussian for Differential Privacy, 2020, proposition 12.

    Examples:
        >>> round(concentrated_epsilon(0.5, 1e-5), 2)
        4.73
    """

    def bound(log_order_minus_1: float) -> float:
        r = math.exp(log_order_minus_1)
        return (1.0 + r) * rho + math.log(r / (1.0 + r)) - (math.log(delta) + math.log1p(r)) / r

    # every order gives a valid bound, so a minimum that is not exact is still sound
    best = min((0.1 * k for k in range(-92, 139)), key=bound)
    refined = optimize.minimize_scalar(bound, bounds=(best - 0.1, best + 0.1), method="bounded")
    return max(min(bound(best), float(refined.fun)), 0.0)


@dataclass(frozen=True)
class RenyiLoss(_OfDivergences):
    """Loss known by its Renyi divergences at some orders, for example of a subsampled or shuffled mechanism.

    Args:
        orders: Orders of the divergences, ascending, each > 1 and finite.
        divergences: Larger of D_a(P || Q) and D_a(Q || P) at every order, or a bound on it, >= 0, in nats. An
            infinite divergence leaves its order out.
        note: Source of the loss, one line for the report.

    Raises:
        ValueError: If there is no order, orders do not ascend, or there is not one divergence >= 0 per order.

    Examples:
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
            raise ValueError(f"orders must be one or more ascending finite numbers > 1, got {self.orders}")
        if len(self.divergences) != len(self.orders) or not all(value >= 0.0 for value in self.divergences):
            raise ValueError(
                f"Expected one divergence >= 0 for each of {len(self.orders)} orders, got {self.divergences}"
            )

    def curve(self, epsilons: Array) -> Array:
        return _curve_of_divergences(np.array(self.orders), np.array(self.divergences), epsilons)

    @property
    def scale(self) -> tuple[float, float]:
        # for Gaussian noise, the divergence of order a is a / 2 times the variance of the loss
        smallest = min(d / a for a, d in zip(self.orders, self.divergences, strict=True))
        return math.sqrt(2.0 * smallest) if smallest < math.inf else 1.0, math.inf

    @property
    def method(self) -> str:
        return "Renyi differential privacy, every round counted"

    def epsilon(self, delta: float, count: int) -> float:
        """Return the smallest of D + ln(1 - 1/a) - (ln delta + ln a) / (a - 1) over the orders a.

        D = count D_a is the divergence of all compositions.
        """
        orders, total = np.array(self.orders), count * np.array(self.divergences)
        bounds = total + np.log1p(-1.0 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1.0)
        return max(float(bounds.min()), 0.0)

    def composed(self, count: int) -> RenyiLoss:
        """Return the loss of `count` compositions, whose divergences are `count` times as large."""
        return RenyiLoss(self.orders, tuple(count * value for value in self.divergences), self.note)

    def plus(self, other: Loss) -> Loss | None:
        """Return the sum of this loss and an independent other one, at the orders of this loss.

        None if the other loss has no finite divergence at any of these orders.
        """
        added = [other.divergence(order) for order in self.orders]
        if min(added) == math.inf:
            return None
        total = zip(self.divergences, added, strict=True)
        return RenyiLoss(self.orders, tuple(a + b for a, b in total), self.note)

    def divergence(self, order: float) -> float:
        # Between two orders, interpolate (a - 1) D_a, which is convex, so this is an upper bound. Divergences
        # rise with the order, so the first one bounds all smaller orders. Above the last order none is known.
        if order <= self.orders[0]:
            return self.divergences[0]
        if order > self.orders[-1]:
            return math.inf
        moments = [(a - 1.0) * value for a, value in zip(self.orders, self.divergences, strict=True)]
        return float(np.interp(order, self.orders, moments)) / (order - 1.0)

    def spread(self, dim: int) -> RenyiLoss:
        """Return the loss of one of `dim` independent coordinates, whose divergences add up to these."""
        return RenyiLoss(self.orders, tuple(value / dim for value in self.divergences), self.note)
