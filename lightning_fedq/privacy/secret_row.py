"""The row of an outsider who never learns who took part: an epsilon of the procedure, or why there is none.

It hangs on the numbers of clients, of a cohort's and of released rounds, never on who was charged how often:
that would tell who was drawn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.run import Participation, Run
from lightning_fedq.privacy.sampled import why_no_secret
from lightning_fedq.privacy.verdict import VACUOUS, VACUOUS_EPSILON, verdict

SECRET_COHORTS = ", cohorts secret"
"""What the name of an adversary has behind it."""
METHOD = "sampling without replacement, one client's update replaced, privacy loss distribution, pessimistic"
CONDITIONS = (
    "S1: every cohort is a uniform draw of fixed size, by a key that only the server has",
    "S2: every released round has a draw of its own; none was begun twice",
    "S3: the roster is fixed and everybody who is drawn answers",
    "S4: clients are alike: one mechanism, equal weights, nobody in pairs, nobody who lies",
    "S5: clients keep nothing from one round to the next, and none has a limit of its own",
    "S6: when the run ends and which model is taken follow from released models and public data",
    "S7: the noise of rounds is independent",
    "S8: nothing else that depends on the draw gets out: no server's memory, no logs or files of clients, no "
    "duration of a round",
    "S9: the ledger holds this one training",
    "S10: the claim is about any two updates and a whole round",
)
"""Conditions of the row, by name."""
_OF_OWN_DRAWS = {
    "S1": {
        "poisson": "S1: every client draws for itself, independently of all others and anew in every round, "
        "whether it takes part, by a key that only the server has",
        "allocated": "S1: every client draws one round of every block for itself, uniformly, independently "
        "of all others and of all other blocks, by a key that only the server has",
    },
    "S2": dict.fromkeys(
        ("poisson", "allocated"), "S2: no round was begun twice; one of nobody counts as one"
    ),
    "S8": dict.fromkeys(
        ("poisson", "allocated"),
        "S8: nothing else that depends on the draw gets out, how many took part included: no server's "
        "memory, no logs or files of clients, no duration of a round, no number of messages or bytes",
    ),
}
_ADDER_ALONE = (
    "S11: noise is the adder's alone, and it and the divisor are those of the expected cohort, whoever is "
    "there; what a client sends does not depend on who trains beside it, but for the rounding of floats"
)
_METHODS: dict[str, str] = {
    "random": METHOD,
    "poisson": "Poisson sampling behind a trusted adder, one client's update replaced, privacy loss "
    "distribution, pessimistic",
    "allocated": "random allocation behind a trusted adder, one client's update replaced, privacy loss "
    "distribution of blocks, pessimistic",
}


def conditions_of(participation: Participation) -> tuple[str, ...]:
    """Conditions of the row, by name, for a way to draw."""
    if participation not in ("poisson", "allocated"):
        return CONDITIONS
    named = {line.partition(":")[0]: line for line in CONDITIONS}
    named |= {name: lines[participation] for name, lines in _OF_OWN_DRAWS.items()}
    return (*named.values(), _ADDER_ALONE)


def _method(run: Run) -> str:
    """Method of the row, and the numbers that it takes."""
    size, population, rounds = run.cohort_size, run.num_clients, run.rounds
    numbers = f"{size} of {population} clients, {rounds} rounds"
    if run.sampling.participation == "poisson":
        numbers = f"every client with chance {size}/{population}, {rounds} rounds"
    elif run.sampling.participation == "allocated":
        numbers = f"one of {population // size} rounds a block, {run.most_rounds} blocks for {rounds} rounds"
    return f"{_METHODS[run.sampling.participation]}; {numbers}"


NOTE = (
    "Cohorts are secret: no figure of this page depends on who was drawn. If it becomes known who took part, "
    "the outsider's other row is what holds, on average over the draw. The server "
    "knows, and every other row is about somebody who may."
)


def title_of(name: str) -> str:
    """Name of an adversary for a reader, from that of a row.

    Args:
        name: Name of a member of `Adversary`; behind it may be ", cohorts secret".

    Example:
        >>> title_of("OUTSIDER, cohorts secret")
        'outsider, cohorts secret'
    """
    member, comma, counts_on = name.partition(",")
    return f"{Adversary[member].title}{comma}{counts_on}"


def secret_row(blank: Any, account: Account, broken: str) -> Any:
    """The row of an outsider who never learns who took part.

    Args:
        blank: The `report.Row` of an outsider who may learn it; another one is returned.
        account: The run, at a delta; each of its rounds is released and has a draw of its own.
        broken: Condition that this run has not kept, by name, with the cure; "" for none.
    """
    claim, run = account.claims()[Adversary.OUTSIDER], account.run
    size, population, rounds = run.cohort_size, run.num_clients, run.rounds
    assumptions = (*claim.assumptions, *conditions_of(run.sampling.participation))
    row = replace(blank, cohorts="secret", assumptions=assumptions, advice="")
    row = replace(row, epsilon_unit=None, infinite_mass=0.0)
    broken = broken or _broken_by(run)
    drawn = run.sampling.participation
    if why := broken or why_no_secret(run.mechanism, claim, size, population, drawn):
        return row.refused(f"secret cohorts need {why}")
    spent = account.secret(claim, rounds)
    word, reason = verdict(spent), ""
    if word == VACUOUS:
        reason = f"epsilon is above {VACUOUS_EPSILON:g}: the bound excludes nothing"
    return replace(
        row,
        epsilon_round=account.secret(claim, min(rounds, 1)),
        epsilon_run=spent,
        epsilon_any_two=spent,
        method=_method(run),
        verdict=word,
        reason=reason,
    )


def _broken_by(run: Run) -> str:
    """Condition that a run does not keep, by name, with the cure. "" for none."""
    if run.sampling.dropout_probability > 0.0 or run.sampling.may_be_silent:
        return "S3, everybody who is drawn answers: clients may be silent here; use dropout_probability=0"
    if not run.threat.plain_sum:
        return (
            "S4, a plain mean: here are weights or a robust rule; use weighting='uniform' and no aggregator"
        )
    if run.threat.num_byzantine:
        return "S4, clients that run the protocol: some of them lie; leave ByzantineClients out"
    return ""
