"""Counts of rounds with many kinds of updates, and their comparison with the claim.

One half of the draws chooses bins and events, the other half bounds their probabilities. The halves are
neighbouring coordinates, so they have the same clients and rounds. A claim about a whole vector is divided
over the coordinates in which the two updates differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_fedq.audit.bench import Bench
from lightning_fedq.audit.bins import Bins, Integers
from lightning_fedq.audit.played import Played
from lightning_fedq.audit.views import MOST, Array, Trial, View, describe_evidence
from lightning_fedq.functional.trade_off import binomial_bounds
from lightning_fedq.mechanisms.contract_suite.updates import PlayedUpdate
from lightning_fedq.mechanisms.interface import Adversary, Loss, Neighbours, PrivacyClaim

LARGE = 201
"""Number of clients of the large cohort, odd so that one client of pairs is left alone."""
ALONE = 1
"""Number of clients of the smallest cohort, which is played for claims about messages."""
BLOCKS = (0, 30, 1000)
"""First rounds of the early, late and very late rounds."""
SMALL_ROUNDS = 8
"""Rounds of a block in the small cohort."""


@dataclass(frozen=True)
class Tested:
    """One claim under test: the name of its view, the claim, and the number that the adversary sees.

    Args:
        view: Name of the view.
        claim: Claim of the bench's mechanism.
        extract: Function that returns `(positions,)` numbers of a round.
    """

    view: str
    claim: PrivacyClaim
    extract: Callable[[Played], Array]

    @property
    def of_message(self) -> bool:
        """Whether the view is one client's message."""
        return self.extract in (Played.message, Played.decoded_message)


def tested_claims(
    bench: Bench, adversaries: Sequence[Adversary] = tuple(Adversary), before: Sequence[Loss] = ()
) -> list[Tested]:
    """Return the claims to test, at most one for every adversary with a claim.

    An adversary that sees a function of an earlier view, with the same claim, is left out. Examples are the
    released sum after the sum of the messages, and every later adversary if each message has its own claim.
    All messages of a group are always counted, because they are not a function of one message.

    Args:
        bench: Bench that runs the rounds.
        adversaries: Adversaries that are tested.
        before: Claimed losses of views of earlier levels, whose adversaries hold more streams.
    """
    claims = {who: bench.private_claim(who) for who in adversaries}
    coupled, summed = len(bench.groups[0]) > 1, bench.mechanism.homomorphic
    message = Played.message if bench.symbolic else Played.decoded_message
    others = Played.honest_total if bench.rotated else Played.honest_sum
    wanted: list[tuple[str, Adversary, Callable[[Played], Array], bool]] = [
        ("one message", Adversary.EAVESDROPPER, message, True),
        ("all messages of a group", Adversary.SERVER, Played.group, bench.aligned and coupled),
        ("one message", Adversary.SERVER, message, not coupled),
        ("the sum of all messages", Adversary.SECAGG_SERVER, Played.total, bench.symbolic and summed),
        ("the released sum", Adversary.OUTSIDER, Played.released, True),
        ("a curious client", Adversary.CLIENT, others, len(bench.clients) > 1),
    ]
    tested: list[Tested] = []
    for name, who, extract, possible in wanted:
        claim, promised = claims.get(who), [*before, *(earlier.claim.loss for earlier in tested)]
        if claim is not None and possible and (claim.loss not in promised or extract is Played.group):
            tested.append(Tested(name, claim, extract))
    return tested


Comparison = tuple[int, int, tuple[str, str], View]
"""Two labels, the names of their updates, and the view that has the loss that the claim allows."""


