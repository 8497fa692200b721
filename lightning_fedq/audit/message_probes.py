"""Rounds about messages: every client of a cohort is a draw, and sends all kinds of updates in turn.

The updates pass from client to client over the rounds, so that all kinds of updates are sent in every round,
and each client sends each update in two rounds in a row. Any two updates are compared with the claim: over
all coordinates and over four classes of coordinates, in early, late and very late rounds. Outcomes of two
layers, two rounds or two clients are compared jointly. Some rounds play the two ends of the range only, and
compare each round and each client by itself. If groups of clients share randomness, one client per group is a
draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fedq.audit.bench import Bench
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
)
from lightning_fedq.audit.played import Played
from lightning_fedq.audit.views import Array
from lightning_fedq.mechanisms.contract_suite.updates import (
    FAR_DOWN,
    FAR_UP,
    PERIOD,
    SECOND,
    ZERO,
    played_updates,
)

_LARGE_ROUNDS, _ENDS_ROUNDS = 4, 2
"""Rounds of a block in the large cohort, and with the ends of the range only."""
_WHEN = tuple(f"rounds from {first}" for first in BLOCKS)


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
