"""Range coding with the conditional distribution of a dithered symbol.

The decoder knows the dither U and the step w of a symbol. Given them, the symbol's distribution is much
narrower than without. For x ~ N(0, s^2), x / w + U is Gaussian with mean U and std s / w. So the exact
conditional distribution of the symbol is a rounded Gaussian.

`ConditionalRange` codes with this distribution through `constriction`'s range coder. It sends s once per
segment, on a grid of 2^(1/16). A model that fits badly costs bits, never correctness. But *different* models
at the two ends garble the stream. So every parameter of the model is first rounded to a coarse grid, with
integers and tables, so that two machines agree.

Messages are processed in chunks. Besides the message, its dithers and its steps, only one chunk is in memory.

References:
    Bamler, Understanding entropy coding with asymmetric numeral systems (constriction), 2022.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import constriction
import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.wire.coding import Code, UndecodableError
from lightning_fedq.wire.entropy_coding import Elias, as_array

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_GRID = 16
"""Grid points per octave for the scales and steps in the model."""
_HIGH = 1 << 15
_PRECISE = 8
"""Symbols that spread over more than 2^8 values send their low bits without coding."""
_CHUNK = 1 << 14
_MANTISSA = 52
_CHECKSUM_BYTES = 4
_WIDEST_SYMBOL = 63
"""Number of bits of a symbol whose bits are all sent without coding."""


# Halfway between two sixteenths of an octave. The mantissas at which the rounded value changes are more than
# 1/32 apart, so five leading bits and one comparison round log2 of a mantissa in [1, 2) to sixteenths.
_CHANGES = np.exp2((np.arange(1, _GRID + 1) - 0.5) / _GRID).view(np.int64) & ((1 << _MANTISSA) - 1)
_BELOW: Integers = np.searchsorted(_CHANGES, np.arange(32) << (_MANTISSA - 5), side="right")
_CHANGE = np.append(_CHANGES, 1 << _MANTISSA)[_BELOW]
_WIDEST = 40 * _GRID
_STDS = np.maximum(np.exp2(np.arange(-_WIDEST, _WIDEST + 1) / _GRID), 2.0**-10)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _log_step(bits: int) -> int:
    """Return floor(16 log2(w) + 1/2) of a float64 w > 0, given as its bits."""
    mantissa = bits & ((1 << _MANTISSA) - 1)
    cell = mantissa >> (_MANTISSA - 5)
    rounded: int = _BELOW[cell] + (1 if mantissa >= _CHANGE[cell] else 0)
    return ((bits >> _MANTISSA) - 1023) * _GRID + rounded


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _moments(symbols: NDArray[np.integer], dither: Floats, step: Floats) -> tuple[float, float, float]:
    """Return the sums of (decoded^2 - step^2 / 12) and of step^2, and the shortest step, of one chunk.

    Args:
        symbols: `(n,)` integers.
        dither: `(n,)` dithers.
        step: `(n,)` steps.
    """
    energy, squares, shortest = 0.0, 0.0, np.inf
    for j in range(symbols.size):
        decoded, square = (symbols[j] - dither[j]) * step[j], step[j] * step[j]
        # step^2 / 12 is the variance of an error that is uniform on a step
        energy += decoded * decoded - square / 12.0
        squares += square
        shortest = min(shortest, step[j])
    return energy, squares, shortest


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _model(dither: Floats, bits: Integers, scale: int, mean: Floats, std: Floats, raw: Integers) -> int:
    """Fill in means, stds and numbers of raw bits of one chunk, and return the sum of raw bits.

    Args:
        dither: `(n,)` dithers.
        bits: `(n,)` steps, as the bits of float64.
        scale: Rounded 16 log2 of the segment's std.
        mean: `(n,)` output, mean of each high part.
        std: `(n,)` output, std of each high part.
        raw: `(n,)` output, number of low bits that are sent without coding.
    """
    total = 0
    for j in range(dither.size):
        ratio = scale - _log_step(bits[j])
        low = max(ratio // _GRID - _PRECISE, 0)  # the high part keeps a std below 2^9
        centre = np.floor(dither[j] * 65536.0 + 0.5) / 65536.0  # powers of two, so only the floor rounds
        # the middle of 2^low symbols is (high + 1/2) 2^low - 1/2
        mean[j] = centre if low == 0 else math.ldexp(centre + 0.5, -low) - 0.5
        std[j] = _STDS[min(max(ratio - _GRID * low, -_WIDEST), _WIDEST) + _WIDEST]
        raw[j] = low
        total += low
    return total


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _count_raw(bits: Integers, scale: int) -> int:
    """Return the number of raw low bits of all symbols in a chunk."""
    total = 0
    for j in range(bits.size):
        total += max((scale - _log_step(bits[j])) // _GRID - _PRECISE, 0)
    return total


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _high_parts(symbols: NDArray[np.integer], raw: Integers, high: NDArray[np.int32]) -> bool:
    """Fill in the symbols without their low bits. Return False if one is too large for the model.

    Args:
        symbols: `(n,)` integers.
        raw: `(n,)` number of low bits.
        high: `(n,)` output.
    """
    for j in range(symbols.size):
        # the shift rounds down, also below 0, so the low bits are the remainder
        part = np.int64(symbols[j]) >> raw[j]
        if not -_HIGH < part < _HIGH:
            return False
        high[j] = part
    return True


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _copy_raw(values: NDArray[np.integer], raw: Integers, bits: NDArray[np.uint8], read: bool) -> None:
    """Copy the low bits of values, most significant first, to or from an array with one byte a bit.

    Args:
        values: `(n,)` symbols. If `read`, high parts that become symbols.
        raw: `(n,)` number of low bits.
        bits: Array of bits.
        read: Whether to copy from `bits` to `values`.
    """
    place = 0
    for j in range(values.size):
        for b in range(raw[j] - 1, -1, -1):
            if read:
                values[j] = 2 * values[j] + bits[place]
            else:
                bits[place] = (values[j] >> b) & 1
            place += 1


def _gaussian() -> constriction.stream.model.QuantizedGaussian:
    """Return constriction's model of rounded Gaussian high parts."""
    return constriction.stream.model.QuantizedGaussian(-_HIGH, _HIGH - 1)


