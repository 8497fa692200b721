"""Coins of a pair that share one secret bit and still randomise each other's.

A coordinate x in [-1, 1] is sent as randomised response of its sign with chance |x|; with chance 1 - |x|
there is nothing to say, and what is sent is the pair's secret bit, complemented for the second member, each
flipped privately with chance nu. Each bit alone is the one-bit quantiser's coin. Given the partner's bit, the
secret is still open up to the odds hi / lo, provided that 2 nu (1 - nu) >= lo: so both bits together are as
private as one.

Everything is an integer threshold on private 32-bit words. One unit of rounding in a threshold, and one in
the partner's, move the posterior of a bit by at most 2 units of 2^-32; `inner_coin` keeps that distance from
the level that is claimed.

References:
    Derived for this project; the linear programme over all couplings of two epsilon-DP bits gives the same
    error at x = 0, without the flips. `pair_mse` is its closed form.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.one_bit.threshold_coin import CoinThresholds

_MARGIN = 2
"""Units of 2^-word_bits between the coin that is tossed and the level that is claimed."""


def inner_coin(coin: CoinThresholds) -> CoinThresholds:
    """The coin that a pair tosses so that `coin`'s level holds for both bits together, rounding included.

    Raises:
        ValueError: If the level is so small that nothing is left.
    """
    inner = CoinThresholds(coin.low + _MARGIN, coin.high - _MARGIN, coin.word_bits)
    if inner.low >= inner.high:
        raise ValueError(
            f"epsilon = {coin.epsilon} can't be expressed by a pair of {coin.word_bits}-bit coins; "
            f"choose epsilon >= {2.0 ** (5 - coin.word_bits):.1e}"
        )
    return inner


def flip_threshold(coin: CoinThresholds) -> int:
    """Smallest N such that nu = N / 2^word_bits has 2 nu (1 - nu) >= lo, the coin's smallest probability.

    Two bits that are each other's complement, each flipped with chance nu, then differ with chance 1 - 2 nu
    (1 - nu) <= hi.
    """
    whole = 1 << coin.word_bits
    target = coin.low * whole
    # the smaller root of 2 N (whole - N) = target, less one; exact in integers
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
    """Quantise a stretch of one row in one pass. A bit is a word below its threshold.

    Args:
        update: `(dim,)`.
        first: First coordinate of the stretch.
        words: `(n,)` uniform 32-bit words, one for each coordinate of the stretch.
        secret: `(n,)` the member's version of the secret, 0 or 1.
        ranges: `(3, segments)`: where each segment ends, its centre, its radius.
        low: Smallest threshold, of the inner coin.
        high: Largest threshold, below 2^32.
        flip: `flip_threshold` of the inner coin.
        whole: 2 to the number of the coin's bits, which are those of a word.
        bits: `(dim,)`; the stretch is overwritten.

    Returns:
        How many coordinates were clipped.
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
        drawn, told = words[start - first : stop - first], secret[start - first : stop - first]
        for j in range(values.size):
            x = (np.float64(values[j]) - center) * inverse
            clipped += (x > 1.0) | (x < -1.0)
            x = min(max(x, -1.0), 1.0)
            size = abs(x)
            says = lowest + span * np.float64(x > 0.0)
            idle = often + apart * np.float64(told[j])
            out[j] = drawn[j] < np.uint32(np.int64(size * says + (1.0 - size) * idle + 0.5))
        start = stop
    return clipped


def pair_mse(first: float, second: float, radius: float, coin: CoinThresholds) -> float:
    """Mean squared error of a pair's decoded sum: r^2 [2 alpha^2 - 2 alpha (1-|x1|)(1-|x2|) - x1^2 - x2^2].

    The secret bit costs nothing more than the flips that hide it, so this is the error of the best coupling.

    Args:
        first: One member's value, minus the centre, within the radius.
        second: The other's.
        radius: Half-width of the range.
        coin: The coin that is tossed.
    """
    x1, x2, alpha = first / radius, second / radius, coin.scale
    together = 2.0 * alpha * (1.0 - abs(x1)) * (1.0 - abs(x2))
    return radius**2 * (2.0 * alpha**2 - together - x1**2 - x2**2)
