"""One description of a run: all that a statement about its privacy may count on, and nothing else.

Report, target, budget, plan and loggers take a `Run`, a delta and an adversary. Nothing has a default:
whoever describes a run has to say each thing, so the weakest adversary is never what is left by forgetting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_fedq.mechanisms.interface import Mechanism, NonPrivate, RoundContext
from lightning_fedq.privacy.cohorts import CohortLaw, FixedSize
from lightning_fedq.privacy.collusion import NOBODY, Colluders


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Participation of clients.

    Args:
        num_clients: Clients of the federation, from whom cohorts come.
        law: Law of cohorts.
        broken: Condition of secret cohorts that the run has not kept, by name, with the cure; "" for none.
        dropout_probability: Chance that a client of a cohort does not answer.
        real_clients: Are clients machines of a deployment? Whose code they run is assumed then.
        may_be_silent: May any number of clients be silent, whoever they are (real clients, a deadline)?
    """

    num_clients: int
    law: CohortLaw
    broken: str
    dropout_probability: float
    real_clients: bool
    may_be_silent: bool

    def __post_init__(self) -> None:
        if self.num_clients < 1:
            raise ValueError(f"num_clients must be >= 1, got {self.num_clients}")
        self.law.check(self.num_clients)
        if not 0.0 <= self.dropout_probability < 1.0:
            raise ValueError(f"dropout_probability must be in [0, 1), got {self.dropout_probability}")


@dataclass(frozen=True, kw_only=True)
class SecureSum:
    """Guarantee of a secure aggregation for the cohorts of a run. `SecAgg.guarantee` knows it.

    Args:
        colluders: Clients that may collude with the server, which masks, noise and statement count alike.
        opened_log2: log2 of the chance that an attempt shows more than its sum; delta pays for it.
        min_survivors: Clients that confirm a sum, where the server may lie about who dropped out (malicious);
            it may leave out all others. None is a server that follows the protocol (honest but curious).
        min_summands: Messages without which no sum is opened, >= 1.
        ran: Did masks really run, so that the server saw sums only?
        settings: The protocol with its settings, as in Python; a ledger adds up charges of the same only.
        statement: What the server may do, and how likely the masks show more, in words.
    """

    colluders: Colluders
    opened_log2: float
    min_survivors: int | None
    min_summands: int
    ran: bool
    settings: str
    statement: str


ASSUMED = SecureSum(
    colluders=NOBODY,
    opened_log2=-math.inf,
    min_survivors=None,
    min_summands=1,
    ran=False,
    settings="assumed",
    statement="for a server that follows the protocol (semi-honest)",
)


def check_colluders(law: CohortLaw, colluders: Colluders) -> None:
    """Refuse colluders that were counted as a draw from all clients has them, where a rule names some.

    Raises:
        ValueError: With the cure.
    """
    if colluders.drawn and not law.of_all:
        raise ValueError(
            f"max_corrupt={colluders.fraction:g} counts colluders as a draw from all clients has them, and "
            f"those whom {law} names may all collude; use SecAgg(active=True, ...), which counts as many as "
            "there are, max_corrupt=0, or another law"
        )


