"""Gaussian noise at every client: for the whole vector, and per coordinate.

`GaussianNoise` gives a client local differential privacy. Its update is clipped in l2.
`PerCoordinateGaussian` is the mechanism that the CorBin-FL paper compares with: each coordinate is private in
one round, with the smallest noise (Balle and Wang 2018). The paper leaves delta open, and here it has to be
chosen.

Both send integers on a grid (`functional.noise.grid_noise`), not floats. They take 8 or 9 bits a coordinate,
unless the noise is far below the bound.

References:
    Dwork, Roth, The Algorithmic Foundations of Differential Privacy, 2014.
    Balle, Wang, ICML 2018.
"""

from dataclasses import dataclass

from lightning_fedq.functional.noise.grid_noise import analytic_gaussian_multiplier
from lightning_fedq.mechanisms.bases.additive_noise import CoordinateNoise, VectorNoise


@dataclass(frozen=True)
class GaussianNoise(VectorNoise):
    """Gaussian mechanism on l2-clipped updates, sigma = 2 clip_norm noise_multiplier.

    Take it for local differential privacy of whole updates, with or without secure aggregation. The factor 2
    is the sensitivity under replace-one adjacency: two clipped updates are up to 2 clip_norm apart.

    Args:
        clip_norm: Largest norm of an update, to which longer updates are scaled down, an l2 norm, > 0.
        noise_multiplier: Scale of the noise divided by the sensitivity, > 0. The scale is the standard
            deviation.

    Raises:
        ValueError: If a value is out of range.

    The claim is about the whole update, against every adversary, by the client's own noise. Against
    outsiders, curious clients and the server behind secure aggregation, the noise of the other clients is
    also counted.

    A message has 8 or 9 bits per coordinate, and more if the noise is far below the bound.

    References:
        Dwork, Roth, The Algorithmic Foundations of Differential Privacy, 2014.
        Balle, Wang, ICML 2018.

    Examples:
        >>> GaussianNoise(clip_norm=1.0, noise_multiplier=3.0).noise.scale  # std, in clip_norm
        6.0
    """

    law = "gaussian"
    clips_norm = True


@dataclass(frozen=True)
class PerCoordinateGaussian(CoordinateNoise):
    """Analytic Gaussian mechanism on each coordinate, (epsilon, delta)-DP in one round.

    Take it to compare with one-bit mechanisms, whose claims are also per coordinate.

    Args:
        epsilon_per_coordinate: Budget per coordinate and round, > 0, in nats.
        delta: Delta per coordinate and round, in (0, 1).

    The claim is per coordinate and round, against every adversary. Against adversaries that see sums only,
    the noise of the other clients is also counted.

    A message has 8 or 9 bits per coordinate, and more if the noise is far below the bound.

    References:
        Dwork, Roth, The Algorithmic Foundations of Differential Privacy, 2014.
        Balle, Wang, ICML 2018.

    Examples:
        >>> noise = PerCoordinateGaussian(epsilon_per_coordinate=1.0, delta=1e-5).noise
        >>> round(noise.scale, 3)  # std, in radii
        7.461
    """

    law = "gaussian"

    delta: float

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {self.delta}")
        super().__post_init__()

    @property
    def multiplier(self) -> float:
        return analytic_gaussian_multiplier(self.epsilon_per_coordinate, self.delta)
