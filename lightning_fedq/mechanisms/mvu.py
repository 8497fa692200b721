"""MVU: the minimum-variance unbiased mechanism with a few input and output bits per coordinate.

Source: Chaudhuri, Guo, Rabbat, Privacy-Aware Compression for Federated Data Analysis, UAI 2022. A value is
rounded at random to one of 2^b_in grid points. Grid point i sends output j with probability P_ij, which is
decoded as alpha_j. P and alpha minimise the mean variance over grid points, subject to unbiasedness and
epsilon-LDP.

Departures from the paper: For fixed alpha the problem is a linear programme, which is solved as one (scipy's
HiGHS). Alpha is found by Nelder-Mead over symmetric values, from a few starts of which the best two continue,
while the authors alternate with a penalty. The result is rounded to integers over 2^32, so that drawing is
exact and the claim is computed from these integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult, linprog, minimize
from torch import Tensor

from lightning_fedq.functional.checks import check_positive
from lightning_fedq.functional.linear_decode import decode_total
from lightning_fedq.functional.private_levels import draw_outputs
from lightning_fedq.functional.segments import normalise_segments, segment_lines
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness
from lightning_fedq.mechanisms.bases.claims import ARBITRARY, FRESH
from lightning_fedq.mechanisms.bases.received import check_received
from lightning_fedq.mechanisms.interface import (
    Mechanism,
    Message,
    PmfPairs,
    PrivacyClaim,
    RoundContext,
    Unit,
    same_for_all,
)
from lightning_fedq.wire.coding import FixedLength

_WORD = 1 << 32
_CHUNK = 1 << 16
_SMALLEST = 1e-6  # an output of this or a smaller probability is dropped, and P solved again
_LEAST_LEVEL = 1e-4
_LARGEST_LEVEL = 13.0
"""Largest epsilon, just below -ln(_SMALLEST), at which all outputs would be dropped."""
_IMPOSSIBLE = 100.0
"""Objective if no P is unbiased and private with these outputs, above the log of any variance."""


@dataclass(frozen=True, eq=False)
class MVUDesign:
    """Solved mechanism on inputs i / (2^b_in - 1) in [0, 1].

    Args:
        counts: `(2^b_in, outputs)` int64, P_ij 2^32. Rows sum to 2^32.
        outputs: `(outputs,)` float64, alpha.
    """

    counts: NDArray[np.int64]
    outputs: NDArray[np.float64]

    @property
    def inputs(self) -> NDArray[np.float64]:
        """Grid points."""
        return np.linspace(0.0, 1.0, len(self.counts))

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """Transition probabilities P, `(inputs, outputs)`."""
        return self.counts / float(_WORD)

    @cached_property
    def epsilon(self) -> float:
        """Attained epsilon, from the integers."""
        return float(np.log(self.counts.max(0) / self.counts.min(0)).max())

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """Decoded values of the outputs, in radii from the centre of the range."""
        return 2.0 * self.outputs - 1.0

    @cached_property
    def edges(self) -> NDArray[np.uint32]:
        """Cumulative counts `(inputs, outputs - 1)` uint32. A random word selects the output between two."""
        # without the last sum, 2^32, which a uint32 can't represent
        return np.cumsum(self.counts, axis=1)[:, :-1].astype(np.uint32)

    @cached_property
    def worst_variance(self) -> float:
        """Largest variance over all inputs, random rounding included, in squared radii.

        Between grid points the second moment is linear, so the variance is a parabola.
        """
        moments, x = self.probabilities @ self.values**2, 2.0 * self.inputs - 1.0
        slopes = np.diff(moments) / np.diff(x)
        top = np.clip(slopes / 2, x[:-1], x[1:])  # where the slope of the second moment is that of x^2
        return float((moments[:-1] + slopes * (top - x[:-1]) - top**2).max())


def _solve_probabilities(
    outputs: NDArray[np.float64], num_inputs: int, epsilon: float
) -> tuple[float, NDArray[np.float64]] | None:
    """Return the least mean variance and P for fixed outputs alpha, or None if no P exists.

    P is unbiased and has t_j <= P_ij <= e^epsilon t_j for some t.
    """
    x, size = np.linspace(0.0, 1.0, num_inputs), len(outputs)
    count = num_inputs * size
    cost = np.concatenate([((x[:, None] - outputs) ** 2).ravel() / num_inputs, np.zeros(size)])
    equal = np.zeros((2 * num_inputs, count + size))
    bounds = np.zeros((2 * count, count + size))
    for i in range(num_inputs):
        equal[i, i * size : (i + 1) * size] = 1.0  # a row of P sums to 1
        equal[num_inputs + i, i * size : (i + 1) * size] = outputs  # unbiased: sum_j P_ij alpha_j = x_i
    at, column = np.arange(count), count + np.tile(np.arange(size), num_inputs)
    bounds[at, at], bounds[at, column] = 1.0, -math.exp(epsilon)  # P_ij <= e^epsilon t_j
    bounds[count + at, at], bounds[count + at, column] = -1.0, 1.0  # t_j <= P_ij
    target = np.concatenate([np.ones(num_inputs), x])
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    found = linprog(cost, bounds, np.zeros(2 * count), equal, target, method="highs", options=tight)
    if found.status != 0:
        return None
    return float(found.fun), found.x[:count].reshape(num_inputs, size)


def _symmetric(increments: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return outputs 1/2 +- a, with a the running sum of exp(increments), and 1/2 if their number is odd."""
    # rounded to a grid, because CPUs differ in the last digit of exp and the search would end elsewhere
    a = np.rint(np.cumsum(np.exp(increments)) * 2.0**30) * 2.0**-30
    return 0.5 + np.concatenate([-a[::-1], [0.0] * (size % 2), a])


