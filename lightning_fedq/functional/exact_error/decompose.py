"""Decompose a target law into scaled and shifted Irwin-Hall laws: random (A, B) with A Z + B ~ Q.

Z has the standardised Irwin-Hall law f of n uniforms, which is the error that dithers leave in a mean. Q is
the target law, with density g. Both laws are mixtures of uniforms on (-r, r). For the target, r has the
density -2 r g'(r). For lambda times Irwin-Hall, it has the density -2 r lambda f'(r), which is nowhere larger
if lambda = inf g' / f'. So r is drawn as for the target's direct layered quantiser. Then a randomised bit
with probability lambda f'(r) / g'(r) assigns the coordinate to the core, where (A, B) = (1, 0). The other
coordinates are called special. Their error stays uniform on (-r, r). This uniform is cut into scaled copies
of f: first the largest copy that fits under it, then, recursively, the remainders on the left and right.

These are the paper's algorithms 2 and 3 in a batch. The law of (A, B) is the same, but tables replace
bisection for the randomised bit and for the places where a uniform is cut.

There are two departures from the paper. The printed `f(x/L)/L` of algorithm 2 is L f(L x) here, because the
printed form gives an error variance of 0.80 instead of 1. A is kept at or above 2^-k, because its lower tail
is so heavy that symbols would leave int64 otherwise. k is 50 unless the caller needs a higher cap. The cap
moves an output by less than 2^-k (1 + L) standard deviations (`Decomposition.cap_shift`).
`functional.exact_error.float_error` bounds the effect of tables and floats on the law.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning,
    AISTATS 2024, section 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from lightning_fedq.functional.chunks import in_chunks
from lightning_fedq.functional.exact_error.depths import draw_depths
from lightning_fedq.functional.exact_error.irwin_hall import (
    Array,
    half_support,
    irwin_hall_pdf,
    irwin_hall_slope,
)
from lightning_fedq.functional.exact_error.layered import WORDS_PER_COORDINATE
from lightning_fedq.functional.exact_error.tables import (
    NOWHERE,
    InverseTable,
    PolynomialTable,
    inverse_table,
    polynomial_table,
)

Target = Literal["gaussian", "laplace"]

LEAST_SCALE_BITS = 50
"""k of the default cap A >= 2^-k. A caller may need a higher cap."""
_MOST_CUTS = 64
_CUT_CELLS = 1 << 15
_COIN_CELLS = 1 << 10
_REACH = 10.0
"""Radius in stds beyond which all coordinates are special (probability 2^-69 for a Gaussian)."""


def target_pdf(x: Array, target: Target) -> Array:
    """Return the density of the target law with mean 0 and variance 1."""
    if target == "gaussian":
        return np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return math.sqrt(0.5) * np.exp(-math.sqrt(2.0) * np.abs(x))


def target_slope(x: Array, target: Target) -> Array:
    """Return the derivative of `target_pdf` for x > 0."""
    return (-x if target == "gaussian" else -math.sqrt(2.0)) * target_pdf(x, target)


def core_probability(n: int, target: Target = "gaussian") -> float:
    """Return lambda, the probability that a coordinate belongs to the core. It is 0 for n <= 2.

    lambda = inf over 0 < x < sqrt(3 n) of g'(x) / f'(x), rounded down by 1e-12.

    Args:
        n: Number of uniforms, >= 1.
        target: Target law.

    Raises:
        ValueError: If n < 1.

    Examples:
        >>> round(core_probability(100), 3)
        0.995
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
    minimum = optimize.minimize_scalar(ratio, bounds=(low, high), method="bounded", options={"xatol": 1e-10})
    return max(min(float(minimum.fun), float(values[best]), 1.0) - 1e-12, 0.0)


def _cells(n: int, end: float, count: int) -> tuple[float, int]:
    """Return width and number of about `count` cells up to `end`.

    For n <= 40 the density is a spline, and its knots must be ends of cells.
    """
    if n > 40:
        return end / count, count
    knot = 0.5 / math.sqrt(n / 12.0)
    per_knot = max(math.ceil(knot * count / end), 1)
    return knot / per_knot, math.ceil(end * per_knot / knot - 1e-9)


@dataclass(frozen=True)
class Decomposition:
    """Tables for drawing (A, B) for one n and target. They do not depend on data and are built once.

    Args:
        n: Number of uniforms.
        target: Target law, variance 1.
        core: Probability lambda of the core.
        coin: Probability lambda f' / g' that a uniform on (-r, r) belongs to the core, as a table in r.
        cut: Law of y = L c, the place where a uniform is cut. None for n = 1, which needs no cuts.
        rounds: Mean number m = L f(0) of rounds.
        cut_thresholds: Thresholds in decreasing order. The number of cuts of a coordinate is the number of
            thresholds above its 64-bit word.
    """

    n: int
    target: Target
    core: float
    coin: PolynomialTable
    cut: InverseTable | None
    rounds: float
    cut_thresholds: NDArray[np.uint64]

    @property
    def uniform_error(self) -> float:
        """Bound on the distance between the distribution functions of a uniform on (-1, 1) and of its pieces.

        Each of m rounds adds the error of the cut's law and the error of the cut's probability.
        """
        return self.rounds * (self.cut.error + 2.0**-50) if self.cut else 0.0

    @cached_property
    def coin_variation(self) -> float:
        """Bound on the total variation, as a function of r, of the coin's probability, which ends in 0."""
        return float(np.abs(np.diff(self.coin.coefficients[:, 0], prepend=0.0, append=0.0)).sum())

    @cached_property
    def special_tail(self) -> float:
        """Largest ratio, over z <= 7, of P(special, r > z) to the density of the Gaussian target at z."""
        z = np.linspace(0.0, 12.0, 12_001)
        middle = 0.5 * (z[1:] + z[:-1])
        # r is chi-distributed with 3 degrees of freedom, so its density is 2 r^2 phi(r)
        mass = (1.0 - np.clip(self.coin(middle), 0.0, 1.0)) * 2.0 * middle**2 * target_pdf(middle, "gaussian")
        beyond = np.cumsum((mass * np.diff(z))[::-1])[::-1]
        return float((beyond / target_pdf(z[1:], "gaussian"))[middle < 7.1].max())

    def cap_shift(self, least_bits: int = LEAST_SCALE_BITS) -> float:
        """Return a bound, in stds, on the distance by which the cap on A moves an output."""
        return 2.0**-least_bits * (1.0 + half_support(self.n))


