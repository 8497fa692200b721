"""signSGD with randomised response: the sign of every coordinate, flipped by an epsilon-LDP coin.

Source: the baseline "signSGD & RR" of Lang et al., CPA, and Bernstein et al., signSGD with majority vote,
2018. Departures: a zero has a random sign (the authors' code counts it as +1, which costs five points,
because their float32 differences hold many exact zeros; `zero_is_positive` brings it back), and the mean
of the signs is scaled by radius / tanh(epsilon / 2) (theirs has neither; "plain_mean" leaves out the second).

It is a one-bit quantiser fed with saturated values, so coins, streams, wire and claims are those of LDP-FL.
The stated bias: the decoded sum estimates the sum of radius sign(x - center), whatever the size of x.
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

    Args:
        epsilon: Local budget per coordinate and round, > 0, in nats.
        aggregation: "mean" of the signs without the coin's shrinkage; "plain_mean" with it; or "majority",
            the sign of the sum (0 for a draw). Each is scaled by the radius.
        zero_is_positive: Count a coordinate that equals the centre as +1 rather than flip a fair coin.

    Example:
        >>> round(SignRR(epsilon=1.0).coin.high / 2**32, 3)  # chance of the true sign
        0.731
    """

    unbiased = False

    aggregation: Aggregation = "mean"
    zero_is_positive: bool = False

    @property
    def joint(self) -> bool:
        """Must `decode` see the whole cohort at once? A majority is one of all clients."""
        return self.aggregation == "majority"

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # Symbols are uint8 bits. Sizes beyond the radius count as clipped.
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
        return decode_sum(votes, *lines, multiple=count)  # a sum is wanted: the majority counts once a client

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """At most radius^2 alpha^2 / n for a mean of bits worth +-alpha, radius^2 for a majority."""
        if self.aggregation == "majority":
            return context.radius**2
        scale = self.coin.scale if self.aggregation == "mean" else 1.0
        return (context.radius * scale) ** 2 / len(clients)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Independent coins, as in LDP-FL. Majority and mean are functions of the same bits."""
        return independent_claims(self.coin, context)
