"""Gaussian noise at every client: the whole vector over a whole run, and coordinate by coordinate.

`GaussianNoise` is local differential privacy for a client: its update is clipped in l2 and the budget is
that of all rounds together, met exactly. `PerCoordinateGaussian` is what the
CorBin-FL paper compares with: each coordinate is private on its own, in one round, at the smallest noise
(Balle and Wang 2018). The paper leaves delta open; here it has to be chosen.

Both send integers on a grid (`functional.noise.grid_noise`), not floats: 8 or 9 bits a coordinate where the
noise is not far below the bound.

References:
    Dwork, Roth, The Algorithmic Foundations of Differential Privacy, 2014; Balle, Wang, ICML 2018
"""

from dataclasses import dataclass

from lightning_fedq.functional.noise.grid_noise import analytic_gaussian_multiplier
from lightning_fedq.mechanisms.bases.additive_noise import CoordinateNoise, VectorNoise


@dataclass(frozen=True)
class GaussianNoise(VectorNoise):
    """Gaussian mechanism on l2-clipped updates, sigma = 2 clip_norm noise_multiplier.

    The factor 2 is the sensitivity under substitution: two clipped updates are up to 2 clip_norm apart.

    Args:
        clip_norm: Largest l2 norm of an update, > 0.
        noise_multiplier: Std over sensitivity, > 0; or leave it out and give a budget:
        epsilon: Budget of one client over the whole run, > 0, in nats.
        delta: Delta of the whole run, in (0, 1).
        rounds: Rounds that the budget has to last for, >= 1.

    Raises:
        ValueError: If neither or both of noise and budget are given, or a value is out of range.

    Example:
        >>> mechanism = GaussianNoise(clip_norm=1.0, epsilon=8.0, delta=1e-5, rounds=30)
        >>> round(mechanism.multiplier, 3)  # noise over the distance of any two updates
        3.29
    """

    law = "gaussian"
    clips_norm = True


@dataclass(frozen=True)
class PerCoordinateGaussian(CoordinateNoise):
    """Analytic Gaussian mechanism on each coordinate, (epsilon, delta)-DP in one round.

    Args:
        epsilon: Budget per coordinate and round, > 0, in nats.
        delta: Per coordinate and round, in (0, 1).

    Example:
        >>> round(PerCoordinateGaussian(epsilon=1.0, delta=1e-5).noise.scale, 3)  # std, in radii
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
        return analytic_gaussian_multiplier(self.epsilon, self.delta)
