"""Codes whose length follows the symbols: Elias codes, Huffman and range coding on the conditional law.

The dither and the step of a dithered symbol are known to the decoder, so its law given them is much
narrower than its law alone. With x ~ N(0, s^2), x / w + U is Gaussian with mean U and std s / w, so the
exact conditional law of the symbol is a rounded Gaussian; `ConditionalRange` codes with it, through
`constriction`'s range coder, and sends s, on a grid of 2^(1/16), once per segment. A wrong model costs
bits, never correctness; a *different* model at the two ends garbles the stream, which is why every
parameter of the model is first rounded to a coarse grid.

References:
    Elias, Universal codeword sets and representations of the integers, 1975. Huffman, 1952.
    Bamler, Understanding entropy coding with asymmetric numeral systems (constriction), 2022.
"""

from __future__ import annotations

import heapq
import math
import struct
from dataclasses import dataclass
from functools import cached_property

import constriction
import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.coding import Code

_LARGEST = 2**62 - 1


def to_positive(symbols: NDArray[np.integer]) -> NDArray[np.int64]:
    """The signed map 0, 1, -1, 2, -2, ... -> 1, 2, 3, 4, 5, ...

    Raises:
        ValueError: If a symbol does not fit 62 bits.
    """
    values = symbols.astype(np.int64)
    if values.size and not (values.min() >= -_LARGEST and values.max() <= _LARGEST):
        raise ValueError(f"symbols must lie within +-(2^62 - 1), got [{values.min()}, {values.max()}]")
    mapped: NDArray[np.int64] = np.where(values > 0, 2 * values, 1 - 2 * values)
    return mapped


def from_positive(mapped: NDArray[np.int64]) -> NDArray[np.int64]:
    """Inverse of `to_positive`."""
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
def _elias_length(mapped: NDArray[np.int64], delta: bool) -> int:
    total = 0
    for value in mapped:
        length = _bit_length(value)
        total += length + (2 * _bit_length(length) - 2 if delta else length - 1)
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
            place = _put(bits, place + size - 1, length, size)
            place = _put(bits, place, value & ~(1 << (length - 1)), length - 1)
        else:
            place = _put(bits, place + length - 1, value, length)
    return place


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _elias_read(bits: NDArray[np.uint8], delta: bool, mapped: NDArray[np.int64]) -> int:
    place = 0
    for i in range(mapped.size):
        zeros = 0
        while place < bits.size and bits[place] == 0:
            zeros += 1
            place += 1
        if zeros > 62 or place + zeros + 1 > bits.size:
            return -1
        value = 0
        for _ in range(zeros + 1):
            value = 2 * value + bits[place]
            place += 1
        if delta:
            if value > 63 or place + value - 1 > bits.size:
                return -1
            length, value = value, 1
            for _ in range(length - 1):
                value = 2 * value + bits[place]
                place += 1
        mapped[i] = value
    return place


def _as_array(symbols: Tensor) -> NDArray[np.integer]:
    array: NDArray[np.integer] = symbols.detach().cpu().numpy()
    return array


@dataclass(frozen=True)
class Elias(Code):
    """Elias gamma or delta code of signed integers; needs no model and no bound.

    Gamma spends 1 bit on 0, 3 on +-1, 5 on +-2 and +3; delta is shorter from |m| = 16 on.

    Args:
        delta: The delta code instead of gamma.
    """

    delta: bool = False

    def pack(self, symbols: Tensor) -> bytes:
        """See `Code.pack`."""
        mapped = to_positive(_as_array(symbols))
        bits = np.zeros(_elias_length(mapped, self.delta), np.uint8)
        _elias_write(mapped, self.delta, bits)
        return np.packbits(bits).tobytes()

    def unpack(self, stream: bytes, count: int) -> Tensor:
        """See `Code.unpack`."""
        bits, mapped = np.unpackbits(np.frombuffer(stream, np.uint8)), np.empty(count, np.int64)
        used = _elias_read(bits, self.delta, mapped)
        if used < 0 or (used + 7) // 8 != len(stream) or bits[used:].any():
            raise ValueError(
                f"{len(stream)} bytes do not hold exactly {count} Elias codes; "
                "the message is truncated or corrupted"
            )
        return torch.from_numpy(from_positive(mapped))

    def num_bits(self, symbols: Tensor) -> int:
        """See `Code.num_bits`."""
        return int(_elias_length(to_positive(_as_array(symbols)).reshape(-1), self.delta))


