"""Base of the one-bit mechanisms: compare a random word with a threshold, send the bit, sum the bits.

The mechanisms differ in the words only: which party draws them, and how the words of two clients are coupled.
Each word alone is exactly uniform. Each bit alone is therefore the same epsilon-LDP randomised bit for any
coupling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.linear_decode import decode_sum
from lightning_fedq.functional.one_bit.threshold_coin import (
    WORD_BITS,
    CoinThresholds,
    coin_thresholds,
    one_bit_quantize_rows,
    splice_rows,
)
from lightning_fedq.functional.segments import segment_lines
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, Stream
from lightning_fedq.mechanisms.interface import Mechanism, Message, RoundContext
from lightning_fedq.wire.coding import FixedLength

COINS = "one-bit coins"
"""Purpose of the private and the shared streams of words."""
_CHUNK = 1 << 14
"""Coordinates of a message that are encoded at once."""
_BLOCK = 1 << 19
"""Words of several clients that are quantised at once.

They take 2 MiB, which stays in the cache, so 64 clients of 8,000 coordinates share one pass through
Python."""


class ComplementaryBits:
    """High bits shared by a pair, complemented for the second member. Low bits are private.

    A coordinate takes the fewest whole bytes of the shared stream that contain its bits.

    Args:
        stream: Stream that the pair shares.
        shared_bits: Number of shared bits per coordinate, 1 to 32.
    """

    def __init__(self, stream: Stream, shared_bits: int) -> None:
        self.stream, self.mask = stream, (1 << WORD_BITS) - (1 << (WORD_BITS - shared_bits))
        num_bytes = 1 if shared_bits <= 8 else 2 if shared_bits <= 16 else 4
        self.type, self.shift = f"u{num_bytes}", WORD_BITS - 8 * num_bytes


def stack_by_group(
    context: RoundContext, clients: Sequence[int]
) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """Return (row of the batch, rank in the group) of the clients in a batch, by group."""
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for row, client in enumerate(clients):
        group, rank = context.place(client)
        groups.setdefault(group, []).append((row, rank))
    return groups


@dataclass(frozen=True)
class OneBitMechanism(Mechanism):
    """Base of the one-bit family, with private words of every client.

    Args:
        epsilon_per_coordinate: Local budget of one bit, i.e. of one coordinate of one client in one round, >
            0, in nats.
    """

    homomorphic = True
    level = "epsilon_per_coordinate"

    epsilon_per_coordinate: float

    def __post_init__(self) -> None:
        coin_thresholds(self.epsilon_per_coordinate)

    @property
    def coin(self) -> CoinThresholds:
        """Thresholds of every randomised bit."""
        return coin_thresholds(self.epsilon_per_coordinate)

    def coupling(self, group: tuple[int, ...], rand: ClientRandomness) -> ComplementaryBits | None:
        """Return the shared words of a pair, or None if its members are unpaired."""
        return None

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        rows = update.detach().reshape(len(rand.clients), context.dim).float()
        bits, clipped = self._bits(rows, context, rand)
        return Message(bits.reshape(update.shape), bits.numel(), clipped)

    def _bits(self, rows: Tensor, context: RoundContext, rand: ClientRandomness) -> tuple[Tensor, int]:
        """Return the bits of a batch `(clients, dim)` uint8, and the number of clipped coordinates."""
        values, coin, clipped = rows.contiguous().numpy(), self.coin, 0
        bits, scratch = np.empty(values.shape, np.uint8), np.empty(_BLOCK, np.uint32)
        ranges = segment_lines(context.segments, context.center, 1.0 / context.radius)
        groups = list(stack_by_group(context, rand.clients).items())
        num_groups = _BLOCK // (2 * min(_CHUNK, context.dim))  # of two clients at most
        for begin in range(0, len(groups), num_groups):
            order, streams, places, couplings = self._streams(groups[begin : begin + num_groups], rand)
            for first in range(0, context.dim, _CHUNK):
                size = min(_CHUNK, context.dim - first)
                words = scratch[: len(order) * size].reshape(-1, size)
                for stream, row in zip(streams, words, strict=True):
                    stream.fill(row)  # private words of each client
                if couplings:  # makes errors of a pair cancel
                    shared = np.empty((len(couplings), size), couplings[0].type)
                    for coupling, row in zip(couplings, shared, strict=True):
                        coupling.stream.fill(row)
                    splice_rows(words, shared, places, couplings[0].shift, couplings[0].mask)
                clipped += one_bit_quantize_rows(
                    values, order, first, words, ranges, coin.low, coin.high, bits
                )
        return torch.from_numpy(bits), clipped

    def _streams(
        self, groups: Sequence[tuple[tuple[int, ...], list[tuple[int, int]]]], rand: ClientRandomness
    ) -> tuple[NDArray[np.int64], list[Stream], NDArray[np.int64], list[ComplementaryBits]]:
        """Return rows of a batch, private streams, pair (-1: none) and rank, and couplings."""
        order, streams, places, couplings = [], [], [], list[ComplementaryBits]()
        for group, members in groups:
            coupling = self.coupling(group, rand)
            number = -1 if coupling is None else len(couplings)
            couplings += [] if coupling is None else [coupling]
            for row, rank in members:
                order.append(row)
                streams.append(rand.private(group[rank], COINS))
                places.append((number, rank))
        return np.array(order), streams, np.array(places), couplings

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        count, scale = len(clients), context.radius.double() * self.coin.scale  # undoes randomised response
        return decode_sum(symbols, context.segments, count * context.center.double(), scale, 2, count)

    def code(self, context: RoundContext) -> FixedLength:
        """Return one bit per coordinate."""
        return FixedLength(1)

    def influence(self, client: int, context: RoundContext) -> float:
        """Return the decoded size of one bit over the radius, the largest honest mean."""
        return self.coin.scale

    def without_noise(self, context: RoundContext) -> OneBitMechanism:
        # without noise the bit is the side of the centre that the value is on
        return replace(self, epsilon_per_coordinate=math.inf)
