"""Laws of cohorts: which clients take part in a round.

A law draws cohorts, bounds the charges of clients and prices secret draws. This file is long because it has
all laws, and a reader compares them.

Planner, run, plan and report use the same law object, so the cohort that is accounted for is the cohort that
is drawn. A law knows neither the number of clients nor a seed: its methods take them as arguments. Known
cohorts follow from public randomness and secret ones from a key, never from data.

A user-defined law is a frozen dataclass derived from `CohortLaw` with its own `draw_cohort`. Without more,
claims assume that one client may take part in every round, and that colluders may all be in one cohort. A law
may define `max_rounds` to state fewer rounds of a client. A class that replaces the draw of another law must
not keep that law's account of the draw, so it is refused.
"""

from __future__ import annotations

import hashlib
import json
import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import numpy as np

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.functional.checks import check_fields
from lightning_fedq.keys.randomness import Stream
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.privacy.losses import GaussianLoss, Loss, PoissonGaussianLoss

Streams = Callable[..., Stream]
"""Function that returns a random stream for a purpose, a round and an attempt. Streams are public, or known
to the server only."""

_ACCOUNT = ("of_all", "max_rounds", "lottery", "num_cohorts", "num_rounds", "independent_draw_loss")
"""Members of a law that are true only of its own draw."""


