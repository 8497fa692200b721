"""Two neighbouring cohorts, played through a real `RoundEngine` by a mechanism as it is shipped.

The victim takes every place in turn, two rounds each. Each of its coordinates holds one of two inputs, "high"
(label 0) or "low" (label 1): the mechanism's `worst_pair`. Two worlds with keys of their own see opposite
labels, and labels change with every round and between the two layers, so that a stream that is used twice
shows in what two rounds, or two layers, say together. Coordinates in which the pair is alike have label -1
and are not counted.

What an adversary holds is put into the keys (`HeldKeys`): those stay in every trial, all others are fresh.
"""

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
"""Rounds from here on choose the edges of bins and are not counted."""
_BINS = 32
_FEWEST_CALIBRATED = 4000
MOST_CALIBRATIONS = 512
SEGMENTS = (512, 509)  # an odd tail: a last coordinate, and bits that pad it to bytes
FEW_SEGMENTS = (2, 1)
CROWD_SEGMENTS = (5, 3)
CROWD = 64
"""Clients that are attacked at once, where each message is one draw."""
_DROPOUTS_DELTA = 0.02
"""Half of it pays for rounds in which too few answer."""
_TURNS = 3
"""Rounds of a block in which noise is handed on; in the first is the victim."""
_MEASURED = 8192
"""Coordinates of such blocks that their noise is measured on."""
_ZEROS_SEED = 1 << 51


@dataclass(frozen=True)
class Played:
    """One round of one world.

    Args:
        victim: Client whose update differs between the worlds; one of `clients`.
        symbols: `(len(clients), m)` messages, in their order.
        labels: `(dim,)` which of the two inputs each coordinate of the victim held, or -1.
        decoded_sum: `(dim,)` the sum as the engine released it.
        everybody: Does every client hold what the victim holds?
        own_weight: Weight of the victim's round where several are looked at.
        later: `(dim,)` what is added to it of the rounds that take noise of this one back, weighted.
        behind: Symbols of a message behind those of the coordinates, see `Mechanism.core`.
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
        """Labels of the positions of a view. Where symbols are no coordinates, all hold the same."""
        if positions == len(self.labels):
            return self.labels
        if positions == len(self.labels) + self.behind:
            return np.append(self.labels, np.full(self.behind, -1))
        return np.full(positions, max(self.labels[0], self.labels.max()))

    @property
    def curious(self) -> int:
        """A client that is curious: the one after the victim, its partner or not."""
        return self.clients[(self.clients.index(self.victim) + 1) % len(self.clients)]

    def row(self, client: int) -> Tensor:
        """The message of a client."""
        return self.symbols[self.clients.index(client)]

    def message(self) -> Array:
        """The victim's message. All of them, one after the other, where everybody is one."""
        if self.everybody:
            return np.asarray(self.symbols.flatten().numpy(), np.float64)
        return np.asarray(self.row(self.victim).numpy(), np.float64)

    def decoded_message(self) -> Array:
        """The victim's message, as the server decodes it."""
        return self.decoded([self.victim])

    def total(self) -> Array:
        """The sum of all messages, modulo what the mechanism takes it modulo."""
        return self._total(self.symbols)

    def honest_total(self) -> Array:
        """That sum less what a curious client sent."""
        kept = [row for row, client in enumerate(self.clients) if client != self.curious]
        return self._total(self.symbols[kept])

    def _total(self, symbols: Tensor) -> Array:
        total = symbols.sum(0, dtype=torch.int64)
        if (modular := self.mechanism.symbol_modulus(self.context)) is not None:
            total = total % modular[0]
        return np.asarray(total.numpy(), np.float64)

    def released(self) -> Array:
        """The sum of all updates, as it is released, with what later rounds tell of its noise."""
        return self.own_weight * self.decoded_sum + self.later

    def honest_sum(self) -> Array:
        """The decoded sum less what a curious client sent and knows."""
        silent = [client for client in self.context.cohort if client not in self.clients]
        known = [client for client in self.clients if client != self.curious]
        decoded = self.decoded(known)
        if silent and self.mechanism.fixed_cohort:
            zero = torch.zeros(len(silent), self.symbols.shape[1], dtype=torch.int32)
            decoded = decoded + self._decode(zero, silent)
        return self.own_weight * decoded + self.later

    def group(self) -> Array:
        """The victim's message and the sum of those of its group, as one number. Lone victims apart."""
        members = [c for c in self.context.place(self.victim)[0] if c in self.clients]
        widest = max(len(group) for group in self.context.groups)
        own = self.row(self.victim).to(torch.int64)
        rest = sum((self.row(c).to(torch.int64) for c in members if c != self.victim), torch.zeros_like(own))
        joint = own * widest + rest + 4 * widest * (widest - len(members))
        return np.asarray(joint.numpy(), np.float64)

    def decoded(self, clients: list[int]) -> Array:
        """The decoded sum of the updates of some clients, not on any grid."""
        return self._decode(torch.stack([self.row(client) for client in clients]), clients)

    def _decode(self, symbols: Tensor, clients: list[int]) -> Array:
        decoded = self.mechanism.decode(symbols, clients, self.context, self.public)
        return np.asarray(decoded.numpy(), np.float64)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _classify(values: Array, edges: Array, out: Integers) -> None:
    """Number of the ascending edges that are <= each value."""
    for i in range(values.size):
        low, high = 0, edges.size
        while low < high:
            middle = (low + high) // 2
            if edges[middle] <= values[i]:
                low = middle + 1
            else:
                high = middle
        out[i] = low


