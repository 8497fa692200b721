"""What every one-bit mechanism shares: compare a word with a threshold, send the bit, sum the bits.

The mechanisms differ in one thing only, the words: who draws them and how the words of two clients
hang together. Each word alone is exactly uniform, so each bit alone is exactly the same
epsilon-LDP coin, whatever the coupling.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.coding import FixedLength
from lightning_fedq.core import Mechanism, Message, RoundContext
from lightning_fedq.functional.one_bit import (
    CoinThresholds,
    coin_thresholds,
    one_bit_dequantize_sum,
    one_bit_quantize,
    one_bit_quantize_row,
)
from lightning_fedq.randomness import ClientRandomness, PublicRandomness

Words = Callable[[int], NDArray[np.uint32]]
"""Draws the next `count` words of one client's coins."""

_CHUNK = 1 << 14


@dataclass(frozen=True)
class OneBitMechanism(Mechanism):
    """Base of the one-bit family.

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

    @abstractmethod
    def words(self, client: int, context: RoundContext, rand: ClientRandomness) -> Words:
        """Return the source of one client's words, each exactly uniform on 32 bits."""

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        """See `Mechanism.encode`; symbols are uint8 bits."""
        rows = update.reshape(len(rand.clients), context.dim)
        encode = self._encode_on_cpu if rows.device.type == "cpu" else self._encode_on_device
        bits, clipped = encode(rows, context, rand)
        return Message(bits.reshape(update.shape), bits.numel(), clipped)

    def _encode_on_cpu(
        self, rows: Tensor, context: RoundContext, rand: ClientRandomness
    ) -> tuple[Tensor, int]:
        values = rows.detach().float().contiguous().numpy()
        bits, coin, clipped = np.empty(values.shape, np.uint8), self.coin, 0
        centers, radii = context.center.tolist(), context.radius.tolist()
        for row, client in enumerate(rand.clients):
            words, start = self.words(client, context, rand), 0
            for size, center, radius in zip(context.segments, centers, radii, strict=True):
                for first in range(start, start + size, _CHUNK):
                    part = slice(first, min(first + _CHUNK, start + size))
                    clipped += one_bit_quantize_row(
                        values[row, part], words(part.stop - first), center, radius, coin.low, coin.high, bits[row, part]
                    )
                start += size
        return torch.from_numpy(bits), clipped

    def _encode_on_device(
        self, rows: Tensor, context: RoundContext, rand: ClientRandomness
    ) -> tuple[Tensor, int]:
        words = np.stack([self.words(client, context, rand)(context.dim) for client in rand.clients])
        center, radius = (context.expand(t.to(rows.device)) for t in (context.center, context.radius))
        drawn = torch.from_numpy(words.astype(np.int64)).to(rows.device)
        clipped = ((rows.double() - center) * (1.0 / radius)).abs() > 1.0
        return one_bit_quantize(rows, drawn, center, radius, self.coin), int(clipped.sum())

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        """See `Mechanism.decode`."""
        ones = symbols.sum(0, dtype=torch.int32) if symbols.dim() == 2 else symbols
        center, radius = (context.expand(t.to(symbols.device)) for t in (context.center, context.radius))
        return one_bit_dequantize_sum(ones, len(clients), center, radius, self.coin)

    def code(self, context: RoundContext) -> FixedLength:
        """One bit a coordinate."""
        return FixedLength(1)
