"""Audit, layer A: every random word of a short coin, counted, against the specification, as exact fractions.

Equality is asked for, not only a bound: safe rounding hides a `<=` for a `<` at 32 bits, where no simulation
could see it either, while at 6 or 8 bits one wrong count shows. What is enumerated is the shipped comparison
and the shipped splicing of shared and private bits; only the word is shorter.
"""

import math
from fractions import Fraction

import numpy as np
import torch

from lightning_fedq.functional.one_bit.threshold_coin import coin_thresholds, splice_words
from tests.functional.one_bit.oracle import one_bit_quantize


def _bits(quantize, words, x, coin):
    drawn = torch.from_numpy(words.astype(np.int64))
    one = torch.ones(1)
    return quantize(torch.full((len(words),), x), drawn, 0 * one, one, coin).numpy()


def _ones_given_shared(quantize, splice, x, coin, shared_bits, second):
    """For every value of the shared bits, how many of the private completions give a one."""
    size, low = 2**coin.word_bits, coin.word_bits - shared_bits
    mask = size - 2**low
    shared = np.repeat(np.arange(2**shared_bits, dtype=np.uint32), 2**low)
    words = np.tile(np.arange(2**low, dtype=np.uint32), 2**shared_bits)
    splice(words, shared, low, mask, mask if second else 0)
    return [int(n) for n in _bits(quantize, words, x, coin).reshape(2**shared_bits, -1).sum(1)]


def specified_pair_law(first, second, shared_bits):
    """The specification's joint law (++, +-, -+, --) of a pair, in exact fractions."""
    cells = 2**shared_bits
    a, b = cells * first, cells * (1 - second)
    f, g = a - math.floor(a), b - math.floor(b)
    excess = min(f, g) * (1 - max(f, g)) / cells if math.floor(a) == math.floor(b) else Fraction(0)
    both = max(first + second - 1, Fraction(0)) + excess
    return both, first - both, second - both, 1 - first - second + both


def enumerate_coin(epsilon, word_bits=8, *, quantize=one_bit_quantize):
    """Count every word of one coin for every threshold. Return what differs from the specification.

    Args:
        epsilon: Claimed level of one bit.
        word_bits: Length of the words.
        quantize: The comparison, with `one_bit_quantize`'s arguments.
    """
    coin, size = coin_thresholds(epsilon, word_bits), 2**word_bits
    words = np.arange(size, dtype=np.uint32)
    differs, counts = [], []
    for threshold, x in _inputs(coin):
        ones = int(_bits(quantize, words, x, coin).sum())
        counts.append(ones)
        if ones != threshold:
            differs.append(f"P(1) at threshold {threshold} is {ones}/{size}")
    if min(counts) <= 0 or max(counts) >= size:
        return [*differs, "an input decides the bit"]
    # of a one, and of a zero
    level = max(math.log(max(counts) / min(counts)), math.log((size - min(counts)) / (size - max(counts))))
    if level > epsilon:
        differs.append(f"the attained level {level:.6f} exceeds {epsilon}")
    return differs


def enumerate_pair(epsilon, shared_bits, word_bits=6, *, quantize=one_bit_quantize, splice=splice_words):
    """Count all shared and private bits of a pair, in the joint view and with the shared bits known.

    Args:
        epsilon: Claimed level of one bit.
        shared_bits: d, 0 to word_bits.
        word_bits: Length of the words.
        quantize: The comparison.
        splice: Puts shared bits into private words, with `splice_words`'s arguments.
    """
    coin, size, cells = coin_thresholds(epsilon, word_bits), 2**word_bits, 2**shared_bits
    inside = size // cells
    differs = []
    given = {
        second: {
            k: _ones_given_shared(quantize, splice, x, coin, shared_bits, second) for k, x in _inputs(coin)
        }
        for second in (False, True)
    }
    for k, counts in given[False].items():
        expected = [min(max(k - z * inside, 0), inside) for z in range(cells)]
        if counts != expected:
            differs.append(f"given the shared bits, the coin at threshold {k} is wrong")
    for k1, ones1 in given[False].items():
        for k2, ones2 in given[True].items():
            both = Fraction(sum(a * b for a, b in zip(ones1, ones2, strict=True)), cells * inside**2)
            one, other = (Fraction(sum(ones), size) for ones in (ones1, ones2))
            law = (both, one - both, other - both, 1 - one - other + both)
            if law != specified_pair_law(Fraction(k1, size), Fraction(k2, size), shared_bits):
                differs.append(f"the joint law at thresholds {k1}, {k2} is {law}")
    return differs


def _inputs(coin):
    """Every threshold and the normalised input that maps to it."""
    span = coin.high - coin.low
    return [(k, 2.0 * (k - coin.low) / span - 1.0) for k in range(coin.low, coin.high + 1)]
