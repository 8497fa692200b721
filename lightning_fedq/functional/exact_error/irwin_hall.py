"""Standardised Irwin-Hall law: the mean of n independent uniforms, scaled to variance 1.

X = S / sqrt(n / 12), where S is the sum of n uniforms on (-1/2, 1/2). The support of X is
(-sqrt(3 n), sqrt(3 n)). Density and slope keep their relative accuracy in the tails (`PDF_ERROR`,
`SLOPE_ERROR`). Each of two evaluations is used where it is accurate:

* n <= 40: the B-spline recursion in the distance to the nearer end of the support. All its terms are
  positive. It gives density and slope up to the edge.
* n > 40, density and slope for |x| <= 10: exponential tilting. S tilted by theta has the density
  exp(theta s) f(s) / M(theta) with M(theta) = (sinh(theta / 2) / (theta / 2))^n. Near its mean this density
  is close to a Gaussian one. For 22 to 36 values of theta, its Taylor polynomial about the mean is computed
  once for each n from the characteristic function. A point is evaluated by the polynomial of the nearest
  mean, times M(theta) exp(-theta s). Density and slope are taken to be 0 for |x| > 10, as f(10) < 1e-22.

The alternating sum of the textbooks is useless beyond n = 20, because its terms cancel.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024,
    section 4.2, for the use of the law. This evaluation is not from the paper.
    Daniels, Saddlepoint Approximations in Statistics, Ann. Math. Statist. 25, 1954, for tilting.
"""

from __future__ import annotations

import decimal
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.checks import check_at_least

Array = NDArray[np.float64]

PDF_ERROR = 2.0**-45
"""Bound on |computed f - f| / f, for |x| <= 10 inside the support, where f > 1e-290.

For n <= 40 it is proved to first order in 2^-53. The recursion has 4 (n - 1) roundings, the distance
2 (n - 1) and the factor 3, because u f'(u) <= (n - 1) f(u). The largest measured error was 2^-47.20, against
50 digits at 53,629 points for every n from 2. For n > 40 it is only measured: 2^-49.94 against at least 40
digits, at 10,610 points for 38 values of n up to 1,000,000.
"""
SLOPE_ERROR = 2.0**-45
"""Bound on |computed f' - f'| / (|f'| + f), for the x of `PDF_ERROR`.

It is only measured, at the same points. The largest error was 2^-47.57 for n <= 40 and 2^-50.12 for n > 40.
The bound is more than four times the larger one, as a margin for other points.
"""

_SPLINES = 40
_REACH = 10.0
_PANELS = 12
_TILT_STEP = 0.5
_TILT_PERIOD = 16.0
_TILT_TERMS = 64
_DEGREE = 20


def half_support(n: int) -> float:
    """Return sqrt(3 n), the end of the support of the standardised law.

    Raises:
        ValueError: If n < 1.

    Examples:
        >>> half_support(3)
        3.0
    """
    check_at_least(1, n=n)
    return math.sqrt(3.0 * n)


def _halves(a: Array | float) -> tuple[Array | float, Array | float]:
    """Split a into a high and a low half whose products are exact (Veltkamp)."""
    shifted = 134217729.0 * a  # 2^27 + 1
    high = shifted - (shifted - a)
    return high, a - high


def _distance(x: Array, n: int) -> Array:
    """Return n / 2 - sqrt(n / 12) |x|, the distance to the nearer end of the sum's support, or 0 outside.

    The caller raises it to the power n - 1, so it must be accurate to two roundings (one for
    |x| > sqrt(3 n) / 2). The rounding errors of the square root and of its product with |x| (Dekker) are
    therefore subtracted.
    """
    kappa, size = math.sqrt(n / 12.0), np.minimum(np.abs(x), 2.0 * half_support(n))
    # the rounding error of kappa, sqrt(n / 12) - kappa, to first order
    rest = float(Fraction(n, 12) - Fraction(kappa) ** 2) / (2.0 * kappa)
    (a, b), (c, d) = _halves(kappa), _halves(size)
    product = kappa * size
    below = ((a * c - product) + a * d + b * c) + b * d + rest * size  # rounding error of the product
    # rounding may lead past n / 2, and the slope at the peak of n = 2 would then have the wrong sign
    return np.clip((0.5 * n - product) - below, 0.0, 0.5 * n)


