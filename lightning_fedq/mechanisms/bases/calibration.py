"""Noise calibrated to a budget over a whole run, by Opacus's accountants.

One client takes part in every round with its whole update, so there is no sampling to amplify anything
(rate 1). The Gaussian goes straight through Opacus. Opacus 1.6 has no Laplace mechanism: its Renyi
divergence is Mironov's closed form, Opacus's conversion does the rest, and the pure bound wins where it
is smaller.

References:
    Mironov, Renyi Differential Privacy, CSF 2017, Proposition 6.
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache

from lightning_fedq.extras import extra
from lightning_fedq.functional.checks import check_positive

_ORDERS = [1.0 + x / 10.0 for x in range(1, 100)] + [float(x) for x in range(11, 64)]
_ORDERS += [float(2**k) for k in range(6, 15)]


def _check(epsilon: float, delta: float, rounds: int, smallest_delta: str) -> None:
    check_positive(epsilon=epsilon)
    if not (0 < delta < 1 or (smallest_delta == "[0" and delta == 0)):
        raise ValueError(f"delta must be in {smallest_delta}, 1), got {delta}")
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}")


@lru_cache(maxsize=256)
def gaussian_noise_multiplier(epsilon: float, delta: float, rounds: int) -> float:
    """Noise std over l2 sensitivity for (epsilon, delta)-DP of one client over `rounds` rounds.

    Args:
        epsilon: Budget of the whole run, > 0, in nats.
        delta: In (0, 1).
        rounds: How often the client takes part, >= 1.

    Raises:
        ValueError: If an argument is out of range, or the budget is too small for Opacus.
    """
    with extra("opacus", "noise calibrated to an epsilon"):
        from opacus.accountants.utils import get_noise_multiplier

    _check(epsilon, delta, rounds, "(0")
    with warnings.catch_warnings():
        # Opacus warns where the best order is the last one of the list: any order is a valid bound.
        warnings.simplefilter("ignore")
        return float(
            get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=1.0,
                steps=rounds,
                accountant="rdp",
                epsilon_tolerance=1e-3 * epsilon,
                alphas=_ORDERS,
            )
        )


def _laplace_epsilon(multiplier: float, delta: float, rounds: int) -> float:
    with extra("opacus", "noise calibrated to an epsilon"):
        from opacus.accountants.analysis.rdp import get_privacy_spent

    pure = rounds / multiplier
    if delta == 0:
        return pure
    rdp = []
    for a in _ORDERS:
        # log of a/(2a-1) e^((a-1)/b) + (a-1)/(2a-1) e^(-a/b), with the larger exponential taken out
        rest = math.log(a / (2 * a - 1) + (a - 1) / (2 * a - 1) * math.exp(-(2 * a - 1) / multiplier))
        rdp.append(rounds * ((a - 1) / multiplier + rest) / (a - 1))
    with warnings.catch_warnings():
        # As above: the last order is still a valid bound.
        warnings.simplefilter("ignore")
        epsilon, _ = get_privacy_spent(orders=_ORDERS, rdp=rdp, delta=delta)
    return min(pure, float(epsilon))


@lru_cache(maxsize=256)
def laplace_noise_multiplier(epsilon: float, delta: float, rounds: int) -> float:
    """Noise scale over l1 sensitivity for (epsilon, delta)-DP of one client over `rounds` rounds.

    Args:
        epsilon: Budget of the whole run, > 0, in nats.
        delta: In [0, 1); 0 asks for pure DP, rounds / epsilon.
        rounds: How often the client takes part, >= 1.

    Raises:
        ValueError: If an argument is out of range.
    """
    _check(epsilon, delta, rounds, "[0")
    low, high = 0.0, rounds / epsilon
    for _ in range(60 if delta > 0 else 0):
        middle = 0.5 * (low + high)
        if _laplace_epsilon(middle, delta, rounds) > epsilon:
            low = middle
        else:
            high = middle
    return high


def resolve_multiplier(
    noise_multiplier: float | None, epsilon: float | None, delta: float | None, rounds: int | None, law: str
) -> float:
    """Return the noise multiplier that was given, or the one that the budget asks for.

    Raises:
        ValueError: If both are given, neither, or half a budget.
    """
    budget = (epsilon, delta, rounds)
    if noise_multiplier is not None:
        if any(part is not None for part in budget):
            raise ValueError(
                "give noise_multiplier, or epsilon, delta and rounds, not both: "
                f"got noise_multiplier={noise_multiplier} and {budget}"
            )
        check_positive(noise_multiplier=noise_multiplier)
        return noise_multiplier
    if epsilon is None or delta is None or rounds is None:
        raise ValueError(
            f"give noise_multiplier, or all of epsilon, delta and rounds; got {budget} for these three"
        )
    calibrate = gaussian_noise_multiplier if law == "gaussian" else laplace_noise_multiplier
    return calibrate(epsilon, delta, rounds)
