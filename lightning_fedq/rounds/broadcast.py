"""The model on its way down, in few bits a coordinate: from the server to the clients of a round.

Every segment is rounded to the nearest of 2^bits levels between its smallest and largest value. The server
keeps its own model in full and adds the mean update to that one, so that rounding errors do not add up over
rounds; nobody needs to have been there in the round before, because the model is sent and no difference
(Philippenko and Dieuleveut, NeurIPS 2021, keep the central model likewise, with a difference that clients
add up).

Privacy: what is sent is a function of the server's model, which adversaries are taken to see anyway
(post-processing). No claim changes, and none gets better.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.wire.coding import FixedLength


class _Levels(NamedTuple):
    numbers: Tensor
    """`(dim,)` int64 in [0, 2^bits)."""
    lines: Tensor
    """`(segments, 2)` float64: smallest value and distance of two levels."""


@dataclass(frozen=True)
class Broadcast:
    """Rounding of a model that is sent down, and its bytes.

    Args:
        bits: Bits of a coordinate, 1 to 16.

    Raises:
        ValueError: If they are out of this range.

    Example:
        >>> Broadcast(2).rounded(torch.tensor([0.0, 0.4, 3.0, 7.0]), (3, 1))
        tensor([0., 0., 3., 7.])
        >>> Broadcast(2).num_bits((3, 1))
        264
    """

    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ValueError(
                f"broadcast_bits must be in [1, 16], or None for floats as they are, got {self.bits}"
            )

    def num_bits(self, segments: tuple[int, ...]) -> int:
        """Bits of one model: its levels, and two float64 a segment."""
        return self.bits * sum(segments) + 128 * len(segments)

    def rounded(self, weights: Tensor, segments: tuple[int, ...]) -> Tensor:
        """The model `(dim,)` that clients get."""
        return self._values(self._levels(weights, segments), segments, weights.dtype).to(weights.device)

    def pack(self, weights: Tensor, segments: tuple[int, ...]) -> bytes:
        """The bytes of a model. One that is `rounded` already goes through unchanged."""
        numbers, lines = self._levels(weights, segments)
        return lines.numpy().astype("<f8").tobytes() + FixedLength(self.bits).pack(numbers)

    def unpack(self, stream: bytes, segments: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The model `(dim,)` in these bytes.

        Raises:
            ValueError: If `pack` writes no such bytes.
        """
        head = 16 * len(segments)
        lines = np.frombuffer(stream[:head].ljust(head, b"\0"), "<f8").astype(np.float64).reshape(-1, 2)
        numbers = FixedLength(self.bits).unpack(stream[head:], sum(segments))
        for part, (low, step) in zip(numbers.split_with_sizes(list(segments)), lines.tolist(), strict=True):
            ends = 0, (2**self.bits - 1 if step > 0 else 0)
            if (
                not (math.isfinite(low) and 0 <= step < math.inf)
                or (int(part.min()), int(part.max())) != ends
            ):
                raise ValueError(
                    "a segment's levels run from its smallest to its largest value, other ones came"
                )
        return self._values(_Levels(numbers.long(), torch.from_numpy(lines)), segments, dtype)

    def _levels(self, weights: Tensor, segments: tuple[int, ...]) -> _Levels:
        numbers, lines, highest = [], [], 2**self.bits - 1
        for part in weights.detach().cpu().double().split_with_sizes(list(segments)):
            low, high = part.aminmax()
            step = (high - low) / highest
            places = (part - low) / step if step > 0 else torch.zeros_like(part)  # 0: all alike
            numbers.append(places.round().clamp(0, highest).long())
            lines.append(torch.stack([low, step]))
        return _Levels(torch.cat(numbers), torch.stack(lines))

    @staticmethod
    def _values(levels: _Levels, segments: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # on the CPU and in float64, product and sum apart: the same floats at the server and at every client
        parts = levels.numbers.double().split_with_sizes(list(segments))
        pairs = zip(parts, levels.lines, strict=True)
        return torch.cat([numbers * step + low for numbers, (low, step) in pairs]).to(dtype)
