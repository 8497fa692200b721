"""Privacy losses on a grid: composition of any number of copies in milliseconds, rounded toward more privacy.

A loss distribution is masses on multiples of a step, plus a mass of infinite loss. It dominates the true loss
by connecting the dots of its hockey-stick curve (Doroshenko et al., 2022), as in dp_accounting.

Departure from dp_accounting's `self_compose`: the grid is made coarser on the way. A billion copies at the
step that one copy needs would take a grid of 10^7 points; here copies are composed some thousands at a
time, each time moved to a grid of 64 points per standard deviation. Moving an atom between two grid points
splits it so that its mass under P and under Q stays, which is connecting the dots again: pessimistic, with a
relative excess of the mean loss below (1/64)^2 / 4 per stage. What is cut off at the tails is counted as
infinite loss.

References:
    Doroshenko, Ghazi, Kamath, Kumar, Manurangsi, Connect the Dots, PoPETs 2022, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np
from numpy.typing import NDArray
from scipy import fft, optimize, signal

from lightning_fedq.privacy.losses import Loss

Array = NDArray[np.float64]

POINTS_PER_STD = 64
_LONGEST = 1 << 17
MOST_POINTS = 20_000
SMALLEST_DELTA = 1e-12
"""Below it the rounding noise of Fourier transforms, 1e-16 a point, would show in an epsilon."""


@dataclass(frozen=True)
class LossGrid:
    """Masses of a privacy loss on {lowest, lowest + 1, ...} * step.

    Args:
        step: Grid step, > 0, in nats.
        lowest: Index of the first point; its loss is `lowest * step`.
        masses: `(points,)`, mass of each point under P.
        infinite: Mass of infinite loss; with the masses it sums to 1.
    """

    step: float
    lowest: int
    masses: Array
    infinite: float

    @property
    def losses(self) -> Array:
        """`(points,)` losses in nats."""
        return self.step * (self.lowest + np.arange(len(self.masses), dtype=np.float64))

    @property
    def std(self) -> float:
        """Standard deviation of the finite losses."""
        indices = np.arange(len(self.masses), dtype=np.float64)
        total = self.masses.sum()
        if total <= 0.0:
            return 0.0
        mean = indices @ self.masses / total
        return self.step * math.sqrt(max((indices - mean) ** 2 @ self.masses / total, 0.0))

    def composed(self, count: int, tail: float) -> LossGrid:
        """The sum of `count` independent copies.

        Args:
            count: >= 1.
            tail: Mass that may be cut off in total; it is counted as infinite loss.
        """
        if count < 1:
            raise ValueError(f"count must be >= 1, got {count}")
        if count == 1:
            return self
        if not self.masses.any():  # all mass is infinite already
            return LossGrid(self.step, self.lowest * count, self.masses, self.infinite)
        spread = max(self.std / self.step, 1e-9)
        # as many copies as keep the result within the longest array, at 24 standard deviations
        batch = max(int(min((_LONGEST / 24.0 / spread) ** 2, _LONGEST / len(self.masses) + 4096)), 2)
        if count <= batch:
            return self._power(count, tail)
        whole, rest = divmod(count, batch)
        # tail / 2 for the batches, a quarter for their sum, a quarter for the rest
        result = self._power(batch, tail / (2 * whole)).coarser().composed(whole, tail / 4)
        return result if rest == 0 else result.plus(self._power(rest, tail / 4).on(result.step))

    def _power(self, count: int, tail: float) -> LossGrid:
        """`count`-fold convolution by FFT, cut to where Chernoff leaves at most `tail` outside."""
        if count == 1:
            return self
        first, last = self._bounds(count, tail / 4.0)
        length = fft.next_fast_len(max(last - first + 1, len(self.masses)), real=True)
        masses = fft.irfft(fft.rfft(self.masses, length) ** count, length)  # law of the sum
        # the transform is cyclic: index i lies at i mod length
        masses = np.roll(masses, -(first % length))[: last - first + 1]
        lost = -math.expm1(count * math.log1p(-self.infinite)) if self.infinite < 1.0 else 1.0
        # a transform's rounding goes below 0; all of `tail` counts, and each side lost a quarter at most
        return LossGrid(
            self.step, self.lowest * count + first, np.maximum(masses, 0.0), min(lost + tail, 1.0)
        )

    def _bounds(self, count: int, tail: float) -> tuple[int, int]:
        """First and last index of the `count`-fold sum outside which each tail has at most `tail`."""
        indices = np.arange(len(self.masses), dtype=np.float64)
        log_masses = np.log(np.maximum(self.masses, 1e-300))  # raising an empty point only widens the bounds
        longest, budget = (len(self.masses) - 1) * count, -math.log(tail)

        def bound(log_order: float, sign: float) -> float:
            order = math.exp(log_order)
            exponents = log_masses + sign * order * indices
            top = exponents.max()
            # Chernoff: P(S >= x) <= E[e^(order X)]^count e^(-order x)
            return float(count * (top + math.log(np.exp(exponents - top).sum())) + budget) / order

        ends = []
        for sign in (-1.0, 1.0):
            best = optimize.minimize_scalar(bound, bounds=(-20.0, 5.0), args=(sign,), method="bounded")
            ends.append(best.fun)
        return max(math.floor(-ends[0]), 0), min(math.ceil(ends[1]), longest)

    def on(self, step: float) -> LossGrid:
        """The same losses moved to a coarser grid, each atom split so that P's and Q's masses stay."""
        if step == self.step:
            return self
        return atoms_on(step, self.losses, self.masses, self.infinite)

    def coarser(self) -> LossGrid:
        """The same with 64 points per standard deviation, if that is coarser."""
        step = self.std / POINTS_PER_STD
        return self.on(step) if step > self.step else self

    def plus(self, other: LossGrid) -> LossGrid:
        """The sum of this and another independent loss on the same step."""
        if other.step != self.step:
            raise ValueError(f"losses of steps {self.step} and {other.step} don't add; move one with `on`")
        masses = np.maximum(signal.fftconvolve(self.masses, other.masses), 0.0)
        infinite = self.infinite + other.infinite - self.infinite * other.infinite
        return LossGrid(self.step, self.lowest + other.lowest, masses, infinite)

    def sometimes(self, probability: float) -> LossGrid:
        """This loss with the given probability, else none. Whether it occurred is known to the adversary."""
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"probability must be in [0, 1], got {probability}")
        first = min(self.lowest, 0)
        masses = np.zeros(max(self.lowest + len(self.masses), 1) - first)
        masses[self.lowest - first : self.lowest - first + len(self.masses)] = probability * self.masses
        masses[-first] += 1.0 - probability
        return LossGrid(self.step, first, masses, probability * self.infinite)

    def delta(self, epsilon: float) -> float:
        """The hockey-stick divergence at `epsilon`."""
        losses = self.losses
        above = losses > epsilon
        # sum of m (1 - e^(epsilon - l)) above epsilon, and all of the infinite mass
        return self.infinite + float(-np.expm1(epsilon - losses[above]) @ self.masses[above])

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon >= 0 with at most `delta`. Infinite if the infinite mass exceeds it, or delta is
        below `SMALLEST_DELTA`."""
        if self.infinite > delta or delta < SMALLEST_DELTA:
            return math.inf
        # at every grid point l: P's mass from l on, infinite included, and sum of m e^(l - loss)
        upper = self.masses[::-1].cumsum()[::-1] + self.infinite
        decay = [1.0, -math.exp(-self.step)]
        lower = signal.lfilter([1.0], decay, self.masses[::-1])[::-1]
        enough = np.flatnonzero(upper - lower <= delta)
        first = int(enough[0])
        if upper[first] <= delta or lower[first] <= 0.0:
            return max(float(self.losses[max(first - 1, 0)]), 0.0)
        # below point l the curve is upper - e^(epsilon - l) lower, down to the next point
        solution = self.losses[first] + math.log((upper[first] - delta) / lower[first])
        return max(float(solution), 0.0)


