"""Base of the one-bit mechanisms: compare a word with a threshold, send the bit, sum the bits.

The mechanisms differ in one thing only, the words: who draws them and how the words of two clients
hang together. Each word alone is exactly uniform, so each bit alone is exactly the same
epsilon-LDP coin, whatever the coupling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

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
    one_bit_quantize_words,
    splice_rows,
    splice_words,
    stratify_words,
)
from lightning_fedq.functional.segments import segment_lines
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, Stream, fill_rows
from lightning_fedq.mechanisms.interface import AuditCase, Mechanism, Message, RoundContext
from lightning_fedq.wire.coding import FixedLength

COINS = "one-bit coins"
"""Purpose of the streams of words, private and shared."""
_CHUNK = 1 << 14
"""Coordinates of a message that are worked on at once."""
_ON_DEVICE = 1 << 22
"""Words that go to a device at once, 16 MiB: while it works on them, the next ones are drawn."""
_BLOCK = 1 << 19
"""Words of several clients that wait for the quantiser: 2 MiB, so that they are still in the cache, and 64
clients of 8,000 coordinates share one pass through Python."""


class Coupling(Protocol):
    """Correlation of a group's words: shared words, drawn once, meet every member's private ones."""

    def draw(self, count: int) -> NDArray[Any]:
        """Return what the group shares for its next `count` coordinates."""

    def apply(self, words: NDArray[np.uint32], shared: NDArray[Any], rank: int) -> None:
        """Turn one member's private words into its coupled ones, in place. Each stays exactly uniform."""


class ComplementaryBits(Coupling):
    """High bits shared by a pair, complemented for the second member. Low bits private.

    A coordinate takes the fewest whole bytes of the shared stream that hold its bits.

    Args:
        shared_bits: 1 to 32.
    """

    def __init__(self, stream: Stream, shared_bits: int) -> None:
        self.stream, self.mask = stream, (1 << WORD_BITS) - (1 << (WORD_BITS - shared_bits))
        num_bytes = 1 if shared_bits <= 8 else 2 if shared_bits <= 16 else 4
        self.type, self.shift = f"u{num_bytes}", WORD_BITS - 8 * num_bytes

    def draw(self, count: int) -> NDArray[Any]:
        shared = np.empty(count, self.type)
        self.stream.fill(shared)
        return shared

    def apply(self, words: NDArray[np.uint32], shared: NDArray[Any], rank: int) -> None:
        splice_words(words, shared, self.shift, self.mask, self.mask if rank else 0)


class RotatedStrata(Coupling):
    """Every member in a stratum of its own: its rank, rotated by an offset that the group shares.

    Args:
        size: Number of members and strata.
    """

    def __init__(self, stream: Stream, size: int) -> None:
        self._stream, self._size = stream, size

    def draw(self, count: int) -> NDArray[np.uint32]:
        return self._stream.uniform_below(self._size, count)

    def apply(self, words: NDArray[np.uint32], shared: NDArray[np.uint32], rank: int) -> None:
        stratify_words(words, shared, rank, self._size)


def _draw_shared(couplings: Sequence[Coupling], count: int) -> Sequence[NDArray[Any]] | NDArray[Any]:
    """Draw what each group shares for `count` coordinates: a list, or rows that are spliced at once."""
    pairs = [one for one in couplings if type(one) is ComplementaryBits]
    if not pairs or len(pairs) < len(couplings) or len({one.mask for one in pairs}) > 1:
        return [one.draw(count) for one in couplings]
    shared = np.empty((len(pairs), count), pairs[0].type)
    fill_rows([one.stream for one in pairs], shared)
    return shared


def _couple(
    words: NDArray[np.uint32],
    places: NDArray[np.int64],
    couplings: Sequence[Any],
    shared: Sequence[NDArray[Any]] | NDArray[Any],
) -> None:
    """Couple rows of private words, in place. `places`: each row's group, -1 if it works alone, and rank."""
    if isinstance(shared, np.ndarray):
        splice_rows(words, shared, places, couplings[0].shift, couplings[0].mask)
        return
    for row, (group, rank) in zip(words, places.tolist(), strict=True):
        if group >= 0:
            couplings[group].apply(row, shared[group], rank)


def stack_by_group(
    context: RoundContext, clients: Sequence[int]
) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """Return, for each group with clients in a stack, their (row of the stack, rank in the group)."""
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for row, client in enumerate(clients):
        group, rank = context.place(client)
        groups.setdefault(group, []).append((row, rank))
    return groups


def _batches(
    groups: dict[tuple[int, ...], list[tuple[int, int]]], num_rows: int
) -> Iterator[list[tuple[tuple[int, ...], list[tuple[int, int]]]]]:
    """Cut the groups of a stack into batches of about `num_rows` rows, whole groups each."""
    batch: list[tuple[tuple[int, ...], list[tuple[int, int]]]] = []
    held = 0
    for group, members in groups.items():
        if batch and held + len(members) > num_rows:
            yield batch
            batch, held = [], 0
        batch.append((group, members))
        held += len(members)
    if batch:
        yield batch


