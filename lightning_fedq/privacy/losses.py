"""From a claim's loss to its worst hockey-stick curve, and to a loss grid fit for composition.

The curve of a claim is the largest of the curves of its pairs, in both orders, at every epsilon; a maximum
of convex curves is the curve of some pair again, and that pair dominates every case. The step of the grid
follows the standard deviation of the loss: dp_accounting's default of 1e-4 would overstate a million small
losses by up to a hundred nats.

A zero-concentrated loss has no curve of its own, only bounds on it, one per Renyi order. Their minimum is no
hockey-stick curve, because it is not convex in e^epsilon; the true curve is, so it lies below the lower
convex hull of the bounds too, and that hull is the curve of a pair, fit for composition. Composing such pairs
is sound but loose: `accounting` adds the rhos up first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from lightning_fedq.core import (
    CoinSum,
    ConcentratedLoss,
    GaussianLoss,
    HiddenPair,
    LaplaceLoss,
    Loss,
    NonPrivate,
    PmfPairs,
    SampledGaussianLoss,
)
from lightning_fedq.functional.one_bit_privacy import coin_splits, coin_sum_pmf, hockey_stick
from lightning_fedq.privacy.grid import LossGrid, grid_from_curve

Array = NDArray[np.float64]
Pairs = list[tuple[Array, Array, float]]
ClosedForm = GaussianLoss | LaplaceLoss | SampledGaussianLoss | ConcentratedLoss

_POINTS_PER_STD = 64
_MOST_POINTS = 20_000


def _check(loss: object) -> None:
    if isinstance(loss, NonPrivate):
        raise ValueError(f"there is no guarantee to account for: {loss.reason}")
    if not isinstance(loss, PmfPairs | CoinSum | ClosedForm):
        raise TypeError(
            f"unknown loss {type(loss).__name__}; an accountant refuses what it does not know. "
            "Use PmfPairs, CoinSum, or a loss with a closed curve (Gaussian, Laplace, sampled, concentrated)"
        )


def _hidden_pairs(victim: HiddenPair, low: float, high: float) -> Pairs:
    pairs: Pairs = []
    for num_high in coin_splits(victim.num_coins):
        noise = coin_sum_pmf(victim.num_coins, num_high, low, high)
        p, q = np.convolve(noise, victim.p), np.convolve(noise, victim.q)
        pairs += [(p, q, victim.weight), (q, p, victim.weight)]
    return pairs


def _pairs(loss: PmfPairs | CoinSum) -> Pairs:
    """All (P, Q, weight), both orders."""
    if isinstance(loss, CoinSum):
        return [pair for victim in loss.victims for pair in _hidden_pairs(victim, loss.low, loss.high)]
    arrays = [(np.array(p), np.array(q)) for p, q in loss.pairs]
    return [(a, b, 1.0) for p, q in arrays for a, b in ((p, q), (q, p))]


def _curve_of_pairs(pairs: Pairs, epsilons: Array) -> Array:
    worst = np.maximum(-np.expm1(epsilons), 0.0)
    floor = worst.copy()
    for p, q, weight in pairs:
        worst = np.maximum(worst, weight * hockey_stick(p, q, epsilons) + (1.0 - weight) * floor)
    return worst


def _sampled_curve(loss: SampledGaussianLoss, epsilons: Array) -> Array:
    """Hockey stick of (1 - g) N(0, z^2) + g N(1, z^2) over N(0, z^2), larger of both orders."""
    z, g = loss.noise_multiplier, loss.sampling_probability

    def forward(values: Array) -> Array:
        odds = (np.expm1(values) + g) / g  # likelihood ratio of the shifted part where the two laws cross
        cut = np.where(odds > 0.0, z * z * np.log(np.maximum(odds, 1e-300)) + 0.5, -np.inf)
        away, near = special.ndtr(-cut / z), special.ndtr((1.0 - cut) / z)
        mixture = (1.0 - g) * away + g * near - np.exp(values) * away
        return np.where(odds > 0.0, mixture, -np.expm1(values))

    # exp overflows beyond; the curve falls, so its value there is an upper bound
    epsilons = np.clip(epsilons, -700.0, 700.0)
    backward = -np.expm1(epsilons) + np.exp(epsilons) * forward(-epsilons)
    floor = np.maximum(-np.expm1(epsilons), 0.0)
    return np.maximum(np.maximum(forward(epsilons), backward), floor)


def _concentrated_curve(loss: ConcentratedLoss, size: Array) -> Array:
    """Smallest of the bounds exp((a - 1)(a rho - e)) (1 - 1/a)^a / (a - 1) over orders a (Canonne et al.
    2020)."""
    orders = 1.0 + np.logspace(-4, 6, 601)[:, None]
    logs = (orders - 1.0) * (orders * loss.rho - size.reshape(1, -1))
    logs = logs + orders * np.log1p(-1.0 / orders) - np.log(orders - 1.0)
    bound: Array = np.exp(np.minimum(logs.min(0), 0.0)).reshape(size.shape)
    return bound


def _closed_curve(loss: ClosedForm, epsilons: Array) -> Array:
    if isinstance(loss, SampledGaussianLoss):
        return _sampled_curve(loss, epsilons)
    size = np.abs(epsilons)
    if isinstance(loss, GaussianLoss):
        mu = 1.0 / loss.noise_multiplier
        upper = special.log_ndtr(mu / 2.0 - size / mu)
        lower = special.log_ndtr(-mu / 2.0 - size / mu) + size
        curve = np.exp(upper) * -np.expm1(np.minimum(lower - upper, 0.0))
    elif isinstance(loss, ConcentratedLoss):
        curve = _concentrated_curve(loss, size)
    else:
        curve = np.maximum(-np.expm1(0.5 * (size - 1.0 / loss.noise_multiplier)), 0.0)
    # a symmetric loss: H(-e) = 1 - exp(-e) + exp(-e) H(e)
    below: Array = -np.expm1(-size) + np.exp(-size) * curve
    return np.where(epsilons >= 0.0, curve, below)


def worst_curve(loss: Loss, epsilons: Array) -> Array:
    """delta of one composition at every epsilon, worst over the claim's cases and both orders.

    Args:
        loss: A claim's loss.
        epsilons: `(m,)` any real numbers, in nats.

    Raises:
        ValueError: If the loss is `NonPrivate`.
        TypeError: If the loss is of an unknown kind.
    """
    _check(loss)
    if isinstance(loss, ClosedForm):
        return _closed_curve(loss, epsilons)
    assert isinstance(loss, PmfPairs | CoinSum)
    return _curve_of_pairs(_pairs(loss), epsilons)


def infinite_mass(loss: Loss) -> float:
    """Largest probability of an outcome that only one of the two worlds can produce, in one composition."""
    _check(loss)
    if isinstance(loss, ClosedForm):
        return 0.0
    assert isinstance(loss, PmfPairs | CoinSum)
    return max(weight * float(p[q <= 0].sum()) for p, q, weight in _pairs(loss))


def pure_epsilon(loss: Loss) -> float:
    """The largest loss of one composition; infinite where there is infinite mass or an unbounded density."""
    _check(loss)
    if isinstance(loss, GaussianLoss | SampledGaussianLoss | ConcentratedLoss):
        return math.inf
    if isinstance(loss, LaplaceLoss):
        return 1.0 / loss.noise_multiplier
    assert isinstance(loss, PmfPairs | CoinSum)
    return max(_largest_loss(p, q) for p, q, _ in _pairs(loss))


def _largest_loss(p: Array, q: Array) -> float:
    shown = p > 0
    if bool((q[shown] <= 0).any()):
        return math.inf
    return float(np.log(p[shown] / q[shown]).max())


def _finite_std(p: Array, q: Array) -> tuple[float, float]:
    """Root mean square and largest absolute value of the finite losses."""
    both = (p > 0) & (q > 0)
    losses = np.log(p[both] / q[both])
    if not losses.size:
        return 0.0, 0.0
    return math.sqrt(float(p[both] @ losses**2)), float(np.abs(losses).max())


def _scale(loss: Loss, pairs: Pairs) -> tuple[float, float]:
    if isinstance(loss, GaussianLoss):
        return 1.0 / loss.noise_multiplier, math.inf
    if isinstance(loss, SampledGaussianLoss):
        rest = loss.sampling_probability * math.sqrt(math.expm1(min(loss.noise_multiplier**-2, 50.0)))
        return min(rest, 1.0 / loss.noise_multiplier), math.inf
    if isinstance(loss, ConcentratedLoss):
        return math.sqrt(2.0 * loss.rho), math.inf
    if isinstance(loss, LaplaceLoss):
        return 1.0 / loss.noise_multiplier, 1.0 / loss.noise_multiplier
    scales = [_finite_std(p, q) for p, q, _ in pairs]
    return max(std for std, _ in scales), max(top for _, top in scales)


@lru_cache(maxsize=64)
def loss_grid(loss: Loss, tail: float) -> LossGrid:
    """A loss distribution that dominates one composition of `loss`.

    Args:
        loss: A claim's loss.
        tail: Mass of large finite losses that may be counted as infinite, > 0.

    Raises:
        ValueError: If the loss is `NonPrivate`.
        TypeError: If the loss is of an unknown kind.
    """
    _check(loss)
    pairs = _pairs(loss) if isinstance(loss, PmfPairs | CoinSum) else []
    std, top = _scale(loss, pairs)
    if std == 0.0:
        mass = infinite_mass(loss)
        return LossGrid(1.0, 0, np.array([1.0 - mass]), mass)

    def curve(epsilons: Array) -> Array:
        if isinstance(loss, ClosedForm):
            return _closed_curve(loss, epsilons)
        return _curve_of_pairs(pairs, epsilons)

    reach = _reach(curve, std, top, tail)
    if isinstance(loss, ConcentratedLoss):
        reach = min(reach, 300.0)  # what lies beyond counts as infinite, and e^epsilon stays a float
    half = min(math.ceil(reach * _POINTS_PER_STD / std), _MOST_POINTS)
    step = reach / half
    points = step * np.arange(-half, half + 1, dtype=np.float64)
    values = curve(points)
    if isinstance(loss, ConcentratedLoss):
        values = _lower_hull(np.exp(points), values)
    return grid_from_curve(step, -half, values)


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
