"""Audit by simulation: run the shipped mechanism on worst neighbours and test its claims with error bounds.

The shipped mechanism encodes the worst neighbours in a real `RoundEngine`, with its real streams, packing and
rounding. The audit counts the outcomes of every view that has a claim:

- one message and its bits on the wire
- all messages of a group
- the sum behind secure aggregation
- the released sum
- the released sum without the update of a curious client

For the first view it also counts pairs of rounds and pairs of layers. See `bench` for the neighbours and
`views` for the test. A correct mechanism raises an alarm with probability at most `alpha`, 0.1% by default.
The released sum must also be on the mechanism's grid.

A claim about a whole vector (clipped in l1 or l2) has two worst cases. A difference that is *spread* over all
coordinates gives one draw per coordinate, and each coordinate is checked against its share of the claim
(`Loss.spread`). This test is sharper. Its noise leaves one coordinate about as private as the claims of other
mechanisms. A difference that is *concentrated* in one coordinate gives one draw per encoding, and detects
wrong clipping.

The worst pair may depend on streams, such as a public rotation or a selection that members know. Each
adversary is then tested with the pair that depends on the streams it holds. `knowledge` fixes the other
streams that an adversary holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_fedq.audit.audit_case import AuditCase
from lightning_fedq.audit.bench import (
    CALIBRATION,
    CROWD,
    CROWD_SEGMENTS,
    FEW_SEGMENTS,
    MOST_CALIBRATIONS,
    SEGMENTS,
    Bench,
)
from lightning_fedq.audit.bins import Bins, Integers
from lightning_fedq.audit.cells import (
    BLOCKS,
    SMALL_ROUNDS,
    ByRound,
    Tested,
    divided,
    judge_cells,
    tested_claims,
)
from lightning_fedq.audit.played import Played
from lightning_fedq.audit.probes import describe_pairs, probe
from lightning_fedq.audit.views import Array, Finding, Trial, View
from lightning_fedq.mechanisms.interface import Adversary, Loss, Mechanism, PrivacyClaim
from lightning_fedq.privacy.account import OF_SUMS

FEWEST_ROUNDS = 8
_WIRE_ROUNDS = 400
_FEWEST_ANSWERS = 2
_LEVELS: tuple[tuple[Adversary, tuple[Adversary, ...]], ...] = (
    (Adversary.SERVER, (Adversary.SERVER, Adversary.SECAGG_SERVER)),
    (Adversary.CLIENT, (Adversary.CLIENT,)),
    (Adversary.OUTSIDER, (Adversary.EAVESDROPPER, Adversary.OUTSIDER)),
)
"""Owner of the streams that a worst pair may depend on, and the adversaries that are tested with this pair.

Adversaries with more streams come first.
"""
_FEWEST_OF_A_ROUND = 64
"""Number of positions from which a round is also judged by itself."""
_MOST_TRIED = 32
"""Number of cohort sizes that are tried to get two groups."""


@dataclass(frozen=True)
class _Look:
    """One adversary's number per position, the classes of this number, and the view that counts them."""

    extract: Callable[[Played], Array]
    bins: Bins
    view: View
    promise: Loss