@dataclass
class Cell:
    """Counts of one view in some rounds, and the pairs of labels that are compared.

    Args:
        view: Name of the view.
        place: Description of clients and rounds, for messages.
        counts: `(2 halves, labels, outcomes)` counts.
        pairs: Two labels, the names of their updates, and the loss that the claim allows.
        describe: Function that names a set of outcomes, given as a boolean mask.
        num_clients: Size of the cohort.
        is_listed: Whether its bounds are listed, as those of all coordinates and rounds are.
    """

    view: str
    place: str
    counts: Integers
    pairs: list[Comparison]
    describe: Callable[[NDArray[np.bool_]], str]
    num_clients: int
    is_listed: bool

    def ordered(self) -> Iterator[tuple[View, list[tuple[int, int, tuple[str, str]]]]]:
        """Yield the ordered pairs of labels that are compared, grouped by the loss that the claim allows."""
        by_view: dict[int, tuple[View, list[tuple[int, int, tuple[str, str]]]]] = {}
        for first, second, names, allowed in self.pairs:
            if min(self.counts[:, [first, second]].sum(2).min(1)) > 0:
                both = by_view.setdefault(id(allowed), (allowed, []))[1]
                both += [(first, second, names), (second, first, names[::-1])]
        yield from by_view.values()

    def judge(self, alpha: float) -> list[Trial]:
        """Compare all pairs of labels with the claim.

        Args:
            alpha: Error probability of one bound.
        """
        learned = self.counts[0] + 0.5
        learned = learned / learned.sum(1, keepdims=True)
        fresh, draws = self.counts[1], self.counts[1].sum(1)
        trials = []
        for view, pairs in self.ordered():
            one, other = np.array([pair[:2] for pair in pairs]).T
            odds = np.exp(np.minimum(view.epsilons, MOST))[:, None, None]
            event = learned[one] > odds * learned[other]  # (epsilons, pairs, outcomes)
            hits, misses = (np.where(event, fresh[label], 0).sum(2) for label in (one, other))
            low = binomial_bounds(hits, draws[one], alpha)[0]
            high = binomial_bounds(misses, draws[other], alpha)[1]
            claims, bounds, worst, implied = view.conclude(low, high)
            for number, (first, second, names) in enumerate(pairs):
                alarm, at = "", worst[number]
                if at >= 0:
                    counted = (hits[at, number], misses[at, number]), (draws[first], draws[second])
                    seen = describe_evidence(names, self.describe(event[at, number]), *counted)
                    alarm = f"{self.place}: {seen} {implied[number]}"
                claim, bound = float(claims[number]), float(bounds[number])
                trials.append(Trial(self.view, names, (self.num_clients,), claim, bound, alarm))
        return trials


class ByRound:
    """Counts of every round of the main simulation, in which noise may be missing.

    Neighbouring positions are in different halves, as a round has draws for both.

    Args:
        bench: Bench of the main simulation.
        view: View of its first claim.
        bins: Classes of the view's numbers.
    """

    def __init__(self, bench: Bench, view: View, bins: Bins) -> None:
        self._bench, self._view, self._bins = bench, view, bins
        self._counts: dict[int, Integers] = {}

    def add(self, round: int, labels: Integers, classes: Integers) -> None:
        """Count the positions of one round of one world."""
        counted = labels >= 0
        half = halves(len(labels), round)
        counts = tally(half[counted], labels[counted], classes[counted], 2, self._bins.size)
        self._counts[round] = self._counts.get(round, 0) + counts

    def cells(self) -> list[Cell]:
        """Return the counts of the rounds."""
        names, size, view = self._bench.inputs, len(self._bench.clients), self._view
        pairs = [(0, 1, names, View("", view.loss, view.copies, 1, 2, view.failure))]
        cells = []
        for round, counts in self._counts.items():
            place = f"{clients_text(size)}, round {round}"
            cells.append(Cell(view.name, place, counts, pairs, self._bins.describe, size, False))
        return cells


