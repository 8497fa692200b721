"""Closed forms of the error of CorBin's bits, for the ideal epsilon of a coordinate."""

from __future__ import annotations

import math

from lightning_fedq.functional.one_bit.threshold_coin import pair_excess


def output_scale(epsilon: float) -> float:
    """Return alpha = coth(epsilon / 2), the ideal output scale of a one-bit epsilon-LDP quantiser.

    Examples:
        >>> round(output_scale(1.0), 3)
        2.164
    """
    return 1.0 / math.tanh(epsilon / 2.0)


def one_probability(value: float, center: float, radius: float, epsilon: float) -> float:
    """Return P(bit = 1) = 1/2 + x tanh(epsilon / 2) / 2, x = (value - center) / radius clipped to [-1, 1].

    Examples:
        >>> round(one_probability(1.0, 0.0, 1.0, 1.0), 3)
        0.731
    """
    x = min(max((value - center) / radius, -1.0), 1.0)
    return 0.5 + 0.5 * x * math.tanh(epsilon / 2.0)


def pair_mse(
    first: float, second: float, center: float, radius: float, epsilon: float, shared_bits: int | None
) -> float:
    """Return the mean squared error of a pair's decoded sum, 2 r alpha |s| - s^2 + 8 r^2 alpha^2 excess.

    Here s is the sum of the two values minus twice the centre, and `pair_excess` is the excess. With
    `shared_bits=None` the error is the minimum over all couplings of the two marginals (Frechet-Hoeffding).

    Examples:
        >>> round(pair_mse(0.0, 0.0, 0.0, 1.0, 1.0, 5), 3)
        0.0
    """
    scaled, s = radius * output_scale(epsilon), first + second - 2.0 * center
    q1, q2 = (one_probability(value, center, radius, epsilon) for value in (first, second))
    return 2.0 * scaled * abs(s) - s * s + 8.0 * scaled**2 * pair_excess(q1, q2, shared_bits)
