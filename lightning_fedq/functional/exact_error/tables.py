"""Two tables for drawing from a law that has no closed form: cells of one width, a polynomial in each.

Both are built from a function on (0, end), whose kinks have to lie on ends of cells, and both know how far
they are from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numba
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_GAUSS_NODES, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(4)
_DEGREE = 5
_NODES = np.cos((np.arange(_DEGREE + 1) + 0.5) * np.pi / (_DEGREE + 1))
_CHECKS = np.cos(np.arange(1, _DEGREE + 1) * np.pi / (_DEGREE + 1))
_INVERSION_ERROR = 2.0**-51
"""53-bit uniforms (2^-54), their distance from a cell's end in float64 (2^-53), Newton's last step."""


@dataclass(frozen=True)
class InverseTable:
    """Inverse distribution function of a law on (0, end): Hermite-cubic cells, inverted by Newton steps.

    Args:
        width: Width of a cell.
        cdf: Distribution function at the cells' ends, from 0 to 1.
        pdf: Density at the same points.
        error: Largest distance between the distribution functions of what `sample` returns and of the law
            meant; rounding of the density's values is not in it.
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


def inverse_table(density: Callable[[Array], Array], width: float, count: int) -> InverseTable:
    """Tabulate a density that integrates to 1 over `count` cells from 0 on.

    The error adds what the cubic misses inside a cell (at its ends it is right, so half the integral of
    |difference of the densities| bounds it) and the mass that normalising moves.
    """
    ends: Array = width * np.arange(count + 1, dtype=np.float64)
    inner = density(ends[:-1, None] + 0.5 * width * (_GAUSS_NODES + 1.0))
    mass = 0.5 * width * (inner * _GAUSS_WEIGHTS).sum(1)
    running = list(accumulate((int(m * 2.0**100) for m in mass.tolist()), initial=0))  # no rounding
    cdf, total = np.array([part / running[-1] for part in running]), running[-1] * 2.0**-100
    # A cubic is monotone where its end slopes are at most three times the mean slope (Fritsch and Carlson).
    limit = 3.0 * np.diff(cdf) / width
    pdf = np.minimum(density(ends) / total, np.minimum(np.append(limit, np.inf), np.append(np.inf, limit)))
    t = 0.5 * (_GAUSS_NODES + 1.0)
    rise, left, right = np.diff(cdf)[:, None] / width, pdf[:-1, None], pdf[1:, None]
    slope = 6.0 * t * (1.0 - t) * rise + (1.0 - t) * (1.0 - 3.0 * t) * left + t * (3.0 * t - 2.0) * right
    miss = 0.25 * width * float((np.abs(slope - inner / total) * _GAUSS_WEIGHTS).sum(1).max())
    return InverseTable(width, cdf, pdf, miss + abs(total - 1.0) + _INVERSION_ERROR)


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


@dataclass(frozen=True)
class PolynomialTable:
    """A function on [0, end) by polynomials of degree 5, and 0 from there on.

    Args:
        width: Width of a cell.
        coefficients: `(cells, 6)`, lowest degree first, in the place inside the cell from -1 to 1.
        error: Largest distance from the function, measured between the nodes.
    """

    width: float
    coefficients: Array
    error: float

    def __call__(self, points: Array) -> Array:
        """Evaluate at `(n,)` points >= 0."""
        out = np.empty_like(points)
        for j, point in enumerate(points):
            out[j] = evaluate(self.coefficients, self.width, point)
        return out


NOWHERE = PolynomialTable(1.0, np.zeros((0, _DEGREE + 1)), 0.0)
"""The function that is 0 everywhere."""


def polynomial_table(function: Callable[[Array], Array], width: float, count: int) -> PolynomialTable:
    """Tabulate a function over `count` cells from 0 on, through Chebyshev nodes."""
    centres = width * (np.arange(count, dtype=np.float64)[:, None] + 0.5)
    through = np.linalg.inv(np.vander(_NODES, increasing=True))
    coefficients: Array = function(centres + 0.5 * width * _NODES) @ through.T
    between = coefficients @ np.vander(_CHECKS, _DEGREE + 1, increasing=True).T
    error = float(np.abs(between - function(centres + 0.5 * width * _CHECKS)).max())
    return PolynomialTable(width, coefficients, error)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def evaluate(coefficients: Array, width: float, point: float) -> float:
    """Evaluate a `PolynomialTable` at one point >= 0."""
    place = point / width
    if place >= len(coefficients):
        return 0.0
    cell = int(place)
    t, row = 2.0 * (place - cell) - 1.0, coefficients[cell]
    return float(((((row[5] * t + row[4]) * t + row[3]) * t + row[2]) * t + row[1]) * t + row[0])
