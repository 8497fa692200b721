"""Closed forms of the error of one-bit quantisation, to compare the package with."""

import math
from itertools import combinations

from reproductions.corbin.errors import output_scale


def single_mse(value, center, radius, epsilon):
    """Mean squared error of one client's decoded bit, r^2 alpha^2 - (value - center)^2."""
    return (radius * output_scale(epsilon)) ** 2 - (value - center) ** 2


def group_variance(probabilities: list[float]) -> float:
    """Variance of the number of ones in a stratified group, averaged over its random ranks.

    With u_i = (pi_i + xi_i) / g, pi a random permutation of the strata and xi_i private, it is
    1/(2(g-1)) sum |q_i - q_k| (1 - |q_i - q_k|) + 1/(g(g-1)) sum over pairs in one stratum of
    G(phi_i, phi_k), where phi = frac(g q) and G(a, b) = min(a, b) - ab.

    Example:
        >>> group_variance([0.5, 0.5])
        0.0
    """
    g = len(probabilities)
    if g == 1:
        return probabilities[0] * (1.0 - probabilities[0])
    spread = inside = 0.0
    for a, b in combinations(probabilities, 2):
        gap = abs(a - b)
        spread += 2.0 * gap * (1.0 - gap)
        if math.floor(g * a) == math.floor(g * b):
            phi_a, phi_b = g * a - math.floor(g * a), g * b - math.floor(g * b)
            inside += 2.0 * (min(phi_a, phi_b) - phi_a * phi_b)
    return spread / (2 * (g - 1)) + inside / (g * (g - 1))


def coupled_pair_mse(first, second, radius, coin):
    """The mean squared error of a pair's decoded sum.

    It is r^2 [2 alpha^2 - 2 alpha (1 - |x1|)(1 - |x2|) - x1^2 - x2^2], which is the error of the best
    coupling.
    """
    x1, x2, alpha = first / radius, second / radius, coin.scale
    together = 2.0 * alpha * (1.0 - abs(x1)) * (1.0 - abs(x2))
    return radius**2 * (2.0 * alpha**2 - together - x1**2 - x2**2)
