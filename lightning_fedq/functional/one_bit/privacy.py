"""Privacy of a threshold coin: the worst pairs of laws, in every view.

A coin has P(1) = q in [low, high], low + high = 1, t = high - low. Two coins of a pair compare words whose
first d bits are complements of each other (CorBin). Every view's law is, in each client's q, piecewise
affine with knots at multiples of 2^-d; hockey-stick divergences are jointly convex, so the worst inputs
are vertices. The functions here return those vertices; `divergences` evaluates them.

The vertex sets are smaller than a scan of all knots, because the law has a kink in q1 only at the ends of
the cell of 1 - q2, and along lattice points it is affine: what remains is q in {low, high} and the outermost
knots between them, for any d. The tests compare with the full scan.

References:
    Salehi et al., CorBin-FL; the closed forms of its theorems are replaced by exact ones or corrected.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numba
import numpy as np
import scipy  # its parts are imported when used: `stats` takes half a second

from lightning_fedq.functional.divergences import Array, Pmf, PmfPair, erasure_pair
from lightning_fedq.functional.one_bit.threshold_coin import pair_law


def _corner_probabilities(low: float, high: float, shared_bits: int) -> tuple[float, ...]:
    """The coin's extremes and the outermost multiples of 2^-d between them."""
    cells = 2**shared_bits
    return tuple(sorted({low, high, math.ceil(cells * low) / cells, math.floor(cells * high) / cells}))


def joint_pairs(low: float, high: float, shared_bits: int | None) -> tuple[PmfPair, ...]:
    """Worst pairs of laws of both bits of a pair, when one client's input changes.

    Args:
        low: Smallest P(1).
        high: Largest P(1).
        shared_bits: d >= 1; None is unlimited.

    Returns:
        Pairs of laws of (++, +-, -+, --), both orders listed.
    """
    corners = (low, high) if shared_bits is None else _corner_probabilities(low, high, shared_bits)

    def law(first: float, second: float) -> Pmf:
        return tuple(max(mass, 0.0) for mass in pair_law(first, second, shared_bits))

    pairs = {
        (law(one, partner), law(other, partner))
        for partner in corners
        for one in corners
        for other in corners
        if one != other
    }
    return tuple(sorted(pairs))


def _known_word_law(probability: float, corners: tuple[float, ...], cells: int) -> Pmf:
    """Law of (class of the shared word, bit). Words that act alike for every corner are one class."""
    edges = sorted({0, cells} | {rounded(q * cells) for q in corners for rounded in (math.floor, math.ceil)})
    law: list[float] = []
    for start, stop in pairwise(edges):
        ones = min(max(probability * cells - start, 0.0), float(stop - start)) / cells
        law += [ones, (stop - start) / cells - ones]
    return tuple(law)


def known_word_pairs(low: float, high: float, shared_bits: int | None) -> tuple[PmfPair, ...]:
    """Worst pairs of laws of (shared bits, bit) of one client: the view of whoever knows the shared bits.

    Args:
        low: Smallest P(1).
        high: Largest P(1).
        shared_bits: d >= 1; None is unlimited, where the bit shows everything with probability t.

    Returns:
        Pairs of laws over classes of shared words and the bit, both orders listed.
    """
    if shared_bits is None:
        return (erasure_pair(high - low),)
    corners = _corner_probabilities(low, high, shared_bits)
    laws = [_known_word_law(q, corners, 2**shared_bits) for q in corners]
    return tuple((p, q) for p in laws for q in laws if p != q)


def pair_sum_pairs(low: float, high: float, shared_bits: int | None) -> tuple[PmfPair, ...]:
    """Worst pairs of laws of V1 + V2 of a pair, up to a common shift and reflection. One order listed.

    With unlimited shared bits the sum moves by one with probability t: (1 - t, t) against (1, 0). With d
    shared bits two more vertices appear, where the pair's inputs are opposite extremes and the sum is
    not certain: (e, 1 - 2e, e) against (h, 1 - h, 0), where f = frac(2^d high), e = f (1 - f) / 2^d and
    h is t or f / 2^d.

    Args:
        low: Smallest P(1).
        high: Largest P(1).
        shared_bits: d >= 1; None is unlimited.
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
    """Pmf of Binomial(num_high, high) + Binomial(num_coins - num_high, low), up to a shift.

    By the recurrence of the coefficients of (low + high z)^j (high + low z)^(n - j), low + high = 1: with
    a = low high, b = low^2 + high^2 and c = j high^2 + (n - j) low^2, the ratios r_k = p_(k+1) / p_k obey
    r_k = (c - b k) / (a (k + 1)) + (n - k + 1) / ((k + 1) r_(k-1)). Below k = c / b both terms are positive,
    so that errors shrink; above, the same is done from the other end, with zeros and ones exchanged.
    Outcomes below 1e-30 of the mode or so are left out, the rest is normalised.

    Example:
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
    """p_(k+1) / p_k for first <= k < stop <= c / b, see `coin_sum_pmf`. Exact from 0, else from a guess that
    the recurrence forgets."""
    a, b = low * high, low * low + high * high
    c = num_high * high * high + (count - num_high) * low * low
    ratios = np.empty(max(stop - first, 0))
    last = 1.0
    for k in range(first, stop):
        last = (c - b * k) / (a * (k + 1)) + ((count - k + 1) / ((k + 1) * last) if k else 0.0)
        ratios[k - first] = last
    return ratios


def coin_splits(num_coins: int, most: int = 401) -> tuple[tuple[int, int], ...]:
    """Sums of coins, as (coins, coins at `high`), that together dominate every split of `num_coins` coins.

    All splits if there are no more than `most`. Else every stretch of splits j, ..., j + w has at least j
    coins at `high` and n - j - w at `low`; adding the other w, independent of the victim, is post-processing,
    so the sum without them shows at least as much as every split of the stretch. That is a proof for all of
    them, at the price of one in `most` of the coins, or one in twice as many of epsilon.

    Example:
        >>> coin_splits(4)
        ((4, 0), (4, 1), (4, 2), (4, 3), (4, 4))
    """
    n = num_coins
    width = -(-(n + 1) // most) - 1  # a stretch holds width + 1 splits
    return tuple((n - min(width, n - j), j) for j in range(0, n + 1, width + 1))


# ---- coins that are sure to be there ------------------------------------------------------------------


def coin_count_quantile(group_sizes: tuple[int, ...], dropout_probability: float, failure: float) -> int:
    """Largest k such that fewer than k independent coins answer with probability <= failure.

    A group's coin counts as independent if exactly one of its members answers; drops are independent of the
    data and of each other, and no adversary causes them.

    Args:
        group_sizes: Sizes of the groups other than the victim's.
        dropout_probability: Chance that a client does not answer.
        failure: Probability in (0, 1).
    """
    pmf = np.ones(1)
    for size in sorted(set(group_sizes)):
        chance = size * (1.0 - dropout_probability) * dropout_probability ** (size - 1)
        count = group_sizes.count(size)
        pmf = np.convolve(pmf, scipy.stats.binom.pmf(np.arange(count + 1), count, chance))
    return _lower_quantile(pmf, failure)


def _lower_quantile(pmf: Array, failure: float) -> int:
    """Largest k with sum of pmf[:k] <= failure."""
    return min(int(np.searchsorted(pmf.cumsum(), failure, side="right")), len(pmf) - 1)