@dataclass(frozen=True)
class OneBitMechanism(Mechanism):
    """Base of the one-bit family. As it stands, every client's words are its own.

    Args:
        epsilon: Local budget of one bit, i.e. of one coordinate of one client in one round, > 0, in nats.
    """

    homomorphic = True

    epsilon: float

    def __post_init__(self) -> None:
        coin_thresholds(self.epsilon)

    @property
    def coin(self) -> CoinThresholds:
        """The coin of every bit."""
        return coin_thresholds(self.epsilon)

    def at_level(self, level: float, context: RoundContext, max_dropped: int) -> OneBitMechanism:
        return replace(self, epsilon=level)

    def coupling(self, group: tuple[int, ...], rand: ClientRandomness) -> Coupling | None:
        """Return how the words of a group hang together, or None where each member works alone."""
        return None

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        rows = update.detach().reshape(len(rand.clients), context.dim).float()
        encode = self._encode_on_cpu if rows.device.type == "cpu" else self._encode_on_device
        bits, clipped = encode(rows, context, rand)
        return Message(bits.reshape(update.shape), bits.numel(), int(clipped))

    def _encode_on_cpu(
        self, rows: Tensor, context: RoundContext, rand: ClientRandomness
    ) -> tuple[Tensor, int]:
        values, coin, clipped = rows.contiguous().numpy(), self.coin, 0
        bits, scratch = np.empty(values.shape, np.uint8), np.empty(_BLOCK, np.uint32)
        ranges = segment_lines(context.segments, context.center, context.radius)
        num_slots = _BLOCK // min(_CHUNK, context.dim)
        for groups in _batches(stack_by_group(context, rand.clients), num_slots):
            order, streams, places, couplings = self._streams(groups, rand)
            for first in range(0, context.dim, _CHUNK):
                size = min(_CHUNK, context.dim - first)
                shared = _draw_shared(couplings, size)
                for begin in range(0, len(order), num_slots):
                    part = slice(begin, begin + num_slots)
                    words = scratch[: len(order[part]) * size].reshape(-1, size)
                    fill_rows(streams[part], words)
                    _couple(words, places[part], couplings, shared)
                    clipped += one_bit_quantize_rows(
                        values, order[part], first, words, ranges, coin.low, coin.high, bits
                    )
        return torch.from_numpy(bits), clipped

    def _streams(
        self, groups: Sequence[tuple[tuple[int, ...], list[tuple[int, int]]]], rand: ClientRandomness
    ) -> tuple[NDArray[np.int64], list[Stream], NDArray[np.int64], list[Coupling]]:
        """Rows of a stack, their private streams, their places (see `_couple`), and the groups' couplings."""
        order, streams, places, couplings = [], [], [], list[Coupling]()
        for group, members in groups:
            coupling = self.coupling(group, rand)
            number = -1 if coupling is None else len(couplings)
            couplings += [] if coupling is None else [coupling]
            for row, rank in members:
                order.append(row)
                streams.append(rand.private(group[rank], COINS))
                places.append((number, rank))
        return np.array(order), streams, np.array(places), couplings

    def _encode_on_device(
        self, rows: Tensor, context: RoundContext, rand: ClientRandomness
    ) -> tuple[Tensor, Tensor]:
        """Encode where the updates are. The words, 4 bytes a coordinate, are all that crosses the bus."""
        device, dim = rows.device, context.dim
        center, radius = (context.expand(t.to(device)) for t in (context.center, context.radius))
        bits = torch.empty(rows.shape, dtype=torch.uint8, device=device)
        clipped, pinned = torch.zeros((), dtype=torch.int64, device=device), device.type == "cuda"
        for groups in _batches(stack_by_group(context, rand.clients), _ON_DEVICE // dim or 1):
            order, streams, places, couplings = self._streams(groups, rand)
            which = order.tolist()
            words = torch.empty(len(which), dim, dtype=torch.int32, pin_memory=pinned)
            block = words.numpy().view(np.uint32)
            fill_rows(streams, block)
            _couple(block, places, couplings, _draw_shared(couplings, dim))
            drawn = words.to(device, non_blocking=pinned)  # else it could be written again before it is read
            bits[which], outside = one_bit_quantize_words(rows[which], drawn, center, radius, self.coin)
            clipped += outside
        return bits, clipped

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        count, scale = len(clients), context.radius.double() * self.coin.scale
        return decode_sum(symbols, context.segments, count * context.center.double(), scale, 2, count)

    def code(self, context: RoundContext) -> FixedLength:
        """One bit a coordinate."""
        return FixedLength(1)

    def lever(self, client: int, context: RoundContext) -> float:
        """The decoded value of one bit over the radius, which is as far as an honest mean can go."""
        return self.coin.scale

    def audit_cases(self, dim: int) -> tuple[AuditCase, ...]:
        # one word decides a symbol
        return AuditCase(self, enumerable=True), *AuditCase(self).without_clients()

    def without_noise(self, context: RoundContext) -> OneBitMechanism:
        # the bit says on which side of the centre the value lies
        return replace(self, epsilon=math.inf)
