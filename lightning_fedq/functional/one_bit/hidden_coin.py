"""Vertex theorem: bound on the Renyi divergence that the bias of one coin causes in a sum of coins.

A coin is a randomised bit. The victim's coin is 1 with probability q in [lo, hi], with lo + hi = 1 and
t = hi - lo. N other independent coins have any probabilities in [lo, hi]. The adversary knows these
probabilities and sees the sum. Let P and Q be the laws of the sum at q and q', and R_a = sum P^a Q^(1 - a).
Then, for a = 2 and every a >= 3,

    sup (R_a - 1) / (q - q')^2 = K_a = max over j of max(a (a - 1) / 2 I_j, (R_a(hi || lo) - 1) / t^2,
                                                         (R_a(lo || hi) - 1) / t^2).

Here j of the other coins are at hi and N - j at lo. I_j is the larger Fisher information
sum (P_1 - P_0)^2 / P_q at q in {lo, hi}.

Proof. R_a and the Fisher information are jointly convex in the laws, and the laws are linear in the
probability of every other coin. So the worst other coins are at vertices, lo or hi. For a fixed gap
q - q' = D, R_a is convex in the position of the two, so it is largest if q or q' is at lo or hi. First fix
the denominator there, so that P / Q = 1 + D L. Taylor's formula gives

    (R_a - 1) / D^2 = a (a - 1) int_0^1 (1 - s) E_Q[L^2 (1 + s D L)^(a - 2)] ds.

The integrand is convex in D for a = 2 and a >= 3, because the base is a ratio of laws and so not negative.
With the numerator fixed instead, the exponent is -a - 1, and the integrand is convex for every a. A convex
function of D on (0, t] is largest at its ends. These are the Fisher information at 0 and the vertices at t.

If an update moves by Delta in l2, the probabilities move by Delta t / (2 r) in l2, for any dimension. So
sum ln R_i <= sum ln(1 + K_a D_i^2) over the coordinates. Let the squares D_i^2 of D coordinates sum to at
most B = (Delta t / (2 r))^2. The logarithm is concave, so the sum is at most D ln(1 + K_a B / D) (Jensen).
This bounds a - 1 times the Renyi divergence of the whole vector.

Beyond 400 coins the numbers j are bounded in groups (`coin_splits`). The same K_a holds for pairs that round
with complementary words and respond at random afterwards. Such a pair may be two other clients, or the victim
and a partner whose shared word the adversary does not know. A pair's sum is
(1 - |tau|) B_1 + tau_+ B_2 + tau_- B_0, a mixture of sums of two vertex coins. For pairs of other clients,
the worst case is again at vertices. For the victim's pair and one sign of tau, the victim is a coin next to a
vertex coin. Between two signs, R_a is convex in tau at a fixed gap of at most 1, so it is largest if one tau
is 0.
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
"""Renyi orders of the privacy claims. The theorem holds for 2 and from 3 on."""

_LOST = 1e-33
"""Upper bound on the mass that `coin_sum_pmf` leaves out.

It exceeds 2 exp(-x^2 / (2 (v + x / 3))) at x = 12.5 sqrt(v) + 59 (Bernstein's inequality, variance v).
"""


def hidden_coin_moments(low: float, high: float, num_coins: int, orders: Sequence[float] = ORDERS) -> Array:
    """Return K_a of the vertex theorem at every order: the largest (R_a - 1) / (q - q')^2.

    Args:
        low: Smallest probability of a 1, in (0, 1/2).
        high: Largest probability of a 1, 1 - low.
        num_coins: Number N >= 0 of other coins that the adversary can't predict.
        orders: Renyi orders, each 2 or >= 3.

    Returns:
        `(orders,)` float64. Infinite if the mass that `coin_sum_pmf` leaves out could contribute too much.

    Raises:
        ValueError: If an order is not covered by the theorem.
    """
    if not all(order == 2.0 or order >= 3.0 for order in orders):
        raise ValueError(f"orders must be 2 or >= 3, where the theorem holds, got {tuple(orders)}")
    # exchanging zeros and ones changes nothing, so j <= N / 2 is enough
    splits = [split for split in coin_splits(num_coins) if split[1] <= (num_coins + 1) // 2]
    moments: Array = np.max([_of_a_split(low, high, *split, np.array(orders)) for split in splits], 0)
    return moments


def _of_a_split(low: float, high: float, num_coins: int, num_high: int, orders: Array) -> Array:
    """Return the moments for one split: `num_high` other coins at `high`, the rest at `low`."""
    noise = coin_sum_pmf(num_coins, num_high, low, high)
    with_zero, with_one = np.append(noise, 0.0), np.append(0.0, noise)  # P_0 and P_1, by the victim's coin
    at_high = np.maximum(low * with_zero + high * with_one, 1e-300)
    at_low = np.maximum(high * with_zero + low * with_one, 1e-300)
    square = (with_one - with_zero) ** 2
    fisher = max(float((square / at_high).sum()), float((square / at_low).sum()))
    lost = 0.0 if len(noise) == num_coins + 1 else _LOST
    with np.errstate(over="ignore"):
        between_ends = np.maximum(_excess(at_high, at_low, orders), _excess(at_low, at_high, orders))
        if lost:
            # outcomes that are left out have P^a Q^(1 - a) <= P (high / low)^(a - 1)
            between_ends += lost * np.exp((orders - 1.0) * math.log(high / low))
    at_no_gap = 0.5 * orders * (orders - 1.0) * (fisher + lost / low)
    gap = high - low
    return np.maximum(at_no_gap, between_ends / (gap * gap))


def _excess(p: Array, q: Array, orders: Array) -> Array:
    """Return sum P^a Q^(1 - a) - 1 at every order a.

    It is computed as E_Q[(1 + u)^a - 1 - a u] with u = P / Q - 1, which avoids cancellation.
    """
    ratio = p / q
    logs, gaps = np.log(ratio), ratio - 1.0
    excess: Array = np.array([float(q @ (np.expm1(order * logs) - order * gaps)) for order in orders])
    return excess
