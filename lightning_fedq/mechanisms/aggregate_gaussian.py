"""Aggregate Gaussian: the server needs only the sum of integers, and the mean errs exactly as N(0, sigma^2).

Source: Hegazy et al., section 4.3 (algorithms 1 to 4). A random scale A and shift B, the same for all
clients, turn the Irwin-Hall error of common-step dithering into the target distribution. A client sends M =
floor(x / (A w) + U + 1/2), and the mean decodes to (A w / n)(sum M - sum U) + sigma B.

Departures: a client shares its dithers with the server only, and the members of the federation share (A, B).
The paper has one generator for all parties, with which any party could remove all noise. (A, B) come from
tables with a bounded error (`functional.exact_error.decompose`). A is bounded from below so that sums fit 64
bits: by 2^-50 if possible, and by up to 2^-40 for large cohorts with small noise. Larger cohorts are refused.
`law_error` contains both errors.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_fedq.functional.exact_error.decompose import (
    LEAST_SCALE_BITS,
    Special,
    decomposition,
    draw_special,
)
from lightning_fedq.functional.exact_error.float_error import LawError, aggregate_law_error
from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.mechanisms.bases.exact_error import L1_UNBOUNDED
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate, PrivacyClaim, RoundContext
from lightning_fedq.mechanisms.irwin_hall import CommonSteps

_SUM_BITS = 62
_FEWEST_SCALE_BITS = 40
"""Smallest k of the lower bound 2^-k on A."""


@dataclass(frozen=True)
class AggregateGaussian(CommonSteps):
    """Homomorphic dithered quantiser with an exactly Gaussian mean error (or Laplace, per coordinate).

    Take it for exactly Gaussian noise in the released model at few bits, together with secure aggregation.

    Args:
        clip_norm: Largest norm of an update, to which longer updates are scaled down, an l2 norm, > 0.
        noise_multiplier: Scale of the noise divided by the sensitivity, > 0. The noise is the error of the
            mean, whose sensitivity is 2 clip_norm / cohort size.
        entropy_code: "range" or "elias". Secure aggregation uses neither.
        error_law: Distribution of the error. "laplace" has no claim, because l2 clipping does not bound the
            l1 norm.

    The claim is Gaussian and about the whole update, against outsiders only. The server knows every dither
    and is trusted. Curious clients know A and B and get no guarantee.

    A message has a variable number of bits, often less than one per coordinate with entropy coding.

    References:
        Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024, section
        4.3 (algorithms 1 to 4)

    Examples:
        >>> from lightning_fedq.mechanisms.contract_suite import make_context
        >>> mechanism = AggregateGaussian(clip_norm=1.0, noise_multiplier=2.0)
        >>> round(mechanism.sigma(make_context(mechanism, clients=range(10))), 3)  # of the mean, in clip_norm
        0.4
    """

    symbol_dtype = torch.int64

    error_law: Literal["gaussian", "laplace"] = "gaussian"

    @property
    def gaussian_error(self) -> bool:
        """Whether the error law is Gaussian. The error is then Gaussian up to `law_error`."""
        return self.error_law == "gaussian"

    def least_scale_bits(self, context: RoundContext) -> int:
        """Return the largest k <= 50 of the bound A >= 2^-k for which sums of the integers fit 62 bits.

        Raises:
            ValueError: If not even 2^-40 fits.
        """
        size, step = len(context.cohort), self.base_step(context)
        # |M| <= 2^k / w + 1, and n of them stay within 2^62
        room = math.floor(math.log2((2.0**_SUM_BITS / size - 1.0) * step) - 1e-9)
        if room < _FEWEST_SCALE_BITS:
            raise ValueError(
                f"noise_multiplier = {self.noise_multiplier:.3g} is too small for sums of {size} clients in "
                f"{_SUM_BITS} bits. Raise it."
            )
        return min(room, LEAST_SCALE_BITS)

    def special(self, context: RoundContext, rand: PublicRandomness) -> Special:
        plan = decomposition(len(context.cohort), self.error_law)
        words = rand.members("aggregate mixture").words64
        places, scale, shift = draw_special(plan, context.dim, words, self.least_scale_bits(context))
        return Special(places, scale * self.base_step(context), shift * self.sigma(context))

    def law_error(self, context: RoundContext) -> LawError:
        """Return the distance of the released sum's distribution from the exact one, per coordinate."""
        plan, grid = decomposition(len(context.cohort), self.error_law), self.grid_in_stds(context)
        return aggregate_law_error(plan, grid, self.inputs(context), self.least_scale_bits(context))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        # Gaussian against outsiders only
        core = decomposition(len(context.cohort), self.error_law).core
        members = NonPrivate(
            "a client knows A and B, as all members do, so its noise nearly vanishes on one coordinate in "
            f"{1.0 / (1.0 - core):.3g} and is Irwin-Hall on the others"
        )
        losses = self.summed_claims({Adversary.CLIENT: members}, "secure aggregation reveals only the sum")
        if self.error_law == "laplace":
            losses[Adversary.OUTSIDER] = NonPrivate(L1_UNBOUNDED)
            return tuple(PrivacyClaim(who, losses[who], 1) for who in Adversary)
        return self.gaussian_claims(losses, self.law_error(context), context)
