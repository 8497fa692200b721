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
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.audit.audit_case import AuditCase
from lightning_fedq.audit.bins import Integers
from lightning_fedq.audit.fixed_parts import FixedPlanner, HeldKeys, Wire
from lightning_fedq.audit.played import Played
from lightning_fedq.audit.views import Array
from lightning_fedq.keys.randomness import ClientRandomness, Keys, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms.interface import (
    Adversary,
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

CALIBRATION = 1 << 41
"""Number of the first round that only chooses the edges of bins and is not counted."""
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
UNIT_RANGE = FixedRange(1.0)


class Bench:
    """Test bench that runs rounds of two neighbouring cohorts.

    Args:
        case: Mechanism under audit, as it is shipped, and its setting.
        seed: Seed of the audit's own keys.
        segments: Lengths of the two layers.
        num_clients: Size of the cohort. It overrides the size of the case.
        level: Adversary whose streams the worst pair may depend on.
        times: Number of repetitions of both layers in a round.
        ranges: Range of every round.
    """

    def __init__(
        self,
        case: AuditCase,
        seed: int,
        segments: tuple[int, int],
        num_clients: int = 4,
        level: Adversary = Adversary.OUTSIDER,
        times: int = 1,
        ranges: FixedRange = UNIT_RANGE,
    ) -> None:
        self.mechanism, self._case = case.mechanism, case
        self.concentrated, self.everybody = case.concentrated, case.everybody
        self.segments, self.times, self.dim = segments * times, times, sum(segments) * times
        self._ranges, self._level, self.seed = ranges, level, seed
        self.keys: list[Keys] = [SeededKeys(3 * seed + world) for world in range(3)]
        self._decoy = SeededKeys(3 * seed + (1 << 50))
        self._turns = _TURNS if self.mechanism.reuses_noise else 1
        num_dropped = case.num_dropped
        if case.min_survivors is not None:
            num_dropped = num_clients - case.min_survivors
        self._planner = FixedPlanner(
            num_clients * self._turns,
            0,
            Cyclic(num_clients) if self._turns > 1 else FixedSize(num_clients),
            case.dropout_probability,
            num_dropped=num_dropped,
            turns=self._turns,
        )
        self.groups = self._planner.plan(0, self.mechanism).groups
        self.clients = tuple(range(num_clients - num_dropped))
        """Clients that may answer."""
        # engines of the worlds, of stages with given updates, and of single rounds
        self._engines: dict[int, RoundEngine] = {}
        self._stages: dict[int, tuple[Keys, RoundEngine]] = {}
        self._lone: RoundEngine | None = None
        # the pairs of the last round that was asked for, and what the adversary knows of it
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._told: tuple[int, Keys, RoundContext, PublicRandomness] | None = None

    @cached_property
    def claims(self) -> dict[Adversary, PrivacyClaim]:
        """Claims under test: those of the mechanism, or of the privacy report if clients are missing."""
        case = self._case
        if not case.dropout_probability and case.min_survivors is None:
            return {claim.adversary: claim for claim in self.mechanism.claims(self.context(0))}
        sums = replace(ASSUMED, min_survivors=case.min_survivors)
        run = Run.ideal(self.mechanism, self.context(0), 1, sums)
        run = replace(run, sampling=replace(run.sampling, dropout_probability=case.dropout_probability))
        return Account(run, _DROPOUTS_DELTA).claims()

    @property
    def failure(self) -> float:
        """Probability of rounds that the claims do not cover. It is added to delta."""
        return _DROPOUTS_DELTA / 2.0 if self._case.dropout_probability else 0.0

    @cached_property
    def others(self) -> Tensor:
        """Updates of the other clients, `(clients, dim)`, over which the victim's input is written.

        They are all high, all low, opposite and zero, in turn over the coordinates, so that each coordinate
        is tested with different sums around the victim's input.
        """
        even = torch.tensor([1.0, -1.0, 1.0, 0.0], dtype=torch.float64).repeat(self.dim)[: self.dim]
        odd = torch.tensor([1.0, -1.0, -1.0, 0.0], dtype=torch.float64).repeat(self.dim)[: self.dim]
        return torch.stack([odd if client % 2 else even for client in self.clients])

    @cached_property
    def num_symbols(self) -> int:
        """Number of symbols of a real message."""
        rand = ClientRandomness(self.keys[2], self.clients, CALIBRATION)
        message = self.mechanism.encode(self.others.clone(), self.context(CALIBRATION), rand)
        return int(message.symbols.shape[1])

    @cached_property
    def behind(self) -> int:
        """Number of symbols that follow those of the coordinates in a message, see `Mechanism.core`."""
        return self.mechanism.core(self.context(0))[1].dim - self.dim

    @property
    def aligned(self) -> bool:
        """Whether there is one symbol per coordinate. Only then do the layers hold opposite inputs."""
        return self.num_symbols == self.dim + self.behind

    @property
    def symbolic(self) -> bool:
        """Whether the mechanism's claim is about one symbol."""
        message = self.private_claim(Adversary.EAVESDROPPER)
        return self.aligned or (message is not None and message.compositions == self.num_symbols)

    @property
    def rotated(self) -> bool:
        """Whether there is one symbol per rotated coordinate, each with the same difference of inputs."""
        one_each = self.symbolic and not self.aligned
        return one_each and self.mechanism.homomorphic and self.follows_streams

    @property
    def draws(self) -> int:
        """Number of draws of one coordinate in a round."""
        return len(self.clients) if self.everybody else 1 if self.concentrated else self.dim

    def context(self, round: int) -> RoundContext:
        """Return the public part of a round."""
        ones = torch.ones(2 * self.times, dtype=torch.float64)
        center, radius = self._ranges.center * ones, self._ranges.radius * ones
        return RoundContext(round, self.groups, self.segments, center, radius)

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
        if self._case.to_center:
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
        if self._case.to_center:
            low = torch.full_like(low, self._ranges.center)
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
            self.mechanism, self._planner, keys, start, segments, self._ranges, diagnostics=False
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

    def play_updates(self, stage: int, round: int, victim: int, updates: Tensor, attempt: int = 0) -> Played:
        """Run one round with given updates.

        Args:
            stage: Number of the stage. Each stage has its own keys, and uses a round once.
            round: Number of the round.
            victim: Client whose message the views of sums and groups are about.
            updates: `(len(clients), dim)` updates of all clients, in units of the update.
            attempt: Number of earlier attempts at the round.
        """
        if stage not in self._stages:
            own = SeededKeys(3 * self.seed + (1 << 49) + stage)
            self._stages[stage] = own, self._engine(own, self.segments)
        keys, engine = self._stages[stage]
        # the same public range in every round, so that a range that follows the updates tells nothing of them
        engine.ranges = engine.range_rule.first(engine.weights, self.segments)
        labels = np.zeros(self.dim, np.int64)
        return self._round(engine, keys, victim, round, lambda survivors: updates.clone(), labels, attempt)

    def _round(
        self,
        engine: RoundEngine,
        keys: Keys,
        victim: int,
        round: int,
        updates: Callable[[tuple[int, ...]], Tensor],
        labels: Integers,
        attempt: int = 0,
    ) -> Played:
        """Run one round of an engine with the updates of the clients that answer.

        Raises:
            ValueError: If the engine aborts the round.
        """
        round *= self._turns
        engine.round, engine.attempt = round, attempt
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
            PublicRandomness(keys, round, attempt),
            np.asarray((engine.weights * len(survivors)).numpy(), np.float64),
            self.everybody,
            behind=self.behind,
        )
        if self._turns == 1:
            return played
        # the rounds after it cancel part of its noise
        later_sums = np.stack([self._play_zeros(engine) for _ in range(self._turns - 1)])
        own, *others = self._weights
        return replace(played, own_weight=float(own), later=np.array(others) @ later_sums)

    @cached_property
    def _weights(self) -> Array:
        """Weights of the rounds of a block in the best linear test for an update in the first round.

        They are the first row of the inverse covariance of the noise over the rounds, which is measured in a
        block with zero updates. All coordinates have the same noise distribution, so one block measures many.
        """
        engine = self._engine(SeededKeys(_ZEROS_SEED), (_MEASURED - 1, 1))
        noise = np.stack([self._play_zeros(engine) for _ in range(self._turns)])
        first = np.linalg.inv(np.cov(noise))[0]
        return np.asarray(first / np.linalg.norm(first))

    def _play_zeros(self, engine: RoundEngine) -> Array:
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
