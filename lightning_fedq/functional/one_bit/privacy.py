"""Worst-case pairs of laws of a threshold coin, for each adversary's view.

A threshold coin is a randomised bit with P(1) = q in [low, high], where low + high = 1 and t = high - low.
The two clients of a pair compare words whose first d bits are complements of each other (CorBin). The law of
each adversary's view is piecewise affine in each client's q, with knots at multiples of 2^-d. Hockey-stick
divergences are jointly convex, so the worst inputs are vertices. The functions here return these vertices,
and `divergences` evaluates them.

The vertex sets are smaller than the set of all knots. In q1 the law has a kink only at the ends of the cell
of 1 - q2, and along lattice points it is affine. So only q in {low, high} and the outermost knots between
them remain, for any d. The tests compare them with a scan of all knots.

References:
    Salehi et al., CorBin-FL. The closed forms of its theorems are replaced by exact forms or corrected.
"""

from __future__ import annotations

import math
from itertools import pairwise, product

import numba
import numpy as np
import scipy  # its parts are imported when used: `stats` takes half a second

from lightning_fedq.functional.divergences import Array, Pmf, PmfPair, erasure_pair
from lightning_fedq.functional.one_bit.threshold_coin import pair_law


def _corner_probabilities(low: float, high: float, shared_bits: int) -> tuple[float, ...]:
    """Return the coin's extreme probabilities and the outermost multiples of 2^-d between them."""
    cells = 2**shared_bits
    return tuple(sorted({low, high, math.ceil(cells * low) / cells, math.floor(cells * high) / cells}))


def joint_pairs(low: float, high: float, shared_bits: int | None) -> tuple[PmfPair, ...]:
    """Return the worst pairs of laws of both bits of a pair if one client's input changes.

    Args:
        low: Smallest P(1).
        high: Largest P(1).
        shared_bits: Number d >= 1 of shared bits. None is unlimited.

    Returns:
        Pairs of laws of (++, +-, -+, --), both orders listed.
    """
    corners = (low, high) if shared_bits is None else _corner_probabilities(low, high, shared_bits)

    def law(first: float, second: float) -> Pmf:
        return tuple(max(mass, 0.0) for mass in pair_law(first, second, shared_bits))

    triples = product(corners, repeat=3)
    pairs = {(law(one, partner), law(other, partner)) for partner, one, other in triples if one != other}
    return tuple(sorted(pairs))


def known_word_pairs(low: float, high: float, shared_bits: int | None) -> tuple[PmfPair, ...]:
    """Return the worst pairs of laws of (shared bits, bit) of one client.

    This is the view of an adversary who knows the shared bits, such as the partner.

    Args:
        low: Smallest P(1).
        high: Largest P(1).
        shared_bits: Number d >= 1 of shared bits. None is unlimited, and the bit then reveals the input with
            probability t.

    Returns:
        Pairs of laws over classes of shared words and the bit, both orders listed.
    """
    if shared_bits is None:
        return (erasure_pair(high - low),)
    corners, cells = _corner_probabilities(low, high, shared_bits), 2**shared_bits
    # words that have the same effect for every corner form one class
    edges = sorted({0, cells} | {rounded(q * cells) for q in corners for rounded in (math.floor, math.ceil)})
    laws: list[Pmf] = []
    for q in corners:
        law: list[float] = []
        for start, stop in pairwise(edges):
            ones = min(max(q * cells - start, 0.0), float(stop - start)) / cells
            law += [ones, (stop - start) / cells - ones]
        laws.append(tuple(law))
    return tuple((p, q) for p in laws for q in laws if p != q)


def pair_sum_pairs(low: float, high: float, shared_bits: int | None) -> tuple[PmfPair, ...]:
    """Return the worst pairs of laws of V1 + V2, the sum of a pair's bits.

    Laws are listed up to a common shift and reflection, and in one order. With unlimited shared bits the sum
    moves by one with probability t: (1 - t, t) against (1, 0). With d shared bits there are two more
    vertices. There the pair's inputs are opposite extremes and the sum is random: (e, 1 - 2e, e) against (h,
    1 - h, 0). Here f = frac(2^d high), e = f (1 - f) / 2^d, and h is t or f / 2^d.

    Args:
        low: Smallest P(1).
        high: Largest P(1).
        shared_bits: Number d >= 1 of shared bits. None is unlimited.
    """
    t = high - low
    pairs: list[PmfPair] = [((1.0 - t, t), (1.0, 0.0))]
    if shared_bits is None:
        return tuple(pairs)
    cells = 2**shared_bits
    f = cells * high - math.floor(cells * high)
    if excess := f * (1.0 - f) / cells:
        opposite = (excess, 1.0 - 2.0 * excess, excess)
        pairs += [(opposite, (h, 1.0 - h, 0.0)) for h in (t, f / cells)]
    return tuple(pairs)


