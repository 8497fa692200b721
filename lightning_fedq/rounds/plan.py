"""Plan of a round: a pure function of (seed, round) that follows the law of cohorts (`privacy.cohorts`).

Because the plan is a pure function, a loader, a callback and a resumed run compute the same one without
communication. Groups, dropouts and known cohorts are drawn from public randomness, never from data. Secret
cohorts are drawn from a key that the process takes from the operating system and never stores.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from numbers import Real
from statistics import NormalDist

import torch

from lightning_fedq.keys.randomness import (
    OneOwner,
    PublicRandomness,
    SeededKeys,
    Stream,
    hkdf_expand,
    pack_fields,
)
from lightning_fedq.mechanisms.interface import Mechanism, RoundContext, group_clients, split_groups
from lightning_fedq.privacy.cohorts import CohortLaw, Everybody
from lightning_fedq.privacy.recorded_laws import is_user_defined
from lightning_fedq.privacy.run import Sampling


@dataclass(frozen=True)
class Deadline:
    """Time limit of every round.

    With real clients, it is the time in which a client must answer. A simulation does not wait: a client's
    simulated time is its `durations` entry times exp(spread z). Here z is standard normal, drawn for every
    round from public randomness. A client whose time exceeds `seconds` is dropped as if it had not answered.

    With a deadline, privacy claims about sums assume only the smallest number of answers that opens a sum, as
    with real clients. The claims therefore hold for any cause of delay. The server sees which clients were
    late, and no claim covers this fact.

    Args:
        seconds: Time limit of a round in seconds, > 0.
        durations: Seconds that a client needs for a round, > 0: one number for all clients, or one number per
            client. None is for real clients only.
        spread: Standard deviation of the logarithm of a client's duration over rounds, >= 0.

    Raises:
        ValueError: If a number is out of its range.
        TypeError: If `durations` contains a value that is not a number.

    Examples:
        >>> Deadline(60.0, durations=[20.0, 20.0, 90.0], spread=0.3).chance(2) > 0.9
        True
    """

    seconds: float
    durations: float | Sequence[float] | None = None
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, Real) or not 0.0 < self.seconds < math.inf:
            raise ValueError(f"Deadline(seconds=...) must be > 0 and finite, got {self.seconds!r}")
        if not isinstance(self.spread, Real) or not 0.0 <= self.spread < math.inf:
            raise ValueError(f"Deadline(spread=...) must be >= 0 and finite, got {self.spread!r}")
        if self.durations is None:
            return
        scalar = isinstance(self.durations, Real)
        values = [self.durations] if scalar else list(self.durations)  # type: ignore[arg-type, list-item]
        if not all(isinstance(value, Real) for value in values):
            raise TypeError(
                f"Deadline(durations=...) must be one number, or one per client, got {self.durations!r}"
            )
        if not values or not all(0.0 < float(value) < math.inf for value in values):  # type: ignore[arg-type]
            raise ValueError(f"Deadline(durations=...) must be > 0 and finite, got {self.durations!r}")
        if not scalar:
            object.__setattr__(self, "durations", tuple(values))

    def check(self, num_clients: int) -> None:
        """Check that there is one duration per client.

        Raises:
            ValueError: If `durations` has entries for another number of clients.
        """
        if isinstance(self.durations, tuple) and len(self.durations) != num_clients:
            raise ValueError(
                f"Deadline(durations=...) has {len(self.durations)} entries for {num_clients} clients. "
                "Give one entry per client, or one number for all."
            )

    def chance(self, client: int) -> float:
        """Return the probability in [0, 1] that a simulated client is late in a round."""
        return 0.0 if self.durations is None else 1.0 - self._in_time(client)

    def _in_time(self, client: int) -> float:
        """Return the probability that a simulated client answers within the limit."""
        durations = self.durations
        typical = float(durations[client] if isinstance(durations, tuple) else durations)  # type: ignore[arg-type]
        margin = math.log(self.seconds / typical)
        if self.spread == 0.0:
            return 1.0 if margin >= 0.0 else 0.0
        return NormalDist().cdf(margin / self.spread)

    def late(self, clients: Sequence[int], stream: Stream) -> frozenset[int]:
        """Draw the clients of a cohort that are late. The set is empty for real clients.

        Args:
            clients: The cohort, in its order.
            stream: Public randomness of the round.
        """
        if self.durations is None:
            return frozenset()
        draws = stream.words(len(clients)).tolist()
        pairs = zip(clients, draws, strict=True)
        return frozenset(client for client, draw in pairs if (draw + 0.5) / 2**32 > self._in_time(client))


class CohortKey(OneOwner):
    """Key that draws secret cohorts: 32 random bytes. It can't be copied, pickled or printed."""

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def stream(self, purpose: str, *place: int) -> Stream:
        """Return the random stream for a purpose at a place, such as (round, attempt)."""
        return Stream(hkdf_expand(self._key, pack_fields(purpose, *place)))


