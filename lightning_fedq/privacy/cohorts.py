"""Who takes part in a round: one frozen law, which draws cohorts, counts charges and prices a secret draw.

Planner, run, plan and report hold the same object and ask it, so the cohort that is priced is the cohort that
is drawn. A law knows neither the number of clients nor a seed; its methods take them. Known cohorts follow
from public randomness, secret ones from a key, never from data.

A law of one's own is a frozen dataclass below `CohortLaw` with another `drawn` and, unless every round is a
uniform draw from all clients, `most_rounds` and `of_all = False`; no claim averages over its draw then.
"""

from __future__ import annotations

import hashlib
import json
import operator
from abc import ABC
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import numpy as np

from lightning_fedq.functional.checks import check_fields
from lightning_fedq.keys.randomness import Stream
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.privacy.losses import GaussianLoss, Loss, PoissonGaussianLoss

Streams = Callable[..., Stream]
"""Randomness of a purpose at a place, such as a round and an attempt: public, or secret to the server."""


class CohortLaw(ABC):
    """Law by which clients take part in a round. Children are frozen dataclasses.

    Attributes:
        size: Clients of a round; their expected number where clients draw for themselves; None is everybody.
        secret: Does nobody but the server learn who took part?
        own_draws: Does every client draw for itself, so that nobody learns how many took part?
        of_all: Are cohorts drawn from all clients, each client as likely as the others?
        word: Name in a checkpoint.
        rule_name: Name of a user's rule in a checkpoint. "" without one.
        own_conditions: Conditions of a secret draw, in place of those of the same name (`secret_row`).
    """

    size: int | None
    secret: bool = False
    own_draws: ClassVar[bool] = False
    of_all: ClassVar[bool] = True
    word: ClassVar[str] = "of its own"
    rule_name: str = ""
    own_conditions: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    def cohort_size(self, clients: int) -> int:
        """Clients of a round, of so many in the federation."""
        return clients if self.size is None else self.size

    def with_size(self, size: int) -> CohortLaw:
        """The same law with cohorts of another size."""
        resized: Any = self
        return self if self.size is None else replace(resized, size=size)

    def with_secret(self) -> CohortLaw:
        """The same law with a secret draw.

        Raises:
            ValueError: If there is none, with the cure.
        """
        if not self.secret:
            raise ValueError(
                f"secret cohorts need S1, a draw from all clients, got {self}; use FixedSize(...)"
            )
        return self

    def check(self, clients: int) -> None:
        """Refuse a federation that has no such cohorts.

        Raises:
            ValueError: With the cure.
        """
        if not 1 <= self.cohort_size(clients) <= clients:
            raise ValueError(f"cohorts must be of 1 to num_clients = {clients} clients, got {self}")
        if self.secret and self.size == clients:
            raise ValueError(
                f"secret cohorts need S1, a draw: all {clients} clients take part in every round; take a "
                f"size below {clients}, or known cohorts"
            )

    def check_rounds(self, rounds: int, clients: int) -> str:
        """Refuse more rounds than there are cohorts, and return what a user should know, or "".

        Raises:
            ValueError: With the cure.
        """
        return ""

    def check_mechanism(self, mechanism: Mechanism) -> str:
        """Name what speaks against a mechanism in such cohorts, with the cure. "" where nothing does."""
        return ""

    def draw_cohort(self, clients: int, round: int, attempt: int, stream: Streams) -> list[int]:
        """Draw the cohort of a round, in the order in which clients fall into groups.

        Args:
            attempt: Number of earlier attempts.
            stream: Gives randomness; where cohorts are known it is public, and the same in each attempt.

        Raises:
            ValueError: If there is no cohort for this round.
        """
        return stream("cohort", round, attempt).choice(clients, self.cohort_size(clients))

    def num_cohorts(self, clients: int) -> int | None:
        """Disjoint cohorts that there are. None where every round draws its own."""
        return None

    def num_rounds(self, clients: int) -> int | None:
        """Rounds after which there is no cohort left. None where there is no end."""
        return None

    def max_rounds(self, rounds: int, clients: int) -> int | None:
        """In how many of so many rounds a client takes part at most. None: a lottery decides."""
        return None

    def lottery(self, rounds: int, clients: int) -> tuple[int, float]:
        """Most rounds in which a client may be drawn, and the largest chance that it is, in one of them."""
        most = self.max_rounds(rounds, clients)
        return (rounds, self.cohort_size(clients) / clients) if most is None else (most, 1.0)

    def digest(self, rounds: int, clients: int) -> str:
        """Digest of what a user's rule has said of the first rounds. "" without a rule."""
        return ""

    def note(self, rounds: int, clients: int) -> str:
        """Sentences for a report on how often a client takes part. "" where a lottery decides."""
        return ""

    def method(self, rounds: int, clients: int) -> str:
        """Method that prices a secret draw, with its numbers."""
        return (
            "sampling without replacement, one client's update replaced, privacy loss distribution, "
            f"pessimistic; {self.size} of {clients} clients, {rounds} rounds"
        )

    def independent_draw_loss(
        self, loss: Loss, compositions: int, rounds: int, clients: int
    ) -> tuple[Loss, int] | None:
        """Loss of one secret draw of a client for itself, and how many draws so many released rounds hold.

        Args:
            loss: Loss of one composition towards a client that takes part, under substitution.
            compositions: Compositions in one round.

        Returns:
            None for a secret draw of a fixed size from all clients (`sampled.amplify_loss`).

        Raises:
            ValueError: If the draw is known, or there is no account of such a draw.
        """
        if self.secret:
            return None
        raise ValueError(f"{self} is no secret draw, which would amplify; use FixedSize(..., secret=True)")


