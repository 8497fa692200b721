"""Unbiased one-bit quantisation with an exact randomised bit: thresholds, comparison, closed forms.

A coordinate x in [-1, 1] becomes the bit `word < threshold(x)`. `word` is uniform on 32 bits, and the
threshold is an integer. So P(bit = 1) = threshold / 2^32 exactly, and the largest likelihood ratio is the
ratio of two integers. To couple two bits, it is enough to couple their words.

References:
    Salehi et al., CorBin-FL, algorithms 1 and 2, in an integer form with an exact level. The exact laws below
    replace theorems 1 and 2 of the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal, localcontext
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.segments import normalise_segments

WORD_BITS = 32


@dataclass(frozen=True)
class CoinThresholds:
    """Thresholds of a randomised bit, with probabilities from low / 2^word_bits to high / 2^word_bits."""

    low: int
    high: int
    word_bits: int = WORD_BITS

    @property
    def epsilon(self) -> float:
        """Attained pure level ln(high / low), in nats."""
        return math.log(self.high / self.low) if self.low else math.inf

    @property
    def scale(self) -> float:
        """Output scale alpha = 2^word_bits / (high - low), >= 1: the decoded bit is +-alpha radii."""
        return 2.0**self.word_bits / (self.high - self.low)

    @property
    def probabilities(self) -> tuple[float, float]:
        """Smallest and largest probability of a 1."""
        return self.low / 2**self.word_bits, self.high / 2**self.word_bits


@lru_cache(maxsize=1024)  # the exponential in 60 digits takes 0.1 ms
def coin_thresholds(epsilon: float, word_bits: int = WORD_BITS) -> CoinThresholds:
    """Return the widest symmetric thresholds whose coin is epsilon-LDP with delta = 0.

    The lower one is ceil(2^k / (1 + e^epsilon)), computed in 60 decimal digits so that rounding
    can only make the coin more private.

    Args:
        epsilon: Local budget of one bit, > 0, in nats. `math.inf` gives a bit without privacy, whose largest
            probability is 1 - 2^-k, so that thresholds stay k-bit words.
        word_bits: Length k of the random words in bits.

    Raises:
        ValueError: If epsilon is not > 0, or so small that k bits can't express it.

    Examples:
        >>> coin_thresholds(1.0).epsilon <= 1.0
        True
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be > 0, got {epsilon}")
    if math.isinf(epsilon):
        return CoinThresholds(0, 2**word_bits - 1, word_bits)
    with localcontext() as context:
        context.prec = 60
        level = Decimal(min(epsilon, 1e3))  # from 23 on, the lower threshold is 1 for 32-bit words
        low = int((Decimal(2**word_bits) / (1 + level.exp())).to_integral_value(ROUND_CEILING))
    if 2 * low >= 2**word_bits:
        raise ValueError(
            f"epsilon = {epsilon} can't be expressed by a coin of {word_bits} bits. "
            f"Choose epsilon >= {2.0 ** (3 - word_bits):.1e}."
        )
    return CoinThresholds(low, 2**word_bits - low, word_bits)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def one_bit_quantize_rows(
    updates: NDArray[np.float32],
    rows: NDArray[np.int64],
    first: int,
    words: NDArray[np.uint32],
    ranges: NDArray[np.float64],
    low: int,
    high: int,
    bits: NDArray[np.uint8],
) -> int:
    """Quantise a stretch of some rows in one pass, a bit for each word.

    Args:
        updates: Updates, `(num_rows, dim)`, C-contiguous.
        rows: Numbers of the rows to quantise, `(k,)`.
        first: First coordinate of the stretch.
        words: Uniform 32-bit words, one for each coordinate of the stretch, `(k, n)`, C-contiguous.
        ranges: End, centre and inverse radius of each segment, `(3, segments)`.
        low: Smallest threshold.
        high: Largest threshold, < 2^32.
        bits: Quantised bits, `(num_rows, dim)`, C-contiguous. The stretch is overwritten.

    Returns:
        Number of clipped coordinates.
    """
    half, clipped, end, units = 0.5 * (high - low), 0, first + words.shape[1], np.empty(words.shape[1])
    for i in range(rows.size):
        clipped += normalise_segments(updates[rows[i]], first, ranges, False, units)
        drawn, out = words[i], bits[rows[i], first:end]
        for j in range(units.size):
            # the argument of the cast is >= 0.5, so truncation rounds down
            out[j] = drawn[j] < np.uint32(low + np.int64((units[j] + 1.0) * half + 0.5))
    return clipped


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def splice_words(words: NDArray[np.uint32], shared: NDArray[Any], shift: int, mask: int, flip: int) -> None:
    """Replace the masked bits of private words by those of `(shared << shift) ^ flip`, in place.

    Args:
        words: Uniform words, `(n,)`.
        shared: Unsigned integers of any width, `(n,)`.
        shift: Position to which the lowest bit of a shared integer goes.
        mask: Bits of the words to replace.
        flip: Bits of the shifted integers to invert first.
    """
    high, inverted, up = np.uint32(mask), np.uint32(flip), np.uint32(shift)
    for j in range(words.size):
        words[j] = (words[j] & ~high) | (((np.uint32(shared[j]) << up) ^ inverted) & high)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def splice_rows(
    words: NDArray[np.uint32], shared: NDArray[Any], places: NDArray[np.int64], shift: int, mask: int
) -> None:
    """Splice the shared bits of each row's pair into its words, in place. Invert them for the second member.

    Args:
        words: Uniform words, `(k, n)`.
        shared: Unsigned integers of any width for each pair, `(pairs, n)`.
        places: Each row's pair, or -1 for an unpaired client, and its rank in the pair, `(k, 2)`.
        shift: Position to which the lowest bit of a shared integer goes.
        mask: Bits of the words to replace.
    """
    for row in range(len(words)):
        if places[row, 0] >= 0:
            splice_words(words[row], shared[places[row, 0]], shift, mask, mask if places[row, 1] else 0)