@dataclass(frozen=True)
class RoundPlan:
    """Plan of one round: its cohort in groups, and the clients that drop out.

    Args:
        round: Round number, from 0.
        groups: Clients of the cohort in random order, in groups of the mechanism's sizes.
        dropped: Clients of the cohort that will not answer.
        seed: Seed of the planner.
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
        """Clients that will answer, group by group, in training order.

        With this order a stack contains whole groups, so it draws the randomness that a group shares only
        once.
        """
        return tuple(client for client in self.cohort if client not in self.dropped)

    def stream_seed(self, purpose: str, client: int | None = None) -> int:
        """Return a 63-bit seed for simulation randomness (data order, dropout masks), never for privacy."""
        rand = _public_generator(self.seed, self.round)
        stream = rand.public(purpose) if client is None else rand.shared_with_server(client, purpose)
        return int(stream.words64(1)[0]) >> 1


@lru_cache(16)
def _public_generator(seed: int, round: int) -> PublicRandomness:
    """Return the public randomness of a round, cached because every client asks for it."""
    return PublicRandomness(SeededKeys(seed), round)


@dataclass(frozen=True)
class RoundPlanner:
    """Planner that draws the plan of any round from (seed, round).

    Args:
        num_clients: Number of clients in the federation, >= 1.
        seed: Seed of known cohorts, groups, dropouts and data order, >= 0.
        law: Law of cohorts, such as `FixedSize` or `Cyclic`.
        dropout_probability: Probability in [0, 1) that a client of the cohort does not answer.
        real_clients: Whether clients are real, not simulated. Any number of real clients may not answer.
        deadline: Time limit of a round. None waits for all clients.
        key: Key that draws secret cohorts, independent of the seed. None draws a new key if the law is
            secret.

    Raises:
        ValueError: If a setting is out of its range, or two settings exclude each other.
    """

    num_clients: int
    seed: int
    law: CohortLaw = Everybody()  # noqa: RUF009 (frozen)
    dropout_probability: float = 0.0
    real_clients: bool = False
    deadline: Deadline | None = None
    key: CohortKey | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.sampling()  # its constructor checks the ranges of these settings
        if self.deadline is not None:
            self.deadline.check(self.num_clients)
            if self.dropout_probability > 0.0:
                raise ValueError(
                    f"dropout_probability={self.dropout_probability} and a deadline both choose dropouts. "
                    "Leave one out."
                )
        if self.law.secret and self.real_clients:
            raise ValueError(
                f"Secret cohorts need simulated clients, got real clients and {self.law}. Use secret=False."
            )
        object.__setattr__(self, "key", (self.key or CohortKey()) if self.law.secret else None)

    @property
    def divisor(self) -> int | None:
        """Fixed divisor of the mean, if the number of answers is secret. None: the number of answers."""
        return self.cohort_size if self.law.own_draws else None

    @property
    def may_be_silent(self) -> bool:
        """Whether any subset of the cohort may not answer."""
        return self.real_clients or self.deadline is not None

    @property
    def cohort_size(self) -> int:
        """Clients per round, or their expected number if clients draw for themselves."""
        return self.law.cohort_size(self.num_clients)

    @property
    def num_rounds(self) -> int | None:
        """Number of rounds until no cohort is left. None if rounds are unlimited."""
        return self.law.num_rounds(self.num_clients)

    @property
    def separation(self) -> int:
        """Smallest number of rounds between two participations of a client in one run, >= 1."""
        return self.law.num_cohorts(self.num_clients) or 1

    def check_mechanism(self, mechanism: Mechanism) -> None:
        """Check that the claims of a mechanism hold for these cohorts.

        Correlated noise needs a minimum number of rounds between two participations of a client.

        Raises:
            ValueError: If the law refuses the mechanism, or clients may return too early.
        """
        if need := self.law.check_mechanism(mechanism):
            raise ValueError(f"Secret cohorts need {need}")
        if mechanism.separation > self.separation:
            largest_cohort = self.num_clients // mechanism.separation
            cure = f"Cyclic({largest_cohort}) or fewer, or " if largest_cohort else ""
            alternative = f"a band of {self.separation}"
            if mechanism.reuses_noise:
                alternative = f"num_cohorts={self.separation}"
                if self.separation < 2:
                    alternative = "DistributedDiscreteGaussian, whose noise is independent"
            raise ValueError(
                f"{mechanism} needs {mechanism.separation} rounds between two participations of a client, "
                f"this plan has {self.separation}. Use {cure}{alternative}."
            )

    def successors(self, round: int) -> tuple[tuple[int, int], ...]:
        """Pair each client of a round with the client at the same place in the next cohort.

        Mechanisms with correlated noise use these pairs. After the last disjoint cohort there are none.

        Raises:
            ValueError: If every round draws a new cohort, so that a client may be in two consecutive ones.
        """
        if self.law.num_cohorts(self.num_clients) is None:
            raise ValueError(
                f"Correlated noise of clients needs fixed disjoint cohorts, got {self.law}. Use Cyclic(...)."
            )
        if round + 1 == self.num_rounds:
            return ()
        return tuple(zip(self.cohort(round), self.cohort(round + 1), strict=True))

    def digest(self, rounds: int) -> str:
        """Return a digest of the clients that a user's rule named for the first rounds. "" without a rule."""
        return self.law.digest(rounds, self.num_clients)

    def sampling(self, broken: str = "") -> Sampling:
        """Describe the participation of clients for a `Run`.

        Args:
            broken: Condition of secret cohorts that the run has violated. "" if there is none.
        """
        return Sampling(
            num_clients=self.num_clients,
            law=self.law,
            broken=broken if self.law.secret else "",
            dropout_probability=self.dropout_probability,
            real_clients=self.real_clients,
            may_be_silent=self.may_be_silent,
        )

    def cohort(self, round: int, attempt: int = 0) -> list[int]:
        """Draw the clients of one round, in the order in which they are put into groups.

        Args:
            round: Round number, from 0.
            attempt: Number of earlier attempts at the round. Known cohorts do not depend on it, nor do
                cohorts that were drawn for a block of rounds.

        Raises:
            ValueError: If there is no cohort for this round, or a user-defined law draws no valid one.
        """
        clients, law = self.num_clients, self.law
        members = list(law.draw_cohort(clients, round, attempt, self._stream))
        if not is_user_defined(law):
            return members
        size = self.cohort_size
        if len(members) != size or len({*members}) != size or not {*members} <= {*range(clients)}:
            raise ValueError(
                f"{law} must draw {size} different clients of 0 to {clients - 1}, got {len(members)} in "
                f"round {round}: {members[:10]}."
            )
        if members != list(law.draw_cohort(clients, round, attempt, self._stream)):
            raise ValueError(
                f"{law} drew different cohorts in two calls for round {round}. Use only its stream."
            )
        return members

    def _stream(self, purpose: str, round: int, attempt: int = 0) -> Stream:
        """Return the stream that draws cohorts: from the secret key if there is one, else from the seed."""
        if self.key is not None:
            return self.key.stream(purpose, round, attempt)
        return PublicRandomness(SeededKeys(self.seed), round).public(purpose)

    def plan(self, round: int, mechanism: Mechanism, attempt: int = 0) -> RoundPlan:
        """Return the plan of one attempt at a round.

        Raises:
            ValueError: If the mechanism does not support this cohort size, or no cohort is left.
        """
        sizes = None if self.law.own_draws else tuple(mechanism.group_sizes(self.cohort_size))
        # known cohorts are equal in all attempts, so attempt 0 lets them share one cache entry
        return _plan(self, round, sizes, attempt if self.law.secret else 0)

    def expected(self, round: int, mechanism: Mechanism, attempt: int = 0) -> RoundPlan:
        """Return the plan of a round that accounting and trials use.

        This is the plan of the round, unless clients draw for themselves. Then the real cohort is secret, and
        the plan has the expected number of clients, taken in turn from all clients.

        Raises:
            ValueError: If the mechanism does not support this cohort size, or no cohort is left.
        """
        if not self.law.own_draws:
            return self.plan(round, mechanism, attempt)
        first = round * self.cohort_size
        cohort = [client % self.num_clients for client in range(first, first + self.cohort_size)]
        return RoundPlan(round, group_clients(mechanism, cohort), frozenset(), self.seed)

    def expected_context(self, mechanism: Mechanism, dim: int) -> RoundContext:
        """Return the context of the expected first round, with a range of [-1, 1] in one segment."""
        one = torch.ones(1, dtype=torch.float64)
        return RoundContext(0, self.expected(0, mechanism).groups, (dim,), 0.0 * one, one)


@lru_cache(maxsize=1)  # loader, callback and server ask for the same plan
def _plan(planner: RoundPlanner, round: int, group_sizes: tuple[int, ...] | None, attempt: int) -> RoundPlan:
    """Draw a plan. Without `group_sizes` every client is a group of one."""
    rand, order = PublicRandomness(SeededKeys(planner.seed), round), planner.cohort(round, attempt)
    sizes = (1,) * len(order) if group_sizes is None else group_sizes
    if sum(sizes) != len(order):
        raise ValueError(f"group_sizes sums to {sum(sizes)}, expected the cohort's {len(order)} clients")
    words = rand.public("dropouts").words(len(order))
    threshold = math.floor(planner.dropout_probability * 2**32 + 0.5)
    dropped = frozenset(c for c, word in zip(order, words.tolist(), strict=True) if word < threshold)
    if planner.deadline is not None and not planner.real_clients:
        dropped |= planner.deadline.late(order, rand.public("late"))
    return RoundPlan(round, split_groups(order, sizes), dropped, planner.seed)
