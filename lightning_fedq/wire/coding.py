"""Integers to bits on the wire and back: what `num_bits` counts is the length of a stream that decodes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class UndecodableError(ValueError):
    """Bytes that are no message, or symbols that decode to no numbers: their sender is at fault, no code."""


class Code(ABC):
    """A prefix-free code for one client's message: `pack` and `unpack` are inverse."""

    @abstractmethod
    def pack(self, symbols: Tensor) -> bytes:
        """Return the bitstream of one message `(m,)`, padded with zeros to whole bytes.

        Raises:
            ValueError: If a symbol does not fit.
        """

    @abstractmethod
    def unpack(self, stream: bytes, count: int) -> Tensor:
        """Read `count` symbols back.

        Raises:
            UndecodableError: If the stream is not one that `pack` writes of `count` symbols, whatever its
                bytes are. A server misses whoever sent it; any other error ends the server as a bug of this
                code.
        """

    @abstractmethod
    def num_bits(self, symbols: Tensor) -> int:
        """Length in bits, without padding, of the stream of `(m,)` or of all rows of `(clients, m)`."""

    def max_bytes(self, count: int) -> int | None:
        """Bytes that no stream of `count` symbols exceeds: a server reads no more. None: not known."""
        return None

    def check_length(self, stream: bytes, count: int) -> None:
        """Refuse a stream that is too long for any `count` symbols, before anything is read.

        Raises:
            UndecodableError: If it exceeds `max_bytes`.
        """
        longest = self.max_bytes(count)
        if longest is not None and len(stream) > longest:
            raise UndecodableError(f"{count} symbols take {longest} bytes at most, got {len(stream)}")


@dataclass(frozen=True)
class FixedLength(Code):
    """Every symbol takes the same number of bits, most significant first.

    Args:
        bits_per_symbol: 1 to 32; symbols lie in [0, 2^bits_per_symbol).
        signed: Symbols are two's complement in that many bits instead.
    """

    bits_per_symbol: int
    signed: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.bits_per_symbol <= 32:
            raise ValueError(f"bits_per_symbol must be in [1, 32], got {self.bits_per_symbol}")

    def pack(self, symbols: Tensor) -> bytes:
        values = symbols.detach().cpu().numpy().astype(np.int64)
        low = -(1 << self.bits_per_symbol - 1) if self.signed else 0
        high = low + (1 << self.bits_per_symbol)
        if values.size and not (low <= values.min() and values.max() < high):
            raise ValueError(
                f"symbols must lie in [{low}, {high}) for {self.bits_per_symbol} bits, "
                f"got [{values.min()}, {values.max()}]"
            )
        if self.bits_per_symbol == 1 and not self.signed:
            return np.packbits(values.astype(np.uint8)).tobytes()
        # big-endian, so that bits come most significant first
        raw = values.astype(">i8").view(np.uint8).reshape(-1, 8)
        return np.packbits(np.unpackbits(raw, axis=1)[:, 64 - self.bits_per_symbol :]).tobytes()

    def unpack(self, stream: bytes, count: int) -> Tensor:
        width = self.bits_per_symbol
        if len(stream) != (count * width + 7) // 8:
            raise UndecodableError(
                f"{count} symbols of {width} bits need {(count * width + 7) // 8} bytes, got {len(stream)}"
            )
        if (padding := -count * width % 8) and stream[-1] & (1 << padding) - 1:
            raise UndecodableError(f"the {padding} bits behind {count} symbols of {width} bits are not zeros")
        bits = np.unpackbits(np.frombuffer(stream, np.uint8), count=count * width).reshape(count, width)
        if width == 1 and not self.signed:
            return torch.from_numpy(bits.reshape(-1))
        full = np.zeros((count, 64), np.uint8)
        full[:, 64 - width :] = bits
        if self.signed:
            full[:, : 64 - width] = bits[:, :1]  # two's complement: the sign bit goes on to the left
        return torch.from_numpy(np.packbits(full).view(">i8").astype(np.int64))

    def num_bits(self, symbols: Tensor) -> int:
        return symbols.numel() * self.bits_per_symbol

    def max_bytes(self, count: int) -> int:
        return (count * self.bits_per_symbol + 7) // 8


@dataclass(frozen=True)
class FromSmallest(Code):
    """A fixed length from a smallest symbol that both ends know, coordinate by coordinate.

    Args:
        smallest: Smallest symbol of each coordinate, `(m,)` integers.
        bits_per_symbol: 1 to 32; a symbol lies in [smallest, smallest + 2^bits_per_symbol).

    Example:
        >>> code = FromSmallest(np.array([-2, 5]), 2)
        >>> code.pack(torch.tensor([1, 5])).hex(), code.unpack(bytes.fromhex("c0"), 2).tolist()
        ('c0', [1, 5])
    """

    smallest: NDArray[np.int64]
    bits_per_symbol: int

    @property
    def _inner(self) -> FixedLength:
        return FixedLength(self.bits_per_symbol)

    def pack(self, symbols: Tensor) -> bytes:
        return self._inner.pack(symbols.cpu().long() - torch.from_numpy(self.smallest))

    def unpack(self, stream: bytes, count: int) -> Tensor:
        return self._inner.unpack(stream, count).long() + torch.from_numpy(self.smallest)

    def num_bits(self, symbols: Tensor) -> int:
        return self._inner.num_bits(symbols)

    def max_bytes(self, count: int) -> int:
        return self._inner.max_bytes(count)
