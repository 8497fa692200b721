"""Closed forms that only the figures of the exact-error paper need, and the rival's settings in figure 6.

Bits are per coordinate, for an input uniform on an interval of length t, given the shared randomness S.

References:
    Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024, section 3.
    The gap bound of its proposition 1 is 1 bit, not 2: its proof multiplies by two twice.
    Kairouz, Liu, Steinke, The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
    Aggregation, ICML 2021 (`ddg_for_budget`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from lightning_fedq.functional.exact_error.decompose import (
    LEAST_SCALE_BITS,
    Decomposition,
    Target,
    draw_special,
)
from lightning_fedq.functional.exact_error.irwin_hall import _SPLINES, _splines, half_support
from lightning_fedq.functional.exact_error.layered import Law, Layering, minimal_step
from lightning_fedq.functional.exact_error.layered_cost import layer_mean
from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.functional.noise.discrete_gaussian import rounded_norm_bound, sum_gap
from lightning_fedq.mechanisms import DistributedDiscreteGaussian
from lightning_fedq.mechanisms.ddg import BETA

Array = NDArray[np.float64]
_LOG2E = math.log2(math.e)
_PERIOD, _TERMS = 20.0, 28


def target_cdf(x: Array, target: Target) -> Array:
    """Distribution function of the target law, for x >= 0."""
    if target == "gaussian":
        return np.asarray(special.ndtr(x), np.float64)
    return 1.0 - 0.5 * np.exp(-math.sqrt(2.0) * x)


def _frequencies(n: int) -> tuple[Array, Array]:
    """Return frequencies t and coefficients (sin z / z)^n of the cosine series, where z = t sqrt(3 / n)."""
    t: Array = 2.0 * math.pi / _PERIOD * np.arange(1, _TERMS + 1, dtype=np.float64)
    z = t * math.sqrt(3.0 / n)
    square = z * z
    # Taylor series of ln(sin z / z)
    series = -square / 6.0 - square**2 / 180.0 - square**3 / 2835.0 - square**4 / 37800.0
    small = z < 0.05
    safe = np.where(small, 1.0, z)
    log_sinc = np.where(small, series, np.log(np.abs(np.sin(safe) / safe)))
    coefficients: Array = np.exp(n * log_sinc)
    return t, coefficients


def irwin_hall_cdf(x: Array | float, n: int) -> Array:
    """Return the distribution function of the standardised law.

    For n <= 40 it is a B-spline up to the edge. For larger n it is a cosine series of period 20 with at most
    28 terms, whose absolute error is below 1e-14 for |x| <= 10. Beyond, it is taken to be 0 or 1.

    Examples:
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


def renyi_divergence(order: float, norm: float, one_norm: float, dim: int, n: int, sigma: float) -> float:
    """Return a bound on the Renyi divergence between a sum of n discrete Gaussians and the shifted sum.

    Args:
        order: Order alpha > 1.
        norm: l2 norm D2 of the shift, in integer steps.
        one_norm: l1 norm D1 of the shift, at most sqrt(dim) D2 and D2^2.
        dim: Number of coordinates.
        n: Number of summands.
        sigma: Parameter of each summand, in integer steps.
    """
    tau, two, one = sum_gap(n, sigma), norm / (math.sqrt(n) * sigma), one_norm / (math.sqrt(n) * sigma)
    return min(
        order * two**2 / 2.0 + tau * dim,
        order / 2.0 * (two**2 + 2.0 * one * tau + tau**2 * dim),
        order / 2.0 * (two + math.sqrt(dim) * tau) ** 2,
    )


def draw_mixture(
    plan: Decomposition,
    count: int,
    words: Callable[[int], NDArray[np.uint64]],
    least_bits: int = LEAST_SCALE_BITS,
) -> tuple[Array, Array]:
    """Draw (A, B) for `count` coordinates: A Z + B has the target law for Z of the Irwin-Hall law.

    Everybody who calls it with the same words gets the same pairs. (The coin and the cap on A compare
    floats: two machines whose tables differ in the last digit would have to meet a probability within
    1e-16, at odds of about 2^-52 a coordinate, to differ.)

    Args:
        plan: Tables of n and the target.
        count: Number of coordinates.
        words: Source of uniform 64-bit words, as `Stream.words64`.
        least_bits: k of the cap on A.

    Returns:
        A in [2^-k, ...) and B, float64 `(count,)`, for a target of variance 1.
    """
    scale, shift = np.ones(count), np.zeros(count)
    special = draw_special(plan, count, words, least_bits)
    scale[special.places] = special.scale
    shift[special.places] = special.shift
    return scale, shift


