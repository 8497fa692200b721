"""Decompose a target law into scaled and shifted Irwin-Hall laws: random (A, B) with A Z + B ~ Q.

Z is the standardised Irwin-Hall law f of n uniforms (the error that dithers leave in a mean), Q the
target, with density g. With probability lambda = inf g' / f' the pair is (1, 0) ("core"). What is left,
psi = (g - lambda f) / (1 - lambda), is symmetric and unimodal, so it is a mixture of uniforms on (-r, r)
("special"), and each uniform is cut into scaled copies of f: the largest copy that fits under it, and
recursively what sticks out left and right.

This is the batched form of the paper's algorithms 2 and 3: the same law of (A, B), drawn from tables of
the inverse distribution functions instead of bisection, with branches decided by integer comparison only.
Departures: the printed `f(x/L)/L` of algorithm 2 is L f(L x) (the printed form gives an error variance of
0.80 instead of 1); the tables' total-variation error is bounded by `Decomposition.law_error`; and A, whose
lower tail is so heavy that symbols would leave int64, is kept at or above 2^-k, k = 45 unless the caller
needs a higher cap, which moves an output by less than 2^-k (|Z| + L / 2) standard deviations,
`Decomposition.cap_shift`.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning,
    AISTATS 2024, section 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numba
import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from lightning_fedq.functional.chunks import in_chunks
from lightning_fedq.functional.irwin_hall import (
    Array,
    half_support,
    irwin_hall_pdf,
    irwin_hall_slope,
)

Target = Literal["gaussian", "laplace"]

LEAST_SCALE_BITS = 45
"""A is never below 2^-45, unless the caller needs it higher."""
_MOST_CUTS = 64
_CELLS = 4096
_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(8)


def target_pdf(x: Array, target: Target) -> Array:
    """Density of the target law with mean 0 and variance 1."""
    if target == "gaussian":
        return np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return math.sqrt(0.5) * np.exp(-math.sqrt(2.0) * np.abs(x))


def target_slope(x: Array, target: Target) -> Array:
    """Derivative of `target_pdf` for x > 0."""
    return (-x if target == "gaussian" else -math.sqrt(2.0)) * target_pdf(x, target)


def target_cdf(x: Array, target: Target) -> Array:
    """Distribution function of the target law, for x >= 0."""
    if target == "gaussian":
        return np.asarray(special.ndtr(x), np.float64)
    return 1.0 - 0.5 * np.exp(-math.sqrt(2.0) * x)


def core_probability(n: int, target: Target = "gaussian") -> float:
    """lambda = inf over 0 < x < sqrt(3 n) of g'(x) / f'(x), rounded down by 1e-12; 0 for n <= 2.

    Args:
        n: Number of uniforms, >= 1.
        target: Target law.

    Raises:
        ValueError: If n < 1.
    """
    end = half_support(n)
    if n <= 2:
        return 0.0

    def ratio(x: Array | float) -> Array:
        points = np.asarray(x, np.float64)
        below = -irwin_hall_slope(points, n)
        return -target_slope(points, target) / np.maximum(below, 1e-300)

    points = np.linspace(0.0, min(end, 6.0), 4001)[1:-1]
    values = ratio(points)
    best = int(values.argmin())
    low, high = points[max(best - 1, 0)], points[min(best + 1, len(points) - 1)]
    found = optimize.minimize_scalar(ratio, bounds=(low, high), method="bounded", options={"xatol": 1e-10})
    return max(min(float(found.fun), float(values[best]), 1.0) - 1e-12, 0.0)


@dataclass(frozen=True)
class InverseTable:
    """Inverse distribution function of a law on (0, end): Hermite-cubic cells, inverted by Newton steps.

    Args:
        width: Width of a cell.
        cdf: Distribution function at the cells' ends, from 0 to 1.
        pdf: Density at the same points.
        error: Total variation between the tabled law and the law meant.
    """

    width: float
    cdf: Array
    pdf: Array
    error: float

    def sample(self, uniforms: Array) -> Array:
        """Map uniforms on (0, 1) to the law."""
        out = np.empty_like(uniforms)
        _invert(self.cdf, self.pdf, self.width, uniforms, out)
        return out


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _invert(cdf: Array, pdf: Array, width: float, uniforms: Array, out: Array) -> None:
    for j in range(uniforms.size):
        u = uniforms[j]
        cell = min(max(np.searchsorted(cdf, u, side="right") - 1, 0), cdf.size - 2)
        rise, left, right = cdf[cell + 1] - cdf[cell], width * pdf[cell], width * pdf[cell + 1]
        if rise <= 0.0:
            out[j] = cell * width
            continue
        square, cube = 3.0 * rise - 2.0 * left - right, left + right - 2.0 * rise
        low, high, wanted = 0.0, 1.0, u - cdf[cell]
        t = min(max(wanted / rise, 0.0), 1.0)
        for _ in range(40):
            value = ((cube * t + square) * t + left) * t - wanted
            if value > 0.0:
                high = t
            else:
                low = t
            slope = (3.0 * cube * t + 2.0 * square) * t + left
            step = t - value / slope if slope > 0.0 else 0.5 * (low + high)
            if not low <= step <= high:
                step = 0.5 * (low + high)
            if abs(step - t) < 1e-15:
                t = step
                break
            t = step
        out[j] = (cell + t) * width


def _table(density: Array, inner: Array, width: float) -> InverseTable:
    """Build a table from the density at the cells' ends `(c + 1,)` and at Gauss nodes inside `(c, 8)`.

    The total variation adds what the cubic's slope misses, the mass that normalising moves and a
    rounding term; it is measured at the Gauss nodes, where the density is smooth inside cells.
    """
    mass = 0.5 * width * (inner * _GAUSS_WEIGHTS).sum(1)
    total = float(mass.sum())
    cdf = np.concatenate([[0.0], np.cumsum(mass) / total])
    cdf[-1] = 1.0
    pdf = density / total
    # A cubic is monotone where its end slopes are at most three times the mean slope (Fritsch and Carlson).
    limit = 3.0 * np.diff(cdf) / width
    ends = np.minimum(pdf, np.minimum(np.append(limit, np.inf), np.append(np.inf, limit)))
    t = 0.5 * (_GAUSS_NODES + 1.0)
    rise, left, right = np.diff(cdf)[:, None] / width, ends[:-1, None], ends[1:, None]
    slope = 6.0 * t * (1.0 - t) * rise + (1.0 - t) * (1.0 - 3.0 * t) * left + t * (3.0 * t - 2.0) * right
    miss = 0.25 * width * float((np.abs(slope - inner / total) * _GAUSS_WEIGHTS).sum())
    return InverseTable(width, cdf, ends, miss + abs(total - 1.0) + 1e-15)


def _cells(n: int, end: float) -> tuple[float, int]:
    """Cell width and number up to `end`; for n <= 40 the spline's knots are ends of cells."""
    if n > 40:
        return end / _CELLS, _CELLS
    knot = 0.5 / math.sqrt(n / 12.0)
    per_knot = max(math.ceil(knot * _CELLS / end), 1)
    return knot / per_knot, math.ceil(end * per_knot / knot - 1e-9)


