"""Near-optimal utility: Gaussian distortion calibrated to a leakage budget, which an attack measures.

Zhang, Chen, Yang, "Towards Achieving Near-optimal Utility for Privacy-Preserving Federated Learning via Data
Generation and Parameter Distortion" (2022/23), Algorithms 1 and 3. Departures: the update is clipped and
distorted, not the parameters, so that the paper's C3 and C4 exist. The noise follows from an attack's upper
confidence limit (`leakage.control`, `LeakageBudget`) and not from Lemma 6.8, which leaves every image
recoverable. The sampling probability is `leakage.batch_sampling`.

Leakage is sqrt(JS) of one attacker's average belief about one client's sample. It is not differential
privacy, and the noise was chosen by looking at data, so the claims are `NonPrivate`. The noise itself is the
Gaussian mechanism. If the calibration used public data only, its loss is claimed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_fedq.functional.trade_off import LARGEST_LEAKAGE
from lightning_fedq.mechanisms.bases.additive_noise import ClippedVector
from lightning_fedq.mechanisms.interface import PrivacyClaim, RoundContext, no_guarantee


@dataclass(frozen=True)
class NearOptimalUtility(ClippedVector):
    """Gaussian noise for a measured leakage, on l2-clipped updates. Not differential privacy.

    Take it if a bound on one attack's success is enough. For differential privacy with the same noise take
    GaussianNoise.

    Args:
        clip_norm: Largest norm of an update, to which longer updates are scaled down, an l2 norm, > 0.
        leakage_budget: Largest leakage tau of one client's update of one round, in (0, sqrt(ln 2)).
        noise_std: Std of the distortion in every coordinate, in units of the update, > 0.
        measured_leakage: Upper confidence limit of the leakage at this noise, as the calibration printed it.
        public_calibration: Whether the attack that chose `noise_std` used public data only, and no client's
            data.

    Raises:
        ValueError: If a value is out of its range, or the measured leakage exceeds the budget.

    Nothing is claimed against any adversary, except with `public_calibration`: the claims are then those of
    GaussianNoise.

    A message has about 8 bits per coordinate.

    References:
        Zhang, Chen, Yang, Towards Achieving Near-optimal Utility for Privacy-Preserving Federated Learning
        via Data Generation and Parameter Distortion, 2022/23.

    Examples:
        >>> mechanism = NearOptimalUtility(1.0, leakage_budget=0.3, noise_std=1.0, measured_leakage=0.3)
        >>> mechanism.noise.scale
        1.0
    """

    law = "gaussian"

    leakage_budget: float
    noise_std: float
    measured_leakage: float
    public_calibration: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.leakage_budget < LARGEST_LEAKAGE:
            raise ValueError(
                f"leakage_budget must be in (0, {LARGEST_LEAKAGE:.4f}), the range of sqrt(JS), "
                f"got {self.leakage_budget}"
            )
        if not (self.noise_std > 0 and math.isfinite(self.noise_std)):
            raise ValueError(
                f"noise_std must be > 0 and finite, got {self.noise_std}. Without noise use FedAvg."
            )
        if not 0.0 <= self.measured_leakage <= self.leakage_budget:
            raise ValueError(
                f"measured_leakage must be in [0, leakage_budget = {self.leakage_budget}], "
                f"got {self.measured_leakage}. Find more noise with the callback LeakageBudget."
            )
        super().__post_init__()

    @property
    def multiplier(self) -> float:
        return self.noise_std / (2.0 * self.clip_norm)  # over the sensitivity under substitution

    def with_level(self, level: float, context: RoundContext, max_dropped_clients: int) -> NearOptimalUtility:
        """Refuse a privacy target, because no epsilon follows from a leakage measured on clients' data."""
        raise ValueError(
            "a privacy target can't set NearOptimalUtility, whose noise follows from a measured leakage. "
            "Use GaussianNoise, which has the same noise."
        )

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return no guarantee and the measured leakage, or the Gaussian loss for a public calibration."""
        if self.public_calibration:
            return super().claims(context)
        return no_guarantee(
            f"not differential privacy: noise of std {self.noise_std:g} was chosen on clients' data so that "
            f"a measured leakage sqrt(JS) of {self.measured_leakage:g} is within {self.leakage_budget:g}. "
            "This is one attack's average belief about one sample in one round, for the model, batch and "
            "candidates of the measurement, and a better attack or prior may learn more",
            1,
        )
