"""Number of blocks to send under one pure privacy budget, with randomised response of every bit.

Of M blocks, m are drawn at random, coded in `bits_per_block` bits each and scaled by M / m. Every bit gets
epsilon / (m bits_per_block), so the bits of a message compose to epsilon exactly. Let e be the epsilon of a
bit. The second moment of an estimate in [-A, A] is (M / m) A^2 / tanh^2(e / 2). With more blocks, the
sampling error falls and the noise of a bit rises. The minimum is at sinh e = 2 e, e = 2.1773, where the
second moment is 3.433 M bits_per_block A^2 / epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache


def bit_epsilon(epsilon: float, bits: int) -> float:
    """Return the epsilon of each of `bits` bits that compose to `epsilon`. The division is rounded down.

    Args:
        epsilon: Epsilon of all bits together, > 0, in nats. `math.inf` stays infinite.
        bits: Number of bits >= 1.

    Examples:
        >>> round(bit_epsilon(1.0, 4), 3)
        0.25
    """
    return epsilon if bits == 1 or math.isinf(epsilon) else math.nextafter(epsilon / bits, 0.0)


@lru_cache(maxsize=256)
def best_block_count(epsilons: Sequence[float], bits_per_block: int, most: int) -> int:
    """Return the number of blocks per message with the smallest noise, the same for every sender.

    It minimises the sum over senders of 1 / (m tanh^2(epsilon / (2 m bits_per_block))). The sum is convex in
    m, so bisection on its slope finds the minimum.

    Args:
        epsilons: Tuple of the budgets of the senders' messages, > 0, in nats.
        bits_per_block: Bits per block, >= 1.
        most: Number of all blocks, >= 1.

    Returns:
        An integer in [1, most].

    Examples:
        >>> best_block_count((8.0,), 1, 7850)
        4
    """

    def noise(count: int) -> float:
        return sum(1.0 / (count * math.tanh(e / (2 * count * bits_per_block)) ** 2) for e in epsilons)

    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if noise(middle + 1) < noise(middle):
            low = middle + 1
        else:
            high = middle
    return low