def fixed_length_bits(interval: float, law: Law, sigma: float) -> int:
    """Bits of the shifted code for inputs in an interval, symbols counted from the smallest possible one.

    Args:
        interval: Length t of the inputs' interval, > 0.
        law: The error's law.
        sigma: Its standard deviation.
    """
    return max(math.ceil(math.log2(math.ceil(interval / minimal_step(law, sigma)) + 1)), 1)


def cell_entropy(ratio: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Entropy of the symbol of an input uniform on `ratio` steps, averaged over the dither.

    G(r) = log r + log e / (2 r) for r >= 1 and (r / 2) log e below; log is base 2.
    """
    r = np.asarray(ratio, np.float64)
    large = np.maximum(r, 1.0)
    cost: NDArray[np.float64] = np.where(r >= 1.0, np.log2(large) + _LOG2E / (2.0 * large), r * _LOG2E / 2.0)
    return cost


def conditional_entropy(interval: float, sigma: float, law: Law, layering: Layering) -> float:
    """Exact H(M | S) in bits for an input uniform on an interval of length t.

    Args:
        interval: t > 0.
        sigma: Standard deviation of the error, > 0.
        law: The error's law.
        layering: Direct or shifted.

    Raises:
        ValueError: If interval or sigma is not > 0.

    References:
        Section 3 of the paper; the expectation over the layer is done by quadrature.
    """
    if not (interval > 0 and sigma > 0):
        raise ValueError(f"interval and sigma must be > 0, got {interval} and {sigma}")
    return layer_mean(lambda step: float(cell_entropy(interval / sigma / step)), law, layering)


def lower_bound(interval: float, sigma: float, law: Law) -> float:
    """Equation 4: no code whose error has this law needs less than log t + h(D), D the direct layer."""
    return math.log2(interval / sigma) - layer_mean(math.log2, law, "direct")


def upper_bound(interval: float, sigma: float, law: Law, layering: Layering) -> float:
    """Equation 5, proposition 1: log t + h(layer) + (8 log e / t) sigma, any input on length t."""
    return (
        math.log2(interval / sigma) - layer_mean(math.log2, law, layering) + 8.0 * _LOG2E * sigma / interval
    )


def ddg_for_budget(
    epsilon: float, delta: float, clip_norm: float, num_clients: int, dim: int, bits: int, spread: float = 2.0
) -> DistributedDiscreteGaussian:
    """Choose noise and grid for a zero-out budget over one round, as the paper's experiments do.

    The noise is the least that meets the budget by the three Renyi bounds over orders 2 to 256; the grid is
    the finest for which sums stay within `spread` standard deviations of the modulus' half.

    Args:
        epsilon: Target, in nats, under zero-out (half the sensitivity of substitution).
        delta: Target.
        clip_norm: Largest l2 norm of an update.
        num_clients: n.
        dim: Length of the update.
        bits: log2 of the modulus.
        spread: k in 2^bits g = 2 k sqrt((c n)^2 / d + (g^2 / 4 + s^2) n).

    Raises:
        ValueError: If no grid fits the modulus.
    """
    size, orders = padded_size(dim), [*range(2, 129), 256]

    def spent(grid: float, sigma: float) -> float:
        norm = rounded_norm_bound(1.0 / grid, size, BETA)
        one = min(math.sqrt(size) * norm, norm**2)
        levels = [
            renyi_divergence(a, norm, one, size, num_clients, sigma / grid)
            + math.log1p(-1.0 / a)
            - (math.log(delta) + math.log(a)) / (a - 1)
            for a in orders
        ]
        return float(min(levels))

    def noise(grid: float) -> float:
        return float(
            math.exp(
                optimize.brentq(
                    lambda s: spent(grid, math.exp(s)) - epsilon, math.log(1e-6), math.log(1e4), xtol=1e-10
                )
            )
        )

    def room(log_grid: float) -> float:
        grid = math.exp(log_grid)
        variance = num_clients**2 / size + (grid**2 / 4.0 + noise(grid) ** 2) * num_clients
        return 2.0**bits * grid - 2.0 * spread * math.sqrt(variance)

    low, high = math.log(1e-9), math.log(10.0)
    if room(low) > 0 or room(high) < 0:
        raise ValueError(f"no grid fits a modulus of 2^{bits} for {num_clients} clients; take more bits")
    grid = math.exp(optimize.brentq(room, low, high, xtol=1e-10))
    return DistributedDiscreteGaussian(clip_norm, noise(grid), grid, bits)
