"""Closed forms of one-bit quantisation and its privacy, to hold the package to.

References:
    Agarwal et al., cpSGD, NeurIPS 2018, Theorem 1 (`blanket_epsilon`).
"""

import math
from itertools import combinations

import numpy as np
import scipy

from lightning_fedq.functional.one_bit.privacy import _lower_quantile
from lightning_fedq.functional.one_bit.threshold_coin import output_scale, pair_mse


def single_mse(value, center, radius, epsilon):
    """Mean squared error of one client's decoded bit, r^2 alpha^2 - (value - center)^2."""
    return (radius * output_scale(epsilon)) ** 2 - (value - center) ** 2


def randomized_response_rdp(epsilon_bit, order):
    """Renyi divergence of the given order > 1 of one randomised response."""
    half = 0.5 * epsilon_bit
    # ln(hi^a lo^(1-a) + lo^a hi^(1-a)) with hi / lo = e^eps is ln(cosh((a - 1/2) eps) / cosh(eps / 2))
    return (_log_cosh((2.0 * order - 1.0) * half) - _log_cosh(half)) / (order - 1.0)


def _log_cosh(x):
    return abs(x) + math.log1p(math.exp(-2.0 * abs(x))) - math.log(2.0)


def blanket_epsilon(low, num_coins, dim, delta, failure):
    """Certificate in closed form for one round behind a sum: (epsilon, fair coins k), or None out of range.

    A coin with q in [low, high] is a fair coin with probability 2 low whatever its input (the blanket), so in
    every coordinate at least k of `num_coins` coins are fair, except with probability `failure`; k fair coins
    are the binomial mechanism of cpSGD with p = 1/2. Total delta is `delta + failure`. Covers any change of
    the bits of one client; loose, and linear in dim.

    Args:
        low: Smallest probability of a one.
        num_coins: Independent coins besides the victim's.
        dim: Coordinates of one round.
        delta: For the binomial mechanism.
        failure: For the event that some coordinate has fewer than k fair coins.
    """
    k = int(scipy.stats.binom.ppf(failure / dim, num_coins, 2.0 * low))
    while k > 0 and scipy.stats.binom.cdf(k - 1, num_coins, 2.0 * low) > failure / dim:
        k -= 1
    if k / 4.0 < max(23.0 * math.log(10.0 * dim / delta), 2.0):
        return None
    log_ten = math.log(10.0 / delta)
    epsilon = math.sqrt(8.0 * dim * math.log(1.25 / delta) / k)
    epsilon += 4.0 * (1.75 * math.sqrt(2.0 * dim * log_ten) + dim / 3.0) / (k * (1.0 - delta / 10.0))
    epsilon += 8.0 * (math.log(1.25 / delta) + math.log(20.0 * dim / delta) * log_ten) / (3.0 * k)
    return epsilon, k


def common_coin_epsilon(epsilon_bit, num_coins, dim, delta):
    """Theorem 3 of CorBin-FL with its constants corrected, or None outside its condition.

    Valid only if all other coins share one probability, so it is not a guarantee of the mechanism; kept as
    the corrected quote of the paper's formula. Use `blanket_epsilon` for a certificate.
    """
    a = math.tanh(epsilon_bit / 2.0)
    kappa, kappa_plus = 1.0 - a * a, 1.0 + a * a
    if num_coins * kappa / 4.0 < max(23.0 * math.log(10.0 * dim / delta), 2.0):
        return None
    log_ten, n = math.log(10.0 / delta), num_coins * kappa
    epsilon = math.sqrt(8.0 * dim * math.log(1.25 / delta) / n)
    linear = math.sqrt(2.0 * dim * log_ten) * (1.75 + 3.25 * a * a) + dim * (kappa_plus / 3.0 + a)
    epsilon += 4.0 * linear / (n * (1.0 - delta / 10.0))
    logs = math.log(1.25 / delta) + kappa_plus * math.log(20.0 * dim / delta) * log_ten
    return epsilon + 8.0 * logs / (3.0 * n)


def lone_survivor_quantile(num_pairs, dropout_probability, failure):
    """Largest k with P(fewer than k pairs have exactly one survivor) <= failure (Theorem 4, exact)."""
    chance = 2.0 * dropout_probability * (1.0 - dropout_probability)
    return _lower_quantile(scipy.stats.binom.pmf(np.arange(num_pairs + 1), num_pairs, chance), failure)


def mean_mse(values, groups, center, radius, epsilon, shared_bits):
    """Exact mean squared error of the decoded mean for given pairs and singles.

    Args:
        values: One value per client.
        groups: Pairs and singles of indices into `values`.
        center: Centre of the range.
        radius: Half-width of the range.
        epsilon: Budget per bit.
        shared_bits: d, or None for unlimited.
    """
    total = 0.0
    for group in groups:
        if len(group) == 2:
            first, second = (values[i] for i in group)
            total += pair_mse(first, second, center, radius, epsilon, shared_bits)
        else:
            total += sum(single_mse(values[i], center, radius, epsilon) for i in group)
    return total / len(values) ** 2


def random_pairing_mse(values, center, radius, epsilon, shared_bits):
    """The same for an even number of clients, averaged over uniformly random pairings."""
    pairs = (pair_mse(a, b, center, radius, epsilon, shared_bits) for a, b in combinations(values, 2))
    return sum(pairs) / (len(values) - 1) / len(values) ** 2


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
