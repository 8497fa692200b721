"""The row of an outsider who never learns who took part: an epsilon of the procedure, or why there is none.

It hangs on the numbers of clients, of a cohort's and of released rounds, never on who was charged how often:
that would tell who was drawn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.sampled import find_amplification_obstacle, find_secrecy_obstacle
from lightning_fedq.privacy.verdict import VACUOUS, VACUOUS_EPSILON, verdict

SECRET_COHORTS = ", cohorts secret"
"""What the name of an adversary has behind it."""
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
"""Conditions of the row, by name; a law of cohorts may have others of the same names."""
NOTE = (
    "Cohorts are secret: no figure of this page depends on who was drawn. If it becomes known who took part, "
    "the outsider's other row is what holds, on average over the draw. The server "
    "knows, and every other row is about somebody who may."
)


def adversary_title(name: str) -> str:
    """Name of an adversary for a reader, from that of a row.

    Args:
        name: Name of a member of `Adversary`; behind it may be ", cohorts secret".

    Example:
        >>> adversary_title("OUTSIDER, cohorts secret")
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
    law, clients, rounds = run.sampling.law, run.num_clients, run.rounds
    named = {line.partition(":")[0]: line for line in (*CONDITIONS, *law.own_conditions)}
    assumptions = (*claim.assumptions, *named.values())
    row = replace(blank, cohorts="secret", assumptions=assumptions, advice="")
    row = replace(row, epsilon_unit=None, infinite_mass=0.0)
    broken = broken or find_secrecy_obstacle(run.sampling, run.threat.plain_sum, run.threat.num_byzantine)
    if why := broken or find_amplification_obstacle(run.mechanism, claim, law, clients):
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
        method=law.method(rounds, clients),
        verdict=word,
        reason=reason,
    )
