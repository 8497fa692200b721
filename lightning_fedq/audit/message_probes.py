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


def _rounds(bench: Bench, per_block: int) -> list[tuple[int, int]]:
    """Return block and number of every round."""
    return [(block, first + step) for block, first in enumerate(BLOCKS) for step in range(per_block)]


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


def message_cells(bench: Bench, tests: list[Tested]) -> list[Cell]:
    """Play the rounds about messages and count them."""
    per_block = {LARGE: _LARGE_ROUNDS, ALONE: 2 * SMALL_ROUNDS}.get(len(bench.clients), SMALL_ROUNDS)
    every, ends = _Messages(bench, per_block, False), _Messages(bench, _ENDS_ROUNDS, True)
    cells: list[Cell] = []
    for test in tests:
        cells += _every_update(bench, test, every)
        cells += _ends(bench, test, ends)
    return cells


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


def _every_update(bench: Bench, test: Tested, played: _Messages) -> list[Cell]:
    """Return the counts of rounds in which all kinds of updates are sent."""
    values = played.values(test.extract)
    rounds, clients, positions = values.shape
    half = np.stack(
        [[halves(positions, number + index) for index in range(clients)] for number in range(rounds)]
    )
    bins = Bins(values[half == 0])
    outcome = bins.fine(values.ravel()).reshape(values.shape)
    label = np.broadcast_to(played.labels[:, :, None], values.shape)
    kinds, size = len(played.updates), len(bench.clients)
    allowed = Allowed(bench, test.claim, positions)
    where = clients_text(size)
    cells = []

    def add(place: str, part: NDArray[np.bool_], pairs: list[Comparison], listed: bool) -> None:
        counts = tally(half[part], label[part], outcome[part], kinds, bins.size)
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
        counts = tally(half, label, low % 8, kinds, 8)
        cells.append(Cell(test.view, where, counts, everywhere, _remainders, size, False))
    return cells + _joint_cells(bench, test, played, bins, outcome, allowed)


def describe_pairs(event: NDArray[np.bool_]) -> str:
    """Return an event of two outputs in words."""
    return f"one of {int(event.sum())} of {event.size} pairs of outputs"


def _remainders(event: NDArray[np.bool_]) -> str:
    return "an output that leaves " + " or ".join(map(str, np.flatnonzero(event))) + " when divided by 8"


def _joint_cells(
    bench: Bench, test: Tested, played: _Messages, bins: Bins, outcome: Integers, allowed: Allowed
) -> list[Cell]:
    """Return the counts of two outcomes at once: of two layers, two rounds, and two clients.

    A draw can be in two pairs of outcomes. The half depends on its coordinate only, so that both are in the
    same half.
    """
    coarse, width, kinds = bins.coarse(outcome), bins.coarse_size, len(played.updates)
    rounds, clients, positions = outcome.shape
    half = np.broadcast_to(halves(positions, 0), outcome.shape)
    size, where, names = (
        len(bench.clients),
        clients_text(len(bench.clients)),
        [u.name for u in played.updates],
    )
    cells = []

    if positions == bench.dim and bench.aligned:
        middle = positions // 2
        pair = width * coarse[:, :, :middle] + coarse[:, :, middle : 2 * middle]
        label = np.broadcast_to(played.labels[:, :, None], pair.shape)
        counts = tally(half[:, :, :middle], label, pair, kinds, width**2)
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
            view = allowed.view(*difference(one, other))
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
        joint += tally(half[number], spread, pair, 2 * kinds, width**2)
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
        joint += tally(half[:, one], label, pair, 2 * kinds, width**2)
    pairs = changed(1, "clients")
    cells.append(Cell(test.view, f"{where}, two clients", joint, pairs, describe_pairs, size, False))
    return cells


def _ends(bench: Bench, test: Tested, played: _Messages) -> list[Cell]:
    """Return the counts of rounds in which the two ends of the range are sent, by round and by client."""
    values = played.values(test.extract)
    rounds, clients, positions = values.shape
    half = np.stack(
        [
            [halves(positions, number // 2 + index // 2) for index in range(clients)]
            for number in range(rounds)
        ]
    )
    bins = Bins(values[half == 0])
    outcome = bins.fine(values.ravel()).reshape(values.shape)
    label = np.broadcast_to(played.labels[:, :, None], values.shape)
    size = len(bench.clients)
    pairs = _pairs(played, Allowed(bench, test.claim, positions))
    cells = []
    for axis, places in (
        (0, [f"round {round}" + ", attempt 1" * count_attempts(round) for _, round in played.rounds]),
        (1, [f"client {int(client)}" for client in played.clients]),
    ):
        for number, place in enumerate(places):
            parts = [np.take(array, number, axis) for array in (half, label, outcome)]
            counts = tally(parts[0], parts[1], parts[2], 2, bins.size)
            cells.append(
                Cell(test.view, f"{clients_text(size)}, {place}", counts, pairs, bins.describe, size, False)
            )
    return cells
