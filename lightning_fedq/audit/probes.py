"""Rounds with many kinds of updates, in small and large cohorts, early and late.

The main simulation (`simulated`) plays one pair of updates in one small cohort, and proves a loss closely.
The rounds here look for noise that is missing for some updates, clients, cohorts or rounds (`updates`).
They need fewer draws, because such a fault changes frequencies much.

In the rounds about messages, every client of a cohort is a draw, and sends all kinds of updates in turn. The
updates pass from client to client over the rounds, so that all kinds of updates are sent in every round, and
each client sends each update in two rounds in a row. Any two updates are compared with the claim: over all
coordinates and over four classes of coordinates, in early, late and very late rounds. Outcomes of two layers,
two rounds or two clients are compared jointly. Some rounds play the two ends of the range only, and compare
each round and each client by itself. If groups of clients share randomness, one client per group is a draw.

In the rounds about sums and groups, one client, the victim, sends either update of a pair, and all others
send the same one of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fedq.audit.audit_case import AuditCase
from lightning_fedq.audit.bench import UNIT_RANGE, Bench
from lightning_fedq.audit.bins import Bins, Integers
from lightning_fedq.audit.cells import (
    ALONE,
    BLOCKS,
    LARGE,
    SMALL_ROUNDS,
    Allowed,
    Cell,
    Comparison,
    Tested,
    clients_text,
    difference,
    halves,
    tally,
    tested_claims,
)
from lightning_fedq.audit.played import Played
from lightning_fedq.audit.views import Array
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
from lightning_fedq.mechanisms.interface import Neighbours
from lightning_fedq.mechanisms.interface.ranges import FixedRange

WIDE = FixedRange(8.0, 2.0)
"""Range of the large cohort if coordinates are clipped. In other cases the range is from -1 to 1."""
_FEWEST, _LONGEST, _SHORT_LAYER = 16, 255, 5
"""Coordinates of an update in the large cohort, at least and at most, and of its short layer."""
_FEWEST_OF_SUMS = 128
"""Coordinates of an update in the large cohort for claims about sums, at least."""
_LARGE_ROUNDS, _ENDS_ROUNDS = 4, 2
"""Rounds of a block in the large cohort, and with the ends of the range only."""
_WHEN = tuple(f"rounds from {first}" for first in BLOCKS)


def probe(case: AuditCase, draws: int, seed: int, size: int) -> list[Cell]:
    """Play the rounds of a case, and return their counts.

    Args:
        case: Mechanism under audit and its setting.
        draws: Draws of the main simulation, which set the number of draws here.
        seed: Seed of the audit's own keys.
        size: Size of the small cohort.
    """
    cells: list[Cell] = []
    effort = min(draws / 1_000_000, 1.0)
    long = max(_FEWEST, int(_LONGEST * effort))
    short = _FEWEST if case.concentrated else max(_LONGEST, int(16 * _LONGEST * effort))
    lengths = {ALONE: short, size: short, LARGE: long}
    for clients in cohorts(case, size):
        dim = lengths[clients]
        sum_dim = max(_FEWEST_OF_SUMS, dim) if clients == LARGE else dim
        bench = _bench(case, seed, dim, clients)
        if messages := [test for test in tested_claims(bench) if test.of_message]:
            cells += message_cells(bench, messages)
        bench = bench if dim == sum_dim else _bench(case, seed, sum_dim, clients)
        sums = [test for test in tested_claims(bench) if not test.of_message]
        if sums and clients != ALONE:
            cells += _sum_cells(bench, sums, effort)
    return cells


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


# ---- messages -----------------------------------------------------------------------------------------


def count_attempts(round: int) -> int:
    """Return the number of earlier attempts at a round: one in some rounds of every block, else none."""
    return int(round % 30 in (1, 3, 11))


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
        kinds = len(self.updates)
        self.step = step = 1 if len(groups) > kinds else len(groups)
        steps = range(per_block)
        self.rounds = [(block, first + step) for block, first in enumerate(BLOCKS) for step in steps]
        """Block and number of every round."""
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
            views = [replace(played, victim=int(client), everybody=False) for client in self.clients]
            rows.append(np.stack([extract(view) for view in views]))
        return np.stack(rows)


def message_cells(bench: Bench, tests: list[Tested]) -> list[Cell]:
    """Play the rounds about messages and count them."""
    per_block = {LARGE: _LARGE_ROUNDS, ALONE: 2 * SMALL_ROUNDS}.get(len(bench.clients), SMALL_ROUNDS)
    every, ends = _Messages(bench, per_block, False), _Messages(bench, _ENDS_ROUNDS, True)
    cells: list[Cell] = []
    for test in tests:
        seen = _Seen(bench, test, every, 1)
        cells += [*_all_updates(seen), *_two_coordinates(seen)]
        if bench.mechanism.separation == 1 and not bench.mechanism.reuses_noise:
            cells += [_two_rounds(seen), *_two_clients(seen)]
        cells += _ends(_Seen(bench, test, ends, 2))
    return cells


class _Seen:
    """Numbers that one claim is about, in all rounds, and their classes: `(rounds, clients, positions)`.

    Args:
        bench: Bench that ran the rounds.
        test: Claim about one message.
        played: Rounds.
        stretch: Number of neighbouring rounds, and of neighbouring clients, in which a position stays in the
            same half.
    """

    def __init__(self, bench: Bench, test: Tested, played: _Messages, stretch: int) -> None:
        self.bench, self.test, self.played = bench, test, played
        self.values = played.values(test.extract)
        rounds, clients, self.positions = self.values.shape
        self.half = np.stack(
            [
                [halves(self.positions, round // stretch + client // stretch) for client in range(clients)]
                for round in range(rounds)
            ]
        )
        self.label = np.broadcast_to(played.labels[:, :, None], self.values.shape)
        self.bins = Bins(self.values[self.half == 0])
        self.outcome: NDArray[np.int64] = self.bins.fine(self.values.ravel()).reshape(self.values.shape)
        self.allowed = Allowed(bench, test.claim, self.positions)
        self.kinds = len(played.updates)

    def cell(
        self,
        place: str,
        counts: Integers,
        pairs: list[Comparison],
        describe: Callable[[NDArray[np.bool_]], str] | None = None,
        is_listed: bool = False,
    ) -> Cell:
        """Return counts of these rounds with the claim that they are compared with."""
        size = len(self.bench.clients)
        where = f"{clients_text(size)}, {place}" if place else clients_text(size)
        return Cell(self.test.view, where, counts, pairs, describe or self.bins.describe, size, is_listed)

    def count(self, part: NDArray[np.bool_]) -> Integers:
        """Return the counts of a part of the numbers."""
        return tally(self.half[part], self.label[part], self.outcome[part], self.kinds, self.bins.size)


def _pairs(
    played: _Messages, allowed: Allowed, places: NDArray[np.bool_] | None = None, times: int = 1
) -> list[Comparison]:
    """Return the pairs of updates that a claim compares, for the coordinates of `places`."""
    pairs = []
    for first in range(len(played.updates)):
        for second in range(first + 1, len(played.updates)):
            one, other = played.updates[first], played.updates[second]
            if allowed.zero_out and ZERO not in (one.name, other.name):
                continue
            differing, is_even = difference(one, other, places)
            pairs.append((first, second, (one.name, other.name), allowed.view(differing, is_even, times)))
    return pairs


def _all_updates(seen: _Seen) -> list[Cell]:
    """Return the counts of rounds in which all kinds of updates are sent: in all of them, and in parts."""
    bench, played, positions = seen.bench, seen.played, seen.positions
    everywhere = _pairs(played, seen.allowed)
    everything = np.ones(seen.values.shape, np.bool_)
    cells = [seen.cell("all rounds", seen.count(everything), everywhere, is_listed=True)]
    for block, when in enumerate(_WHEN):
        in_block = everything & (played.blocks == block)[:, None, None]
        cells.append(seen.cell(when, seen.count(in_block), everywhere))
    if positions == bench.dim:
        index = np.arange(positions)
        for name, places in (
            ("every 16th coordinate", index % PERIOD == 0),
            ("every other 16th coordinate", index % PERIOD == SECOND),
            ("odd coordinates", index % 2 == 1),
            ("other even coordinates", (index % 2 == 0) & (index % SECOND != 0)),
            ("the last layer", index >= bench.segments[0]),
        ):
            counts = seen.count(everything & places)
            cells.append(seen.cell(name, counts, _pairs(played, seen.allowed, places)))
    values = seen.values
    if np.array_equal(values, np.rint(values)) and seen.bins.size < len(np.unique(values)):
        # bins of neighbouring integers can't show which of them are possible
        remainders = np.asarray(np.rint(values), np.int64) % 8
        counts = tally(seen.half, seen.label, remainders, seen.kinds, 8)
        cells.append(seen.cell("", counts, everywhere, _remainders))
    return cells


def describe_pairs(event: NDArray[np.bool_]) -> str:
    """Return an event of two outputs in words."""
    return f"one of {int(event.sum())} of {event.size} pairs of outputs"


def _remainders(event: NDArray[np.bool_]) -> str:
    return "an output that leaves " + " or ".join(map(str, np.flatnonzero(event))) + " when divided by 8"


# ---- two outcomes at once: a position is in one half, so that both outcomes are in it --------------------


def _two_coordinates(seen: _Seen) -> list[Cell]:
    """Return the counts of two coordinates of one message: one of the first half and one of the second."""
    if seen.positions != seen.bench.dim or not seen.bench.aligned:
        return []
    coarse, width, middle = seen.bins.coarse(seen.outcome), seen.bins.coarse_size, seen.positions // 2
    pair = width * coarse[:, :, :middle] + coarse[:, :, middle : 2 * middle]
    half = np.broadcast_to(halves(middle, 0), pair.shape)
    counts = tally(half, seen.label[:, :, :middle], pair, seen.kinds, width**2)
    return [seen.cell("two coordinates", counts, _pairs(seen.played, seen.allowed, None, 2), describe_pairs)]


def _two_rounds(seen: _Seen) -> Cell:
    """Return the counts of two rounds of a client, which sends an update twice, then the next one."""
    played, kinds = seen.played, seen.kinds
    coarse, width = seen.bins.coarse(seen.outcome), seen.bins.coarse_size
    half = np.broadcast_to(halves(seen.positions, 0), coarse[0].shape)
    counts = np.zeros((2, 2 * kinds, width**2), np.int64)
    for first in range(len(coarse) - 1):
        if played.blocks[first] == played.blocks[first + 1]:
            is_changed = first % 2
            label = np.broadcast_to((played.labels[first] + kinds * is_changed)[:, None], half.shape)
            counts += tally(half, label, width * coarse[first] + coarse[first + 1], 2 * kinds, width**2)
    pairs = _changes(seen, played.step % kinds, "rounds")
    return seen.cell("two rounds of a client", counts, pairs, describe_pairs)


def _two_clients(seen: _Seen) -> list[Cell]:
    """Return the counts of two clients of different groups: with the same update, or one and the next."""
    clients, kinds = len(seen.played.clients), seen.kinds
    if clients <= 2 * kinds:
        return []
    coarse, width = seen.bins.coarse(seen.outcome), seen.bins.coarse_size
    counts = np.zeros((2, 2 * kinds, width**2), np.int64)
    every = np.arange(clients - kinds)
    with_same = every[every // kinds % 2 == 0]
    for one, other, is_changed in (
        (with_same, with_same + kinds, 0),
        (np.arange(clients - 1), np.arange(1, clients), 1),
    ):
        pair = width * coarse[:, one] + coarse[:, other]
        half = np.broadcast_to(halves(seen.positions, 0), pair.shape)
        counts += tally(half, seen.label[:, one] + kinds * is_changed, pair, 2 * kinds, width**2)
    return [seen.cell("two clients", counts, _changes(seen, 1, "clients"), describe_pairs)]


def _changes(seen: _Seen, shift: int, what: str) -> list[Comparison]:
    """Return the pairs (P, P) and (P, P + shift), and (P + shift, P + shift) and (P, P + shift)."""
    pairs, kinds, updates = [], seen.kinds, seen.played.updates
    for kind in range(kinds):
        after = (kind + shift) % kinds
        one, other = updates[kind], updates[after]
        if seen.allowed.zero_out and ZERO not in (one.name, other.name):
            continue
        view = seen.allowed.view(*difference(one, other))
        for same in (kind, after):
            both = (f"{updates[same].name}, for both {what}", f"{one.name}, then {other.name}")
            pairs.append((same, kinds + kind, both, view))
    return pairs


def _ends(seen: _Seen) -> list[Cell]:
    """Return the counts of rounds in which the two ends of the range are sent, by round and by client."""
    played, pairs, cells = seen.played, _pairs(seen.played, seen.allowed), []
    counted = seen.half, seen.label, seen.outcome
    rounds = [f"round {round}" + ", attempt 1" * count_attempts(round) for _, round in played.rounds]
    clients = [f"client {int(client)}" for client in played.clients]
    for axis, places in ((0, rounds), (1, clients)):
        for number, place in enumerate(places):
            half, label, outcome = (np.take(array, number, axis) for array in counted)
            cells.append(seen.cell(place, tally(half, label, outcome, 2, seen.bins.size), pairs))
    return cells


# ---- sums and groups ----------------------------------------------------------------------------------


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
            allowed, differs = Allowed(bench, test.claim, seen.shape[1]), None
            if seen.shape[1] == bench.dim:
                differs = (one.values != other.values).numpy()
                seen = seen[:, differs]
            half = np.stack([halves(seen.shape[1], index // 4) for index in range(len(seen))])
            bins = Bins(seen[half == 0])
            label = np.broadcast_to(np.array(part.labels)[:, None], seen.shape)
            counts = tally(half, label, bins.fine(seen.ravel()).reshape(seen.shape), 4, bins.size)
            view = allowed.view(*difference(one, other, differs))
            pairs = [(2 * others, 2 * others + 1, part.names, view) for others in (0, 1)]
            place = f"{clients_text(size)}, all others with one of the two updates"
            cells.append(Cell(test.view, place, counts, pairs, bins.describe, size, True))
    return cells
