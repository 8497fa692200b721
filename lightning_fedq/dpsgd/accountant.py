"""Accountant of DP-SGD: the composed privacy loss of its steps, and the account of one data set.

`SampledGaussianAccountant` is registered with Opacus as "fedq": `PrivacyEngine(accountant="fedq")` takes it.
It composes the privacy loss distributions of the Poisson-sampled Gaussian on loss grids, for a sample that is
added and for one that is removed. The result is tighter than Opacus's RDP accountant, and thousands of steps
take milliseconds. If a person is in several samples, the number of them in a batch is binomial, and a step is
a mixture of Gaussians.

References:
    Abadi et al., Deep Learning with Differential Privacy, 2016.
    Ganesh, Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of Gaussians, 2024.
"""

import math
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from lightning_fedq.imports import extra
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.grid import POINTS_PER_STD, LossGrid, added_up, atoms_on

with extra("opacus", "DP-SGD"):
    from opacus.accountants import IAccountant, register_accountant

_MOST_STEPS = 1 << 24
_MOST_POINTS = 1 << 18
_LARGEST_LOSS = 600.0
"""Privacy losses above this value count as infinite, because e^710 overflows a float."""
Array = NDArray[np.float64]
History = tuple[tuple[float, float, int], ...]


def _privacy_loss(x: float, s: float, q: float) -> float:
    """Return a sample's privacy loss at the output x: ln(1 - q + q e^((2x - 1) / (2 s^2)))."""
    exponent = (2.0 * x - 1.0) / (2.0 * s * s)
    if exponent > 600.0:
        return exponent + math.log(q)  # 1 - q is below the rounding error here
    return math.log1p(q * math.expm1(exponent)) if q < 1.0 else exponent


def _cell_masses(edges: Array, mean: float, s: float) -> Array:
    """Return the mass of N(mean, s^2) in each cell between ascending edges, accurate in both tails."""
    z = (edges - mean) / s
    lower, upper = np.diff(special.ndtr(z)), -np.diff(special.ndtr(-z))
    masses: Array = np.where(z[1:] < 0.0, lower, upper)  # differences of ndtr cancel near 1
    return masses


def _oriented(removal: bool, without: Array, mixture: Array, losses: Array) -> tuple[Array, Array, Array]:
    """Return the masses of P and of Q, and the losses, in ascending order of the losses of P against Q.

    Args:
        removal: True if P has the person's samples and Q does not, False for the reverse.
        without: Mass of each cell of outputs without the samples.
        mixture: Mass of each cell of outputs with the samples.
        losses: Losses at the edges between the cells, for removal.
    """
    if removal:
        return mixture, without, losses
    return without[::-1], mixture[::-1], -losses[::-1]


def _connect_dots(p: Array, q: Array, losses: Array, shrinkage: float | Array) -> Array:
    """Return masses at the losses that dominate the cells between them ("connecting the dots").

    Each cell's mass is split between its two ends so that its masses under P and under Q both stay. Below the
    first loss all mass moves up to it. The mass above the last loss, which counts as infinite, is left out.

    Args:
        p: Mass of each cell under P, `(losses + 1,)`, with the two outer cells.
        q: Mass of each cell under Q.
        losses: Ascending losses at the edges between the cells.
        shrinkage: 1 - e^-width of each inner cell, where the width is that of its losses.
    """
    to_upper_end = np.clip((p[1:-1] - q[1:-1] * np.exp(losses[:-1])) / shrinkage, 0.0, p[1:-1])
    masses = np.append(p[0], to_upper_end)
    masses[:-1] += p[1:-1] - to_upper_end
    return masses


@lru_cache(maxsize=64)
def sampled_gaussian_grid(
    noise_multiplier: float, sample_rate: float, removal: bool, tail: float, rows: int = 1
) -> LossGrid:
    """Return a privacy loss distribution, on a grid, that dominates one Poisson-sampled Gaussian step.

    The step compares P = (1 - q) N(0, s^2) + q N(1, s^2), with the sample, to Q = N(0, s^2), without it. The
    loss grows with the output x, so the cells of the grid are intervals of x.

    Args:
        noise_multiplier: Noise multiplier s > 0.
        sample_rate: Sampling rate q in (0, 1].
        removal: True for the loss of P against Q (a sample is removed), False for Q against P (added).
        tail: Probability of large losses that may count as infinite.
        rows: Samples of one person, all removed or all added. If > 1, `mixture_grid` is used.
    """
    s, q = noise_multiplier, sample_rate
    if rows > 1:
        return mixture_grid(s, q, rows, removal, tail)
    # for removal, all mass but `tail` lies between these losses
    width = s * (math.sqrt(-2.0 * math.log(tail)) + 0.5)
    at_ends = (_privacy_loss(x, s, q) if q == 1.0 or x > 0 else math.log1p(-q) for x in (-width, 1.0 + width))
    lowest, highest = sorted(min(max(loss, -_LARGEST_LOSS), _LARGEST_LOSS) for loss in at_ends)
    step = max(_std(s, q, removal) / POINTS_PER_STD, (highest - lowest) / _MOST_POINTS)
    first, last = math.floor(lowest / step), math.ceil(highest / step)
    losses = step * np.arange(first, last + 1, dtype=np.float64)
    with np.errstate(divide="ignore"):
        exponents = np.log(np.maximum(np.expm1(losses) + q, 0.0) / q)  # (x - 1/2) / s^2 at each loss
    edges = np.concatenate([[-np.inf], s * s * exponents + 0.5, [np.inf]])
    without, with_sample = _cell_masses(edges, 0.0, s), _cell_masses(edges, 1.0, s)
    mixture = (1.0 - q) * without + q * with_sample
    p, other, losses = _oriented(removal, without, mixture, losses)
    masses = _connect_dots(p, other, losses, -math.expm1(-step))
    return LossGrid(step, first if removal else -last, masses, float(p[-1]))


