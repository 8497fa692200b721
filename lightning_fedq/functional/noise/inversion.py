"""Exact draws from a symmetric law on the integers, by inversion on 64-bit words.

A word decides unless it equals a threshold's first 64 bits, which one draw in about 10^16 does. Then both are
extended by 64 bits until they differ. So the law is exact, no float is compared, and the work does not depend
on data: every word is compared with equally many thresholds.
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

_BLOCK = 4096
"""Draws whose words and places stay in a cache while they are looked up."""

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
        total = 2 * sum(half) - half[0]
        scale, running, found = Decimal(2) ** bits / total, Decimal(0), []
        for weight in half[:0:-1] + half:
            running += weight
            found.append(min(int(running * scale), 2**bits - 1))  # below 1, however thin the tail
    # the last one stands for everything to its right
    return len(half) - 1, found[:-1]


@lru_cache(maxsize=16)
def _word_thresholds(weights: Weights, parameter: float) -> tuple[int, NDArray[np.uint64]]:
    largest, found = thresholds(weights, parameter, 64)
    return largest, np.array(found, np.uint64)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _look_up(found: NDArray[np.uint64], words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Number of ascending thresholds at or below each word, by a binary search with all words in step."""
    longest = 1
    while 2 * longest <= found.size:
        longest *= 2
    padded = np.full(2 * longest - 1, np.uint64(2**64 - 1))
    padded[: found.size] = found
    places = np.zeros(words.size, np.int64)
    for first in range(0, words.size, _BLOCK):
        part, word = places[first : first + _BLOCK], words[first : first + _BLOCK]
        step = longest
        while step > 0:
            for i in range(word.size):
                part[i] += step * (padded[part[i] + step - 1] <= word[i])
            step //= 2
    return np.minimum(places, found.size)  # the largest word is not below the padding


def draw(weights: Weights, parameter: float, count: int, words: Words) -> NDArray[np.int64]:
    """Draw from the law with these weights, exactly.

    Args:
        weights: The law.
        parameter: Its parameter.
        count: Number of draws.
        words: Source of uniform 64-bit words.
    """
    largest, found = _word_thresholds(weights, parameter)
    drawn = words(count)
    place: NDArray[np.int64] = _look_up(found, drawn)
    for i in np.flatnonzero(found[place - 1] == drawn):
        place[i] = _undecided(weights, parameter, int(drawn[i]), words)
    return place - largest


def _undecided(weights: Weights, parameter: float, word: int, words: Words) -> int:
    bits = 64
    while True:
        bits, word = bits + 64, word << 64 | int(words(1)[0])
        found = thresholds(weights, parameter, bits)[1]
        low, high = bisect_left(found, word), bisect_right(found, word)
        if low == high:
            # tails differ in length: count from the centre
            return low - (len(found) // 2) + len(thresholds(weights, parameter, 64)[1]) // 2
