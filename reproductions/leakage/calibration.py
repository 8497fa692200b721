"""Noise of the near-optimal mechanism for a leakage budget, by attacks on the messages that it sends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_fedq.leakage.estimate import LeakageEstimate
from lightning_fedq.leakage.study import Study
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.mechanisms.near_optimal_utility import NearOptimalUtility


@dataclass(frozen=True)
class Calibration:
    """A mechanism for a leakage budget, and the attacks that led to it.

    Args:
        mechanism: Mechanism with the smallest noise that was found good enough.
        probes: Noise std and estimate of every probe, in their order.
    """

    mechanism: NearOptimalUtility
    probes: tuple[tuple[float, LeakageEstimate], ...]


def calibrate(
    study: Study,
    budget: float,
    generator: torch.Generator,
    *,
    attempts: int = 100,
    max_probes: int = 10,
    adversaries: Sequence[Adversary] = (Adversary.EAVESDROPPER,),
    confidence: float = 0.95,
    public: bool = False,
) -> Calibration:
    """Find the smallest noise at which the upper limit of the measured leakage is within the budget.

    Bisection on the logarithm of the std, between 1e-5 and 1e3 clipping norms; the confidence is shared out
    over the probes, so that it holds for the probe that is chosen. It is about this attack, no other.

    Args:
        study: Model, data and attack; updates are clipped at its largest norm.
        budget: tau, in (0, sqrt(ln 2)).
        generator: Random generator of the attempts.
        attempts: Attempts of each probe, >= 1.
        max_probes: >= 2.
        adversaries: The views; the worst of them counts.
        confidence: Confidence of all limits together.
        public: Are the study's data public?

    Raises:
        ValueError: If so few attempts can't show so little leakage, or no noise is enough.
    """
    if max_probes < 2:
        raise ValueError(f"max_probes must be >= 2, got {max_probes}")
    clip_norm, probes = study.largest_norm, []
    each = 1.0 - (1.0 - confidence) / (max_probes * len(adversaries))
    least = LeakageEstimate(0, attempts, len(study.inputs), each).leakage_limits[1]
    if least > budget:
        raise ValueError(
            f"a budget of {budget:g} can't be shown with {attempts} attempts: even without a hit the leakage "
            f"may be {least:.3f}; use more attempts or a larger budget"
        )

    def upper(std: float) -> float:
        trial = NearOptimalUtility(clip_norm, budget, std, 0.0)
        results = [study.run(trial, who, attempts, generator, confidence=each, kept=1) for who in adversaries]
        worst = max((result.estimate for result in results), key=lambda found: found.leakage_limits[1])
        probes.append((std, worst))
        return worst.leakage_limits[1]

    low, high = math.log(1e-5 * clip_norm), math.log(1e3 * clip_norm)
    best = upper(math.exp(high))
    if best > budget:
        raise ValueError(
            f"no noise brings the leakage under {budget:g}: "
            f"at std {math.exp(high):.3g} its upper limit is {best:.3f}"
        )
    for _ in range(max_probes - 1):
        middle = 0.5 * (low + high)
        reached = upper(math.exp(middle))
        if reached <= budget:
            high, best = middle, reached
        else:
            low = middle
    mechanism = NearOptimalUtility(clip_norm, budget, math.exp(high), best, public)
    return Calibration(mechanism, tuple(probes))
