"""Codes between integers and bits on the wire. `num_bits` is the length of a stream that decodes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class UndecodableError(ValueError):
    """Error of a received message that no code writes. The sender is at fault, not this library."""


class Code(ABC):
    """Prefix-free code for one client's message, whose `pack` and `unpack` are inverse."""

    @abstractmethod
    def pack(self, symbols: Tensor) -> bytes:
        """Return the bitstream of one message, padded with zeros to whole bytes.

        Args:
            symbols: `(m,)` integers.

        Raises:
            ValueError: If a symbol does not fit.
        """

    @abstractmethod
    def unpack(self, stream: bytes, count: int) -> Tensor:
        """Return the symbols of a stream, `(count,)` integers.

        Args:
            stream: Bytes of one message.
            count: Number of symbols in it.

        Raises:
            UndecodableError: If `pack` does not write this stream for any `count` symbols. This must hold for
                any bytes, because a server then drops the sender. Any other error ends the server as a defect
                of this library.
        """

    @abstractmethod
    def num_bits(self, symbols: Tensor) -> int:
        """Return the stream length in bits, without padding, of `(m,)` or of all rows of `(clients, m)`."""

    def max_bytes(self, count: int) -> int | None:
        """Return the largest number of bytes that `count` symbols can take, or None if unknown.

        A server reads no more bytes than that.
        """
        return None

    def check_length(self, stream: bytes, count: int) -> None:
        """Refuse a stream that is too long for any `count` symbols, before it is read.

        Args:
            stream: Bytes of one message.
            count: Number of symbols in it.

        Raises:
            UndecodableError: If it is longer than `max_bytes`.
        """
        longest = self.max_bytes(count)
        if longest is not None and len(stream) > longest:
            raise UndecodableError(f"{count} symbols take at most {longest} bytes, got {len(stream)}")


@dataclass(frozen=True)
class FixedLength(Code):
    """Code with the same number of bits for every symbol, most significant bit first.

    Args:
        bits_per_symbol: Number of bits, 1 to 32. Symbols must be in [0, 2^bits_per_symbol).
        signed: Whether symbols are two's complement integers with that many bits instead.
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
                f"Symbols must be in [{low}, {high}) for {self.bits_per_symbol} bits, got [{values.min()}, "
                f"{values.max()}]"
            )
        if self.bits_per_symbol == 1 and not self.signed:
            return np.packbits(values.astype(np.uint8)).tobytes()
        # big-endian, so that bits come most significant first
        raw = values.astype(">i8").view(np.uint8).reshape(-1, 8)
        return np.packbits(np.unpackbits(raw, axis=1)[:, 64 - self.bits_per_symbol :]).tobytes()

    def unpack(self, stream: bytes, count: int) -> Tensor:
        width, need = self.bits_per_symbol, self.max_bytes(count)
        if len(stream) != need:
            raise UndecodableError(f"{count} symbols of {width} bits need {need} bytes, got {len(stream)}")
        if (padding := -count * width % 8) and stream[-1] & (1 << padding) - 1:
            raise UndecodableError(f"The {padding} bits after {count} symbols of {width} bits must be zeros")
        bits = np.unpackbits(np.frombuffer(stream, np.uint8), count=count * width).reshape(count, width)
        if width == 1 and not self.signed:
            return torch.from_numpy(bits.reshape(-1))
        full = np.zeros((count, 64), np.uint8)
        full[:, 64 - width :] = bits
        if self.signed:
            full[:, : 64 - width] = bits[:, :1]  # two's complement: repeat the sign bit to the left
        return torch.from_numpy(np.packbits(full).view(">i8").astype(np.int64))

    def num_bits(self, symbols: Tensor) -> int:
        return symbols.numel() * self.bits_per_symbol

    def max_bytes(self, count: int) -> int:
        return (count * self.bits_per_symbol + 7) // 8


@dataclass(frozen=True)
class FromSmallest(Code):
    """Fixed-length code relative to a smallest symbol per coordinate, which both ends know.

    Args:
        smallest: Smallest symbol of each coordinate, `(m,)` integers.
        bits_per_symbol: Number of bits, 1 to 32. Symbols must be in [smallest, smallest + 2^bits_per_symbol).

    Examples:
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