def atoms_on(step: float, losses: Array, masses: Array, infinite: float) -> LossGrid:
    """Atoms at any losses moved to a grid, each split so that P's and Q's masses stay.

    Args:
        step: Grid step, in nats.
        losses: `(atoms,)`, ascending.
        masses: `(atoms,)` masses under P.
        infinite: Mass of infinite loss.
    """
    places = losses / step
    below = np.floor(places)
    # a fraction of the mass goes up: w e^-hi + (1 - w) e^-lo = e^-l
    up = -np.expm1((below - places) * step) / -math.expm1(-step)
    lowest = int(below[0])
    indices = (below - lowest).astype(np.int64)
    size = int(indices[-1]) + 2
    moved = np.zeros(size)
    moved += np.bincount(indices, masses * (1.0 - up), size)
    moved += np.bincount(indices + 1, masses * up, size)
    return LossGrid(step, lowest, moved, infinite)


def grid_from_curve(step: float, first: int, curve: Array) -> LossGrid:
    """The loss on {first, first + 1, ...} * step whose hockey-stick curve connects the dots of `curve`.

    Args:
        step: Grid step, in nats.
        first: Index of the first point, < 0.
        curve: `(points,)` values at those epsilons, >= 1 - e^epsilon, convex in e^epsilon; what remains at
            the last is infinite loss.
    """
    curve = np.minimum.accumulate(np.clip(curve, 0.0, 1.0))
    falls = np.diff(curve)
    masses = np.empty_like(curve)
    grow = math.expm1(step)
    masses[0] = 1.0 - curve[0] + falls[0] / grow  # of the curve that is linear in e^epsilon between points
    masses[1:-1] = (falls[1:] - math.exp(step) * falls[:-1]) / grow
    masses[-1] = falls[-1] / math.expm1(-step)
    return LossGrid(step, first, np.maximum(masses, 0.0), float(curve[-1]))  # convex but for rounding