@dataclass(frozen=True)
class Decomposition:
    """Everything that drawing (A, B) for one n and target needs; data-independent, built once.

    Args:
        n: Number of uniforms.
        target: Target law, variance 1.
        core: lambda.
        radius: Law of the radius r of a special coordinate's uniform.
        cut: Law of y = L c, where a uniform is cut; None for n = 1, which needs no cuts.
        rounds: m = L f(0), mean number of rounds.
        core_threshold: A special coordinate is a 64-bit word at or above it.
        cut_thresholds: Decreasing; the number of cuts is how many of them exceed a word.
    """

    n: int
    target: Target
    core: float
    radius: InverseTable
    cut: InverseTable | None
    rounds: float
    core_threshold: int
    cut_thresholds: NDArray[np.uint64]

    @property
    def law_error(self) -> float:
        """Bound on the total variation between A Z + B and the target that the tables cause."""
        cuts = (self.rounds - 1.0) * (self.cut.error if self.cut else 0.0)
        coins = 2.0**-64 * (1 + _MOST_CUTS)
        return (1.0 - self.core) * (self.radius.error + cuts) + coins

    def cap_shift(self, least_bits: int = LEAST_SCALE_BITS) -> float:
        """Bound on the mean distance that the cap moves an output of a capped coordinate, in stds."""
        return 2.0**-least_bits * (1.0 + half_support(self.n))


