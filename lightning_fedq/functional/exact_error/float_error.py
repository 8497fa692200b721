"""Bound on the error of exact laws due to float64, finite random bits and tables, to charge to a budget.

The bound has two numbers per coordinate, as in `mechanism.Slack`: a log-ratio r and a distance t. Let P be
the exact law and P' the law of the output of the code. For every input and every set S of points of the
release grid, P'(S) <= e^r P(S) + t and P(S) <= e^r P'(S) + t. docs/float_error.md derives each step:

1. Dithers. With float64 and 53-bit dithers, the error can be coupled to a uniform error on (-w/2, w/2] at a
   distance of a few 2^-53 (|x| + w), for every x. If a value is displaced by d and then rounded to a grid g,
   the log-ratio is at most 2.5 d / g within 7 standard deviations.
2. Layers. The depth is drawn from 75- and 74-bit tails. So P(l' > x) is within e^(+-2^-43.9) of the exact
   tail for all x up to 25 (7 standard deviations), and within e^(+-2^-42) beyond, up to an absolute error of
   2^-74. A layer spreads the remaining error over its whole width.
3. Tables, in the aggregate mechanism. The randomised bit between core and special adds the error of its
   probability. The pieces of a uniform add the error of their distribution function
   (`Decomposition.uniform_error`).

Beyond 7 standard deviations, where the probability is below 2^-38, a log-ratio is charged as a distance.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lightning_fedq.functional.exact_error.decompose import Decomposition
from lightning_fedq.functional.exact_error.irwin_hall import SLOPE_ERROR, half_support

_LAYER_DISTANCE = 2.0**-69
_LAYER_LOG_RATIO = 2.0**-41
_ABSOLUTE_LOG_RATIO = 2.0**-47
_EDGES = 2.5
"""Log-ratio of a displacement d on a grid g, divided by d / g: 2 e^(7 / 32), rounded up."""


class LawError(NamedTuple):
    """Error of one coordinate's law: the distance t and the log-ratio r of the module's docstring."""

    distance: float
    log_ratio: float


class Inputs(NamedTuple):
    """Size of the sum of the clients' |inputs| in one coordinate, in stds of the sum's error.

    Args:
        largest: Upper bound on the largest value.
        mean: Upper bound on the mean over the coordinates.
    """

    largest: float
    mean: float


def _displaced(error: LawError, per_input: float, inputs: Inputs, rest: float, grid: float) -> LawError:
    """Add the error of a displacement of 2^-53 (per_input |x| + rest) to the error of a law.

    If the displacement may be above grid / 1024, no bound holds, and the distance is 1.
    """
    if not 2.0**-53 * (per_input * inputs.largest + rest) <= grid / 1024.0:
        return LawError(1.0, 0.0)
    displacement = 2.0**-53 * (per_input * inputs.mean + rest)
    return LawError(error.distance, error.log_ratio + _EDGES * displacement / grid)


def layered_law_error(n: int, grid: float, inputs: Inputs) -> LawError:
    """Return the bound for the decoded sum of n messages of layered Gaussian quantisers on its release grid.

    Args:
        n: Number of clients, whose errors all have the same std.
        grid: Step of the grid, in (0, 2^-5], in stds of the sum's error.
        inputs: Bounds on the size of the inputs.
    """
    own = grid * math.sqrt(n)  # the grid in stds of one client's error
    layers = n * max(_LAYER_LOG_RATIO, _ABSOLUTE_LOG_RATIO / own)
    overflow = inputs.largest**3 / math.sqrt(n) * 2.0**-94  # probability that a narrow layer exceeds int32
    widths = 4.1 * math.sqrt(n) + 14.2
    error = LawError(n * _LAYER_DISTANCE + overflow, layers)
    return _displaced(error, 14.0 + 2.0 * n, inputs, 14.0 * widths + 10.0 * (2.0 * n + 6.0), grid)


def aggregate_law_error(plan: Decomposition, grid: float, inputs: Inputs, least_bits: int) -> LawError:
    """Return the bound for the decoded sum of the aggregate Gaussian on its release grid.

    Args:
        plan: Tables from which (A, B) are drawn.
        grid: Step of the grid, in (0, 2^-5], in stds of the sum's error.
        inputs: Bounds on the size of the inputs.
        least_bits: k of the cap A >= 2^-k.

    Raises:
        ValueError: If the target is not Gaussian. There is no bound for other targets.
    """
    if plan.target != "gaussian":
        raise ValueError(f"the bound is for a Gaussian target, got {plan.target!r}")
    layers = 2.0 + plan.coin_variation
    coin = (plan.coin.error + 2.0**-53 + 6.0 * SLOPE_ERROR) * (1.0 + 1.0 / plan.core) if plan.core else 0.0
    pieces = _EDGES * plan.special_tail * plan.uniform_error / grid
    error = LawError(
        layers * _LAYER_DISTANCE + 2.0**-66 + plan.n * 2.0**-76,
        layers * max(_LAYER_LOG_RATIO, _ABSOLUTE_LOG_RATIO / grid) + coin + pieces,
    )
    widths = max(29.0, 2.0 * half_support(plan.n))
    capped = 2.0**53 * plan.cap_shift(least_bits)
    rounded = 1000.0 + (4.6 + 5.2 * math.sqrt(plan.n)) * widths
    return _displaced(error, 14.0, inputs, rounded + capped, grid)
