"""Laplace noise at every client: for the whole vector, and per coordinate.

`LaplaceNoise` clips the update in l1. `PerCoordinateLaplace` is the mechanism that the CorBin-FL paper
compares with: b = 2 radius / epsilon for each coordinate, which is clipped before the noise and not after
it.

References:
    Dwork, McSherry, Nissim, Smith, Calibrating Noise to Sensitivity, TCC 2006
"""

from dataclasses import dataclass

from lightning_fedq.mechanisms.bases.additive_noise import CoordinateNoise, VectorNoise


@dataclass(frozen=True)
class LaplaceNoise(VectorNoise):
    """Laplace mechanism on l1-clipped updates, scale 2 clip_norm noise_multiplier.

    Take it for pure differential privacy of sparse or low-dimensional updates, whose l1 norm is small.

    Args:
        clip_norm: Largest norm of an update, to which longer updates are scaled down, an l1 norm, > 0.
        noise_multiplier: Scale of the noise divided by the sensitivity, > 0.

    Raises:
        ValueError: If a value is out of range.

    The claim is about the whole update, against every adversary, by the client's own noise. The noise of
    other clients is not counted.

    A message has about 10 bits per coordinate.

    References:
        Dwork, McSherry, Nissim, Smith, Calibrating Noise to Sensitivity, TCC 2006

    Examples:
        >>> LaplaceNoise(clip_norm=1.0, noise_multiplier=3.0).noise.scale  # mean size, in clip_norm
        6.0
    """

    law = "laplace"


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
