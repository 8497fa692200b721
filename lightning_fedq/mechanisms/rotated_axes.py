"""RotatedAxes: one signed axis a client and round, exactly epsilon-LDP against the server that sees every
message.

The client rotates its update by signs that it shares with the server (two sign flips, two Walsh-Hadamard
transforms), and names one of the 2 D signed axes: one of the k that lie closest, or by its coin any other
(`functional.axis_choice`). A message is log2(2 D) bits, whatever the model's size adds: 14 bits for 8,000
parameters, 25 for ten million. Its epsilon belongs to the whole message, and its error is within 1% of the
best that any epsilon-LDP message can have up to epsilon 8. Above 10, several messages of a smaller epsilon
would be better.

Only the direction is sent (`bases.own_rotation`): the decoder gives every update the length `clip_norm`, so
the whole budget goes into where the update points. Each client has a rotation of its own, because given one
rotation a message is biased, and shared biases would not average out. The server needs one Walsh-Hadamard
pair a message.

References:
    Isik et al., Exact Optimality of Communication-Privacy-Utility Tradeoffs in Distributed Mean Estimation,
    NeurIPS 2023: random rotated codebooks, k-closest. Departures: signed Hadamard axes in place of a random
    simplex, which make the codebook free to store and quick to apply.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.axis_choice import AxisChoice, best_axis_choice
from lightning_fedq.functional.hadamard import padded_size
from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.mechanisms.bases.own_rotation import ChosenDirection, rotate_each_back
from lightning_fedq.mechanisms.interface import AuditCase, RoundContext
from lightning_fedq.wire.coding import FixedLength


@dataclass(frozen=True)
class RotatedAxes(ChosenDirection):
    """One signed axis of a rotated update under one epsilon a message: 1 + log2(D) bits a client.

    Args:
        epsilon: Local budget of one message, > 0 and finite, in nats.
        clip_norm: Length that every decoded update is given, > 0, in units of the update.

    Example:
        >>> RotatedAxes(epsilon=8.0, clip_norm=1.0).choice(8192).num_top
        50
    """

    _coins = "axis"
    _options = "axes"

    def choice(self, dim: int) -> AxisChoice:
        """Law of a message about `dim` coordinates."""
        return best_axis_choice(padded_size(dim), self.epsilon)

    def num_options(self, dim: int) -> int:
        """Axis j, and D + j for its opposite."""
        return 2 * padded_size(dim)

    def _preferred(self, rotated: Tensor, dim: int, rand: PublicRandomness) -> NDArray[np.int64]:
        values, k = rotated.numpy(), self.choice(dim).num_top
        top = np.sort([np.argpartition(-np.abs(row), k - 1)[:k] for row in values])
        return np.where(np.take_along_axis(values, top, 1) < 0, top + values.shape[1], top)

    def _directions(self, options: Tensor, dim: int, rand: PublicRandomness) -> Tensor:
        size = padded_size(dim)
        ends = torch.where(options < size, 1.0, -1.0).double()
        return torch.zeros(len(options), size).double().scatter_(1, (options % size)[:, None], ends[:, None])

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
        falling = torch.arange(size, 0, -1, dtype=torch.float64)[None] / size
        first = rotate_each_back(falling, [client], context.dim, public)[0]
        return first, -first

    def lever(self, client: int, context: RoundContext) -> float:
        """Length of one decoded message over that of an honest mean, `clip_norm`."""
        return 1.0 / self.choice(context.dim).mean_length
