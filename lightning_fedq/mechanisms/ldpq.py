"""LDP-FL: every client sends one independent epsilon-LDP bit a coordinate.

Source: the baseline of CorBin-FL (algorithm 1, LDPQ). Among unbiased epsilon-LDP maps with two
outputs it has the smallest error for every input; nothing is shared, so every view of one message
is the same coin.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_fedq.mechanisms.bases.claims import independent_claims
from lightning_fedq.mechanisms.bases.one_bit import OneBitMechanism
from lightning_fedq.mechanisms.interface import PrivacyClaim, RoundContext


@dataclass(frozen=True)
class LDPQ(OneBitMechanism):
    """One-bit stochastic quantiser with independent randomised response: epsilon-LDP (LDP-FL).

    Args:
        epsilon: Local budget per coordinate and round, > 0, in nats.

    Example:
        >>> LDPQ(epsilon=1.0).coin.scale  # doctest: +ELLIPSIS
        2.1639534...
    """

    alike_clients = True

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """At most radius^2 alpha^2 / n."""
        return (context.radius * self.coin.scale) ** 2 / len(clients)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Independent coins: see `claims.independent_claims`."""
        return independent_claims(self.coin, context)
