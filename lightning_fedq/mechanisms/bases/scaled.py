"""Base of compressors that send one float32 scale and a small integer per coordinate. Not private."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.interface import Mechanism, Message, PrivacyClaim, RoundContext, no_guarantee
from lightning_fedq.wire.coding import Code, FixedLength, UndecodableError

_IN_CACHE = 1 << 17
_SCALE = FixedLength(32, signed=True)


@dataclass(frozen=True)
class ScaleFirst(Code):
    """Code of a message: a float32 as 32 bits, then every level in the code of the levels."""

    levels: Code

    def pack(self, symbols: Tensor) -> bytes:
        return _SCALE.pack(symbols[:1]) + self.levels.pack(symbols[1:])

    def unpack(self, stream: bytes, count: int) -> Tensor:
        if count < 1 or len(stream) < 4:
            raise UndecodableError(f"a message must begin with a scale of 4 bytes, got {len(stream)} bytes")
        return torch.cat([_SCALE.unpack(stream[:4], 1), self.levels.unpack(stream[4:], count - 1).long()])

    def num_bits(self, symbols: Tensor) -> int:
        scales = symbols[..., 0].numel()
        return 32 * scales + self.levels.num_bits(symbols[..., 1:])

    def max_bytes(self, count: int) -> int | None:
        max_bytes = self.levels.max_bytes(count - 1)
        return None if max_bytes is None else 4 + max_bytes


@dataclass(frozen=True)
class ScaledLevels(Mechanism):
    """Base of compressors, whose subclasses turn updates into levels and a scale, and back."""

    homomorphic = False

    @property
    @abstractmethod
    def largest_level(self) -> int:
        """Largest absolute value of a level."""

    @abstractmethod
    def quantize(
        self, rows: Tensor, context: RoundContext, rand: ClientRandomness, levels: NDArray[np.int32]
    ) -> Tensor:
        """Write the levels of float64 updates `(clients, dim)` into `levels`. Return scales `(clients,)`."""

    @abstractmethod
    def dequantize(
        self, levels: Tensor, scales: Tensor, clients: Sequence[int], dim: int, rand: PublicRandomness
    ) -> Tensor:
        """Return the sum of the clients' vectors, `(dim,)`, added in float64."""

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # nothing is clipped, and the first symbol is the scale's float32 bit pattern
        rows = update.detach().reshape(len(rand.clients), context.dim).float().double()
        symbols = torch.empty(len(rows), self.num_symbols(context), dtype=torch.int32)
        scales = self.quantize(rows, context, rand, symbols[:, 1:].numpy())
        symbols[:, 0] = scales.float().view(torch.int32)
        num_bits = self.code(context).num_bits(symbols)
        return Message(symbols.reshape((*update.shape[:-1], symbols.shape[1])), num_bits)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        expected = (len(clients), self.num_symbols(context))
        if tuple(symbols.shape) != expected or symbols.is_floating_point():
            raise ValueError(f"messages must be integers of shape {expected}, got {tuple(symbols.shape)}")
        received = symbols.detach()
        levels, scales = received[:, 1:], received[:, 0].int().view(torch.float32).double()
        ends = [end for part in split_columns(levels) for end in part.aminmax()] if levels.numel() else []
        if (largest := max((abs(int(end)) for end in ends), default=0)) > self.largest_level:
            raise ValueError(
                f"levels must be within +-{self.largest_level}, got {largest}. "
                "Drop the client that sent something else."
            )
        return self.dequantize(levels, scales, clients, context.dim, rand).float()

    def num_symbols(self, context: RoundContext) -> int:
        """Return the number of symbols: the scale and one level per coordinate."""
        return 1 + context.dim

    def code(self, context: RoundContext) -> ScaleFirst:
        """Return 32 bits for the scale, and levels of a fixed length in two's complement."""
        return ScaleFirst(FixedLength(self.largest_level.bit_length() + 1, signed=True))

    def can_send(self, symbols: Tensor, client: int, context: RoundContext, rand: PublicRandomness) -> bool:
        # a client sends a finite scale >= 0, and levels in their range
        scale = symbols[:1].int().view(torch.float32)
        inside = int(symbols[1:].abs().max()) <= self.largest_level
        return bool(torch.isfinite(scale)) and not bool(torch.signbit(scale)) and inside

    def influence(self, client: int, context: RoundContext) -> float:
        return math.inf

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return no guarantee against any adversary."""
        return no_guarantee(
            "rounding hides nothing: a few bits a coordinate still reveal the update", context.dim
        )


def split_columns(levels: Tensor) -> Sequence[Tensor]:
    """Split `(clients, dim)` into parts `(clients, n)` that fit the cache as float64."""
    return torch.split(levels, max(64, _IN_CACHE // max(len(levels), 1)), 1)


def widest(context: RoundContext) -> Tensor:
    """Return the largest absolute value in the round's range, per segment."""
    return context.center.double().abs() + context.radius.double()


def longest_square(context: RoundContext) -> float:
    """Return the largest squared length of an update in the round's range."""
    return float(context.expand(widest(context)).square().sum())
