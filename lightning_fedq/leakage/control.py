"""Noise that keeps an attacker's belief within a leakage budget, fast enough for every round.

The attacker is `Matching` in its best case: a client takes one step on one sample. The attacker knows the
model and a list of candidates with the sample on it, and names the candidate whose gradient has the largest
cosine with the observed update. Only the projections of the noise on the candidates' directions matter, so an
attempt is cheap for any size of the model. In each attempt there is one noise level beyond which it fails.
The level for the allowed number of hits is an order statistic of these levels. Its Clopper-Pearson limit also
holds for the level that is chosen by it, because the hit rate beyond the k-th largest of n levels is Beta(k,
n - k + 1) distributed. So there is no search, and no confidence to divide over probes.

`calibrate` (`reproductions/leakage/calibration.py`) measures the same by sending messages. Here, ideal
Gaussian noise replaces the mechanism's grid. The result is about this attack and these candidates, and is not
differential privacy.
"""

import bisect
import math
from functools import lru_cache
from typing import NamedTuple

import torch
from scipy.stats import beta
from torch import Tensor

from lightning_fedq.functional.trade_off import recovery_leakage
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.near_optimal_utility import NearOptimalUtility

_CONFIDENCE = 0.95
"""Confidence of one-sided limits."""
LEAST_NOISE = 1e-5
"""Smallest noise std, in units of the clipping norm, also where the budget needs no noise."""


class NoiseLevel(NamedTuple):
    """Noise that one client needs.

    Args:
        std: Standard deviation of the noise in every coordinate, in units of the update.
        leakage: Upper confidence limit of the leakage at `std`.
        unprotected: Leakage without noise, C1.
    """

    std: float
    leakage: float
    unprotected: float


def failing_levels(updates: Tensor, attempts: int, generator: torch.Generator) -> Tensor:
    """Return the noise std beyond which each of some attempts fails.

    An attempt hits at std s if the victim i has the largest of |u_i| cos_ij + s x_j, where x are the noise's
    projections on the candidates' unit vectors. So s must stay below |u_i| (1 - cos_ij) / (x_j - x_i) for all
    j with x_j > x_i.

    Args:
        updates: `(candidates, dim)` updates of one step on one sample each, clipped as the mechanism clips
            them.
        attempts: Number of attempts, >= 1.
        generator: Random generator on the CPU.

    Returns:
        `(attempts,)` float64 levels, in units of the update. Infinite where noise alone points to the victim.
    """
    gram = (updates.double() @ updates.double().T).cpu()
    norms = gram.diag().clamp(min=1e-300).sqrt()
    cosines = gram / (norms[:, None] * norms)
    values, vectors = torch.linalg.eigh(cosines)
    normals = torch.randn(attempts, len(norms), generator=generator, dtype=torch.float64)
    noise = normals @ (vectors * values.clamp(min=0.0).sqrt()).T
    victims = torch.randint(len(norms), (attempts,), generator=generator)
    margins = (norms[:, None] * (1.0 - cosines).clamp(min=0.0))[victims]
    ahead = noise - noise.gather(1, victims[:, None])
    levels = torch.where(ahead > 0.0, margins / ahead.clamp(min=1e-300), math.inf)
    return levels.min(1).values


@lru_cache(maxsize=256)
def allowed_hits(attempts: int, num_candidates: int, budget: float) -> int:
    """Return the largest number of hits whose upper confidence limit is within the budget.

    Args:
        attempts: Number of attempts, >= 1.
        num_candidates: Number of candidates, >= 2.
        budget: Leakage budget tau, in (0, sqrt(ln 2)).

    Raises:
        ValueError: If even zero hits in so many attempts can't show the budget, or a guess already exceeds
            it.
    """

    def within(hits: int) -> bool:
        return recovery_leakage(_upper(hits, attempts), num_candidates) <= budget

    guess = recovery_leakage(1.0 / num_candidates, num_candidates)
    if guess >= budget:
        raise ValueError(
            f"leakage budget {budget:g} is below {guess:.3f}, the leakage of a guess among {num_candidates} "
            "candidates. Use a larger budget or more candidates."
        )
    if not within(0):
        raise ValueError(
            f"leakage budget {budget:g} can't be shown with {attempts} attempts, even without a hit. "
            "Use more attempts or a larger budget."
        )
    return bisect.bisect(range(attempts + 1), False, key=lambda hits: not within(hits)) - 1


def _upper(hits: int, attempts: int) -> float:
    """Return the upper Clopper-Pearson limit of a hit rate."""
    return 1.0 if hits == attempts else float(beta.ppf(_CONFIDENCE, hits + 1, attempts - hits))


def noise_for_budget(
    updates: Tensor, clip_norm: float, budget: float, attempts: int, generator: torch.Generator
) -> NoiseLevel:
    """Return the smallest noise whose measured leakage is within the budget, by its upper confidence limit.

    Args:
        updates: `(candidates, dim)` updates of one step on one sample each, not clipped.
        clip_norm: Norm to which the mechanism clips updates.
        budget: Leakage budget tau, in (0, sqrt(ln 2)).
        attempts: Number of attempts, >= 1.
        generator: Random generator on the CPU.

    Raises:
        ValueError: If an update is not finite, so few attempts can't show the budget, or no noise meets it.
    """
    if not bool(torch.isfinite(updates).all()):
        raise ValueError("the gradients of the probe must be finite. Lower the learning rate.")
    count = len(updates)
    hits = allowed_hits(attempts, count, budget)
    lengths = updates.norm(dim=1, keepdim=True)
    clipped = updates * (clip_norm / lengths.clamp(min=1e-30)).clamp(max=1.0)
    levels = failing_levels(clipped, attempts, generator).sort(descending=True).values
    unprotected = recovery_leakage((levels > 0.0).double().mean().item(), count)
    level = levels[hits].item() if hits < attempts else 0.0
    if math.isinf(level):
        raise ValueError(
            f"No noise brings the leakage among {count} candidates below {budget:g}. "
            "Use a larger budget, more candidates or more attempts."
        )
    if level < LEAST_NOISE * clip_norm:
        level = LEAST_NOISE * clip_norm
        hits = int((levels > level).sum())
    leakage = recovery_leakage(_upper(hits, attempts), count)
    return NoiseLevel(level, min(leakage, budget), unprotected)


def check_controllable(mechanism: Mechanism) -> NearOptimalUtility:
    """Return the mechanism if its noise may follow from a leakage budget.

    Raises:
        ValueError: If it has no leakage budget, or states that its calibration used public data only.
    """
    if not isinstance(mechanism, NearOptimalUtility):
        raise ValueError(
            f"LeakageBudget sets the noise of NearOptimalUtility, got {type(mechanism).__name__}. "
            "Use that mechanism, or leave LeakageBudget out."
        )
    if mechanism.public_calibration:
        raise ValueError(
            "LeakageBudget looks at the clients' data, but public_calibration=True says that nobody does. "
            "Set it to false."
        )
    return mechanism
