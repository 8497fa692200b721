"""Audit, layer B: does what is shipped keep what it claims? Simulation with certain error bounds.

The worst neighbours are played through a `RoundEngine` by a mechanism as it is shipped, real words,
streams, packing and rounding, and every view for which something is claimed is counted: one message and its
bits on the wire, all messages of a group, the sum behind secure aggregation, the released sum, and what is
left of it for a curious client; of the first of them also two rounds and two layers together. See `bench`
for the neighbours, `views` for the test; an alarm in a clean mechanism has probability `alpha` at most, 0.1%
by default. What is released has to lie on the mechanism's grid.

A claim about a whole vector (clipped in l1 or l2) has two worst cases. The difference *spread* over all
coordinates gives one draw a coordinate, each held to its share of the claim (`Loss.spread`): the sharper
test, at a noise that leaves one coordinate about as private as the claims of other mechanisms. The whole
difference *concentrated* in one coordinate gives one draw an encoding, and sees wrong clipping.

Where the worst pair follows streams (a public rotation, a selection that members know), each adversary is
attacked with the pair that follows the streams it holds. What else it holds is fixed in `knowledge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lightning_fedq.audit.bench import (
    CALIBRATION,
    CROWD,
    CROWD_SEGMENTS,
    FEW_SEGMENTS,
    MOST_CALIBRATIONS,
    SEGMENTS,
    Bench,
    Bins,
    Integers,
    Played,
)
from lightning_fedq.audit.views import Array, Finding, View
from lightning_fedq.mechanisms.interface import Adversary, AuditCase, Loss, Mechanism, PrivacyClaim

FEWEST_ROUNDS = 8
_WIRE_ROUNDS = 400
_FEWEST_ANSWERS = 2
_LEVELS: tuple[tuple[Adversary, tuple[Adversary, ...]], ...] = (
    (Adversary.SERVER, (Adversary.SERVER, Adversary.SECAGG_SERVER)),
    (Adversary.CLIENT, (Adversary.CLIENT,)),
    (Adversary.OUTSIDER, (Adversary.EAVESDROPPER, Adversary.OUTSIDER)),
)
"""Where the worst pair follows streams: whose streams, and who is attacked with it. More knowledge first."""
_SUMS = (Adversary.SECAGG_SERVER, Adversary.OUTSIDER, Adversary.CLIENT)


_MOST_TRIED = 32
"""Sizes of a cohort that are looked at for two groups."""


@dataclass(frozen=True)
class _Look:
    """One number per position that somebody sees, its classes, and where it is counted."""

    extract: Callable[[Played], Array]
    bins: Bins
    view: View
    promise: Loss


def cohort_size(mechanism: Mechanism) -> int:
    """Three clients where noise is shared out, else four, or more until there are two groups or none.

    Where the whole cohort is one group, whatever its size, that is the three or four.
    """
    fewest = 3 if mechanism.fixed_cohort else 4
    sizes = range(fewest, fewest + 2 * _MOST_TRIED, 2)
    return next((n for n in sizes if sum(members > 1 for members in mechanism.group_sizes(n)) != 1), fewest)


def audit(
    attacked: Mechanism | AuditCase,
    draws: int = 1_000_000,
    *,
    alpha: float = 1e-3,
    seed: int = 0,
    concentrated: bool = False,
    times: int = 1,
) -> tuple[Finding, ...]:
    """Try to refute a mechanism's claims by simulation.

    Args:
        attacked: The mechanism, as it is shipped, or a case of it; see `Mechanism.audit_cases`.
        draws: Draws of one coordinate per neighbour; 10^6 in tests, 10^7 takes up to two minutes.
        alpha: Chance of an alarm if all claims hold.
        seed: Seed of the audit's own keys.
        concentrated: Put the whole difference into one coordinate, for claims about a whole vector; one
            encoding is one draw then. A case says so itself.
        times: Repetitions of both layers in a round, which then gives so many times the draws and
            takes little longer. A claim about a whole vector leaves each coordinate of a longer one less, so
            there the case is to be one of so many coordinates, see `Mechanism.audit_cases`.

    Returns:
        One finding per view. Empty for a mechanism that claims nothing against anybody.

    Raises:
        ValueError: If there are too few draws for two halves, or a round of the case is given up.
    """
    case = attacked if isinstance(attacked, AuditCase) else AuditCase(attacked, concentrated)
    segments = SEGMENTS
    if case.concentrated or case.everybody:
        segments, times = FEW_SEGMENTS if case.concentrated else CROWD_SEGMENTS, 1
    size = case.num_clients or (CROWD if case.everybody else cohort_size(case.mechanism))
    first = Bench(case, seed, segments, size, Adversary.SERVER, times)
    fewest = 64 if case.concentrated else FEWEST_ROUNDS * first.draws
    if draws < fewest:
        raise ValueError(f"draws must be >= {fewest}, got {draws}")
    levels = _LEVELS
    if not first.follows_streams:
        levels = ((Adversary.SERVER, tuple(Adversary)),)
    runs: list[_Run] = []
    for level, who in levels:
        adversaries = tuple(one for one in who if one in _SUMS or not case.only_sums)
        promised = [look.promise for run in runs for look in run.looks]
        bench = Bench(case, seed, segments, size, level, times)
        runs += [run] if (run := _Run(bench, adversaries, draws, promised)).looks else []
    for run in runs:
        run.play(max(draws // len(runs), fewest))
    count = sum(len(run.views) + 1 for run in runs)
    return tuple(finding for run in runs for finding in run.judge(alpha / count))


class _Run:
    """Rounds of two worlds, with everything that is looked at."""

    def __init__(
        self, bench: Bench, adversaries: tuple[Adversary, ...], draws: int, promised: list[Loss]
    ) -> None:
        self._bench = bench
        self.looks = _looks(bench, adversaries, draws // bench.draws // 2 * 2, promised)
        self.views: list[View] = []

    def play(self, draws: int) -> None:
        """Play as many rounds as give so many draws of one coordinate."""
        bench, joint = self._bench, _Joint(self._bench, self.looks[0])
        rounds = draws // bench.draws // 2 * 2
        message = self.looks[0].extract in (Played.message, Played.decoded_message)
        wire = _WireBits.from_bench(bench) if message and not bench.concentrated else None
        self._grid = _OnGrid(bench)
        for round in range(rounds):
            half = int(2 * (round // 2 * 2) >= rounds)
            for world in (0, 1):
                played = bench.play(round, world)
                if len(played.clients) < _FEWEST_ANSWERS:
                    continue  # nobody else is there; delta pays for it
                self._grid.add(played)
                for number, look in enumerate(self.looks):
                    classes = look.bins.fine(look.extract(played))
                    labels = played.position_labels(len(classes))
                    look.view.add(half, labels, classes)
                    if number == 0:
                        joint.add(half, round, world, labels, classes)
                if wire and round < _WIRE_ROUNDS:
                    wire.add(int(2 * round >= min(rounds, _WIRE_ROUNDS)), played)
        self.views = [*(look.view for look in self.looks), *joint.views, *([wire.view] if wire else [])]

    def judge(self, each: float) -> tuple[Finding, ...]:
        """Compare every view with its claim."""
        return (*(view.judge(each) for view in self.views), *self._grid.judge())


def _looks(bench: Bench, adversaries: tuple[Adversary, ...], rounds: int, before: list[Loss]) -> list[_Look]:
    """View of every adversary with a claim.

    The first one is also looked at twice in a row.

    Who sees a function of what was looked at before, and is promised the same, is left out: the released sum
    where the sum of the messages is there, everybody where each message protects itself. All messages of a
    group are no function of one.

    Args:
        rounds: How many there will be.
        before: What was promised to those who have looked already, with more streams.
    """
    claims = {who: bench.private_claim(who) for who in adversaries}
    coupled, summed = len(bench.groups[0]) > 1, bench.mechanism.homomorphic
    one = Played.message if bench.symbolic else Played.decoded_message
    others = Played.honest_total if bench.rotated else Played.honest_sum
    wanted: list[tuple[str, Adversary, Callable[[Played], Array], bool]] = [
        ("one message", Adversary.EAVESDROPPER, one, True),
        ("all messages of a group", Adversary.SERVER, Played.group, bench.aligned and coupled),
        ("one message", Adversary.SERVER, one, not coupled),
        ("the sum of all messages", Adversary.SECAGG_SERVER, Played.total, bench.symbolic and summed),
        ("the released sum", Adversary.OUTSIDER, Played.released, True),
        ("a curious client", Adversary.CLIENT, others, len(bench.clients) > 1),
    ]
    found: list[tuple[str, PrivacyClaim, Callable[[Played], Array]]] = []
    for name, who, extract, possible in wanted:
        claim, promised = claims.get(who), [*before, *(one.loss for _, one, _ in found)]
        if claim is not None and possible and (claim.loss not in promised or extract is Played.group):
            found.append((name, claim, extract))
    if not found:
        return []
    sample = bench.calibration(min(max(rounds // 4, 8), MOST_CALIBRATIONS))
    calibration = [played for played in sample if len(played.clients) >= _FEWEST_ANSWERS]
    return [_look(bench, *one, calibration) for one in found]


def _look(
    bench: Bench,
    name: str,
    claim: PrivacyClaim,
    extract: Callable[[Played], Array],
    calibration: list[Played],
) -> _Look:
    if bench.concentrated and not bench.follows_streams:
        whole = extract

        def extract(played: Played) -> Array:
            return whole(played)[:1]

    sample = [extract(played) for played in calibration]
    bins, positions = Bins(np.concatenate(sample)), len(sample[0])
    loss, copies = position_loss(bench, claim, positions)
    view = View(name, loss, copies, positions, bins.size, bench.failure, positions // bench.times)
    return _Look(extract, bins, view, claim.loss)


def position_loss(bench: Bench, claim: PrivacyClaim, positions: int) -> tuple[Loss, int]:
    """The loss of one position and how often it composes there.

    What any function of a view shows is bounded by the claim as a whole, if nothing better is known.
    """
    spread = not bench.follows_streams or (bench.rotated and positions == bench.num_symbols)
    if claim.compositions == 1 and not bench.concentrated and spread:
        try:
            return claim.loss.spread(positions), 1
        except TypeError:
            return claim.loss, 1
    if claim.compositions in (positions, bench.dim):
        return claim.loss, 1
    return claim.loss, claim.compositions


class _Joint:
    """Two rounds of one position, and two layers of one round, as one outcome."""

    def __init__(self, bench: Bench, look: _Look) -> None:
        one, self._bins = look.view, look.bins
        self._size, positions = look.bins.coarse_size, one.counts.shape[2]
        name, outcomes = one.name, look.bins.coarse_size**2
        failure = 1.0 - (1.0 - one.failure) ** 2
        times, copies = bench.times, 2 * one.copies
        period = positions // times
        self.views = [View(f"{name}, two rounds", one.loss, copies, positions, outcomes, failure, period)]
        self._first, self._second = bench.segments[:2]
        if bench.aligned and positions == bench.dim and not bench.concentrated:
            number, period = times * self._second, self._second
            two = View(f"{name}, two layers", one.loss, copies, number, outcomes, failure, period)
            self.views.append(two)
        self._previous: dict[int, tuple[Integers, Integers]] = {}

    def add(self, half: int, round: int, world: int, labels: Integers, classes: Integers) -> None:
        coarse = self._bins.coarse(classes)
        if round % 2 == 0:
            self._previous[world] = labels, coarse
        else:
            earlier, before = self._previous[world]
            self.views[0].add(half, earlier, self._size * before + coarse)
        if len(self.views) > 1:
            period, end = self._first + self._second, self._second
            one, held = coarse.reshape(-1, period), labels.reshape(-1, period)
            both = self._size * one[:, :end] + one[:, self._first :]
            self.views[1].add(half, held[:, :end].flatten(), both.flatten())


class _WireBits:
    """The bits of the victim's stream, padding included, each held to the claim of its symbol."""

    def __init__(self, view: View, symbol_of: Integers) -> None:
        self.view, self._symbol_of = view, symbol_of

    @classmethod
    def from_bench(cls, bench: Bench) -> _WireBits | None:
        claim = bench.private_claim(Adversary.EAVESDROPPER)
        if claim is None or not bench.symbolic or bench.everybody:
            return None
        bits = 8 * len(bench.packed(bench.play_alone(bench.keys[2], bench.clients[0], 0, CALIBRATION)))
        loss, copies = position_loss(bench, claim, bench.num_symbols)
        width = bits // bench.num_symbols
        symbol_of = np.minimum(np.arange(bits) // width, bench.num_symbols - 1)
        period = width * (bench.num_symbols // bench.times)
        return cls(View("bits on the wire", loss, copies, bits, 2, period=period), symbol_of)

    def add(self, half: int, played: Played) -> None:
        bits = np.unpackbits(np.frombuffer(Bench.packed(played), np.uint8)).astype(np.int64)
        labels = played.position_labels(played.symbols.shape[1])
        self.view.add(half, labels[self._symbol_of], bits)


class _OnGrid:
    """Is what leaves the server a multiple of the grid that the claims count on?"""

    def __init__(self, bench: Bench) -> None:
        self._grid = bench.mechanism.grid(bench.context(0))
        self._count, self._off = 0, 0

    def add(self, played: Played) -> None:
        if self._grid is not None:
            places = played.released() / self._grid
            self._off += int((np.abs(places - np.rint(places)) > 1e-6).sum())
            self._count += len(places)

    def judge(self) -> tuple[Finding, ...]:
        if self._grid is None:
            return ()
        alarm = f"{self._off} of {self._count} released numbers lie off it" if self._off else ""
        return (Finding("the grid of the released sum", math.inf, 0.0, self._count, alarm),)
