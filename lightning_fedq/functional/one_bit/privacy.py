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

import numba
import numpy as np
import scipy  # its parts are imported when used: `stats` takes half a second
from numpy.typing import NDArray

from lightning_fedq.functional.one_bit.threshold_coin import pair_law

Array = NDArray[np.float64]
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


# ---- divergences --------------------------------------------------------------------------------------


def hockey_stick(p: Array, q: Array, epsilons: Array) -> Array:
    """H_eps(P || Q) = sum (P - e^eps Q)_+ at every epsilon, exact for the pmfs given.

    Summed as P (1 - e^(eps - loss)) from the largest loss down, without a difference of large sums, so that
    the error is relative to the divergence: a billion copies of a loss of 1e-4 need that.

    Args:
        p: `(k,)` pmf.
        q: `(k,)` pmf on the same outcomes; where it is 0 and p is not, the loss is infinite.
        epsilons: `(m,)` finite real numbers in ascending order, in nats.

    Returns:
        `(m,)` float64 in [0, 1].
    """
    shown = p > 0
    p, q = p[shown], q[shown]
    certain = q <= 0
    infinite = float(p[certain].sum())
    p, q = p[~certain], q[~certain]
    losses = np.log(p / q)
    order = losses.argsort()
    curve: Array = np.empty(len(epsilons))
    _descend(p[order], losses[order], np.asarray(epsilons, np.float64), curve)
    return curve + infinite


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _descend(masses: Array, losses: Array, epsilons: Array, curve: Array) -> None:
    """curve[k] = sum over losses > epsilons[k] of masses (1 - e^(epsilon - loss)); all ascending."""
    mass, value, place = 0.0, 0.0, len(losses) - 1
    for k in range(len(epsilons) - 1, -1, -1):
        if k + 1 < len(epsilons):
            shrink = -np.expm1(epsilons[k] - epsilons[k + 1])
            value += shrink * (mass - value)
        while place >= 0 and losses[place] > epsilons[k]:
            value -= masses[place] * np.expm1(epsilons[k] - losses[place])
            mass += masses[place]
            place -= 1
        curve[k] = value


def binomial_window(count: int, probability: float) -> tuple[int, Array]:
    """Pmf of Binomial(count, probability) where it exceeds 1e-30 of its mode, normalised.

    Ratios of neighbours come from the recurrence, so they are exact to a few ulps for any count.

    Returns:
        The first outcome kept, and the masses from there on.
    """
    if count == 0:
        return 0, np.ones(1)
    mode = min(int((count + 1) * probability), count)
    reach = int(12.5 * math.sqrt(count * probability * (1.0 - probability)) + 60)
    start, stop = max(mode - reach, 0), min(mode + reach, count)
    steps = np.arange(start, stop, dtype=np.float64)
    ratios = np.log(count - steps) - np.log(steps + 1.0) + math.log(probability / (1.0 - probability))
    logs = np.concatenate([[0.0], ratios.cumsum()])
    masses: Array = np.exp(logs - logs[mode - start])
    keep = np.flatnonzero(masses > 1e-30)
    masses = masses[keep[0] : keep[-1] + 1]
    return start + int(keep[0]), masses / masses.sum()


