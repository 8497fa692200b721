"""RotatedAxes: one signed axis per client and round, exactly epsilon-LDP for a whole message.

The server sees every message. The client rotates its update by signs that it shares with the server (two sign
flips, two Walsh-Hadamard transforms). It sends one of the 2 D signed axes: one of the k closest axes with
some probability, and any other axis otherwise (`functional.axis_choice`). A message has log2(2 D) bits: 14
bits for 8,000 parameters, and 25 for ten million. Its epsilon belongs to the whole message. Its error is
within 1% of the smallest error of any epsilon-LDP message up to epsilon 8. Above 10, several messages of a
smaller epsilon would be better.

The mechanism is biased, because only the direction is sent. The decoder gives every update the length
`clip_norm`, and the decoded sum estimates that of clip_norm x / |x| (0 for 0).

The epsilon rests on integers alone. Floats may choose the k preferred axes in any way, because k axes are
preferred for every update. The worst pair of updates prefers disjoint axes, as opposite updates do. Each
client has a separate rotation, because given one rotation a message is biased, and a shared bias would not
average out. The server needs two Walsh-Hadamard transforms per message.

References:
    Isik et al., Exact Optimality of Communication-Privacy-Utility Tradeoffs in Distributed Mean Estimation,
    NeurIPS 2023: random rotated codebooks, k-closest. Departures: signed Hadamard axes in place of a random
    simplex, so that the codebook needs no storage and is quick to apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.axis_choice import AxisChoice, best_axis_choice
from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.functional.rotation import Words, rotate, rotate_back, sign_words
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, Stream
from lightning_fedq.mechanisms.bases.claims import ARBITRARY, FRESH
from lightning_fedq.mechanisms.bases.received import check_received
from lightning_fedq.mechanisms.interface import (
    Mechanism,
    Message,
    PmfPairs,
    PrivacyClaim,
    RoundContext,
    same_for_all,
)
from lightning_fedq.wire.coding import FixedLength


@dataclass(frozen=True)
class RotatedAxes(Mechanism):
    """One signed axis of a rotated update, with one epsilon per message: 1 + log2(D) bits per client.

    Take it for local privacy of a whole update at a moderate epsilon (about 1 to 10) with tiny messages, if
    there is no secure aggregation.

    Args:
        epsilon_per_message: Local budget of one message, > 0 and finite, in nats.
        clip_norm: Length that the decoder gives every update, > 0, in units of the update.

    The claim is epsilon-LDP for the whole message and round, the same against every adversary.

    A message has 1 + log2(D) bits, with D the dimension padded to a power of two.

    References:
        Isik et al., Exact Optimality of Communication-Privacy-Utility Tradeoffs in Distributed Mean
        Estimation, NeurIPS 2023: random rotated codebooks, k-closest

    Examples:
        >>> RotatedAxes(epsilon_per_message=8.0, clip_norm=1.0).choice(8192).num_top
        50
    """

    homomorphic = False
    unbiased = False
    level = "epsilon_per_message"

    epsilon_per_message: float
    clip_norm: float

    def __post_init__(self) -> None:
        check_positive(epsilon_per_message=self.epsilon_per_message, clip_norm=self.clip_norm)

    def choice(self, dim: int) -> AxisChoice:
        """Return the distribution of a message about `dim` coordinates."""
        return best_axis_choice(padded_size(dim), self.epsilon_per_message)

    @staticmethod
    def _words(client: int, context: RoundContext, rand: PublicRandomness) -> Words:
        """Return the signs of a client's rotation."""
        return rand.shared_with_server(client, "rotation").words(sign_words(padded_size(context.dim)))

    def num_symbols(self, context: RoundContext) -> int:
        """Return 1, for one axis."""
        return 1

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # The symbol is j for axis j, and D + j for its opposite. The rotation is done in float64. Updates
        # longer than `clip_norm` count as clipped.
        rows = update.detach().reshape(len(rand.clients), context.dim).float().double()
        choice = self.choice(context.dim)
        symbols = torch.empty(len(rows), 1, dtype=torch.int64)
        for row, client in enumerate(rand.clients):
            (values,) = rotate(rows[row : row + 1].numpy(), self._words(client, context, rand))
            # sorted, so that their order does not depend on the data
            top = np.sort(np.argpartition(-np.abs(values), choice.num_top - 1)[: choice.num_top])
            preferred = np.where(values[top] < 0, top + choice.size, top)
            coins = rand.private(client, "axis")  # randomised response over the 2 D axes
            symbols[row, 0] = draw_preferred(preferred, 2 * choice.size, choice.threshold, coins)
        longer = torch.linalg.vector_norm(rows, dim=1) > self.clip_norm
        num_bits = self.code(context).num_bits(symbols)
        return Message(symbols.reshape((*update.shape[:-1], 1)), num_bits, int(longer.sum()) * context.dim)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        choice, sent, count = self.choice(context.dim), symbols.detach(), len(clients)
        check_received(sent, count, 1, 2 * choice.size - 1)
        total = np.zeros(context.dim)
        for client, picked in zip(clients, sent[:, 0].tolist(), strict=True):
            row = np.zeros(choice.size)  # the axis that was sent, in the client's rotated coordinates
            row[picked % choice.size] = 1.0 if picked < choice.size else -1.0
            total += rotate_back(row, self._words(client, context, rand), context.dim)
        # dividing by the mean length after randomised response makes the direction unbiased
        return torch.from_numpy(total * (self.clip_norm / choice.mean_length)).float()

    def code(self, context: RoundContext) -> FixedLength:
        """Return a fixed-length code for one axis and its sign."""
        return FixedLength((2 * padded_size(context.dim) - 1).bit_length())

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Return (clip_norm / m)^2 / (D n), exact for a uniform rotation, which transforms approximate."""
        choice = self.choice(context.dim)
        variance = (self.clip_norm / choice.mean_length) ** 2 / (choice.size * len(clients))
        return torch.full((len(context.segments),), variance, dtype=torch.float64)

    def worst_pair(
        self, client: int, context: RoundContext, public: PublicRandomness
    ) -> tuple[Tensor, Tensor]:
        # Opposite updates prefer disjoint axes. The rotation turns the first update into a vector with
        # falling coordinates, so the same k symbols are preferred in every round.
        size = self.choice(context.dim).size
        falling = np.arange(size, 0.0, -1.0) / size
        first = torch.from_numpy(rotate_back(falling, self._words(client, context, public), context.dim))
        return first, -first

    def influence(self, client: int, context: RoundContext) -> float:
        """Return the length of one decoded message over that of an honest mean, `clip_norm`."""
        return 1.0 / self.choice(context.dim).mean_length

    def longest_update(self, dim: int) -> float:
        return self.clip_norm

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return one loss per message, the same for all adversaries. Knowing the rotation reveals no more."""
        choice = self.choice(context.dim)
        top, other = choice.top_probability, choice.rest_probability
        rest = max(1.0 - top - other, 0.0)
        pair = (top, other, rest), (other, top, rest)
        return same_for_all(PmfPairs((pair,), "one of k preferred axes, or any other"), 1, (ARBITRARY, FRESH))

    @property
    def price_grows_with_dim(self) -> bool:
        # k depends on the dimension, and with few options the same epsilon composes worse
        return False

    def without_noise(self, context: RoundContext) -> RotatedAxes:
        # a large epsilon always chooses the closest axis
        return replace(self, epsilon_per_message=500.0)

    def advice(self, claim: PrivacyClaim) -> str:
        return "fewer messages of a client, because rounds without it cost it nothing"


def draw_preferred(preferred: NDArray[np.int64], num_options: int, threshold: int, stream: Stream) -> int:
    """Draw a preferred option if a random word is below the threshold, and one of the others otherwise.

    The randomised bit and the draw of an option are exact on the stream's words.

    Args:
        preferred: Preferred options, without repetition, in an order that does not depend on the data.
        num_options: Number of options, which are 0 to `num_options - 1`.
        threshold: Probability of a preferred option times 2^64.
        stream: Private stream of the client.
    """
    k = len(preferred)
    if int(stream.words64(1)[0]) < threshold:
        return int(preferred[int(stream.uniform_below(k, 1)[0])])
    drawn = int(stream.uniform_below(num_options - k, 1)[0])
    others = np.ones(num_options, bool)
    others[preferred] = False
    return int(np.flatnonzero(others)[drawn])
