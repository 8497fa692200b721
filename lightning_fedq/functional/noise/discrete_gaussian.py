"""Discrete Gaussian on the integers: an exact sampler, and the privacy of a sum of draws.

The sampler inverts the distribution function (`functional.noise.inversion`).

References:
    Canonne, Kamath, Steinke, The Discrete Gaussian for Differential Privacy, 2020.
    Kairouz, Liu, Steinke, The Distributed Discrete Gaussian Mechanism for Federated Learning with
    Secure Aggregation, 2021 (conditional rounding, the sum's privacy).
"""

from __future__ import annotations

import math
from decimal import Decimal

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.chunks import CHUNK
from lightning_fedq.functional.noise.inversion import Words, draw

LARGEST_SIGMA = 2.0**16


def gaussian_weights(sigma: float, bits: int) -> list[Decimal]:
    """Return exp(-z^2 / (2 sigma^2)) for z = 0, 1, 2, ..., as `inversion.Weights` describes."""
    square = Decimal(sigma) ** 2
    ratio = (-1 / square).exp()
    step = (-1 / (2 * square)).exp()
    weights, least = [Decimal(1)], Decimal(2) ** -(bits + 20)
    while weights[-1] > least:
        weights.append(weights[-1] * step)  # w(z + 1) / w(z) = e^(-(2 z + 1) / (2 sigma^2))
        step *= ratio
    return weights


def _check_sigma(sigma: float) -> None:
    if not 0.0 < sigma <= LARGEST_SIGMA:
        raise ValueError(
            f"sigma must be in (0, {LARGEST_SIGMA:g}] integer steps, got {sigma}. Use a coarser grid."
        )


def discrete_gaussian(sigma: float, count: int, words: Words) -> NDArray[np.int64]:
    """Draw from P(z) proportional to exp(-z^2 / (2 sigma^2)) on the integers, exactly.

    Args:
        sigma: Parameter in integer steps. For sigma < 1 the variance is a little below sigma^2.
        count: Number of draws.
        words: Source of uniform 64-bit words.

    Raises:
        ValueError: If sigma is not in (0, 2^16].
    """
    _check_sigma(sigma)
    return draw(gaussian_weights, sigma, count, words)


def discrete_gaussian_variance(sigma: float) -> float:
    """Return the variance of the discrete Gaussian, which is close to sigma^2 from sigma = 1 on.

    Raises:
        ValueError: If sigma is not in (0, 2^16].

    Examples:
        >>> round(discrete_gaussian_variance(0.5), 4)
        0.215
    """
    _check_sigma(sigma)
    # beyond 12 sigma the weights are below e^-72
    z = np.arange(-math.ceil(12 * sigma) - 2, math.ceil(12 * sigma) + 3, dtype=np.float64)
    weights = np.exp(-z * z / (2.0 * sigma * sigma))
    return float((weights * z * z).sum() / weights.sum())


def rounded_norm_bound(norm: float, dim: int, beta: float) -> float:
    """Return the largest norm that conditional rounding accepts, in integer steps.

    It is sqrt(min{(c + sqrt d)^2, c^2 + d/4 + sqrt(2 ln(1/beta)) (c + sqrt d / 2)}). The square of the norm
    after unconditional rounding is below the second term with probability 1 - beta.

    Args:
        norm: Bound c on the norm before rounding.
        dim: Number d of coordinates.
        beta: Probability in (0, 1).

    Examples:
        >>> round(rounded_norm_bound(100.0, 4096, 0.6), 1)
        105.6
    """
    root = math.sqrt(dim)
    likely = norm**2 + dim / 4.0 + math.sqrt(2.0 * math.log(1.0 / beta)) * (norm + root / 2.0)
    return math.sqrt(min((norm + root) ** 2, likely))


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _round(
    values: NDArray[np.floating], divisor: float, words: NDArray[np.uint64], out: NDArray[np.signedinteger]
) -> float:
    """Round a stretch up or down, and return the sum of squares."""
    square = 0.0
    for j in range(values.size):
        value = np.float64(values[j]) / divisor
        floor = np.floor(value)
        # compares 53 random bits with the fraction times 2^53, in integers
        up = (words[j] >> np.uint64(11)) < np.uint64((value - floor) * 9007199254740992.0)
        out[j] = np.int64(floor) + up
        square += (floor + up) * (floor + up)  # a sum of integers is exact below 2^53
    return square


def conditional_rounding(
    values: NDArray[np.floating],
    bound: float,
    words: Words,
    out: NDArray[np.signedinteger],
    divisor: float = 1.0,
) -> None:
    """Round every coordinate randomly up or down, and repeat until the norm is at most `bound`.

    Args:
        values: Values, `(d,)`, in integer steps after the division.
        bound: Largest norm of the rounded values, as `rounded_norm_bound` returns it.
        words: Private source of uniform 64-bit words.
        out: Rounded values, `(d,)`, overwritten. int32 takes the low bits.
        divisor: Number by which the values are divided.

    Raises:
        ValueError: If the floors alone exceed the bound, or 1,000 attempts fail: the bound is too small.
    """
    for _ in range(1000):
        square = 0.0
        for first in range(0, len(values), CHUNK):
            part = values[first : first + CHUNK]
            square += _round(part, divisor, words(len(part)), out[first : first + CHUNK])
        if square <= bound * bound:
            return
    raise ValueError(
        f"1,000 roundings of a vector of norm {np.linalg.norm(values) / divisor:.6g} exceeded the bound "
        f"{bound:.6g}. Clip to the norm for which the bound was computed."
    )


def sum_gap(n: int, sigma: float) -> float:
    """Return tau, the largest log-ratio between a sum of n discrete Gaussians and one discrete Gaussian.

    tau = 10 sum over k = 1, ..., n - 1 of e^(-2 pi^2 sigma^2 k / (k + 1)), which is 0 for n = 1.

    Args:
        n: Number of summands.
        sigma: Parameter of each summand, in integer steps.
    """
    shares = np.arange(1, n) / np.arange(2, n + 1)
    return 10.0 * float(np.exp(-2.0 * math.pi**2 * sigma**2 * shares).sum())


def concentration(norm: float, one_norm: float, dim: int, n: int, sigma: float) -> float:
    """Return rho such that the Renyi divergence is at most rho alpha at every order alpha (zCDP).

    It is the smaller of two bounds on the Renyi divergence between a sum of n draws of parameter sigma, and
    this sum shifted by `norm` in l2 and by `one_norm` in l1, divided by alpha.

    Examples:
        >>> round(concentration(1.0, 1.0, 1, 10, 5.0), 4)
        0.002
    """
    tau, two, one = sum_gap(n, sigma), norm / (math.sqrt(n) * sigma), one_norm / (math.sqrt(n) * sigma)
    return 0.5 * min(two**2 + 2.0 * one * tau + tau**2 * dim, (two + math.sqrt(dim) * tau) ** 2)