def judge_cells(cells: list[Cell], alpha: float) -> list[Trial]:
    """Return the result of every pair, the alarms first. True claims raise one with at most `alpha`."""
    compared = [compared for cell in cells for compared in cell.ordered()]
    total = sum(2 * len(pairs) * len(view.epsilons) for view, pairs in compared)  # bounded probabilities
    found: dict[tuple[str, frozenset[str]], Trial] = {}
    played: dict[tuple[str, frozenset[str]], set[int]] = {}

    def closeness(trial: Trial) -> tuple[bool, float]:
        return bool(trial.alarm), trial.lower_bound / trial.claim

    for cell in cells:
        for trial in cell.judge(alpha / total):
            if not (cell.is_listed or trial.alarm):
                continue
            key = trial.view, frozenset(trial.pair)
            played.setdefault(key, set()).add(cell.num_clients)
            if key not in found or closeness(trial) > closeness(found[key]):
                found[key] = trial
    trials = [replace(trial, num_clients=tuple(sorted(played[key]))) for key, trial in found.items()]
    return sorted(trials, key=closeness, reverse=True)


class Allowed:
    """Losses that a claim allows for pairs of updates, by the number of coordinates in which they differ."""

    def __init__(self, bench: Bench, claim: PrivacyClaim, positions: int) -> None:
        self._bench, self._claim, self._positions = bench, claim, positions
        self._views: dict[tuple[int, int], View] = {}
        self.zero_out = claim.neighbours is not Neighbours.SUBSTITUTION

    def view(self, differing: int, is_even: bool, times: int = 1) -> View:
        """Return the view that has the claim of one position.

        Args:
            differing: Number of coordinates in which the updates differ.
            is_even: Whether the difference is spread evenly enough to divide the claim.
            times: Number of positions that one outcome shows.
        """
        bench, claim = self._bench, self._claim
        divisible = claim.compositions == 1 and self._positions == bench.dim
        if not divisible or bench.follows_streams or bench.concentrated or not is_even:
            differing = 1
        if (view := self._views.get((differing, times))) is None:
            loss, copies = divided(claim, self._positions, bench.dim, differing)
            view = self._views[differing, times] = View("", loss, copies * times, 1, 2, bench.failure)
        return view


def divided(claim: PrivacyClaim, positions: int, dim: int, differing: int) -> tuple[Loss, int]:
    """Return the claimed loss of one position and the number of its compositions there.

    A claim that can't be divided over positions bounds every function of the view.

    Args:
        claim: Claim about a whole view.
        positions: Number of positions of the view.
        dim: Number of coordinates of an update.
        differing: Number of coordinates over which the difference of two updates is spread.
    """
    if claim.compositions > 1:
        return claim.loss, 1 if claim.compositions in (positions, dim) else claim.compositions
    if differing > 1:
        with suppress(TypeError):  # a loss that can't be divided
            return claim.loss.spread(differing), 1
    return claim.loss, 1


def halves(positions: int, shift: int) -> Integers:
    """Return the half of each position: neighbouring positions are in different halves."""
    return np.asarray((np.arange(positions) + shift) % 2)


def tally(half: Integers, label: Integers, outcome: Integers, labels: int, outcomes: int) -> Integers:
    """Return `(2, labels, outcomes)` counts."""
    flat = (half * labels + label) * outcomes + outcome
    return np.asarray(np.bincount(flat.ravel(), minlength=2 * labels * outcomes)).reshape(2, labels, outcomes)


def clients_text(number: int) -> str:
    """Return a number of clients in words."""
    return f"{number} client{'s' * (number > 1)}"


def difference(
    one: PlayedUpdate, other: PlayedUpdate, places: NDArray[np.bool_] | None = None
) -> tuple[int, bool]:
    """Return in how many coordinates two updates differ, and whether a claim can be divided over them.

    Args:
        one: First update.
        other: Second update.
        places: `(dim,)`, the coordinates that are compared. None is all of them.
    """
    differs = (one.values != other.values).numpy()
    compared = differs if places is None else differs[places]
    return int(differs.sum()), bool(one.is_even and other.is_even and compared.all())
