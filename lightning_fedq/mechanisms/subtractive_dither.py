"""Subtractive dithering: uniform errors of a chosen width, integers that add up, a fixed number of bits.

Source: section 2 of Hegazy et al.; the classic of Roberts (1962) and Schuchman (1964). Each coordinate is
clipped to the round's range, and the error of every client is exactly uniform, whatever its update. No
privacy is claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedq.core import Adversary, Mechanism, Message, NonPrivate, PrivacyClaim, RoundContext
from lightning_fedq.functional.exact_error.dither import centred_dither, dither_quantize
from lightning_fedq.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.wire.coding import FixedLength


@dataclass(frozen=True)
class SubtractiveDither(Mechanism):
    """Uniform quantiser with subtractive dither, 2^bits - 1 levels across the range. Not private.

    Args:
        bits: Bits per coordinate, 2 to 16; the step is radius / (2^(bits - 1) - 1).
    """

    homomorphic = True

    bits: int = 4

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise ValueError(f"bits must be in [2, 16], got {self.bits}")

    @property
    def _levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @staticmethod
    def _dither(client: int, context: RoundContext, rand: PublicRandomness) -> Tensor:
        return torch.from_numpy(
            centred_dither(rand.shared_with_server(client, "dither").words64(context.dim))
        )

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        """See `Mechanism.encode`. Symbols are int32 in [-(2^(bits - 1) - 1), 2^(bits - 1) - 1]."""
        rows = update.detach().reshape(len(rand.clients), context.dim).cpu().double()
        center, radius = context.expand(context.center), context.expand(context.radius)
        symbols, clipped = torch.empty(rows.shape, dtype=torch.int32), 0
        for row, client in enumerate(rand.clients):
            scaled = (rows[row] - center) * (1.0 / radius)
            clipped += int((scaled.abs() > 1.0).sum())
            dither = self._dither(client, context, rand)
            quantized = dither_quantize(scaled.clamp(-1.0, 1.0) * self._levels, dither, 1.0)
            symbols[row] = quantized.clamp(-self._levels, self._levels)
        return Message(symbols.reshape(update.shape).to(update.device), self.bits * symbols.numel(), clipped)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        """See `Mechanism.decode`."""
        total = symbols.cpu().reshape(-1, context.dim).sum(0, dtype=torch.int64).double()
        for client in clients:
            total -= self._dither(client, context, rand)
        center, step = context.expand(context.center), context.expand(context.radius / self._levels)
        return (len(clients) * center + total * step).float().to(symbols.device)

    def code(self, context: RoundContext) -> FixedLength:
        """Signed integers."""
        return FixedLength(self.bits, signed=True)

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[int, int]:
        """The levels, as many on both sides. Their code has room for one more."""
        return -self._levels, self._levels

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """step^2 / 12 over the number of clients."""
        return (context.radius / self._levels) ** 2 / (12.0 * len(clients))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """No guarantee against anybody."""
        reason = NonPrivate(
            "a uniform error has bounded support: inputs far enough apart are told apart surely"
        )
        return tuple(PrivacyClaim(adversary, reason, context.dim) for adversary in Adversary)
