"""Gaussian curve above a vector of coins among other coins: tighter than Renyi divergences in small cohorts.

The setting is that of `hidden_coin`: every coordinate shows the sum of the victim's coin, whose probability
moves by a gap D_i <= t between two worlds, and of N others with any probabilities in [low, high]. Given the
sum of the D_i^2, the loss of the whole vector is bounded by that of one Gaussian, up to a chosen part of
delta.

**Theorem.** Write H_x(P || Q) = sum max(P - e^x Q, 0), G_m for the curve of N(m, 1) against N(0, 1), and h_D
for the largest curve of a coordinate with gap D. Let v be a function of b >= 0 that does not fall, m^2 = v,
such that for every b, every gap D and every x

    (h_D * G_m(b))(x) <= G_m(b + D^2)(x) + s D^2,                                              (1)

`*` the curve of both together. Then coordinates whose squared gaps add up to b or less, chosen one after the
other by what was seen before, have H_x <= G_m(b)(x) + s b at every x.

Proof. Let V(x, b) be the right-hand side: V(x, 0) = G_m(0)(x) >= max(1 - e^x, 0). With r = P / Q, H_x of a
coordinate and what follows is E_P of the rest's curve at x - ln r, so (1) and induction from the last
coordinate backward give the claim; s b is a constant and passes through the expectation. (To give away a
Gaussian of variance v(0) besides is what smooths the curves: a lone coin is below no Gaussian near its own.)

**The worst coordinate.** H is jointly convex, so other coins are at vertices, and at a fixed gap the victim's
two probabilities are where one of them is low or high. Fixed there, the other law is linear in D: h_D rises
with D, and between two gaps it is below the mixture of theirs. So finitely many gaps bound all: those
between two neighbours by chords, and gaps below the smallest, d, by d itself, which adds at most d^2 for each
coordinate to b. Both orders of a pair give curves with h(-x) = 1 - e^-x + e^-x h(x), Gaussians have them too,
so x >= 0 is enough.

**From points to all x and D.** h_D is replaced by the loss on a grid that connects the dots of its curve,
from above. Then the left side of (1) is convex in e^x and linear in D between two gaps, so it lies below its
chords, and G lies above its own less (step^2 / 8) times the second derivative, which the normal density
bounds. `_holds` asks for (1) with both of these margins at the corners. Where v is concave, (1) follows
from slopes: v'(b') >= c_D(b' - D^2)^2, with c_D(b) the smallest c for which (h_D * G_m)(x) <= G(sqrt(v(b) +
c^2 D^2)) + s D^2. It falls in m, because a Gaussian more on both sides keeps (1).

References:
    Doroshenko et al., Connect the Dots, PoPETs 2022, for grids; Dong, Roth, Su, Gaussian Differential
    Privacy, 2022, for domination by Gaussians. The theorem is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np
from scipy import special

from lightning_fedq.functional.divergences import Array
from lightning_fedq.functional.one_bit.privacy import coin_splits, coin_sum_pmf

MOST_COINS = 400
"""Other coins up to which every split is looked at."""

_RATIOS = (1.12, 1.18)
"""Ratio of neighbouring gaps, from the full one down and below a quarter of it."""
_PARTS = 4
"""Pieces between two neighbouring gaps that are checked on their own."""
_POINTS = 8.0
"""Grid points in a standard deviation of a coordinate's loss."""
_ROW = 1.0 / 12.0
"""Step of the Gaussians' binary logarithm, from 1/16 of a full gap's own standard deviation to 2 of them.
Beyond, up to 9, it is twice as much."""
_STEP = 1.01
"""Of neighbouring candidates for c^2."""
_MOST_STEPS = 800
_GRID, _SHORTEST, _MOST_JUMPS = 500, 16.0, 4000
"""Points of b in a full gap's square, squares of gaps (in such points) above which jumps are looked at one
by one, and points up to which they are."""
_GROUPS = 2
"""Of neighbouring splits, whose curves are bounded together."""
_LEFT_OUT = 1e-18
"""Mass of the least likely losses on either side that is not composed but added to the curve."""
_FLOAT = 1e-11
"""More than what rounding errors of sums of probabilities and of normal tails add up to, relatively: both
are sums of the tail from its far end."""