def coin_sum_pmf(num_coins: int, num_high: int, low: float, high: float) -> Array:
    """Pmf of Binomial(num_high, high) + Binomial(num_coins - num_high, low), up to a shift.

    By the recurrence of the coefficients of (low + high z)^j (high + low z)^(n - j), low + high = 1: with
    a = low high, b = low^2 + high^2 and c = j high^2 + (n - j) low^2, the ratios r_k = p_(k+1) / p_k obey
    r_k = (c - b k) / (a (k + 1)) + (n - k + 1) / ((k + 1) r_(k-1)). Below k = c / b both terms are positive,
    so that errors shrink; above, the same is done from the other end, with zeros and ones exchanged.
    Outcomes below 1e-30 of the mode or so are left out, the rest is normalised.
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
    """p_(k+1) / p_k for first <= k < stop <= c / b, see `coin_sum_pmf`; exact from 0, else from a guess that
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
    """
    n = num_coins
    width = -(-(n + 1) // most) - 1  # a stretch holds width + 1 splits
    return tuple((n - min(width, n - j), j) for j in range(0, n + 1, width + 1))


# ---- closed forms -------------------------------------------------------------------------------------


def randomized_response_delta(epsilon_bit: float, count: int, epsilon: float) -> float:
    """Exact delta of `count` randomised responses of level `epsilon_bit` each, at `epsilon`.

    The total loss is (2 X - count) epsilon_bit, X ~ Binomial(count, high); the worst outcomes are those
    with X >= k0 = floor((epsilon / epsilon_bit + count) / 2) + 1.
    """
    k = math.floor((epsilon / epsilon_bit + count) / 2.0)
    high = 1.0 / (1.0 + math.exp(-epsilon_bit))
    upper = float(scipy.stats.binom.logsf(k, count, high))
    lower = float(scipy.stats.binom.logsf(k, count, 1.0 - high))
    if upper == -math.inf:
        return 0.0
    gap = epsilon + lower - upper
    return max(-math.exp(upper) * math.expm1(gap), 0.0) if gap < 0.0 else 0.0


def randomized_response_epsilon(epsilon_bit: float, count: int, delta: float) -> float:
    """Smallest epsilon >= 0 at which `count` randomised responses are (epsilon, delta)-DP, rounded up.

    Exact composition by bisection, to 1e-12 relative.
    """
    low, high = 0.0, count * epsilon_bit
    if randomized_response_delta(epsilon_bit, count, 0.0) <= delta:
        return 0.0
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        if randomized_response_delta(epsilon_bit, count, middle) > delta:
            low = middle
        else:
            high = middle
    return high


def randomized_response_rdp(epsilon_bit: float, order: float) -> float:
    """Renyi divergence of the given order > 1 of one randomised response."""
    half = 0.5 * epsilon_bit
    # ln(hi^a lo^(1-a) + lo^a hi^(1-a)) with hi / lo = e^eps is ln(cosh((a - 1/2) eps) / cosh(eps / 2))
    return (_log_cosh((2.0 * order - 1.0) * half) - _log_cosh(half)) / (order - 1.0)


def _log_cosh(x: float) -> float:
    return abs(x) + math.log1p(math.exp(-2.0 * abs(x))) - math.log(2.0)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """delta of mu-Gaussian DP at epsilon: Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)."""
    upper = float(scipy.special.log_ndtr(mu / 2.0 - epsilon / mu))
    lower = float(scipy.special.log_ndtr(-mu / 2.0 - epsilon / mu)) + epsilon
    return math.exp(upper) * -math.expm1(lower - upper) if lower < upper else 0.0


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon >= 0 at which mu-Gaussian DP is (epsilon, delta)-DP, by bisection, rounded up."""
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, mu * mu / 2.0 + mu * (math.sqrt(-2.0 * math.log(delta)) + 1.0)
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        if gaussian_delta(mu, middle) > delta:
            low = middle
        else:
            high = middle
    return high


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Largest mu whose Gaussian DP reaches `epsilon` at `delta`, rounded down."""
    low, high = 1e-9, 50.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if gaussian_epsilon(middle, delta) <= epsilon else (low, middle)
    return low


def blanket_epsilon(
    low: float, num_coins: int, dim: int, delta: float, failure: float
) -> tuple[float, int] | None:
    """Certificate in closed form for one round behind a sum: (epsilon, fair coins k), or None out of range.

    A coin with q in [low, high] is a fair coin with probability 2 low whatever its input (the blanket), so in
    every coordinate at least k of `num_coins` coins are fair, except with probability `failure`; k fair coins
    are the binomial mechanism of cpSGD with p = 1/2. Total delta is `delta + failure`. Covers any change of
    the bits of one client; loose, and linear in dim.

    Args:
        low: Smallest probability of a one.
        num_coins: Independent coins besides the victim's.
        dim: Coordinates of one round.
        delta: For the binomial mechanism.
        failure: For the event that some coordinate has fewer than k fair coins.
    """
    k = int(scipy.stats.binom.ppf(failure / dim, num_coins, 2.0 * low))
    while k > 0 and scipy.stats.binom.cdf(k - 1, num_coins, 2.0 * low) > failure / dim:
        k -= 1
    if k / 4.0 < max(23.0 * math.log(10.0 * dim / delta), 2.0):
        return None
    log_ten = math.log(10.0 / delta)
    epsilon = math.sqrt(8.0 * dim * math.log(1.25 / delta) / k)
    epsilon += 4.0 * (1.75 * math.sqrt(2.0 * dim * log_ten) + dim / 3.0) / (k * (1.0 - delta / 10.0))
    epsilon += 8.0 * (math.log(1.25 / delta) + math.log(20.0 * dim / delta) * log_ten) / (3.0 * k)
    return epsilon, k


def common_coin_epsilon(epsilon_bit: float, num_coins: int, dim: int, delta: float) -> float | None:
    """Theorem 3 of CorBin-FL with its constants corrected, or None outside its condition.

    Valid only if all other coins share one probability, so it is not a guarantee of the mechanism; kept as
    the corrected quote of the paper's formula. Use `blanket_epsilon` for a certificate.
    """
    a = math.tanh(epsilon_bit / 2.0)
    kappa, kappa_plus = 1.0 - a * a, 1.0 + a * a
    if num_coins * kappa / 4.0 < max(23.0 * math.log(10.0 * dim / delta), 2.0):
        return None
    log_ten, n = math.log(10.0 / delta), num_coins * kappa
    epsilon = math.sqrt(8.0 * dim * math.log(1.25 / delta) / n)
    linear = math.sqrt(2.0 * dim * log_ten) * (1.75 + 3.25 * a * a) + dim * (kappa_plus / 3.0 + a)
    epsilon += 4.0 * linear / (n * (1.0 - delta / 10.0))
    logs = math.log(1.25 / delta) + kappa_plus * math.log(20.0 * dim / delta) * log_ten
    return epsilon + 8.0 * logs / (3.0 * n)


def lone_survivor_quantile(num_pairs: int, dropout_probability: float, failure: float) -> int:
    """Largest k with P(fewer than k pairs have exactly one survivor) <= failure (Theorem 4, exact)."""
    chance = 2.0 * dropout_probability * (1.0 - dropout_probability)
    return _lower_quantile(scipy.stats.binom.pmf(np.arange(num_pairs + 1), num_pairs, chance), failure)


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
