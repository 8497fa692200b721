"""The aggregate Gaussian: only the sum of the integers is needed, and the mean errs exactly as N(0, sigma^2).

Source: Hegazy et al., section 4.3 (algorithms 1 to 4). A random scale A and shift B, the same for all
clients, turn the Irwin-Hall error of common-step dithering into the target law: M = floor(x / (A w) + U +
1/2), and the mean decodes to (A w / n)(sum M - sum U) + sigma B.

Departures: dithers are shared by one client with the server, and (A, B) by the members of the federation,
where the paper has one generator for everybody (with which anybody could undo all noise). (A, B) come from
tables with a bounded error (`functional.exact_error.decompose`), and A is capped from below so that sums fit
64 bits: at 2^-50 where that is enough, at up to 2^-40 where the cohort is large and the noise small; beyond
that the cohort is refused. What both do to the law is in `law_error`.
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
from lightning_fedq.mechanisms.bases.exact_error import L1_UNBOUNDED, refuse_laplace_budget
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate, PrivacyClaim, RoundContext
from lightning_fedq.mechanisms.irwin_hall import CommonSteps

_SUM_BITS = 62
_FEWEST_SCALE_BITS = 40
"""The cap on A is never above 2^-40."""


@dataclass(frozen=True)
class AggregateGaussian(CommonSteps):
    """Homomorphic dithered quantiser with an exactly Gaussian mean error (or Laplace, per coordinate).

    Args:
        clip_norm: Largest l2 norm of an update, > 0.
        noise_multiplier: Std of the error of the mean over its sensitivity, 2 clip_norm / cohort size; or
            leave it out and give a budget:
        epsilon: Budget of one client over the whole run, towards outsiders, > 0, in nats.
        delta: Delta of the whole run, in (0, 1).
        rounds: Rounds that the budget has to last for, >= 1.
        entropy_code: "range" or "elias"; behind secure aggregation neither applies.
        target: Law of the error; "laplace" carries no claim, because l2 clipping does not bound the l1 norm.

    Example:
        >>> mechanism = AggregateGaussian(clip_norm=1.0, epsilon=8.0, delta=1e-5, rounds=30)
        >>> round(mechanism.multiplier, 3)  # noise over the distance of any two updates
        3.315
    """

    symbol_dtype = torch.int64

    target: Literal["gaussian", "laplace"] = "gaussian"

    def __post_init__(self) -> None:
        refuse_laplace_budget(self.target, self.noise_multiplier)
        super().__post_init__()

    @property
    def gaussian_error(self) -> bool:
        """With the Gaussian target, up to the stated error of the law."""
        return self.target == "gaussian"

    def least_scale_bits(self, context: RoundContext) -> int:
        """k of the cap A >= 2^-k: the largest one up to 50 for which the sum of the integers fits 62 bits.

        Raises:
            ValueError: If not even 2^-40 fits.
        """
        size, step = len(context.cohort), self.base_step(context)
        # |M| <= 2^k / w + 1, and n of them stay within 2^62
        room = math.floor(math.log2((2.0**_SUM_BITS / size - 1.0) * step) - 1e-9)
        if room < _FEWEST_SCALE_BITS:
            raise ValueError(
                f"noise_multiplier = {self.multiplier:.3g} is too small for a cohort of {size}: sums would "
                f"not fit {_SUM_BITS} bits; raise it"
            )
        return min(room, LEAST_SCALE_BITS)

    def special(self, context: RoundContext, rand: PublicRandomness) -> Special:
        plan, words = (
            decomposition(len(context.cohort), self.target),
            rand.members("aggregate mixture").words64,
        )
        places, scale, shift = draw_special(plan, context.dim, words, self.least_scale_bits(context))
        return Special(places, scale * self.base_step(context), shift * self.sigma(context))

    def law_error(self, context: RoundContext) -> LawError:
        """Distance of the released sum's law from the exact one, a coordinate."""
        size = len(context.cohort)
        std = self.sigma(context) * size
        return aggregate_law_error(
            decomposition(size, self.target),
            self.grid(context) / (self.clip_norm * std),
            self.inputs(context),
            self.least_scale_bits(context),
        )

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        # Gaussian towards outsiders only
        core = decomposition(len(context.cohort), self.target).core
        members = NonPrivate(
            "a client knows A and B, as all members do: on a coordinate in "
            f"{1.0 / (1.0 - core):.3g} the noise nearly vanishes for it, on the others it is Irwin-Hall"
        )
        losses = self.summed_claims({Adversary.CLIENT: members}, "secure aggregation leaves the sum")
        if self.target == "laplace":
            losses[Adversary.OUTSIDER] = NonPrivate(L1_UNBOUNDED)
            return tuple(PrivacyClaim(who, losses[who], 1) for who in Adversary)
        return self.gaussian_claims(losses, self.law_error(context), context)
