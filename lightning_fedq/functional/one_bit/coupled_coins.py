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


def coupled_quantize(
    units: NDArray[np.float64], words: NDArray[np.uint32], secret: NDArray[np.uint8], coin: CoinThresholds
) -> NDArray[np.bool_]:
    """Quantise values of one member of a pair. A bit is 1 if its word is below its threshold.

    Args:
        units: Values in [-1, 1], in units of the radius, `(n,)`.
        words: Uniform 32-bit words, `(n,)`.
        secret: The member's secret bits, 0 or 1, complemented for the second member, `(n,)`.
        coin: Thresholds of the inner coin.
    """
    size, flip = np.abs(units), flip_threshold(coin)
    response = coin.low + (coin.high - coin.low) * (units > 0.0).astype(np.float64)
    flipped = flip + ((1 << coin.word_bits) - 2 * flip) * secret.astype(np.float64)
    return words < (size * response + (1.0 - size) * flipped + 0.5).astype(np.int64)
