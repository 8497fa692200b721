"""Exact draws from a symmetric law on the integers, by inversion on 64-bit words.

A word decides unless it equals a threshold's first 64 bits, which one draw in about 10^16 does. Then both are
extended by 64 bits until they differ. So the law is exact, no float is compared, and the work does not depend
on data, only on the words: their leading bits say between which thresholds they lie, mostly all but one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

_BLOCK = 1024
"""Draws whose words and values stay in a cache while they are looked up."""
_GUIDE_BITS = 16
_FEW = 16

Words = Callable[[int], NDArray[np.uint64]]
Weights = Callable[[float, int], list[Decimal]]
"""Weights of 0, 1, 2, ..., K of a law with a parameter, up to a factor, in the decimal context that is set:
exact, and up to a tail below 2^-(bits + 20) of the first one."""


@lru_cache(maxsize=32)
def thresholds(weights: Weights, parameter: float, bits: int) -> tuple[int, list[int]]:
    """Return (K, floor(2^bits P(X <= z)) for z = -K, ..., K - 1), K far in the tail, with 60 guard bits."""
    with localcontext() as context:
        context.prec = math.ceil((bits + 60) * math.log10(2.0)) + 10
        half = weights(parameter, bits)
        total = 2 * sum(half) - half[0]  # 0 has one weight, all others two
        scale, running, found = Decimal(2) ** bits / total, Decimal(0), []
        for weight in half[:0:-1] + half:  # from -K to K
            running += weight
            found.append(min(int(running * scale), 2**bits - 1))  # below 1, however thin the tail
    # the last one stands for everything to its right
    return len(half) - 1, found[:-1]


class _Table(NamedTuple):
    """Thresholds of a law, and where to look among them.

    Args:
        largest: Largest value of the law.
        found: `(2 largest,)`, ascending.
        guide: How many of them lie below each multiple of 2^(64 - bits), and their number: `(2^bits + 1,)`.
    """

    largest: int
    found: NDArray[np.uint64]
    guide: NDArray[np.int32]


@lru_cache(maxsize=16)
def _table(weights: Weights, parameter: float) -> _Table:
    largest, found = thresholds(weights, parameter, 64)
    words = np.array(found, np.uint64)
    bits = min(max(2 * len(found).bit_length() - 3, 8), _GUIDE_BITS)
    guide = np.searchsorted(words, np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits), side="left")
    return _Table(largest, words, np.append(guide, len(words)).astype(np.int32))


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _look_up(
    found: NDArray[np.uint64],
    guide: NDArray[np.int32],
    words: NDArray[np.uint64],
    largest: int,
    drawn: NDArray[np.int64],
    ties: NDArray[np.int64],
) -> int:
    """Fill in the law's values: the number of thresholds at or below each word, less `largest`.

    Returns:
        How many words equal a threshold; their places are put into `ties`, as many as fit.
    """
    bits = 0
    while (1 << bits) < guide.size - 1:
        bits += 1
    shift, last, count = np.uint64(64 - bits), found.size - 1, 0
    rest = np.empty(_BLOCK, np.bool_)
    for first in range(0, words.size, _BLOCK):
        part, word = drawn[first : first + _BLOCK], words[first : first + _BLOCK]
        for i in range(word.size):
            cell = np.int64(word[i] >> shift)
            low, high = guide[cell], guide[cell + 1]
            threshold = found[min(low, last)]  # low may be their number
            # right for one threshold in a cell at most
            part[i] = low + (high > low) * (word[i] >= threshold) - largest
            rest[i] = (high > low + 1) | (word[i] == threshold)
        for i in range(word.size):
            if rest[i]:
                cell = np.int64(word[i] >> shift)
                low, high = np.int64(guide[cell]), np.int64(guide[cell + 1])
                while low < high:
                    middle = (low + high) // 2
                    if found[middle] <= word[i]:
                        low = middle + 1
                    else:
                        high = middle
                part[i] = low - largest
                if low and found[low - 1] == word[i]:
                    if count < ties.size:
                        ties[count] = first + i
                    count += 1
    return count


def draw(weights: Weights, parameter: float, count: int, words: Words) -> NDArray[np.int64]:
    """Draw from the law with these weights, exactly.

    Args:
        weights: The law.
        words: Source of uniform 64-bit words.
    """
    table, read, drawn = _table(weights, parameter), words(count), np.empty(count, np.int64)
    ties = np.empty(_FEW, np.int64)
    found = _look_up(table.found, table.guide, read, table.largest, drawn, ties)
    if found > _FEW:  # a tie has a chance of their number over 2^64 at most
        ties = np.empty(found, np.int64)
        _look_up(table.found, table.guide, read, table.largest, drawn, ties)
    for i in ties[:found]:
        drawn[i] = _undecided(weights, parameter, int(read[i]), words) - table.largest
    return drawn


def _undecided(weights: Weights, parameter: float, word: int, words: Words) -> int:
    bits = 64
    while True:
        bits, word = bits + 64, word << 64 | int(words(1)[0])
        found = thresholds(weights, parameter, bits)[1]
        low, high = bisect_left(found, word), bisect_right(found, word)
        if low == high:  # no threshold equals the longer word
            # tails differ in length: count from the centre
            return low - (len(found) // 2) + len(thresholds(weights, parameter, 64)[1]) // 2
