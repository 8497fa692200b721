"""Privacy loss distributions on a grid: fast composition of many copies, rounded to larger epsilons.

A distribution has masses on multiples of a step, and a mass of infinite loss. It dominates the true loss by
connecting the dots of the hockey-stick curve (Doroshenko et al., 2022), as in dp_accounting.

Departure from dp_accounting's `self_compose`: the grid becomes coarser during composition. A billion copies,
at the step that one copy needs, would take a grid of 10^7 points. Here some thousand copies are composed at a
time, and each result is moved to a grid of 64 points per standard deviation. An atom between two grid points
is split so that its mass under P and under Q is unchanged. This is again connecting the dots, so it is
pessimistic, with a relative excess of the mean loss below (1/64)^2 / 4 per stage. Mass that is cut off at the
tails counts as infinite loss.

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
"""Smallest delta. Below it, rounding noise of Fourier transforms, 1e-16 per point, would change epsilon."""


@dataclass(frozen=True)
class LossGrid:
    """Masses of a privacy loss on {lowest, lowest + 1, ...} * step.

    Args:
        step: Grid step, > 0, in nats.
        lowest: Index of the first point, whose loss is `lowest * step`.
        masses: `(points,)` mass of each point under P.
        infinite: Mass of infinite loss. Together with `masses` it sums to 1.
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
        """Return the distribution of the sum of `count` independent copies.

        Args:
            count: Number of copies, >= 1.
            tail: Mass that may be cut off in total. It counts as infinite loss.
        """
        if count == 1:
            return self
        if not self.masses.any():  # all mass is at infinite loss
            return LossGrid(self.step, self.lowest * count, self.masses, self.infinite)
        spread = max(self.std / self.step, 1e-9)
        # compose as many copies as fit into the longest array, which must hold 24 standard deviations
        batch = max(int(min((_LONGEST / 24.0 / spread) ** 2, _LONGEST / len(self.masses) + 4096)), 2)
        if count <= batch:
            return self._power(count, tail)
        whole, rest = divmod(count, batch)
        # half of `tail` for the batches, a quarter for their sum, a quarter for the rest
        result = self._power(batch, tail / (2 * whole)).coarser().composed(whole, tail / 4)
        return result if rest == 0 else result.plus(self._power(rest, tail / 4).on(result.step))

    def _power(self, count: int, tail: float) -> LossGrid:
        """Return the `count`-fold convolution by FFT, cut to a range with at most `tail` outside."""
        if count == 1:
            return self
        first, last = self._bounds(count, tail / 4.0)
        length = fft.next_fast_len(max(last - first + 1, len(self.masses)), real=True)
        masses = fft.irfft(fft.rfft(self.masses, length) ** count, length)
        # the transform is cyclic, so index i of the sum is at place i mod length
        masses = np.roll(masses, -(first % length))[: last - first + 1]
        lost = -math.expm1(count * math.log1p(-self.infinite)) if self.infinite < 1.0 else 1.0
        # rounding of the transform can give negative masses; all of `tail` counts as infinite loss, although
        # each side lost at most a quarter of it
        infinite = min(lost + tail, 1.0)
        return LossGrid(self.step, self.lowest * count + first, np.maximum(masses, 0.0), infinite)

    def _bounds(self, count: int, tail: float) -> tuple[int, int]:
        """Return the first and last index of the `count`-fold sum, with at most `tail` beyond each."""
        indices = np.arange(len(self.masses), dtype=np.float64)
        # a tiny mass at empty points only widens the bounds
        log_masses = np.log(np.maximum(self.masses, 1e-300))
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
        """Return the same losses on a coarser grid. Splitting an atom keeps its masses under P and Q."""
        if step == self.step:
            return self
        return atoms_on(step, self.losses, self.masses, self.infinite)

    def coarser(self) -> LossGrid:
        """Return the distribution on a grid of 64 points per standard deviation, if that is coarser."""
        step = self.std / POINTS_PER_STD
        return self.on(step) if step > self.step else self

    def plus(self, other: LossGrid) -> LossGrid:
        """Return the distribution of the sum with another independent loss on the same step."""
        masses = np.maximum(signal.fftconvolve(self.masses, other.masses), 0.0)
        infinite = self.infinite + other.infinite - self.infinite * other.infinite
        return LossGrid(self.step, self.lowest + other.lowest, masses, infinite)

    def sometimes(self, probability: float) -> LossGrid:
        """Return this loss with the given probability, else zero. The adversary knows whether it occurred."""
        first = min(self.lowest, 0)
        masses = np.zeros(max(self.lowest + len(self.masses), 1) - first)
        masses[self.lowest - first : self.lowest - first + len(self.masses)] = probability * self.masses
        masses[-first] += 1.0 - probability
        return LossGrid(self.step, first, masses, probability * self.infinite)

    def delta(self, epsilon: float) -> float:
        """Return the hockey-stick divergence at `epsilon`."""
        losses = self.losses
        above = losses > epsilon
        # sum of m (1 - e^(epsilon - l)) over losses l above epsilon, and all of the infinite mass
        return self.infinite + float(-np.expm1(epsilon - losses[above]) @ self.masses[above])

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon >= 0 with at most `delta`.

        Infinite if the infinite mass exceeds `delta`, or `delta` is below `SMALLEST_DELTA`.
        """
        if self.infinite > delta or delta < SMALLEST_DELTA:
            return math.inf
        # at every grid point l: mass under P from l on, infinite loss included, and the sum of m e^(l - loss)
        upper = self.masses[::-1].cumsum()[::-1] + self.infinite
        decay = [1.0, -math.exp(-self.step)]
        lower = signal.lfilter([1.0], decay, self.masses[::-1])[::-1]
        enough = np.flatnonzero(upper - lower <= delta)
        first = int(enough[0])
        if upper[first] <= delta or lower[first] <= 0.0:
            return max(float(self.losses[max(first - 1, 0)]), 0.0)
        # between point l and the next point below, the curve is upper - e^(epsilon - l) lower
        solution = self.losses[first] + math.log((upper[first] - delta) / lower[first])
        return max(float(solution), 0.0)


def atoms_on(step: float, losses: Array, masses: Array, infinite: float) -> LossGrid:
    """Return atoms at arbitrary losses as a grid. Splitting an atom keeps its masses under P and Q.

    Args:
        step: Grid step, in nats.
        losses: `(atoms,)` losses in nats, ascending.
        masses: `(atoms,)` masses under P.
        infinite: Mass of infinite loss.
    """
    places = losses / step
    below = np.floor(places)
    # a fraction w of the mass moves to the upper point: w e^-hi + (1 - w) e^-lo = e^-l
    up = -np.expm1((below - places) * step) / -math.expm1(-step)
    lowest = int(below[0])
    indices = (below - lowest).astype(np.int64)
    size = int(indices[-1]) + 2
    moved = np.zeros(size)
    moved += np.bincount(indices, masses * (1.0 - up), size)
    moved += np.bincount(indices + 1, masses * up, size)
    return LossGrid(step, lowest, moved, infinite)


def grid_from_curve(step: float, first: int, curve: Array) -> LossGrid:
    """Return the grid whose hockey-stick curve connects the dots of `curve`.

    Args:
        step: Grid step, in nats.
        first: Index of the first point, < 0.
        curve: `(points,)` values of the curve at those epsilons, >= 1 - e^epsilon and convex in e^epsilon.
            The last value is the mass of infinite loss.
    """
    curve = np.minimum.accumulate(np.clip(curve, 0.0, 1.0))
    falls = np.diff(curve)
    masses = np.empty_like(curve)
    grow = math.expm1(step)
    # masses of the curve that is linear in e^epsilon between two points
    masses[0] = 1.0 - curve[0] + falls[0] / grow
    masses[1:-1] = (falls[1:] - math.exp(step) * falls[:-1]) / grow
    masses[-1] = falls[-1] / math.expm1(-step)
    # the curve is convex, so masses can be negative by rounding only
    return LossGrid(step, first, np.maximum(masses, 0.0), float(curve[-1]))


@lru_cache(maxsize=64)
def loss_grid(loss: Loss, tail: float) -> LossGrid:
    """Return a loss distribution that dominates one composition of `loss`.

    The step depends on the standard deviation of the loss. With dp_accounting's default step of 1e-4, a
    million small losses would be overstated by up to a hundred nats.

    Args:
        loss: Loss of a claim.
        tail: Mass of large finite losses that may count as infinite, > 0.

    Raises:
        ValueError: If the loss is `NonPrivate`.
        TypeError: If `loss` is no `Loss`.
    """
    check_loss(loss)
    mass = loss.infinite_mass
    std, top = loss.scale
    if std == 0.0:
        return LossGrid(1.0, 0, np.array([1.0 - mass]), mass)
    reach = _reach(loss.curve, std, top, tail)
    if loss.bounds_only:
        reach = min(reach, 300.0)  # larger losses count as infinite, and e^epsilon does not overflow
    half = min(math.ceil(reach * POINTS_PER_STD / std), MOST_POINTS)
    step = reach / half
    points = step * np.arange(-half, half + 1, dtype=np.float64)
    values = loss.curve(points)
    if loss.bounds_only:
        values = _lower_hull(np.exp(points), values)
    return grid_from_curve(step, -half, values)


def check_loss(loss: Loss) -> None:
    """Check that an object is a `Loss`, because accountants refuse what they do not know.

    Raises:
        TypeError: If it is not a `Loss`.
    """
    if not isinstance(loss, Loss):
        raise TypeError(
            f"Unknown loss {type(loss).__name__}. "
            "Subclass lightning_fedq.privacy.losses.Loss, or use PmfPairs, GaussianLoss or RenyiLoss."
        )


def added_up(grids: Sequence[LossGrid]) -> LossGrid:
    """Return the sum of independent losses, on the coarsest of their grids."""
    if len(grids) == 1:
        return grids[0]
    step = max(grid.coarser().step for grid in grids)
    return reduce(LossGrid.plus, [grid.on(step) for grid in grids])


def _lower_hull(places: Array, values: Array) -> Array:
    """Return the values of the largest convex function that lies below the given values and is 1 at place 0.

    Args:
        places: `(points,)` ascending places, > 0.
        values: `(points,)` values at these places.
    """
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
    """Return the smallest of some multiples of std above which at most `tail` of finite loss remains."""
    multiples = std * np.array([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 40.0, 100.0, 300.0])
    candidates = np.append(multiples[multiples < top], top if math.isfinite(top) else 1000.0 * std)
    rest = curve(candidates)
    rest = rest - rest[-1]
    return float(candidates[int(np.argmax(rest <= tail))])
