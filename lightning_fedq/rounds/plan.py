"""Who takes part in a round: a pure function of (seed, round).

A loader, a callback and a resumed run agree on it without talking. Cohorts follow from public randomness,
never from data. Secret cohorts follow from (key, round, attempt) instead, the key being one that the process
draws from the operating system and that is never written anywhere.
"""

import hashlib
import json
import math
import operator
import os
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, get_args

import numpy as np

from lightning_fedq.keys.randomness import (
    OneOwner,
    PublicRandomness,
    SeededKeys,
    Stream,
    hkdf_expand,
    pack_fields,
)
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.privacy.run import Available, OwnDraws, Participation, Sampling
from lightning_fedq.privacy.sampled import why_no_own_draws
from lightning_fedq.rounds.deadline import Deadline

Cohorts = Literal["known", "secret"]
"""May anybody know who takes part in which round, or nobody but the server?"""


class CohortKey(OneOwner):
    """Key of secret cohorts, 32 bytes of the operating system. It can't be copied, pickled or printed."""

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def draw(self, population: int, size: int, round: int, attempt: int) -> list[int]:
        """Draw a cohort, every sequence equally likely. Each attempt has a draw of its own.

        Args:
            population: Clients, 0 to population - 1.
            size: Clients to draw.
            attempt: Number of earlier attempts at this round.
        """
        return self._stream("cohort", round, attempt).choice(population, size)

    def tossed(self, population: int, size: int, round: int, attempt: int) -> list[int]:
        """The clients of whom each takes part by a coin of its own, with chance size / population.

        Args:
            population: Clients, 0 to population - 1.
            size: Their expected number.
            attempt: Number of earlier attempts at this round; each has coins of its own.
        """
        drawn = self._stream("cohort of coins", round, attempt).uniform_below(population, population)
        members: list[int] = np.flatnonzero(drawn < size).tolist()  # chance size / population exactly
        return members

    def allocated(self, population: int, length: int, round: int) -> list[int]:
        """The clients of whom each has drawn this round of its block, uniformly and for itself.

        Args:
            population: Clients, 0 to population - 1.
            length: Rounds of a block.
        """
        block, place = divmod(round, length)
        drawn = self._stream("cohorts of a block", block).uniform_below(length, population)
        members: list[int] = np.flatnonzero(drawn == place).tolist()
        return members

    def _stream(self, purpose: str, *place: int) -> Stream:
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
        rand = _known_to_all(self.seed, self.round)
        stream = rand.public(purpose) if client is None else rand.shared_with_server(client, purpose)
        return int(stream.words64(1)[0]) >> 1


@lru_cache(16)
def _known_to_all(seed: int, round: int) -> PublicRandomness:
    return PublicRandomness(SeededKeys(seed), round)


