"""Notes of a privacy report: how to read the numbers, and what they count on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.row import Row
from lightning_fedq.privacy.verdict import NO_GUARANTEE, format_epsilon

if TYPE_CHECKING:
    from lightning_fedq.privacy.account import Account
    from lightning_fedq.privacy.client_spending import Population
    from lightning_fedq.privacy.run import Run

_SECRET = (
    "Cohorts are secret: no figure of this page depends on who was drawn. If it becomes known who took part, "
    "the outsider's other row holds instead, on average over the draw. The server knows who took part, and "
    "every other row is about an adversary that may know."
)


def notes_on(account: Account, population: Population, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the notes of a report, a few sentences each.

    Args:
        account: Account of the run.
        population: Clients of the run by claims and charges.
        rows: Rows of the report, one per adversary.
    """
    law = account.run.sampling.law
    public = "" if law.secret else ", cohorts and groups"
    yield (
        "Epsilon bounds what an adversary learns about all updates of one client in the run. For the two "
        "inputs that are compared, the probability of any set of outcomes under one input is at most "
        f"e^epsilon times its probability under the other, plus delta = {account.delta:g}. (Delta does not "
        "bound the probability of an outcome that changes the odds by more. For Gaussian noise and delta = "
        "1e-5, that probability is 111 delta at epsilon 0.1, 16 delta at 1 and 6 delta at 4.)"
    )
    yield f"Ranges{public} are public and follow from released models only, so they cost nothing."
    yield "Statements that rest on a key agreement are computational."
    if population.num_groups > 1:
        yield (
            "Clients have different epsilons. Every row is about the client with the least protection "
            f"(of {population.num_groups} kinds), whether a cohort had that client or not."
        )
    if note := law.note(account.run.rounds, account.run.num_clients):
        yield note
    yield from _notes_on_participation(account.run, population.finished)
    yield from _notes_on_answers(account.run)
    yield from _notes_on_pooling(rows, account)


def _notes_on_participation(run: Run, finished: bool) -> Iterator[str]:
    """Yield notes on how often the rows assume that a client takes part."""
    most_rounds = run.max_rounds
    if finished:
        yield (
            "Every row is about the client that was charged most often. The adversary is assumed to know who "
            "was drawn how often. Each repeated attempt counts, and sampling gives no amplification."
        )
    elif run.sampling.law.secret:
        if most_rounds is None:
            yield (
                f"A client takes part in a round with probability {run.participation:.4g}. The rows of other "
                "adversaries than the outsider average over this draw, because a client's spending would "
                "reveal who was drawn."
            )
        else:
            yield (
                f"A client takes part in {most_rounds} rounds at most. The rows of other adversaries than "
                "the outsider assume that these know in which."
            )
        yield _SECRET
    elif run.participation < 1.0 and most_rounds is None:
        top = "" if run.charges is None else ", in addition to what each client has been charged for"
        yield (
            f"A client takes part in a round with probability {run.participation:.4g}, whatever its data. "
            f"This is a run to come, and its epsilon averages over the draw of the cohorts{top}. "
            "A client that is drawn more often than others will have spent more, and the report of the "
            "finished run states how much. "
            "In a round in which a client takes part, sampling gives no amplification."
        )


def _notes_on_answers(run: Run) -> Iterator[str]:
    """Yield notes on clients that do not answer, and on a server that may leave clients out."""
    masked = run.threat.secure_sum is not None
    if run.min_answers is not None:
        enforced = (
            "without which no sum is opened (SecAgg(threshold=...) sets the number), or on as many as the "
            "mechanism sets (max_dropped_clients)."
        )
        alone = (
            "its own, because nothing makes others answer. Secure aggregation would, and so would a "
            "mechanism that sets how many may be missing (max_dropped_clients)."
        )
        yield (
            "Clients may be silent. The protection of a client in a sum counts on "
            f"{run.min_answers} of {run.cohort_size} answers, {enforced if masked else alone}"
        )
    if run.sampling.dropout_probability > 0.0:
        yield "Dropouts are assumed to be independent of the data and caused by nobody."
    if masked and run.min_survivors is None:
        yield (
            "The server behind secure aggregation is assumed to follow the protocol. A server that can force "
            "clients out voids the rows about sums. With SecAgg(active=True), clients insist on a number of "
            "survivors, and the rows count on those alone."
        )


def _notes_on_pooling(rows: Sequence[Row], account: Account) -> Iterator[str]:
    """Yield a note on clients that pool what they know, if one curious client has a guarantee for itself."""
    by_name = {row.adversary: row for row in rows}
    curious, behind = by_name[Adversary.CLIENT.name], by_name[Adversary.SECAGG_SERVER.name]
    if curious.verdict == NO_GUARANTEE or curious.colluders == math.inf:
        return
    about = f"{curious.colluders:g} clients that pool what they know"
    if curious.colluders == 1:
        about = "one client that works alone"
    start = f"The row of the curious client is about {about}."
    count = account.num_colluding
    several = f"{count} that pool what they know (max_colluding_fraction) have"
    if account.run.threat.secure_sum is None or count <= curious.colluders:
        yield (
            f"{start} Several that pool what they know may learn more: SecAgg(max_colluding_fraction=...) "
            "states for how many the page gives an epsilon."
        )
    elif behind.verdict == NO_GUARANTEE:
        yield f"{start} {several} no guarantee, because {behind.reason}."
    else:
        least = f"epsilon {format_epsilon(behind.epsilon)} at most"
        yield f"{start} {several} {least}, as the server behind secure aggregation with them."
