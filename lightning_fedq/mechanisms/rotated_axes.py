"""RotatedAxes: one signed axis a client and round, exactly epsilon-LDP against the server that sees every
message.

The client rotates its update by signs that it shares with the server (two sign flips, two Walsh-Hadamard
transforms), and names one of the 2 D signed axes: one of the k that lie closest, or by its coin any other
(`functional.axis_choice`). A message is log2(2 D) bits, whatever the model's size adds: 14 bits for 8,000
parameters, 25 for ten million. Its epsilon belongs to the whole message, and its error is within 1% of the
best that any epsilon-LDP message can have up to epsilon 8. Above 10, several messages of a smaller epsilon
would be better.

Only the direction is sent: the decoder gives every update the length `clip_norm`, so the whole budget goes
into where the update points. The stated bias: the decoded sum estimates the sum of clip_norm x / |x| (0 for x
= 0). Each client has a rotation of its own, because given one rotation a message is biased, and shared biases
would not average out. The server needs one Walsh-Hadamard pair a message.

The epsilon rests on integers alone: which k axes are preferred may follow from floats in any way, since k of
them are preferred for every update.

References:
    Isik et al., Exact Optimality of Communication-Privacy-Utility Tradeoffs in Distributed Mean Estimation,
    NeurIPS
    2023: random rotated codebooks, k-closest. Departures: signed Hadamard axes in place of a random simplex,
    which make the codebook free to store and quick to apply.
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
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, Stream
from lightning_fedq.mechanisms.bases.claims import ARBITRARY, FRESH
from lightning_fedq.mechanisms.bases.own_rotation import draw_preferred, parts, rotate_each, rotate_each_back
from lightning_fedq.mechanisms.interface import (
    Adversary,
    AuditCase,
    Mechanism,
    Message,
    PrivacyClaim,
    RoundContext,
)
from lightning_fedq.privacy.losses import PmfPairs
from lightning_fedq.wire.coding import FixedLength

_AXIS = "axis"


@dataclass(frozen=True)
class RotatedAxes(Mechanism):
    """One signed axis of a rotated update under one epsilon a message: 1 + log2(D) bits a client.

    Args:
        epsilon: Local budget of one message, > 0 and finite, in nats.
        clip_norm: Length that every decoded update is given, > 0, in units of the update.

    Example:
        >>> RotatedAxes(epsilon=8.0, clip_norm=1.0).choice(8192).num_top
        50
    """

    homomorphic = False
    unbiased = False

    epsilon: float
    clip_norm: float

    def __post_init__(self) -> None:
        best_axis_choice(1, self.epsilon)
        if not 0.0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm must be > 0 and finite, got {self.clip_norm}")

    def at_level(self, level: float, context: RoundContext, max_dropped: int) -> RotatedAxes:
        return replace(self, epsilon=level)

    def choice(self, dim: int) -> AxisChoice:
        """Law of a message about `dim` coordinates."""
        return best_axis_choice(padded_size(dim), self.epsilon)

    def num_symbols(self, context: RoundContext) -> int:
        """One axis."""
        return 1

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # One symbol: axis j, or D + j for its opposite. The rotation is done on the CPU in float64, so that
        # devices agree. Updates longer than `clip_norm` count as clipped.
        rows = update.detach().reshape(len(rand.clients), context.dim).float().cpu().double()
        choice = self.choice(context.dim)
        symbols = torch.empty(len(rows), 1, dtype=torch.int64)
        for first, last in parts(len(rows), choice.size):
            clients = rand.clients[first:last]
            rotated = rotate_each(rows[first:last], clients, context.dim, rand)
            for row, (client, values) in enumerate(zip(clients, rotated.numpy(), strict=True), first):
                symbols[row, 0] = _draw(values, choice, rand.private(client, _AXIS))
        longer = torch.linalg.vector_norm(rows, dim=1) > self.clip_norm
        shape = (1,) if update.dim() == 1 else symbols.shape
        num_bits = len(rows) * self.code(context).bits_per_symbol
        return Message(symbols.reshape(shape).to(update.device), num_bits, int(longer.sum()) * context.dim)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        choice, count = self.choice(context.dim), len(clients)
        sent = symbols.detach().cpu()
        wrong = sent.is_floating_point() or tuple(sent.shape) != (count, 1)
        if wrong or (count and not 0 <= int(sent.min()) <= int(sent.max()) < 2 * choice.size):
            raise ValueError(
                f"messages must be one integer in [0, {2 * choice.size}) each, shape {(count, 1)}, got "
                f"{tuple(sent.shape)} with values up to {sent.max().item() if sent.numel() else None}"
            )
        axes, total = sent[:, 0].to(torch.int64), torch.zeros(context.dim, dtype=torch.float64)
        for first, last in parts(count, choice.size):
            picked = axes[first:last]
            columns = torch.zeros(last - first, choice.size, dtype=torch.float64)
            columns.scatter_(
                1,
                (picked % choice.size)[:, None],
                torch.where(picked < choice.size, 1.0, -1.0)[:, None].double(),
            )
            total += rotate_each_back(columns, clients[first:last], context.dim, rand).sum(0)
        return (total * (self.clip_norm / choice.mean_length)).float().to(symbols.device)

    def code(self, context: RoundContext) -> FixedLength:
        """One axis and its sign, in whole bits."""
        return FixedLength((2 * padded_size(context.dim) - 1).bit_length())

    def longest_update(self, dim: int) -> float:
        return self.clip_norm

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """(clip_norm / m)^2 / (D n): for a uniformly random rotation, which two transforms come close to."""
        choice = self.choice(context.dim)
        variance = (self.clip_norm / choice.mean_length) ** 2 / (choice.size * len(clients))
        return torch.full((len(context.segments),), variance, dtype=torch.float64)

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """One message, one loss, the same in every view: whoever knows the rotation learns no more.

        Two updates are worst where they prefer disjoint axes, as opposite ones do.
        """
        choice = self.choice(context.dim)
        top, other = choice.top_probability, choice.other_probability
        rest = max(1.0 - top - other, 0.0)
        pair = ((top, other, rest), (other, top, rest))
        loss = PmfPairs((pair,), "one of k preferred axes, or any other")
        return tuple(PrivacyClaim(who, loss, 1, assumptions=(ARBITRARY, FRESH)) for who in Adversary)

    @property
    def covers_shorter(self) -> bool:
        # among few axes the same epsilon composes worse
        return False

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        # one message is one draw, so every client is attacked at once
        return (AuditCase(self, everybody=True),)

    def worst_pair(
        self, client: int, context: RoundContext, public: PublicRandomness
    ) -> tuple[Tensor, Tensor]:
        # Opposite updates, which prefer disjoint axes. The rotation turns the first one into a vector whose
        # first coordinates are its largest, so that the same k symbols are preferred in every round.
        size = self.choice(context.dim).size
        falling = torch.arange(size, 0, -1, dtype=torch.float64)[None] / size
        first = rotate_each_back(falling, [client], context.dim, public)[0]
        return first, -first

    def lever(self, client: int, context: RoundContext) -> float:
        """Length of one decoded message over that of an honest mean, `clip_norm`."""
        return 1.0 / self.choice(context.dim).mean_length

    def without_noise(self, context: RoundContext) -> RotatedAxes:
        # the closest axis, always
        return replace(self, epsilon=500.0)

    def advice(self, claim: PrivacyClaim) -> str:
        return "fewer messages of a client: rounds in which it does not take part cost it nothing"


def _draw(values: NDArray[np.float64], choice: AxisChoice, stream: Stream) -> int:
    """One signed axis: the coin and both draws below a bound are exact on the stream's words."""
    size, k = choice.size, choice.num_top
    top = np.sort(np.argpartition(-np.abs(values), k - 1)[:k])
    preferred = np.where(values[top] < 0, top + size, top)
    return draw_preferred(preferred, 2 * size, choice.threshold, stream)
