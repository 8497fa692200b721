"""Audit, layer B: does what is shipped keep what it claims? Simulation with certain error bounds.

The worst neighbours are encoded and decoded by a mechanism as it is shipped, real words, streams and packing,
and every view for which something is claimed is counted: one message and its bits on the wire, all messages
of a group, the sum behind secure aggregation, the released sum, and what is left of it for a curious client;
of the first of them also two rounds and two layers together. See `bench` for the neighbours,
`views` for the test; an alarm in a clean mechanism has probability `alpha` at most, 0.1% by default.

A claim about a whole vector (clipped in l1 or l2) has two worst cases. The difference *spread* over all
coordinates gives one draw a coordinate, each held to its share of the claim (`Loss.spread`): the sharper
test, at a noise that leaves one coordinate about as private as the claims of other mechanisms. The whole
difference *concentrated* in one coordinate gives one draw an encoding, and sees wrong clipping.

Not simulated: the server that holds a pair's shared words, whose law is enumerated (`enumeration`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lightning_fedq.audit.bench import CALIBRATION, MOST_CALIBRATIONS, Bench, Bins, Integers, Played
from lightning_fedq.audit.views import Array, Finding, View
from lightning_fedq.core import Adversary, Loss, Mechanism, PrivacyClaim

_SEGMENTS = (512, 509)  # an odd tail: a last coordinate, and bits that pad it to bytes
_FEW_SEGMENTS = (2, 1)
_WIRE_ROUNDS = 400
_GROUP_PATTERNS = 4


@dataclass(frozen=True)
class _Look:
    """One number per position that somebody sees, its classes, and where it is counted."""

    extract: Callable[[Played], Array]
    bins: Bins
    view: View


def audit(
    mechanism: Mechanism,
    draws: int = 1_000_000,
    *,
    alpha: float = 1e-3,
    seed: int = 0,
    concentrated: bool = False,
) -> tuple[Finding, ...]:
    """Try to refute a mechanism's claims by simulation.

    Args:
        mechanism: As it is shipped.
        draws: Draws of one coordinate per neighbour; 10^6 in tests, 10^7 takes up to two minutes.
        alpha: Chance of an alarm if all claims hold.
        seed: Of the audit's own keys.
        concentrated: Put the whole difference into one coordinate, for claims about a whole vector; one
            encoding is one draw then.

    Returns:
        One finding per view. Empty for a mechanism that claims nothing against anybody.

    Raises:
        ValueError: If there are too few draws for two halves.
    """
    segments = _FEW_SEGMENTS if concentrated else _SEGMENTS
    fewest = 64 if concentrated else 8 * sum(segments)
    if draws < fewest:
        raise ValueError(f"draws must be >= {fewest}, got {draws}")
    bench = Bench(
        mechanism,
        seed,
        segments,
        concentrated=concentrated,
        num_clients=3 if mechanism.fixed_cohort else 4,
    )
    rounds = draws // (1 if concentrated else bench.dim) // 2 * 2
    looks = _looks(bench, rounds)
    if not looks:
        return ()
    joint = _Joint(bench, looks[0])
    wire = None if concentrated else _Wire.of(bench)
    error = _MeanError(bench)
    for round in range(rounds):
        half = int(2 * (round // 2 * 2) >= rounds)
        for world in (0, 1):
            played = bench.play(round, world)
            for number, look in enumerate(looks):
                classes = look.bins.fine(look.extract(played))
                labels = played.labels_of(len(classes))
                look.view.add(half, labels, classes)
                if number == 0:
                    joint.add(half, round, world, labels, classes)
            if round < _WIRE_ROUNDS:
                if wire:
                    wire.add(int(2 * round >= min(rounds, _WIRE_ROUNDS)), played)
                if world == 0:
                    error.add(played)
    views = [*(look.view for look in looks), *joint.views, *([wire.view] if wire else [])]
    each = alpha / (len(views) + 1)
    return (*(view.judge(each) for view in views), *error.judge())


def _looks(bench: Bench, rounds: int) -> list[_Look]:
    """What every adversary with a claim sees; the first one is also looked at twice in a row.

    Who sees a function of what was looked at before, and is promised the same, is left out: the released sum
    where the sum of the messages is there, everybody where each message protects itself.
    """
    claims = {who: bench.private_claim(who) for who in Adversary}
    message = claims[Adversary.EAVESDROPPER]
    symbols = bench.aligned or (message is not None and message.compositions == bench.num_symbols)
    coupled, summed = len(bench.groups[0]) > 1, bench.mechanism.homomorphic
    wanted: list[tuple[str, Adversary, Callable[[Played], Array], bool]] = [
        ("one message", Adversary.EAVESDROPPER, Played.message if symbols else Played.decoded_message, True),
        ("all messages of a group", Adversary.SERVER, Played.group, bench.aligned and coupled),
        ("the sum of all messages", Adversary.SECAGG_SERVER, Played.total, bench.aligned and summed),
        ("the released sum", Adversary.OUTSIDER, Played.released, True),
        ("a curious client", Adversary.CLIENT, Played.others, True),
    ]
    calibration = bench.calibration(min(max(rounds // 4, 8), MOST_CALIBRATIONS))
    looks: list[_Look] = []
    promised: list[Loss] = []
    for name, who, extract, possible in wanted:
        claim = claims[who]
        if claim is not None and possible and claim.loss not in promised:
            looks.append(_look(bench, name, claim, extract, calibration))
            promised.append(claim.loss)
    return looks


def _look(
    bench: Bench,
    name: str,
    claim: PrivacyClaim,
    extract: Callable[[Played], Array],
    calibration: list[Played],
) -> _Look:
    if bench.concentrated:
        whole = extract

        def extract(played: Played) -> Array:
            return whole(played)[:1]

    sample = [extract(played) for played in calibration]
    bins, positions = Bins(np.concatenate(sample)), len(sample[0])
    loss, copies = _share(bench, claim, positions)
    return _Look(extract, bins, View(name, loss, copies, positions, bins.size))


def _share(bench: Bench, claim: PrivacyClaim, positions: int) -> tuple[Loss, int]:
    """The loss of one position and how often it composes there."""
    if claim.compositions == 1 and not bench.concentrated:
        return claim.loss.spread(positions), 1
    if claim.compositions in (positions, bench.dim):
        return claim.loss, 1
    return claim.loss, claim.compositions  # a position may show every composition


class _Joint:
    """Two rounds of one position, and two layers of one round, as one outcome."""

    def __init__(self, bench: Bench, look: _Look) -> None:
        one, self._bins = look.view, look.bins
        self._size, positions = look.bins.coarse_size, one.counts.shape[2]
        name, outcomes = one.name, look.bins.coarse_size**2
        self.views = [View(f"{name}, two rounds", one.loss, 2 * one.copies, positions, outcomes)]
        self._split = bench.segments[0]
        self._second = bench.segments[1]
        if bench.aligned and positions == bench.dim and not bench.concentrated:
            self.views.append(View(f"{name}, two layers", one.loss, 2 * one.copies, self._second, outcomes))
        self._previous: dict[int, tuple[Integers, Integers]] = {}

    def add(self, half: int, round: int, world: int, labels: Integers, classes: Integers) -> None:
        coarse = self._bins.coarse(classes)
        if round % 2 == 0:
            self._previous[world] = labels, coarse
        else:
            earlier, before = self._previous[world]
            self.views[0].add(half, earlier, self._size * before + coarse)
        if len(self.views) > 1:
            both = self._size * coarse[: self._second] + coarse[self._split :]
            self.views[1].add(half, labels[: self._second], both)


class _Wire:
    """The bits of the victim's stream, padding included, each held to the claim of its symbol."""

    def __init__(self, view: View, symbol_of: Integers) -> None:
        self.view, self._symbol_of = view, symbol_of

    @classmethod
    def of(cls, bench: Bench) -> _Wire | None:
        claim = bench.private_claim(Adversary.EAVESDROPPER)
        if claim is None or not (bench.aligned or claim.compositions == bench.num_symbols):
            return None
        bits = 8 * len(bench.packed(bench.play(CALIBRATION, 0)))
        loss, copies = _share(bench, claim, bench.num_symbols)
        width = bits // bench.num_symbols
        symbol_of = np.minimum(np.arange(bits) // width, bench.num_symbols - 1)
        return cls(View("bits on the wire", loss, copies, bits, 2), symbol_of)

    def add(self, half: int, played: Played) -> None:
        bits = np.unpackbits(np.frombuffer(Bench.packed(played), np.uint8)).astype(np.int64)
        labels = played.labels_of(played.symbols.shape[1])
        self.view.add(half, labels[self._symbol_of], bits)


class _MeanError:
    """The squared error of a group's decoded mean, against the stated variance.

    A coupling that goes wrong may cost nothing but accuracy. The group is one without the victim; the four
    patterns of its inputs are looked at one by one.
    """

    def __init__(self, bench: Bench) -> None:
        groups = [group for group in bench.groups if 0 not in group and len(group) > 1]
        self._clients = list(groups[0]) if groups else []
        self._bench, self._count = bench, 0
        self._squares = np.zeros(_GROUP_PATTERNS)

    def add(self, played: Played) -> None:
        if not self._clients:
            return
        exact = self._bench.others[self._clients].mean(0).numpy()
        squares = (played.decoded(self._clients) / len(self._clients) - exact) ** 2
        usable = len(squares) // _GROUP_PATTERNS * _GROUP_PATTERNS
        self._squares += squares[:usable].reshape(-1, _GROUP_PATTERNS).sum(0)
        self._count += usable // _GROUP_PATTERNS

    def judge(self) -> tuple[Finding, ...]:
        if not self._clients:
            return ()
        bound = self._bench.mechanism.noise_variance(self._bench.context(0), self._clients)
        limit, worst = math.inf, float(self._squares.max()) / self._count
        if bound is not None:
            limit = float(bound.max())
        # the squared error of a bounded sum has a std below its largest value, about 2 alpha^2: 6 of them
        alarm = ""
        if worst > limit * (1.0 + 12.0 / math.sqrt(self._count)):
            alarm = f"the mean squared error {worst:.4g} exceeds the stated {limit:.4g}"
        return (Finding("error of the mean", math.inf, 0.0, self._count, alarm),)