@dataclass(frozen=True)
class ConditionalRange(Code):
    """Range code of dithered symbols given dither and step, for inputs N(0, s^2) by segment.

    A stream has one byte of mode and a 16-bit scale per segment (log2 s on a grid of 1/16). Then follow raw
    low bits of very wide symbols, the range coder's 32-bit words, and a CRC-32 of all these. The checksum is
    needed because one flipped bit garbles the rest of a stream, and a missing word would not show. If a
    symbol is too far from the model to be coded, the whole message is Elias delta instead, and the mode byte
    says so.

    Args:
        dither: `(m,)` float64, dither U of every coordinate.
        step: `(m,)` float64, step w > 0 of every coordinate, in units of the input.
        segments: Lengths of the segments, which sum to m. Each segment has its own scale.
    """

    dither: Floats
    step: Floats
    segments: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.dither.shape == self.step.shape == (sum(self.segments),):
            raise ValueError(
                f"dither and step need one value per coordinate, {sum(self.segments)}, got "
                f"{self.dither.shape} and {self.step.shape}"
            )

    def _chunks(self) -> Iterator[tuple[int, slice]]:
        """Yield the index of the segment and the slice of each chunk. No chunk crosses a segment's end."""
        start = 0
        for segment, size in enumerate(self.segments):
            for first in range(start, start + size, _CHUNK):
                yield segment, slice(first, min(first + _CHUNK, start + size))
            start += size

    def _scales(self, symbols: NDArray[np.integer]) -> list[int]:
        """Return each segment's scale: the root mean square of the decoded input without the dither's part.

        It is rounded to the grid, as an integer 16 log2.
        """
        moments_by_segment: list[list[tuple[float, float, float]]] = [[] for _ in self.segments]
        for segment, part in self._chunks():
            moments_by_segment[segment].append(_moments(symbols[part], self.dither[part], self.step[part]))
        scales = []
        for size, moments in zip(self.segments, moments_by_segment, strict=True):
            energy, squares, shortest = zip(*moments, strict=True)
            floor = 2.0**-12 * min(shortest)
            noise = math.fsum(squares) / size / math.sqrt(size)
            # the difference may be 0 or negative, but a logarithm needs a positive number
            square = max(math.fsum(energy) / size, 0.02 * noise, floor * floor)
            # the header has 16 bits for it
            scales.append(max(min(math.floor(math.log2(square) / 2.0 * _GRID + 0.5), 32767), -32767))
        return scales

    def _models(self, scales: list[int]) -> Iterator[tuple[slice, Floats, Floats, Integers, int]]:
        """Yield slice, means, stds, numbers of raw bits and their sum, for each chunk.

        The next chunk overwrites the arrays.
        """
        bits = self.step.view(np.int64)
        mean, std, raw = np.empty(_CHUNK), np.empty(_CHUNK), np.empty(_CHUNK, np.int64)
        for segment, part in self._chunks():
            size = part.stop - part.start
            model = mean[:size], std[:size], raw[:size]
            total = _model(self.dither[part], bits[part], scales[segment], *model)
            yield part, *model, total

    def pack(self, symbols: Tensor) -> bytes:
        body = self._body(symbols)
        return body + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little")

    def _body(self, symbols: Tensor, scales: list[int] | None = None) -> bytes:
        """Return a message without its checksum.

        Args:
            symbols: `(m,)` integers.
            scales: Scales of a received message, or None to compute them from the symbols.
        """
        values = as_array(symbols)
        scales, low_bits = self._scales(values) if scales is None else scales, [np.zeros(0, np.uint8)]
        coder, model = constriction.stream.queue.RangeEncoder(), _gaussian()
        high = np.empty(_CHUNK, np.int32)
        for part, mean, std, raw, total in self._models(scales):
            if not _high_parts(values[part], raw, high):
                return b"\x01" + Elias(delta=True).pack(symbols)
            if total:
                low_bits.append(np.empty(total, np.uint8))
                _copy_raw(values[part], raw, low_bits[-1], False)
            coder.encode(high[: len(mean)], model, mean, std)
        words = coder.get_compressed().astype("<u4").tobytes()
        header = b"\x00" + struct.pack(f"<{len(scales)}h", *scales)
        return header + np.packbits(np.concatenate(low_bits)).tobytes() + bytes(words)

    def unpack(self, stream: bytes, count: int) -> Tensor:
        if count != len(self.step):
            raise ValueError(f"This code is for {len(self.step)} symbols, got count={count}")
        self.check_length(stream, count)
        body, checksum = stream[:-_CHECKSUM_BYTES], stream[-_CHECKSUM_BYTES:]
        if zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
            raise UndecodableError(
                "The checksum of the message is wrong. The message is truncated or corrupted."
            )
        if body[:1] == b"\x01":
            symbols = Elias(delta=True).unpack(body[1:], count)
            computed = self._scales(as_array(symbols))
            # symbols that fit scales one grid point lower fit all scales that a client may have computed
            if self._body(symbols, [scale - 1 for scale in computed])[:1] == b"\x00":
                raise UndecodableError("Symbols that fit the model came in the Elias code")
            return symbols
        scales, low_bits, words = self._split(body)
        symbols = self._decode(scales, low_bits, words)
        computed = self._scales(as_array(symbols))
        # another machine may round to the next grid point
        if any(abs(scale - other) > 1 for scale, other in zip(scales, computed, strict=True)):
            raise UndecodableError(f"The scales {scales[:5]} are not those of the symbols, {computed[:5]}")
        if self._body(symbols, scales) != body:
            raise UndecodableError(
                f"{len(body)} bytes hold {count} symbols, but these symbols pack to other bytes"
            )
        return symbols

    def _split(self, body: bytes) -> tuple[list[int], NDArray[np.uint8], NDArray[np.uint32]]:
        """Split a range-coded message into scales, low bits, and words of the range coder."""
        start = 1 + 2 * len(self.segments)
        if body[:1] != b"\x00" or len(body) < start:
            raise UndecodableError(
                f"A message must start with mode 0 or 1 and {start - 1} bytes of scales. This message is of "
                "another code."
            )
        scales: list[int] = np.frombuffer(body[1:start], "<i2").tolist()
        bits = self.step.view(np.int64)
        num_low_bits = sum(_count_raw(bits[part], scales[segment]) for segment, part in self._chunks())
        end = start + (num_low_bits + 7) // 8
        if len(body) < end or (len(body) - end) % 4:
            raise UndecodableError(
                f"{len(body)} bytes do not hold {len(bits)} symbols of these steps. Check the dither."
            )
        low_bits = np.unpackbits(np.frombuffer(body[start:end], np.uint8))
        return scales, low_bits, np.frombuffer(body[end:], "<u4").astype(np.uint32)

    def _decode(self, scales: list[int], low_bits: NDArray[np.uint8], words: NDArray[np.uint32]) -> Tensor:
        """Decode the symbols `(m,)` of the parts that `_split` returns."""
        decoder, model = constriction.stream.queue.RangeDecoder(words), _gaussian()
        values, used = np.empty(len(self.step), np.int64), 0
        for part, mean, std, raw, total in self._models(scales):
            try:
                values[part] = decoder.decode(model, mean, std)
            except AssertionError as error:  # constriction raises this if no encoder writes these words
                raise UndecodableError(
                    f"The message has words that {len(values)} symbols of these steps never give"
                ) from error
            if total:
                _copy_raw(values[part], raw, low_bits[used : used + total], True)
                used += total
        if not decoder.maybe_exhausted():
            raise UndecodableError(
                f"{4 * len(words)} bytes of words hold more than {len(values)} symbols of these steps. "
                "Check the dither."
            )
        return torch.from_numpy(values)

    def num_bits(self, symbols: Tensor) -> int:
        # the exact length needs the stream itself
        return sum(8 * len(self.pack(row)) for row in symbols.reshape(-1, len(self.step)))

    def max_bytes(self, count: int) -> int:
        # the range coder takes at most 24 bits for a symbol's high part
        header = 1 + 2 * len(self.segments) + _CHECKSUM_BYTES
        return header + (_WIDEST_SYMBOL * count + 7) // 8 + 3 * count + 12