def _splines(order: int, x: Array, n: int) -> Array:
    """Return the B-splines of an order at u, u - 1, ..., where u is `_distance(x, n)`.

    M_m(v), the density at v of a sum of m uniforms on (0, 1), obeys
    (m - 1) M_m(v) = v M_{m-1}(v) + (m - v) M_{m-1}(v - 1). Subtracting an integer from u is exact, so every
    order adds at most four roundings.

    Returns:
        `(n // 2 + 1, *x.shape)`. Row k is M_order(u - k), and further rows would be 0.
    """
    u = _distance(x, n)
    shifted = u - np.arange(n // 2 + 1).reshape(-1, *[1] * u.ndim)
    values = ((shifted > 0.0) & (shifted <= 1.0)) + 0.0 * shifted  # the second term preserves NaN
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
        middles: Points at which the nearest mean changes, `(t - 1,)`.
        means: Means of the tilted laws, ascending from 0, `(t,)`. h is x - mean.
        widths: Stds of the tilted laws, `(t,)`.
        rates: theta in units of x, `(t,)`.
        scales: M(theta) exp(-rate mean), `(t,)`.
        density: Coefficients of the polynomials of f, `(degree + 1, t)`, constant first.
        slope: Coefficients of the polynomials of f', `(degree + 1, t)`, constant first.
    """

    middles: Array
    means: Array
    widths: Array
    rates: Array
    scales: Array
    density: Array
    slope: Array

    def evaluate(self, x: Array, coefficients: Array) -> Array:
        """Evaluate the density or the slope at 0 <= x <= 10."""
        nearest = np.searchsorted(self.middles, x)
        h = x - self.means[nearest]
        z = h / self.widths[nearest]
        total = coefficients[-1, nearest]
        for row in coefficients[-2::-1]:
            total = total * z + row[nearest]
        values: Array = self.scales[nearest] * np.exp(-self.rates[nearest] * h) * total
        return values


def _tilt(theta: float, n: int) -> tuple[float, ...]:
    """Compute mean, rounding error of the mean, std, rate and M(theta) exp(-rate mean) of a tilted law.

    The computation uses 60 digits, because log M and rate mean nearly cancel. Their difference is about
    -x^2 / 2, and its absolute error would be the density's relative error.
    """
    if not theta:
        return 0.0, 0.0, 1.0, 0.0, 1.0
    with decimal.localcontext(decimal.Context(prec=60)):
        t, kappa = decimal.Decimal(theta), (decimal.Decimal(n) / 12).sqrt()
        up, down = (t / 2).exp(), (-t / 2).exp()
        moment = (up - down) / t  # M of one uniform on (-1/2, 1/2)
        mean = n * ((up + down) / (up - down) / 2 - 1 / t) / kappa
        variance = n * (1 / t**2 - 1 / (up - down) ** 2) / kappa**2
        rate, rounded_mean = t * kappa, decimal.Decimal(float(mean))
        scale = (n * moment.ln() - rate * rounded_mean).exp()
        constants = rounded_mean, mean - rounded_mean, variance.sqrt(), rate, scale
    return tuple(map(float, constants))


def _sine_less_angle(angles: Array) -> Array:
    """Return sin a - a, by its Taylor series where the difference would cancel."""
    square = angles**2
    series = np.ones_like(square)
    for k in range(19, 3, -2):
        series = 1.0 - square / (k * (k - 1.0)) * series
    return np.where(square < 1.0, -angles * square / 6.0 * series, np.sin(angles) - angles)


def _log_characteristic(theta: float, t: Array) -> NDArray[np.complex128]:
    """Return log E exp(i t (V - E V)) to high relative accuracy, V with density exp(theta v) on (-1/2, 1/2).

    With a = t (V - E V), E exp(i a) - 1 = -2 E sin(a / 2)^2 + i E (sin a - a), because E a = 0.
    """
    # panels of a low-order rule, because the nodes of one high-order rule err by more than a rounding
    nodes, weights = np.polynomial.legendre.leggauss(12)
    v = ((np.arange(_PANELS)[:, None] + 0.5 * (nodes + 1.0)) / _PANELS - 0.5).ravel()
    density = np.tile(weights, _PANELS) * np.exp(theta * (v - 0.5))
    density /= density.sum()
    angles = t[:, None] * (v - density @ v)
    real, imaginary = -2.0 * np.sin(0.5 * angles) ** 2 @ density, _sine_less_angle(angles) @ density
    # The modulus may be 0, as for n = 48 at t = 2 pi. With 1e-8 instead, its n-th power is still 0.
    log_modulus = 0.5 * np.log1p(np.maximum(real * (2.0 + real) + imaginary**2, 2.0**-53 - 1.0))
    values: NDArray[np.complex128] = log_modulus + 1j * np.arctan2(imaginary, 1.0 + real)
    return values


@lru_cache(maxsize=64)
def _tilts(n: int) -> _Tilts:
    """Compute the polynomials for one n > 40, at means half a std apart from 0 to beyond 10."""
    kappa, theta, mean = math.sqrt(n / 12.0), 0.0, 0.0
    tilts: list[tuple[float, ...]] = []
    rows: list[Array] = []
    turns: Array = 2.0 * math.pi / _TILT_PERIOD * np.arange(1, _TILT_TERMS + 1, dtype=np.float64)
    factors = np.cumprod([np.ones(_TILT_TERMS), *(-1j * turns / m for m in range(1, _DEGREE + 2))], axis=0)
    while mean < _REACH:
        tilt = _tilt(theta, n)
        mean, rest, width, *_ = tilt
        logs = n * _log_characteristic(theta, turns / (kappa * width))
        logs = logs + 1j * turns * rest / width
        # the law of theta = 0 is symmetric, so rounding errors must not move its peak
        sums = (factors @ np.exp(logs if theta else logs.real)).real
        sums[0] += 0.5
        rows.append(2.0 / (_TILT_PERIOD * width) * sums)
        tilts.append(tilt)
        # d mean / d theta = kappa width^2, so the mean moves by half a std
        theta += _TILT_STEP / (kappa * width)
    means, _, widths, rates, scales = np.array(tilts).T
    density = np.array(rows).T
    slope = np.arange(1.0, _DEGREE + 2)[:, None] * density[1:] / widths - rates * density[:-1]
    return _Tilts(0.5 * (means[1:] + means[:-1]), means, widths, rates, scales, density[:-1], slope)


def irwin_hall_pdf(x: Array | float, n: int) -> Array:
    """Return the density of the standardised law. Its relative error is below `PDF_ERROR`.

    Args:
        x: Points. For n > 40 the density is taken to be 0 where |x| > 10.
        n: Number of uniforms, >= 1.

    Raises:
        ValueError: If n < 1.

    Examples:
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
    """Return the derivative f' of the density f, for n >= 2.

    Its error is below `SLOPE_ERROR` times (|f'| + f). At the peak of n = 2 it is the slope on the right.

    Args:
        x: Points. For n > 40 the slope is taken to be 0 where |x| > 10.
        n: Number of uniforms, >= 2.

    Raises:
        ValueError: If n < 2.
    """
    if n < 2:
        raise ValueError(f"n must be >= 2, because one uniform has no slope, got {n}")
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
