"""Rounds of two neighbouring cohorts, run by the shipped mechanism in a real `RoundEngine`.

The cohorts differ in the update of one client, the victim. Each client is the victim in turn, for two rounds.
Each coordinate of the victim's update holds one of two inputs, "high" (label 0) or "low" (label 1), which the
mechanism's `worst_pair` returns. Coordinates in which the two inputs are equal have label -1 and are not
counted.

Two worlds with separate keys see opposite labels. Labels also change with every round and between the two
layers. A random stream that is used twice therefore shows in the joint outcome of two rounds or two layers.

`HeldKeys` holds the keys that an adversary knows. These keys are the same in every trial, and all others are
fresh.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedq.audit.fixed_parts import FixedPlanner, HeldKeys, Wire
from lightning_fedq.audit.views import Array
from lightning_fedq.keys.randomness import ClientRandomness, Keys, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms.interface import (
    Adversary,
    AuditCase,
    Mechanism,
    Neighbours,
    NonPrivate,
    PrivacyClaim,
    RoundContext,
)
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.cohorts import Cyclic, FixedSize
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.run import ASSUMED, Run
from lightning_fedq.rounds import RoundEngine

Integers = NDArray[np.int64]

CALIBRATION = 1 << 41
"""Number of the first round that only chooses the edges of bins and is not counted."""
_BINS = 32
_FEWEST_CALIBRATED = 4000
MOST_CALIBRATIONS = 512
SEGMENTS = (512, 509)  # the odd length tests the last coordinate and the bits that pad it to bytes
FEW_SEGMENTS = (2, 1)
CROWD_SEGMENTS = (5, 3)
CROWD = 64
"""Number of clients in cases where all clients are victims at once and each message is one draw."""
_DROPOUTS_DELTA = 0.02
"""Delta of the claims under dropout. Half of it covers rounds in which too few clients answer."""
_TURNS = 3
"""Rounds of a block, for mechanisms that hand noise on. The victim takes part in the first round."""
_MEASURED = 8192
"""Coordinates of the blocks of zeros that measure the covariance of handed-on noise."""
_ZEROS_SEED = 1 << 51


@dataclass(frozen=True)
class Played:
    """Messages and released sum of one round in one world.

    Args:
        mechanism: Mechanism that encoded the messages.
        context: Public part of the round.
        clients: Clients that answered.
        victim: Client whose update differs between the worlds, one of `clients`.
        symbols: `(len(clients), m)` messages, in the order of `clients`.
        labels: `(dim,)` label of the input in each coordinate of the victim: 0, 1, or -1 for not counted.
        public: Public randomness of the round.
        decoded_sum: `(dim,)` sum that the engine released.
        everybody: Whether every client holds the victim's input.
        own_weight: Weight of the victim's round in a linear combination of several rounds.
        later: `(dim,)` weighted sum of later rounds, which cancel part of the noise of this round.
        behind: Number of symbols that follow those of the coordinates in a message, see `Mechanism.core`.
    """

    mechanism: Mechanism
    context: RoundContext
    clients: tuple[int, ...]
    victim: int
    symbols: Tensor
    labels: Integers
    public: PublicRandomness
    decoded_sum: Array
    everybody: bool = False
    own_weight: float = 1.0
    later: Array | float = 0.0
    behind: int = 0

    def position_labels(self, positions: int) -> Integers:
        """Return the labels of the positions of a view.

        If positions are not coordinates, all of them have the same label.
        """
        if positions == len(self.labels):
            return self.labels
        if positions == len(self.labels) + self.behind:
            return np.append(self.labels, np.full(self.behind, -1))
        return np.full(positions, max(self.labels[0], self.labels.max()))

    @property
    def curious(self) -> int:
        """Curious client: the client after the victim, which may be the victim's partner."""
        return self.clients[(self.clients.index(self.victim) + 1) % len(self.clients)]

    def row(self, client: int) -> Tensor:
        """Return the message of a client."""
        return self.symbols[self.clients.index(client)]

    def message(self) -> Array:
        """Return the victim's message, or the concatenated messages if every client is a victim."""
        if self.everybody:
            return np.asarray(self.symbols.flatten().numpy(), np.float64)
        return np.asarray(self.row(self.victim).numpy(), np.float64)

    def decoded_message(self) -> Array:
        """Return the victim's message as the server decodes it."""
        return self.decoded([self.victim])

    def total(self) -> Array:
        """Return the sum of all messages, modulo the mechanism's symbol modulus if it has one."""
        return self._total(self.symbols)

    def honest_total(self) -> Array:
        """Return the sum of all messages except the curious client's."""
        rows = [row for row, client in enumerate(self.clients) if client != self.curious]
        return self._total(self.symbols[rows])

    def _total(self, symbols: Tensor) -> Array:
        total = symbols.sum(0, dtype=torch.int64)
        if (modular := self.mechanism.symbol_modulus(self.context)) is not None:
            total = total % modular[0]
        return np.asarray(total.numpy(), np.float64)

    def released(self) -> Array:
        """Return the released sum, combined with the later rounds that cancel part of its noise."""
        return self.own_weight * self.decoded_sum + self.later

    def honest_sum(self) -> Array:
        """Return the decoded sum without the update of the curious client, which knows its own update."""
        silent = [client for client in self.context.cohort if client not in self.clients]
        known = [client for client in self.clients if client != self.curious]
        decoded = self.decoded(known)
        # a mechanism with a fixed cohort decodes only the whole cohort, so silent clients count as zeros
        if silent and self.mechanism.fixed_cohort:
            zero = torch.zeros(len(silent), self.symbols.shape[1], dtype=torch.int32)
            decoded = decoded + self._decode(zero, silent)
        return self.own_weight * decoded + self.later

    def group(self) -> Array:
        """Return the victim's message and the sum of its partners' messages, encoded in one number.

        Groups of different sizes get different numbers, so an unpaired victim is distinguished.
        """
        members = [c for c in self.context.place(self.victim)[0] if c in self.clients]
        widest = max(len(group) for group in self.context.groups)
        own = self.row(self.victim).to(torch.int64)
        rest = sum((self.row(c).to(torch.int64) for c in members if c != self.victim), torch.zeros_like(own))
        joint = own * widest + rest + 4 * widest * (widest - len(members))
        return np.asarray(joint.numpy(), np.float64)

    def decoded(self, clients: list[int]) -> Array:
        """Return the decoded sum of the updates of some clients, not rounded to a grid."""
        return self._decode(torch.stack([self.row(client) for client in clients]), clients)

    def _decode(self, symbols: Tensor, clients: list[int]) -> Array:
        decoded = self.mechanism.decode(symbols, clients, self.context, self.public)
        return np.asarray(decoded.numpy(), np.float64)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _classify(values: Array, edges: Array, out: Integers) -> None:
    """Write into `out`, for each value, the number of edges that are <= it. Edges are ascending."""
    for i in range(values.size):
        low, high = 0, edges.size
        while low < high:
            middle = (low + high) // 2
            if edges[middle] <= values[i]:
                low = middle + 1
            else:
                high = middle
        out[i] = low


