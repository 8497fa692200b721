"""Codes with a variable number of bits per symbol: Elias codes, and codes of selected coordinates.

References:
    Elias, Universal codeword sets and representations of the integers, 1975.
"""

from dataclasses import dataclass

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.wire.coding import Code, UndecodableError

_LARGEST = 2**62 - 1
_LONGEST_GAMMA, _LONGEST_DELTA = 2 * 63 - 1, 11 + 62
"""Bits of the code of 2^63 - 1, the largest value that `map_to_positive` returns."""


def map_to_positive(symbols: NDArray[np.integer]) -> NDArray[np.int64]:
    """Map signed symbols 0, 1, -1, 2, -2, ... to 1, 2, 3, 4, 5, ..., if they have at most 62 bits.

    Args:
        symbols: Integers of any shape.

    Examples:
        >>> map_to_positive(np.array([0, -1, 1, -2]))
        array([1, 3, 2, 5])
    """
    values = symbols.astype(np.int64)
    mapped: NDArray[np.int64] = np.where(values > 0, 2 * values, 1 - 2 * values)
    return mapped


def from_positive(mapped: NDArray[np.int64]) -> NDArray[np.int64]:
    """Invert `map_to_positive`.

    Examples:
        >>> from_positive(np.array([1, 3, 2, 5]))
        array([ 0, -1,  1, -2])
    """
    symbols: NDArray[np.int64] = np.where(mapped % 2 == 0, mapped // 2, (1 - mapped) // 2)
    return symbols


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _bit_length(value: int) -> int:
    """Return the number of bits of a non-negative integer, 0 for 0."""
    length = 0
    while value:
        value >>= 1
        length += 1
    return length


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _elias_length(symbols: NDArray[np.integer], delta: bool) -> int:
    """Return the number of bits of the codes of all symbols."""
    total = 0
    for symbol in symbols:
        length = _bit_length(abs(np.int64(symbol))) + 1
        total += length - 1 + (2 * _bit_length(length) - 1 if delta else length)
    return total


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _put(bits: NDArray[np.uint8], place: int, value: int, width: int) -> int:
    """Write the low `width` bits of a value at a place of `bits`, and return the next place."""
    for b in range(width - 1, -1, -1):
        bits[place] = (value >> b) & 1
        place += 1
    return place


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _elias_write(mapped: NDArray[np.int64], delta: bool, bits: NDArray[np.uint8]) -> int:
    """Write the codes of positive values, one bit an element of `bits`, and return their number of bits."""
    place = 0
    for value in mapped:
        length = _bit_length(value)
        if delta:
            size = _bit_length(length)
            place = _put(bits, place + size - 1, length, size)  # delta codes the length in gamma code
            # then the value without its leading one, which the length implies
            place = _put(bits, place, value & ~(1 << (length - 1)), length - 1)
        else:
            # gamma has length - 1 zeros before the leading one
            place = _put(bits, place + length - 1, value, length)
    return place


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _elias_read(bits: NDArray[np.uint8], delta: bool, mapped: NDArray[np.int64]) -> int:
    """Read positive values from bits, and return the number of bits read, or -1 for an invalid stream.

    Args:
        bits: One bit an element.
        delta: Whether the delta code is used instead of gamma.
        mapped: `(count,)` array that receives the values.
    """
    place = 0
    for i in range(mapped.size):
        zeros = 0
        while place < bits.size and bits[place] == 0:
            zeros += 1
            place += 1
        if zeros > 62 or place + zeros + 1 > bits.size:  # at most 63 bits, so that int64 holds the value
            return -1
        value = 0
        for _ in range(zeros + 1):
            value = 2 * value + bits[place]
            place += 1
        if delta:
            # same bound, because this value is the length of the next
            if value > 63 or place + value - 1 > bits.size:
                return -1
            length, value = value, 1
            for _ in range(length - 1):
                value = 2 * value + bits[place]
                place += 1
        mapped[i] = value
    return place


def as_array(symbols: Tensor) -> NDArray[np.integer]:
    """Return the symbols as a NumPy array, without a copy if they are on the CPU."""
    array: NDArray[np.integer] = symbols.detach().cpu().numpy()
    return array


@dataclass(frozen=True)
class Elias(Code):
    """Elias gamma or delta code of signed integers, which needs no model and no bound.

    Gamma takes 1 bit for 0, 3 bits for +-1, and 5 bits for +-2 and +3. Delta is shorter from |m| = 16 on.

    Args:
        delta: Whether to use the delta code instead of gamma.
    """

    delta: bool = False

    def pack(self, symbols: Tensor) -> bytes:
        bits = np.zeros(self.num_bits(symbols), np.uint8)
        _elias_write(map_to_positive(as_array(symbols)), self.delta, bits)
        return np.packbits(bits).tobytes()

    def unpack(self, stream: bytes, count: int) -> Tensor:
        self.check_length(stream, count)
        bits, mapped = np.unpackbits(np.frombuffer(stream, np.uint8)), np.empty(count, np.int64)
        used = _elias_read(bits, self.delta, mapped)
        # padding must be zeros, so that each message has one stream only
        if used < 0 or (used + 7) // 8 != len(stream) or bits[used:].any():
            raise UndecodableError(
                f"{len(stream)} bytes are not exactly {count} Elias codes. The message is truncated or "
                "corrupted."
            )
        return torch.from_numpy(from_positive(mapped))

    def num_bits(self, symbols: Tensor) -> int:
        if symbols.numel() and not -_LARGEST <= int(symbols.min()) <= int(symbols.max()) <= _LARGEST:
            raise ValueError(f"Symbols must be within +-(2^62 - 1), got [{symbols.min()}, {symbols.max()}]")
        return int(_elias_length(as_array(symbols).reshape(-1), self.delta))

    def max_bytes(self, count: int) -> int:
        return (count * (_LONGEST_DELTA if self.delta else _LONGEST_GAMMA) + 7) // 8


@dataclass(frozen=True)
class Subset(Code):
    """Code that sends only selected coordinates, which both ends know. All others are 0.

    A message without selected coordinates takes no bits.

    Args:
        selected: `(m,)` bool, true where a symbol is sent.
        inner: Code of the symbols that are sent.
        smallest: Number that is subtracted from the symbols that are sent.
    """

    selected: NDArray[np.bool_]
    inner: Code
    smallest: int = 0

    def _sent(self, symbols: Tensor) -> Tensor:
        """Return the symbols that are sent, less `smallest`."""
        return symbols[torch.from_numpy(self.selected).to(symbols.device)].long() - self.smallest

    def pack(self, symbols: Tensor) -> bytes:
        return self.inner.pack(self._sent(symbols)) if self.selected.any() else b""

    def unpack(self, stream: bytes, count: int) -> Tensor:
        if count != len(self.selected):
            raise ValueError(f"This code is for {len(self.selected)} symbols, got count={count}")
        symbols = torch.zeros(count, dtype=torch.int64)
        if not self.selected.any():
            if stream:
                raise UndecodableError(
                    f"No coordinate is selected, so a message must be empty, got {len(stream)} bytes"
                )
            return symbols
        sent = self.inner.unpack(stream, int(self.selected.sum())).long()
        symbols[torch.from_numpy(self.selected)] = sent + self.smallest
        return symbols

    def num_bits(self, symbols: Tensor) -> int:
        if not self.selected.any():
            return 0
        return sum(self.inner.num_bits(self._sent(row)) for row in symbols.reshape(-1, len(self.selected)))

    def max_bytes(self, count: int) -> int | None:
        return self.inner.max_bytes(int(self.selected.sum())) if self.selected.any() else 0