class Bins:
    """Classes of a number: each value its own where there are few, else 32 that are equally likely.

    Args:
        values: A sample; only the edges depend on it.
    """

    def __init__(self, values: Array) -> None:
        levels = np.unique(values)
        if len(levels) > _BINS:
            levels = np.unique(np.quantile(values, np.arange(_BINS) / _BINS))
        self.edges, self.size = levels[1:], len(levels)
        # pairs of outcomes need coarser classes
        self._width = -(-self.size // 8)
        self.coarse_size = -(-self.size // self._width)

    def fine(self, values: Array) -> Integers:
        """Class of each value, 0 to `size` - 1."""
        out = np.empty(len(values), np.int64)
        _classify(values, self.edges, out)
        return out

    def coarse(self, classes: Integers) -> Integers:
        """Neighbouring classes merged, 0 to `coarse_size` - 1, at most 8."""
        return np.asarray(classes // self._width)


class Bench:
    """Plays two neighbours again and again.

    Args:
        case: The mechanism under audit, as it is shipped, and its setting.
        seed: Seed of the audit's own keys.
        segments: Length of each layer, two of them.
        num_clients: Size of the cohort, whatever the case says.
        level: What the pair may depend on: the streams that this adversary holds.
        times: How often both layers are repeated in a round.
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
        self._turns = _TURNS if mechanism.hands_on else 1
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
        """Who may answer."""
        ones = torch.ones(2 * times, dtype=torch.float64)
        self._range = 0.0 * ones, ones
        self.claims = {claim.adversary: claim for claim in mechanism.claims(self.context(0))}
        self.failure = 0.0
        """Chance of rounds that the claims do not speak of. Delta pays for it."""
        if dropout or min_survivors is not None:
            sums = replace(ASSUMED, min_survivors=min_survivors)
            run = Run.ideal(mechanism, self.context(0), 1, sums)
            run = replace(run, sampling=replace(run.sampling, dropout_probability=dropout))
            self.claims = Account(run, _DROPOUTS_DELTA).claims()
            self.failure = _DROPOUTS_DELTA / 2.0 if dropout else 0.0
        # the others: all high, all low, opposite, zero; the pattern changes from coordinate to coordinate
        high = torch.tensor([1.0, -1.0, 1.0, 0.0], dtype=torch.float64).repeat(self.dim)[: self.dim]
        opposite = torch.tensor([1.0, -1.0, -1.0, 0.0], dtype=torch.float64).repeat(self.dim)[: self.dim]
        self.others = torch.stack([opposite if c % 2 else high for c in self.clients])
        self._engines: dict[int, RoundEngine] = {}
        self._lone: RoundEngine | None = None
        self._weights: Array | None = None
        rand = ClientRandomness(self.keys[2], self.clients, CALIBRATION)
        probe = mechanism.encode(self.others.clone(), self.context(CALIBRATION), rand).symbols
        self.num_symbols = int(probe.shape[1])
        self.behind = mechanism.core(self.context(0))[1].dim - self.dim
        self.aligned = self.num_symbols == self.dim + self.behind
        """Is there one symbol for every coordinate? Only then do the layers hold opposite inputs."""
        message = self.private_claim(Adversary.EAVESDROPPER)
        counted = message is not None and message.compositions == self.num_symbols
        self.symbolic = self.aligned or counted
        """Is a symbol the unit of a claim?"""
        self.rotated = self.symbolic and not self.aligned and mechanism.homomorphic and self.follows_streams
        """Is there one symbol for every rotated coordinate, all of which differ alike?"""
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._told: tuple[int, Keys, RoundContext, PublicRandomness] | None = None

    @property
    def draws(self) -> int:
        """Draws of one coordinate that a round gives."""
        return len(self.clients) if self.everybody else 1 if self.concentrated else self.dim

    def context(self, round: int) -> RoundContext:
        """The public part of a round."""
        return RoundContext(round, self.groups, self.segments, *self._range)

    def private_claim(self, adversary: Adversary) -> PrivacyClaim | None:
        """The claim against an adversary, or None if there is no guarantee."""
        claim = self.claims[adversary]
        return None if isinstance(claim.loss, NonPrivate) else claim

    @cached_property
    def follows_streams(self) -> bool:
        """Does the worst pair depend on streams?"""
        return type(self.mechanism).worst_pair is not Mechanism.worst_pair

    def pair(self, victim: int, round: int, keys: Keys) -> tuple[Tensor, Tensor]:
        """The worst neighbours of a round. Streams that the adversary does not hold are decoys."""
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
        labels = np.full(self.dim, turned, np.int64)
        if self.concentrated or self.everybody:
            return labels
        if self.aligned:
            first, second = self.segments[:2]
            labels[np.arange(self.dim) % (first + second) >= first] = 1 - turned
        labels[(high == low).numpy()] = -1
        return labels

    def play(self, round: int, world: int) -> Played:
        """Play one round of one world, in the course of a run. The victim changes with every other round."""
        victim = self.clients[(round // 2) % len(self.clients)]
        if world not in self._engines:
            self._engines[world] = self._engine(self.keys[world], self.segments)
        return self._play(self._engines[world], self.keys[world], victim, round, (round + world) % 2)

    def play_alone(
        self, keys: Keys, victim: int, turned: int, round: int = 0, told: Keys | None = None
    ) -> Played:
        """Play one round with keys of its own.

        Args:
            turned: The input that the first layer holds, 0 or 1.
            told: Keys that say all that the adversary holds, where many rounds have that in common.
        """
        if self._turns > 1 or self.mechanism.separation > 1:  # its noise hangs on the engine's past
            return self._play(self._engine(keys, self.segments), keys, victim, round, turned)
        if self._lone is None:
            self._lone = self._engine(keys, self.segments)
        self._lone.keys = self._lone.client_keys = keys
        self._lone.ledger = Ledger(self._planner.num_clients, repr(self.mechanism))
        return self._play(self._lone, keys, victim, round, turned, told)

    def _engine(self, keys: Keys, segments: tuple[int, ...]) -> RoundEngine:
        start = torch.zeros(sum(segments), dtype=torch.float64)
        engine = RoundEngine(
            self.mechanism, self._planner, keys, start, segments, FixedRange(1.0), diagnostics=False
        )
        engine.tampering = Wire()
        return engine

    def _play(
        self, engine: RoundEngine, keys: Keys, victim: int, round: int, turned: int, told: Keys | None = None
    ) -> Played:
        told = told or keys
        high, low = self.pair(victim, round, told)
        labels = self._labels(turned, high, low)
        round *= self._turns
        engine.round, engine.attempt = round, 0
        engine.weights = torch.zeros(self.dim, dtype=torch.float64)
        plan = engine.start()
        answer = plan.survivors
        updates = self.others[list(answer)].clone()
        if self.everybody:
            updates = torch.stack([self.pair(client, round, told)[turned] for client in answer])
        else:
            updates[answer.index(victim)] = torch.where(torch.from_numpy(labels) == 1, low, high)
        engine.receive(answer, updates)
        record = engine.finish()
        if record.aborted:
            raise ValueError(f"a round of the audit was given up: {record.aborted}")
        wire = engine.tampering
        assert isinstance(wire, Wire)
        released = np.asarray((engine.weights * len(answer)).numpy(), np.float64)
        public = PublicRandomness(keys, round)
        played = Played(
            self.mechanism,
            wire.context,
            answer,
            victim,
            wire.symbols,
            labels,
            public,
            released,
            self.everybody,
            behind=self.behind,
        )
        return played if self._turns == 1 else self._followed(engine, played)

    def _followed(self, engine: RoundEngine, played: Played) -> Played:
        """The round with those that follow it, weighted: the best linear test of an update in it.

        Weights are from the covariance of the noise, measured in blocks of zeros.
        """
        rows = [self._rest(engine) for _ in range(self._turns - 1)]
        if self._weights is None:
            # the noise of a coordinate is that of any other, so many are measured in one block
            zeros = self._engine(SeededKeys(_ZEROS_SEED), (_MEASURED - 1, 1))
            precision = np.linalg.inv(np.cov(np.stack([self._rest(zeros) for _ in range(self._turns)])))
            self._weights = precision[0] / np.linalg.norm(precision[0])
        later: Array = self._weights[1:] @ np.stack(rows)
        return replace(played, own_weight=float(self._weights[0]), later=later)

    def _rest(self, engine: RoundEngine) -> Array:
        """Released sum of a round of zeros."""
        engine.weights = torch.zeros_like(engine.weights)
        answer = engine.start().survivors
        engine.receive(answer, torch.zeros(len(answer), engine.weights.numel(), dtype=torch.float64))
        engine.finish()
        return np.asarray((engine.weights * len(answer)).numpy(), np.float64)

    def calibration(self, at_most: int) -> list[Played]:
        """Some rounds that are not counted. `at_most` so many."""
        victims = self.clients
        few = self.everybody or self.concentrated
        every = 2 if few else 2 * len(victims)  # groups have classes of their own
        rounds = max(2 * (1 + _FEWEST_CALIBRATED // (2 * self.draws)), every)
        first = CALIBRATION - CALIBRATION % every
        return [
            self.play_alone(self.keys[2], victims[(round // 2) % len(victims)], round % 2, round)
            for round in range(first, first + min(rounds, at_most))
        ]

    @staticmethod
    def packed(played: Played) -> bytes:
        """The victim's message as it goes on the wire."""
        return played.mechanism.code(played.context).pack(played.row(played.victim))
