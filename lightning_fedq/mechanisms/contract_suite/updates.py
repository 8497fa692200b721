"""Updates that the audit plays for every mechanism, next to the mechanism's own `worst_pair`.

A mechanism can add noise to some inputs only: to values that are not zero, to large values, to values that
were clipped, to clients with a large norm. Two opposite updates at the ends of the range do not show this.
The updates here differ in what such a rule could look at.

Values are factors of a unit: the radius of the range that coordinates are clipped to
(`Mechanism.clipping_range`), or each coordinate's share of the longest update that is not clipped
(`Mechanism.longest_update`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedq.mechanisms.interface import Mechanism, RoundContext

PERIOD = 16
"""Distance of the non-zero coordinates of a sparse update."""
SECOND = 8
"""First non-zero coordinate of the second sparse update."""


@dataclass(frozen=True)
class PlayedUpdate:
    """An update that one client sends in the audit.

    Args:
        name: Description of its coordinates, for messages.
        values: `(dim,)` float64, in units of the update.
        is_even: Whether a claim about a whole vector can be divided over the coordinates. It can if no
            coordinate is larger than its share of the longest update, or if clipping a norm shortens all
            coordinates to the same absolute value.
    """

    name: str
    values: Tensor
    is_even: bool


FAR_UP = "4 times the range, up"
FAR_DOWN = "4 times the range, down"
ZERO = "all zero"
INSIDE = "half of the range, up"
TINY_UP = "0.3% of the range, up"
TINY_DOWN = "0.4% of the range, down"
JUST_INSIDE = "99.9% of the range, up"
JUST_OUTSIDE = "100.1% of the range, up"
SPARSE = "zero but for every 16th coordinate"
OTHER_SPARSE = "zero but for other 16ths of the coordinates"
DISTINCT = "values that are all different"

SUM_PAIRS = (
    (FAR_UP, FAR_DOWN),
    (ZERO, DISTINCT),
    (ZERO, FAR_UP),
    (TINY_UP, TINY_DOWN),
    (INSIDE, FAR_DOWN),
    (SPARSE, OTHER_SPARSE),
    (JUST_INSIDE, JUST_OUTSIDE),
)
"""Pairs that are played for claims about sums and groups, in which all others hold one update of the pair."""


def played_updates(mechanism: Mechanism, context: RoundContext) -> tuple[PlayedUpdate, ...]:
    """Return the updates that the audit plays for a mechanism in a round.

    Args:
        mechanism: Mechanism under audit.
        context: Public facts of a round.
    """
    dim = context.dim
    center, radius = (context.expand(part) for part in mechanism.clipping_range(context))
    longest = mechanism.longest_update(dim)
    # with another centre, a zero can be further from it than a coordinate's share
    shared = longest is not None and not bool(center.any())
    if longest is not None:
        radius = torch.full_like(radius, longest / math.sqrt(dim))
    place = torch.arange(dim)
    ones = torch.ones(dim, dtype=torch.float64)
    signs = 1.0 - 2.0 * (place // 3 % 2).double()
    zeros = torch.zeros_like(ones)

    def even(name: str, factor: float) -> PlayedUpdate:
        return PlayedUpdate(name, center + factor * radius, True)

    def uneven(name: str, factors: Tensor) -> PlayedUpdate:
        return PlayedUpdate(name, torch.where(factors == 0.0, zeros, center + factors * radius), shared)

    distinct = 0.9 * signs * (1.0 + place * 0.618034 % 1.0) / 2.0
    first, second = place % PERIOD == 0, place % PERIOD == SECOND
    return (
        even(FAR_UP, 4.0),
        PlayedUpdate(ZERO, zeros, True),
        even(INSIDE, 0.5),
        even(TINY_UP, 0.003),
        even(FAR_DOWN, -4.0),
        uneven(DISTINCT, distinct),
        even(JUST_INSIDE, 0.999),
        even("5% of the range, down", -0.05),
        uneven(SPARSE, first.double()),
        even(JUST_OUTSIDE, 1.001),
        even(TINY_DOWN, -0.004),
        uneven("zeros at even coordinates", 0.7 * signs * (place % 2)),
        even("30% of the range, down", -0.3),
        uneven(OTHER_SPARSE, -second.double()),
        uneven("one coordinate at the range, 1% in all others", torch.where(place == 0, 1.0, 0.01 * signs)),
        uneven("one coordinate at the range, zero in all others", (place == 0).double()),
        even("a million times the range, up", 1e6),
        uneven("90% of the range, up and down in turn", 0.9 * (1.0 - 2.0 * (place % 2))),
        even("99.8% of the range, down", -0.998),
    )