@dataclass(frozen=True, kw_only=True)
class ThreatModel:
    """Trust in the parties, and what they are handed.

    Args:
        secure_sum: How the server is handed sums only. None where it is handed messages.
        plain_sum: Does the model depend on the messages through their plain sum only: no weights, no robust
            rule?
        num_byzantine: Clients of a cohort, at most, that do not run the protocol; they hide nobody.
        secure_keys: Do keys come from the operating system? With reproducible ones nothing is private.
    """

    secure_sum: SecureSum | None
    plain_sum: bool
    num_byzantine: int
    secure_keys: bool

    def __post_init__(self) -> None:
        if self.num_byzantine < 0:
            raise ValueError(f"num_byzantine must be >= 0, got {self.num_byzantine}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A run, to come or so far.

    Args:
        mechanism: What encodes every message.
        context: A round of it: cohort, groups, dim. As long as the longest vector that was charged for.
        rounds: Rounds of the run, >= 0; released ones where cohorts are secret.
        sampling: How clients come to take part.
        threat: What parties may do and what they are handed.
        charges: `(num_clients,)`, rounds that each client was charged for; None before the first one, and
            where cohorts are secret.
        to_come: How many of the rounds are not charged yet, where charges are given; else 0.

    Raises:
        ValueError: If parts of it contradict each other.
    """

    mechanism: Mechanism
    context: RoundContext
    rounds: int
    sampling: Sampling
    threat: ThreatModel
    charges: Sequence[int] | Tensor | None
    to_come: int

    def __post_init__(self) -> None:
        size, sums = self.cohort_size, self.threat.secure_sum
        if self.rounds < 0:
            raise ValueError(f"rounds must be >= 0, got {self.rounds}")
        if sums is not None:
            for name in ("min_survivors", "min_summands"):
                value = getattr(sums, name)
                if value is not None and not 1 <= value <= size:
                    raise ValueError(
                        f"{name} must be in [1, cohort = {size}], got {value}; SecAgg.guarantee knows it"
                    )
            those, liars = sums.colluders, self.threat.num_byzantine
            check_colluders(self.sampling.law, those)
            here = replace(those, clients=self.num_clients, cohort=size, byzantine=liars)
            if those not in (NOBODY, here):
                raise ValueError(
                    f"colluders are counted in cohorts of {those.cohort} of {those.clients} clients, and "
                    f"these are of {size} of {self.num_clients}, or with {those.byzantine} Byzantine clients "
                    f"for {liars}; SecAgg.guarantee knows it"
                )
        if self.sampling.law.cohort_size(self.num_clients) != size:
            raise ValueError(f"a round of {size} clients is none of {self.sampling.law}")
        if self.sampling.law.secret and self.charges is not None:
            raise ValueError("charges tell who was drawn, and cohorts are secret: leave charges out")

    @property
    def cohort_size(self) -> int:
        """Clients of a round."""
        return len(self.context.cohort)

    @property
    def num_clients(self) -> int:
        """Clients of the federation."""
        return self.sampling.num_clients

    @property
    def min_survivors(self) -> int | None:
        """Clients that confirm a sum of a lying server. None without one."""
        sums = self.threat.secure_sum
        return None if sums is None else sums.min_survivors

    @property
    def min_answers(self) -> int | None:
        """Answers that a sum is sure to hold, where clients may be silent. None where nobody is."""
        if not self.sampling.may_be_silent:
            return None
        return 1 if self.threat.secure_sum is None else self.threat.secure_sum.min_summands

    @property
    def colluders(self) -> Colluders:
        """Clients that may collude with the server behind secure aggregation, and those that lie."""
        sums, size = self.threat.secure_sum, self.cohort_size
        if sums is not None and sums.colluders != NOBODY:
            return sums.colluders
        return Colluders(0.0, self.num_clients, size, chosen=False, byzantine=self.threat.num_byzantine)

    @property
    def masks_open(self) -> float:
        """Chance that one attempt shows more than its sum to the server behind secure aggregation."""
        return 0.0 if self.threat.secure_sum is None else 2.0**self.threat.secure_sum.opened_log2

    @property
    def max_rounds(self) -> int | None:
        """Largest number of rounds of a client, where disjoint cohorts say so. None: a lottery decides."""
        return self.sampling.law.max_rounds(self.rounds, self.num_clients)

    @property
    def horizon(self) -> int:
        """Rounds of one client that are accounted for."""
        return self.max_rounds_to_come + (0 if self.charges is None else int(max(self.charges, default=0)))

    @property
    def max_rounds_to_come(self) -> int:
        """Rounds in which one client may take part on top of its charges."""
        to_come = self.rounds if self.charges is None else self.to_come
        most = self.sampling.law.max_rounds(to_come, self.num_clients)
        return to_come if most is None else most

    @property
    def participation(self) -> float:
        """Chance that a client takes part in a round and answers, 1 where nothing is averaged over."""
        if (self.charges is not None and not self.to_come) or self.max_rounds is not None:
            return 1.0
        return self.cohort_size / self.num_clients * (1.0 - self.sampling.dropout_probability)

    @property
    def terms(self) -> dict[str, str]:
        """Terms on which the price of a charge depends, by name, in words. A ledger holds to one set of them.

        A mechanism that claims nothing has no price, whatever they are.
        """
        if all(isinstance(claim.loss, NonPrivate) for claim in self.mechanism.claims(self.context)):
            return {"claims": "nothing"}
        threat = self.threat
        terms = {
            "clients_per_round": str(self.cohort_size),
            "dropout_probability": str(self.sampling.dropout_probability),
            "keys": "secure" if threat.secure_keys else "from a seed",
            "mean": "plain" if threat.plain_sum else "weighted or robust",
            "secure_aggregation": "None" if threat.secure_sum is None else threat.secure_sum.settings,
            "num_byzantine": str(threat.num_byzantine),
        }
        if self.sampling.may_be_silent:
            terms["clients"] = "real"
        if self.sampling.law.secret:
            terms["cohorts"] = "secret"
        if not self.mechanism.covers_shorter:
            terms["parameters"] = str(self.context.dim)
        return terms

    def with_mechanism(self, mechanism: Mechanism) -> Run:
        """The same run by another mechanism."""
        return replace(self, mechanism=mechanism)

    @classmethod
    def ideal(
        cls, mechanism: Mechanism, context: RoundContext, rounds: int, secure_sum: SecureSum | None
    ) -> Run:
        """A run to come in which nothing goes wrong, for mechanisms that are looked at on their own.

        Every client of `context` takes part in every round, answers and follows the protocol; the mean is
        plain, and keys are secure.

        Args:
            rounds: Rounds of the run, >= 0.
            secure_sum: Guarantee that the server is handed sums only. None where it is handed messages.
        """
        everybody = Sampling(
            num_clients=len(context.cohort),
            law=FixedSize(len(context.cohort)),
            broken="",
            dropout_probability=0.0,
            real_clients=False,
            may_be_silent=False,
        )
        honest = ThreatModel(secure_sum=secure_sum, plain_sum=True, num_byzantine=0, secure_keys=True)
        return cls(
            mechanism=mechanism,
            context=context,
            rounds=rounds,
            sampling=everybody,
            threat=honest,
            charges=None,
            to_come=0,
        )
