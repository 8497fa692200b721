"""RQM, the randomised quantisation mechanism: levels are left out at random, then a value is rounded.

Source: Youn, Hu, Ziani, Abernethy, Randomized Quantization is All You Need for Differential Privacy in
Federated Learning, 2023, algorithm 2. Of m evenly spaced levels on [-X, X] both ends are kept and each other
one with chance q; the value, in [-1, 1], is rounded at random to the nearest kept level below or above. X > 1
is what makes it private: it is unbiased for every set of levels.

Departures: the levels are not drawn. Between two levels the chance of an output is linear in the value, and
on a level both sides agree, so a value is rounded to one of its two neighbours and the output drawn from that
level's law, which is known: two words a coordinate for m - 1 coins. X follows from epsilon: the smallest at
which the integers that are drawn keep it, where the paper gives X and computes what that claims.

What is claimed is the exact pair of laws, for any two values, and so every Renyi divergence of one message. A
closed bound, log(2 X / (X - 1)) - (m - 2) log(1 - q), is far above it. For a sum of n clients the paper
evaluates divergences with all others at the ends of the range, and does not prove that this is their worst
place; so whoever sees sums is given the claim of one message here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.functional.linear_decode import decode_sum
from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.mechanisms.bases.grid_channel import Channel, GridChannel, whole_counts
from lightning_fedq.mechanisms.bases.received import check_received
from lightning_fedq.mechanisms.interface import RoundContext

_MOST = 12.0
"""Beyond, an output's chance is too few words of 2^-32 to say its level to a per cent."""


def level_laws(levels: int, keep: float) -> NDArray[np.float64]:
    """Chances of every output for a value that lies on a level, `(levels, levels)`.

    The level itself is kept with chance q. Else the value lies between the nearest kept levels below and
    above, a and b, which are independent, and b is sent with chance (value - a) / (b - a).
    """
    law, places = np.zeros((levels, levels)), np.arange(levels)
    kept = np.where((places == 0) | (places == levels - 1), 1.0, keep)
    for j in range(levels):
        law[j, j] = kept[j]
        for a in range(j):
            for b in range(j + 1, levels):
                # no level between the two is kept, the value's own neither
                alone = kept[a] * kept[b] * (1.0 - kept[a + 1 : b]).prod()
                law[j, a] += alone * (b - j) / (b - a)
                law[j, b] += alone * (j - a) / (b - a)
    return law


def rqm_channel(levels: int, keep: float, reach: float) -> Channel:
    """The channel of m levels, each kept with chance q, on X = `reach` times the range."""
    laws, middle = level_laws(levels, keep), 0.5 * (levels - 1)
    half = middle / reach
    low = middle - half
    first, last = int(np.floor(low)), int(np.ceil(2.0 * half + low))
    rows = laws[first : last + 1].copy()
    rows[0] += (low - first) * (laws[first + 1] - laws[first])
    rows[-1] = rows[0, ::-1]
    return Channel(whole_counts(rows), np.linspace(-reach, reach, levels), low, half)


@lru_cache(maxsize=64)
def solve_rqm(levels: int, keep: float, epsilon: float) -> Channel:
    """The channel of the smallest X that keeps epsilon, to 1 in 10^9: a smaller X has all inputs of a larger.

    Raises:
        ValueError: If an argument is out of range.
    """
    if not 2 <= levels <= 16:
        raise ValueError(f"levels must be in [2, 16], got {levels}")
    if not 0.1 <= keep <= 0.9:
        raise ValueError(f"keep must be in [0.1, 0.9], got {keep}")
    if not 1e-4 <= epsilon <= _MOST:
        raise ValueError(f"epsilon must be in [1e-4, {_MOST:g}], got {epsilon}")
    low, high = 0.0, 1.0  # of 1 / X
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        found = rqm_channel(levels, keep, 1.0 / middle)
        low, high = (middle, high) if found.counts.min() and found.epsilon <= epsilon else (low, middle)
    return rqm_channel(levels, keep, 1.0 / low)


@dataclass(frozen=True)
class RQM(GridChannel):
    """Randomised quantisation: levels left out at random, then random rounding. Epsilon-LDP, unbiased.

    Args:
        epsilon: Local budget per coordinate and round, in [1e-4, 12], in nats.
        levels: m, 2 to 16; two are randomised response. A message has log2(m) bits a coordinate.
        keep: q, chance of a level between the ends to be kept, 0.1 to 0.9.

    Example:
        >>> round(RQM(epsilon=2.0).reach, 3)  # X: levels lie on so many times the range
        6.473
    """

    homomorphic = True
    level = "epsilon"
    alike_clients = True
    _coins = "rqm coins"

    epsilon: float
    levels: int = 16
    keep: float = 0.42

    def __post_init__(self) -> None:
        _ = self.channel

    @property
    def channel(self) -> Channel:
        return solve_rqm(self.levels, self.keep, self.epsilon)

    @property
    def reach(self) -> float:
        """X: the outermost levels, in radii."""
        return float(self.channel.values[-1])

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        # levels are evenly spaced, so the sum of their numbers says it all
        count, steps = len(clients), self.levels - 1
        check_received(symbols, count, context.dim, steps)
        slope = context.radius * (self.reach / steps)
        return decode_sum(symbols, context.segments, count * context.center, slope, 2, count * steps)
