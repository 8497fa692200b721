"""Laplace noise at every client: the whole vector over a whole run, and coordinate by coordinate.

`LaplaceNoise` clips the update in l1 and is calibrated for all rounds together; with delta = 0 the budget
is pure. `PerCoordinateLaplace` is what the CorBin-FL paper compares with: b = 2 radius / epsilon for each
coordinate, clipped before the noise and never after.

References:
    Dwork, McSherry, Nissim, Smith, Calibrating Noise to Sensitivity, TCC 2006
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_fedq.core import AuditCase, Mechanism, RoundContext
from lightning_fedq.functional.checks import check_positive
from lightning_fedq.mechanisms.bases.additive_noise import AdditiveNoise, PerCoordinate, WholeVector
from lightning_fedq.mechanisms.bases.calibration import resolve_multiplier


@dataclass(frozen=True)
class LaplaceNoise(AdditiveNoise):
    """Laplace mechanism on updates clipped in l1, scale 2 clip_norm noise_multiplier.

    Args:
        clip_norm: Largest l1 norm of an update, > 0.
        noise_multiplier: Scale over sensitivity, > 0; or leave it out and give a budget:
        epsilon: Budget of one client over the whole run, > 0, in nats.
        delta: Delta of the whole run, in [0, 1).
        rounds: Rounds that the budget has to last for, >= 1.

    Raises:
        ValueError: If neither or both of noise and budget are given, or a value is out of range.
    """

    law = "laplace"

    clip_norm: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    rounds: int | None = None

    @property
    def multiplier(self) -> float:
        """See `AdditiveNoise.multiplier`."""
        return resolve_multiplier(self.noise_multiplier, self.epsilon, self.delta, self.rounds, self.law)

    @classmethod
    def plan_settings(cls, params: int) -> dict[str, Mechanism]:
        """Clipped to the l1 norm of an evenly spread update."""
        return {"LaplaceNoise": cls(math.sqrt(2.0 * params / math.pi), 1.0)}

    def at_level(self, level: float, context: RoundContext, max_dropped: int) -> LaplaceNoise:
        """See `Mechanism.at_level`: the inverse of the noise multiplier."""
        return replace(self, noise_multiplier=1.0 / level, epsilon=None, delta=None, rounds=None)

    @property
    def clipping(self) -> WholeVector:
        """See `AdditiveNoise.clipping`."""
        return WholeVector(self.clip_norm, 1)

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        """See `Mechanism.audit_cases`: the claim is about a whole vector."""
        little = LaplaceNoise(self.clip_norm, self.multiplier / dim)
        return AuditCase(little, enumerable=True), AuditCase(self, concentrated=True, title="one coordinate")


@dataclass(frozen=True)
class PerCoordinateLaplace(AdditiveNoise):
    """Laplace mechanism on each coordinate alone, epsilon-DP in one round.

    Args:
        epsilon: Budget per coordinate and round, > 0, in nats.
    """

    law = "laplace"

    epsilon: float

    def __post_init__(self) -> None:
        check_positive(epsilon=self.epsilon)
        super().__post_init__()

    @property
    def multiplier(self) -> float:
        """See `AdditiveNoise.multiplier`."""
        return 1.0 / self.epsilon

    def at_level(self, level: float, context: RoundContext, max_dropped: int) -> PerCoordinateLaplace:
        """See `Mechanism.at_level`: the epsilon of a coordinate."""
        return replace(self, epsilon=level)

    @property
    def clipping(self) -> PerCoordinate:
        """See `AdditiveNoise.clipping`."""
        return PerCoordinate()