def mixture_grid(s: float, q: float, rows: int, removal: bool, tail: float) -> LossGrid:
    """Return a privacy loss distribution, on a grid, that dominates one step for a person in several rows.

    The number j of the person's rows in a batch is binomial, and each row moves the sum by at most 1. The
    worst case compares P = sum_j Binom(j; rows, q) N(j, s^2) to Q = N(0, s^2), also for vectors and adaptive
    queries (Ganesh 2024). The loss grows with the output, as for a single row.

    Args:
        s: Noise multiplier, > 0.
        q: Sampling rate in (0, 1].
        rows: Rows of the person, >= 1, all removed or all added.
        removal: True for the loss of P against Q (removed), False for Q against P (added).
        tail: Probability of large losses that may count as infinite.
    """
    log_chances = {j: float(stats.binom.logpmf(j, rows, q)) for j in range(rows + 1)}
    log_chances = {j: log_chance for j, log_chance in log_chances.items() if log_chance > -_LARGEST_LOSS}

    def privacy_losses(x: Array) -> Array:
        parts = (chance + (2.0 * j * x - j * j) / (2.0 * s * s) for j, chance in log_chances.items())
        return reduce(np.logaddexp, parts)

    width = s * (math.sqrt(-2.0 * math.log(tail)) + 0.5)
    x = np.linspace(-width, rows + width, _MOST_POINTS // 16)
    losses = privacy_losses(x)
    x, losses = (column[np.abs(losses) <= _LARGEST_LOSS] for column in (x, losses))
    density = np.exp(-0.5 * (x / s) ** 2 + (losses if removal else 0.0))
    if len(x) < 2 or not density.any():  # with hardly any noise all losses are infinite
        return LossGrid(1.0, 0, np.zeros(1), 1.0)
    std = math.sqrt(float((density * losses**2).sum() / density.sum()))
    span = losses[-1] - losses[0]
    step = max(std / POINTS_PER_STD, span / _MOST_POINTS)
    # choose outputs whose losses are about one step apart, and compute the exact losses there
    points = np.linspace(losses[0], losses[-1], math.ceil(span / step) + 1)
    x = np.interp(points, losses, x)
    losses, edges = privacy_losses(x), np.concatenate([[-np.inf], x, [np.inf]])
    without = _cell_masses(edges, 0.0, s)
    parts = (math.exp(chance) * _cell_masses(edges, j, s) for j, chance in log_chances.items())
    p, other, losses = _oriented(removal, without, reduce(np.add, parts), losses)
    masses = _connect_dots(p, other, losses, -np.expm1(losses[:-1] - losses[1:]))
    return atoms_on(step, losses, masses, float(p[-1]))


def _std(s: float, q: float, removal: bool) -> float:
    """Return the approximate root mean square of the privacy loss of one step, which sets the grid's step."""
    x = np.linspace(-9.0 * s, 1.0 + 9.0 * s, 4001)
    losses = np.clip([_privacy_loss(value, s, q) for value in x.tolist()], -_LARGEST_LOSS, _LARGEST_LOSS)
    density = np.exp(-0.5 * (x / s) ** 2)
    if removal:
        density = (1.0 - q) * density + q * np.exp(-0.5 * ((x - 1.0) / s) ** 2)
    return math.sqrt(float((density * losses**2).sum() / density.sum()))


class SampledGaussianAccountant(IAccountant):  # type: ignore[misc]
    """Accountant of Poisson-sampled Gaussian steps, where neighbours differ by all samples of one person.

    As in Opacus's accountants, `history` is a list of `(noise_multiplier, sample_rate, steps)`.

    Args:
        rows: Largest number of samples of one person, >= 1. They are all added or all removed.
    """

    def __init__(self, rows: int = 1) -> None:
        self.history: list[tuple[float, float, int]] = []
        self.rows = rows

    @classmethod
    def mechanism(cls) -> str:
        """Return the name under which Opacus registers the accountant."""
        return "fedq"

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Account for one optimiser step.

        Args:
            noise_multiplier: Standard deviation of the noise divided by the clipping norm, > 0.
            sample_rate: Probability in (0, 1] with which the step drew each sample.

        Raises:
            ValueError: If a value is out of its range.
        """
        if not noise_multiplier > 0.0:
            raise ValueError(f"noise_multiplier must be > 0, got {noise_multiplier}")
        if not 0.0 < sample_rate <= 1.0:
            raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")
        steps = 0
        if self.history and self.history[-1][:2] == (noise_multiplier, sample_rate):
            steps = self.history.pop()[2]
        self.history.append((noise_multiplier, sample_rate, steps + 1))

    def get_epsilon(self, delta: float, **kwargs: Any) -> float:
        """Return the epsilon spent so far at `delta`.

        Raises:
            TypeError: If further options are given, because this accountant has none.
        """
        if kwargs:
            raise TypeError(f"get_epsilon takes delta only, got {sorted(kwargs)}")
        history = tuple((nm, rate, steps) for nm, rate, steps in self.history)
        return _epsilon(history, check_delta(delta), self.rows)

    def __len__(self) -> int:
        """Return the number of steps so far."""
        return sum(steps for _, _, steps in self.history)


register_accountant("fedq", SampledGaussianAccountant, force=True)


@lru_cache(maxsize=1024)
def _epsilon(history: History, delta: float, rows: int = 1) -> float:
    """Return the epsilon of a history: the larger of the epsilons for removal and for addition."""
    return max(_composed(history, delta, removal, rows).epsilon(delta) for removal in (True, False))


def _composed(history: History, delta: float, removal: bool, rows: int) -> LossGrid:
    """Return the composed privacy loss distribution of a history, for removal or for addition."""
    if not history:
        return LossGrid(1.0, 0, np.ones(1), 0.0)
    share = 1e-3 * delta / len(history)
    grids = [
        # round the tail down to a power of ten, so that the cache finds equal grids
        sampled_gaussian_grid(nm, rate, removal, 10.0 ** math.floor(math.log10(share / steps)), rows)
        for nm, rate, steps in history
    ]
    for grid in grids:
        if not grid.masses.any():  # all losses are infinite, because there is hardly any noise
            return grid
    return added_up([grid.composed(steps, share) for grid, (_, _, steps) in zip(grids, history, strict=True)])


@lru_cache(maxsize=1024)
def _steps_within(
    history: History, epsilon: float, delta: float, step: tuple[float, float], rows: int
) -> int:
    """Return how many further steps stay within `epsilon`, at most 2^24, found by bisection.

    Args:
        history: Steps that are charged already.
        epsilon: Budget at `delta`, > 0.
        delta: Delta of the guarantee, in (0, 1).
        step: Noise multiplier and sampling rate of the further steps.
        rows: Largest number of samples of one person, >= 1.
    """

    def fit(steps: int) -> bool:
        return _epsilon((*history, (*step, steps)), delta, rows) <= epsilon

    low, high = 0, 1
    while high < _MOST_STEPS and fit(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low


class Account:
    """Privacy account of the DP-SGD steps on one data set: that of one client, or of a run without clients.

    Args:
        noise_multiplier: Noise multiplier of every coming step, > 0.
        sample_rate: Probability in (0, 1] with which a coming step draws each sample.
        rows: Largest number of samples of one person, >= 1.

    Attributes:
        accountant: Accountant with the history of charged steps.
        step_limit: Largest number of steps that may be charged; None is no limit.
    """

    def __init__(self, noise_multiplier: float, sample_rate: float, rows: int = 1) -> None:
        self.noise_multiplier, self.sample_rate = noise_multiplier, sample_rate
        self.accountant = SampledGaussianAccountant(rows)
        self.step_limit: int | None = None

    @property
    def steps(self) -> int:
        """Number of charged steps."""
        return len(self.accountant)

    def epsilon(self, delta: float) -> float:
        """Return the epsilon spent at `delta`."""
        return self.accountant.get_epsilon(delta)

    def steps_within(self, epsilon: float, delta: float) -> int:
        """Return how many steps in total, past ones included, stay within `epsilon` at `delta`."""
        step = (self.noise_multiplier, self.sample_rate)
        spent, rows = tuple(self.accountant.history), self.accountant.rows
        return self.steps + _steps_within(spent, epsilon, check_delta(delta), step, rows)

    def fits(self, steps: int) -> bool:
        """Return whether the limit allows this many further steps."""
        return self.step_limit is None or self.steps + steps <= self.step_limit

    def charge(self) -> int:
        """Charge one step, before its noise is drawn, and return its number.

        Raises:
            RuntimeError: If the limit is reached.
        """
        step = self.steps
        if not self.fits(1):
            raise RuntimeError(
                f"The privacy budget allows {self.step_limit} steps, and all are taken. "
                "Raise the budget, or stop the training here."
            )
        self.accountant.step(noise_multiplier=self.noise_multiplier, sample_rate=self.sample_rate)
        return step
