"""Description of a run: everything that a privacy statement about it may use, and nothing else.

Report, target, budget, plan and loggers take a `Run`, a delta and an adversary. No field has a default, so
the description can't contain the weakest adversary because a setting was forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_fedq.mechanisms.interface import Mechanism, NonPrivate, RoundContext
from lightning_fedq.privacy.cohorts import CohortLaw, FixedSize
from lightning_fedq.privacy.collusion import NOBODY, Colluders


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Participation of clients in a run.

    Args:
        num_clients: Number of clients of the federation, from whom cohorts are drawn.
        law: Law of cohorts.
        broken: Name of a condition of secret cohorts that the run does not meet, with the cure. "" for none.
        dropout_probability: Probability that a client of a cohort does not answer.
        real_clients: Whether clients are machines of a deployment. Reports then state an assumption on the
            code that they run.
        may_be_silent: Whether any number of clients, and any of them, may be silent (real clients, a
            deadline).

    Raises:
        ValueError: If a number is out of range, or the law has no cohort in such a federation.
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
    """Guarantee of a secure aggregation for the cohorts of a run, made by `SecAgg.guarantee`.

    Args:
        colluders: Clients that may collude with the server. Masks, noise and report use the same numbers.
        opened_log2: log2 of the probability that one attempt reveals more than its sum. Delta covers it.
        min_survivors: Smallest number of clients that confirm a sum, where the server may lie about dropouts
            (malicious). Such a server may leave out all other clients. None is a server that follows the
            protocol (honest but curious).
        min_summands: Smallest number of messages whose sum is opened, >= 1.
        ran: Whether masks really ran, so that the server saw sums only.
        settings: Protocol with its settings, as Python code. A ledger adds up charges of equal settings only.
        statement: What the server may do, and how likely masks reveal more than sums, in words.
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
    """Check that colluders are not counted for a random draw from all clients if a rule names the clients.

    Raises:
        ValueError: If they are, with the cure.
    """
    if colluders.drawn and not law.of_all:
        raise ValueError(
            f"max_colluding_fraction={colluders.fraction:g} assumes a draw from all clients, but the "
            f"clients of {law} "
            "may all collude. Use SecAgg(active=True, ...), max_colluding_fraction=0, or another law."
        )


@dataclass(frozen=True, kw_only=True)
class ThreatModel:
    """Trust in the parties, and what they receive.

    Args:
        secure_sum: Guarantee that the server receives sums only. None where it receives messages.
        plain_sum: Whether the model depends on the messages only through their plain sum, without weights or
            a robust rule.
        num_byzantine: Largest number of clients of a cohort that do not run the protocol. They hide nobody.
        secure_keys: Whether keys come from the operating system. With keys from a seed, nothing is private.

    Raises:
        ValueError: If num_byzantine < 0.
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
    """Description of a run, planned or so far.

    Args:
        mechanism: Mechanism that encodes every message.
        context: A round of the run: cohort, groups, segments. Its vector is the longest one that was charged
            for.
        rounds: Number of rounds of the run, >= 0. With secret cohorts, the number of released rounds.
        sampling: Participation of clients.
        threat: Trust in the parties, and what they receive.
        charges: `(num_clients,)` number of rounds for which each client was charged. None before the first
            charge, and with secret cohorts.
        to_come: Number of rounds that are not charged yet, where charges are given. Otherwise 0.

    Raises:
        ValueError: If parts of the description contradict each other.
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
                        f"{name} must be in [1, cohort = {size}], got {value} (see SecAgg.guarantee)"
                    )
            colluders, num_byzantine = sums.colluders, self.threat.num_byzantine
            check_colluders(self.sampling.law, colluders)
            expected = replace(colluders, clients=self.num_clients, cohort=size, byzantine=num_byzantine)
            if colluders not in (NOBODY, expected):
                raise ValueError(
                    f"colluders are for cohorts of {colluders.cohort} of {colluders.clients} clients, got "
                    f"{size} of {self.num_clients}, or for {colluders.byzantine} Byzantine clients, got "
                    f"{num_byzantine} (see SecAgg.guarantee)"
                )
        if self.sampling.law.cohort_size(self.num_clients) != size:
            raise ValueError(f"a round of {size} clients does not fit {self.sampling.law}")
        if self.sampling.law.secret and self.charges is not None:
            raise ValueError("charges reveal who was drawn, but cohorts are secret. Leave charges out.")

    @property
    def cohort_size(self) -> int:
        """Number of clients of a round."""
        return len(self.context.cohort)

    @property
    def num_clients(self) -> int:
        """Number of clients of the federation."""
        return self.sampling.num_clients

    @property
    def min_survivors(self) -> int | None:
        """Smallest number of clients that confirm a sum. None if the server does not lie about dropouts."""
        sums = self.threat.secure_sum
        return None if sums is None else sums.min_survivors

    @property
    def min_answers(self) -> int | None:
        """Smallest number of answers in a sum, where clients may be silent. None where no client may."""
        if not self.sampling.may_be_silent:
            return None
        return 1 if self.threat.secure_sum is None else self.threat.secure_sum.min_summands

    @property
    def colluders(self) -> Colluders:
        """Clients that may collude with the server behind secure aggregation, and Byzantine clients."""
        sums, size = self.threat.secure_sum, self.cohort_size
        if sums is not None and sums.colluders != NOBODY:
            return sums.colluders
        return Colluders(0.0, self.num_clients, size, chosen=False, byzantine=self.threat.num_byzantine)

    @property
    def masks_open(self) -> float:
        """Probability that one attempt reveals more than its sum to the server behind secure aggregation."""
        return 0.0 if self.threat.secure_sum is None else 2.0**self.threat.secure_sum.opened_log2

    @property
    def max_rounds(self) -> int | None:
        """Largest number of rounds of one client. None if a random draw decides."""
        return self.sampling.law.max_rounds(self.rounds, self.num_clients)

    @property
    def horizon(self) -> int:
        """Number of rounds of one client that are accounted for."""
        charged = torch.as_tensor(() if self.charges is None else self.charges)
        return self.max_rounds_to_come + (int(charged.max()) if len(charged) else 0)

    @property
    def max_rounds_to_come(self) -> int:
        """Largest number of rounds in which one client may take part after those that it was charged for."""
        to_come = self.rounds if self.charges is None else self.to_come
        max_rounds = self.sampling.law.max_rounds(to_come, self.num_clients)
        return to_come if max_rounds is None else max_rounds

    @property
    def participation(self) -> float:
        """Probability that a client takes part in a round and answers. 1 where nothing is averaged over."""
        if (self.charges is not None and not self.to_come) or self.max_rounds is not None:
            return 1.0
        return self.cohort_size / self.num_clients * (1.0 - self.sampling.dropout_probability)

    @property
    def terms(self) -> dict[str, str]:
        """Terms on which the price of a charge depends, by name. All charges of a ledger have the same terms.

        A mechanism that claims nothing has no price, so its terms are always the same.
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
        if not self.mechanism.price_grows_with_dim:
            terms["parameters"] = str(self.context.dim)
        return terms

    @classmethod
    def ideal(
        cls, mechanism: Mechanism, context: RoundContext, rounds: int, secure_sum: SecureSum | None
    ) -> Run:
        """Return a planned run without faults, for statements about a mechanism by itself.

        Every client of `context` takes part in every round, answers and follows the protocol. The mean is
        plain, and keys are secure.

        Args:
            mechanism: Mechanism that encodes every message.
            context: A round of the run.
            rounds: Number of rounds of the run, >= 0.
            secure_sum: Guarantee that the server receives sums only. None where it receives messages.
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
