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

from dataclasses import dataclass

from lightning_fedq.functional.noise.discrete_gaussian import LARGEST_SIGMA
from lightning_fedq.mechanisms.bases.modular_noise import ModularNoise


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