def cohort_size(mechanism: Mechanism) -> int:
    """Return the smallest cohort size for an audit: 3 clients with a fixed cohort, otherwise 4 or more.

    The size grows until the mechanism forms no groups or at least two. If every size gives one group, the
    smallest size is returned.
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
        attacked: Mechanism as it is shipped, or an audit case of it, see `audit_cases`.
        draws: Draws of one coordinate per neighbour. Tests use 10^6, and 10^7 takes up to two minutes.
        alpha: Probability of an alarm if all claims hold.
        seed: Seed of the audit's own keys.
        concentrated: Whether one coordinate holds the whole difference, for claims about a whole vector. One
            encoding is then one draw. An `AuditCase` has its own setting, which is used instead.
        times: Number of repetitions of both layers in a round. A round then gives this many times more draws
            and takes little longer. A claim about a whole vector leaves each coordinate of a longer vector a
            smaller share, so the case must be made for this length, see `audit_cases`.

    Returns:
        One finding per view. Empty for a mechanism that claims nothing against any adversary.

    Raises:
        ValueError: If there are too few draws for two halves, or a round of the case is aborted.
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
    for level, group in levels:
        adversaries = tuple(adversary for adversary in group if adversary in OF_SUMS or not case.only_sums)
        promised = [look.promise for run in runs for look in run.looks]
        bench = Bench(case, seed, segments, size, level, times)
        runs += [run] if (run := _Run(bench, adversaries, draws, promised)).looks else []
    for run in runs:
        run.play(max(draws // len(runs), fewest))
    count = sum(len(run.views) + 1 for run in runs)
    missing = case.num_dropped or case.dropout_probability or case.min_survivors is not None
    # all kinds of updates are played in cases without one of their own
    probed = bool(runs) and not (case.only_sums or case.to_center or missing)
    findings = [finding for run in runs for finding in run.judge(alpha / count * (0.5 if probed else 1.0))]
    if not probed:
        return tuple(findings)
    cells = [cell for run in runs for cell in run.by_round.cells()]
    cells += probe(case, draws, seed, size)
    return with_trials(findings, judge_cells(cells, 0.5 * alpha), size)


def with_trials(findings: Sequence[Finding], trials: Sequence[Trial], size: int) -> tuple[Finding, ...]:
    """Return the findings with the results of pairs of updates, each next to the view that it is about.

    Args:
        findings: Findings of the main simulation.
        trials: Results of all pairs, alarms first.
        size: Size of the cohort of the main simulation.
    """
    rest, out = list(trials), []
    for finding in findings:
        own = [trial for trial in rest if trial.view == finding.view]
        rest = [trial for trial in rest if trial.view != finding.view]
        if own:
            last = max(finding.rounds[0][1], BLOCKS[1] + SMALL_ROUNDS)
            finding = replace(
                finding,
                alarm=finding.alarm or own[0].alarm,
                trials=tuple(own),
                num_clients=tuple(sorted({size, *(each for trial in own for each in trial.num_clients)})),
                rounds=((0, last), (BLOCKS[2], BLOCKS[2] + SMALL_ROUNDS - 1)),
            )
        out.append(finding)
    return tuple(out)


class _Run:
    """Rounds of two worlds, and the views that count their outcomes."""

    def __init__(
        self, bench: Bench, adversaries: tuple[Adversary, ...], draws: int, promised: list[Loss]
    ) -> None:
        self._bench, self.looks = bench, list[_Look]()
        if tested := tested_claims(bench, adversaries, promised):
            # the classes are chosen on rounds of their own
            rounds = draws // bench.draws // 2 * 2
            sample = bench.calibration(min(max(rounds // 4, 8), MOST_CALIBRATIONS))
            sample = [played for played in sample if len(played.clients) >= _FEWEST_ANSWERS]
            self.looks = [_look(bench, test, sample) for test in tested]
        self.views: list[View] = []
        self._rounds = 0
        if self.looks:
            self.by_round = ByRound(bench, self.looks[0].view, self.looks[0].bins)

    def play(self, draws: int) -> None:
        """Run as many rounds as give `draws` draws of one coordinate."""
        bench, joint = self._bench, _Joint(self._bench, self.looks[0])
        rounds = self._rounds = draws // bench.draws // 2 * 2
        claim, message = bench.private_claim(Adversary.EAVESDROPPER), self.looks[0].extract is Played.message
        wire = None
        if claim is not None and message and bench.symbolic and not (bench.concentrated or bench.everybody):
            wire = _WireBits(bench, claim)
        self._grid = _OnGrid(bench)
        for round in range(rounds):
            half = int(2 * (round // 2 * 2) >= rounds)
            for world in (0, 1):
                played = bench.play(round, world)
                if len(played.clients) < _FEWEST_ANSWERS:
                    continue  # there is no other client; the delta of the claim covers such rounds
                self._grid.add(played)
                for number, look in enumerate(self.looks):
                    classes = look.bins.fine(look.extract(played))
                    labels = played.position_labels(len(classes))
                    look.view.add(half, labels, classes)
                    if number == 0:
                        joint.add(half, round, world, labels, classes)
                        if len(labels) >= _FEWEST_OF_A_ROUND:
                            self.by_round.add(round, labels, classes)
                if wire and round < _WIRE_ROUNDS:
                    wire.add(int(2 * round >= min(rounds, _WIRE_ROUNDS)), played)
        self.views = [*(look.view for look in self.looks), *joint.views, *([wire.view] if wire else [])]

    def judge(self, each: float) -> tuple[Finding, ...]:
        """Test the claim of every view, each with error probability `each`."""
        found = (*(view.judge(each) for view in self.views), *self._grid.judge())
        sizes, rounds = (len(self._bench.context(0).cohort),), ((0, self._rounds - 1),)
        return tuple(replace(finding, num_clients=sizes, rounds=rounds) for finding in found)


def _look(bench: Bench, test: Tested, calibration: list[Played]) -> _Look:
    """Return a view whose classes are chosen on the calibration rounds."""
    extract = test.extract
    if bench.concentrated and not bench.follows_streams:
        whole = extract

        def extract(played: Played) -> Array:
            return whole(played)[:1]

    sample = [extract(played) for played in calibration]
    bins, positions = Bins(np.concatenate(sample)), len(sample[0])
    loss, copies = position_loss(bench, test.claim, positions)
    view = View(test.view, loss, copies, positions, bins.size, bench.failure, positions // bench.times)
    view.name_outputs(bench.inputs, bins.describe)
    return _Look(extract, bins, view, test.claim.loss)


def position_loss(bench: Bench, claim: PrivacyClaim, positions: int) -> tuple[Loss, int]:
    """Return the claimed loss of one position and the number of its compositions there, see `divided`."""
    is_even = not bench.follows_streams or (bench.rotated and positions == bench.num_symbols)
    return divided(claim, positions, bench.dim, positions if is_even and not bench.concentrated else 1)


class _Joint:
    """Two rounds of one position, and two layers of one round, as one outcome."""

    def __init__(self, bench: Bench, look: _Look) -> None:
        view, self._bins = look.view, look.bins
        self._size, positions = look.bins.coarse_size, view.counts.shape[2]
        name, outcomes = view.name, look.bins.coarse_size**2
        failure = 1.0 - (1.0 - view.failure) ** 2
        times, copies = bench.times, 2 * view.copies
        period = positions // times
        self.views = [View(f"{name}, two rounds", view.loss, copies, positions, outcomes, failure, period)]
        self.views[0].name_outputs(bench.inputs, describe_pairs)
        self._first, self._second = bench.segments[:2]
        if bench.aligned and positions == bench.dim and not bench.concentrated:
            number, period = times * self._second, self._second
            two = View(f"{name}, two layers", view.loss, copies, number, outcomes, failure, period)
            two.name_outputs(bench.inputs, describe_pairs)
            self.views.append(two)
        self._previous: dict[int, tuple[Integers, Integers]] = {}

    def add(self, half: int, round: int, world: int, labels: Integers, classes: Integers) -> None:
        """Count the pair of this round and the round before it, and the pair of the two layers."""
        coarse = self._bins.coarse(classes)
        if round % 2 == 0:
            self._previous[world] = labels, coarse
        else:
            earlier, before = self._previous[world]
            self.views[0].add(half, earlier, self._size * before + coarse)
        if len(self.views) > 1:
            period, end = self._first + self._second, self._second
            layers, layer_labels = coarse.reshape(-1, period), labels.reshape(-1, period)
            both = self._size * layers[:, :end] + layers[:, self._first :]
            self.views[1].add(half, layer_labels[:, :end].flatten(), both.flatten())


class _WireBits:
    """Bits of the victim's packed message with padding, each checked against the claim of its symbol."""

    def __init__(self, bench: Bench, claim: PrivacyClaim) -> None:
        bits = 8 * len(bench.packed(bench.play_alone(bench.keys[2], bench.clients[0], 0, CALIBRATION)))
        loss, copies = position_loss(bench, claim, bench.num_symbols)
        width = bits // bench.num_symbols
        self._symbol_of = np.minimum(np.arange(bits) // width, bench.num_symbols - 1)
        period = width * (bench.num_symbols // bench.times)
        self.view = View("bits on the wire", loss, copies, bits, 2, period=period)
        self.view.name_outputs(bench.inputs, lambda event: f"a bit of {int(np.argmax(event))}")

    def add(self, half: int, played: Played) -> None:
        bits = np.unpackbits(np.frombuffer(Bench.packed(played), np.uint8)).astype(np.int64)
        labels = played.position_labels(played.symbols.shape[1])
        self.view.add(half, labels[self._symbol_of], bits)


class _OnGrid:
    """Exact check that all released numbers are multiples of the mechanism's grid step."""

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
        alarm = f"{self._off} of {self._count} released numbers are not on the grid" if self._off else ""
        return (Finding("the grid of the released sum", math.inf, 0.0, self._count, alarm),)
