"""Random allocation: a client takes part in one unknown round of a block, behind a trusted adder's noise.

Every client draws its round of a block of T uniformly and independently of all others and of all data. What
is released is y_t, the sum of those who drew t, each at most C long, and N(0, std^2 I). With m = C / std and
L(x, y) = exp(<x, y> - |x|^2 / 2), two updates of one client are told apart no better than

    E_A N(m 1_A, I_T)  from  E_A N(-m 1_A, I_T),  A the client's round.

Proof, std = 1. Give the adversary the rounds of all others (divergences are jointly convex) and subtract
their part, a function of the history. Over N(0, I) the densities are P = E_A L(x_A(y_<A), y_A), and Q with
x'. Going backwards from t = T, all later steps are constants already, so for fixed other coordinates

    P - a Q = (c - a c') + w L(x_t, y_t) - a w' L(x'_t, y_t),  c, c', w, w' >= 0 and free of y_t.

(i) Let a hyperplane through 0 have x and x' on one side, s its reflection. F = c - a c' + w L(x, .) and g =
a w' L(x', .) are both larger on that side, so exchanging g(y) and g(s y) does not lower the sum of [F - g]_+
over the two, by convexity: x' may be reflected until it is -|x'| x / |x|. (ii) In one dimension {P > a Q} =
{y > tau}; the value is maximal in tau, rises with |x| and falls with P(N > tau + |x'|): both lengths become
C. (iii) Rotate y_t so that x_t = C e_1: the direction forgets the history, the step is a constant, and t - 1
follows.

So delta(e) = E [1/T sum_t g(y_t)]_+ with g(y) = L(m, y) - e^e L(-m, y) and independent y_t ~ N(0, 1): the
positive part of a sum of T equal scalars, one Fourier transform for each epsilon. Everything is rounded up:

* y beyond R = reach + m on the right: all of P there, Phi(-reach) + (T - 1) Phi(-R);
* y below -R: g is raised to g(-R), as it rises in y;
* the values of g in a cell of y move to its two ends, and these to points of a grid, so that masses and means
  stay: larger in convex order, and [.]_+ is convex;
* sums below the transform's window come back above it, where they count too much; sums above U count in full:
  their part is at most P(sum of L > U), by Chernoff.

Each block is one composition of this loss, and blocks compose adaptively. Not covered, and false: clients
dealt into equal cohorts (delta 23.6 times as large at m = 1/2, T = 2, epsilon 3), a published round, cohort
or number of answers, silence that depends on data, an attempt that is repeated, noise of the clients.

References:
    Feldman, Shenfeld, Privacy Amplification by Random Allocation, 2025 (an update or none; the theorem for
    any two updates and its proof are this project's). Zhu, Dong, Wang, Optimal Accounting via Characteristic
    Functions, AISTATS 2022, theorem 10 (composition).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from scipy import fft, special

from lightning_fedq.privacy.losses.loss import Array, Loss, both_sides
from lightning_fedq.privacy.losses.noise import GaussianLoss

_REACH = 7.5
_CELLS = 1 << 14
_POINTS = 1 << 19
_NODES = 60
_LARGEST_EXPONENT = 300.0
_MOST_ROUNDS = 1 << 16
_ROUNDING = 1e-17
"""What a transform may add to or take from the mass of a point."""


@dataclass(frozen=True)
class AllocatedGaussianLoss(Loss):
    """One block of rounds, in one of which the client takes part, nobody knows in which.

    With hardly any noise (below about 1/28 of twice the clip), or in blocks of more than 65,536 rounds, it is
    the loss where the round is known, which is larger.

    Args:
        noise_multiplier: Std of a trusted adder's noise over twice the clip, > 0, as in `GaussianLoss`.
        rounds: Rounds of a block, >= 1.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> loss = AllocatedGaussianLoss(0.5, 10)
        >>> round(loss.delta(2.846), 7), round(GaussianLoss(0.5).epsilon(1e-5, 1), 2)  # the round is known
        (1e-05, 10.0)
    """

    noise_multiplier: float
    rounds: int
    note: str = ""
    bounds_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 < self.noise_multiplier < math.inf or self.rounds < 1:
            raise ValueError(
                "noise_multiplier > 0 and rounds >= 1 are needed, got "
                f"{self.noise_multiplier} and {self.rounds}"
            )

    @property
    def _known(self) -> GaussianLoss:
        """The loss where the round is known."""
        return GaussianLoss(self.noise_multiplier, self.note)

    @property
    def _is_computed(self) -> bool:
        m = 0.5 / self.noise_multiplier
        return 1 < self.rounds <= _MOST_ROUNDS and m * (_REACH + m) <= _LARGEST_EXPONENT

    @property
    def scale(self) -> tuple[float, float]:
        return self._known.scale[0] / math.sqrt(self.rounds), math.inf

    def curve(self, epsilons: Array) -> Array:
        # chords between some epsilons, in e^epsilon, in which the true curve is convex
        size = np.minimum(np.abs(epsilons), 700.0)
        if not self._is_computed:
            return self._known.curve(epsilons)
        places, values = self._nodes
        chords = np.interp(np.exp(np.minimum(size, places[-1])), np.exp(places), values)
        # beyond the last node the known round's curve falls on
        return both_sides(epsilons, np.minimum(chords, self._known.curve(size)))

    @cached_property
    def _nodes(self) -> tuple[Array, Array]:
        """(epsilons, deltas) between which chords are drawn, ascending from 0."""
        low, far = 0.0, self._known.epsilon(1e-9, 1)
        near = far
        while near - low > 0.02 * near:
            middle = 0.5 * (low + near)
            low, near = (low, middle) if self.delta(middle) <= 1e-8 else (middle, near)
        near = min(1.05 * near, far)
        places = np.append(near * np.arange(_NODES) / _NODES, np.linspace(near, far, _NODES // 4))
        values = np.array([self.delta(float(place)) for place in places])
        return places, np.minimum.accumulate(values)  # a bound at a smaller epsilon holds here, too

    def delta(self, epsilon: float) -> float:
        """delta of one block at an epsilon >= 0, rounded up.

        Args:
            epsilon: In nats.
        """
        known = float(self._known.curve(np.array([epsilon]))[0])
        if not self._is_computed:
            return known
        m, rounds = 0.5 / self.noise_multiplier, self.rounds
        top = _REACH + m
        edges = np.linspace(-top, top, _CELLS + 1)
        largest = math.exp(m * top - 0.5 * m * m)  # L(m, R)
        # P's mass beyond R: in the client's round, and in the T - 1 others
        outside = float(special.ndtr(-_REACH) + (rounds - 1) * special.ndtr(-top))
        values, weights = _on_ends(edges, m, epsilon)
        # beyond `limit` lies at most e^-34 of P, by Chernoff: the client's own L, and those of all others
        slope = 40.0 / largest  # exponents of 40 at most, which a float holds
        ratios = np.exp(m * edges[1:] - 0.5 * m * m)
        log_mean = math.log(float(_normal(edges, 0.0) @ np.exp(slope * ratios)) + 1e-12)
        limit = largest + (rounds - 1) * log_mean / slope + 34.0 / slope
        step = (1.0 + math.exp(epsilon)) * limit / (_POINTS - 2 * rounds)
        places = values / step
        below = np.floor(places)
        index, part = below.astype(np.int64), places - below
        # the transform is cyclic: negative values lie at its end
        law = np.bincount(index % _POINTS, weights * (1.0 - part), _POINTS)
        law += np.bincount((index + 1) % _POINTS, weights * part, _POINTS)
        law = fft.irfft(fft.rfft(law) ** rounds, _POINTS)
        most = math.ceil(limit / step) + 2 * rounds
        positive = step * np.arange(most + 1, dtype=np.float64)
        inside = float(positive @ (np.maximum(law[: most + 1], 0.0) + _ROUNDING)) / rounds
        return min(inside + outside + 2.0 * math.exp(-34.0), known)  # who knows the round sees no less


def _normal(edges: Array, mean: float) -> Array:
    """`(cells,)` masses of N(mean, 1) between edges, each as exact as a float is."""
    low, high = edges[:-1] - mean, edges[1:] - mean
    masses: Array = np.where(
        low > 0.0, special.ndtr(-low) - special.ndtr(-high), special.ndtr(high) - special.ndtr(low)
    )
    return masses


def _on_ends(edges: Array, m: float, epsilon: float) -> tuple[Array, Array]:
    """Values of g and their masses that lie above the law of g(y), y ~ N(0, 1), in convex order.

    g rises, so in a cell it lies between its values at the ends: the law on these with the cell's mean is
    above its own. What lies below the first edge has the value there.
    """
    factor = math.exp(epsilon)
    ends = np.exp(m * edges - 0.5 * m * m) - factor * np.exp(-m * edges - 0.5 * m * m)
    mass, low, high = _normal(edges, 0.0), ends[:-1], ends[1:]
    means = (_normal(edges, m) - factor * _normal(edges, -m)) / mass
    part = np.clip((means - low) / (high - low), 0.0, 1.0)
    values = np.concatenate([low, high, ends[:1]])
    return values, np.concatenate([mass * (1.0 - part), mass * part, special.ndtr(edges[:1])])
