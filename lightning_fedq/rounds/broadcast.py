"""Compression of the downlink: the global model, rounded to a few bits per coordinate.

Every segment is rounded to the nearest of 2^bits levels between its smallest and largest value. The server
keeps its own model at full precision and adds the mean update to it, so rounding errors do not add up over
rounds. The server sends the model, not a difference of models, so a client does not need the model of the
round before. Philippenko and Dieuleveut (NeurIPS 2021) also keep the central model, but their clients add up
differences.

Privacy: the rounded model is a function of the server's model, which every adversary is assumed to see.
Rounding is therefore post-processing, and privacy claims stay the same.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.wire.coding import FixedLength


class _Levels(NamedTuple):
    """Rounded model: level numbers, and the smallest value and step of each segment."""

    numbers: Tensor
    """`(dim,)` int64 in [0, 2^bits): level of each coordinate."""
    lines: Tensor
    """`(segments, 2)` float64: smallest value of a segment, and distance between its levels."""


@dataclass(frozen=True)
class Broadcast:
    """Rounding of the model on the downlink, and its encoding as bytes.

    Args:
        bits: Bits per coordinate, 1 to 16.

    Raises:
        ValueError: If `bits` is not in [1, 16].

    Examples:
        >>> Broadcast(2).rounded(torch.tensor([0.0, 0.4, 3.0, 7.0]), (3, 1))
        tensor([0., 0., 3., 7.])
        >>> Broadcast(2).num_bits((3, 1))
        264
    """

    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ValueError(
                f"broadcast_bits must be in [1, 16], or None for unrounded floats, got {self.bits}"
            )

    def num_bits(self, segments: tuple[int, ...]) -> int:
        """Return the size of a rounded model in bits: its levels, and two float64 values per segment."""
        return self.bits * sum(segments) + 128 * len(segments)

    def rounded(self, weights: Tensor, segments: tuple[int, ...]) -> Tensor:
        """Return the model `(dim,)` that clients receive."""
        return self._values(self._levels(weights, segments), segments, weights.dtype).to(weights.device)

    def pack(self, weights: Tensor, segments: tuple[int, ...]) -> bytes:
        """Return the bytes of a model. A model that `rounded` returned is encoded without further error."""
        numbers, lines = self._levels(weights, segments)
        return lines.numpy().astype("<f8").tobytes() + FixedLength(self.bits).pack(numbers)

    def unpack(self, stream: bytes, segments: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Decode the model `(dim,)` from the bytes that `pack` wrote.

        Raises:
            ValueError: If `pack` cannot have written these bytes.
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
                    "The levels of a segment must run from its smallest to its largest value, got others"
                )
        return self._values(_Levels(numbers.long(), torch.from_numpy(lines)), segments, dtype)

    def _levels(self, weights: Tensor, segments: tuple[int, ...]) -> _Levels:
        """Round each segment of a model to its levels."""
        numbers, lines, highest = [], [], 2**self.bits - 1
        for part in weights.detach().cpu().double().split_with_sizes(list(segments)):
            low, high = part.aminmax()
            step = (high - low) / highest
            # step 0: all values of the segment are equal
            places = (part - low) / step if step > 0 else torch.zeros_like(part)
            numbers.append(places.round().clamp(0, highest).long())
            lines.append(torch.stack([low, step]))
        return _Levels(torch.cat(numbers), torch.stack(lines))

    @staticmethod
    def _values(levels: _Levels, segments: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Convert level numbers back to model values `(dim,)`."""
        # CPU and float64, product before sum: the server and every client get bit-identical floats
        parts = levels.numbers.double().split_with_sizes(list(segments))
        pairs = zip(parts, levels.lines, strict=True)
        return torch.cat([numbers * step + low for numbers, (low, step) in pairs]).to(dtype)
