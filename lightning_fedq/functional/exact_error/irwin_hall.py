"""The Irwin-Hall law, standardised: the mean of n independent uniforms, scaled to variance 1.

X = S / sqrt(n / 12), S the sum of n uniforms on (-1/2, 1/2); its support is (-sqrt(3 n), sqrt(3 n)).
Density and slope keep their relative accuracy in the tails, `PDF_ERROR` and `SLOPE_ERROR`. Three
evaluations, each where it is accurate:

* n <= 40: the B-spline recursion, whose terms are all positive, in the distance to the nearer end of the
  support; density, slope and distribution function, up to the edge.
* n > 40, density and slope, |x| <= 10 (beyond, both are taken to be 0; f(10) < 1e-22): exponential tilting.
  S tilted by theta has the density exp(theta s) f(s) / M(theta) with M(theta) = (sinh(theta / 2) /
  (theta / 2))^n, which near its own mean is nearly that of a Gaussian. For 22 to 36 values of theta its
  Taylor polynomial about the mean is summed, once for each n, from its characteristic function; a point is
  evaluated by the polynomial of the nearest mean, times M(theta) exp(-theta s).
* n > 40, distribution function: a cosine series of period 20 with at most 28 terms; absolute error below
  1e-14 for |x| <= 10; it is taken to be 0 or 1 beyond.

The textbook's alternating sum is useless beyond n = 20.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning,
    AISTATS 2024, section 4.2, for its use; the evaluation is ours. Tilting: Daniels, Saddlepoint
    Approximations in Statistics, Ann. Math. Statist. 25, 1954.
"""

from __future__ import annotations

import decimal
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PDF_ERROR = 2.0**-45
"""Bound on |computed f - f| / f, for |x| <= 10 inside the support, where f > 1e-290.

n <= 40: to first order in 2^-53 it is proved, by 4 (n - 1) roundings of the recursion, 2 (n - 1) for the
distance and 3 of the factor, as u f'(u) <= (n - 1) f(u); the largest seen was 2^-47.20, against 50 digits at
53,629 points for every n from 2. n > 40: measured only, 2^-49.94 against 40 digits and more at 10,610 points
for 38 n up to 1,000,000.
"""
SLOPE_ERROR = 2.0**-45
"""Bound on |computed f' - f'| / (|f'| + f), there.

Measured only, at the same points: the largest for n <= 40 was 2^-47.57, for n > 40 2^-50.12; the larger
doubled, and more than doubled again for the points not tried.
"""

_SPLINES = 40
_PERIOD = 20.0
_TERMS = 28
_REACH = 10.0
_PANELS = 12
_TILT_STEP = 0.5
_TILT_PERIOD = 16.0
_TILT_TERMS = 64
_DEGREE = 20


def half_support(n: int) -> float:
    """sqrt(3 n), the end of the support of the standardised law.

    Raises:
        ValueError: If n < 1.

    Example:
        >>> half_support(3)
        3.0
    """
    if n < 1:
        raise ValueError(f"n must be >= 1, got {n}")
    return math.sqrt(3.0 * n)


def _halves(a: Array | float) -> tuple[Array | float, Array | float]:
    """Split a into a high and a low half whose products are exact (Veltkamp)."""
    shifted = 134217729.0 * a  # 2^27 + 1
    high = shifted - (shifted - a)
    return high, a - high


def _distance(x: Array, n: int) -> Array:
    """n / 2 - sqrt(n / 12) |x|, the distance to the nearer end of the sum's support, or 0 outside.

    Within two roundings of itself (one where |x| > sqrt(3 n) / 2), as it is raised to the power n - 1:
    the rounding of the square root and of its product with |x| (Dekker) are taken off.
    """
    kappa, size = math.sqrt(n / 12.0), np.minimum(np.abs(x), 2.0 * half_support(n))
    # sqrt(n / 12) - kappa, to first order
    rest = float(Fraction(n, 12) - Fraction(kappa) ** 2) / (2.0 * kappa)
    (a, b), (c, d) = _halves(kappa), _halves(size)
    product = kappa * size
    below = ((a * c - product) + a * d + b * c) + b * d + rest * size  # what the product's rounding has lost
    # rounding may carry it past n / 2, where the slope at the peak of n = 2 would be the other one
    return np.clip((0.5 * n - product) - below, 0.0, 0.5 * n)


