"""Calibration of noise to a budget over a whole run, with the accounting of the privacy report.

One client takes part in every round with its whole update, so no sampling amplifies privacy. Many Gaussian
rounds are one Gaussian, whose smallest noise is known (Balle, Wang). Laplace rounds are composed as loss
distributions. Renyi divergences would need 6.3% more Gaussian noise (epsilon 8, delta 1e-5, 30 rounds).
"""

import math
from functools import lru_cache

from lightning_fedq.functional.checks import check_at_least, check_positive
from lightning_fedq.functional.divergences import find_smallest
from lightning_fedq.functional.noise.grid_noise import analytic_gaussian_multiplier
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.losses import LaplaceLoss

KEPT = 1e-3
"""Share of a budget that is reserved for errors of samplers and floats."""


def _check(epsilon: float, delta: float, rounds: int, smallest_delta: str) -> None:
    """Refuse a budget that is out of range. `smallest_delta` is "[0" or "(0"."""
    check_positive(epsilon=epsilon)
    if not (0 < delta < 1 or (smallest_delta == "[0" and delta == 0)):
        raise ValueError(f"delta must be in {smallest_delta}, 1), got {delta}")
    check_at_least(1, rounds=rounds)


@lru_cache(maxsize=256)
def gaussian_noise_multiplier(epsilon: float, delta: float, rounds: int) -> float:
    """Return noise std over l2 sensitivity for (epsilon, delta)-DP of one client over `rounds` rounds.

    Args:
        epsilon: Budget of the whole run, > 0, in nats.
        delta: Delta of the whole run, in (0, 1).
        rounds: Number of rounds in which the client takes part, >= 1.

    Raises:
        ValueError: If an argument is out of range.

    Examples:
        >>> round(gaussian_noise_multiplier(8.0, 1e-5, 30), 2)
        3.29
    """
    _check(epsilon, delta, rounds, "(0")
    return math.sqrt(rounds) * analytic_gaussian_multiplier((1.0 - KEPT) * epsilon, delta)


@lru_cache(maxsize=256)
def laplace_noise_multiplier(epsilon: float, delta: float, rounds: int) -> float:
    """Return noise scale over l1 sensitivity for (epsilon, delta)-DP of one client over `rounds` rounds.

    Args:
        epsilon: Budget of the whole run, > 0, in nats.
        delta: Delta of the whole run, in [0, 1). 0 asks for pure DP, which gives rounds / epsilon.
        rounds: Number of rounds in which the client takes part, >= 1.

    Raises:
        ValueError: If an argument is out of range.

    Examples:
        >>> laplace_noise_multiplier(8.0, 0.0, 30)
        3.75
    """
    _check(epsilon, delta, rounds, "[0")
    if delta == 0:
        return rounds / epsilon

    def exceeds(multiplier: float) -> bool:
        return spent(LaplaceLoss(multiplier), delta, rounds=rounds).epsilon > (1.0 - KEPT) * epsilon

    return find_smallest(exceeds, rounds / epsilon / (1.0 - KEPT), 1e-4)
