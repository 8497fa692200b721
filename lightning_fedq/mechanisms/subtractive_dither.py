"""Subtractive dithering: uniform errors of a chosen width, integers that add up, a fixed number of bits.

Source: section 2 of Hegazy et al., after Roberts (1962) and Schuchman (1964). Each coordinate is clipped to
the round's range. The error of every client is exactly uniform for any update. No privacy is claimed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.functional.exact_error.dither import centred_dither
from lightning_fedq.functional.linear_decode import decode_total, sum_of_rows
from lightning_fedq.functional.segments import normalise_segments, segment_lines
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, Stream
from lightning_fedq.mechanisms.interface import Mechanism, Message, PrivacyClaim, RoundContext, no_guarantee
from lightning_fedq.wire.coding import FixedLength

_CHUNK = 1 << 14


@dataclass(frozen=True)
class SubtractiveDither(Mechanism):
    """Uniform quantiser with subtractive dither and 2^bits - 1 levels in the range. Not private.

    Take it for compression without privacy, with an error that does not depend on the updates and summable
    messages.

    Args:
        bits: Bits per coordinate, 2 to 16. The step is radius / (2^(bits - 1) - 1).

    Nothing is claimed against any adversary.

    A message has `bits` bits per coordinate.

    References:
        Hegazy et al., Compression with Exact Error Distribution for Federated Learning, AISTATS 2024, section
        2, after Roberts (1962) and Schuchman (1964)

    Examples:
        >>> from lightning_fedq.mechanisms.contract_suite import make_context, encode
        >>> mechanism = SubtractiveDither(bits=4)
        >>> context = make_context(mechanism, clients=(0, 1))
        >>> encode(mechanism, torch.ones(2, 8), context).num_bits  # of two clients
        64
    """

    homomorphic = True

    bits: int = 4

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise ValueError(f"bits must be in [2, 16], got {self.bits}")

    @property
    def _levels(self) -> int:
        """Number of levels on each side of zero."""
        return (1 << (self.bits - 1)) - 1

    @staticmethod
    def _dither(client: int, rand: PublicRandomness) -> Stream:
        return rand.shared_with_server(client, "dither")

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are int32 in [-(2^(bits - 1) - 1), 2^(bits - 1) - 1]
        rows = update.detach().reshape(len(rand.clients), context.dim)
        rows = (rows if rows.dtype == torch.float32 else rows.double()).contiguous()
        lines = segment_lines(context.segments, context.center, 1.0 / context.radius)
        symbols, clipped = torch.empty(rows.shape, dtype=torch.int32), 0
        units = np.empty(min(_CHUNK, context.dim))
        for row, client in enumerate(rand.clients):
            stream, values, out = self._dither(client, rand), rows[row].numpy(), symbols[row].numpy()
            for first in range(0, context.dim, _CHUNK):
                part = out[first : first + _CHUNK]
                clipped += normalise_segments(values, first, lines, False, units[: len(part)])
                exact = units[: len(part)] * self._levels + centred_dither(stream.words64(len(part))) + 0.5
                part[:] = np.clip(np.floor(exact), -self._levels, self._levels)
        return Message(symbols.reshape(update.shape), self.bits * symbols.numel(), clipped)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        total = sum_of_rows(symbols).numpy()
        for client in clients:
            stream = self._dither(client, rand)
            for first in range(0, context.dim, _CHUNK):
                part = total[first : first + _CHUNK]
                part -= centred_dither(stream.words64(len(part)))
        base, slope = len(clients) * context.center, context.radius / self._levels
        return decode_total(torch.from_numpy(total), context.segments, base, slope)

    def code(self, context: RoundContext) -> FixedLength:
        """Return signed integers of `bits` bits."""
        return FixedLength(self.bits, signed=True)

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[int, int]:
        """Return the smallest and the largest level. The code has room for one more."""
        return -self._levels, self._levels

    def influence(self, client: int, context: RoundContext) -> float:
        # the dither moves a level up to half a step beyond the range
        return 1.0 + 0.5 / self._levels

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Return step^2 / 12 over the number of clients."""
        return (context.radius / self._levels) ** 2 / (12.0 * len(clients))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return no guarantee against any adversary."""
        return no_guarantee(
            "a uniform error has bounded support, so inputs far apart are always distinguished", context.dim
        )