def _splines(order: int, x: Array, n: int) -> Array:
    """B-splines of an order at u, u - 1, ..., u the distance of x to the nearer end of the support of n.

    M_m(v), the density at v of a sum of m uniforms on (0, 1), obeys
    (m - 1) M_m(v) = v M_{m-1}(v) + (m - v) M_{m-1}(v - 1). Subtracting an integer from u is exact, so that
    every order adds at most four roundings.

    Returns:
        `(n // 2 + 1, *x.shape)`; later shifts are 0, and the first is M_order(u).
    """
    u = _distance(x, n)
    shifted = u - np.arange(n // 2 + 1).reshape(-1, *[1] * u.ndim)
    values = ((shifted > 0.0) & (shifted <= 1.0)) + 0.0 * shifted  # which keeps a NaN
    for m in range(2, order + 1):
        before = values
        values = shifted * before
        values[:-1] += (m - shifted[:-1]) * before[1:]
        values = values / (m - 1)
    return values


@dataclass(frozen=True)
class _Tilts:
    """Polynomials p of f and f' about the means of tilted laws: f(x) = scale exp(-rate h) p(h / width).

    Args:
        middles: Points at which the nearest mean changes.
        means: The tilted laws' means, ascending from 0; h = x - mean. `(t,)`, as all that follow.
        widths: Their stds.
        rates: theta of x.
        scales: M(theta) exp(-rate mean).
        density: Coefficients `(degree + 1, t)`, constant first.
        slope: The same for f'.
    """

    middles: Array
    means: Array
    widths: Array
    rates: Array
    scales: Array
    density: Array
    slope: Array

    def evaluate(self, x: Array, coefficients: Array) -> Array:
        """The density or the slope at 0 <= x <= 10."""
        nearest = np.searchsorted(self.middles, x)
        h = x - self.means[nearest]
        z = h / self.widths[nearest]
        total = coefficients[-1, nearest]
        for row in coefficients[-2::-1]:
            total = total * z + row[nearest]
        values: Array = self.scales[nearest] * np.exp(-self.rates[nearest] * h) * total
        return values


class _Tilt(NamedTuple):
    mean: float
    rest: float
    width: float
    rate: float
    scale: float


def _tilt(theta: float, n: int) -> _Tilt:
    """Mean, its rounding, std and rate of the tilted law in units of x, and M(theta) exp(-rate mean).

    In 60 digits: log M and the product that is taken from it cancel, and the absolute error of what is left,
    about -x^2 / 2, would be the density's relative error.
    """
    if not theta:
        return _Tilt(0.0, 0.0, 1.0, 0.0, 1.0)
    with decimal.localcontext(decimal.Context(prec=60)):
        t, kappa = decimal.Decimal(theta), (decimal.Decimal(n) / 12).sqrt()
        grown, shrunk = (t / 2).exp(), (-t / 2).exp()
        mean = n * ((grown + shrunk) / (grown - shrunk) / 2 - 1 / t) / kappa
        variance = n * (1 / t**2 - 1 / (grown - shrunk) ** 2) / kappa**2
        rounded = decimal.Decimal(float(mean))
        scale = (n * ((grown - shrunk) / t).ln() - t * kappa * rounded).exp()
        rest, width, rate = mean - rounded, variance.sqrt(), t * kappa
    return _Tilt(float(rounded), float(rest), float(width), float(rate), float(scale))


def _log_characteristic(theta: float, t: Array) -> NDArray[np.complex128]:
    """Logarithm of E exp(i t (V - E V)), V with density exp(theta v) on (-1/2, 1/2). Relatively accurate.

    E exp(i a) - 1 = -2 E sin(a / 2)^2 + i E (sin a - a), as E a = 0.
    """
    # panels, as the nodes of one rule of high order err by more than a rounding
    nodes, weights = np.polynomial.legendre.leggauss(12)
    v = ((np.arange(_PANELS)[:, None] + 0.5 * (nodes + 1.0)) / _PANELS - 0.5).ravel()
    weights = np.tile(weights, _PANELS) * np.exp(theta * (v - 0.5))
    weights /= weights.sum()
    angles = t[:, None] * (v - weights @ v)
    square = angles**2
    series = np.ones_like(square)
    for k in range(19, 3, -2):
        series = 1.0 - square / (k * (k - 1.0)) * series
    odd = np.where(square < 1.0, -angles * square / 6.0 * series, np.sin(angles) - angles)
    real, imaginary = -2.0 * np.sin(0.5 * angles) ** 2 @ weights, odd @ weights
    # may be 0, as for n = 48 at t = 2 pi; a modulus of 1e-8 instead has an n-th power of 0 all the same
    log_modulus = 0.5 * np.log1p(np.maximum(real * (2.0 + real) + imaginary**2, 2.0**-53 - 1.0))
    values: NDArray[np.complex128] = log_modulus + 1j * np.arctan2(imaginary, 1.0 + real)
    return values


@lru_cache(maxsize=64)
def _tilts(n: int) -> _Tilts:
    """Sum the polynomials for one n > 40, at means half a std apart from 0 to past 10."""
    kappa, theta = math.sqrt(n / 12.0), 0.0
    tilts: list[_Tilt] = []
    rows: list[Array] = []
    turns: Array = 2.0 * math.pi / _TILT_PERIOD * np.arange(1, _TILT_TERMS + 1, dtype=np.float64)
    factors = np.cumprod([np.ones(_TILT_TERMS), *(-1j * turns / m for m in range(1, _DEGREE + 2))], axis=0)
    while not tilts or tilts[-1].mean < _REACH:
        tilt = _tilt(theta, n)
        logs = (
            n * _log_characteristic(theta, turns / (kappa * tilt.width)) + 1j * turns * tilt.rest / tilt.width
        )
        # theta = 0 is symmetric: its rounding errors must not move the peak
        sums = (factors @ np.exp(logs if theta else logs.real)).real
        sums[0] += 0.5
        rows.append(2.0 / (_TILT_PERIOD * tilt.width) * sums)
        tilts.append(tilt)
        theta += _TILT_STEP / (kappa * tilt.width)  # d mean / d theta = kappa width^2: half a std
    means, _, widths, rates, scales = np.array(tilts).T
    density = np.array(rows).T
    slope = np.arange(1.0, _DEGREE + 2)[:, None] * density[1:] / widths - rates * density[:-1]
    return _Tilts(0.5 * (means[1:] + means[:-1]), means, widths, rates, scales, density[:-1], slope)


def _frequencies(n: int) -> tuple[Array, Array]:
    """Angular frequencies t_k and coefficients (sin z / z)^n, z = t sqrt(3 / n), through their logs."""
    t: Array = 2.0 * math.pi / _PERIOD * np.arange(1, _TERMS + 1, dtype=np.float64)
    z = t * math.sqrt(3.0 / n)
    square = z * z
    # Taylor's of ln(sin z / z)
    series = -square / 6.0 - square**2 / 180.0 - square**3 / 2835.0 - square**4 / 37800.0
    small = z < 0.05
    safe = np.where(small, 1.0, z)
    log_sinc = np.where(small, series, np.log(np.abs(np.sin(safe) / safe)))
    coefficients: Array = np.exp(n * log_sinc)
    return t, coefficients


def irwin_hall_pdf(x: Array | float, n: int) -> Array:
    """Density of the standardised law. Its relative error is below `PDF_ERROR`.

    Args:
        x: Points. For n > 40 the density is taken to be 0 where |x| > 10.
        n: Number of uniforms, >= 1.

    Raises:
        ValueError: If n < 1.

    Example:
        >>> round(float(irwin_hall_pdf(0.0, 2)), 4)
        0.4082
    """
    half_support(n)
    size = np.abs(np.asarray(x, np.float64))
    if n <= _SPLINES:
        values: Array = math.sqrt(n / 12.0) * _splines(n, size, n)[0]
        return values
    tilts = _tilts(n)
    return np.where(size > _REACH, 0.0, tilts.evaluate(np.minimum(size, _REACH), tilts.density))


def irwin_hall_slope(x: Array | float, n: int) -> Array:
    """Derivative f' of the density f, for n >= 2 (at the peak of n = 2, the slope to its right).

    Its error is below `SLOPE_ERROR` times (|f'| + f).

    Args:
        x: Points. For n > 40 the slope is taken to be 0 where |x| > 10.
        n: Number of uniforms, >= 2.

    Raises:
        ValueError: If n < 2.
    """
    if n < 2:
        raise ValueError(f"the density of n = {n} uniforms has no slope; n must be >= 2")
    points = np.asarray(x, np.float64)
    size = np.abs(points)
    if n <= _SPLINES:
        splines = _splines(n - 1, size, n)
        # -kappa^2 M_n'(u), with M_n'(u) = M_(n-1)(u) - M_(n-1)(u - 1)
        values: Array = n / 12.0 * (splines[1] - splines[0])
    else:
        tilts = _tilts(n)
        values = np.where(size > _REACH, 0.0, tilts.evaluate(np.minimum(size, _REACH), tilts.slope))
    return np.where(points < 0.0, -values, values)


def irwin_hall_cdf(x: Array | float, n: int) -> Array:
    """Distribution function of the standardised law.

    Raises:
        ValueError: If n < 1.

    Example:
        >>> float(irwin_hall_cdf(0.0, 3))
        0.5
    """
    points, edge = np.asarray(x, np.float64), half_support(n)
    if n <= _SPLINES:
        # the sum of M_(n+1)(u - k) over k has the derivative M_n(u)
        lower: Array = _splines(n + 1, points, n).sum(0)
        return np.where(points <= 0.0, lower, 1.0 - lower)
    limit = 0.5 * _PERIOD
    inside = np.clip(points, -min(edge, limit), min(edge, limit))
    t, coefficients = _frequencies(n)
    values = 0.5 + inside / _PERIOD
    for frequency, weight in zip(t.tolist(), (2.0 / _PERIOD * coefficients / t).tolist(), strict=True):
        values += weight * np.sin(frequency * inside)
    return np.minimum(np.maximum(values, 0.0), 1.0)
