"""The interface of a loss, and the loss of what is not private."""

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
"""The epsilon that advice aims at: above it a guarantee is hardly one."""


def composed_mass(mass: float, count: float) -> float:
    """Chance that an event of probability `mass` occurs at least once in `count` trials."""
    return -math.expm1(count * math.log1p(-mass)) if mass < 1.0 else 1.0  # exact for masses below 1e-16


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
        adds_up: May compositions be charged apart and added? Noise over rounds hides several participations
            less than the sum of single ones says: then `composed` goes by the total, and kinds of rounds that
            share a stream of noise are charged `standalone`.
    """

    note: str
    bounds_only: ClassVar[bool] = False
    every_round: ClassVar[bool] = False
    counts_answers: ClassVar[bool] = False
    adds_up: ClassVar[bool] = True

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

    @property
    def standalone(self) -> Loss:
        """A loss that may be added to any others of the same noise: itself, where `adds_up`."""
        return self

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


def both_sides(epsilons: Array, curve: Array) -> Array:
    """A symmetric loss's curve from its values at |epsilon|: H(-e) = 1 - exp(-e) + exp(-e) H(e)."""
    size = np.abs(epsilons)
    below: Array = -np.expm1(-size) + np.exp(-size) * curve
    return np.where(epsilons >= 0.0, curve, below)
