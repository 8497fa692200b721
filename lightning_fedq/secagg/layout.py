"""Layout of a message modulo m: ranges, moduli, packing and masks.

A symbol in [low, high] is sent as (symbol - low) mod m. The modulus is above n (high - low) for a cohort of n
clients, so the sum can't wrap for any symbols and any dropouts. Masked symbols are uniform modulo m and can't
be compressed. So the default modulus is a power of two, which needs the same whole number of bits as the
moduli just below it. The bounds may differ between coordinates if they are public, like the scale of the
aggregate Gaussian. Coordinates of equal width then form a block. Masks for other moduli are drawn by exact
rejection, about five times slower.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.keys.randomness import Stream, pack_fields

_CHUNK = 1 << 15
_MAX_MODULUS = 2**63

Residues = list[NDArray[Any]]
"""One array of unsigned words for each block. Only the values modulo the block's modulus have a meaning."""


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _pack(values: NDArray[np.uint64], width: int, out: NDArray[np.uint32]) -> None:
    """Write `width` bits of each value, least significant first, into 32-bit words."""
    pending, filled, position = np.uint64(0), 0, 0
    for value in values:
        rest, left = value, width
        while left > 0:
            take = min(left, 32)
            # stays below 2^64, because filled < 32 and take <= 32
            pending |= (rest & np.uint64((1 << take) - 1)) << np.uint64(filled)
            rest >>= np.uint64(take)
            filled += take
            left -= take
            if filled >= 32:
                out[position] = np.uint32(pending & np.uint64(0xFFFFFFFF))
                position += 1
                pending >>= np.uint64(32)
                filled -= 32
    if filled > 0:
        out[position] = np.uint32(pending)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _unpack(words: NDArray[np.uint32], width: int, out: NDArray[np.uint64]) -> None:
    """Read the values that `_pack` wrote."""
    pending, filled, position = np.uint64(0), 0, 0
    for i in range(out.size):
        value, have = np.uint64(0), 0
        while have < width:
            take = min(width - have, 32)
            if filled < take:
                pending |= np.uint64(words[position]) << np.uint64(filled)  # filled < 32: no bit is lost
                position += 1
                filled += 32
            value |= (pending & np.uint64((1 << take) - 1)) << np.uint64(have)
            pending >>= np.uint64(take)
            filled -= take
            have += take
        out[i] = value