def _joined(items: list[str], at_most: int = 4) -> str:
    """Return a list in words, with the number of items that are left out."""
    shown = items[:at_most]
    if len(items) > at_most:
        return f"{', '.join(shown)} or {len(items) - at_most} more"
    return " or ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


class Bins:
    """Classes of a real number: one class per value up to 32 values, otherwise 32 equally likely classes.

    If there are more values, each value with at least 1/32 of the sample has a class of its own.

    Args:
        values: Sample that chooses the edges of the classes.
    """

    def __init__(self, values: Array) -> None:
        levels, counts = np.unique(values, return_counts=True)
        self._levels: Array | None = levels
        if len(levels) > _BINS:
            self._levels = None
            frequent = levels[counts * _BINS >= len(values)]  # each has a class of its own
            after = np.nextafter(frequent, np.inf)
            levels = np.unique(
                np.concatenate([np.quantile(values, np.arange(_BINS) / _BINS), frequent, after])
            )
        self.edges, self.size = levels[1:], len(levels)
        # pairs of outcomes would need size^2 bins, so they use at most 8 coarse classes each
        self._width = -(-self.size // 8)
        self.coarse_size = -(-self.size // self._width)

    def describe(self, event: NDArray[np.bool_]) -> str:
        """Return the outputs of an event in words.

        Args:
            event: `(size,)`, whether each class is part of the event.
        """
        inside, outside = self._items(event), self._items(~event)
        if outside and len(outside) < len(inside):
            return f"any output but {_joined(outside)}"
        return f"output {_joined(inside)}"

    def _items(self, event: NDArray[np.bool_]) -> list[str]:
        """Return the values of an event, and the intervals of neighbouring classes."""
        if self._levels is not None:
            return [f"{value:.6g}" for value in self._levels[event]]
        ends = np.concatenate([[-np.inf], self.edges, [np.inf]])
        changes = np.flatnonzero(np.diff(np.concatenate([[0], event.astype(np.int64), [0]])))
        return [
            f"{ends[start]:.6g}"
            if ends[stop] == np.nextafter(ends[start], np.inf)
            else f"{ends[start]:.4g} to {ends[stop]:.4g}"
            for start, stop in changes.reshape(-1, 2)
        ]

    def fine(self, values: Array) -> Integers:
        """Return the class of each value, 0 to `size` - 1."""
        out = np.empty(len(values), np.int64)
        _classify(values, self.edges, out)
        return out

    def coarse(self, classes: Integers) -> Integers:
        """Merge neighbouring classes into at most 8, numbered 0 to `coarse_size` - 1."""
        return np.asarray(classes // self._width)


class Bench:
    """Test bench that runs rounds of two neighbouring cohorts.

    Args:
        case: Mechanism under audit, as it is shipped, and its setting.
        seed: Seed of the audit's own keys.
        segments: Lengths of the two layers.
        num_clients: Size of the cohort. It overrides the size of the case.
        level: Adversary whose streams the worst pair may depend on.
        times: Number of repetitions of both layers in a round.
    """

    def __init__(
        self,
        case: AuditCase,
        seed: int,
        segments: tuple[int, int],
        num_clients: int = 4,
        level: Adversary = Adversary.OUTSIDER,
        times: int = 1,
    ) -> None:
        mechanism, min_survivors, dropout = case.mechanism, case.min_survivors, case.dropout_probability
        self.mechanism, self.segments, self.times = mechanism, segments * times, times
        self.concentrated, self.everybody, self._to_center = case.concentrated, case.everybody, case.to_center
        num_dropped = case.num_dropped if min_survivors is None else num_clients - min_survivors
        self.keys: list[Keys] = [SeededKeys(3 * seed + world) for world in range(3)]
        self._decoy, self._level = SeededKeys(3 * seed + (1 << 50)), level
        self.dim = sum(self.segments)
        self._turns = _TURNS if mechanism.reuses_noise else 1
        self._planner = FixedPlanner(
            num_clients * self._turns,
            0,
            Cyclic(num_clients) if self._turns > 1 else FixedSize(num_clients),
            dropout,
            num_dropped=num_dropped,
            turns=self._turns,
        )
        self.groups = self._planner.plan(0, mechanism).groups
        self.clients = tuple(range(num_clients - num_dropped))
        """Clients that may answer."""
        ones = torch.ones(2 * times, dtype=torch.float64)
        self._range = 0.0 * ones, ones
        self.claims = {claim.adversary: claim for claim in mechanism.claims(self.context(0))}
        self.failure = 0.0
        """Probability of rounds that the claims do not cover. It is added to delta."""
        if dropout or min_survivors is not None:
            sums = replace(ASSUMED, min_survivors=min_survivors)
            run = Run.ideal(mechanism, self.context(0), 1, sums)
            run = replace(run, sampling=replace(run.sampling, dropout_probability=dropout))
            self.claims = Account(run, _DROPOUTS_DELTA).claims()
            self.failure = _DROPOUTS_DELTA / 2.0 if dropout else 0.0
        # updates of the other clients: all high, all low, opposite and zero, in turn over the coordinates,
        # so that each coordinate is tested with different sums around the victim's input
        high = torch.tensor([1.0, -1.0, 1.0, 0.0], dtype=torch.float64).repeat(self.dim)[: self.dim]
        opposite = torch.tensor([1.0, -1.0, -1.0, 0.0], dtype=torch.float64).repeat(self.dim)[: self.dim]
        self.others = torch.stack([opposite if c % 2 else high for c in self.clients])
        self._engines: dict[int, RoundEngine] = {}
        self._seed, self._stages = seed, dict[int, tuple[Keys, RoundEngine]]()
        self._lone: RoundEngine | None = None
        self._weights: Array | None = None
        rand = ClientRandomness(self.keys[2], self.clients, CALIBRATION)
        probe = mechanism.encode(self.others.clone(), self.context(CALIBRATION), rand).symbols
        self.num_symbols = int(probe.shape[1])
        self.behind = mechanism.core(self.context(0))[1].dim - self.dim
        self.aligned = self.num_symbols == self.dim + self.behind
        """Whether there is one symbol per coordinate. Only then do the layers hold opposite inputs."""
        message = self.private_claim(Adversary.EAVESDROPPER)
        counted = message is not None and message.compositions == self.num_symbols
        self.symbolic = self.aligned or counted
        """Whether the mechanism's claim is about one symbol."""
        self.rotated = self.symbolic and not self.aligned and mechanism.homomorphic and self.follows_streams
        """Whether there is one symbol per rotated coordinate, each with the same difference of inputs."""
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._told: tuple[int, Keys, RoundContext, PublicRandomness] | None = None

    @property
    def draws(self) -> int:
        """Number of draws of one coordinate in a round."""
        return len(self.clients) if self.everybody else 1 if self.concentrated else self.dim

    def context(self, round: int) -> RoundContext:
        """Return the public part of a round."""
        return RoundContext(round, self.groups, self.segments, *self._range)

    def private_claim(self, adversary: Adversary) -> PrivacyClaim | None:
        """Return the claim against an adversary, or None if there is no guarantee."""
        claim = self.claims[adversary]
        return None if isinstance(claim.loss, NonPrivate) else claim

    @cached_property
    def inputs(self) -> tuple[str, str]:
        """Names of the two updates that `pair` returns."""
        if self.follows_streams:
            return "first update of worst_pair", "second update of worst_pair"
        claims = {claim.neighbours for claim in self.mechanism.claims(self.context(0))}
        if self._to_center:
            return "4 times the range, up", "centre of the range"
        if claims == {Neighbours.SUBSTITUTION}:
            return "4 times the range, up", "4 times the range, down"
        return "4 times the range, up", "all zero"

    @cached_property
    def follows_streams(self) -> bool:
        """Whether the mechanism's worst pair depends on random streams."""
        return type(self.mechanism).worst_pair is not Mechanism.worst_pair

    def pair(self, victim: int, round: int, keys: Keys) -> tuple[Tensor, Tensor]:
        """Return the worst neighbouring updates of a round, each `(dim,)`.

        Streams that the adversary does not hold are replaced with decoys, so the pair can't depend on them.
        """
        told = (round, keys) if self.follows_streams else (0, self.keys[2])
        if self._told is None or self._told[:2] != told:
            public = PublicRandomness(HeldKeys(self._level, told[1], self._decoy), told[0])
            self._told, self._pairs = (*told, self.context(told[0]), public), {}
        if victim in self._pairs:
            return self._pairs[victim]
        high, low = self.mechanism.worst_pair(victim, *self._told[2:])
        if self._to_center:
            low = self.context(round).expand(self._range[0])
        if self.concentrated and not self.follows_streams:
            low = torch.cat([low[:1], torch.zeros(self.dim - 1, dtype=torch.float64)])
            high = torch.cat([high[:1], torch.zeros(self.dim - 1, dtype=torch.float64)])
        self._pairs[victim] = high, low
        return high, low

    def _labels(self, turned: int, high: Tensor, low: Tensor) -> Integers:
        """Return the label of each coordinate if the first layer holds input `turned` (0 or 1)."""
        labels = np.full(self.dim, turned, np.int64)
        if self.concentrated or self.everybody:
            return labels
        if self.aligned:
            first, second = self.segments[:2]
            labels[np.arange(self.dim) % (first + second) >= first] = 1 - turned
        labels[(high == low).numpy()] = -1
        return labels

    def play(self, round: int, world: int) -> Played:
        """Run one round of one world with that world's engine. The victim changes every two rounds."""
        victim = self.clients[(round // 2) % len(self.clients)]
        if world not in self._engines:
            self._engines[world] = self._engine(self.keys[world], self.segments)
        return self._play(self._engines[world], self.keys[world], victim, round, (round + world) % 2)

    def play_alone(
        self, keys: Keys, victim: int, turned: int, round: int = 0, told: Keys | None = None
    ) -> Played:
        """Run one round with separate keys, independent of all other rounds.

        Args:
            keys: Keys of this round.
            victim: Client whose update differs between the two inputs.
            turned: Input that the first layer holds, 0 or 1.
            round: Number of the round.
            told: Keys that the adversary holds, if many rounds have them in common. None is `keys`.
        """
        if self._turns > 1 or self.mechanism.separation > 1:  # the noise depends on earlier rounds
            return self._play(self._engine(keys, self.segments), keys, victim, round, turned)
        if self._lone is None:
            self._lone = self._engine(keys, self.segments)
        self._lone.keys = self._lone.client_keys = keys
        self._lone.ledger = Ledger(self._planner.num_clients, repr(self.mechanism))
        return self._play(self._lone, keys, victim, round, turned, told)

    def _engine(self, keys: Keys, segments: tuple[int, ...]) -> RoundEngine:
        """Return a round engine at zero weights whose messages the bench can read."""
        start = torch.zeros(sum(segments), dtype=torch.float64)
        engine = RoundEngine(
            self.mechanism, self._planner, keys, start, segments, FixedRange(1.0), diagnostics=False
        )
        engine.tampering = Wire()
        return engine

    def _play(
        self, engine: RoundEngine, keys: Keys, victim: int, round: int, turned: int, told: Keys | None = None
    ) -> Played:
        """Run one round of an engine in which the updates of a pair are played."""
        told = told or keys
        high, low = self.pair(victim, round, told)
        labels = self._labels(turned, high, low)

        def updates(survivors: tuple[int, ...]) -> Tensor:
            if self.everybody:
                return torch.stack([self.pair(client, round, told)[turned] for client in survivors])
            rows = self.others[list(survivors)].clone()
            rows[survivors.index(victim)] = torch.where(torch.from_numpy(labels) == 1, low, high)
            return rows

        return self._round(engine, keys, victim, round, updates, labels)

    def play_updates(self, stage: int, round: int, victim: int, updates: Tensor) -> Played:
        """Run one round with given updates.

        Args:
            stage: Number of the stage. Each stage has its own keys, and uses a round once.
            round: Number of the round.
            victim: Client whose message the views of sums and groups are about.
            updates: `(len(clients), dim)` updates of all clients, in units of the update.
        """
        if stage not in self._stages:
            own = SeededKeys(3 * self._seed + (1 << 49) + stage)
            self._stages[stage] = own, self._engine(own, self.segments)
        keys, engine = self._stages[stage]
        # the same public range in every round, so that a range that follows the updates tells nothing of them
        engine.ranges = engine.range_rule.first(engine.weights, self.segments)
        labels = np.zeros(self.dim, np.int64)
        return self._round(engine, keys, victim, round, lambda survivors: updates.clone(), labels)

    def _round(
        self,
        engine: RoundEngine,
        keys: Keys,
        victim: int,
        round: int,
        updates: Callable[[tuple[int, ...]], Tensor],
        labels: Integers,
    ) -> Played:
        """Run one round of an engine with the updates of the clients that answer.

        Raises:
            ValueError: If the engine aborts the round.
        """
        round *= self._turns
        engine.round, engine.attempt = round, 0
        engine.weights = torch.zeros(self.dim, dtype=torch.float64)
        survivors = engine.start().survivors
        engine.receive(survivors, updates(survivors))
        record = engine.finish()
        if record.aborted:
            raise ValueError(f"A round of the audit was aborted: {record.aborted}")
        wire = engine.tampering
        assert isinstance(wire, Wire)
        played = Played(
            self.mechanism,
            wire.context,
            survivors,
            victim,
            wire.symbols,
            labels,
            PublicRandomness(keys, round),
            np.asarray((engine.weights * len(survivors)).numpy(), np.float64),
            self.everybody,
            behind=self.behind,
        )
        return played if self._turns == 1 else self._followed(engine, played)

    def _followed(self, engine: RoundEngine, played: Played) -> Played:
        """Return the round combined with the rounds after it, which cancel part of its noise.

        The weights give the best linear test for an update in the first round. They are the first row of the
        inverse covariance of the noise over the rounds, which is measured in blocks with zero updates.
        """
        rows = [self._rest(engine) for _ in range(self._turns - 1)]
        if self._weights is None:
            # all coordinates have the same noise distribution, so one block measures many coordinates
            zeros = self._engine(SeededKeys(_ZEROS_SEED), (_MEASURED - 1, 1))
            precision = np.linalg.inv(np.cov(np.stack([self._rest(zeros) for _ in range(self._turns)])))
            self._weights = precision[0] / np.linalg.norm(precision[0])
        later: Array = self._weights[1:] @ np.stack(rows)
        return replace(played, own_weight=float(self._weights[0]), later=later)

    def _rest(self, engine: RoundEngine) -> Array:
        """Return the released sum of a round in which all updates are zero."""
        engine.weights = torch.zeros_like(engine.weights)
        survivors = engine.start().survivors
        engine.receive(survivors, torch.zeros(len(survivors), engine.weights.numel(), dtype=torch.float64))
        engine.finish()
        return np.asarray((engine.weights * len(survivors)).numpy(), np.float64)

    def calibration(self, at_most: int) -> list[Played]:
        """Run at most `at_most` rounds that choose the edges of bins and are not counted."""
        victims = self.clients
        few = self.everybody or self.concentrated
        every = 2 if few else 2 * len(victims)  # every victim is needed because groups may differ
        rounds = max(2 * (1 + _FEWEST_CALIBRATED // (2 * self.draws)), every)
        first = CALIBRATION - CALIBRATION % every
        return [
            self.play_alone(self.keys[2], victims[(round // 2) % len(victims)], round % 2, round)
            for round in range(first, first + min(rounds, at_most))
        ]

    @staticmethod
    def packed(played: Played) -> bytes:
        """Return the victim's message as packed bytes."""
        return played.mechanism.code(played.context).pack(played.row(played.victim))