@lru_cache(maxsize=32)
def solve_mvu(input_bits: int, output_bits: int, epsilon: float) -> MVUDesign:
    """Solve for P and alpha, once per setting and process.

    Args:
        input_bits: b_in, 1 to 4.
        output_bits: b_out, 1 to 4.
        epsilon: Level, > 0, in nats. Beyond 13, outputs would be too rare for probabilities over 2^32.

    Raises:
        ValueError: If an argument is out of range.
        RuntimeError: If no design is found, or the integers miss the level.
    """
    if not (1 <= input_bits <= 4 and 1 <= output_bits <= 4):
        raise ValueError(f"input_bits and output_bits must be in [1, 4], got {input_bits} and {output_bits}")
    check_positive(epsilon=epsilon)
    if epsilon > _LARGEST_LEVEL:
        raise ValueError(
            f"epsilon must be at most {_LARGEST_LEVEL:g}, got {epsilon}. "
            "Choose a smaller one, or SubtractiveDither without privacy."
        )
    num_inputs, size = 1 << input_bits, 1 << output_bits
    level = epsilon * (1.0 - 1e-7) - 2.0 / _WORD * (1 << output_bits)  # room for the rounding to integers
    if level <= 0.0:
        raise ValueError(f"integers over 2^32 can't express epsilon = {epsilon}. Choose epsilon >= 1e-7.")

    def objective(increments: NDArray[np.float64]) -> float:
        solved = _solve_probabilities(_symmetric(increments, size), num_inputs, level)
        # the small slope breaks ties, because CPUs sort equal values in different orders
        lean: float = 1e-9 * sum(place * step for place, step in enumerate(increments.tolist(), 1))
        return lean + (_IMPOSSIBLE if solved is None else math.log(solved[0]))

    best = _minimise(objective, _starts(size // 2, 0.5 / math.tanh(epsilon / 2)))
    if best.fun >= _IMPOSSIBLE - 1.0:
        raise RuntimeError(f"no MVU design found for {input_bits}, {output_bits}, epsilon = {epsilon}")
    return _round(_symmetric(best.x, size), num_inputs, level, epsilon)


def _minimise(
    objective: Callable[[NDArray[np.float64]], float], starts: Iterator[NDArray[np.float64]]
) -> OptimizeResult:
    """Minimise from several starts: a short search from each, then longer ones from the two best."""

    def search(start: NDArray[np.float64], most: int, simplex: Any = None) -> OptimizeResult:
        """Minimise by Nelder-Mead with `most` evaluations per coordinate, from a point or from a simplex."""
        options = {"xatol": 1e-4, "fatol": 1e-7, "maxfev": most * len(start), "initial_simplex": simplex}
        return minimize(objective, start, method="Nelder-Mead", options=options)

    value = attrgetter("fun")
    rough = sorted((search(start, 15) for start in starts), key=value)
    longer = (search(found.x, 15, found.final_simplex[0]) for found in rough[:2])
    best, before = min(longer, key=value), math.inf
    while before - best.fun > 1e-4:  # a new simplex gets out of a flat valley
        before, best = best.fun, min(best, search(best.x, 60), key=value)
    return best


def _starts(half: int, widest: float) -> Iterator[NDArray[np.float64]]:
    """Yield starting increments: outputs at even spacing, except for the first, scaled to a few widths.

    The width is relative to the output of randomised response, `widest`. A late first output is best around
    epsilon 1, an early one at 2, and an even one far from there.
    """
    for reach, inner in ((1.05, 0.5), (1.1, 0.1), (1.2, 2.5), (1.5, 0.5)) if half > 1 else ((1.0, 0.5),):
        steps = np.full(half, reach * widest * 1.0001 / (half - 1 + inner))
        steps[0] *= inner
        yield np.log(steps)


def _round(outputs: NDArray[np.float64], num_inputs: int, level: float, epsilon: float) -> MVUDesign:
    """Round the probabilities to integers over 2^32, after dropping outputs that are too rare."""
    solved = _solve_probabilities(outputs, num_inputs, level)
    while solved is None or (solved[1].min(0) <= _SMALLEST).any():
        if solved is not None:
            outputs = outputs[solved[1].min(0) > _SMALLEST]
        # without the dropped outputs, unbiasedness needs slightly wider outputs
        outputs = 0.5 + (outputs - 0.5) * (1.0 + 1e-7)
        solved = _solve_probabilities(outputs, num_inputs, level)
    counts = np.round(solved[1] * _WORD).astype(np.int64)
    lowest = counts.min(0)
    # rounding must not lift a ratio above the level
    counts = np.minimum(counts, np.floor(lowest * math.exp(level)).astype(np.int64))
    # rows must sum to 2^32, and the attained epsilon is checked below
    counts[np.arange(num_inputs), counts.argmax(1)] += _WORD - counts.sum(1)
    design = MVUDesign(counts, outputs)
    if design.epsilon > epsilon:
        raise RuntimeError(f"the MVU integers attain epsilon = {design.epsilon}, above the given {epsilon}")
    return design


@dataclass(frozen=True)
class MVU(Mechanism):
    """Minimum-variance unbiased epsilon-LDP channel with a few levels per coordinate.

    Take it for local privacy with 2 to 4 bits per coordinate, if a one-bit mechanism is too noisy. It has no
    secure aggregation, because messages can't be summed before decoding.

    Args:
        epsilon_per_coordinate: Local budget per coordinate and round, > 0, in nats.
        input_bits: b_in, bits of the grid that values are rounded to, 1 to 4.
        output_bits: b_out, bits per coordinate in a message, 1 to 4.

    The claim is epsilon-LDP per coordinate and round against every adversary.

    A message has `output_bits` bits per coordinate.

    References:
        Chaudhuri, Guo, Rabbat, Privacy-Aware Compression for Federated Data Analysis, UAI 2022

    Examples:
        >>> design = MVU(epsilon_per_coordinate=1.0).design
        >>> [round(value, 2) for value in design.values.tolist()]  # of the outputs, in radii
        [-2.71, -1.92, 1.92, 2.71]
    """

    homomorphic = False

    epsilon_per_coordinate: float
    input_bits: int = 2
    output_bits: int = 2

    def __post_init__(self) -> None:
        _ = self.design

    @property
    def design(self) -> MVUDesign:
        """Solved P and alpha."""
        return solve_mvu(self.input_bits, self.output_bits, self.epsilon_per_coordinate)

    def with_level(self, level: float, context: RoundContext, max_dropped_clients: int) -> MVU:
        # the level is the epsilon of a coordinate
        if level < _LEAST_LEVEL:
            raise ValueError(f"epsilon must be at least {_LEAST_LEVEL:g} for a precise design, got {level}")
        return replace(self, epsilon_per_coordinate=level)

    def encode(self, update: Tensor, context: RoundContext, rand: ClientRandomness) -> Message:
        # symbols are uint8 output numbers
        rows = update.detach().reshape(len(rand.clients), context.dim).float().contiguous().numpy()
        lines, edges = segment_lines(context.segments, context.center, context.radius), self.design.edges
        index, units, clipped = np.empty(rows.shape, np.uint8), np.empty(min(_CHUNK, context.dim)), 0
        for row, client in enumerate(rand.clients):
            private = rand.private(client, "mvu coins")
            for first in range(0, context.dim, _CHUNK):
                part = index[row, first : first + _CHUNK]
                up, words = private.words(len(part)), private.words(len(part))
                clipped += normalise_segments(rows[row], first, lines, True, units[: len(part)])
                part[:] = draw_outputs(units[: len(part)], up, words, edges)
        symbols = torch.from_numpy(index).reshape(update.shape)
        return Message(symbols, self.output_bits * symbols.numel(), clipped)

    def decode(
        self, symbols: Tensor, clients: Sequence[int], context: RoundContext, rand: PublicRandomness
    ) -> Tensor:
        count, dim, values = len(clients), context.dim, self.design.values
        if tuple(symbols.shape) != (count, dim):
            raise ValueError(f"messages must have shape {(count, dim)}, got {tuple(symbols.shape)}")
        check_received(symbols, count, dim, len(values) - 1)
        total = np.zeros(dim)
        for row in symbols.numpy():
            total += values[row]
        return decode_total(torch.from_numpy(total), context.segments, count * context.center, context.radius)

    def code(self, context: RoundContext) -> FixedLength:
        """Return `output_bits` bits per coordinate, even if the design has dropped some outputs."""
        return FixedLength(self.output_bits)

    def symbol_range(self, context: RoundContext, rand: PublicRandomness) -> tuple[int, int]:
        """Return the smallest and largest output. The code has room for more."""
        return 0, len(self.design.values) - 1

    def influence(self, client: int, context: RoundContext) -> float:
        """Return the largest output over the largest honest mean, one radius."""
        return float(np.abs(self.design.values).max())

    def noise_variance(self, context: RoundContext, clients: Sequence[int]) -> Tensor:
        """Return the squared radius times the worst variance, over the number of clients."""
        return context.radius**2 * (self.design.worst_variance / len(clients))

    def claims(self, context: RoundContext) -> tuple[PrivacyClaim, ...]:
        """Return the claim of any two grid points' output distributions, per coordinate, for every adversary.

        An input between two grid points is a mixture of their distributions. Hiding by other clients is not
        counted.
        """
        rows = [tuple(row) for row in self.design.probabilities.tolist()]
        loss = PmfPairs(tuple(combinations(rows, 2)), "one output of the mechanism's matrix")
        return same_for_all(loss, context.dim, (ARBITRARY, FRESH), unit=Unit.COORDINATE)
