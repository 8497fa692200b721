"""Collective coins, a research example: a group's secret subset hides better than each member's own coin.

DO NOT USE THIS WHERE ONE MEMBER OF A GROUP MAY TALK. The guarantee against the server rests on a secret that
all members hold. One that tells it, one fake client that the server has registered, and the bits of all
others exclude inputs: no epsilon at all. Behind the same trust a one-time pad (`SecAgg`) hides far more.
What is left for these coins: one true bit a coordinate, and no round trip where a member drops out.

A coordinate x in [-1, 1]. A = sign(x) with chance |x|, else 0. A != 0 is sent by randomised response of
level epsilon; A = 0 sends the member's bit of the group's secret Y, whose law is P(y) ~ exp(-epsilon d(y)),
d(y) the distance of the number of ones from half of the group. Every bit of Y, given all others, is open up
to odds e^epsilon. Seen together, the bits are exactly epsilon-private, for every input of the others, and
their sum is far less noisy than a sum of coins of their own.

    python examples/collective_coins.py
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

Secret = dict[tuple[int, ...], float]
"""Law of a group's secret bits."""


def balanced(size: int, epsilon: float) -> Secret:
    """Random subsets of nearly half of the group: the law of the text above."""
    middle = [size / 2] if size % 2 == 0 else [(size - 1) / 2, (size + 1) / 2]
    weights = {
        y: math.exp(-epsilon * min(abs(sum(y) - m) for m in middle))
        for y in itertools.product((0, 1), repeat=size)
    }
    total = sum(weights.values())
    return {y: weight / total for y, weight in weights.items()}


def rotated(size: int, epsilon: float) -> Secret:
    """A PLANT: a random rotation of an arc of ones in place of a random subset, balanced as well.

    Given the bits of all others, a member's bit is certain.
    """
    arcs = [tuple(int((i - start) % size < size // 2) for i in range(size)) for start in range(size)]
    return {arc: 1.0 / size for arc in arcs}


def chance_of_one(x: float, secret_bit: int, epsilon: float) -> float:
    """Chance that a member sends a one."""
    high = 1.0 / (1.0 + math.exp(-epsilon))
    says = high if x > 0 else 1.0 - high
    return abs(x) * says + (1.0 - abs(x)) * secret_bit


def message_law(inputs: Sequence[float], secret: Secret, epsilon: float) -> dict[tuple[int, ...], float]:
    """Joint law of all bits of a group."""
    law: dict[tuple[int, ...], float] = {}
    for bits in itertools.product((0, 1), repeat=len(inputs)):
        law[bits] = sum(
            weight
            * math.prod(
                p if bit else 1.0 - p
                for bit, p in zip(
                    bits, (chance_of_one(x, b, epsilon) for x, b in zip(inputs, y, strict=True)), strict=True
                )
            )
            for y, weight in secret.items()
        )
    return law


def worst_level(
    size: int,
    epsilon: float,
    make: Callable[[int, float], Secret] = balanced,
    grid: Sequence[float] = (-1.0, -0.5, 0.0, 0.5, 1.0),
    known_secret: bool = False,
) -> float:
    """Largest log-ratio between two inputs of the first member, over inputs of the others on a grid.

    Args:
        size: Members.
        epsilon: Level of the coins.
        make: Law of the secret.
        grid: Inputs.
        known_secret: Does the server know Y, from one member that talks?

    Returns:
        In nats; infinite if an outcome excludes an input.
    """
    whole = make(size, epsilon)
    secrets = [{y: 1.0} for y in whole] if known_secret else [whole]
    worst = 0.0
    for secret, others in itertools.product(secrets, itertools.product(grid, repeat=size - 1)):
        laws = [message_law((x, *others), secret, epsilon) for x in grid]
        for first, second in itertools.permutations(laws, 2):
            for outcome, p in first.items():
                if p > 1e-15 >= second[outcome]:
                    return math.inf
                if p > 1e-15:
                    worst = max(worst, math.log(p / second[outcome]))
    return worst


def error_of_a_sum(size: int, epsilon: float, secret: Secret) -> float:
    """Mean squared error of the decoded sum where all inputs are 0, in units of the radius squared."""
    scale = 1.0 / math.tanh(epsilon / 2.0)
    law = message_law((0.0,) * size, secret, epsilon)
    return scale**2 * sum(p * sum(2 * bit - 1 for bit in bits) ** 2 for bits, p in law.items())


if __name__ == "__main__":
    size, epsilon = 4, 1.0
    secret = balanced(size, epsilon)
    own = size / math.tanh(epsilon / 2.0) ** 2
    print(f"{size} members at epsilon {epsilon:g}")
    print(f"  server that sees every bit           {worst_level(size, epsilon):.6f}")
    print(f"  the same, and one member talks       {worst_level(size, epsilon, known_secret=True)}")
    print(f"  arcs in place of subsets (a plant)   {worst_level(size, epsilon, rotated)}")
    print(f"  error of the sum at 0, of own coins  {error_of_a_sum(size, epsilon, secret) / own:.3f}")
