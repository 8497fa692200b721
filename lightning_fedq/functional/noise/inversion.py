"""Exact draws from a symmetric law on the integers, by inversion of 64-bit words.

A draw is the number of thresholds below a uniform word. A word decides unless it equals the first 64 bits of
a threshold, which happens in one draw in about 10^16. Then both are extended by 64 bits until they differ. So
the law is exact, and no float is compared. The work depends only on the words, not on data. The leading bits
of a word select a cell of a guide table, and most cells contain at most one threshold.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import lru_cache

import numba
import numpy as np
from numpy.typing import NDArray

_BLOCK = 1024
"""Draws per block, so that words and values stay in a cache."""
_GUIDE_BITS = 16
_FEW = 16

Words = Callable[[int], NDArray[np.uint64]]
Weights = Callable[[float, int], list[Decimal]]
"""Function (parameter, bits) that returns the weights of 0, 1, 2, ..., K of a law, up to a common factor.

Weights are exact in the current decimal context. K is so large that the tail is below 2^-(bits + 20) of the
first weight.
"""


@lru_cache(maxsize=32)
def thresholds(weights: Weights, parameter: float, bits: int) -> tuple[int, list[int]]:
    """Return the largest value K of the law and the thresholds floor(2^bits P(X <= z)), z = -K, ..., K - 1.

    K is far in the tail. The computation has 60 guard bits.
    """
    with localcontext() as context:
        context.prec = math.ceil((bits + 60) * math.log10(2.0)) + 10
        half = weights(parameter, bits)
        total = 2 * sum(half) - half[0]  # the weight of 0 counts once, all others twice
        scale, running, levels = Decimal(2) ** bits / total, Decimal(0), []
        for weight in half[:0:-1] + half:  # from -K to K
            running += weight
            levels.append(min(int(running * scale), 2**bits - 1))  # stays below 1 in thin tails
    # words above the last threshold give K, so K itself needs no threshold
    return len(half) - 1, levels[:-1]


@lru_cache(maxsize=16)
def _table(weights: Weights, parameter: float) -> tuple[int, NDArray[np.uint64], NDArray[np.int32]]:
    """Return the largest value of a law, its thresholds, and a guide table for the search.

    The `(2 largest,)` thresholds ascend. The `(2^bits + 1,)` guides are the number of thresholds below each
    multiple of 2^(64 - bits), then the number of all thresholds.
    """
    largest, levels = thresholds(weights, parameter, 64)
    words = np.array(levels, np.uint64)
    bits = min(max(2 * len(levels).bit_length() - 3, 8), _GUIDE_BITS)
    guide = np.searchsorted(words, np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits), side="left")
    return largest, words, np.append(guide, len(words)).astype(np.int32)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _look_up(
    found: NDArray[np.uint64],
    guide: NDArray[np.int32],
    words: NDArray[np.uint64],
    largest: int,
    drawn: NDArray[np.int64],
    ties: NDArray[np.int64],
) -> int:
    """Fill in the law's values: the number of thresholds at or below each word, minus `largest`.

    Returns:
        Number of words that equal a threshold. Their places are written to `ties`, as many as fit.
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
            threshold = found[min(low, last)]  # low may be the number of all thresholds
            # this is right if the cell has at most one threshold
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
    """Draw exactly from the law with these weights.

    Args:
        weights: Function that returns the weights of the law.
        parameter: Parameter of the law.
        count: Number of draws.
        words: Source of uniform 64-bit words.
    """
    largest, found, guide = _table(weights, parameter)
    read, drawn, ties = words(count), np.empty(count, np.int64), np.empty(_FEW, np.int64)
    num_ties = _look_up(found, guide, read, largest, drawn, ties)
    if num_ties > _FEW:  # rare: a word is a tie with probability at most (number of thresholds) / 2^64
        ties = np.empty(num_ties, np.int64)
        _look_up(found, guide, read, largest, drawn, ties)
    for i in ties[:num_ties]:
        drawn[i] = _undecided(weights, parameter, int(read[i]), words) - largest
    return drawn


def _undecided(weights: Weights, parameter: float, word: int, words: Words) -> int:
    """Extend a word that equals a threshold until it differs from all, and return the number below it."""
    bits = 64
    while True:
        bits, word = bits + 64, word << 64 | int(words(1)[0])
        levels = thresholds(weights, parameter, bits)[1]
        low, high = bisect_left(levels, word), bisect_right(levels, word)
        if low == high:  # no threshold equals the longer word
            # longer thresholds have longer tails, so count from the centre
            return low - (len(levels) // 2) + len(thresholds(weights, parameter, 64)[1]) // 2