@lru_cache(maxsize=64)
def decomposition(n: int, target: Target = "gaussian") -> Decomposition:
    """Build the tables for n uniforms and a target law. They are cached.

    Args:
        n: Number of uniforms, >= 1.
        target: "gaussian" or "laplace", variance 1.

    Raises:
        ValueError: If n < 1 or the target is unknown.
    """
    if target not in ("gaussian", "laplace"):
        raise ValueError(f"target must be 'gaussian' or 'laplace', got {target!r}")
    core, end = core_probability(n, target), half_support(n)

    def coin_probability(r: Array) -> Array:
        return np.clip(core * irwin_hall_slope(r, n) / target_slope(r, target), 0.0, 1.0)

    rounds = 2.0 * end * float(irwin_hall_pdf(np.zeros(1), n)[0])
    cut = None
    if n > 1:
        # for n = 2 the slope jumps at both ends, so points are moved 1e-12 inside
        width, count = _cells(n, min(end, 9.5), _CUT_CELLS)
        last = min(width * count, end)

        def cut_density(y: Array) -> Array:
            inside = np.clip(y, 1e-12, last - 1e-12)
            fall = np.maximum(-irwin_hall_slope(inside, n), 0.0)
            return (1.0 - y / end) * fall * 2.0 * end / (rounds - 1.0)

        cut = inverse_table(cut_density, width, count)
    stay = 1.0 - 1.0 / rounds if rounds > 1.0 + 1e-9 else 0.0
    chances = [math.floor(stay**k * 2.0**64) for k in range(1, _MOST_CUTS + 1)]
    thresholds = np.array([min(chance, 2**64 - 1) for chance in chances], np.uint64)
    cells = _cells(n, min(end, _REACH), _COIN_CELLS)
    coin = polynomial_table(coin_probability, *cells) if core else NOWHERE
    return Decomposition(n, target, core, coin, cut, rounds, thresholds)


class Special(NamedTuple):
    """Coordinates that are not in the core, `(m,)` each. For all others (A, B) = (1, 0).

    Args:
        places: Numbers of these coordinates, ascending, int64.
        scale: A of each, float64.
        shift: B of each, float64.
    """

    places: NDArray[np.int64]
    scale: Array
    shift: Array


def draw_special(
    plan: Decomposition,
    count: int,
    words: Callable[[int], NDArray[np.uint64]],
    least_bits: int = LEAST_SCALE_BITS,
) -> Special:
    """Draw (A, B) for `count` coordinates, and list the coordinates where they are not (1, 0).

    Args:
        plan: Tables of n and the target.
        count: Number of coordinates.
        words: Source of uniform 64-bit words, as `Stream.words64`.
        least_bits: k of the cap A >= 2^-k.
    """

    def find(part: slice, drawn: NDArray[np.uint64]) -> tuple[NDArray[np.int64], Array]:
        depths, gaussian = np.empty(part.stop - part.start), plan.target == "gaussian"
        draw_depths(drawn, gaussian, depths)
        radii = np.sqrt(2.0 * depths) if gaussian else depths * math.sqrt(0.5)
        coins = (drawn[::WORDS_PER_COORDINATE] >> np.uint64(11)).astype(np.float64) * 2.0**-53
        special = np.flatnonzero(coins >= plan.coin(radii))
        return special + part.start, radii[special]

    chunks = in_chunks(count, lambda size: words(WORDS_PER_COORDINATE * size), find)
    places, radius = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    unit = radius / half_support(plan.n)  # layers of this radius are unions of pieces of uniforms
    size, middle = np.ones(len(places)), np.zeros(len(places))
    if plan.cut is not None:
        # uniforms are cut again and again, each a random number of times, and one piece of each is kept
        ascending = plan.cut_thresholds[::-1]
        num_cuts = len(ascending) - np.searchsorted(ascending, words(len(unit)), side="right")
        active = np.flatnonzero(num_cuts > 0)
        for level in range(1, _MOST_CUTS + 1):
            if not len(active):
                break
            drawn = words(len(active))
            uniforms = (drawn >> np.uint64(11)).astype(np.float64) * 2.0 ** (-53) + 2.0 ** (-54)
            # a copy of the core is cut out, and the remainder on one side is kept
            at = np.minimum(plan.cut.sample(uniforms) / (2.0 * half_support(plan.n)), 0.5)
            side = 1.0 - 2.0 * (drawn & np.uint64(1)).astype(np.float64)
            middle[active] += size[active] * side * (at + 0.5) / 2.0
            size[active] *= 0.5 - at
            is_large = size[active] * unit[active] >= 2.0**-least_bits  # a smaller piece is not cut again
            active = active[is_large & (num_cuts[active] > level)]
    return Special(places, np.maximum(size * unit, 2.0**-least_bits), 2.0 * middle * radius)