@dataclass(frozen=True)
class RoundPlanner:
    """Planner that draws the plan of any round from (seed, round).

    Args:
        num_clients: Size of the population, >= 1.
        seed: Seed of cohorts, groups, dropouts and data order, >= 0.
        clients_per_round: Cohort size, drawn without replacement; None is everybody. Where every client draws
            for itself, the expected size.
        dropout_probability: Chance in [0, 1) that a client of the cohort does not answer.
        participation: "random" draws every cohort anew; "once" deals the clients out into disjoint cohorts,
            so that nobody is asked twice; "cyclic" has these cohorts take turns, in one order for ever. By
            secret draws for itself, every client takes part in a round with chance clients_per_round /
            num_clients ("poisson"), or in one of each block of num_clients / clients_per_round ("allocated").
        real_clients: Are these no clients of a simulation? Then any number of them may be silent.
        cohort_key: Draws secret cohorts, which the seed says nothing about; None has known ones.
        deadline: Time limit of a round; None waits for everybody.
        available: Clients from whom the cohort of a round is drawn, by its number; None draws from all.

    Raises:
        ValueError: If a setting is out of its range.
    """

    num_clients: int
    seed: int
    clients_per_round: int | None = None
    dropout_probability: float = 0.0
    participation: Participation = "random"
    real_clients: bool = False
    cohort_key: CohortKey | None = field(default=None, repr=False)
    deadline: Deadline | None = None
    available: Available | None = None
    _named: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.available is not None and (self.participation != "random" or self.cohort_key is not None):
            what = "secret cohorts are" if self.cohort_key else f"participation={self.participation!r} is"
            raise ValueError(
                f"available names from whom known cohorts are drawn, and {what} of all clients; use "
                "participation='random' and cohorts='known', or leave available out"
            )
        if self.num_clients < 1:
            raise ValueError(f"num_clients must be >= 1, got {self.num_clients}")
        if self.clients_per_round is not None and not 1 <= self.clients_per_round <= self.num_clients:
            raise ValueError(
                f"clients_per_round must be in [1, num_clients = {self.num_clients}], "
                f"got {self.clients_per_round}"
            )
        if not 0.0 <= self.dropout_probability < 1.0:
            raise ValueError(f"dropout_probability must be in [0, 1), got {self.dropout_probability}")
        if self.deadline is not None:
            self.deadline.check(self.num_clients)
            if self.dropout_probability > 0.0:
                raise ValueError(
                    f"dropout_probability={self.dropout_probability} and a deadline both say who does not "
                    "answer; leave one out"
                )
        if self.participation not in get_args(Participation):
            known = ", ".join(map(repr, get_args(Participation)))
            raise ValueError(f"participation must be one of {known}, got {self.participation!r}")
        if self.own_draws:
            self._check_own_draws()
        is_dealt = self.participation in ("once", "cyclic")
        if self.cohort_key is not None and (is_dealt or self.real_clients):
            who = "real clients" if self.real_clients else f"participation={self.participation!r}"
            raise ValueError(
                f"secret cohorts are drawn anew every round from the clients of a simulation, got {who}; use "
                "participation='random', or cohorts='known'"
            )

    def _check_own_draws(self) -> None:
        if self.cohort_key is None:
            raise ValueError(
                f"participation={self.participation!r} has every client draw for itself, which is worth "
                "something while nobody learns who did; set cohorts='secret', or participation='random'"
            )
        size, clients = self.cohort_size, self.num_clients
        if self.participation == "allocated" and clients % size:
            fits = next(size for size in range(size, 0, -1) if clients % size == 0)
            raise ValueError(
                "participation='allocated' gives every client one round of a block of num_clients / "
                f"clients_per_round, a whole number, got {clients} / {size}; use clients_per_round={fits}, "
                "or participation='poisson'"
            )

    @property
    def own_draws(self) -> bool:
        """Does every client draw for itself, so that nobody learns how many take part?"""
        return self.participation in get_args(OwnDraws)

    @property
    def divisor(self) -> int | None:
        """Divisor of the mean, where it does not follow who answers. None where it does."""
        return self.cohort_size if self.own_draws else None

    @property
    def may_be_silent(self) -> bool:
        """May any number of clients be silent, whoever they are?"""
        return self.real_clients or self.deadline is not None

    @property
    def cohort_size(self) -> int:
        """Clients per round."""
        return self.clients_per_round or self.num_clients

    @property
    def num_cohorts(self) -> int | None:
        """Disjoint cohorts that there are. None where every round draws its own."""
        is_dealt = self.participation in ("once", "cyclic")
        return self.num_clients // self.cohort_size if is_dealt else None

    @property
    def num_rounds(self) -> int | None:
        """Rounds after which every disjoint cohort has had its only one. None where there is no end."""
        return self.num_cohorts if self.participation == "once" else None

    @property
    def separation(self) -> int:
        """Fewest rounds from one of a client to its next, within one run of this plan. >= 1."""
        return self.num_cohorts or 1

    def check_mechanism(self, mechanism: Mechanism) -> None:
        """Refuse a mechanism whose noise counts on other rounds of a client, or other cohorts, than these.

        Raises:
            ValueError: With the cure.
        """
        if why := why_no_own_draws(mechanism, self.participation):
            raise ValueError(f"secret cohorts need {why}")
        if mechanism.separation > self.separation:
            most = self.num_clients // mechanism.separation
            cure = f"participation='cyclic' and clients_per_round={most} or fewer, or " if most else ""
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
        if self.num_cohorts is None:
            raise ValueError(
                "noise is handed on between cohorts that are dealt out once, and these are drawn anew every "
                "round; use participation='cyclic'"
            )
        if round + 1 == self.num_rounds:
            return ()
        return tuple(zip(self.cohort(round), self.cohort(round + 1), strict=True))

    def most_rounds(self, rounds: int) -> int | None:
        """In how many of the first `rounds` rounds a client takes part at most. None: a lottery decides."""
        return self.sampling("").most_rounds(rounds, self.cohort_size)

    def sampling(self, broken: str = "") -> Sampling:
        """Participation of clients, for a `Run`, which has not kept this condition of secret cohorts."""
        return Sampling(
            num_clients=self.num_clients,
            participation=self.participation,
            secret=self.cohort_key is not None,
            broken=broken if self.cohort_key is not None else "",
            dropout_probability=self.dropout_probability,
            real_clients=self.real_clients,
            may_be_silent=self.may_be_silent,
            available=None if self.available is None else self.named,
        )

    def named(self, round: int) -> list[int]:
        """Clients from whom the cohort of a round is drawn, in order. A rule is asked for a round but once.

        Raises:
            TypeError: If a rule returns no numbers.
            ValueError: If it names too few, or others than there are, or others when it is asked again.
        """
        if self.available is None:
            return list(range(self.num_clients))
        if round in self._named:
            return self._named[round]
        size, clients = self.cohort_size, self.num_clients
        try:
            found, again = (sorted(map(operator.index, self.available(round))) for _ in range(2))
        except TypeError as error:
            raise TypeError(
                f"available must return the numbers of clients, in round {round}: {error}"
            ) from error
        if len(set(found)) != len(found) or not set(found) <= set(range(clients)) or len(found) < size:
            raise ValueError(
                f"available must name at least clients_per_round = {size} of the clients 0 to {clients - 1}, "
                f"each once, got {len(found)} for round {round}: {found[:10]}; take a smaller cohort"
            )
        if found != again:
            raise ValueError(
                f"available named other clients for round {round} when it was asked again; let it follow "
                "from the number of the round alone, so that a resumed run and other processes agree"
            )
        return self._named.setdefault(round, found)

    def said(self, rounds: int) -> str:
        """Digest of what a rule has said of the first rounds. "" where there is none."""
        if self.available is None:
            return ""
        names = json.dumps([self.named(round) for round in range(rounds)])
        return hashlib.sha256(names.encode()).hexdigest()

    def cohort(self, round: int, attempt: int = 0) -> list[int]:
        """The clients of one round, in the order in which they fall into groups.

        Args:
            attempt: Number of earlier attempts; known cohorts are the same in each, and so is what was drawn
                for a whole block.

        Raises:
            ValueError: If every cohort has had its round.
        """
        size, last = self.cohort_size, self.num_cohorts
        if self.cohort_key is not None and self.participation == "poisson":
            return self.cohort_key.tossed(self.num_clients, size, round, attempt)
        if self.cohort_key is not None and self.participation == "allocated":
            return self.cohort_key.allocated(self.num_clients, self.num_clients // size, round)
        if self.cohort_key is not None:
            return self.cohort_key.draw(self.num_clients, size, round, attempt)
        if last is None:
            draw = PublicRandomness(SeededKeys(self.seed), round).public("cohort").choice
            if self.available is None:
                return draw(self.num_clients, size)
            named = self.named(round)
            return [named[place] for place in draw(len(named), size)]
        if round >= last and self.participation == "once":
            raise ValueError(
                f"{self.num_clients} clients that take part once make {last} cohorts of {size}, and round "
                f"{round + 1} needs one more; take smaller cohorts, participation='cyclic' or 'random'"
            )
        # streams of round 0: one deal for all rounds
        dealt = PublicRandomness(SeededKeys(self.seed), 0).public("disjoint cohorts")
        turn = round % last
        return dealt.permutation(self.num_clients)[turn * size : (turn + 1) * size]

    def plan(self, round: int, mechanism: Mechanism, attempt: int = 0) -> RoundPlan:
        """Return the plan of one attempt at a round.

        Raises:
            ValueError: If the mechanism can't serve a cohort of this size, or every cohort has had its round.
        """
        sizes = None if self.own_draws else tuple(mechanism.group_sizes(self.cohort_size))
        # known cohorts: the same in each attempt
        return _plan(self, round, sizes, 0 if self.cohort_key is None else attempt)

    def expected(self, round: int, mechanism: Mechanism, attempt: int = 0) -> RoundPlan:
        """A round as accounts and trials see it: its plan, unless nobody may learn how many take part in it.

        Then it is of as many clients as are expected, in turn.

        Raises:
            ValueError: If the mechanism can't serve a cohort of this size, or every cohort has had its round.
        """
        if not self.own_draws:
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