def huffman_lengths(probabilities: list[float]) -> list[int]:
    """Code word lengths of a Huffman code; a single symbol still takes one bit.

    Raises:
        ValueError: If there is no symbol, or a probability is not > 0.
    """
    if not probabilities or min(probabilities) <= 0:
        raise ValueError("huffman_lengths needs probabilities > 0; leave impossible symbols out")
    if len(probabilities) == 1:
        return [1]
    lengths = [0] * len(probabilities)
    heap = [(p, i, [i]) for i, p in enumerate(probabilities)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (p, _, first), (q, tie, second) = heapq.heappop(heap), heapq.heappop(heap)
        for leaf in first + second:
            lengths[leaf] += 1
        heapq.heappush(heap, (p + q, tie, first + second))
    return lengths


def canonical_words(lengths: list[int]) -> list[str]:
    """Canonical code words, as strings of 0 and 1, of a complete set of lengths."""
    words, value, last = [""] * len(lengths), 0, 0
    for length, symbol in sorted((length, i) for i, length in enumerate(lengths)):
        value <<= length - last
        words[symbol], last = format(value, f"0{length}b"), length
        value += 1
    return words


@dataclass(frozen=True)
class ConditionalHuffman(Code):
    """One Huffman tree per coordinate, on its own conditional law: for validation, not for speed.

    Args:
        smallest: `(m,)` smallest possible symbol of each coordinate.
        laws: One list of probabilities > 0 per coordinate, for smallest, smallest + 1, ...
    """

    smallest: tuple[int, ...]
    laws: tuple[tuple[float, ...], ...]

    @cached_property
    def _words(self) -> list[list[str]]:
        return [canonical_words(huffman_lengths(list(law))) for law in self.laws]

    def _strings(self, symbols: Tensor) -> list[str]:
        picked = []
        for symbol, low, words in zip(symbols.tolist(), self.smallest, self._words, strict=True):
            if not 0 <= symbol - low < len(words):
                raise ValueError(
                    f"symbol {symbol} is impossible in its law on [{low}, {low + len(words) - 1}]"
                )
            picked.append(words[symbol - low])
        return picked

    def pack(self, symbols: Tensor) -> bytes:
        """See `Code.pack`.

        Raises:
            ValueError: If a symbol has no code word.
        """
        bits = "".join(self._strings(symbols))
        return np.packbits(np.frombuffer(bits.encode(), np.uint8) - ord("0")).tobytes()

    def unpack(self, stream: bytes, count: int) -> Tensor:
        """See `Code.unpack`."""
        bits = "".join(format(byte, "08b") for byte in stream)
        place, symbols = 0, []
        for low, words in zip(self.smallest[:count], self._words, strict=False):
            end, table = place + 1, {word: i for i, word in enumerate(words)}
            while bits[place:end] not in table and end < len(bits):
                end += 1
            if bits[place:end] not in table:
                raise ValueError(
                    f"{len(stream)} bytes do not hold {count} Huffman codes; the message is truncated"
                )
            symbols.append(low + table[bits[place:end]])
            place = end
        if (place + 7) // 8 != len(stream):
            raise ValueError(
                f"{count} symbols end after {place} bits, got {8 * len(stream)}; wrong count or model"
            )
        return torch.tensor(symbols)

    def num_bits(self, symbols: Tensor) -> int:
        """See `Code.num_bits`."""
        rows = symbols.reshape(-1, len(self.smallest))
        return sum(len(word) for row in rows for word in self._strings(row))


_GRID = 16
"""Steps per octave of the scales and the steps that the model sees."""
_HIGH = 1 << 15
_PRECISE = 8
"""Symbols spread over more than 2^8 values send their low bits as they are."""


@dataclass(frozen=True)
class ConditionalRange(Code):
    """Range coding of dithered symbols on their law given dither and step, for inputs N(0, s^2) by segment.

    Layout: one byte of mode, a 16-bit scale per segment (log2 s on a grid of 1/16), raw low bits of
    very wide symbols, then the range coder's 32-bit words. Where a symbol is too far from the model
    to be expressed, the whole message is Elias delta instead, and the mode byte says so.

    Args:
        dither: `(m,)` float64, U of every coordinate.
        step: `(m,)` float64, w of every coordinate, > 0, in units of the input.
        segments: Lengths of the segments, which sum to m, each with a scale of its own.
    """

    dither: NDArray[np.float64]
    step: NDArray[np.float64]
    segments: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.dither.shape == self.step.shape == (sum(self.segments),):
            raise ValueError(
                f"dither and step need one value per coordinate, {sum(self.segments)}, "
                f"got {self.dither.shape} and {self.step.shape}"
            )

    @cached_property
    def _log_steps(self) -> NDArray[np.int64]:
        grid: NDArray[np.int64] = np.floor(np.log2(self.step) * _GRID + 0.5).astype(np.int64)
        return grid

    @cached_property
    def _centres(self) -> NDArray[np.float64]:
        centres: NDArray[np.float64] = np.floor(self.dither * 2.0**16 + 0.5) * 2.0**-16
        return centres

    def _scales(self, symbols: NDArray[np.int64]) -> NDArray[np.int16]:
        """Root mean square of the decoded input, less what the dither adds to it, per segment."""
        decoded = (symbols - self.dither) * self.step
        energy = decoded * decoded - self.step * self.step / 12.0
        scales, start = np.empty(len(self.segments), np.int16), 0
        for i, size in enumerate(self.segments):
            part = slice(start, start + size)
            mean = max(float(energy[part].mean()), 0.0)
            floor = 2.0**-12 * float(np.exp2(self._log_steps[part].min() / _GRID))
            noise = float(np.square(self.step[part]).mean()) / math.sqrt(size)
            size_of_input = math.sqrt(max(mean, 0.02 * noise, floor * floor))
            scales[i] = max(min(math.floor(math.log2(size_of_input) * _GRID + 0.5), 32767), -32767)
            start += size
        return scales

    def _model(
        self, scales: NDArray[np.int16]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """Means, stds and numbers of raw low bits of the symbols' high parts."""
        logs = np.repeat(scales.astype(np.int64), self.segments) - self._log_steps
        raw = np.maximum(logs // _GRID - _PRECISE, 0)
        std = np.exp2(np.clip(logs - _GRID * raw, -40 * _GRID, 40 * _GRID) / _GRID)
        mean = np.where(
            raw > 0, (self._centres + 0.5) * np.exp2(-raw.astype(np.float64)) - 0.5, self._centres
        )
        return mean, np.maximum(std, 2.0**-10), raw

    def pack(self, symbols: Tensor) -> bytes:
        """See `Code.pack`."""
        values = _as_array(symbols).astype(np.int64)
        scales = self._scales(values)
        mean, std, raw = self._model(scales)
        high = values >> raw
        if high.size and max(-int(high.min()), int(high.max())) >= _HIGH:
            return b"\x01" + Elias(delta=True).pack(symbols)
        low_bits = _raw_bits(values, raw)
        coder = constriction.stream.queue.RangeEncoder()
        coder.encode(high.astype(np.int32), _gaussian(), mean, std)
        words = coder.get_compressed().astype("<u4").tobytes()
        header = b"\x00" + struct.pack(f"<{len(scales)}h", *scales.tolist())
        return header + np.packbits(low_bits).tobytes() + bytes(words)

    def unpack(self, stream: bytes, count: int) -> Tensor:
        """See `Code.unpack`."""
        if count != len(self.step):
            raise ValueError(f"this code is for messages of {len(self.step)} symbols, asked for {count}")
        if stream[:1] == b"\x01":
            return Elias(delta=True).unpack(stream[1:], count)
        place = 1 + 2 * len(self.segments)
        if stream[:1] != b"\x00" or len(stream) < place:
            raise ValueError(
                f"a message starts with mode 0 or 1 and {place - 1} bytes of scales; it is corrupted"
            )
        scales = np.frombuffer(stream[1:place], "<i2").astype(np.int16)
        mean, std, raw = self._model(scales)
        end = place + (int(raw.sum()) + 7) // 8
        if len(stream) < end or (len(stream) - end) % 4:
            raise ValueError(f"{len(stream)} bytes do not hold {count} symbols; the message is truncated")
        low_bits = np.unpackbits(np.frombuffer(stream[place:end], np.uint8))
        words = np.frombuffer(stream[end:], "<u4").astype(np.uint32)
        decoder = constriction.stream.queue.RangeDecoder(words)
        high = decoder.decode(_gaussian(), mean, std).astype(np.int64)
        if not decoder.maybe_exhausted():
            raise ValueError(f"{len(stream)} bytes hold more than {count} symbols; the message is corrupted")
        return torch.from_numpy((high << raw) + _raw_values(low_bits, raw))

    def num_bits(self, symbols: Tensor) -> int:
        """See `Code.num_bits`; the stream is made, not estimated."""
        return sum(8 * len(self.pack(row)) for row in symbols.reshape(-1, len(self.step)))


def _gaussian() -> constriction.stream.model.QuantizedGaussian:
    return constriction.stream.model.QuantizedGaussian(-_HIGH, _HIGH - 1)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _copy_raw(values: NDArray[np.int64], raw: NDArray[np.int64], bits: NDArray[np.uint8], read: bool) -> None:
    place = 0
    for j in range(values.size):
        for b in range(raw[j] - 1, -1, -1):
            if read:
                values[j] = 2 * values[j] + bits[place]
            else:
                bits[place] = (values[j] >> b) & 1
            place += 1


def _raw_bits(values: NDArray[np.int64], raw: NDArray[np.int64]) -> NDArray[np.uint8]:
    bits = np.empty(int(raw.sum()), np.uint8)
    _copy_raw(values, raw, bits, False)
    return bits


def _raw_values(bits: NDArray[np.uint8], raw: NDArray[np.int64]) -> NDArray[np.int64]:
    values = np.zeros(raw.size, np.int64)
    _copy_raw(values, raw, bits, True)
    return values


@dataclass(frozen=True)
class Subset(Code):
    """Only some coordinates travel, and both ends know which; all others are 0.

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
        """See `Code.pack`."""
        return self.inner.pack(self._sent(symbols))

    def unpack(self, stream: bytes, count: int) -> Tensor:
        """See `Code.unpack`."""
        if count != len(self.selected):
            raise ValueError(f"this code is for messages of {len(self.selected)} symbols, asked for {count}")
        symbols = torch.zeros(count, dtype=torch.int64)
        sent = self.inner.unpack(stream, int(self.selected.sum())).long()
        symbols[torch.from_numpy(self.selected)] = sent + self.smallest
        return symbols

    def num_bits(self, symbols: Tensor) -> int:
        """See `Code.num_bits`."""
        return sum(self.inner.num_bits(self._sent(row)) for row in symbols.reshape(-1, len(self.selected)))