def gaussian_curve(x: Array, mu: float | Array) -> Array:
    """Hockey-stick divergence of N(mu, 1) from N(0, 1) at every x >= -30 (float64, any shape)."""
    far = -0.5 * mu - x / mu
    found: Array = special.ndtr(0.5 * mu - x / mu) - np.exp(np.minimum(x, 700.0) + special.log_ndtr(far))
    return found


@dataclass(frozen=True)
class GaussianCover:
    """Where the theorem holds: for each Gaussian and each pair of neighbouring gaps the smallest slope c^2.

    Args:
        gaps: `(g,)` ascending squared gaps; the last one is t^2.
        rows: `(r,)` ascending variances v.
        slopes: `(r, g - 1)` c^2 between neighbouring gaps from each variance on; infinite where none was
            found. Falling along the rows.
    """

    gaps: Array
    rows: Array
    slopes: Array

    def variance(self, budget: float) -> float:
        """v(b), the squared mu of the Gaussian that covers squared gaps adding up to b = `budget` >= 0."""
        grid = float(self.gaps[-1]) / _GRID
        jumps = int(np.searchsorted(self.gaps[:-1], _SHORTEST * grid))
        # the gaps between which a multiple of the grid lies, give or take two of its steps
        multiples = grid * np.arange(_GRID + 3.0)
        first = np.maximum(np.searchsorted(self.gaps[1:], multiples - 2.0 * grid), jumps)
        last = np.searchsorted(self.gaps[:-1], multiples + 2.0 * grid, side="right") - 1
        last = np.minimum(last, len(self.gaps) - 2)
        least = math.inf
        for start in range(0, len(self.rows) - 1, 2):
            found = _along(self.rows, self.slopes, self.gaps, start, budget, grid, first, last, jumps, least)
            least = min(least, float(found))
        return least


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _along(
    rows: Array,
    slopes: Array,
    gaps: Array,
    start: int,
    budget: float,
    grid: float,
    first: Array,
    last: Array,
    jumps: int,
    least: float,
) -> float:
    """v(budget) from v(0) = rows[start], linear between points of a grid. Infinite once `least` is reached.

    Short gaps (before `jumps`) by slopes: at b' the largest c_D(b' - D^2)^2. Long ones as jumps: v(b + D^2)
    is at least v(b) + c_D(b)^2 D^2 at all points of the grid, with the slope of the point before b and of
    every gap that comes within two steps; between points both sides are linear. Beyond `_MOST_JUMPS` points
    long ones go by slopes, too, from a full gap earlier on, and v stays above its values by jumps.
    """
    points = min(math.ceil(budget / grid) + 2, _MOST_JUMPS)  # two, because a quotient may be rounded
    by_jumps = np.full(points, rows[start])
    places, values, at = [0.0], [rows[start]], [start]
    cells = len(gaps) - 1
    for turned in range(2):
        if turned:
            if points < _MOST_JUMPS or (points - 1) * grid >= budget:
                return values[-1]  # type: ignore[no-any-return]
            keep = points - _GRID - 1
            places, values, at = places[:keep], values[:keep], at[:keep]
        while len(places) < points or (turned and places[-1] < budget):
            if values[-1] >= least:
                return math.inf
            here, m = places[-1], len(places)
            there = m * grid if m < points else min(here * (1.0 + 1.0 / 64.0), budget)
            slope = 0.0
            for cell in range(cells if turned else jumps):
                ago = here - gaps[cell + 1]
                k = 0  # the last place that is no later
                if ago > 0.0:
                    low, high = 0, m
                    while high - low > 1:
                        middle = (low + high) // 2
                        if places[middle] <= ago:
                            low = middle
                        else:
                            high = middle
                    k = low
                slope = max(slope, slopes[at[k], cell])
            value = values[-1] + slope * (there - here)
            if turned and m < points:
                value = max(value, by_jumps[m])
            if not turned:
                for length in range(1, min(m, len(first) - 1) + 1):
                    row = at[max(m - length - 1, 0)]
                    largest = 0.0
                    for cell in range(first[length], last[length] + 1):
                        largest = max(largest, slopes[row, cell])
                    value = max(value, values[m - length] + largest * length * grid)
                by_jumps[m] = value
            row = at[-1]
            while row + 1 < len(rows) and rows[row + 1] <= value:
                row += 1
            places.append(there)
            values.append(value)
            at.append(row)
    return values[-1]  # type: ignore[no-any-return]


