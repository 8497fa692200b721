"""The Skellam mechanism: differences of Poisson variables at every client, and modular sums.

Source: Agarwal, Kairouz, Liu, The Skellam Mechanism for Differentially Private Federated Learning, NeurIPS
2021. Clipping, rotation, rounding and residues are those of the distributed discrete Gaussian
(`bases.modular_noise`). Sums of Skellam variables are Skellam, so claims about a sum hold whatever the number
of clients, where the discrete Gaussian pays for the gap between a sum and its law; in return its divergence
has a term in the l1 norm, which a fine grid makes small.

Departures: the sampler is exact (`functional.noise.skellam`); substitution doubles the sensitivity of the
paper's zero-out; claims are Renyi divergences at integer orders up to 1024, as the theorem states them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.noise.inversion import Words
from lightning_fedq.functional.noise.skellam import LARGEST_VARIANCE, skellam, skellam_divergence
from lightning_fedq.mechanisms.bases.modular_noise import ModularNoise
from lightning_fedq.mechanisms.interface import Loss, RenyiLoss

_ORDERS = (*range(2, 65), *range(68, 129, 4), *range(144, 257, 16), *range(320, 1025, 64))


@dataclass(frozen=True)
class Skellam(ModularNoise):
    """Skellam mechanism: noise at every client, sums modulo 2^bits.

    Args:
        clip_norm: Largest l2 norm of an update, > 0.
        local_sigma: Std of one client's noise per coordinate, > 0, in units of clip_norm.
        granularity: Grid of the integers, > 0, in units of clip_norm.
        bits: Symbols are integers modulo 2^bits, 2 to 31; sums beyond half the modulus wrap around.
        max_dropped: Dropouts that the claims allow for; noise of that many clients is not counted.

    Example:
        >>> mechanism = Skellam(clip_norm=1.0, local_sigma=0.5, granularity=0.01)
        >>> mechanism.steps  # clip_norm in steps of the grid
        50.0
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._noise_variance() > LARGEST_VARIANCE:
            raise ValueError(
                f"local_sigma must be at most 2^16 of granularity, got {self.steps:g} of them; "
                "use a coarser grid"
            )

    def _noise(self, count: int, words: Words) -> NDArray[np.int64]:
        return skellam(self._noise_variance(), count, words)

    def _noise_variance(self) -> float:
        return self.steps**2

    def _sum_loss(self, norm: float, one_norm: float, size: int, summands: int, note: str) -> Loss:
        variance = summands * self._noise_variance()
        bounds = [skellam_divergence(order, norm, one_norm, variance) for order in _ORDERS]
        return RenyiLoss(tuple(map(float, _ORDERS)), tuple(bounds), note)
