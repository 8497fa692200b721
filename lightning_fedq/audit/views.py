"""Statistical tests of a claim from the outcomes that one adversary observes in the simulation.

A view counts outcomes for two neighbouring inputs, label 0 and label 1, at every position. Half of the draws
choose an event for every epsilon: the outcomes that are more likely under one label. The other half bound the
two probabilities of this event (Clopper-Pearson).

Half of a view's error probability goes to the test of all positions together. The rest is divided over single
positions, because one coordinate that is not randomised must raise an alarm. Claimed Renyi divergences are
bounded as well, because the epsilon and delta that follow from them are far from tight
(`proven_divergence`).

Outcomes of different positions are counted as independent draws. They are independent if every coordinate has
its own random bits. After a rotation, as in the distributed discrete Gaussian, they are uncorrelated and
nearly independent.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numba
import numpy as np
from numpy.typing import NDArray

from lightning_fedq.functional.trade_off import binomial_bounds
from lightning_fedq.mechanisms.interface import Loss
from lightning_fedq.privacy.accounting import composed_grid
from lightning_fedq.privacy.grid import LossGrid

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
Event = NDArray[np.bool_]
"""Whether each outcome is part of an event."""

_POSITION_CLASSES = 4
MOST = 700.0
"""Largest epsilon whose exponential is computed, because it must stay a float."""
_LARGEST_EPSILON = 40.0
_BOUNDED_POSITIONS = 32
_ORDERS = (1.25, 2.0)
"""Orders of the tested Renyi divergences. The first is sharper for little noise, the second for much."""
_DRAWS_OF_AN_OUTLIER = 3000
"""The weight of one draw is at most 1/3000 of all draws. A larger range would widen the bound too much."""


def describe_evidence(
    updates: tuple[str, str], outputs: str, hits: tuple[int, int], draws: tuple[int, int]
) -> str:
    """Return a sentence on an event that the claim does not allow to be so unequally frequent.

    Args:
        updates: Names of the two updates.
        outputs: Description of the event.
        hits: Number of draws in the event, by update.
        draws: Number of draws, by update.
    """
    shares = [f"{hit / max(drawn, 1):.4f}" for hit, drawn in zip(hits, draws, strict=True)]
    return (
        f"update '{updates[0]}' gives {outputs} with frequency {shares[0]}, update "
        f"'{updates[1]}' with frequency {shares[1]} ({draws[0]} and {draws[1]} draws)."
    )


def proven_epsilons(low: Array, high: Array, epsilons: Array) -> Array:
    """Return the largest pure epsilons that bounds of two probabilities refute, or 0.

    A pure epsilon allows at most the ratio e^epsilon of the two probabilities. At a smaller epsilon e it
    allows at most the delta of randomised response, (e^epsilon - e^e) / (1 + e^epsilon).

    Args:
        low: Lower bounds of the probability of an event under one update.
        high: Upper bounds of its probability under the other update.
        epsilons: Epsilons e at which the events were chosen.
    """
    odds = np.exp(np.minimum(epsilons, MOST))
    delta = np.clip(low - odds * high, 0.0, 1.0 - 1e-12)
    with np.errstate(divide="ignore"):
        by_ratio, by_delta = np.log(low / high), np.log((odds + delta) / (1.0 - delta))
    return np.maximum(np.maximum(by_ratio, np.where(delta > 0.0, by_delta, 0.0)), 0.0)


@dataclass(frozen=True)
class Trial:
    """Result of one pair of updates for one view.

    Args:
        view: Name of the view.
        pair: Names of the two updates.
        num_clients: Sizes of the cohorts in which the pair was played.
        claim: Claimed pure epsilon, or claimed delta at the tested epsilon.
        lower_bound: Proven pure epsilon or delta.
        alarm: Evidence that contradicts the claim, or "".
    """

    view: str
    pair: tuple[str, str]
    num_clients: tuple[int, ...]
    claim: float
    lower_bound: float
    alarm: str = ""


@dataclass(frozen=True)
class Finding:
    """Result of the audit for one view: claim, lower bound and verdict.

    Args:
        view: Name of the view.
        claim: Claimed pure epsilon. If the claim is a curve, it is the claimed delta at `epsilon` or the
            claimed Renyi divergence of `order`.
        lower_bound: Largest pure epsilon, delta at `epsilon` or divergence of `order` that the draws prove
            at the suite's confidence.
        draws: Draws per neighbouring input.
        alarm: Evidence that contradicts the claim, or "".
        epsilon: For a curve, the tested epsilon at which the lower bound is closest to the claim. None for
            a pure epsilon.
        order: Order of the Renyi divergence, if the lower bound is closest to the claim there.
        trials: Results of pairs of updates other than the mechanism's own, see `updates`.
        num_clients: Sizes of the cohorts that were played.
        rounds: First and last number of every stretch of rounds that was played.
    """

    view: str
    claim: float
    lower_bound: float
    draws: int
    alarm: str = ""
    epsilon: float | None = None
    order: float | None = None
    trials: tuple[Trial, ...] = ()
    num_clients: tuple[int, ...] = ()
    rounds: tuple[tuple[int, int], ...] = ()

    @property
    def verdict(self) -> Literal["holds", "refuted", "saw nothing"]:
        """Verdict on the claim, "holds" only if a fault that doubles the privacy loss would be refuted.

        The test could have seen such a fault if the lower bound is at least half of the claim. A property
        that is checked exactly has no bound, and either holds or is refuted.
        """
        if self.alarm:
            return "refuted"
        if self.epsilon is not None and self.claim >= 1.0:
            return "saw nothing"  # delta can't exceed a claim of 1
        if math.isinf(self.claim) or 2.0 * self.lower_bound >= self.claim:
            return "holds"
        return "saw nothing"

    @property
    def blind(self) -> tuple[Trial, ...]:
        """Pairs of updates with a bound below half of the claim, the lowest first.

        A fault that doubles the privacy loss of such a pair would not be seen, unless the loss is then above
        the claim.
        """
        few = [trial for trial in self.trials if 2.0 * trial.lower_bound < trial.claim]
        return tuple(sorted(few, key=lambda trial: trial.lower_bound / trial.claim))

    @property
    def report(self) -> str:
        """Verdict with what it was tried on: pairs of updates, cohorts, rounds, and how close it comes."""
        if self.alarm:
            return f"refuted: {self.alarm}"
        if not self.num_clients:
            return self.verdict
        *first, last = map(str, self.num_clients)
        clients = f"{', '.join(first)} and {last}" if first else last
        rounds = ", ".join(f"{first}-{last}" for first, last in self.rounds)
        count = len(self.trials) + 1
        tried = f"in {count} pair{'s' * (count > 1)}, {clients} clients, rounds {rounds}"
        if math.isinf(self.claim):
            return f"{self.verdict} {tried}"
        return f"{self.verdict} {tried}, bound {self.lower_bound:.2g} of {self.claim:.2g}"

    @property
    def blind_spots(self) -> str:
        """Sentences about pairs with a bound far below the claim, or ""."""
        if not (blind := self.blind):
            return ""
        lowest = [
            f"'{trial.pair[0]}' against '{trial.pair[1]}' ({trial.lower_bound:.2g} of {trial.claim:.2g})"
            for trial in blind[:2]
        ]
        return (
            f"the bound is below half of the claim in {len(blind)} of {len(self.trials) + 1} pairs, such as "
            f"{' and '.join(lowest)}. A fault that doubles the loss of such a pair would not be seen there."
        )


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _count(counts: Counts, labels: Counts, outcomes: Counts) -> None:
    for position in range(outcomes.size):
        if labels[position] >= 0:
            counts[labels[position], position, outcomes[position]] += 1


def _worst(first: Array, second: Array, epsilon: float) -> Counts:
    """Return the positions whose frequencies differ most, by difference or by ratio.

    Only these positions are bounded, which saves time. The error probability still counts every position, so
    the selection can lose an alarm but not raise a false one.

    Args:
        first: `(positions,)` frequencies of the event under the first label.
        second: `(positions,)` frequencies of the event under the second label.
        epsilon: Epsilon of the test.
    """
    if len(first) <= 2 * _BOUNDED_POSITIONS:
        return np.arange(len(first))
    by_delta = np.argsort(math.exp(min(epsilon, MOST)) * second - first, kind="stable")[:_BOUNDED_POSITIONS]
    by_ratio = np.argsort(second / np.maximum(first, 1e-12), kind="stable")[:_BOUNDED_POSITIONS]
    return np.union1d(by_delta, by_ratio)


def proven_divergence(order: float, learned: Array, fresh: Counts, alpha: float) -> float:
    """Return a lower bound on the Renyi divergence of two laws, wrong with probability <= `alpha`.

    For every function g of an outcome, the divergence of order a is at least
    a / (a - 1) ln E_P[e^((a - 1) g)] - ln E_Q[e^(a g)]. Both expectations are of bounded numbers, so the
    draws bound them (empirical Bernstein). The best g is the log of the likelihood ratio. It is estimated
    from other draws and clipped.

    Args:
        order: Order a of the divergence, > 1.
        learned: `(2, outcomes)` estimates of the laws P and Q, > 0, from other draws.
        fresh: `(2, outcomes)` counts of the draws from P and Q.
        alpha: Error probability, in (0, 1).

    References:
        Birrell et al., Variational Representations and Neural Network Estimation of Renyi Divergences, 2021,
        theorem 3.1; Maurer, Pontil, Empirical Bernstein Bounds, COLT 2009, theorem 4.
    """
    if (weight := fresh.sum(1).min() / _DRAWS_OF_AN_OUTLIER) <= 1.0:
        return 0.0
    limit = math.log(weight) / order
    g = np.clip(np.log(learned[0] / learned[1]), -limit, limit)
    low = _bernstein(np.exp((order - 1.0) * g), fresh[0], alpha / 2.0, -1.0)
    high = _bernstein(np.exp(order * g), fresh[1], alpha / 2.0, 1.0)
    return max(order / (order - 1.0) * math.log(low) - math.log(high), 0.0) if low > 0.0 else 0.0


def _bernstein(values: Array, counts: Counts, alpha: float, side: float) -> float:
    """Return an empirical Bernstein bound on the mean: a lower bound for side -1, an upper bound for 1.

    Args:
        values: `(outcomes,)` value of each outcome.
        counts: `(outcomes,)` number of draws of each outcome.
        alpha: Error probability of the bound.
        side: -1.0 or 1.0.
    """
    draws, log = int(counts.sum()), math.log(2.0 / alpha)
    mean = float(values @ counts) / draws
    variance = float((values - mean) ** 2 @ counts) / (draws - 1)
    reach = float(values.max() - values.min())
    return mean + side * (math.sqrt(2.0 * variance * log / draws) + 7.0 * reach * log / (3.0 * (draws - 1)))


class View:
    """Histograms of one adversary's view, [half, label, position, outcome], and the claim under test.

    Args:
        name: Name of the view.
        loss: Privacy loss that is claimed for one composition.
        copies: Number of compositions that one outcome shows.
        positions: Number of positions.
        outcomes: Number of outcomes of a position.
        failure: Probability of rounds that the loss does not cover. It is added to delta.
        period: Length of a stretch, if the positions repeat a stretch several times, perhaps with padding.
            The same place in all stretches is then also tested as one position with more draws. None is one
            stretch.
    """

    def __init__(
        self,
        name: str,
        loss: Loss,
        copies: int,
        positions: int,
        outcomes: int,
        failure: float = 0.0,
        period: int | None = None,
    ) -> None:
        self.name, self.copies, self.outcomes, self.failure = name, copies, outcomes, failure
        self._period, self._allowed = period or positions, dict[float, float]()
        if (composition := loss.composed(copies)) is not None:
            loss, self.copies = composition, 1
        self.loss = loss
        self.counts: Counts = np.zeros((2, 2, positions, outcomes), np.int64)
        self._inputs = "first", "second"
        self._describe: Callable[[Event], str] = lambda event: f"one of {int(event.sum())} outputs"

    def name_outputs(self, inputs: tuple[str, str], describe: Callable[[Event], str]) -> None:
        """Set the names of the two updates, and a function that names a set of outcomes, for alarms."""
        self._inputs, self._describe = inputs, describe

    def add(self, half: int, labels: Counts, outcomes: Counts) -> None:
        """Count one outcome of every position under its label.

        Args:
            half: 0 for draws that choose events, 1 for draws that bound probabilities.
            labels: `(positions,)` labels 0 or 1, or -1 for positions that are not counted.
            outcomes: `(positions,)` outcomes.
        """
        _count(self.counts[half], labels, outcomes)

    @cached_property
    def claimed(self) -> float:
        """Claimed pure epsilon. Infinite if the claim is a curve."""
        return self.copies * self.loss.pure_epsilon if not self.failure else math.inf

    def allowed(self, epsilon: float) -> float:
        """Return the delta that the claim allows at epsilon."""
        if (delta := self._allowed.get(epsilon)) is None:
            single = self.copies == 1
            curve = self.loss.curve(np.array([epsilon]))[0] if single else self._composed.delta(epsilon)
            delta = self._allowed[epsilon] = min(float(curve) + self.failure, 1.0)
        return delta

    @cached_property
    def _composed(self) -> LossGrid:
        return composed_grid(self.loss, 1e-6, self.copies, 1)

    @cached_property
    def epsilons(self) -> list[float]:
        """Epsilons at which the claim is tested.

        For a pure epsilon they are 0, half of it and all of it. For a curve they are 0 and the epsilons at
        which delta has fallen to half, a tenth and a hundredth.
        """
        if math.isfinite(self.claimed):
            return [0.0, 0.5 * self.claimed, self.claimed]
        first, floor = self.allowed(0.0), self.allowed(_LARGEST_EPSILON)
        if first - floor < 1e-9:
            return [0.0]
        return [0.0, *(self._find_epsilon(floor + part * (first - floor)) for part in (0.5, 0.1, 0.01))]

    def _find_epsilon(self, delta: float) -> float:
        """Return the smallest epsilon at which the claim allows at most `delta`, by bisection."""
        low, high = 0.0, _LARGEST_EPSILON
        for _ in range(20):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.allowed(middle) > delta else (low, middle)
        return high

    def conclude(self, low: Array, high: Array) -> tuple[Array, Array, Counts, list[str]]:
        """Compare bounds of probabilities with the claim.

        Args:
            low: `(epsilons, pairs)` lower bounds of the probability of an event under one update.
            high: `(epsilons, pairs)` upper bounds of its probability under the other update.

        Returns:
            Claims and the proven bounds that are closest to them, each `(pairs,)`. The number of the epsilon
            at which a pair contradicts the claim most, or -1, `(pairs,)`. What follows from it, or "".
        """
        epsilons, pairs = np.array(self.epsilons)[:, None], np.arange(low.shape[1])
        allowed = np.array([self.allowed(epsilon) for epsilon in self.epsilons])[:, None]
        proven = proven_epsilons(low, high, epsilons)
        deltas = np.maximum(low - np.exp(np.minimum(epsilons, MOST)) * high, 0.0)
        beyond = deltas > allowed + 1e-12
        pure = math.isfinite(self.claimed)
        score = np.where(beyond, proven if pure else deltas - allowed, -1.0)
        worst = np.where(beyond.any(0), score.argmax(0), -1)
        implied = ["" for _ in pairs]
        for pair in np.flatnonzero(worst >= 0):
            at = worst[pair]
            if proven[at, pair] > self.claimed:
                said = f"epsilon is at least {proven[at, pair]:.3g}, and the claim is {self.claimed:.3g}"
            else:
                said = (
                    f"delta at epsilon {self.epsilons[at]:.3g} is at least {deltas[at, pair]:.3g}, and the "
                    f"claim is {allowed[at, 0]:.3g}"
                )
            implied[pair] = f"So {said}"
        if pure:
            return np.full(len(pairs), self.claimed), proven.max(0), worst, implied
        closest = (deltas / np.maximum(allowed, 1e-12)).argmax(0)
        return allowed[closest, 0], deltas[closest, pairs], worst, implied

    def judge(self, alpha: float) -> Finding:
        """Test the claim. A true claim raises an alarm with probability at most `alpha`."""
        renyi = {order: self.copies * self.loss.divergence(order) for order in _ORDERS if not self.failure}
        divergences = {order: claimed for order, claimed in renyi.items() if math.isfinite(claimed)}
        # alpha is divided over two orders of the labels, two bounds a test and all epsilons; claimed
        # divergences get half of it
        share = 0.25 * alpha * 0.5 / len(self.epsilons) / (2.0 if divergences else 1.0)
        tables = self._tables()
        share *= 2.0 / len(tables)
        results = [
            self._test(counts[:, [first, 1 - first]], share / counts.shape[2], position, first)
            for position, counts in tables.items()
            for first in (0, 1)
        ]
        alarm = next((found for _, _, found in results if found), "")
        draws = int(self.counts.sum(axis=(2, 3)).sum(0).min())
        if math.isfinite(self.claimed):
            return Finding(self.name, self.claimed, max(bound for bound, _, _ in results), draws, alarm)
        proven = np.max([deltas for _, deltas, _ in results], axis=0)
        allowed = [self.allowed(epsilon) for epsilon in self.epsilons]
        closest = int(np.argmax(proven / np.maximum(allowed, 1e-12)))
        epsilon, bound = self.epsilons[closest], float(proven[closest])
        by_delta = Finding(self.name, allowed[closest], bound, draws, alarm, epsilon)
        return self._judge_divergences(by_delta, divergences, 0.25 * alpha)

    def _tables(self) -> dict[str, Counts]:
        """Return the counts that are tested, by the noun for a position.

        Each is `(2 halves, 2 labels, positions, outcomes)`. They are pooled over all positions, over
        classes of positions, of the same place in all stretches, and of every position.
        """
        positions = self.counts.shape[2]
        pooled = [self.counts.sum(2, keepdims=True)]
        if positions >= 2 * _POSITION_CLASSES:
            classes = (self.counts[:, :, start::_POSITION_CLASSES] for start in range(_POSITION_CLASSES))
            pooled += [counts.sum(2, keepdims=True) for counts in classes]
        tables = {"pooled": np.concatenate(pooled, axis=2)}
        if (times := positions // self._period) > 1:
            stretches = self.counts[:, :, : times * self._period]
            tables["place"] = stretches.reshape(2, 2, times, self._period, self.outcomes).sum(2)
        return {**tables, "position": self.counts}

    def _judge_divergences(self, by_delta: Finding, claims: dict[float, float], alpha: float) -> Finding:
        """Return the finding about delta, or that about a divergence whose bound is closer to its claim.

        Args:
            by_delta: Finding about the claimed delta.
            claims: Claimed divergences by order.
            alpha: Error probability of all bounds together.
        """
        first, fresh = self.counts.sum(2)
        learned = (first + 0.5) / (first + 0.5).sum(1, keepdims=True)
        both_orders = (learned, fresh), (learned[::-1], fresh[::-1])
        shown, alarm = by_delta, by_delta.alarm
        closest = by_delta.lower_bound / max(by_delta.claim, 1e-12)
        for order, claimed in claims.items():
            proven = max(proven_divergence(order, *laws, alpha / len(claims)) for laws in both_orders)
            if proven > claimed and not alarm:
                alarm = f"the divergence of order {order:g} is {proven:.3g} or more, above {claimed:.3g}"
            if proven / claimed > closest:
                closest = proven / claimed
                shown = Finding(self.name, claimed, proven, by_delta.draws, order=order)
        return replace(shown, alarm=alarm)

    def _test(
        self, counts: Counts, alpha: float, position: str, label: int
    ) -> tuple[float, list[float], str]:
        """Return the largest proven pure epsilon, the proven delta at every epsilon, and an alarm or "".

        Args:
            counts: `(2 halves, 2 labels, positions, outcomes)` counts.
            alpha: Error probability of one bound at one position.
            position: Noun for a position in the alarm.
            label: Label of the draws that come first in `counts`.
        """
        best, proven, lows, highs, evidence = 0.0, [], [], [], []
        learned, fresh = counts[0] + 0.5, counts[1]
        learned = learned / learned.sum(2, keepdims=True)
        draws = fresh.sum(2)
        for epsilon in self.epsilons:
            event = learned[0] > math.exp(min(epsilon, MOST)) * learned[1]
            hits, misses = (np.where(event, fresh[label], 0).sum(1) for label in (0, 1))
            worst = _worst(hits / np.maximum(draws[0], 1), misses / np.maximum(draws[1], 1), epsilon)
            low = binomial_bounds(hits[worst], draws[0, worst], alpha)[0]
            high = binomial_bounds(misses[worst], draws[1, worst], alpha)[1]
            with np.errstate(divide="ignore"):
                best = max(best, float(np.log(low / high).max()))
            deltas = low - math.exp(min(epsilon, MOST)) * high
            proven.append(max(float(deltas.max()), 0.0))
            largest = int(deltas.argmax())
            at = int(worst[largest])
            lows.append(low[largest])
            highs.append(high[largest])
            evidence.append((at, event[at], (hits[at], misses[at]), (draws[0, at], draws[1, at])))
        _, _, found, implied = self.conclude(np.array(lows)[:, None], np.array(highs)[:, None])
        if found[0] < 0:
            return best, proven, ""
        at, event, hits, draws = evidence[found[0]]
        names = self._inputs[label], self._inputs[1 - label]
        place = "" if position == "pooled" else f"{position} {at}: "
        seen = describe_evidence(names, self._describe(event), hits, draws)
        return best, proven, f"{place}{seen} {implied[0]}"