@lru_cache(maxsize=64)
def loss_grid(loss: Loss, tail: float) -> LossGrid:
    """A loss distribution that dominates one composition of `loss`.

    The step follows the standard deviation of the loss: dp_accounting's default of 1e-4 would overstate a
    million small losses by up to a hundred nats.

    Args:
        loss: A claim's loss.
        tail: Mass of large finite losses that may be counted as infinite, > 0.

    Raises:
        ValueError: If the loss is `NonPrivate`.
        TypeError: If it is no loss.
    """
    check_loss(loss)
    mass = loss.infinite_mass
    std, top = loss.scale
    if std == 0.0:
        return LossGrid(1.0, 0, np.array([1.0 - mass]), mass)
    reach = _reach(loss.curve, std, top, tail)
    if loss.bounds_only:
        reach = min(reach, 300.0)  # what lies beyond counts as infinite, and e^epsilon stays a float
    half = min(math.ceil(reach * POINTS_PER_STD / std), MOST_POINTS)
    step = reach / half
    points = step * np.arange(-half, half + 1, dtype=np.float64)
    values = loss.curve(points)
    if loss.bounds_only:
        values = _lower_hull(np.exp(points), values)
    return grid_from_curve(step, -half, values)


def check_loss(loss: Loss) -> None:
    """Refuse what is no loss.

    Raises:
        TypeError: If it is none.
    """
    if not isinstance(loss, Loss):
        raise TypeError(
            f"unknown loss {type(loss).__name__}; an accountant refuses what it does not know. "
            "Subclass lightning_fedq.privacy.losses.Loss, or use one of its kinds (PmfPairs, GaussianLoss, "
            "RenyiLoss)"
        )


def added_up(grids: Sequence[LossGrid]) -> LossGrid:
    """The sum of losses that are independent of each other, on the coarsest of their grids."""
    if len(grids) == 1:
        return grids[0]
    step = max(grid.coarser().step for grid in grids)
    return reduce(LossGrid.plus, [grid.on(step) for grid in grids])


def _lower_hull(places: Array, values: Array) -> Array:
    """The largest convex function of ascending places that is nowhere above the values, 1 at place 0."""
    x, y = np.append(0.0, places), np.append(1.0, values)
    corners: list[int] = []
    for k in range(len(x)):
        while len(corners) > 1:
            i, j = corners[-2:]
            if (y[j] - y[i]) * (x[k] - x[i]) < (y[k] - y[i]) * (x[j] - x[i]):
                break
            corners.pop()
        corners.append(k)
    hull: Array = np.interp(places, x[corners], y[corners])
    return hull


def _reach(curve: Callable[[Array], Array], std: float, top: float, tail: float) -> float:
    """Smallest of some multiples of std above which at most `tail` of finite loss remains."""
    multiples = std * np.array([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 40.0, 100.0, 300.0])
    candidates = np.append(multiples[multiples < top], top if math.isfinite(top) else 1000.0 * std)
    rest = curve(candidates)
    rest = rest - rest[-1]
    return float(candidates[int(np.argmax(rest <= tail))])