@dataclass(frozen=True, eq=False)
class Block:
    """Coordinates of a message that have the same modulus.

    Args:
        modulus: Modulus m in [2, 2^63].
        index: Positions of the coordinates in the message, or None for all of them.
        count: Number of coordinates.
    """

    modulus: int
    index: NDArray[np.int64] | None
    count: int

    @cached_property
    def width(self) -> int:
        """Bits of a symbol on the wire: ceil(log2 m)."""
        return (self.modulus - 1).bit_length()

    @cached_property
    def is_power_of_two(self) -> bool:
        """Whether m is a power of two, so that words of the stream are masks without rejection."""
        return self.modulus & (self.modulus - 1) == 0

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Type of the words of masks and sums.

        For a power of two it is the narrowest word, whose overflow is harmless modulo m. For other moduli it
        is wide enough to make rejection rare.
        """
        if self.is_power_of_two:
            return np.dtype(f"uint{next(size for size in (8, 16, 32, 64) if size >= self.width)}")
        return np.dtype(np.uint32 if self.width <= 24 else np.uint64)

    @property
    def num_bytes(self) -> int:
        """Length of the block on the wire in bytes, the padding included."""
        return (self.width * self.count + 7) // 8

    def reduce(self, values: NDArray[Any]) -> NDArray[np.uint64]:
        """Reduce words to residues in [0, m)."""
        wide = values.astype(np.uint64)
        if self.is_power_of_two:
            wide &= np.uint64(self.modulus - 1)
            return wide
        return wide % np.uint64(self.modulus)

    def add(self, total: NDArray[Any], values: NDArray[Any]) -> None:
        """Add `values` to `total` in place, modulo m."""
        np.add(total, values, out=total)
        if not self.is_power_of_two:
            # both numbers were below m <= 2^63 (2^24 in 32-bit words), so their sum did not wrap
            total -= (total >= self.modulus) * self.dtype.type(self.modulus)

    def add_mask(self, total: NDArray[Any], stream: Stream, subtract: bool) -> None:
        """Add or subtract the next `count` symbols of a mask, exactly uniform modulo m."""
        words = np.empty(min(_CHUNK, self.count), self.dtype)
        for start in range(0, self.count, _CHUNK):
            part = total[start : start + _CHUNK]
            chunk = words[: part.size]
            stream.fill(chunk.view(np.uint8))
            if self.is_power_of_two:
                (np.subtract if subtract else np.add)(part, chunk, out=part)  # words wrap at a multiple of m
                continue
            bits = 8 * self.dtype.itemsize
            # words above the last whole multiple of m are rejected, as they would favour small residues
            largest, modulus = 2**bits // self.modulus * self.modulus - 1, self.dtype.type(self.modulus)
            while len(rejected := np.flatnonzero(chunk > largest)):
                again = np.empty(len(rejected), self.dtype)
                stream.fill(again.view(np.uint8))
                chunk[rejected] = again
            chunk -= chunk // modulus * modulus
            # modulus - 0 is m, which `add` reduces to 0
            self.add(part, modulus - chunk if subtract else chunk)


@dataclass(frozen=True, eq=False)
class Layout:
    """Ranges and moduli of one message.

    Args:
        size: Number of symbols of a message.
        low: Smallest symbol, an int or `(size,)` int64.
        high: Largest symbol, an int or `(size,)` int64.
        blocks: Blocks of coordinates. Each coordinate is in exactly one block.
    """

    size: int
    low: int | NDArray[np.int64]
    high: int | NDArray[np.int64]
    blocks: tuple[Block, ...]

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of sizes, bounds and moduli, on which all parties must agree."""
        state = hashlib.sha256(pack_fields("layout", self.size))
        for bound in (self.low, self.high):
            state.update(np.asarray(bound, np.dtype("<i8")).tobytes())
        for block in self.blocks:
            state.update(pack_fields(block.modulus, block.count))
            if block.index is not None:
                state.update(block.index.astype("<i8").tobytes())
        return state.digest()

    @property
    def num_bytes(self) -> int:
        """Length of a packed message in bytes."""
        return sum(block.num_bytes for block in self.blocks)

    def zeros(self) -> Residues:
        """Return an empty sum."""
        return [np.zeros(block.count, block.dtype) for block in self.blocks]

    def split(self, symbols: NDArray[Any]) -> Residues:
        """Turn a message `(size,)` into residues.

        Raises:
            ValueError: If `symbols` is no integer array of that shape, or a symbol is out of range.
        """
        if symbols.dtype.kind not in "iub" or symbols.shape != (self.size,):
            raise ValueError(
                f"symbols must be integers of shape ({self.size},), got {symbols.dtype} of shape "
                f"{symbols.shape}. Encode the update first."
            )
        if symbols.dtype == np.uint64:
            if int(symbols.max(initial=0)) >= 2**63:
                raise ValueError(f"symbols must fit 64 signed bits, got {symbols.max()}")
            symbols = symbols.view(np.int64)
        if symbols.dtype.kind == "b":
            symbols = symbols.astype(np.uint8)
        if isinstance(self.low, int) and isinstance(self.high, int):
            smallest = int(symbols.min()) if symbols.size else self.low
            largest = int(symbols.max()) if symbols.size else self.low
            inside = self.low <= smallest and largest <= self.high
        else:
            inside = bool(((symbols >= self.low) & (symbols <= self.high)).all())
        if not inside:
            raise ValueError(
                f"symbols must lie in [{np.min(self.low)}, {np.max(self.high)}], the range that "
                f"the modulus was chosen for, got [{symbols.min()}, {symbols.max()}]. "
                "Correct the mechanism's symbol_range."
            )
        if isinstance(self.low, int) and self.low == 0:
            shifted = symbols
        else:
            # in two's complement the difference of two int64 is right modulo 2^64, and it is below 2^63
            shifted = (symbols.astype(np.int64) - self.low).view(np.uint64)
        return [
            # the values are below m, so they fit the block's type
            (shifted if block.index is None else shifted[block.index]).astype(block.dtype)
            for block in self.blocks
        ]

    def join(self, residues: Residues, count: int) -> NDArray[np.int64]:
        """Turn the residues of a sum of `count` messages back into the sum, `(size,)`."""
        out = np.empty(self.size, np.int64)
        for block, values in zip(self.blocks, residues, strict=True):
            out[slice(None) if block.index is None else block.index] = block.reduce(values).view(np.int64)
        return out + np.multiply(self.low, count, dtype=np.int64)

    def add(self, total: Residues, values: Residues) -> None:
        """Add a message to a sum, in place."""
        for block, partial, message in zip(self.blocks, total, values, strict=True):
            block.add(partial, message)

    def add_mask(self, total: Residues, key: bytes, subtract: bool = False) -> None:
        """Add or subtract, in place, the mask that a 32-byte key generates. Use a key for one mask only."""
        stream = Stream(key)
        for block, values in zip(self.blocks, total, strict=True):
            block.add_mask(values, stream, subtract)

    def pack(self, residues: Residues) -> bytes:
        """Write ceil(log2 m) bits per symbol, least significant first. Pad each block to whole bytes."""
        parts = []
        for block, values in zip(self.blocks, residues, strict=True):
            words = np.zeros((block.num_bytes + 3) // 4, np.dtype("<u4"))
            _pack(block.reduce(values), block.width, words)
            parts.append(words.tobytes()[: block.num_bytes])
        return b"".join(parts)

    def unpack(self, stream: bytes) -> Residues:
        """Read the residues that `pack` wrote.

        Raises:
            ValueError: If the length is wrong, a residue is not below its modulus, or padding is not zero.
        """
        if len(stream) != self.num_bytes:
            raise ValueError(f"a masked message has {self.num_bytes} bytes, got {len(stream)}")
        start, residues = 0, []
        for block in self.blocks:
            raw = stream[start : start + block.num_bytes]
            start += block.num_bytes
            used = block.width * block.count % 8
            if used and raw[-1] >> used:
                raise ValueError("the padding of a masked message is not zero")
            out = np.empty(block.count, np.uint64)
            _unpack(np.frombuffer(raw + bytes(-len(raw) % 4), "<u4"), block.width, out)
            if not block.is_power_of_two and int(out.max()) >= block.modulus:
                raise ValueError(f"a masked symbol must be below {block.modulus}, got {out.max()}")
            residues.append(out.astype(block.dtype))
        return residues


def sum_layout(
    size: int,
    low: int | NDArray[np.int64],
    high: int | NDArray[np.int64],
    num_clients: int,
    modulus: int | None = None,
) -> Layout:
    """Choose moduli for which the sum over a whole cohort can't wrap.

    Args:
        size: Symbols of a message, >= 1.
        low: Smallest symbol, an int for all coordinates or `(size,)`.
        high: Largest symbol, an int for all coordinates or `(size,)`.
        num_clients: Size n of the cohort.
        modulus: Modulus above n (high - low). None takes the smallest power of two.

    Raises:
        ValueError: If the modulus is too small, or no modulus up to 2^63 is large enough.
    """
    lows, highs = np.atleast_1d(np.asarray(low, np.int64)), np.atleast_1d(np.asarray(high, np.int64))
    if size < 1 or {lows.size, highs.size} - {1, size}:
        raise ValueError(
            f"need size >= 1 and bounds of one value or (size,), got {size}, {lows.size}, {highs.size}"
        )
    if bool((lows > highs).any()):
        raise ValueError("the smallest symbol must not be above the largest one")
    widest = max(int(highs.max()) - int(lows.min()), 1)  # Python integers, because int64 may wrap
    farthest = max(abs(int(lows.min())), abs(int(highs.max())))
    if widest * num_clients >= _MAX_MODULUS or num_clients * farthest >= 2**63:
        raise ValueError(
            f"The sum of {num_clients} symbols in [{lows.min()}, {highs.max()}] does not fit 63 bits. "
            "Use a coarser mechanism or a smaller cohort."
        )
    if modulus is not None:
        if not widest * num_clients < modulus <= _MAX_MODULUS:  # sums take n widest + 1 values
            raise ValueError(
                f"modulus must be above {num_clients} x {widest} = {widest * num_clients} and at most 2^63, "
                f"so that the sum can't wrap, got {modulus}. Raise modulus or leave it out."
            )
        return Layout(size, _whole(lows), _whole(highs), (Block(modulus, None, size),))
    spans = np.maximum(highs - lows, 1) * num_clients  # below 2^63, by the check above
    # width is the smallest w with 2^w > span. A float log2 would err next to powers of two.
    widths = np.searchsorted(2 ** np.arange(63, dtype=np.int64), spans, side="right").astype(np.int64)
    distinct: Sequence[int] = np.unique(widths).tolist()
    if len(distinct) == 1:
        blocks: tuple[Block, ...] = (Block(2 ** distinct[0], None, size),)
    else:
        places = [np.flatnonzero(widths == width).astype(np.int64) for width in distinct]
        blocks = tuple(Block(2**w, index, len(index)) for w, index in zip(distinct, places, strict=True))
    return Layout(size, _whole(lows), _whole(highs), blocks)


def modular_layout(size: int, modulus: int) -> Layout:
    """Return the layout for a mechanism whose symbols and sums are residues modulo `modulus` by design.

    Raises:
        ValueError: If the modulus is not in [2, 2^63].

    Examples:
        >>> modular_layout(4, 2**16).size
        4
    """
    if not 2 <= modulus <= _MAX_MODULUS or size < 1:
        raise ValueError(f"modulus must be in [2, 2^63] and size >= 1, got {modulus} and {size}")
    return Layout(size, 0, modulus - 1, (Block(modulus, None, size),))


def _whole(bounds: NDArray[np.int64]) -> int | NDArray[np.int64]:
    """Return one int if all bounds are equal, else the array."""
    return int(bounds[0]) if bool((bounds == bounds[0]).all()) else bounds
