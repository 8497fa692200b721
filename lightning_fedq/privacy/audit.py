"""Audit, layers B and C: does what is shipped keep what it claims? Simulation with certain error bounds.

Layer B encodes the worst neighbours with a mechanism as it is shipped, real words, streams and packing,
and looks from several views: one message, two rounds, two layers, a whole group, the sum, the bits on the
wire. Half of the draws choose an event, the other half bound its probabilities (Clopper-Pearson, Bonferroni
over all tests of the suite), so an alarm in a clean mechanism has probability `alpha`, 0.1% by default.
Coordinates are tested each on their own as well as together: one that is not randomised must show.

Layer C is the one-run audit: many independent canaries in one round, a guess for each, and the largest
epsilon that so many right guesses refute.

References:
    Steinke, Nasr, Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023, Theorem 5.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special, stats
from torch import Tensor

from lightning_fedq.core import Adversary, Mechanism, NonPrivate, PrivacyClaim, RoundContext
from lightning_fedq.privacy.accounting import composed_grid
from lightning_fedq.privacy.losses import pure_epsilon, worst_curve
from lightning_fedq.randomness import ClientRandomness, PublicRandomness, SeededKeys

Array = NDArray[np.float64]
Counts = NDArray[np.int64]

_DIM = 1024
_COHORT = 4
_OUTCOMES = 32
_WIRE_ROUNDS = 400


@dataclass(frozen=True)
class Finding:
    """What one view showed.

    Args:
        view: What was looked at.
        claim: Claimed pure epsilon of the view; infinite where the claim is an (epsilon, delta) curve.
        lower_bound: Largest epsilon that the draws prove, at the suite's confidence.
        draws: Draws per neighbour.
        alarm: What contradicts the claim, or "".
    """

    view: str
    claim: float
    lower_bound: float
    draws: int
    alarm: str = ""


def clopper_pearson(hits: Counts, draws: int, alpha: float) -> tuple[Array, Array]:
    """One-sided lower and upper bounds of a probability, each wrong with probability at most `alpha`."""
    lower: Array = np.where(hits > 0, special.betaincinv(np.maximum(hits, 1), draws - hits + 1, alpha), 0.0)
    upper: Array = np.where(
        hits < draws, special.betaincinv(hits + 1, np.maximum(draws - hits, 1), 1.0 - alpha), 1.0
    )
    return lower, upper


class _View:
    """Histograms of one view: [half, world, position, outcome]."""

    def __init__(self, name: str, claim: PrivacyClaim, dim: int, positions: int, copies: int = 1) -> None:
        self.name, self.positions = name, positions
        self.counts: Counts = np.zeros((2, 2, positions, _OUTCOMES), np.int64)
        whole = claim.compositions != dim
        self.copies = copies * (claim.compositions if whole else 1)
        self.loss = claim.loss

    def add(self, half: int, world: int, outcomes: NDArray[np.int64]) -> None:
        place = np.arange(self.positions) * _OUTCOMES + outcomes
        flat = np.bincount(place, minlength=self.positions * _OUTCOMES)
        self.counts[half, world] += flat.reshape(self.positions, _OUTCOMES)

    @property
    def claimed(self) -> float:
        return self.copies * pure_epsilon(self.loss)

    def allowed(self, epsilon: float) -> float:
        """delta that the claim grants at epsilon."""
        if self.copies == 1:
            return float(worst_curve(self.loss, np.array([epsilon]))[0])
        return composed_grid(self.loss, 1e-6, self.copies, 1).delta(epsilon)

    def epsilons(self) -> list[float]:
        claimed = self.claimed
        return [0.0, 0.5, 1.0, 2.0, 4.0] if claimed > 20.0 else [0.0, 0.5 * claimed, claimed]

    def num_tests(self) -> int:
        return (len(self.epsilons()) + 1) * 2 * (self.positions + 4)

    def judge(self, alpha: float) -> Finding:
        """Compare with the claim: all positions together, in three classes, and each alone."""
        classes = [self.counts.sum(2, keepdims=True)]
        classes += [self.counts[:, :, start::3].sum(2, keepdims=True) for start in range(3)]
        best, alarm = 0.0, ""
        for counts, what in [*((c, "pooled") for c in classes), (self.counts, "position")]:
            if not counts.size:
                continue
            draws = counts.sum(3)
            for first in (0, 1):
                bound, found = self._test(counts[:, [first, 1 - first]], int(draws.max()), alpha)
                best = max(best, bound)
                alarm = alarm or (f"{what}: {found}" if found else "")
        return Finding(self.name, self.claimed, best, int(self.counts[1].sum(axis=(1, 2)).min()), alarm)

    def _test(self, counts: Counts, draws: int, alpha: float) -> tuple[float, str]:
        """Largest proven epsilon, and the first contradiction, for one order of the two worlds."""
        best, alarm = 0.0, ""
        learned, fresh = counts[0] + 0.5, counts[1]
        for epsilon in self.epsilons():
            event = learned[0] > math.exp(epsilon) * learned[1]
            hits, misses = (np.where(event, fresh[world], 0).sum(1) for world in (0, 1))
            low, high = clopper_pearson(hits, draws, alpha)[0], clopper_pearson(misses, draws, alpha)[1]
            with np.errstate(divide="ignore"):
                best = max(best, float(np.log(low / high).max()))
            excess = low - math.exp(epsilon) * high - self.allowed(epsilon) - 1e-12
            if not alarm and float(excess.max()) > 0.0:
                where = int(excess.argmax())
                alarm = (
                    f"at epsilon {epsilon:.3g} delta exceeds the claim by {excess.max():.3g} (number {where})"
                )
        return best, alarm


class _Bench:
    """Encodes two neighbours again and again and fills the views."""

    def __init__(self, mechanism: Mechanism, seed: int) -> None:
        self.mechanism, self.keys = mechanism, [SeededKeys(2 * seed), SeededKeys(2 * seed + 1)]
        groups, start = [], 0
        for size in mechanism.group_sizes(_COHORT):
            groups.append(tuple(range(start, start + size)))
            start += size
        # an odd tail: a last coordinate and the bits that pad it to bytes
        self.segments = (_DIM // 2, _DIM // 2 - 3)
        self.dim = sum(self.segments)
        self.groups = tuple(groups)
        self.pairs = [self.groups[0].index(c) for c in self.groups[0] if c != 0]
        one = torch.ones(2, dtype=torch.float64)
        self.center, self.radius = 0.0 * one, one
        self.claims = {claim.adversary: claim for claim in mechanism.claims(self.context(0))}
        pattern = torch.tensor([1.0, -1.0, 0.0]).repeat(self.dim)[: self.dim]
        self.others = torch.stack([pattern if c % 2 else -pattern for c in range(_COHORT)])
        self.sign = torch.cat([torch.ones(self.segments[0]), -torch.ones(self.segments[1])])
        self.edges: Array | None = None

    def context(self, round: int) -> RoundContext:
        return RoundContext(round, self.groups, self.segments, self.center, self.radius)

    def encode(self, round: int, world: int) -> tuple[Tensor, RoundContext]:
        """All messages; the victim is client 0, its input is the sign of (round, layer, world)."""
        updates = self.others.clone()
        updates[0] = self.sign * (-1.0) ** (round + world) * 4.0  # far outside: clipping is part of it
        context = self.context(round)
        rand = ClientRandomness(self.keys[world], context.cohort, round)
        return self.mechanism.encode(updates, context, rand).symbols, context

    def binned(self, symbols: Tensor) -> NDArray[np.int64]:
        """Symbols as at most five classes, by edges from the first round."""
        values = symbols.numpy().astype(np.float64)
        if self.edges is None:
            levels = np.unique(values)
            self.edges = levels[1:] if len(levels) <= 5 else np.quantile(values, [0.1, 0.4, 0.6, 0.9])
        return np.searchsorted(self.edges, values, side="right").astype(np.int64)


def audit(
    mechanism: Mechanism, draws: int = 1_000_000, *, alpha: float = 1e-3, seed: int = 0
) -> tuple[Finding, ...]:
    """Try to refute a mechanism's claims by simulation.

    Args:
        mechanism: As it is shipped.
        draws: Draws of one coin per neighbour; 10^6 in tests, 10^7 takes about half a minute.
        alpha: Chance of an alarm if all claims hold.
        seed: Of the audit's own keys.

    Returns:
        One finding per view. Empty for a mechanism that claims nothing on one message: claims on the
        aggregate alone (distributed noise) are not simulated here.

    Raises:
        ValueError: If there are too few draws for two halves.
    """
    if draws < 8 * _DIM:
        raise ValueError(f"draws must be >= {8 * _DIM}, got {draws}")
    bench = _Bench(mechanism, seed)
    claim = bench.claims[Adversary.EAVESDROPPER]
    if isinstance(claim.loss, NonPrivate):
        return ()
    symbols, context = bench.encode(0, 0)
    per_coordinate = symbols.shape[1] == bench.dim
    views = _views(bench, claim, symbols, per_coordinate)
    rounds = draws // symbols.shape[1] // 2 * 2
    previous: dict[int, NDArray[np.int64]] = {}
    square_error, errors = 0.0, 0
    for round in range(rounds):
        for world in (0, 1):
            symbols, context = bench.encode(round, world)
            _fill(bench, views, symbols, context, (round, world, rounds), previous, per_coordinate)
            if round < _WIRE_ROUNDS and world == 0:
                squares, count = _decoding_error(bench, symbols, context)
                square_error, errors = square_error + squares, errors + count
    tests = sum(view.num_tests() for view in views.values()) + 1
    findings = [view.judge(alpha / tests) for view in views.values()]
    return (*findings, _judge_error(bench, square_error / max(errors, 1), errors))


def _views(bench: _Bench, claim: PrivacyClaim, symbols: Tensor, per_coordinate: bool) -> dict[str, _View]:
    length = symbols.shape[1]
    views = {"message": _View("one message", claim, bench.dim, length)}
    views["rounds"] = _View("two rounds", claim, bench.dim, length, copies=2)
    if per_coordinate:
        views["layers"] = _View("two layers", claim, bench.dim, bench.segments[1], copies=2)
        server, outsider = bench.claims[Adversary.SERVER], bench.claims[Adversary.OUTSIDER]
        if len(bench.groups[0]) > 1 and not isinstance(server.loss, NonPrivate):
            views["group"] = _View("all messages of a group", server, bench.dim, length)
        if bench.mechanism.homomorphic and not isinstance(outsider.loss, NonPrivate):
            views["sum"] = _View("the sum", outsider, bench.dim, length)
    stream = bench.mechanism.code(bench.context(0)).pack(symbols[0])
    if len(stream) == (length + 7) // 8:
        views["wire"] = _View("bits on the wire", claim, bench.dim, 8 * len(stream))
    return views


def _fill(
    bench: _Bench,
    views: dict[str, _View],
    symbols: Tensor,
    context: RoundContext,
    now: tuple[int, int, int],
    previous: dict[int, NDArray[np.int64]],
    per_coordinate: bool,
) -> None:
    round, world, rounds = now
    half = int(2 * (round // 2 * 2) >= rounds)
    outcome = bench.binned(symbols)
    own, turned = outcome[0], (round + world) % 2
    # the second layer has the opposite input, so its worlds are the other way round
    split = bench.segments[0] if per_coordinate else len(own)
    for view in ("message", "group", "sum"):
        if view in views:
            seen = _seen(bench, view, outcome)
            for part, sign in ((slice(0, split), turned), (slice(split, None), 1 - turned)):
                _add_part(views[view], half, sign, part, seen)
    if round % 2 == 0:
        previous[world] = own
    else:
        both = 5 * previous[world] + own
        for part, sign in ((slice(0, split), world), (slice(split, None), 1 - world)):
            _add_part(views["rounds"], half, sign, part, both)
    if "layers" in views:
        size = bench.segments[1]
        views["layers"].add(half, turned, 5 * own[:size] + own[split:])
    if "wire" in views and round < _WIRE_ROUNDS:
        stream = bench.mechanism.code(context).pack(symbols[0])
        bits = np.unpackbits(np.frombuffer(stream, np.uint8)).astype(np.int64)
        early = int(2 * round >= min(rounds, _WIRE_ROUNDS))
        for part, sign in ((slice(0, split), turned), (slice(split, None), 1 - turned)):
            _add_part(views["wire"], early, sign, part, bits)


def _seen(bench: _Bench, view: str, outcome: NDArray[np.int64]) -> NDArray[np.int64]:
    if view == "message":
        return np.asarray(outcome[0])
    if view == "sum":
        return np.asarray(np.minimum(outcome.sum(0), _OUTCOMES - 1))
    rest = outcome[list(bench.groups[0])[1:]].sum(0)
    return np.asarray(np.minimum(5 * outcome[0] + rest, _OUTCOMES - 1))


def _add_part(view: _View, half: int, world: int, part: slice, outcomes: NDArray[np.int64]) -> None:
    positions = np.arange(view.positions)[part]
    np.add.at(view.counts[half, world], (positions, outcomes[part]), 1)


def _decoding_error(bench: _Bench, symbols: Tensor, context: RoundContext) -> tuple[float, int]:
    """Squared error of the decoded mean over the clients whose inputs lie inside the range."""
    inside = [client for client in context.cohort if client != 0]
    groups = [group for group in bench.groups if 0 not in group and len(group) > 1] or [tuple(inside)]
    clients = list(groups[0])
    public = PublicRandomness(bench.keys[0], context.round)
    mean = bench.mechanism.decode(symbols[clients], clients, context, public) / len(clients)
    exact = bench.others[clients].mean(0)
    return float((mean - exact).double().square().sum()), mean.numel()


def _judge_error(bench: _Bench, mean_square: float, count: int) -> Finding:
    """A coupling that goes wrong may cost nothing but accuracy, which the stated variance would not allow."""
    groups = [group for group in bench.groups if 0 not in group and len(group) > 1]
    clients = groups[0] if groups else tuple(client for client in bench.groups[-1] if client != 0)
    bound = bench.mechanism.noise_variance(bench.context(0), clients) if groups else None
    limit = math.inf if bound is None else float(bound.max())
    # the squared error of a bounded sum has a std below its largest value, about 2 alpha^2
    alarm = ""
    if mean_square > limit * (1.0 + 12.0 / math.sqrt(max(count, 1))):
        alarm = f"the mean squared error {mean_square:.4g} exceeds the stated {limit:.4g}"
    return Finding("error of the mean", math.inf, 0.0, count, alarm)


# ---- layer C ----------------------------------------------------------------------------------------------


def one_run_lower_bound(canaries: int, guesses: int, correct: int, delta: float, alpha: float) -> float:
    """Largest epsilon that `correct` of `guesses` right guesses refute, with error probability `alpha`.

    Under (epsilon, delta)-DP, P(at least v right of r) <= P(B >= v) + 2 m delta max_i P(v > B >= v - i) / i,
    B ~ Binomial(r, e^epsilon / (1 + e^epsilon)).

    Args:
        canaries: m, each present or absent by a fair coin.
        guesses: r <= m.
        correct: v <= r.
        delta: Of the claim that is tested.
        alpha: Error probability.

    Raises:
        ValueError: If the numbers are out of order.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"correct <= guesses <= canaries is needed, got {correct}, {guesses}, {canaries}")

    def refuted(epsilon: float) -> bool:
        law = stats.binom(guesses, special.expit(epsilon))
        tail = float(law.sf(correct - 1))
        if delta > 0.0:
            steps = np.arange(1, correct + 1)
            below = law.cdf(correct - 1) - law.cdf(correct - steps - 1)
            tail += 2.0 * canaries * delta * float((below / steps).max(initial=0.0))
        return tail <= alpha

    low, high = 0.0, 1.0
    if not refuted(0.0):
        return 0.0
    while refuted(high) and high < 64.0:
        low, high = high, 2.0 * high
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def audit_one_run(
    guess: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    canaries: int,
    claim: float,
    *,
    delta: float = 0.0,
    alpha: float = 1e-3,
    seed: int = 0,
) -> Finding:
    """Hide one fair coin per canary in one run of anything, guess them all, and bound epsilon from below.

    Args:
        guess: Runs the training with canary signs (+1 or -1, `(canaries,)`) and returns the guesses; 0 is
            no guess.
        canaries: How many.
        claim: The epsilon that is claimed for one canary.
        delta: The delta that goes with it.
        alpha: Chance of an alarm if the claim holds.
        seed: Of the canaries.
    """
    signs = np.random.default_rng(seed).integers(0, 2, canaries) * 2 - 1
    guesses = guess(signs)
    made, right = int((guesses != 0).sum()), int((guesses == signs).sum())
    bound = one_run_lower_bound(canaries, made, right, delta, alpha)
    alarm = "" if bound <= claim else f"{right} of {made} guesses are right"
    return Finding("one run with canaries", claim, bound, made, alarm)
