"""The plan of a round: a pure function of (seed, round), by the law of cohorts (`privacy.cohorts`).

A loader, a callback and a resumed run agree on it without talking. Groups, dropouts and known cohorts follow
from public randomness, never from data; secret cohorts from a key that the process draws from the operating
system and that is never written anywhere.
"""

import math
import os
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from lightning_fedq.keys.randomness import (
    OneOwner,
    PublicRandomness,
    SeededKeys,
    Stream,
    hkdf_expand,
    pack_fields,
)
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.privacy.cohorts import CohortLaw, Everybody
from lightning_fedq.privacy.run import Sampling
from lightning_fedq.rounds.deadline import Deadline


class CohortKey(OneOwner):
    """Key of secret cohorts, 32 bytes of the operating system. It can't be copied, pickled or printed."""

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def stream(self, purpose: str, *place: int) -> Stream:
        """Randomness of a purpose at a place, such as a round and an attempt."""
        return Stream(hkdf_expand(self._key, pack_fields(purpose, *place)))


@dataclass(frozen=True)
class RoundPlan:
    """Plan of one round: who takes part, in which groups, and who drops out.

    Args:
        round: Round number, from 0.
        groups: The cohort in groups of the mechanism's sizes, in random order.
        dropped: Clients of the cohort that will not answer.
        seed: Seed of the planner that made it.
    """

    round: int
    groups: tuple[tuple[int, ...], ...]
    dropped: frozenset[int]
    seed: int

    @cached_property
    def cohort(self) -> tuple[int, ...]:
        """All clients of the round, group by group."""
        return tuple(client for group in self.groups for client in group)

    @cached_property
    def survivors(self) -> tuple[int, ...]:
        """The clients that will answer, group by group: the order in which they train.

        A stack then holds whole groups, and draws what a group shares once.
        """
        return tuple(client for client in self.cohort if client not in self.dropped)

    def stream_seed(self, purpose: str, client: int | None = None) -> int:
        """A 63-bit seed for simulation randomness (data order, dropout masks), never for a coin."""
        rand = _public_generator(self.seed, self.round)
        stream = rand.public(purpose) if client is None else rand.shared_with_server(client, purpose)
        return int(stream.words64(1)[0]) >> 1


@lru_cache(16)
def _public_generator(seed: int, round: int) -> PublicRandomness:
    return PublicRandomness(SeededKeys(seed), round)


