"""The distributed discrete Gaussian: every client adds integer noise, and only the modular sum is meant to be
seen.

Source: Kairouz, Liu, Steinke, The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation, ICML 2021, the rival of the aggregate Gaussian in Hegazy et al. A client clips, rotates by a
randomised Hadamard transform, scales to a grid, rounds conditionally, adds discrete Gaussian noise and sends
integers modulo 2^bits; the server adds them up, recentres and rotates back.

Unlike the exact-error mechanisms it protects against the server too, and each message a little even without
secure aggregation. Its error is larger, though: rounding, the Renyi accounting and wrapped sums.

Departures: the noise's variance is (local_sigma / granularity)^2 in integer steps, as the accounting needs;
the sampler is exact; substitution doubles the sensitivity of the paper's zero-out. The noise is the clients':
each dropout takes its share away, so claims count on `max_dropped` dropouts and no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.functional.noise.discrete_gaussian import (
    LARGEST_SIGMA,
    concentration,
    discrete_gaussian,
    discrete_gaussian_variance,
    renyi_divergence,
    rounded_norm_bound,
)
from lightning_fedq.functional.noise.inversion import Words
from lightning_fedq.mechanisms.bases.modular_noise import BETA, ModularNoise
from lightning_fedq.mechanisms.interface import ConcentratedLoss, Loss


@dataclass(frozen=True)
class DistributedDiscreteGaussian(ModularNoise):
    """Distributed discrete Gaussian: noise at every client, sums modulo 2^bits.

    Args:
        clip_norm: Largest l2 norm of an update, > 0.
        local_sigma: Parameter of one client's noise per coordinate, > 0, in units of clip_norm.
        granularity: Grid of the integers, > 0, in units of clip_norm.
        bits: Symbols are integers modulo 2^bits, 2 to 31; sums beyond half the modulus wrap around.
        max_dropped: Dropouts that the claims allow for; noise of that many clients is not counted.

    Example:
        >>> mechanism = DistributedDiscreteGaussian(clip_norm=1.0, local_sigma=0.5, granularity=0.01)
        >>> mechanism.steps  # clip_norm in steps of the grid
        50.0
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps > LARGEST_SIGMA:
            raise ValueError(
                f"local_sigma must be at most {LARGEST_SIGMA:g} of granularity, got {self.steps:g} of them; "
                "use a coarser grid"
            )

    def _noise(self, count: int, words: Words) -> NDArray[np.int64]:
        return discrete_gaussian(self.steps, count, words)

    def _noise_variance(self) -> float:
        return discrete_gaussian_variance(self.steps)

    def _sum_loss(self, norm: float, one_norm: float, size: int, summands: int, note: str) -> Loss:
        return ConcentratedLoss(concentration(norm, one_norm, size, summands, self.steps), note)


def ddg_for_budget(
    epsilon: float, delta: float, clip_norm: float, num_clients: int, dim: int, bits: int, spread: float = 2.0
) -> DistributedDiscreteGaussian:
    """Choose noise and grid for a zero-out budget over one round, as the paper's experiments do.

    The noise is the least that meets the budget by the three Renyi bounds over orders 2 to 256; the grid is
    the finest for which sums stay within `spread` standard deviations of the modulus' half.

    Args:
        epsilon: Target, in nats, under zero-out (half the sensitivity of substitution).
        delta: Target.
        clip_norm: Largest l2 norm of an update.
        num_clients: n.
        dim: Length of the update.
        bits: log2 of the modulus.
        spread: k in 2^bits g = 2 k sqrt((c n)^2 / d + (g^2 / 4 + s^2) n).

    Raises:
        ValueError: If no grid fits the modulus.
    """
    size, orders = padded_size(dim), [*range(2, 129), 256]

    def spent(grid: float, sigma: float) -> float:
        norm = rounded_norm_bound(1.0 / grid, size, BETA)
        one = min(math.sqrt(size) * norm, norm**2)
        levels = [
            renyi_divergence(a, norm, one, size, num_clients, sigma / grid)
            + math.log1p(-1.0 / a)
            - (math.log(delta) + math.log(a)) / (a - 1)
            for a in orders
        ]
        return float(min(levels))

    def noise(grid: float) -> float:
        return float(
            math.exp(
                optimize.brentq(
                    lambda s: spent(grid, math.exp(s)) - epsilon, math.log(1e-6), math.log(1e4), xtol=1e-10
                )
            )
        )

    def room(log_grid: float) -> float:
        grid = math.exp(log_grid)
        variance = num_clients**2 / size + (grid**2 / 4.0 + noise(grid) ** 2) * num_clients
        return 2.0**bits * grid - 2.0 * spread * math.sqrt(variance)

    low, high = math.log(1e-9), math.log(10.0)
    if room(low) > 0 or room(high) < 0:
        raise ValueError(f"no grid fits a modulus of 2^{bits} for {num_clients} clients; take more bits")
    grid = math.exp(optimize.brentq(room, low, high, xtol=1e-10))
    return DistributedDiscreteGaussian(clip_norm, noise(grid), grid, bits)