@lru_cache(maxsize=64)
def decomposition(n: int, target: Target = "gaussian") -> Decomposition:
    """Build, once, the tables for n uniforms and a target law.

    Args:
        n: Number of uniforms, >= 1.
        target: "gaussian" or "laplace", variance 1.

    Raises:
        ValueError: If n < 1 or the target is unknown.
    """
    if target not in ("gaussian", "laplace"):
        raise ValueError(f"target must be 'gaussian' or 'laplace', got {target!r}")
    core, end = core_probability(n, target), half_support(n)
    reach = 9.0 if target == "gaussian" else 27.0
    width, count = _cells(n, reach)

    def radius_density(r: Array) -> Array:
        slope = target_slope(r, target) - (core * irwin_hall_slope(r, n) if core else 0.0)
        return 2.0 * r * np.maximum(-slope, 0.0) / (1.0 - core)

    rounds = 2.0 * end * float(irwin_hall_pdf(np.zeros(1), n)[0])
    cut = None
    if n > 1:
        # For n = 2 the slope jumps at both ends; 1e-12 inside is inside.
        cut_width, cut_count = _cells(n, min(end, 9.5))
        last = min(cut_width * cut_count, end)

        def cut_density(y: Array) -> Array:
            inside = np.clip(y, 1e-12, last - 1e-12)
            return (
                (1.0 - y / end) * np.maximum(-irwin_hall_slope(inside, n), 0.0) * 2.0 * end / (rounds - 1.0)
            )

        cut = _table(*_evaluate(cut_density, cut_width, cut_count), cut_width)
    stay = 1.0 - 1.0 / rounds
    thresholds = [
        math.floor(stay**k * 2.0**64) if rounds > 1.0 + 1e-9 else 0 for k in range(1, _MOST_CUTS + 1)
    ]
    return Decomposition(
        n,
        target,
        core,
        _table(*_evaluate(radius_density, width, count), width),
        cut,
        rounds,
        min(math.floor(core * 2.0**64), 2**64 - 1),
        np.array([min(t, 2**64 - 1) for t in thresholds], np.uint64),
    )


def _evaluate(density: Callable[[Array], Array], width: float, count: int) -> tuple[Array, Array]:
    ends: Array = width * np.arange(count + 1, dtype=np.float64)
    inner: Array = ends[:-1, None] + 0.5 * width * (_GAUSS_NODES + 1.0)
    return density(ends), density(inner)


def draw_mixture(
    plan: Decomposition,
    count: int,
    words: Callable[[int], NDArray[np.uint64]],
    least_bits: int = LEAST_SCALE_BITS,
) -> tuple[Array, Array]:
    """Draw (A, B) for `count` coordinates: A Z + B has the target law for Z of the Irwin-Hall law.

    Everybody who calls it with the same words gets the same pairs: branches compare integers, and how
    many words are read depends on the words alone. (The cap on A compares floats; two machines
    whose logarithms differ in the last digit would have to meet A within 1e-16 of the cap to differ.)

    Args:
        plan: Tables of n and the target.
        count: Number of coordinates.
        words: Source of uniform 64-bit words, as `Stream.words64`.
        least_bits: k of the cap on A.

    Returns:
        A in [2^-k, ...) and B, float64 `(count,)`, for a target of variance 1.
    """
    scale, shift = np.ones(count), np.zeros(count)
    special_at = np.concatenate(
        in_chunks(
            count,
            words,
            lambda part, drawn: part.start + np.flatnonzero(drawn >= np.uint64(plan.core_threshold)),
        )
        or [np.zeros(0, np.int64)]
    )
    radius = plan.radius.sample(_uniforms(words(len(special_at))))
    unit = radius / half_support(plan.n)
    a, b = np.ones(len(special_at)), np.zeros(len(special_at))
    if plan.cut is not None:
        ascending = plan.cut_thresholds[::-1]
        below = np.searchsorted(ascending, words(len(special_at)), side="right")
        cuts = len(ascending) - below
        active = np.flatnonzero(cuts > 0)
        for level in range(1, _MOST_CUTS + 1):
            if not len(active):
                break
            drawn = words(len(active))
            place = np.minimum(plan.cut.sample(_uniforms(drawn)) / (2.0 * half_support(plan.n)), 0.5)
            sign = 1.0 - 2.0 * (drawn & np.uint64(1)).astype(np.float64)
            b[active] += a[active] * sign * (place + 0.5) / 2.0
            a[active] *= 0.5 - place
            wide = a[active] * unit[active] >= 2.0**-least_bits
            active = active[wide & (cuts[active] > level)]
    scale[special_at] = np.maximum(a * unit, 2.0**-least_bits)
    shift[special_at] = 2.0 * b * radius
    return scale, shift


def _uniforms(words: NDArray[np.uint64]) -> Array:
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54
