"""Randomised bits of a pair of clients that share one secret bit, so that their errors partly cancel.

With probability |x|, a client sends a coordinate x in [-1, 1] as randomised response of its sign. Otherwise
it sends the pair's secret bit, which the second member complements. Each client then flips this bit privately
with probability nu. A single bit has the same law as in the one-bit quantiser. Given the partner's bit, the
odds of the secret bit are at most hi / lo, provided that 2 nu (1 - nu) >= lo. So both bits together are as
private as one bit.

All probabilities are integer thresholds on private 32-bit words. One unit of rounding in a threshold, and one
in the partner's threshold, move the posterior of a bit by at most 2 units of 2^-32. `inner_coin` keeps this
distance from the claimed level.

References:
    Derived for this project. The linear programme over all couplings of two epsilon-DP bits gives the same
    error at x = 0, without the flips. `pair_mse` is the closed form of the error.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.one_bit.threshold_coin import CoinThresholds

_MARGIN = 2
"""Distance between the thresholds that are used and those of the claimed level, in units of 2^-word_bits."""


def inner_coin(coin: CoinThresholds) -> CoinThresholds:
    """Return the thresholds with which the level of `coin` holds for both bits of a pair, with rounding.

    Raises:
        ValueError: If epsilon is so small that the lower threshold would reach the upper one.
    """
    inner = CoinThresholds(coin.low + _MARGIN, coin.high - _MARGIN, coin.word_bits)
    if inner.low >= inner.high:
        raise ValueError(
            f"epsilon = {coin.epsilon} can't be expressed by a pair of {coin.word_bits}-bit coins. "
            f"Choose epsilon >= {2.0 ** (5 - coin.word_bits):.1e}."
        )
    return inner


def flip_threshold(coin: CoinThresholds) -> int:
    """Return the threshold N of the flip probability nu = N / 2^word_bits.

    N is the smallest integer with 2 nu (1 - nu) >= lo, the coin's smallest probability. Two complementary
    bits that are each flipped with probability nu then differ with probability 1 - 2 nu (1 - nu) <= hi.
    """
    whole = 1 << coin.word_bits
    target = coin.low * whole
    # start just below the smaller root of 2 N (whole - N) = target, in exact integers
    flip = max((whole - math.isqrt(whole * whole - 2 * target)) // 2 - 1, 0)
    while 2 * flip * (whole - flip) < target:
        flip += 1
    return flip


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def coupled_quantize_row(
    update: NDArray[np.float32],
    first: int,
    words: NDArray[np.uint32],
    secret: NDArray[np.uint8],
    ranges: NDArray[np.float64],
    low: int,
    high: int,
    flip: int,
    whole: int,
    bits: NDArray[np.uint8],
) -> int:
    """Quantise a stretch of one row in one pass. A bit is 1 if its word is below its threshold.

    Args:
        update: Row of updates, `(dim,)`.
        first: First coordinate of the stretch.
        words: Uniform 32-bit words, one for each coordinate of the stretch, `(n,)`.
        secret: The member's secret bits, 0 or 1, complemented for the second member, `(n,)`.
        ranges: End, centre and radius of each segment, `(3, segments)`.
        low: Smallest threshold of the inner coin.
        high: Largest threshold of the inner coin, below 2^32.
        flip: `flip_threshold` of the inner coin.
        whole: 2^word_bits.
        bits: Quantised bits, `(dim,)`. The stretch is overwritten.

    Returns:
        Number of clipped coordinates.
    """
    start, clipped, end = first, 0, first + words.size
    lowest, span = np.float64(low), np.float64(high - low)
    often, apart = np.float64(flip), np.float64(whole - 2 * flip)
    for segment in range(ranges.shape[1]):
        stop = min(int(ranges[0, segment]), end)
        if start >= stop:
            continue
        center, inverse = ranges[1, segment], 1.0 / ranges[2, segment]
        values, out = update[start:stop], bits[start:stop]
        drawn, shared = words[start - first : stop - first], secret[start - first : stop - first]
        for j in range(values.size):
            x = (np.float64(values[j]) - center) * inverse
            clipped += (x > 1.0) | (x < -1.0)
            x = min(max(x, -1.0), 1.0)
            size = abs(x)
            response = lowest + span * np.float64(x > 0.0)
            flipped = often + apart * np.float64(shared[j])
            out[j] = drawn[j] < np.uint32(np.int64(size * response + (1.0 - size) * flipped + 0.5))
        start = stop
    return clipped


def pair_mse(first: float, second: float, radius: float, coin: CoinThresholds) -> float:
    """Return the mean squared error of a pair's decoded sum.

    It is r^2 [2 alpha^2 - 2 alpha (1 - |x1|)(1 - |x2|) - x1^2 - x2^2], which is the error of the best
    coupling.

    Args:
        first: First member's value minus the centre, within the radius.
        second: Second member's value minus the centre, within the radius.
        radius: Half-width of the range.
        coin: Thresholds that are used.
    """
    x1, x2, alpha = first / radius, second / radius, coin.scale
    together = 2.0 * alpha * (1.0 - abs(x1)) * (1.0 - abs(x2))
    return radius**2 * (2.0 * alpha**2 - together - x1**2 - x2**2)