# ---- sums of coins ------------------------------------------------------------------------------------


def coin_sum_pmf(num_coins: int, num_high: int, low: float, high: float) -> Array:
    """Return the pmf of Binomial(num_high, high) + Binomial(num_coins - num_high, low), up to a shift.

    It uses a recurrence of the coefficients of (low + high z)^j (high + low z)^(n - j), with low + high = 1.
    Let a = low high, b = low^2 + high^2 and c = j high^2 + (n - j) low^2. The ratios r_k = p_(k+1) / p_k obey
    r_k = (c - b k) / (a (k + 1)) + (n - k + 1) / ((k + 1) r_(k-1)). Below k = c / b both terms are positive,
    so errors shrink. Above, the recurrence runs from the other end, with zeros and ones exchanged. Outcomes
    below about 1e-30 of the mode are left out, and the rest is normalised.

    Examples:
        >>> coin_sum_pmf(2, 1, 0.25, 0.75)
        array([0.1875, 0.625 , 0.1875])
    """
    if num_coins == 0:
        return np.ones(1)
    variance = num_coins * low * high
    mean = num_high * high + (num_coins - num_high) * low
    keep, reach = (int(factor * math.sqrt(variance) + 60.0) for factor in (12.5, 18.0))
    first, last = max(int(mean) - reach, 0), min(int(mean) + reach + 1, num_coins)
    square = high * high + low * low
    turn = (num_high * high * high + (num_coins - num_high) * low * low) / square
    middle = min(max(math.floor(turn), first), last)
    upward = _ratios(num_coins, num_high, low, high, first, middle)
    downward = _ratios(num_coins, num_coins - num_high, low, high, num_coins - last, num_coins - middle)
    logs = np.concatenate([[0.0], np.log(upward), -np.log(downward[::-1])]).cumsum()
    shown = slice(max(int(mean) - keep - first, 0), int(mean) + keep + 2 - first)
    masses: Array = np.exp(logs[shown] - logs.max())
    masses /= masses.sum()
    return masses


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _ratios(count: int, num_high: int, low: float, high: float, first: int, stop: int) -> Array:
    """Return p_(k+1) / p_k for first <= k < stop <= c / b, by the recurrence of `coin_sum_pmf`.

    If `first` is 0, the start is exact. Otherwise it is 1, and the recurrence removes the error of the start.
    """
    a, b = low * high, low * low + high * high
    c = num_high * high * high + (count - num_high) * low * low
    ratios = np.empty(max(stop - first, 0))
    last = 1.0
    for k in range(first, stop):
        last = (c - b * k) / (a * (k + 1)) + ((count - k + 1) / ((k + 1) * last) if k else 0.0)
        ratios[k - first] = last
    return ratios


def coin_splits(num_coins: int, most: int = 401) -> tuple[tuple[int, int], ...]:
    """Return sums of coins, as (coins, coins at `high`), that dominate every split of `num_coins` coins.

    A split has j coins at `high` and the others at `low`. Up to `most` splits are all returned. Beyond that,
    splits j, ..., j + w form a group, which has at least j coins at `high` and n - j - w at `low`. Adding the
    other w coins is post-processing, because they are independent of the victim. So the sum without them
    reveals at least as much as every split of the group. This costs about 1 / `most` of the coins, or
    1 / (2 `most`) of epsilon.

    Examples:
        >>> coin_splits(4)
        ((4, 0), (4, 1), (4, 2), (4, 3), (4, 4))
    """
    n = num_coins
    width = -(-(n + 1) // most) - 1  # a stretch holds width + 1 splits
    return tuple((n - min(width, n - j), j) for j in range(0, n + 1, width + 1))


# ---- number of coins that answer ----------------------------------------------------------------------


def coin_count_quantile(group_sizes: tuple[int, ...], dropout_probability: float, failure: float) -> int:
    """Return the largest k such that fewer than k independent coins answer with probability <= failure.

    A group contributes an independent coin if exactly one of its members answers. Dropouts are assumed to be
    independent of the data and of each other, and not caused by an adversary.

    Args:
        group_sizes: Sizes of the groups other than the victim's.
        dropout_probability: Probability that a client does not answer.
        failure: Probability in (0, 1).
    """
    pmf = np.ones(1)
    for size in sorted(set(group_sizes)):
        chance = size * (1.0 - dropout_probability) * dropout_probability ** (size - 1)
        count = group_sizes.count(size)
        pmf = np.convolve(pmf, scipy.stats.binom.pmf(np.arange(count + 1), count, chance))
    # the largest k with sum of pmf[:k] <= failure
    return min(int(np.searchsorted(pmf.cumsum(), failure, side="right")), len(pmf) - 1)
