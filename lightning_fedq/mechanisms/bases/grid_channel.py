"""Base of channels: a coordinate is rounded to a knot at random, whose law draws one of a few outputs.

Laws are integers over 2^32, so the coin is exact. An input between two knots is a mixture of their laws, so
the knots' laws are the worst inputs: a claim for every two of them holds for any two inputs. Nothing is made
of the other clients: whoever sees a sum sees a function of the messages.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.linear_decode import decode_total
from lightning_fedq.functional.private_levels import draw_outputs, sum_of_outputs
from lightning_fedq.functional.segments import segment_lines, to_units
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.claims import ARBITRARY, FRESH
from lightning_fedq.mechanisms.bases.received import check_received
from lightning_fedq.mechanisms.interface import (
    AuditCase,
    Mechanism,
    Message,
    PmfPairs,
    PrivacyClaim,
    RoundContext,
    Unit,
    same_for_all,
)
from lightning_fedq.wire.coding import FixedLength

WORD = 1 << 32
CHUNK = 1 << 16


@dataclass(frozen=True, eq=False)
class Channel:
    """Laws of the outputs at every knot.

    Args:
        counts: `(knots, outputs)` int64, chances over 2^32, all > 0; rows sum to 2^32.
        values: `(outputs,)` float64, what an output stands for, in radii from the centre.
        low: Place of the range's lower end on a grid of the integers. Knots are both ends and the integers
            between.
        half: Half of the range, in steps of that grid.
    """

    counts: NDArray[np.int64]
    values: NDArray[np.float64]
    low: float
    half: float

    @property
    def laws(self) -> NDArray[np.float64]:
        """Chances, `(knots, outputs)`."""
        return self.counts / float(WORD)

    @cached_property
    def epsilon(self) -> float:
        """Attained level, from the integers."""
        return float(np.log(self.counts.max(0) / self.counts.min(0)).max())

    @cached_property
    def edges(self) -> NDArray[np.uint32]:
        """Chances over 2^32, summed, of the outputs up to each one but the last, which has at least one."""
        # the last sum is 2^32, which a uint32 can't hold
        return np.cumsum(self.counts, axis=1)[:, :-1].astype(np.uint32)

    @cached_property
    def knots(self) -> NDArray[np.float64]:
        """Inputs that have laws of their own, in radii from the centre."""
        inner = np.arange(np.floor(self.low) + 1.0, np.ceil(self.low + 2.0 * self.half))
        return np.concatenate([[-1.0], (inner - self.low) / self.half - 1.0, [1.0]])

    @cached_property
    def worst_variance(self) -> float:
        """Largest variance over all inputs, random rounding included, in squared radii.

        Between knots the second moment is linear, so the variance is a parabola.
        """
        moments, x = self.laws @ self.values**2, self.knots
        slopes = np.diff(moments) / np.diff(x)
        top = np.clip(slopes / 2, x[:-1], x[1:])  # where the slope of the second moment is that of x^2
        return float((moments[:-1] + slopes * (top - x[:-1]) - top**2).max())


def whole_counts(law: NDArray[np.float64]) -> NDArray[np.int64]:
    """Rows of chances as integers over 2^32 that sum to it. The largest takes what rounding leaves."""
    counts = np.round(law * WORD).astype(np.int64)
    counts[np.arange(len(counts)), counts.argmax(1)] += WORD - counts.sum(1)
    return counts


class OutputChannel(Mechanism):
    """Base of mechanisms that send, a coordinate, the number of one of a few outputs with public values."""

    homomorphic = False

    @property
    @abstractmethod
    def values(self) -> NDArray[np.float64]:
        """Values that outputs stand for, in units of the range."""

    def total(self, symbols: Tensor, num_clients: int, dim: int) -> Tensor:
        """Sum of what messages stand for, `(dim,)` float64 in units of the range.

        Raises:
            ValueError: If a message has the wrong length or holds an output that is never sent.
        """
        if tuple(symbols.shape) != (num_clients, dim):
            raise ValueError(f"messages must have shape {(num_clients, dim)}, got {tuple(symbols.shape)}")
        check_received(symbols, num_clients, dim, len(self.values) - 1)
        total = np.zeros(dim)
        sum_of_outputs(symbols.contiguous().numpy(), self.values, total)
        return torch.from_numpy(total)

    def code(self, context: RoundContext) -> FixedLength:
        """As many bits as the outputs take."""
        return FixedLength((len(self.values) - 1).bit_length())

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[int, int]:
        """The outputs. Their code may have room for more."""
        return 0, len(self.values) - 1

    def lever(self, client: int, context: RoundContext) -> float:
        """Largest output over the largest honest mean, one range."""
        return float(np.abs(self.values).max())


class GridChannel(OutputChannel):
    """Base of mechanisms that send one output of a `Channel` a coordinate, in the round's range."""

    _coins: ClassVar[str]

    @property
    @abstractmethod
    def channel(self) -> Channel:
        """The laws."""

    @property
    def values(self) -> NDArray[np.float64]:
        return self.channel.values

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are uint8 output numbers
        rows = update.detach().reshape(len(rand.clients), context.dim).float().contiguous().numpy()
        lines, channel = segment_lines(context.segments, context.center, context.radius), self.channel
        index, units, clipped = np.empty(rows.shape, np.uint8), np.empty(min(CHUNK, context.dim)), 0
        for row, client in enumerate(rand.clients):
            private = rand.private(client, self._coins)
            for first in range(0, context.dim, CHUNK):
                part = index[row, first : first + CHUNK]
                up, words = private.words(len(part)), private.words(len(part))
                clipped += to_units(rows[row], first, lines, True, units[: len(part)])
                draw_outputs(units[: len(part)], up, words, channel.low, channel.half, channel.edges, part)
        symbols = torch.from_numpy(index).reshape(update.shape)
        return Message(symbols, self.code(context).bits_per_symbol * symbols.numel(), clipped)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        total = self.total(symbols, len(clients), context.dim)
        return decode_total(total, context.segments, len(clients) * context.center, context.radius)

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        # one word decides a symbol
        return (AuditCase(self, enumerable=True),)

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Squared radius times the worst variance, over n."""
        return context.radius**2 * (self.channel.worst_variance / len(clients))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Every two knots' laws, per coordinate, against everybody. That others hide a client is not used."""
        rows = [tuple(row) for row in self.channel.laws.tolist()]
        loss = PmfPairs(tuple(combinations(rows, 2)), "one output of the mechanism's matrix")
        return same_for_all(loss, context.dim, (ARBITRARY, FRESH), unit=Unit.COORDINATE)