def _shares(num_gaps: int) -> Array:
    """Gaps over the full one, ascending."""
    fine, coarse = _RATIOS
    places = np.arange(num_gaps, dtype=np.float64)
    most = math.ceil(math.log(4.0) / math.log(fine))
    logs = math.log(fine) * np.minimum(places, most) + math.log(coarse) * np.maximum(places - most, 0.0)
    found: Array = np.exp(-logs[::-1])
    return found


def gaps_down_to(share: float, most: int) -> tuple[int, float]:
    """Number of gaps of which the smallest is at most `share` of the full one, and what share it is.

    Args:
        share: In (0, 1).
        most: Largest number, >= 2.
    """
    shares = _shares(most)[::-1]
    number = min(max(int(np.searchsorted(-shares, -share)) + 1, 2), most)
    return number, float(shares[number - 1])


@lru_cache(maxsize=64)
def gaussian_cover(low: float, high: float, num_coins: int, num_gaps: int, slack: float) -> GaussianCover:
    """Slopes with which Gaussians cover a coin among `num_coins` others.

    Args:
        low: Smallest probability of a one, in (0, 1/2).
        high: 1 - low.
        num_coins: N in [0, `MOST_COINS`].
        num_gaps: Gaps, >= 2, the largest t = high - low, as `gaps_down_to` counts them.
        slack: s of the theorem, > 0, the part of delta that a squared gap may take.

    Raises:
        ValueError: If there are more coins than that, or an argument makes no sense.
    """
    if not 0 <= num_coins <= MOST_COINS or num_gaps < 2 or not slack > 0.0 or not 0.0 < low < 0.5:
        raise ValueError(
            f"low in (0, 1/2), num_coins in [0, {MOST_COINS}], num_gaps >= 2 and slack > 0 are needed, "
            f"got {low}, {num_coins}, {num_gaps} and {slack}"
        )
    gap = high - low
    gaps = gap * _shares(num_gaps)
    groups = _vertices(low, high, num_coins)
    fisher = max(float(((one - q) ** 2 / q).sum()) for group in groups for q, one in group) / (gap * gap)
    own = gap * math.sqrt(fisher)
    fine = 2.0 ** (np.arange(0.0, 5.0, _ROW) - 4.0)
    means = own * np.append(fine, 2.0 * 1.12 ** np.arange(1.0, 14.0))
    cells = []
    for cell in range(num_gaps - 1):
        small, large = float(gaps[cell]), float(gaps[cell + 1])
        step = small * math.sqrt(fisher) / _POINTS
        losses = [
            (side, loss)
            for side, d in enumerate((small, large))
            for group in groups
            for loss in _on_grid(group, d / gap, step)
        ]
        cells.append(_slopes(_laid_out(losses), means, fisher, step, small, large, slack * small * small))
    return GaussianCover(gaps**2, means**2, np.stack(cells, axis=1))


