"""signSGD with randomised response: the sign of every coordinate, flipped with an epsilon-LDP probability.

Source: the baseline "signSGD & RR" of Lang et al., CPA, and Bernstein et al., signSGD with majority vote,
2018.

Departures: A zero has a random sign. The authors' code counts it as +1, which costs five points, because
their float32 differences contain many exact zeros. `zero_is_positive` restores it. The mean of the signs is
scaled by radius / tanh(epsilon / 2). The authors use neither factor, and "plain_mean" leaves out the second.

It is a one-bit quantiser with saturated inputs, so streams, messages and claims are those of LDP-FL. The
decoded sum is biased: it estimates the sum of radius sign(x - center), for any size of x.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_fedq.functional.linear_decode import decode_sum
from lightning_fedq.functional.segments import saturate, segment_lines
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.claims import independent_claims
from lightning_fedq.mechanisms.bases.one_bit import OneBitMechanism
from lightning_fedq.mechanisms.bases.received import check_received
from lightning_fedq.mechanisms.interface import Message, PrivacyClaim, RoundContext

Aggregation = Literal["mean", "plain_mean", "majority"]


@dataclass(frozen=True)
class SignRR(OneBitMechanism):
    """signSGD with randomised response: one epsilon-LDP sign per coordinate, mean or majority vote.

    Take it as a baseline, or if the sizes of coordinates are not comparable. LDPQ is unbiased at the same
    bits.

    Args:
        epsilon_per_coordinate: Local budget per coordinate and round, > 0, in nats.
        aggregation: "mean" of the signs, corrected for randomised response, "plain_mean" without the
            correction, or "majority", the sign of the sum (0 for a draw). Each is scaled by the radius.
        zero_is_positive: Whether a coordinate that equals the centre counts as +1 instead of a fair random
            sign.

    The claim is `epsilon_per_coordinate` per coordinate and round against every adversary. Against
    adversaries that see sums only, the other clients' bits also hide the sign.

    A message has one bit per coordinate.

    References:
        Lang et al., CPA, baseline "signSGD & RR".
        Bernstein et al., signSGD with majority vote, 2018

    Examples:
        >>> round(SignRR(epsilon_per_coordinate=1.0).coin.high / 2**32, 3)  # probability of the true sign
        0.731
    """

    unbiased = False

    aggregation: Aggregation = "mean"
    zero_is_positive: bool = False

    @property
    def joint(self) -> bool:
        """Whether `decode` needs the whole cohort at once, as a majority does."""
        return self.aggregation == "majority"

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are uint8 bits, and sizes beyond the radius count as clipped
        rows = update.detach().reshape(len(rand.clients), context.dim).float().contiguous()
        lines = segment_lines(context.segments, context.center, context.radius)
        far = torch.empty_like(rows)
        outside = saturate(rows.numpy(), lines, self.zero_is_positive, far.numpy())
        return replace(super().encode(far.reshape(update.shape), context, rand), num_clipped=outside)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        check_received(symbols, len(clients), context.dim, 1)
        if self.aggregation == "mean":
            return super().decode(symbols, clients, context, rand)
        count = len(clients)
        lines = context.segments, count * context.center.double(), context.radius
        if self.aggregation == "plain_mean":
            return decode_sum(symbols, *lines, multiple=2, shift=count)  # 2 ones - n is the sum of the signs
        ones = symbols.sum(0, dtype=torch.int32) if symbols.dim() == 2 else symbols
        votes = (2 * ones.to(torch.int64) - count).sign()
        return decode_sum(votes, *lines, multiple=count)  # `decode` returns a sum, n times the majority

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Bound the variance by radius^2 alpha^2 / n for a mean of bits +-alpha, radius^2 for a majority."""
        if self.aggregation == "majority":
            return context.radius**2
        scale = self.coin.scale if self.aggregation == "mean" else 1.0
        return (context.radius * scale) ** 2 / len(clients)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return the claims of independent bits, as in LDP-FL. Majority and mean are functions of bits."""
        return independent_claims(self.coin, context)
