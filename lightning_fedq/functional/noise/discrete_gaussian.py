"""The discrete Gaussian on the integers: an exact sampler, and what a sum of them promises.

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
    """exp(-z^2 / (2 sigma^2)) for z = 0, 1, 2, .... See `inversion.Weights`."""
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
            f"sigma must be in (0, {LARGEST_SIGMA:g}] integer steps, got {sigma}; use a coarser grid"
        )


def discrete_gaussian(sigma: float, count: int, words: Words) -> NDArray[np.int64]:
    """Draw from P(z) proportional to exp(-z^2 / (2 sigma^2)) on the integers, exactly.

    Args:
        sigma: Its parameter, in integer steps; the variance is a little below sigma^2 for sigma < 1.
        count: Number of draws.
        words: Source of uniform 64-bit words.

    Raises:
        ValueError: If sigma is not in (0, 2^16].
    """
    _check_sigma(sigma)
    return draw(gaussian_weights, sigma, count, words)


def discrete_gaussian_variance(sigma: float) -> float:
    """Variance of the discrete Gaussian. Sigma^2 from about sigma = 1 on.

    Raises:
        ValueError: If sigma is not in (0, 2^16].

    Example:
        >>> round(discrete_gaussian_variance(0.5), 4)
        0.215
    """
    _check_sigma(sigma)
    # beyond 12 sigma the weights are below e^-72
    z = np.arange(-math.ceil(12 * sigma) - 2, math.ceil(12 * sigma) + 3, dtype=np.float64)
    weights = np.exp(-z * z / (2.0 * sigma * sigma))
    return float((weights * z * z).sum() / weights.sum())


def rounded_norm_bound(norm: float, dim: int, beta: float) -> float:
    """Largest norm that conditional rounding accepts, in integer steps.

    sqrt(min{(c + sqrt d)^2, c^2 + d/4 + sqrt(2 ln(1/beta)) (c + sqrt d / 2)}); unconditional rounding
    stays below the second with probability 1 - beta.

    Args:
        norm: c, bound on the norm before rounding.
        dim: d.
        beta: In (0, 1).

    Example:
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
        # 53 bits against the fraction times 2^53, in integers
        up = (words[j] >> np.uint64(11)) < np.uint64((value - floor) * 9007199254740992.0)
        out[j] = np.int64(floor) + up
        square += (floor + up) * (floor + up)  # of integers: exact below 2^53
    return square


def conditional_rounding(
    values: NDArray[np.floating],
    bound: float,
    words: Words,
    out: NDArray[np.signedinteger],
    divisor: float = 1.0,
) -> None:
    """Round every coordinate up or down, unbiased, and again until the norm is at most `bound`.

    Args:
        values: `(d,)`, in integer steps once they are divided.
        bound: Largest norm of the values, as `rounded_norm_bound` returns it.
        words: Source of uniform 64-bit words, private.
        out: `(d,)`, overwritten; int32 takes the low bits.
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
        f"1,000 roundings of a vector of norm {np.linalg.norm(values) / divisor:.6g} left the bound "
        f"{bound:.6g}; clip to the norm that the bound was made for"
    )


def sum_gap(n: int, sigma: float) -> float:
    """tau: how far, in log-ratio, a sum of n discrete Gaussians is from one. 0 for n = 1.

    Args:
        n: Number of summands.
        sigma: Parameter of each, in integer steps.
    """
    # k / (k + 1), in tau = 10 sum of e^(-2 pi^2 sigma^2 k / (k + 1))
    shares = np.arange(1, n) / np.arange(2, n + 1)
    return 10.0 * float(np.exp(-2.0 * math.pi**2 * sigma**2 * shares).sum())


def renyi_divergence(order: float, norm: float, one_norm: float, dim: int, n: int, sigma: float) -> float:
    """Bound on the Renyi divergence of a shifted sum of n discrete Gaussians from itself.

    Args:
        order: alpha > 1.
        norm: l2 norm D2 of the shift, in integer steps.
        one_norm: l1 norm D1 of the shift, at most sqrt(dim) D2 and D2^2.
        dim: d.
        n: Number of summands.
        sigma: Parameter of each.
    """
    tau, two, one = sum_gap(n, sigma), norm / (math.sqrt(n) * sigma), one_norm / (math.sqrt(n) * sigma)
    return min(
        order * two**2 / 2.0 + tau * dim,
        order / 2.0 * (two**2 + 2.0 * one * tau + tau**2 * dim),
        order / 2.0 * (two + math.sqrt(dim) * tau) ** 2,
    )


def concentration(norm: float, one_norm: float, dim: int, n: int, sigma: float) -> float:
    """rho with Renyi divergence <= rho alpha at every order: the last two bounds of `renyi_divergence`.

    Example:
        >>> round(concentration(1.0, 1.0, 1, 10, 5.0), 4)
        0.002
    """
    tau, two, one = sum_gap(n, sigma), norm / (math.sqrt(n) * sigma), one_norm / (math.sqrt(n) * sigma)
    return 0.5 * min(two**2 + 2.0 * one * tau + tau**2 * dim, (two + math.sqrt(dim) * tau) ** 2)
