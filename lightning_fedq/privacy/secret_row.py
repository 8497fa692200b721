"""Report row of an outsider who never learns who took part: its epsilon, or the reason why there is none.

The row depends on the numbers of clients, of clients in a cohort and of released rounds. It never depends on
how often single clients were charged, because that would reveal who was drawn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import lightning_fedq.privacy.assumptions as kind
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.row import Row
from lightning_fedq.privacy.sampled import find_amplification_obstacle, find_secrecy_obstacle
from lightning_fedq.privacy.verdict import VACUOUS, VACUOUS_EPSILON, verdict

if TYPE_CHECKING:
    from lightning_fedq.privacy.account import Account

CONDITIONS = tuple(
    kind.SECRET_SAMPLE(sentence)
    for sentence in (
        "S1: every cohort is a uniform draw of fixed size, by a key that only the server has",
        "S2: every released round has its own draw, and none was begun twice",
        "S3: the set of clients is fixed, and every drawn client answers",
        "S4: clients are treated identically: one mechanism, equal weights, no pairs, no Byzantine clients",
        "S5: clients keep nothing from one round to the next, and none has a limit of its own",
        "S6: the end of the run and the choice of the model follow from released models and public data",
        "S7: the noise of rounds is independent",
        "S8: nothing else that depends on the draw is revealed: no server's memory, no logs or files of "
        "clients, no duration of a round",
        "S9: the ledger has charges of this training only",
        "S10: the claim is about any two updates and a whole round",
    )
)
"""Conditions of the row, by name. A law of cohorts may replace conditions by others of the same name."""
NOTE = (
    "Cohorts are secret: no figure of this page depends on who was drawn. If it becomes known who took part, "
    "the outsider's other row holds instead, on average over the draw. The server knows who took part, and "
    "every other row is about an adversary that may know."
)


def secret_row(blank: Row, account: Account, broken: str) -> Row:
    """Return the row of an outsider who never learns who took part.

    Args:
        blank: Row of an outsider who may learn who took part. It is not changed.
        account: Account of the run. Each of its rounds is released and has its own draw.
        broken: Name of a condition that this run does not meet, with the cure. "" for none.

    Returns:
        A new row, without a guarantee if a condition is not met.
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