@dataclass(frozen=True)
class Everybody(CohortLaw):
    """All clients take part in every round."""

    size = None
    word = "random"


@dataclass(frozen=True)
class FixedSize(CohortLaw):
    """Every round draws `size` of all clients anew, without replacement.

    Args:
        size: Clients of a round, >= 1.
        secret: Draw by a key that nobody else has, and let nothing out that tells who was drawn: reports have
            a second row of an outsider, with an epsilon that the draw has made smaller. What breaks it is
            refused (`training.secret_cohorts`), and such a run can't be resumed from a checkpoint.
    """

    size: int
    secret: bool = False
    word = "random"

    def with_secret(self) -> FixedSize:
        return replace(self, secret=True)


@dataclass(frozen=True)
class Cyclic(CohortLaw):
    """Clients are dealt out into disjoint public cohorts, which take turns in one order for ever.

    With b cohorts nobody is asked in more than ceil(T / b) of T rounds, and with no less than b rounds in
    between. Clients left over by cohorts of equal size are never asked.

    Args:
        size: Clients of a cohort, >= 1.
    """

    size: int
    word = "cyclic"

    def num_cohorts(self, clients: int) -> int:
        return clients // self.size

    def check_rounds(self, rounds: int, clients: int) -> str:
        rest = clients % self.size
        over = f"{self} leaves {rest} of {clients} clients over, which are never asked; a size that divides "
        return f"{over}num_clients leaves nobody out" if rest else ""

    def draw_cohort(self, clients: int, round: int, attempt: int, stream: Streams) -> list[int]:
        # streams of round 0: one deal for all rounds
        dealt, turn = stream("disjoint cohorts", 0), round % self.num_cohorts(clients)
        return dealt.permutation(clients)[turn * self.size : (turn + 1) * self.size]

    def max_rounds(self, rounds: int, clients: int) -> int:
        return -(-rounds // self.num_cohorts(clients))

    def note(self, rounds: int, clients: int) -> str:
        most = self.max_rounds(rounds, clients)
        once = (
            ": a client is asked in one round at most, so one round's epsilon is that of its whole run "
            "(parallel composition)."
        )
        turns = f" and take turns: a client is asked in {most} rounds at most, with no lottery about it."
        return f"Cohorts are disjoint and public{once if most <= 1 else turns}"


@dataclass(frozen=True)
class DisjointOnce(Cyclic):
    """Clients are dealt out into disjoint public cohorts, each of which has one round.

    So a client can spend its whole budget in the one round in which it is asked (parallel composition).
    Clients left over by cohorts of equal size are never asked.
    """

    word = "once"

    def num_rounds(self, clients: int) -> int:
        return self.num_cohorts(clients)

    def check_rounds(self, rounds: int, clients: int) -> str:
        if rounds > self.num_rounds(clients):
            fits = clients // rounds
            raise ValueError(
                f"{self} asks every client once at most: {rounds} rounds of {self.size} clients need "
                f"{rounds * self.size}, there are {clients}; use "
                + (f"DisjointOnce({fits}) or fewer" if fits else "fewer rounds")
            )
        return ""

    def draw_cohort(self, clients: int, round: int, attempt: int, stream: Streams) -> list[int]:
        self.check_rounds(round + 1, clients)
        return super().draw_cohort(clients, round, attempt, stream)

    def max_rounds(self, rounds: int, clients: int) -> int:
        return min(rounds, 1)


@dataclass(frozen=True)
class Poisson(CohortLaw):
    """Every client takes part in a round by a secret coin of its own, with chance size / num_clients.

    Behind the noise of a trusted adder, which is the same whoever is there.

    Args:
        size: Expected number of clients of a round, >= 1.
    """

    size: int
    secret = True
    own_draws = True
    word = "poisson"
    own_conditions = (
        "S1: every client draws for itself, independently of all others and anew in every round, "
        "whether it takes part, by a key that only the server has",
        "S2: no round was begun twice; one of nobody counts as one",
        "S8: nothing else that depends on the draw gets out, how many took part included: no server's "
        "memory, no logs or files of clients, no duration of a round, no number of messages or bytes",
        "S11: noise is the adder's alone, and it and the divisor are those of the expected cohort, whoever "
        "is there; what a client sends does not depend on who trains beside it, but for the rounding "
        "of floats",
    )

    def check_mechanism(self, mechanism: Mechanism) -> str:
        if mechanism.noise_of_adder:
            return ""
        return (
            f"S11, noise of the adder alone, whoever is there: that of {type(mechanism).__name__} comes "
            f"from clients, or is none; {self} takes BandedGaussian(..., band=1), all others "
            f"FixedSize({self.size}, secret=True)"
        )

    def draw_cohort(self, clients: int, round: int, attempt: int, stream: Streams) -> list[int]:
        coins = stream("cohort of coins", round, attempt).uniform_below(clients, clients)
        members: list[int] = np.flatnonzero(coins < self.size).tolist()  # chance size / clients exactly
        return members

    def note(self, rounds: int, clients: int) -> str:
        return (
            f"Every client draws for itself whether it takes part: a cohort has {self.size} clients on "
            f"average, the mean divides by {self.size} in every round, and nobody learns how many there are."
        )

    def method(self, rounds: int, clients: int) -> str:
        return (
            "Poisson sampling behind a trusted adder, one client's update replaced, privacy loss "
            f"distribution, pessimistic; every client with chance {self.size}/{clients}, {rounds} rounds"
        )

    def independent_draw_loss(
        self, loss: Loss, compositions: int, rounds: int, clients: int
    ) -> tuple[Loss, int]:
        # what a sum of clients' noises is follows from who is there
        if type(loss) is not GaussianLoss or compositions != 1:
            raise ValueError(
                f"{self} has no account for a {type(loss).__name__} in {compositions} parts, only for a "
                f"trusted adder's Gaussian noise; use FixedSize({self.size}, secret=True)"
            )
        return PoissonGaussianLoss(loss.noise_multiplier, self.size / clients, loss.note), rounds


@dataclass(frozen=True)
class Available(CohortLaw):
    """Every round draws `size` of the clients that a rule names: who is at home, whose turn it is.

    No claim counts on the draw.

    Args:
        rule: Returns clients by the number of the round, from 0, the same whenever it is asked, from public
            facts alone: one that looks at clients' data tells of them without noise.
        size: Clients of a round, >= 1.
    """

    rule: Annotated[Callable[[int], Sequence[int]], "a function of the round's number that returns clients"]
    size: int
    of_all = False
    word = "random"
    _named: dict[tuple[int, int], list[int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __repr__(self) -> str:
        return f"Available({self.rule_name}, {self.size})"

    @property
    def rule_name(self) -> str:  # type: ignore[override]
        return getattr(self.rule, "__qualname__", type(self.rule).__name__)

    def list_available(self, round: int, clients: int) -> list[int]:
        """Clients from whom the cohort of a round is drawn, in order. The rule is asked for a round but once.

        Raises:
            TypeError: If the rule returns no numbers.
            ValueError: If it names too few, or others than there are, or others when it is asked again.
        """
        if (round, clients) in self._named:
            return self._named[round, clients]
        try:
            found, again = (sorted(map(operator.index, self.rule(round))) for _ in range(2))
        except TypeError as error:
            raise TypeError(
                f"{self} must return the numbers of clients, in round {round}: {error}"
            ) from error
        if len({*found}) != len(found) or not {*found} <= {*range(clients)} or len(found) < self.size:
            raise ValueError(
                f"{self} must name at least {self.size} of the clients 0 to {clients - 1}, each once, got "
                f"{len(found)} for round {round}: {found[:10]}; take a smaller cohort"
            )
        if found != again:
            raise ValueError(
                f"{self} named other clients for round {round} when it was asked again; let the rule follow "
                "from the number of the round alone, so that a resumed run and other processes agree"
            )
        return self._named.setdefault((round, clients), found)

    def check_rounds(self, rounds: int, clients: int) -> str:
        self.digest(rounds, clients)
        return ""

    def draw_cohort(self, clients: int, round: int, attempt: int, stream: Streams) -> list[int]:
        named = self.list_available(round, clients)
        return [named[place] for place in stream("cohort", round, attempt).choice(len(named), self.size)]

    @lru_cache(maxsize=8)  # noqa: B019 (a report asks twenty times)
    def lottery(self, rounds: int, clients: int) -> tuple[int, float]:
        named = [self.list_available(round, clients) for round in range(rounds)]
        often = Counter(client for one in named for client in one).values()
        return max(often, default=0), self.size / min(map(len, named), default=self.size)

    def max_rounds(self, rounds: int, clients: int) -> int:
        return self.lottery(rounds, clients)[0]

    def digest(self, rounds: int, clients: int) -> str:
        names = json.dumps([self.list_available(round, clients) for round in range(rounds)])
        return hashlib.sha256(names.encode()).hexdigest()

    def note(self, rounds: int, clients: int) -> str:
        return (
            "A cohort is drawn from the clients that a rule of the user's names by the number of the round: "
            f"one is named in {self.max_rounds(rounds, clients)} rounds at most. It is taken to follow from "
            "public facts: one that looks at clients' data tells of them without noise. No claim counts on "
            "the draw."
        )


def make_cohort_law(cohort: CohortLaw | int | None) -> CohortLaw:
    """The law of a shorthand: a number is `FixedSize` of so many, None is `Everybody`."""
    if isinstance(cohort, CohortLaw):
        return cohort
    return Everybody() if cohort is None else FixedSize(cohort)
