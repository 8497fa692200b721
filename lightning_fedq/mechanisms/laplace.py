"""Laplace noise at every client: for the whole vector over a whole run, and per coordinate.

`LaplaceNoise` clips the update in l1 and is calibrated for all rounds together. With delta = 0 the budget is
pure. `PerCoordinateLaplace` is the mechanism that the CorBin-FL paper compares with: b = 2 radius / epsilon
for each coordinate, which is clipped before the noise and not after it.

References:
    Dwork, McSherry, Nissim, Smith, Calibrating Noise to Sensitivity, TCC 2006
"""

import math
from dataclasses import dataclass

from lightning_fedq.mechanisms.bases.additive_noise import CoordinateNoise, VectorNoise
from lightning_fedq.mechanisms.interface import Mechanism


@dataclass(frozen=True)
class LaplaceNoise(VectorNoise):
    """Laplace mechanism on l1-clipped updates, scale 2 clip_norm noise_multiplier.

    Take it for pure differential privacy of sparse or low-dimensional updates, whose l1 norm is small.

    Args:
        clip_norm: Largest l1 norm of an update, > 0.
        noise_multiplier: Scale of the noise over the sensitivity, > 0. Alternatively give a budget by
            epsilon, delta and rounds.
        epsilon: Budget of one client over the whole run, > 0, in nats.
        delta: Delta of the whole run, in [0, 1).
        rounds: Number of rounds that the budget covers, >= 1.

    Raises:
        ValueError: If neither or both of noise and budget are given, or a value is out of range.

    The claim is about the whole update, against every adversary, by the client's own noise. The noise of
    other clients is not counted.

    A message has about 10 bits per coordinate.

    References:
        Dwork, McSherry, Nissim, Smith, Calibrating Noise to Sensitivity, TCC 2006

    Examples:
        >>> mechanism = LaplaceNoise(clip_norm=1.0, epsilon=8.0, delta=1e-5, rounds=30)
        >>> round(mechanism.multiplier, 3)  # noise over the distance of any two updates
        2.92
    """

    law = "laplace"

    @classmethod
    def plan_settings(cls, params: int) -> dict[str, Mechanism]:
        """Return a setting that clips to the l1 norm of an evenly spread update."""
        return {"LaplaceNoise": cls(math.sqrt(2.0 * params / math.pi), 1.0)}


@dataclass(frozen=True)
class PerCoordinateLaplace(CoordinateNoise):
    """Laplace mechanism on each coordinate, epsilon-DP in one round.

    Take it to compare with one-bit mechanisms, whose claims are also per coordinate.

    Args:
        epsilon_per_coordinate: Budget per coordinate and round, > 0, in nats.

    The claim is pure epsilon per coordinate and round, against every adversary.

    A message has about 10 bits per coordinate.

    References:
        Dwork, McSherry, Nissim, Smith, Calibrating Noise to Sensitivity, TCC 2006

    Examples:
        >>> PerCoordinateLaplace(epsilon_per_coordinate=1.0).noise.scale  # in radii
        2.0
    """

    law = "laplace"

    @property
    def multiplier(self) -> float:
        return 1.0 / self.epsilon_per_coordinate  # over the sensitivity, 2 radii
