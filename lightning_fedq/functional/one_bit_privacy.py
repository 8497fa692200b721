"""What one bit gives away: the worst pairs of laws of a threshold coin, in every view, and closed forms.

A coin has P(1) = q in [low, high], low + high = 1, t = high - low. Two coins of a pair compare words whose
first d bits are complements of each other (CorBin). Every view's law is, in each client's q, piecewise
affine with knots at multiples of 2^-d; hockey-stick divergences are jointly convex, so the worst inputs
are vertices. The functions here return those vertices and evaluate divergences; they hold no state.

The vertex sets are smaller than a scan of all knots, because the law has a kink in q1 only at the ends of
the cell of 1 - q2, and along lattice points it is affine: what remains is q in {low, high} and the outermost
knots between them, for any d. The tests compare with the full scan.

References:
    Salehi et al., CorBin-FL; the closed forms of its theorems are replaced by exact ones or corrected.
    Agarwal et al., cpSGD, NeurIPS 2018, Theorem 1 (`blanket_epsilon`).
"""

from __future__ import annotations

import math
from itertools import pairwise

from lightning_fedq.functional.one_bit import pair_law

Pmf = tuple[float, ...]
PmfPair = tuple[Pmf, Pmf]


def randomized_response_pair(low: float, high: float) -> PmfPair:
    """Laws of one bit at the two extreme inputs; the reverse order is its mirror image."""
    return (high, low), (low, high)


def erasure_pair(mass: float) -> PmfPair:
    """The pair that shows everything with probability `mass` and nothing otherwise.

    It dominates every view of a threshold coin with t <= mass: the words do not depend on the input, and
    the bit changes only where the word falls between two thresholds (monotone coupling).
    """
    return (1.0 - mass, mass, 0.0), (1.0 - mass, 0.0, mass)


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
    """Law of (class of the shared word, bit); words that act alike for every corner are one class."""
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
    """Worst pairs of laws of V1 + V2 of a pair, up to a common shift and reflection; one order listed.

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
