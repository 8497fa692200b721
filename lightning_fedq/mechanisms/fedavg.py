"""FedAvg: every coordinate as a 32-bit float, the baseline without quantisation and without privacy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedq.functional.accumulate import add_rows
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.interface import Mechanism, Message, PrivacyClaim, RoundContext, no_guarantee
from lightning_fedq.wire.coding import FixedLength


@dataclass(frozen=True)
class FedAvg(Mechanism):
    """Federated averaging of float32 updates: the baseline, without clipping or privacy.

    Take it as the baseline without compression and without privacy.

    Nothing is claimed against any adversary.

    A message has 32 bits per coordinate.

    References:
        McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

    Examples:
        >>> from lightning_fedq.mechanisms.contract_suite import make_context, encode
        >>> mechanism = FedAvg()
        >>> context = make_context(mechanism, clients=(0, 1))
        >>> encode(mechanism, torch.ones(2, 8), context).num_bits  # of two clients
        512
    """

    homomorphic = False

    @property
    def order_free(self) -> bool:
        """True: float64 sums round to the same float32 in any order, but for one in 2^29 per message."""
        return True

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are int32 bit patterns
        symbols = update.detach().float().contiguous().view(torch.int32)
        return Message(symbols, 32 * symbols.numel())

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        patterns = symbols.to(torch.int32).reshape(len(clients), context.dim)  # received symbols are int64
        total = torch.zeros(context.dim, dtype=torch.float64)
        add_rows(patterns.view(torch.float32), total)
        return total

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Return zero, because there is no noise."""
        return torch.zeros_like(context.radius)

    @property
    def gaussian_error(self) -> bool:
        """True, because there is no error."""
        return True

    def influence(self, client: int, context: RoundContext) -> float:
        return math.inf

    def code(self, context: RoundContext) -> FixedLength:
        """Return 32 bits per coordinate."""
        return FixedLength(32, signed=True)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return no guarantee against any adversary."""
        return no_guarantee("updates are sent as they are", context.dim)