def stratify_words(
    words: NDArray[np.uint32], offsets: NDArray[np.uint32], rank: int, strata: int
) -> NDArray[np.uint32]:
    """Move private words into strata.

    The result is ((rank + offset) mod strata 2^32 + word) / strata, rounded down. It is uniform if the offset
    and the word are.

    Args:
        words: Private words, `(n,)`.
        offsets: Public offset of each coordinate, below `strata`.
        rank: Rank of the client in its group.
        strata: Number of strata, the size of the group.
    """
    stratum = (offsets.astype(np.uint64) + np.uint64(rank)) % np.uint64(strata)
    return (((stratum << np.uint64(32)) | words) // np.uint64(strata)).astype(np.uint32)


# ---- closed forms, all in float64, for one coordinate -------------------------------------------------


def pair_excess(first: float, second: float, shared_bits: int | None) -> float:
    """Return the excess of P++ and of P-- of a pair over the minimum that the marginals allow.

    Let K = 2^d, A = floor(K q1) and B = floor(K (1 - q2)), with fractional parts f and g. The excess is
    1{A = B} min(f, g) (1 - max(f, g)) / K. It is 0 with unlimited shared bits.
    """
    if shared_bits is None:
        return 0.0
    cells = 1 << shared_bits
    a, b = cells * first, cells * (1.0 - second)
    if math.floor(a) != math.floor(b):
        return 0.0
    f, g = a - math.floor(a), b - math.floor(b)
    return min(f, g) * (1.0 - max(f, g)) / cells


def pair_law(first: float, second: float, shared_bits: int | None) -> tuple[float, float, float, float]:
    """Return the joint law (P++, P+-, P-+, P--) of the two bits of a pair.

    Args:
        first: P(bit = 1) of the first client.
        second: P(bit = 1) of the second client.
        shared_bits: Number d >= 0 of shared bits, or None for unlimited.
    """
    both = max(first + second - 1.0, 0.0) + pair_excess(first, second, shared_bits)
    return both, first - both, second - both, 1.0 - first - second + both


def worst_pair_mse(scale: float, shared_bits: int | None) -> float:
    """Return the largest mean squared error of a pair's decoded sum over all inputs, in units of radius^2.

    It is 2 alpha^2 without shared bits. For every d >= 1 it is 4 (alpha - 1) if alpha >= 2, else alpha^2.

    Examples:
        >>> worst_pair_mse(2.0, None)
        4.0
    """
    if shared_bits == 0:
        return 2.0 * scale**2
    return 4.0 * (scale - 1.0) if scale >= 2.0 else scale**2


def worst_group_variance(size: int, span: float) -> float:
    """Return a bound on the variance of a group's number of ones, for probabilities within a `span`.

    Strata never make two bits agree more often than independent bits, so size / 4 is a bound. The second term
    of the formula is at most 1/4. The first term is size^2 / (2 (size - 1)) E|D|(1 - |D|), where D is the
    difference of two independent draws from the empirical law of the probabilities. Over all laws on the
    interval, the expectation is largest for density 1 inside and equal atoms at the ends. It is then
    W = t/2 - t^2/2 + t^3/6 with t = span. For two clients the exact bound of a pair is t (1 - t) or 1/4.

    Examples:
        >>> worst_group_variance(3, 1.0)
        0.625
    """
    if size == 1:
        return 0.25
    if size == 2:
        return span * (1.0 - span) if span <= 0.5 else 0.25
    widest = span / 2.0 - span**2 / 2.0 + span**3 / 6.0
    return min(size / 4.0, size**2 * widest / (2.0 * (size - 1)) + 0.25)