@dataclass(frozen=True)
class RoundPlanner:
    """Planner that draws the plan of any round from (seed, round).

    Args:
        num_clients: Size of the population, >= 1.
        seed: Seed of known cohorts, groups, dropouts and data order, >= 0.
        law: Law of cohorts.
        dropout_probability: Chance in [0, 1) that a client of the cohort does not answer.
        real_clients: Are these no clients of a simulation? Then any number of them may be silent.
        deadline: Time limit of a round; None waits for everybody.
        key: Draws secret cohorts, which the seed says nothing about; None takes a new one where they are.

    Raises:
        ValueError: If a setting is out of its range.
    """

    num_clients: int
    seed: int
    law: CohortLaw = Everybody()  # noqa: RUF009 (frozen)
    dropout_probability: float = 0.0
    real_clients: bool = False
    deadline: Deadline | None = None
    key: CohortKey | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.sampling()  # refuses what is out of its range
        if self.deadline is not None:
            self.deadline.check(self.num_clients)
            if self.dropout_probability > 0.0:
                raise ValueError(
                    f"dropout_probability={self.dropout_probability} and a deadline both say who does not "
                    "answer; leave one out"
                )
        if self.law.secret and self.real_clients:
            raise ValueError(
                f"secret cohorts are of the clients of a simulation, got real clients and {self.law}; use "
                "secret=False"
            )
        object.__setattr__(self, "key", (self.key or CohortKey()) if self.law.secret else None)

    @property
    def divisor(self) -> int | None:
        """Divisor of the mean, where it does not follow who answers. None where it does."""
        return self.cohort_size if self.law.own_draws else None

    @property
    def may_be_silent(self) -> bool:
        """May any number of clients be silent, whoever they are?"""
        return self.real_clients or self.deadline is not None

    @property
    def cohort_size(self) -> int:
        """Clients per round."""
        return self.law.cohort_size(self.num_clients)

    @property
    def num_rounds(self) -> int | None:
        """Rounds after which there is no cohort left. None where there is no end."""
        return self.law.num_rounds(self.num_clients)

    @property
    def separation(self) -> int:
        """Fewest rounds from one of a client to its next, within one run of this plan. >= 1."""
        return self.law.num_cohorts(self.num_clients) or 1

    def check_mechanism(self, mechanism: Mechanism) -> None:
        """Refuse a mechanism whose noise counts on other rounds of a client, or other cohorts, than these.

        Raises:
            ValueError: With the cure.
        """
        if why := self.law.check_mechanism(mechanism):
            raise ValueError(f"secret cohorts need {why}")
        if mechanism.separation > self.separation:
            most = self.num_clients // mechanism.separation
            cure = f"Cyclic({most}) or fewer, or " if most else ""
            other = f"a band of {self.separation}"
            if mechanism.hands_on:
                other = f"num_cohorts={self.separation}"
                if self.separation < 2:
                    other = "DistributedDiscreteGaussian, whose noise is independent"
            raise ValueError(
                f"{mechanism} counts on {mechanism.separation} rounds from one of a client to its next, here "
                f"it may be {self.separation}; use {cure}{other}"
            )

    def successors(self, round: int) -> tuple[tuple[int, int], ...]:
        """Each client of a round and the one at its place in the next. Empty after the last disjoint cohort.

        Raises:
            ValueError: If cohorts are drawn anew, so that one client may be in both.
        """
        if self.law.num_cohorts(self.num_clients) is None:
            raise ValueError(
                f"noise is handed on between cohorts that are dealt out once, got {self.law}; use Cyclic(...)"
            )
        if round + 1 == self.num_rounds:
            return ()
        return tuple(zip(self.cohort(round), self.cohort(round + 1), strict=True))

    def digest(self, rounds: int) -> str:
        """Digest of what a user's rule has said of the first rounds. "" without a rule."""
        return self.law.digest(rounds, self.num_clients)

    def sampling(self, broken: str = "") -> Sampling:
        """Participation of clients, for a `Run`, which has not kept this condition of secret cohorts."""
        return Sampling(
            num_clients=self.num_clients,
            law=self.law,
            broken=broken if self.law.secret else "",
            dropout_probability=self.dropout_probability,
            real_clients=self.real_clients,
            may_be_silent=self.may_be_silent,
        )

    def cohort(self, round: int, attempt: int = 0) -> list[int]:
        """The clients of one round, in the order in which they fall into groups.

        Args:
            attempt: Number of earlier attempts; known cohorts are the same in each, and so is what was drawn
                for a whole block.

        Raises:
            ValueError: If there is no cohort for this round.
        """
        return self.law.draw_cohort(self.num_clients, round, attempt, self._stream)

    def _stream(self, purpose: str, round: int, attempt: int = 0) -> Stream:
        if self.key is not None:
            return self.key.stream(purpose, round, attempt)
        return PublicRandomness(SeededKeys(self.seed), round).public(purpose)

    def plan(self, round: int, mechanism: Mechanism, attempt: int = 0) -> RoundPlan:
        """Return the plan of one attempt at a round.

        Raises:
            ValueError: If the mechanism can't serve a cohort of this size, or every cohort has had its round.
        """
        sizes = None if self.law.own_draws else tuple(mechanism.group_sizes(self.cohort_size))
        # known cohorts: the same in each attempt
        return _plan(self, round, sizes, attempt if self.law.secret else 0)

    def expected(self, round: int, mechanism: Mechanism, attempt: int = 0) -> RoundPlan:
        """A round as accounts and trials see it: its plan, unless nobody may learn how many take part in it.

        Then it is of as many clients as are expected, in turn.

        Raises:
            ValueError: If the mechanism can't serve a cohort of this size, or every cohort has had its round.
        """
        if not self.law.own_draws:
            return self.plan(round, mechanism, attempt)
        groups, start = [], round * self.cohort_size
        for size in mechanism.group_sizes(self.cohort_size):
            groups.append(tuple(client % self.num_clients for client in range(start, start + size)))
            start += size
        return RoundPlan(round, tuple(groups), frozenset(), self.seed)


@lru_cache(maxsize=1)  # loader, callback and server ask for the same one
def _plan(planner: RoundPlanner, round: int, group_sizes: tuple[int, ...] | None, attempt: int) -> RoundPlan:
    """A plan, in groups of one where no sizes are given."""
    rand, order = PublicRandomness(SeededKeys(planner.seed), round), planner.cohort(round, attempt)
    start, groups = 0, []
    for size in (1,) * len(order) if group_sizes is None else group_sizes:
        groups.append(tuple(order[start : start + size]))
        start += size
    if start != len(order):
        raise ValueError(f"group_sizes sums to {start}, the cohort has {len(order)} clients")
    words = rand.public("dropouts").words(len(order))
    threshold = round_half_up(planner.dropout_probability * 2**32)
    dropped = frozenset(c for c, word in zip(order, words.tolist(), strict=True) if word < threshold)
    if planner.deadline is not None and not planner.real_clients:
        dropped |= planner.deadline.late(order, rand.public("late"))
    return RoundPlan(round, tuple(groups), dropped, planner.seed)


def round_half_up(value: float) -> int:
    """Nearest integer, halves up."""
    return math.floor(value + 0.5)