class CohortLaw(ABC):
    """Law by which clients take part in a round. Subclasses are frozen dataclasses.

    Attributes:
        size: Number of clients of a round, or its expectation where clients draw for themselves. None is all
            clients.
        secret: Whether only the server learns which clients took part.
        own_draws: Whether every client draws for itself, so that nobody learns how many took part.
        of_all: Whether cohorts are drawn from all clients, each client with the same probability.
        rule_name: Name of a user-defined rule in a checkpoint. "" without a rule.
        own_conditions: Conditions of a secret draw that replace those of the same name in `privacy.report`.
    """

    size: int | None
    secret: bool = False
    own_draws: ClassVar[bool] = False
    of_all: ClassVar[bool] = False
    rule_name: str = ""
    own_conditions: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Check that a class with its own draw does not keep the account of another law's draw.

        Raises:
            TypeError: If it does.
        """
        super().__init_subclass__(**options)

        def place(name: str) -> int:
            return next(index for index, base in enumerate(cls.__mro__) if name in vars(base))

        draw, own = place("draw_cohort"), cls.__mro__.index(CohortLaw)
        for name in _ACCOUNT:
            if draw < place(name) < own:
                raise TypeError(
                    f"{cls.__name__} has its own draw_cohort, but keeps {name} of {cls.__mro__[1].__name__}. "
                    "Derive it from CohortLaw."
                )

    def __post_init__(self) -> None:
        check_fields(self)

    def cohort_size(self, clients: int) -> int:
        """Return the number of clients of a round, in a federation of `clients` clients."""
        return clients if self.size is None else self.size

    def with_size(self, size: int) -> CohortLaw:
        """Return the same law with cohorts of another size."""
        resized: Any = self
        return self if self.size is None else replace(resized, size=size)

    def with_secret(self) -> CohortLaw:
        """Return the same law with a secret draw.

        Raises:
            ValueError: If the law has no secret draw, with the cure.
        """
        if not self.secret:
            raise ValueError(
                f"secret cohorts need S1, a draw from all clients, got {self}. Use FixedSize(...)."
            )
        return self

    def check(self, clients: int) -> None:
        """Check that a federation of `clients` clients has such cohorts.

        Raises:
            TypeError: If the law is not a frozen dataclass.
            ValueError: If a cohort would be empty or larger than the federation, a secret draw would include
                all clients, or the law has no account of its secret draw.
        """
        settings: Any = getattr(self, "__dataclass_params__", None)
        if not is_dataclass(self) or not settings.frozen:
            raise TypeError(f"{type(self).__name__} is not a frozen dataclass. Add @dataclass(frozen=True).")
        if not 1 <= self.cohort_size(clients) <= clients:
            raise ValueError(f"cohorts must have 1 to num_clients = {clients} clients, got {self}")
        if self.secret and self.size == clients:
            raise ValueError(
                f"secret cohorts need S1, a draw, but all {clients} clients take part in every round. "
                f"Use a size below {clients}, or known cohorts."
            )
        if self.secret and type(self).independent_draw_loss is CohortLaw.independent_draw_loss:
            raise ValueError(
                f"{self} is secret, but has no account of its draw. Use FixedSize(..., secret=True)."
            )

    def check_rounds(self, rounds: int, clients: int) -> str:
        """Check that the law has cohorts for this many rounds.

        Returns:
            A message for the user, or "".

        Raises:
            ValueError: If there are fewer cohorts than rounds, with the cure.
        """
        return ""

    def check_mechanism(self, mechanism: Mechanism) -> str:
        """Return the reason why a mechanism does not fit such cohorts, with the cure. "" if it fits."""
        return ""

    @abstractmethod
    def draw_cohort(self, clients: int, round: int, attempt: int, stream: Streams) -> Sequence[int]:
        """Draw the cohort of a round, in the order in which clients are put into groups.

        The same arguments always give the same cohort.

        Args:
            clients: Number of clients of the federation.
            round: Number of the round, from 0.
            attempt: Number of earlier attempts at this round.
            stream: Function that returns random streams. Where cohorts are known, the stream is public and
                the same in every attempt.

        Raises:
            ValueError: If there is no cohort for this round.
        """

    def num_cohorts(self, clients: int) -> int | None:
        """Return the number of disjoint cohorts that take turns. None where a client may return at once."""
        return None

    def num_rounds(self, clients: int) -> int | None:
        """Return the number of rounds after which no cohort is left. None where cohorts never run out."""
        return None

    def max_rounds(self, rounds: int, clients: int) -> int | None:
        """Return the largest number of rounds of one client among `rounds`. None if a random draw decides."""
        return rounds

    def lottery(self, rounds: int, clients: int) -> tuple[int, float]:
        """Return the most rounds with one client in the draw, and its largest probability in one of them.

        A client takes part at most in this number of rounds, in each with at most this probability.
        """
        most = self.max_rounds(rounds, clients)
        return (rounds, self.cohort_size(clients) / clients) if most is None else (most, 1.0)

    def digest(self, rounds: int, clients: int) -> str:
        """Return a digest of the clients that a user-defined rule named. "" without a rule."""
        return ""

    def note(self, rounds: int, clients: int) -> str:
        """Return sentences for a report on how often a client takes part. "" where a random draw decides."""
        if (most := self.max_rounds(rounds, clients)) is None:
            return ""
        return (
            f"Cohorts follow the user-defined law {self}, which is assumed to use public facts only. A "
            f"client takes part in {most} rounds at most. No claim counts on a random draw."
        )

    def method(self, rounds: int, clients: int) -> str:
        """Return the name of the accounting method of a secret draw, with its numbers."""
        return (
            "sampling without replacement, one client's update replaced, privacy loss distribution, "
            f"pessimistic; {self.size} of {clients} clients, {rounds} rounds"
        )

    def independent_draw_loss(
        self, loss: Loss, compositions: int, rounds: int, clients: int
    ) -> tuple[Loss, int] | None:
        """Return the loss of a round in which clients draw secretly for themselves, and the number of rounds.

        Args:
            loss: Loss of one composition against a client that takes part, under substitution.
            compositions: Compositions in one round.
            rounds: Released rounds of the run.
            clients: Number of clients of the federation.

        Returns:
            Loss and number of rounds, or None for a secret draw of a fixed size from all clients
            (`sampled.amplify_loss`).

        Raises:
            ValueError: If the draw is known, or there is no account of such a draw.
        """
        raise ValueError(f"{self} has no secret draw, so nothing amplifies. Use FixedSize(..., secret=True).")


class _UniformDraw(CohortLaw):
    """Law that draws each cohort uniformly from all clients, independently of other rounds."""

    of_all = True

    def draw_cohort(self, clients: int, round: int, attempt: int, stream: Streams) -> list[int]:
        return stream("cohort", round, attempt).choice(clients, self.cohort_size(clients))

    def max_rounds(self, rounds: int, clients: int) -> None:
        return None


@dataclass(frozen=True)
class Everybody(_UniformDraw):
    """All clients take part in every round."""

    size = None


@dataclass(frozen=True)
class FixedSize(_UniformDraw):
    """Law that draws `size` of all clients in every round, without replacement.

    Draws of different rounds are independent.

    Args:
        size: Number of clients of a round, >= 1.
        secret: Whether the draw is kept secret. It then follows from a key that only the server has, and
            nothing may reveal the drawn clients. Reports have a second row for an outsider, with an epsilon
            that is smaller because of the draw. Settings that would reveal the draw are refused
            (`training.secret_cohorts`), and such a run can't be resumed from a checkpoint.
    """

    size: int
    secret: bool = False

    def with_secret(self) -> FixedSize:
        return replace(self, secret=True)

    def independent_draw_loss(
        self, loss: Loss, compositions: int, rounds: int, clients: int
    ) -> tuple[Loss, int] | None:
        return None if self.secret else super().independent_draw_loss(loss, compositions, rounds, clients)


@dataclass(frozen=True)
class Cyclic(CohortLaw):
    """Law that splits clients into disjoint public cohorts, which take turns in a fixed order without end.

    With b cohorts, no client is asked in more than ceil(T / b) of T rounds, and two of its rounds are b
    rounds apart. Clients that are left over by cohorts of equal size are never asked.

    Args:
        size: Number of clients of a cohort, >= 1.
    """

    size: int
    of_all = True

    def num_cohorts(self, clients: int) -> int:
        return clients // self.size

    def check_rounds(self, rounds: int, clients: int) -> str:
        rest = clients % self.size
        over = f"{self} never asks {rest} of {clients} clients. A size that divides "
        return f"{over}num_clients asks all clients" if rest else ""

    def draw_cohort(self, clients: int, round: int, attempt: int, stream: Streams) -> list[int]:
        self.check_rounds(round + 1, clients)  # raises if no cohort is left
        # the stream of round 0 is used in all rounds, so all rounds have the same partition into cohorts
        dealt, turn = stream("disjoint cohorts", 0), round % self.num_cohorts(clients)
        return dealt.permutation(clients)[turn * self.size : (turn + 1) * self.size]

    def max_rounds(self, rounds: int, clients: int) -> int:
        return -(-rounds // self.num_cohorts(clients))

    def note(self, rounds: int, clients: int) -> str:
        most = self.max_rounds(rounds, clients)
        once = (
            ": a client is asked in one round at most, so the epsilon of one round is the epsilon of its "
            "whole run (parallel composition)."
        )
        turns = f" and take turns: a client is asked in {most} rounds at most, without any random draw."
        return f"Cohorts are disjoint and public{once if most <= 1 else turns}"


@dataclass(frozen=True)
class DisjointOnce(Cyclic):
    """Law that splits clients into disjoint public cohorts, each of which has one round.

    A client can thus spend its whole budget in the only round in which it is asked (parallel composition).
    Clients that are left over by cohorts of equal size are never asked.

    Args:
        size: Number of clients of a cohort, >= 1.
    """

    def num_rounds(self, clients: int) -> int:
        return self.num_cohorts(clients)

    def check_rounds(self, rounds: int, clients: int) -> str:
        if rounds > self.num_rounds(clients):
            fits = clients // rounds
            raise ValueError(
                f"{self} asks every client at most once: {rounds} rounds of {self.size} clients need "
                f"{rounds * self.size} clients, got {clients}. Use "
                + (f"DisjointOnce({fits}) or fewer." if fits else "fewer rounds.")
            )
        return ""

    def max_rounds(self, rounds: int, clients: int) -> int:
        return min(rounds, 1)


@dataclass(frozen=True)
class Poisson(CohortLaw):
    """Law of independent, secret draws: every client takes part with probability size / num_clients.

    It needs a trusted adder whose noise does not depend on which clients take part.

    Args:
        size: Expected number of clients of a round, >= 1.
    """

    size: int
    secret = True
    own_draws = True
    of_all = True
    own_conditions = tuple(
        kind.SECRET_SAMPLE(sentence)
        for sentence in (
            "S1: every client draws for itself, independently of all others and anew in every round, "
            "whether it takes part, by a key that only the server has",
            "S2: no round was begun twice, and a round without clients counts as a round",
            "S8: nothing else that depends on the draw is revealed, including the number of clients: no "
            "server's memory, no logs or files of clients, no duration of a round, no number of messages or "
            "bytes",
            "S11: noise is the adder's alone, it and the divisor are those of the expected cohort in each "
            "round, and what a client sends does not depend on the other clients, except for the rounding "
            "of floats",
        )
    )

    def check_mechanism(self, mechanism: Mechanism) -> str:
        if mechanism.has_central_noise:
            return ""
        return (
            f"S11, noise of a trusted adder: {type(mechanism).__name__} adds none, or adds it at clients. "
            f"Use BandedGaussian(..., band=1) with {self}, or FixedSize({self.size}, secret=True)"
        )

    def draw_cohort(self, clients: int, round: int, attempt: int, stream: Streams) -> list[int]:
        coins = stream("cohort of coins", round, attempt).uniform_below(clients, clients)
        members: list[int] = np.flatnonzero(coins < self.size).tolist()  # with probability size / clients
        return members

    def max_rounds(self, rounds: int, clients: int) -> None:
        return None

    def note(self, rounds: int, clients: int) -> str:
        return (
            f"Every client draws for itself whether it takes part, so a cohort has {self.size} clients on "
            f"average. The mean divides by {self.size} in every round, and nobody learns how many took part."
        )

    def method(self, rounds: int, clients: int) -> str:
        return (
            "Poisson sampling behind a trusted adder, one client's update replaced, privacy loss "
            f"distribution, pessimistic; every client with probability {self.size}/{clients}, {rounds} rounds"
        )

    def independent_draw_loss(
        self, loss: Loss, compositions: int, rounds: int, clients: int
    ) -> tuple[Loss, int]:
        # if clients added noise, the noise of the sum would depend on which clients take part
        if type(loss) is not GaussianLoss or compositions != 1:
            raise ValueError(
                f"{self} can't account for {type(loss).__name__} with {compositions} compositions a round, "
                f"only for one GaussianLoss. Use FixedSize({self.size}, secret=True)."
            )
        return PoissonGaussianLoss(loss.noise_multiplier, self.size / clients, loss.note), rounds


@dataclass(frozen=True, eq=False)
class Available(CohortLaw):
    """Law that draws `size` clients in every round from those that a user-defined rule names as available.

    Claims never average over this draw. A law remembers what its rule named, so that the same clients are
    priced and drawn. A run starts only if its rule still names them.

    Args:
        rule: Function from the number of a round, from 0, to its available clients. It must return the same
            clients at every call and use public facts only: a rule that looks at clients' data reveals them
            without noise.
        size: Number of clients of a round, >= 1.
    """

    rule: Annotated[Callable[[int], Sequence[int]], "a function of the round's number that returns clients"]
    size: int
    _named: dict[tuple[int, int], list[int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __repr__(self) -> str:
        return f"Available({self.rule_name}, {self.size})"

    @property
    def rule_name(self) -> str:  # type: ignore[override]
        return getattr(self.rule, "__qualname__", type(self.rule).__name__)

    def list_available(self, round: int, clients: int) -> list[int]:
        """Return the sorted clients from whom the cohort of a round is drawn. Results are remembered.

        The rule is called twice in a round's first use, and both results must be equal.

        Raises:
            TypeError: If the rule does not return integers.
            ValueError: If the rule names too few clients, unknown clients or duplicates, or other clients in
                its second call.
        """
        if (round, clients) not in self._named:
            named = self._call_rule(round, clients)
            self._check_named(named, round, clients)
            self._named[round, clients] = named
        return self._named[round, clients]

    def _call_rule(self, round: int, clients: int) -> list[int]:
        """Return what the rule names now, sorted."""
        try:
            named = sorted(map(operator.index, self.rule(round)))
        except TypeError as error:
            raise TypeError(f"{self} must return integers in round {round}: {error}") from error
        if len({*named}) != len(named) or not {*named} <= {*range(clients)} or len(named) < self.size:
            raise ValueError(
                f"{self} must name at least {self.size} of the clients 0 to {clients - 1}, each once, got "
                f"{len(named)} for round {round}: {named[:10]}. Use a smaller cohort."
            )
        return named

    def _check_named(self, named: list[int], round: int, clients: int) -> None:
        """Check that the rule names these clients again."""
        if named != self._call_rule(round, clients):
            raise ValueError(
                f"{self} named different clients in two calls for round {round}. "
                "Let the rule depend on the number of the round only."
            )

    def check_rounds(self, rounds: int, clients: int) -> str:
        # a rule may have changed since another federation with this law has asked it
        for round in range(rounds):
            self._check_named(self.list_available(round, clients), round, clients)
        return ""

    def draw_cohort(self, clients: int, round: int, attempt: int, stream: Streams) -> list[int]:
        named = self.list_available(round, clients)
        return [named[place] for place in stream("cohort", round, attempt).choice(len(named), self.size)]

    @lru_cache(maxsize=8)  # noqa: B019 (a report asks twenty times)
    def lottery(self, rounds: int, clients: int) -> tuple[int, float]:
        available = [self.list_available(round, clients) for round in range(rounds)]
        counts = Counter(client for members in available for client in members).values()
        return max(counts, default=0), self.size / min(map(len, available), default=self.size)

    def max_rounds(self, rounds: int, clients: int) -> int:
        return self.lottery(rounds, clients)[0]

    def digest(self, rounds: int, clients: int) -> str:
        names = json.dumps([self.list_available(round, clients) for round in range(rounds)])
        return hashlib.sha256(names.encode()).hexdigest()

    def note(self, rounds: int, clients: int) -> str:
        return (
            "A cohort is drawn from the clients that a user-defined rule names by the number of the round. "
            f"A client is named in {self.max_rounds(rounds, clients)} rounds at most. The rule is assumed to "
            "follow from public facts, because a rule that looks at clients' data reveals them without "
            "noise. No claim counts on the draw."
        )


def make_cohort_law(cohort: CohortLaw | int | None) -> CohortLaw:
    """Return the law of a shorthand: `FixedSize` for a number, `Everybody` for None."""
    if isinstance(cohort, CohortLaw):
        return cohort
    return Everybody() if cohort is None else FixedSize(cohort)
