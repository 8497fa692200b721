"""LDP-FL: every client sends one independent epsilon-LDP bit a coordinate.

Source: the baseline of CorBin-FL (algorithm 1, LDPQ). Among unbiased epsilon-LDP maps with two outputs it has
the smallest error for every input. Clients share no randomness, so one message looks the same to every
adversary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_fedq.mechanisms.bases.claims import independent_claims
from lightning_fedq.mechanisms.bases.one_bit import OneBitMechanism
from lightning_fedq.mechanisms.interface import PrivacyClaim, RoundContext


@dataclass(frozen=True)
class LDPQ(OneBitMechanism):
    """Stochastic one-bit quantiser with randomised response, independent bits: epsilon-LDP (LDP-FL).

    Take it for local privacy with one bit per coordinate. It needs no pairs, keeps working with dropouts, and
    its messages can be summed behind secure aggregation.

    Args:
        epsilon_per_coordinate: Local budget per coordinate and round, > 0, in nats.

    The claim is `epsilon_per_coordinate` per coordinate and round against every adversary. Against
    adversaries that see sums only, the other clients' bits also hide the bit.

    A message has one bit per coordinate.

    References:
        Salehi, Mia, Pradhan, Amini, Shirani, CorBin-FL, algorithm 1 (LDPQ)

    Examples:
        >>> LDPQ(epsilon_per_coordinate=1.0).coin.scale  # doctest: +ELLIPSIS
        2.1639534...
    """

    has_exchangeable_clients = True

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Bound the variance by radius^2 alpha^2 / n, with alpha the decoded size of a bit."""
        return (context.radius * self.coin.scale) ** 2 / len(clients)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return the claims of independent bits, see `claims.independent_claims`."""
        return independent_claims(self.coin, context)
