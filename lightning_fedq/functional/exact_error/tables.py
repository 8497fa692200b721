"""Tables for drawing from a law without a closed form: cells of equal width with a polynomial in each.

Both tables are built from a function on (0, end), whose kinks must be at ends of cells. Both have a bound on
their error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numba
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(4)
_DEGREE = 5
_NODES = np.cos((np.arange(_DEGREE + 1) + 0.5) * np.pi / (_DEGREE + 1))
_CHECKS = np.cos(np.arange(1, _DEGREE + 1) * np.pi / (_DEGREE + 1))
_GUIDES = 1 << 15
_BLOCK = 256
_INVERSION_ERROR = 2.0**-51
"""Error of 53-bit uniforms (2^-54), of their distance from a cell's end (2^-53) and of Newton's last step."""


@dataclass(frozen=True)
class InverseTable:
    """Inverse distribution function of a law on (0, end): Hermite-cubic cells, inverted by Newton steps.

    Args:
        width: Width of a cell.
        cdf: Distribution function at the cells' ends, from 0 to 1.
        pdf: Density at the cells' ends.
        error: Bound on the distance between the distribution function of `sample`'s output and that of the
            intended law. It does not include rounding errors of the density's values.
    """

    width: float
    cdf: Array
    pdf: Array
    error: float

    def sample(self, uniforms: Array) -> Array:
        """Map uniforms on (0, 1) to draws from the law."""
        out = np.empty_like(uniforms)
        _invert(self.cdf, self.pdf, self._guide, self.width, uniforms, out)
        return out

    @cached_property
    def _guide(self) -> NDArray[np.int64]:
        """Number of cells' ends with a distribution function of at most k / 2^15, for k up to 2^15."""
        return np.searchsorted(self.cdf, np.arange(_GUIDES + 1) / _GUIDES, side="right").astype(np.int64)


def inverse_table(density: Callable[[Array], Array], width: float, count: int) -> InverseTable:
    """Tabulate a density that integrates to 1 over `count` cells from 0 on.

    The error has two parts. The cubic is exact at a cell's ends, so half the integral of |difference of the
    densities| bounds its error inside the cell. The second part is the mass that normalisation moves.
    """
    ends: Array = width * np.arange(count + 1, dtype=np.float64)
    inner = density(ends[:-1, None] + 0.5 * width * (_GAUSS_NODES + 1.0))
    mass = 0.5 * width * (inner * _GAUSS_WEIGHTS).sum(1)
    running = list(accumulate((int(m * 2.0**100) for m in mass.tolist()), initial=0))  # integers, not rounded
    cdf, total = np.array([part / running[-1] for part in running]), running[-1] * 2.0**-100
    # A cubic is monotone where its end slopes are at most three times the mean slope (Fritsch and Carlson).
    limit = 3.0 * np.diff(cdf) / width
    pdf = np.minimum(density(ends) / total, np.minimum(np.append(limit, np.inf), np.append(np.inf, limit)))
    t = 0.5 * (_GAUSS_NODES + 1.0)
    rise, left, right = np.diff(cdf)[:, None] / width, pdf[:-1, None], pdf[1:, None]
    # derivative of the Hermite cubic
    slope = 6.0 * t * (1.0 - t) * rise + (1.0 - t) * (1.0 - 3.0 * t) * left + t * (3.0 * t - 2.0) * right
    miss = 0.25 * width * float((np.abs(slope - inner / total) * _GAUSS_WEIGHTS).sum(1).max())
    return InverseTable(width, cdf, pdf, miss + abs(total - 1.0) + _INVERSION_ERROR)


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _invert(
    cdf: Array, pdf: Array, guide: NDArray[np.int64], width: float, uniforms: Array, out: Array
) -> None:
    """Find the cells, then invert the cubics of a block together, each until its step is small."""
    cells = np.empty(_BLOCK, np.int64)
    cube, square, line, wanted, places, lows, highs = np.empty((7, _BLOCK))
    done = np.empty(_BLOCK, np.bool_)
    for start in range(0, uniforms.size, _BLOCK):
        size = min(_BLOCK, uniforms.size - start)
        for j in range(size):
            u = uniforms[start + j]
            bucket = min(int(u * _GUIDES), _GUIDES - 1)
            below, above = guide[bucket], guide[bucket + 1]  # bounds on the number of cells' ends up to u
            while below < above:
                middle = (below + above) // 2
                if cdf[middle] <= u:
                    below = middle + 1
                else:
                    above = middle
            cells[j] = min(max(below - 1, 0), cdf.size - 2)
        for j in range(size):
            cell = cells[j]
            rise, left, right = cdf[cell + 1] - cdf[cell], width * pdf[cell], width * pdf[cell + 1]
            square[j], cube[j], line[j] = 3.0 * rise - 2.0 * left - right, left + right - 2.0 * rise, left
            wanted[j] = uniforms[start + j] - cdf[cell]
            places[j] = 0.0 if rise <= 0.0 else min(max(wanted[j] / rise, 0.0), 1.0)
            done[j], lows[j], highs[j] = rise <= 0.0, 0.0, 1.0
        for _ in range(40):
            left_over = 0
            for j in range(size):
                t = places[j]
                value = ((cube[j] * t + square[j]) * t + line[j]) * t - wanted[j]
                low, high = t if value <= 0.0 else lows[j], t if value > 0.0 else highs[j]
                slope = (3.0 * cube[j] * t + 2.0 * square[j]) * t + line[j]
                step = t - value / slope
                inside = (slope > 0.0) & (low <= step) & (step <= high)
                # Newton's step, or bisection if the step leaves the bracket
                step = step if inside else 0.5 * (low + high)
                lows[j], highs[j] = low, high
                places[j] = t if done[j] else step
                done[j] = done[j] | (abs(step - t) < 1e-15)
                left_over += not done[j]
            if left_over == 0:
                break
        for j in range(size):
            out[start + j] = (cells[j] + places[j]) * width


@dataclass(frozen=True)
class PolynomialTable:
    """Piecewise polynomial of degree 5 on [0, end), which is 0 from `end` on.

    Args:
        width: Width of a cell.
        coefficients: Coefficients in the position inside the cell from -1 to 1, lowest degree first,
            `(cells, 6)`.
        error: Largest distance from the tabulated function, measured between the nodes.
    """

    width: float
    coefficients: Array
    error: float

    def __call__(self, points: Array) -> Array:
        """Evaluate at `(n,)` points >= 0."""
        places, end = points / self.width, len(self.coefficients)
        cells = np.minimum(places.astype(np.int64), end - 1)
        t, (*lower, values) = 2.0 * (places - cells) - 1.0, self.coefficients[cells].T
        for coefficient in reversed(lower):
            values = values * t + coefficient
        return np.where(places < end, values, 0.0)


NOWHERE = PolynomialTable(1.0, np.zeros((1, _DEGREE + 1)), 0.0)
"""The function that is 0 everywhere."""


def polynomial_table(function: Callable[[Array], Array], width: float, count: int) -> PolynomialTable:
    """Tabulate a function over `count` cells from 0 on, through Chebyshev nodes."""
    centres = width * (np.arange(count, dtype=np.float64)[:, None] + 0.5)
    through = np.linalg.inv(np.vander(_NODES, increasing=True))
    coefficients: Array = function(centres + 0.5 * width * _NODES) @ through.T
    between = coefficients @ np.vander(_CHECKS, _DEGREE + 1, increasing=True).T
    error = float(np.abs(between - function(centres + 0.5 * width * _CHECKS)).max())
    return PolynomialTable(width, coefficients, error)
