"""Noise that keeps an attacker's belief within a leakage budget, quickly enough for every round.

The attacker is `Matching` at its best: a client takes one step on one sample, and the attacker, who knows the
model and a list of candidates with the sample on it, names the candidate whose gradient has the largest
cosine with what it sees. Only the noise's projections on the candidates' directions matter to it, so an
attempt costs a few numbers whatever the size of the model. For each attempt there is one noise level beyond
which it fails; the allowed number of hits is an order statistic of these levels, and its Clopper-Pearson
limit holds for the level that is chosen by it (the hit rate beyond the k-th largest of n levels is
Beta(k, n - k + 1) distributed). No search, and no confidence to share out over probes.

`calibrate` (`reproductions/leakage/calibration.py`) measures the same by sending messages; here ideal
Gaussian noise stands in place of the mechanism's grid. It is about this attack and these candidates, and not
differential privacy.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from scipy.stats import beta
from torch import Tensor

from lightning_fedq.functional.trade_off import recovery_leakage
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.near_optimal_utility import NearOptimalUtility

LEAST_NOISE = 1e-5
"""Smallest noise std, in clipping norms: a budget that needs none gets this."""


class NoiseLevel(NamedTuple):
    """Noise that one client needs.

    Args:
        std: Noise std in every coordinate, in units of the update.
        leakage: Upper confidence limit of the leakage at `std`.
        unprotected: C1, the leakage without noise.
    """

    std: float
    leakage: float
    unprotected: float


def failing_levels(updates: Tensor, attempts: int, generator: torch.Generator) -> Tensor:
    """The noise std beyond which each of some attempts fails.

    An attempt hits at std s if the victim i has the largest of |u_i| cos_ij + s x_j, x the noise's
    projections on the candidates' unit vectors: s must stay below |u_i| (1 - cos_ij) / (x_j - x_i) for all j
    with x_j > x_i.

    Args:
        updates: `(candidates, dim)` of one step on one sample each, clipped as the mechanism clips them.
        attempts: >= 1.
        generator: Random generator on the CPU.

    Returns:
        `(attempts,)` float64, in units of the update; infinite where noise alone names the victim.
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
def allowed_hits(attempts: int, num_candidates: int, budget: float, confidence: float) -> int:
    """The most hits whose upper limit is within the budget.

    Raises:
        ValueError: If so few attempts can't show so little leakage, or a guess leaks more.
    """

    def within(hits: int) -> bool:
        return recovery_leakage(_upper(hits, attempts, confidence), num_candidates) <= budget

    guess = recovery_leakage(1.0 / num_candidates, num_candidates)
    if guess >= budget:
        raise ValueError(
            f"a leakage budget of {budget:g} is below {guess:.3f}, what guessing among {num_candidates} "
            "candidates scores under any noise; use a larger budget or more candidates"
        )
    if not within(0):
        raise ValueError(
            f"a leakage budget of {budget:g} can't be shown with {attempts} attempts: even without a hit the "
            "leakage may be larger; use more attempts or a larger budget"
        )
    if within(attempts):
        return attempts
    low, high = 0, attempts
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def _upper(hits: int, attempts: int, confidence: float) -> float:
    return 1.0 if hits == attempts else float(beta.ppf(confidence, hits + 1, attempts - hits))


def noise_for_budget(
    updates: Tensor,
    clip_norm: float,
    budget: float,
    attempts: int,
    generator: torch.Generator,
    confidence: float = 0.95,
) -> NoiseLevel:
    """The smallest noise whose measured leakage is within the budget, by its upper confidence limit.

    Args:
        updates: `(candidates, dim)` of one step on one sample each.
        clip_norm: Norm to which the mechanism clips updates.
        budget: tau, in (0, sqrt(ln 2)).
        attempts: >= 1.
        generator: Random generator on the CPU.
        confidence: Confidence of the one-sided limit.

    Raises:
        ValueError: If an update is not finite, so few attempts can't show the budget, or no noise meets it.
    """
    if not bool(torch.isfinite(updates).all()):
        raise ValueError("the gradients of the probe must be finite; lower the learning rate")
    count = len(updates)
    hits = allowed_hits(attempts, count, budget, confidence)
    lengths = updates.norm(dim=1, keepdim=True)
    clipped = updates * (clip_norm / lengths.clamp(min=1e-30)).clamp(max=1.0)
    levels = failing_levels(clipped, attempts, generator).sort(descending=True).values
    unprotected = recovery_leakage((levels > 0.0).double().mean().item(), count)
    level = levels[hits].item() if hits < attempts else 0.0
    if math.isinf(level):
        raise ValueError(
            f"no noise brings the leakage among {count} candidates under {budget:g}: "
            "guesses alone hit too often; use a larger budget, more candidates or more attempts"
        )
    if level < LEAST_NOISE * clip_norm:
        level = LEAST_NOISE * clip_norm
        hits = int((levels > level).sum())
    leakage = recovery_leakage(_upper(hits, attempts, confidence), count)
    return NoiseLevel(level, min(leakage, budget), unprotected)


def check_controllable(mechanism: Mechanism) -> NearOptimalUtility:
    """Return the mechanism if its noise may follow from a leakage budget.

    Raises:
        ValueError: If it has no budget, or claims that its calibration saw public data only.
    """
    if not isinstance(mechanism, NearOptimalUtility):
        raise ValueError(
            f"LeakageBudget sets the noise of NearOptimalUtility, got {type(mechanism).__name__}; "
            "use that mechanism, or leave LeakageBudget out"
        )
    if mechanism.public_calibration:
        raise ValueError(
            "LeakageBudget chooses the noise by looking at the clients' data, and public_calibration=True "
            "says that nobody did; set it to false"
        )
    return mechanism


def with_noise(mechanism: NearOptimalUtility, level: NoiseLevel) -> NearOptimalUtility:
    """The same mechanism with another noise."""
    return replace(mechanism, noise_std=level.std, measured_leakage=level.leakage)
