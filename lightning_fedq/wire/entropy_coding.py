"""Codes whose length follows the symbols: Elias codes and partial messages.

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
_BLOCK = 512
_LONGEST_GAMMA, _LONGEST_DELTA = 2 * 63 - 1, 11 + 62
"""Bits of the code of 2^63 - 1, the largest value that `map_to_positive` gives."""


def map_to_positive(symbols: NDArray[np.integer]) -> NDArray[np.int64]:
    """The signed map 0, 1, -1, 2, -2, ... -> 1, 2, 3, 4, 5, ..., for symbols of 62 bits.

    Example:
        >>> map_to_positive(np.array([0, -1, 1, -2]))
        array([1, 3, 2, 5])
    """
    values = symbols.astype(np.int64)
    mapped: NDArray[np.int64] = np.where(values > 0, 2 * values, 1 - 2 * values)
    return mapped


def from_positive(mapped: NDArray[np.int64]) -> NDArray[np.int64]:
    """Inverse of `map_to_positive`.

    Example:
        >>> from_positive(np.array([1, 3, 2, 5]))
        array([ 0, -1,  1, -2])
    """
    symbols: NDArray[np.int64] = np.where(mapped % 2 == 0, mapped // 2, (1 - mapped) // 2)
    return symbols


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _bit_length(value: int) -> int:
    length = 0
    while value:
        value >>= 1
        length += 1
    return length


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _elias_length(symbols: NDArray[np.integer], delta: bool) -> int:
    """Bits of all symbols, or -1 if one is too large for `map_to_positive`.

    Bit lengths are exponents of float64; without its second bit where the first is set, no value rounds up.
    """
    total, floats = 0, np.empty(_BLOCK)
    exponents = floats.view(np.int64)
    for start in range(0, symbols.size, _BLOCK):
        part = symbols[start : start + _BLOCK]
        most, least, sum_of_lengths = np.int64(0), np.int64(0), 0
        for j in range(part.size):
            symbol = np.int64(part[j])
            most, least = max(most, symbol), min(least, symbol)
            value = 2 * symbol if symbol > 0 else 1 - 2 * symbol  # may wrap around: then -1 is returned
            floats[j] = np.float64(value & ~(value >> 1))
        if most > _LARGEST or least < -_LARGEST:
            return -1
        for j in range(part.size):
            # the exponent is biased by 1023, and the length is one more
            sum_of_lengths += int(exponents[j] >> 52) - 1022
        if delta:
            for j in range(part.size):
                total += 2 * _bit_length((exponents[j] >> 52) - 1022) - 2
            total += sum_of_lengths
        else:
            total += 2 * sum_of_lengths - part.size
    return total


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _put(bits: NDArray[np.uint8], place: int, value: int, width: int) -> int:
    for b in range(width - 1, -1, -1):
        bits[place] = (value >> b) & 1
        place += 1
    return place


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _elias_write(mapped: NDArray[np.int64], delta: bool, bits: NDArray[np.uint8]) -> int:
    place = 0
    for value in mapped:
        length = _bit_length(value)
        if delta:
            size = _bit_length(length)
            place = _put(bits, place + size - 1, length, size)  # delta: the length in gamma code
            # its leading one follows from the length
            place = _put(bits, place, value & ~(1 << (length - 1)), length - 1)
        else:
            place = _put(bits, place + length - 1, value, length)  # gamma: zeros before the leading one
    return place


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _elias_read(bits: NDArray[np.uint8], delta: bool, mapped: NDArray[np.int64]) -> int:
    place = 0
    for i in range(mapped.size):
        zeros = 0
        while place < bits.size and bits[place] == 0:
            zeros += 1
            place += 1
        if zeros > 62 or place + zeros + 1 > bits.size:  # 63 bits at most, so that int64 holds them
            return -1
        value = 0
        for _ in range(zeros + 1):
            value = 2 * value + bits[place]
            place += 1
        if delta:
            if value > 63 or place + value - 1 > bits.size:  # as above: this value is the length of the next
                return -1
            length, value = value, 1
            for _ in range(length - 1):
                value = 2 * value + bits[place]
                place += 1
        mapped[i] = value
    return place


def as_array(symbols: Tensor) -> NDArray[np.integer]:
    """The symbols as a NumPy array, without a copy where they are on the CPU."""
    array: NDArray[np.integer] = symbols.detach().cpu().numpy()
    return array


@dataclass(frozen=True)
class Elias(Code):
    """Elias gamma or delta code of signed integers. Needs no model and no bound.

    Gamma spends 1 bit on 0, 3 on +-1, 5 on +-2 and +3; delta is shorter from |m| = 16 on.

    Args:
        delta: The delta code instead of gamma.
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
        # padding is zeros, so that no two streams are one message
        if used < 0 or (used + 7) // 8 != len(stream) or bits[used:].any():
            raise UndecodableError(
                f"{len(stream)} bytes do not hold exactly {count} Elias codes; "
                "the message is truncated or corrupted"
            )
        return torch.from_numpy(from_positive(mapped))

    def num_bits(self, symbols: Tensor) -> int:
        length = int(_elias_length(as_array(symbols).reshape(-1), self.delta))
        if length < 0:
            raise ValueError(f"symbols must lie within +-(2^62 - 1), got [{symbols.min()}, {symbols.max()}]")
        return length

    def max_bytes(self, count: int) -> int:
        return (count * (_LONGEST_DELTA if self.delta else _LONGEST_GAMMA) + 7) // 8


@dataclass(frozen=True)
class Subset(Code):
    """Only some coordinates travel, and both ends know which. All others are 0. None at all take no bits.

    Args:
        selected: `(m,)` bool, true where a symbol is sent.
        inner: Code of what is sent.
        smallest: Subtracted from the symbols that are sent.
    """

    selected: NDArray[np.bool_]
    inner: Code
    smallest: int = 0

    def _sent(self, symbols: Tensor) -> Tensor:
        return symbols[torch.from_numpy(self.selected).to(symbols.device)].long() - self.smallest

    def pack(self, symbols: Tensor) -> bytes:
        return self.inner.pack(self._sent(symbols)) if self.selected.any() else b""

    def unpack(self, stream: bytes, count: int) -> Tensor:
        if count != len(self.selected):
            raise ValueError(f"this code is for messages of {len(self.selected)} symbols, asked for {count}")
        symbols = torch.zeros(count, dtype=torch.int64)
        if not self.selected.any():
            if stream:
                raise UndecodableError(
                    f"nothing was selected, a message must be empty, got {len(stream)} bytes"
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
