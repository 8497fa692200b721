"""The row of an outsider who never learns who took part: an epsilon of the procedure, or why there is none.

It hangs on the numbers of clients, of a cohort's and of released rounds, never on who was charged how often:
that would tell who was drawn.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_fedq.mechanism import Adversary, Mechanism
from lightning_fedq.privacy.sampled import why_no_secret
from lightning_fedq.privacy.setting import Setting
from lightning_fedq.privacy.verdict import NO_GUARANTEE, VACUOUS, VACUOUS_EPSILON, verdict

if TYPE_CHECKING:
    from lightning_fedq.privacy.report import Row

VIEW = "outsider who sees the released models only and never learns who took part"
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
NOTE = (
    "Cohorts are secret: no figure of this page depends on who was drawn. If it becomes known who took part, "
    "the outsider's other row is what holds, on average over the draw. The server "
    "knows, and every other row is about somebody who may."
)


def secret_row(blank: Row, mechanism: Mechanism, setting: Setting, rounds: int, broken: str) -> Row:
    """The row of an outsider who never learns who took part.

    Args:
        blank: The row of an outsider who may learn it.
        mechanism: The mechanism.
        setting: Setting of the run.
        rounds: Released rounds, each with a draw of its own.
        broken: Condition that this run has not kept, by name, with the cure; "" for none.
    """
    claim = setting.claims(mechanism)[Adversary.OUTSIDER]
    size = len(setting.context.cohort)
    population = setting.num_clients or size
    assumptions = (*claim.assumptions, *CONDITIONS)
    row = replace(blank, view=VIEW, cohorts="secret", assumptions=assumptions, advice="", remark="")
    row = replace(row, epsilon_unit=None, infinite_mass=0.0)
    broken = broken or _broken_by(setting)
    if why := broken or why_no_secret(mechanism, claim, size, population):
        return replace(
            row,
            epsilon_round=math.inf,
            epsilon_run=math.inf,
            epsilon_any_two=math.inf,
            infinite_mass=1.0,
            method="none",
            verdict=NO_GUARANTEE,
            reason=f"secret cohorts need {why}",
        )
    run = setting.secret(claim, rounds)
    word, reason = verdict(run), ""
    if word == VACUOUS:
        reason = f"epsilon is above {VACUOUS_EPSILON:g}: the bound excludes nothing"
    return replace(
        row,
        epsilon_round=setting.secret(claim, min(rounds, 1)),
        epsilon_run=run,
        epsilon_any_two=run,
        method=f"{METHOD}; {size} of {population} clients, {rounds} rounds",
        verdict=word,
        reason=reason,
    )


def _broken_by(setting: Setting) -> str:
    """Condition that a setting does not keep, by name, with the cure. "" for none."""
    if setting.dropout_probability > 0.0 or setting.fewest_answers is not None:
        return "S3, everybody who is drawn answers: clients may be silent here; use dropout_probability=0"
    if not setting.equal_weights:
        return (
            "S4, a plain mean: here are weights or a robust rule; use weighting='uniform' and no aggregator"
        )
    if setting.num_byzantine:
        return "S4, clients that run the protocol: some of them lie; leave ByzantineClients out"
    return ""
