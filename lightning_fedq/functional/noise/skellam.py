"""The symmetric Skellam law, the difference of two Poisson variables: an exact sampler, and its divergence.

P(z) = exp(-v) I_|z|(v) with variance v, I the modified Bessel function. Sums of independent ones are Skellam
again, with the sum of the variances, so that no gap between a sum and its law has to be paid for.

References:
    Agarwal, Kairouz, Liu, The Skellam Mechanism for Differentially Private Federated Learning, NeurIPS 2021
    (theorem 3.5: Renyi divergences of integer orders).
"""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.noise.inversion import Words, draw

LARGEST_VARIANCE = 2.0**32


def _tail_end(variance: float, bits: int) -> int:
    """z from which on the law is below 2^-bits of its middle: Chernoff's bound, doubled until it holds."""
    z = 16
    # sup over h of h z - v (cosh h - 1), at h = asinh(z / v)
    while z * math.asinh(z / variance) - z * z / (math.hypot(z, variance) + variance) < bits * math.log(2.0):
        z += z // 4
    return z


def skellam_weights(variance: float, bits: int) -> list[Decimal]:
    """Weights of 0, 1, 2, ... up to a factor, by Miller's backward recurrence. See `inversion.Weights`.

    I_(k-1) = I_(k+1) + (2 k / v) I_k holds terms that are all positive. It starts so far out that what it
    drops, relative to I_k, is the square of the tail beyond.
    """
    rate, start = 2 / Decimal(variance), _tail_end(variance, bits + 80)
    last, this, weights = Decimal(0), Decimal(1), [Decimal(1)]
    for k in range(start, 0, -1):
        last, this = this, last + k * rate * this
        weights.append(this)
    weights.reverse()
    least = weights[0] * Decimal(2) ** -(bits + 20)
    return weights[: next((k for k, weight in enumerate(weights) if weight < least), len(weights)) + 1]


def skellam(variance: float, count: int, words: Words) -> NDArray[np.int64]:
    """Draw from the symmetric Skellam law, exactly.

    Args:
        variance: In squares of integer steps.
        count: Number of draws.
        words: Source of uniform 64-bit words.

    Raises:
        ValueError: If the variance is not in (0, 2^32].
    """
    if not 0.0 < variance <= LARGEST_VARIANCE:
        raise ValueError(
            f"the variance must be in (0, {LARGEST_VARIANCE:g}] squared steps, got {variance}; "
            "use a coarser grid"
        )
    return draw(skellam_weights, variance, count, words)


def skellam_divergence(order: int, norm: float, one_norm: float, variance: float) -> float:
    """Bound on the Renyi divergence of a shifted vector of symmetric Skellam noise from itself.

    a D2^2 / (2 v) + min(((2 a - 1) D2^2 + 6 D1) / (4 v^2), 3 D1 / (2 v)).

    Args:
        order: a, an integer > 1.
        norm: l2 norm D2 of the shift, in integer steps.
        one_norm: l1 norm D1 of the shift, which is integer; at most sqrt(dim) D2 and D2^2.
        variance: v, of each coordinate.

    Example:
        >>> round(skellam_divergence(2, 1.0, 1.0, 25.0), 4)
        0.0436
    """
    square = norm * norm
    more = min(((2 * order - 1) * square + 6 * one_norm) / (4 * variance**2), 1.5 * one_norm / variance)
    return order * square / (2 * variance) + more
