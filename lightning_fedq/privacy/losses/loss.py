"""The interface of a privacy loss, and the loss of a mechanism without a guarantee."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Law = tuple[Array, Array, float]

_AIM = 8.0
"""Epsilon that advice aims at. A guarantee above it is weak."""


def composed_mass(mass: float, count: float) -> float:
    """Return the probability that an event of probability `mass` occurs at least once in `count` trials."""
    return -math.expm1(count * math.log1p(-mass)) if mass < 1.0 else 1.0  # exact for masses below 1e-16


class Loss(ABC):
    """Privacy loss of one composition, worst case over inputs and over both orders of the inputs.

    Subclasses are frozen, hashable values. A subclass must define `curve` only.

    Attributes:
        note: Source of the loss, one line for the report.
        bounds_only: Whether `curve` is a bound that is not convex, as hockey-stick curves are. A grid then
            takes its lower convex hull.
        every_round: Whether rounds without the client are charged as if the client had taken part. Renyi
            losses are, so that they add up in closed form.
        counts_answers: Whether the loss depends on the number of clients that answer (`after_dropouts`,
            `left_out`).
        adds_up: Whether compositions may be accounted for separately and added. Noise that is correlated over
            rounds costs more over several participations than the sum of single ones. `composed` then depends
            on the total count, and rounds under several claims that share a stream of noise are charged
            `standalone`.
    """

    note: str
    bounds_only: ClassVar[bool] = False
    every_round: ClassVar[bool] = False
    counts_answers: ClassVar[bool] = False
    adds_up: ClassVar[bool] = True

    @abstractmethod
    def curve(self, epsilons: Array) -> Array:
        """Return delta of one composition at every epsilon, or an upper bound.

        It is the worst case over inputs and both orders.

        Args:
            epsilons: `(m,)` real numbers in ascending order, in nats.

        Returns:
            `(m,)` float64 values that do not rise, each at least max(0, 1 - e^epsilon).
        """

    @property
    def infinite_mass(self) -> float:
        """Largest probability of a distinguishing event.

        Such an event is an outcome that only one of two neighbouring inputs can produce.
        """
        return 0.0

    @property
    def pure_epsilon(self) -> float:
        """Largest possible loss. Infinite where there is infinite mass or the loss is unbounded."""
        return math.inf

    @property
    def scale(self) -> tuple[float, float]:
        """Approximate root mean square of the loss, and its largest finite value.

        They set the step of the grid.

        By default the first is the epsilon at which the curve has fallen to a tenth of its value at 0, which
        is 0.9 standard deviations for a small Gaussian loss. A bad guess overestimates epsilon, but the
        result stays valid.
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
        """Name of the closed form that `epsilon` uses. "" where there is none and a grid is used."""
        return ""

    def epsilon(self, delta: float, count: int) -> float:
        """Return epsilon of `count` compositions at `delta` in closed form.

        It is called only if `method` is not "".
        """
        raise NotImplementedError(f"{type(self).__name__} names a method but does not define epsilon")

    def divergence(self, order: float) -> float:
        """Return a bound on the Renyi divergence of an order > 1, both ways. Infinite if none is known."""
        return math.inf

    def composed(self, count: int) -> Loss | None:
        """Return `count` compositions as one loss of the same class. None where that is impossible."""
        return None

    def plus(self, other: Loss) -> Loss | None:
        """Return the sum of this loss and an independent other one. None without a closed form."""
        return None

    @property
    def standalone(self) -> Loss:
        """Loss that may be added to others from the same stream of noise: the loss itself, if `adds_up`."""
        return self

    def spread(self, dim: int) -> Loss:
        """Return the loss of one coordinate, if `dim` coordinates differ equally and have independent noise.

        If every coordinate had a larger loss than this, the whole vector would have a larger loss than it
        has.

        Raises:
            TypeError: If it is not known how the loss divides over coordinates.
        """
        raise TypeError(f"{type(self).__name__} of a whole vector can't be divided over its coordinates")

    def after_dropouts(
        self, group_sizes: Sequence[int], probability: float, failure: float, num_colluding: int = 0
    ) -> Loss | None:
        """Return the loss when clients of a sum may drop out. None where the loss needs every answer.

        Args:
            group_sizes: Sizes of all groups of the round.
            probability: Probability that a client does not answer, independent of everything and caused by
                nobody.
            failure: Probability per round, covered by delta, that fewer clients answer than are counted.
            num_colluding: Number of clients that tell the server all they know.
        """
        return None

    def left_out(self, count: int) -> Loss | None:
        """Return the loss when a server that lies leaves `count` honest clients of its choice out of a sum.

        None where the loss needs every answer.
        """
        return None

    def advice(self, steps: float, delta: float) -> str:
        """Return a sentence with a setting that would give `steps` compositions a useful epsilon at `delta`.
        "" if unknown.
        """
        return ""


@dataclass(frozen=True)
class NonPrivate(Loss):
    """No guarantee against an adversary, with the reason in words. Nothing can be composed.

    Args:
        reason: Reason why there is no guarantee, for the report.
        note: Source of the loss, one line for the report.
    """

    reason: str
    note: str = ""

    def curve(self, epsilons: Array) -> Array:
        """Raise an error, because there is no curve.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"There is no guarantee to account for: {self.reason}")

    @property
    def infinite_mass(self) -> float:
        """Raise a ValueError, as `curve` does."""
        raise ValueError(f"There is no guarantee to account for: {self.reason}")


def both_sides(epsilons: Array, curve: Array) -> Array:
    """Return the curve of a symmetric loss from its values at |epsilon|: H(-e) = 1 - exp(-e) + exp(-e) H(e).

    Args:
        epsilons: `(m,)` real numbers in ascending order, in nats.
        curve: `(m,)` values of the curve at the absolute values of `epsilons`.
    """
    size = np.abs(epsilons)
    below: Array = -np.expm1(-size) + np.exp(-size) * curve
    return np.where(epsilons >= 0.0, curve, below)