def _vertices(low: float, high: float, num_coins: int) -> list[list[tuple[Array, Array]]]:
    """(Q, P) with the victim's probability at `low` and at `high`, neighbouring splits in groups.

    With the probability at `high` and at `low` a split shows what its mirror image (zeros and ones exchanged)
    shows here.
    """
    found = []
    for count, num_high in coin_splits(num_coins, MOST_COINS + 1):
        noise = coin_sum_pmf(count, num_high, low, high)
        shifted, here = np.append(0.0, noise), np.append(noise, 0.0)
        found.append((high * here + low * shifted, low * here + high * shifted))
    size = -(-len(found) // _GROUPS)
    return [found[first : first + size] for first in range(0, len(found), size)]


@dataclass(frozen=True)
class _Grid:
    """Masses of a loss on {lowest, ...} * step, but for 2 `_LEFT_OUT` at most. No infinite ones."""

    lowest: int
    masses: Array


def _on_grid(group: list[tuple[Array, Array]], share: float, step: float) -> tuple[_Grid, _Grid]:
    """Losses that connect the dots of a group's largest curve at `share` of the full gap, in both orders."""
    q, far = (np.concatenate([split[side] for split in group]) for side in (0, 1))
    ends = np.cumsum([len(split[0]) for split in group])
    p = q + share * (far - q)
    losses = np.log(p / q)
    half = math.floor(np.abs(losses).max() / step) + 2
    x = step * np.arange(-half, half + 1.0)
    growth = np.exp(x)
    curve = np.maximum(-np.expm1(x), 0.0)
    _raise_to(curve, x, growth, p, q, losses, ends)
    return _dots(curve, step, half), _dots(-np.expm1(x) + growth * curve[::-1], step, half)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _raise_to(curve: Array, x: Array, growth: Array, p: Array, q: Array, losses: Array, ends: Array) -> None:
    """Raise `curve` at every x to those of several laws, one after the other up to `ends`.

    Losses rise with the outcome, because sums of coins are log-concave, but for the rounding of masses that
    are hardly any; so outcomes are sorted by insertion, which costs nothing where they are.
    """
    first = 0
    for end in ends:
        falling = np.arange(end - 1, first - 1, -1)
        for i in range(1, len(falling)):
            outcome, j = falling[i], i
            while j > 0 and losses[falling[j - 1]] < losses[outcome]:
                falling[j] = falling[j - 1]
                j -= 1
            falling[j] = outcome
        taken, p_tail, q_tail = 0, 0.0, 0.0
        for place in range(len(x) - 1, -1, -1):
            while taken < len(falling) and losses[falling[taken]] > x[place]:
                p_tail += p[falling[taken]]
                q_tail += q[falling[taken]]
                taken += 1
            curve[place] = max(curve[place], p_tail - growth[place] * q_tail)
        first = end


def _dots(curve: Array, step: float, half: int) -> _Grid:
    """The loss on {-half, ..., half} * step whose curve connects the dots of `curve`."""
    falls, grow = np.diff(curve), math.expm1(step)
    masses = np.empty_like(curve)
    masses[0] = 1.0 - curve[0] + falls[0] / grow
    masses[1:-1] = (falls[1:] - math.exp(step) * falls[:-1]) / grow
    masses[-1] = falls[-1] / math.expm1(-step)
    masses = np.maximum(masses, 0.0)
    # what is left out is added to every curve
    first = int(np.searchsorted(masses.cumsum(), _LEFT_OUT, side="right"))
    last = len(masses) - int(np.searchsorted(masses[::-1].cumsum(), _LEFT_OUT, side="right"))
    return _Grid(first - half, masses[first:last])


class _Losses(NamedTuple):
    """Losses at two neighbouring gaps.

    Args:
        masses: Those of all, one after the other.
        starts: `(losses + 1,)` where each begins.
        firsts: Place of x = 0 in a curve that begins `reach` points below, by loss.
        sides: 0 at the smaller gap or 1, by loss.
        reach: Points of the curve that are needed on either side.
    """

    masses: Array
    starts: Array
    firsts: Array
    sides: Array
    reach: int


def _laid_out(losses: list[tuple[int, _Grid]]) -> _Losses:
    reach = max(max(len(loss.masses), -loss.lowest) for _, loss in losses) + 1
    return _Losses(
        np.concatenate([loss.masses for _, loss in losses]),
        np.cumsum([0, *(len(loss.masses) for _, loss in losses)]),
        np.array([reach - loss.lowest for _, loss in losses]),
        np.array([side for side, _ in losses]),
        reach,
    )


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _slopes(
    losses: _Losses, means: Array, fisher: float, step: float, small: float, large: float, slack: float
) -> Array:
    """`(r,)` slopes between two neighbouring gaps from each Gaussian on: the least fisher 1.01^k that holds.

    Args:
        losses: Losses at both gaps.
        means: `(r,)` ascending means of the Gaussians.
        fisher: Largest Fisher information of a coordinate.
        step: Grid step of x.
        small: The smaller gap.
        large: The larger gap.
        slack: s times the smaller gap's square.
    """
    found = np.full(len(means), np.inf)
    k = _MOST_STEPS
    for row in range(len(means)):
        mean = means[row]
        if mean > 25.0 * small * math.sqrt(fisher) and k < _MOST_STEPS:
            found[row:] = fisher * _STEP**k  # what holds for a smaller Gaussian holds
            break
        left = _left_sides(losses, mean, step, slack)
        if left.shape[1] == 0:
            found[row] = found[row - 1] if row else np.inf  # as above
            continue
        if k == _MOST_STEPS:
            bad = -1
            while k - bad > 1:
                middle = (k + bad) // 2
                if _holds(left, step, mean * mean, small, large, slack, fisher * _STEP**middle):
                    k = middle
                else:
                    bad = middle
        else:
            width = 1
            while k > 0:
                less = max(k - width, 0)
                if not _holds(left, step, mean * mean, small, large, slack, fisher * _STEP**less):
                    break
                k, width = less, 2 * width
        if k < _MOST_STEPS:
            found[row] = fisher * _STEP**k
    return found


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _gaussian(x: float, mu: float) -> float:
    """`gaussian_curve` of one x."""
    near, far = 0.5 * mu - x / mu, 0.5 * mu + x / mu
    tail = math.exp(min(x, 700.0)) * math.erfc(far / math.sqrt(2.0))
    return 0.5 * (math.erfc(-near / math.sqrt(2.0)) - tail)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _left_sides(losses: _Losses, mean: float, step: float, small: float) -> Array:
    """`(2, points)`: at both gaps the largest curve of a loss and the Gaussian, until it is small."""
    reach = losses.reach
    points = math.ceil((9.0 * mean + 0.5 * mean * mean) / step) + 3 * reach
    curve = np.empty(points + 2 * reach)
    for place in range(len(curve)):
        curve[place] = _gaussian(step * (place - reach), mean)
    return _largest(curve, losses.masses, losses.starts, losses.firsts, losses.sides, points, small)  # type: ignore[no-any-return]


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _holds(
    left: Array, step: float, variance: float, small: float, large: float, slack: float, square: float
) -> bool:
    """Does inequality (1) hold for all x >= 0 and all gaps between two neighbours, with c^2 = `square`?

    Args:
        left: `(2, points)` left sides at the two gaps, down to where they are within the slack.
        step: Grid step of x.
        variance: v(b).
        small: The smaller gap.
        large: The larger gap.
        slack: s times the smaller gap's square.
        square: c^2.
    """
    along_x = math.expm1(step) ** 2 / 8.0
    width = (large - small) / _PARTS
    along_gaps = width * width / 8.0
    for place in range(left.shape[1]):
        x = step * place
        low = variance + square * small * small
        before = _gaussian(x, math.sqrt(low)) - left[0, place] + slack
        for part in range(1, _PARTS + 1):
            weight, gap = part / _PARTS, small + part * width
            high = variance + square * gap * gap
            here = (1.0 - weight) * left[0, place] + weight * left[1, place]
            room = _gaussian(x, math.sqrt(high)) - here + slack
            # largest normal density in a piece: x within a step, the variance between its ends
            nearest = max(x - step - 0.5 * high, 0.5 * low - x - step, 0.0)
            density = math.exp(-nearest * nearest / (2.0 * high)) / math.sqrt(2.0 * math.pi * low)
            steep = ((x + step) * gap / low) ** 2
            if min(room, before) < density * (along_x + along_gaps * (square + square * square * steep)):
                return False
            low, before = high, room
    return True


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _largest(
    curve: Array, masses: Array, starts: Array, firsts: Array, sides: Array, points: int, small: float
) -> Array:
    """The largest of several sums of masses[i] curve[first + x - i], for two sides, until both are small.

    In blocks of x that stay in the cache, four masses at a time.

    Args:
        curve: `(points + 2 reach,)`.
        masses: Those of all losses, one after the other.
        starts: `(losses + 1,)` where each loss begins.
        firsts: Place in `curve` of x = 0, by loss.
        sides: 0 or 1, by loss.
        points: Values of x.
        small: Where both sides are this small they count as 0, because the slack is as much.
    """
    found, block = np.zeros((2, points)), 256
    added = np.empty(block)
    for start in range(0, points, block):
        width = min(block, points - start)
        for loss in range(len(firsts)):
            here = masses[starts[loss] : starts[loss + 1]]
            added[:] = 0.0
            whole = len(here) - len(here) % 4
            for i in range(0, whole, 4):
                at = firsts[loss] + start - i
                a, b, c, d = here[i], here[i + 1], here[i + 2], here[i + 3]
                for x in range(width):
                    place = at + x
                    added[x] += (
                        a * curve[place] + b * curve[place - 1] + c * curve[place - 2] + d * curve[place - 3]
                    )
            for i in range(whole, len(here)):
                at = firsts[loss] + start - i
                for x in range(width):
                    added[x] += here[i] * curve[at + x]
            side = found[sides[loss]]
            for x in range(width):
                side[start + x] = max(side[start + x], added[x])
        for x in range(start, start + width):
            found[0, x] = found[0, x] * (1.0 + _FLOAT) + 2.0 * _LEFT_OUT
            found[1, x] = found[1, x] * (1.0 + _FLOAT) + 2.0 * _LEFT_OUT
            if found[0, x] <= small and found[1, x] <= small:
                return found[:, : x + 1]
    return found[:, :0]
