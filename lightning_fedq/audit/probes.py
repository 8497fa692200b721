"""Rounds with many kinds of updates, in small and large cohorts, early and late.

The main simulation (`simulated`) plays one pair of updates in one small cohort, and proves a loss closely.
The rounds here look for noise that is missing for some updates, clients, cohorts or rounds (`updates`).
They need fewer draws, because such a fault changes frequencies much. `message_probes` plays rounds about
messages. In the rounds about sums and groups, one client, the victim, sends either update of a pair, and all
others send the same one of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_fedq.audit.audit_case import AuditCase
from lightning_fedq.audit.bench import UNIT_RANGE, Bench
from lightning_fedq.audit.bins import Bins
from lightning_fedq.audit.cells import (
    ALONE,
    BLOCKS,
    LARGE,
    Allowed,
    Cell,
    Tested,
    clients_text,
    difference,
    halves,
    tally,
)
from lightning_fedq.audit.message_probes import message_cells
from lightning_fedq.audit.played import Played
from lightning_fedq.mechanisms.contract_suite.updates import SUM_PAIRS, ZERO, PlayedUpdate, played_updates
from lightning_fedq.mechanisms.interface import Adversary, Neighbours
from lightning_fedq.mechanisms.interface.ranges import FixedRange

WIDE = FixedRange(8.0, 2.0)
"""Range of the large cohort if coordinates are clipped. In other cases the range is from -1 to 1."""
_FEWEST, _LONGEST, _SHORT_LAYER = 16, 255, 5
"""Coordinates of an update in the large cohort, at least and at most, and of its short layer."""
_FEWEST_OF_SUMS = 128
"""Coordinates of an update in the large cohort for claims about sums, at least."""


def probe(
    case: AuditCase,
    tested: Callable[[Bench, Sequence[Adversary]], list[Tested]],
    draws: int,
    seed: int,
    size: int,
    cells: Sequence[Cell],
) -> list[Cell]:
    """Play the rounds of a case, and return their counts after the counts of other rounds.

    Args:
        case: Mechanism under audit and its setting.
        tested: Function that returns the claims of a bench that are tested.
        draws: Draws of the main simulation, which set the number of draws here.
        seed: Seed of the audit's own keys.
        size: Size of the small cohort.
        cells: Counts of other rounds.
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
            cells += message_cells(bench, messages)
        bench = bench if dim == sum_dim else _bench(case, seed, sum_dim, clients)
        sums = [test for test in tested(bench, tuple(Adversary)) if not test.of_message]
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
