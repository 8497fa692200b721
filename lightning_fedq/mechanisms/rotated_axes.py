"""RotatedAxes: one signed axis a client and round, exactly epsilon-LDP against the server that sees every
message.

The client rotates its update by signs that it shares with the server (two sign flips, two Walsh-Hadamard
transforms), and names one of the 2 D signed axes: one of the k that lie closest, or by its coin any other
(`functional.axis_choice`). A message is log2(2 D) bits, whatever the model's size adds: 14 bits for 8,000
parameters, 25 for ten million. Its epsilon belongs to the whole message, and its error is within 1% of the
best that any epsilon-LDP message can have up to epsilon 8. Above 10, several messages of a smaller epsilon
would be better.

Only the direction is sent, so the stated bias: the decoder gives every update the length `clip_norm`, and the
decoded sum estimates that of clip_norm x / |x| (0 for 0). The epsilon rests on integers alone: which k axes
are preferred may follow from floats in any way, since k of them are preferred for every update. Two updates
are worst where they prefer disjoint ones, as opposite ones do. Each client has a rotation of its own, because
given one rotation a message is biased, and shared biases would not average out. The server needs one
Walsh-Hadamard pair a message.

References:
    Isik et al., Exact Optimality of Communication-Privacy-Utility Tradeoffs in Distributed Mean Estimation,
    NeurIPS 2023: random rotated codebooks, k-closest. Departures: signed Hadamard axes in place of a random
    simplex, which make the codebook free to store and quick to apply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.axis_choice import AxisChoice, best_axis_choice
from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.functional.rotation import Words, rotate, rotate_back, sign_words
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, Stream
from lightning_fedq.mechanisms.bases.claims import ARBITRARY, FRESH
from lightning_fedq.mechanisms.bases.received import check_received
from lightning_fedq.mechanisms.interface import (
    AuditCase,
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

    Args:
        epsilon: Local budget of one message, > 0 and finite, in nats.
        clip_norm: Length that every decoded update is given, > 0, in units of the update.

    Example:
        >>> RotatedAxes(epsilon=8.0, clip_norm=1.0).choice(8192).num_top
        50
    """

    homomorphic = False
    unbiased = False
    level = "epsilon"

    epsilon: float
    clip_norm: float

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("clip_norm", self.clip_norm)):
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} must be > 0 and finite, got {value}")

    def choice(self, dim: int) -> AxisChoice:
        """Law of a message about `dim` coordinates."""
        return best_axis_choice(padded_size(dim), self.epsilon)

    @staticmethod
    def _words(client: int, context: RoundContext, rand: PublicRandomness) -> Words:
        """Signs of a client's rotation."""
        return rand.shared_with_server(client, "rotation").words(sign_words(padded_size(context.dim)))

    def num_symbols(self, context: RoundContext) -> int:
        """One axis."""
        return 1

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # One symbol: axis j, and D + j for its opposite. The rotation is done in float64. Updates longer than
        # `clip_norm` count as clipped.
        rows = update.detach().reshape(len(rand.clients), context.dim).float().double()
        choice = self.choice(context.dim)
        symbols = torch.empty(len(rows), 1, dtype=torch.int64)
        for row, client in enumerate(rand.clients):
            (values,) = rotate(rows[row : row + 1].numpy(), self._words(client, context, rand))
            # in an order that does not follow the data
            top = np.sort(np.argpartition(-np.abs(values), choice.num_top - 1)[: choice.num_top])
            preferred = np.where(values[top] < 0, top + choice.size, top)
            coins = rand.private(client, "axis")  # one of 2 D axes, by randomised response
            symbols[row, 0] = draw_preferred(preferred, 2 * choice.size, choice.threshold, coins)
        longer = torch.linalg.vector_norm(rows, dim=1) > self.clip_norm
        shape = (1,) if update.dim() == 1 else symbols.shape
        num_bits = self.code(context).num_bits(symbols)
        return Message(symbols.reshape(shape), num_bits, int(longer.sum()) * context.dim)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        choice, sent, count = self.choice(context.dim), symbols.detach(), len(clients)
        check_received(sent, count, 1, 2 * choice.size - 1)
        total = np.zeros(context.dim)
        for client, picked in zip(clients, sent[:, 0].tolist(), strict=True):
            row = np.zeros(choice.size)  # the axis that was sent, in the client's own frame
            row[picked % choice.size] = 1.0 if picked < choice.size else -1.0
            total += rotate_back(row, self._words(client, context, rand), context.dim)
        # over the mean length that the coin leaves: unbiased in direction
        return torch.from_numpy(total * (self.clip_norm / choice.mean_length)).float()

    def code(self, context: RoundContext) -> FixedLength:
        """One axis and its sign, in whole bits."""
        return FixedLength((2 * padded_size(context.dim) - 1).bit_length())

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """(clip_norm / m)^2 / (D n): for a uniformly random rotation, which two transforms come close to."""
        choice = self.choice(context.dim)
        variance = (self.clip_norm / choice.mean_length) ** 2 / (choice.size * len(clients))
        return torch.full((len(context.segments),), variance, dtype=torch.float64)

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        # one message is one draw, so every client is attacked at once
        return (AuditCase(self, everybody=True),)

    def worst_pair(
        self, client: int, context: RoundContext, public: PublicRandomness
    ) -> tuple[Tensor, Tensor]:
        # Opposite updates, which prefer disjoint axes. The rotation turns the first one into a vector whose
        # first coordinates are its largest, so that the same k symbols are preferred in every round.
        size = self.choice(context.dim).size
        falling = np.arange(size, 0.0, -1.0) / size
        first = torch.from_numpy(rotate_back(falling, self._words(client, context, public), context.dim))
        return first, -first

    def lever(self, client: int, context: RoundContext) -> float:
        """Length of one decoded message over that of an honest mean, `clip_norm`."""
        return 1.0 / self.choice(context.dim).mean_length

    def longest_update(self, dim: int) -> float:
        return self.clip_norm

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """One message, one loss, the same in every view: whoever knows the rotation learns no more."""
        choice = self.choice(context.dim)
        top, other = choice.top_probability, choice.rest_probability
        rest = max(1.0 - top - other, 0.0)
        pair = (top, other, rest), (other, top, rest)
        return same_for_all(PmfPairs((pair,), "one of k preferred axes, or any other"), 1, (ARBITRARY, FRESH))

    @property
    def covers_shorter(self) -> bool:
        # the choice of k follows from the length, and among few options the same epsilon composes worse
        return False

    def without_noise(self, context: RoundContext) -> RotatedAxes:
        # the closest one, always
        return replace(self, epsilon=500.0)

    def advice(self, claim: PrivacyClaim) -> str:
        return "fewer messages of a client: rounds in which it does not take part cost it nothing"


def draw_preferred(preferred: NDArray[np.int64], num_options: int, threshold: int, stream: Stream) -> int:
    """One option: a preferred one if a word is below the threshold, else one of the others.

    The coin and both draws below a bound are exact on the stream's words.

    Args:
        preferred: The preferred options, without repetition, in an order that does not follow the data.
        num_options: All options are 0 to `num_options - 1`.
        threshold: Chance of a preferred one times 2^64.
    """
    k = len(preferred)
    if int(stream.words64(1)[0]) < threshold:
        return int(preferred[int(stream.uniform_below(k, 1)[0])])
    drawn = int(stream.uniform_below(num_options - k, 1)[0])
    others = np.ones(num_options, bool)
    others[preferred] = False
    return int(np.flatnonzero(others)[drawn])
