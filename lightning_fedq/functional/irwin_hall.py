"""The Irwin-Hall law, standardised: the mean of n independent uniforms, scaled to variance 1.

X = S / sqrt(n / 12), S the sum of n uniforms on (-1/2, 1/2); its support is (-sqrt(3 n), sqrt(3 n)).
Two evaluations, each where it is accurate:

* n <= 40: the B-spline recursion on shifted copies, whose terms are all positive; relative error
  below 1e-13 up to the edge.
* n > 40: a cosine series of period 20 with at most 28 terms; absolute error below 1e-14 for |x| <= 10,
  where the density is taken to be 0 beyond (it is below 1e-20 there).

The textbook's alternating sum is useless beyond n = 20.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning,
    AISTATS 2024, section 4.2, for its use; the evaluation is ours.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_SPLINES = 40
_PERIOD = 20.0
_TERMS = 28


def half_support(n: int) -> float:
    """sqrt(3 n), the end of the support of the standardised law.

    Raises:
        ValueError: If n < 1.
    """
    if n < 1:
        raise ValueError(f"n must be >= 1, got {n}")
    return math.sqrt(3.0 * n)


def _spline(n: int, y: Array) -> Array:
    """Density of a sum of n uniforms on (-1/2, 1/2), for n >= 1."""
    copies = y + (np.arange(n) - 0.5 * (n - 1)).reshape(-1, *[1] * y.ndim)
    values = np.where((copies >= -0.5) & (copies < 0.5), 1.0, 0.0)
    centres = copies
    for m in range(2, n + 1):
        centres = 0.5 * (centres[1:] + centres[:-1])
        up = np.maximum(0.5 * m + centres, 0.0)
        down = np.maximum(0.5 * m - centres, 0.0)
        values = (up * values[1:] + down * values[:-1]) / (m - 1)
    first: Array = values[0]
    return first


def _frequencies(n: int) -> tuple[Array, Array]:
    """Angular frequencies t_k and coefficients (sin z / z)^n, z = t sqrt(3 / n), through their logs."""
    t: Array = 2.0 * math.pi / _PERIOD * np.arange(1, _TERMS + 1, dtype=np.float64)
    z = t * math.sqrt(3.0 / n)
    square = z * z
    series = -square / 6.0 - square**2 / 180.0 - square**3 / 2835.0 - square**4 / 37800.0
    small = z < 0.05
    safe = np.where(small, 1.0, z)
    log_sinc = np.where(small, series, np.log(np.abs(np.sin(safe) / safe)))
    coefficients: Array = np.exp(n * log_sinc)
    return t, coefficients


def _series(x: Array, constant: float, weights: Array, trigonometric: np.ufunc, t: Array) -> Array:
    total = np.full(x.shape, constant)
    for frequency, weight in zip(t.tolist(), weights.tolist(), strict=True):
        total += weight * trigonometric(frequency * x)
    return total


def irwin_hall_pdf(x: Array | float, n: int) -> Array:
    """Density of the standardised law.

    Args:
        x: Points.
        n: Number of uniforms, >= 1.

    Raises:
        ValueError: If n < 1.
    """
    points, edge = np.asarray(x, np.float64), half_support(n)
    if n <= _SPLINES:
        kappa = math.sqrt(n / 12.0)
        return kappa * _spline(n, kappa * points)
    t, coefficients = _frequencies(n)
    values = _series(points, 1.0 / _PERIOD, 2.0 / _PERIOD * coefficients, np.cos, t)
    return np.where(np.abs(points) < min(edge, 0.5 * _PERIOD), np.maximum(values, 0.0), 0.0)


def irwin_hall_slope(x: Array | float, n: int) -> Array:
    """Derivative of the density, for n >= 2 (at the peak of n = 2, the slope to its right).

    Raises:
        ValueError: If n < 2.
    """
    if n < 2:
        raise ValueError(f"the density of n = {n} uniforms has no slope; n must be >= 2")
    points = np.asarray(x, np.float64)
    if n <= _SPLINES:
        kappa = math.sqrt(n / 12.0)
        y = kappa * points
        return kappa * kappa * (_spline(n - 1, y + 0.5) - _spline(n - 1, y - 0.5))
    t, coefficients = _frequencies(n)
    values = _series(points, 0.0, -2.0 / _PERIOD * coefficients * t, np.sin, t)
    return np.where(np.abs(points) < min(half_support(n), 0.5 * _PERIOD), values, 0.0)


def irwin_hall_cdf(x: Array | float, n: int) -> Array:
    """Distribution function of the standardised law.

    Raises:
        ValueError: If n < 1.
    """
    points, edge = np.asarray(x, np.float64), half_support(n)
    inside = np.clip(points, -edge, edge)
    if n <= _SPLINES:
        y = -np.abs(math.sqrt(n / 12.0) * inside)
        shifts = np.arange(n + 1).reshape(-1, *[1] * y.ndim)
        lower = _spline(n + 1, y - 0.5 - shifts).sum(0)
        values: Array = np.where(inside <= 0.0, lower, 1.0 - lower)
        return values
    limit = 0.5 * _PERIOD
    inside = np.clip(inside, -limit, limit)
    t, coefficients = _frequencies(n)
    start = 0.5 + inside / _PERIOD
    values = start + _series(inside, 0.0, 2.0 / _PERIOD * coefficients / t, np.sin, t)
    return np.minimum(np.maximum(values, 0.0), 1.0)
