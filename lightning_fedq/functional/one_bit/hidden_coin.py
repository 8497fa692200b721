"""Divergence that one coin's bias causes in a sum of coins, per squared change: the vertex theorem.

The victim's coin is a one with probability q in [lo, hi], lo + hi = 1, t = hi - lo. N other independent coins
have any probabilities in [lo, hi], known to the adversary, who sees the sum. With P and Q the laws of the sum
at q and q' and R_a = sum P^a Q^(1 - a), for a = 2 and every a >= 3,

    sup (R_a - 1) / (q - q')^2 = K_a = max over j of max(a (a - 1) / 2 I_j, (R_a(hi || lo) - 1) / t^2,
                                                         (R_a(lo || hi) - 1) / t^2),

j of the others at hi, N - j at lo, I_j the larger Fisher information sum (P_1 - P_0)^2 / P_q at q in {lo,
hi}.

Proof. R_a and the Fisher information are jointly convex in the laws, and the laws are linear in the
probability of every other coin: the worst others are at vertices. For one gap q - q' = D, R_a is convex in
the position of the two, so it is largest where one of them is at lo or at hi. With the denominator fixed
there, P / Q = 1 + D L, Taylor's formula gives (R_a - 1) / D^2 = a (a - 1) int_0^1 (1 - s) E_Q[L^2 (1 + s D
L)^(a - 2)] ds, whose integrand is convex in D for a = 2 and a >= 3 (the base is a ratio of laws, so it is not
negative). With the numerator fixed the exponent is -a - 1, and the integrand is convex for every a. A convex
function of D on (0, t] is largest at its ends: the Fisher information at 0, or the two vertices at t.

An update that moves by Delta in l2 moves the probabilities by Delta t / (2 r) in l2, whatever its dimension,
so sum ln R_i <= sum ln(1 + K_a D_i^2) over the coordinates. As the logarithm is concave, that is at most D
ln(1 + K_a B / D) for D coordinates whose squares D_i^2 sum up to B = (Delta t / (2 r))^2 or less (Jensen):
the Renyi divergence of the whole vector, times a - 1.

Beyond 400 coins splits j are bounded in stretches (`coin_splits`). The same K_a holds if other clients, or
the victim and a partner whose shared word the adversary does not know, round with complementary words and
respond at random afterwards: a pair's sum is (1 - |tau|) B_1 + tau_+ B_2 + tau_- B_0, a mixture of sums of
two vertex coins. Others: vertices again. The victim's own pair, at one sign of tau, is a coin beside a vertex
coin; between two signs R_a is convex in tau at a fixed gap of at most 1, so it is largest where one tau is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightning_fedq.functional.divergences import Array
from lightning_fedq.functional.one_bit.privacy import coin_splits, coin_sum_pmf

ORDERS = (
    *(2.0, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 14.0, 16.0, 18.0, 20.0),
    *(24.0, 28.0, 32.0, 40.0, 48.0, 56.0, 64.0, 80.0, 96.0, 128.0, 192.0, 256.0, 512.0),
)
"""Renyi orders of the claims: 2, and from 3 on, where the theorem holds."""

_LOST = 1e-33
"""More than the mass that `coin_sum_pmf` leaves out: 2 exp(-x^2 / (2 (v + x / 3))) at x = 12.5 sqrt(v) +
59."""


def hidden_coin_moments(low: float, high: float, num_coins: int, orders: Sequence[float] = ORDERS) -> Array:
    """K_a of the vertex theorem at every order: (R_a - 1) / (q - q')^2 at most, for the worst others.

    Args:
        low: Smallest probability of a one, in (0, 1/2).
        high: 1 - low.
        num_coins: N >= 0, the other coins that the adversary can't predict.
        orders: 2, or >= 3.

    Returns:
        `(orders,)` float64; infinite where what is left out of a sum of very many coins could count.

    Raises:
        ValueError: If an order is not covered by the theorem.
    """
    if not all(order == 2.0 or order >= 3.0 for order in orders):
        raise ValueError(f"orders must be 2 or >= 3, where the theorem holds, got {tuple(orders)}")
    # a split and its mirror image (zeros and ones exchanged) show the same: j <= N / 2 is enough
    splits = [split for split in coin_splits(num_coins) if split[1] <= (num_coins + 1) // 2]
    found: Array = np.max([_of_a_split(low, high, *split, np.array(orders)) for split in splits], 0)
    return found


def _of_a_split(low: float, high: float, num_coins: int, num_high: int, orders: Array) -> Array:
    noise = coin_sum_pmf(num_coins, num_high, low, high)
    shifted, here = np.append(0.0, noise), np.append(noise, 0.0)
    upper, lower = low * here + high * shifted, high * here + low * shifted
    upper, lower = np.maximum(upper, 1e-300), np.maximum(lower, 1e-300)
    square = (shifted - here) ** 2
    fisher = max(float((square / upper).sum()), float((square / lower).sum()))
    lost = 0.0 if len(noise) == num_coins + 1 else _LOST
    gap = high - low
    with np.errstate(over="ignore"):
        far = np.maximum(_excess(upper, lower, orders), _excess(lower, upper, orders))
        if lost:
            # P^a Q^(1 - a) <= P (high / low)^(a - 1) where outcomes are left out
            far += lost * np.exp((orders - 1.0) * math.log(high / low))
    return np.maximum(0.5 * orders * (orders - 1.0) * (fisher + lost / low), far / (gap * gap))


def _excess(p: Array, q: Array, orders: Array) -> Array:
    """sum P^a Q^(1 - a) - 1, as E_Q[(1 + u)^a - 1 - a u] with u = P / Q - 1, free of cancellation."""
    ratio = p / q
    logs, gaps = np.log(ratio), ratio - 1.0
    found: Array = np.array([float(q @ (np.expm1(order * logs) - order * gaps)) for order in orders])
    return found
