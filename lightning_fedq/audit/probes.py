"""Rounds with many kinds of updates, in small and large cohorts, early and late.

The main simulation (`simulated`) plays one pair of updates in one small cohort, and proves a loss closely.
The rounds here look for noise that is missing for some updates, clients, cohorts or rounds (`updates`).
They need fewer draws, because such a fault changes frequencies much.

**Messages.** Every client of a cohort is a draw. The updates pass from client to client over the rounds, so
that all kinds of updates are sent in every round, and each client sends each update in two rounds in a row.
Any two updates are compared with the claim: over all coordinates and over four classes of coordinates, in
early, late and very late rounds. Outcomes of two layers, two rounds or two clients are compared jointly. Some
rounds play the two ends of the range only, and compare each round and each client by itself.

**Sums and groups.** One client, the victim, sends either update of a pair. All others send the same one of
the two.

One half of the draws chooses bins and events, the other half bounds their probabilities. The halves are
neighbouring coordinates, so they have the same clients and rounds. If groups of clients share randomness, one
client per group is a draw.

A claim about a whole vector is divided over the coordinates in which the two updates differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fedq.audit.bench import UNIT_RANGE, Bench, Bins, Integers, Played
from lightning_fedq.audit.views import MOST, Array, Evidence, Trial, View
from lightning_fedq.functional.trade_off import binomial_bounds
from lightning_fedq.mechanisms.contract_suite.updates import (
    FAR_DOWN,
    FAR_UP,
    PERIOD,
    SECOND,
    SUM_PAIRS,
    ZERO,
    PlayedUpdate,
    played_updates,
)
from lightning_fedq.mechanisms.interface import Adversary, AuditCase, Loss, Neighbours, PrivacyClaim
from lightning_fedq.mechanisms.interface.ranges import FixedRange

LARGE = 201
"""Number of clients of the large cohort, odd so that one client of pairs is left alone."""
ALONE = 1
"""Number of clients of the smallest cohort, which is played for claims about messages."""
WIDE = FixedRange(8.0, 2.0)
"""Range of the large cohort if coordinates are clipped. In other cases the range is from -1 to 1."""
BLOCKS = (0, 30, 1000)
"""First rounds of the early, late and very late rounds."""
SMALL_ROUNDS = 8
"""Rounds of a block in the small cohort."""
_LARGE_ROUNDS, _ENDS_ROUNDS = 4, 2
"""Rounds of a block in the large cohort, and with the ends of the range only."""
_FEWEST, _LONGEST, _SHORT_LAYER = 16, 255, 5
"""Coordinates of an update in the large cohort, at least and at most, and of its short layer."""
_FEWEST_OF_SUMS = 128
"""Coordinates of an update in the large cohort for claims about sums, at least."""


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

    @property
    def num_tests(self) -> int:
        """Number of probabilities that are bounded."""
        return sum(2 * len(pairs) * len(view.epsilons) for view, pairs in self.ordered())

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
                    seen = Evidence(names, self.describe(event[at, number]), *counted)
                    alarm = f"{self.place}: {seen} {implied[number]}"
                claim, bound = float(claims[number]), float(bounds[number])
                trials.append(Trial(self.view, names, (self.num_clients,), claim, bound, alarm))
        return trials


def probe(
    case: AuditCase,
    tested: Callable[[Bench, Sequence[Adversary]], list[Tested]],
    draws: int,
    seed: int,
    size: int,
    cells: Sequence[Cell],
) -> Probes:
    """Play the rounds of a case.

    Args:
        case: Mechanism under audit and its setting.
        tested: Function that returns the claims of a bench that are tested.
        draws: Draws of the main simulation, which set the number of draws here.
        seed: Seed of the audit's own keys.
        size: Size of the small cohort.
        cells: Counts of other rounds that are judged as well.
    """
    cells = [*cells]
    effort = min(draws / 1_000_000, 1.0)
    long = max(_FEWEST, int(_LONGEST * effort))
    short = _FEWEST if case.concentrated else max(_LONGEST, int(16 * _LONGEST * effort))
    lengths = {ALONE: short, size: short, LARGE: long}
    for clients in cohorts(case, size):
        dim = lengths[clients]
        sum_dim = max(_FEWEST_OF_SUMS, dim) if clients == LARGE else dim
        bench = _bench(case, seed, dim, clients)
        if messages := [test for test in tested(bench, tuple(Adversary)) if test.of_message]:
            cells += _message_cells(bench, messages)
        bench = bench if dim == sum_dim else _bench(case, seed, sum_dim, clients)
        sums = [test for test in tested(bench, tuple(Adversary)) if not test.of_message]
        if sums and clients != ALONE:
            cells += _sum_cells(bench, sums, effort)
    return Probes(cells)


def _bench(case: AuditCase, seed: int, dim: int, num_clients: int) -> Bench:
    """Return a bench with keys of its own, and a long layer and a short one."""
    short = min(_SHORT_LAYER, dim // 4)
    whole = case.mechanism.longest_update(dim) is not None
    ranges = UNIT_RANGE if whole or num_clients != LARGE else WIDE
    return Bench(case, seed + (1 << 30), (dim - short, short), num_clients, ranges=ranges)


def cohorts(case: AuditCase, size: int) -> tuple[int, ...]:
    """Return the sizes of the cohorts in which a case can be played.

    Args:
        case: Mechanism under audit and its setting.
        size: Size of the cohort of the main simulation.
    """
    if case.num_clients is not None:
        return (size,)
    found = []
    for clients in (ALONE, size, LARGE):
        try:
            case.mechanism.group_sizes(clients)
        except ValueError:
            if clients == size:
                raise
            continue
        found.append(clients)
    return tuple(found) if not case.mechanism.fixed_cohort else tuple(n for n in found if n > ALONE)


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
        half = _halves(len(labels), round)
        tally = _tally(half[counted], labels[counted], classes[counted], 2, self._bins.size)
        self._counts[round] = self._counts.get(round, 0) + tally

    def cells(self) -> list[Cell]:
        """Return the counts of the rounds."""
        names, size = self._bench.inputs, len(self._bench.clients)
        allowed = View("", self._view.loss, self._view.copies, 1, 2, self._view.failure)
        return [
            Cell(
                self._view.name,
                f"{_count_clients(size)}, round {round}",
                counts,
                [(0, 1, names, allowed)],
                self._bins.describe,
                size,
                False,
            )
            for round, counts in self._counts.items()
        ]


class Probes:
    """Counted rounds, ready to be judged."""

    def __init__(self, cells: list[Cell]) -> None:
        self._cells = cells

    def judge(self, alpha: float) -> list[Trial]:
        """Return the result of every pair, the alarms first. True claims raise one with at most `alpha`."""
        total = sum(cell.num_tests for cell in self._cells)
        found: dict[tuple[str, frozenset[str]], Trial] = {}
        played: dict[tuple[str, frozenset[str]], set[int]] = {}

        def closeness(trial: Trial) -> tuple[bool, float]:
            return bool(trial.alarm), trial.lower_bound / trial.claim

        for cell in self._cells:
            for trial in cell.judge(alpha / total):
                key = trial.view, frozenset(trial.pair)
                before = found.get(key)
                if not (cell.is_listed or trial.alarm):
                    continue
                played.setdefault(key, set()).add(cell.num_clients)
                if before is None or closeness(trial) > closeness(before):
                    found[key] = trial
        trials = [replace(trial, num_clients=tuple(sorted(played[key]))) for key, trial in found.items()]
        return sorted(trials, key=closeness, reverse=True)


class _Allowed:
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
            loss, copies = self._loss(claim.loss, differing)
            view = self._views[differing, times] = View("", loss, copies * times, 1, 2, bench.failure)
        return view

    def _loss(self, loss: Loss, differing: int) -> tuple[Loss, int]:
        if self._claim.compositions == 1:
            try:
                return (loss.spread(differing) if differing > 1 else loss), 1
            except TypeError:
                return loss, 1
        if self._claim.compositions in (self._positions, self._bench.dim):
            return loss, 1
        return loss, self._claim.compositions


def _halves(positions: int, shift: int) -> Integers:
    """Return the half of each position: neighbouring positions are in different halves."""
    return np.asarray((np.arange(positions) + shift) % 2)


def _tally(half: Integers, label: Integers, outcome: Integers, labels: int, outcomes: int) -> Integers:
    """Return `(2, labels, outcomes)` counts."""
    flat = (half * labels + label) * outcomes + outcome
    return np.asarray(np.bincount(flat.ravel(), minlength=2 * labels * outcomes)).reshape(2, labels, outcomes)


def _rounds(bench: Bench, per_block: int) -> list[tuple[int, int]]:
    """Return block and number of every round."""
    return [(block, first + step) for block, first in enumerate(BLOCKS) for step in range(per_block)]


def _count_clients(number: int) -> str:
    """Return a number of clients in words."""
    return f"{number} client{'s' * (number > 1)}"


def count_attempts(round: int) -> int:
    """Return the number of earlier attempts at a round: one in some rounds of every block, else none."""
    return int(round % 30 in (1, 3, 11))


_WHEN = tuple(f"rounds from {first}" for first in BLOCKS)


class _Messages:
    """Classes of the messages that one client of every group sent in some rounds.

    Args:
        bench: Bench that runs the rounds.
        test: Claim about one message.
        per_block: Number of rounds of each block.
        ends_only: Whether only the two ends of the range are sent, each in turn.
    """

    def __init__(self, bench: Bench, per_block: int, ends_only: bool) -> None:
        updates = played_updates(bench.mechanism, bench.context(0))
        self.updates = [update for update in updates if not ends_only or update.name in (FAR_UP, FAR_DOWN)]
        rows = torch.stack([update.values for update in self.updates])
        groups = [[c for c in group if c in bench.clients] for group in bench.groups]
        groups = [group for group in groups if group]
        place = 0 if len(bench.clients) == LARGE else -1
        counted = [group[place] for group in groups]
        self.clients = np.array(counted)
        kinds, step = len(self.updates), 1 if len(groups) > len(self.updates) else len(groups)
        self.rounds = _rounds(bench, per_block)
        self.step = step
        self.labels = np.empty((len(self.rounds), len(groups)), np.int64)
        self.played: list[Played] = []
        for number, (_, round) in enumerate(self.rounds):
            shift = number if ends_only else step * (number // 2)
            own = np.empty(len(bench.clients), np.int64)
            for index, group in enumerate(groups):
                for rank, client in enumerate(group):
                    own[bench.clients.index(client)] = (index + shift + 5 * rank) % kinds
                self.labels[number, index] = own[bench.clients.index(counted[index])]
            victim, attempt = counted[number % len(counted)], count_attempts(round)
            self.played.append(bench.play_updates(int(ends_only), round, victim, rows[own], attempt))
        self.blocks = np.array([block for block, _ in self.rounds])

    def values(self, extract: Callable[[Played], Array]) -> Array:
        """Return `(rounds, counted clients, positions)` numbers that the view shows."""
        rows = []
        for played in self.played:
            seen = [extract(_as_victim(played, int(client))) for client in self.clients]
            rows.append(np.stack(seen))
        return np.stack(rows)


def _as_victim(played: Played, client: int) -> Played:
    return replace(played, victim=client, everybody=False)


def _message_cells(bench: Bench, tests: list[Tested]) -> list[Cell]:
    """Play the rounds about messages and count them."""
    per_block = {LARGE: _LARGE_ROUNDS, ALONE: 2 * SMALL_ROUNDS}.get(len(bench.clients), SMALL_ROUNDS)
    every, ends = _Messages(bench, per_block, False), _Messages(bench, _ENDS_ROUNDS, True)
    cells: list[Cell] = []
    for test in tests:
        cells += _every_update(bench, test, every)
        cells += _ends(bench, test, ends)
    return cells


def _pairs(
    played: _Messages, allowed: _Allowed, places: NDArray[np.bool_] | None = None, times: int = 1
) -> list[Comparison]:
    """Return the pairs of updates that a claim compares, for the coordinates of `places`."""
    pairs = []
    for first in range(len(played.updates)):
        for second in range(first + 1, len(played.updates)):
            one, other = played.updates[first], played.updates[second]
            if allowed.zero_out and ZERO not in (one.name, other.name):
                continue
            differing, is_even = _difference(one, other, places)
            pairs.append((first, second, (one.name, other.name), allowed.view(differing, is_even, times)))
    return pairs


def _difference(
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


def _every_update(bench: Bench, test: Tested, played: _Messages) -> list[Cell]:
    """Return the counts of rounds in which all kinds of updates are sent."""
    values = played.values(test.extract)
    rounds, clients, positions = values.shape
    half = np.stack(
        [[_halves(positions, number + index) for index in range(clients)] for number in range(rounds)]
    )
    bins = Bins(values[half == 0])
    outcome = bins.fine(values.ravel()).reshape(values.shape)
    label = np.broadcast_to(played.labels[:, :, None], values.shape)
    kinds, size = len(played.updates), len(bench.clients)
    allowed = _Allowed(bench, test.claim, positions)
    where = _count_clients(size)
    cells = []

    def add(place: str, part: NDArray[np.bool_], pairs: list[Comparison], listed: bool) -> None:
        counts = _tally(half[part], label[part], outcome[part], kinds, bins.size)
        cells.append(Cell(test.view, place, counts, pairs, bins.describe, size, listed))

    everywhere = _pairs(played, allowed)
    everything = np.ones(values.shape, np.bool_)
    add(f"{where}, all rounds", everything, everywhere, True)
    for block, when in enumerate(_WHEN):
        add(f"{where}, {when}", everything & (played.blocks == block)[:, None, None], everywhere, False)
    if positions == bench.dim:
        index = np.arange(positions)
        for name, places in (
            ("every 16th coordinate", index % PERIOD == 0),
            ("every other 16th coordinate", index % PERIOD == SECOND),
            ("odd coordinates", index % 2 == 1),
            ("other even coordinates", (index % 2 == 0) & (index % SECOND != 0)),
            ("the last layer", index >= bench.segments[0]),
        ):
            pairs = _pairs(played, allowed, places)
            what = f"{where}, {name}"
            add(what, everything & places, pairs, False)
    low = np.asarray(np.rint(values), np.int64) if np.array_equal(values, np.rint(values)) else None
    if low is not None and bins.size < len(np.unique(values)):
        # bins of neighbouring integers can't show which of them are possible
        counts = _tally(half, label, low % 8, kinds, 8)
        cells.append(Cell(test.view, where, counts, everywhere, _remainders, size, False))
    return cells + _joint_cells(bench, test, played, bins, outcome, allowed)


def describe_pairs(event: NDArray[np.bool_]) -> str:
    """Return an event of two outputs in words."""
    return f"one of {int(event.sum())} of {event.size} pairs of outputs"


def _remainders(event: NDArray[np.bool_]) -> str:
    return "an output that leaves " + " or ".join(map(str, np.flatnonzero(event))) + " when divided by 8"


def _joint_cells(
    bench: Bench, test: Tested, played: _Messages, bins: Bins, outcome: Integers, allowed: _Allowed
) -> list[Cell]:
    """Return the counts of two outcomes at once: of two layers, two rounds, and two clients.

    A draw can be in two pairs of outcomes. The half depends on its coordinate only, so that both are in the
    same half.
    """
    coarse, width, kinds = bins.coarse(outcome), bins.coarse_size, len(played.updates)
    rounds, clients, positions = outcome.shape
    half = np.broadcast_to(_halves(positions, 0), outcome.shape)
    size, where, names = (
        len(bench.clients),
        _count_clients(len(bench.clients)),
        [u.name for u in played.updates],
    )
    cells = []

    if positions == bench.dim and bench.aligned:
        middle = positions // 2
        pair = width * coarse[:, :, :middle] + coarse[:, :, middle : 2 * middle]
        label = np.broadcast_to(played.labels[:, :, None], pair.shape)
        counts = _tally(half[:, :, :middle], label, pair, kinds, width**2)
        pairs = _pairs(played, allowed, None, 2)
        what = f"{where}, two coordinates"
        cells.append(Cell(test.view, what, counts, pairs, describe_pairs, size, False))
    if bench.mechanism.separation > 1 or bench.mechanism.reuses_noise:
        return cells

    def changed(shift: int, what: str) -> list[Comparison]:
        """Return the pairs (P, P) and (P, P + shift), and (P + shift, P + shift) and (P, P + shift)."""
        pairs = []
        for kind in range(kinds):
            after = (kind + shift) % kinds
            if allowed.zero_out and ZERO not in (names[kind], names[after]):
                continue
            one, other = played.updates[kind], played.updates[after]
            view = allowed.view(*_difference(one, other))
            for same in (kind, after):
                both = (f"{names[same]}, for both {what}", f"{names[kind]}, then {names[after]}")
                pairs.append((same, kinds + kind, both, view))
        return pairs

    # two rounds: an update is sent twice in a row, then the next one
    step = played.step % kinds
    joint = np.full((2, 2 * kinds, width**2), 0, np.int64)
    for number in range(rounds - 1):
        if played.blocks[number] != played.blocks[number + 1]:
            continue
        label = played.labels[number] + kinds * (number % 2)
        pair = width * coarse[number] + coarse[number + 1]
        spread = np.broadcast_to(label[:, None], pair.shape)
        joint += _tally(half[number], spread, pair, 2 * kinds, width**2)
    pairs = changed(step, "rounds")
    cells.append(
        Cell(test.view, f"{where}, two rounds of a client", joint, pairs, describe_pairs, size, False)
    )
    # two clients of different groups
    if clients <= 2 * kinds:
        return cells
    joint = np.zeros_like(joint)
    apart = np.arange(clients - kinds)
    blocks = apart[apart // kinds % 2 == 0]
    for one, other, own in (
        (blocks, blocks + kinds, 0),
        (np.arange(clients - 1), np.arange(1, clients), kinds),
    ):
        pair = width * coarse[:, one] + coarse[:, other]
        label = np.broadcast_to(played.labels[:, one, None] + own, pair.shape)
        joint += _tally(half[:, one], label, pair, 2 * kinds, width**2)
    pairs = changed(1, "clients")
    cells.append(Cell(test.view, f"{where}, two clients", joint, pairs, describe_pairs, size, False))
    return cells


def _ends(bench: Bench, test: Tested, played: _Messages) -> list[Cell]:
    """Return the counts of rounds in which the two ends of the range are sent, by round and by client."""
    values = played.values(test.extract)
    rounds, clients, positions = values.shape
    half = np.stack(
        [
            [_halves(positions, number // 2 + index // 2) for index in range(clients)]
            for number in range(rounds)
        ]
    )
    bins = Bins(values[half == 0])
    outcome = bins.fine(values.ravel()).reshape(values.shape)
    label = np.broadcast_to(played.labels[:, :, None], values.shape)
    size = len(bench.clients)
    pairs = _pairs(played, _Allowed(bench, test.claim, positions))
    cells = []
    for axis, places in (
        (0, [f"round {round}" + ", attempt 1" * count_attempts(round) for _, round in played.rounds]),
        (1, [f"client {int(client)}" for client in played.clients]),
    ):
        for number, place in enumerate(places):
            parts = [np.take(array, number, axis) for array in (half, label, outcome)]
            counts = _tally(parts[0], parts[1], parts[2], 2, bins.size)
            cells.append(
                Cell(test.view, f"{_count_clients(size)}, {place}", counts, pairs, bins.describe, size, False)
            )
    return cells


@dataclass(frozen=True)
class _SumRounds:
    """Rounds of one pair of updates in which all clients but the victim send the same one.

    Args:
        updates: Two updates.
        played: Rounds.
        labels: `(rounds,)`, 2 * (number of the others' update) + number of the victim's.
    """

    updates: tuple[PlayedUpdate, PlayedUpdate]
    played: list[Played]
    labels: list[int]

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two updates."""
        return self.updates[0].name, self.updates[1].name


def _play_sums(bench: Bench, pairs: Sequence[tuple[str, str]]) -> list[_SumRounds]:
    """Play the rounds about sums and groups: early, then very late."""
    updates = {update.name: update for update in played_updates(bench.mechanism, bench.context(0))}
    size = len(bench.clients)
    rounds = [_SumRounds((updates[one], updates[other]), [], []) for one, other in pairs]
    for block, first in enumerate(BLOCKS[::2]):
        number = first
        for part in rounds:
            for place in range(4):
                label = place ^ block  # odd and even rounds have both updates
                victim = bench.clients[number // 4 % size]
                rows = part.updates[label // 2].values.expand(size, -1).clone()
                rows[bench.clients.index(victim)] = part.updates[label % 2].values
                part.played.append(bench.play_updates(2, number, victim, rows))
                part.labels.append(label)
                number += 1
    return rounds


def _sum_cells(bench: Bench, tests: Sequence[Tested], effort: float) -> list[Cell]:
    """Play the rounds about sums and groups and count them, one cell per view and pair of updates."""
    cells, size = [], len(bench.clients)
    zero_out = all(test.claim.neighbours is not Neighbours.SUBSTITUTION for test in tests)
    chosen = [names for names in SUM_PAIRS if ZERO in names or not zero_out]
    if size == LARGE:
        chosen = chosen[: 2 if effort > 0.1 else 1]
    for part in _play_sums(bench, chosen):
        one, other = part.updates
        for test in tests:
            if test.claim.neighbours is not Neighbours.SUBSTITUTION and ZERO not in part.names:
                continue
            seen = np.stack([test.extract(played) for played in part.played])
            allowed, differs = _Allowed(bench, test.claim, seen.shape[1]), None
            if seen.shape[1] == bench.dim:
                differs = (one.values != other.values).numpy()
                seen = seen[:, differs]
            half = np.stack([_halves(seen.shape[1], index // 4) for index in range(len(seen))])
            bins = Bins(seen[half == 0])
            label = np.broadcast_to(np.array(part.labels)[:, None], seen.shape)
            counts = _tally(half, label, bins.fine(seen.ravel()).reshape(seen.shape), 4, bins.size)
            view = allowed.view(*_difference(one, other, differs))
            pairs = [(2 * others, 2 * others + 1, part.names, view) for others in (0, 1)]
            place = f"{_count_clients(size)}, all others with one of the two updates"
            cells.append(Cell(test.view, place, counts, pairs, bins.describe, size, True))
    return cells
