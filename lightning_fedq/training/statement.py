"""Statement of what a finished run has protected from whom, or that it has protected nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning_fedq._lightning import callbacks_of, pl
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.digest import digest, is_met, least
from lightning_fedq.privacy.report import PrivacyReport, Row
from lightning_fedq.privacy.verdict import NO_GUARANTEE, VACUOUS, format_epsilon
from lightning_fedq.training.client_metrics import claims_something, protecting_samples
from lightning_fedq.training.figures import delta_of, of_all
from lightning_fedq.training.records import log_values
from lightning_fedq.training.spending import of_a_round, report_of
from lightning_fedq.training.unprotected import clocks

if TYPE_CHECKING:
    from lightning_fedq.training.federation import Federation


def privacy_summary(federated: Federation, trainer: pl.Trainer, report: PrivacyReport) -> dict[str, Any]:
    """Privacy of a run for its summary: a table, its unit, and notes.

    Args:
        federated: Its federation, after a fit.
    """
    target = federated.privacy_target
    asked = None if target is None else target.against
    notes = []
    if not report.secure_keys:
        notes.append(
            "Nothing is private, because the keys come from a seed: the table says what secret keys "
            "(seed: null) would give"
        )
    if report.samples is not None:
        notes.append(report.samples.line)
    if words := clocks(trainer, federated):
        notes.append(words)
    lines = digest(report, asked, masks_ran(federated), target is not None and target.secret)
    return {
        "privacy_of": f"over {report.rounds} rounds, delta {report.delta:g}, any update against any other",
        "privacy": [asdict(line) for line in lines],
        "privacy_notes": notes,
    }


def outcome(federated: Federation, trainer: pl.Trainer) -> list[str]:
    """Lines that say what a run has protected from whom: two of clients, one of samples.

    Args:
        federated: Its federation, after a fit.
    """
    said = [*_of_clients(federated, trainer), *_of_samples(trainer)]
    return [*said, *filter(None, [clocks(trainer, federated)])]


def _of_clients(federated: Federation, trainer: pl.Trainer) -> Iterator[str]:
    engine, target = federated.engine, federated.privacy_target
    if engine is None or not engine.ledger.rounds:
        return
    if isinstance(engine.keys, SeededKeys):
        yield "privacy: nothing is private, because the keys come from a seed (seed=None draws secret ones)"
        return
    context = engine.charged_context(engine.planner.expected(0, engine.mechanism))
    name = type(engine.mechanism).__name__
    if not claims_something(engine.mechanism, context):
        yield f"privacy: no client is protected, because {name} claims nothing against anybody"
        return
    delta = delta_of(federated, trainer)
    report = report_of(federated, trainer, delta)
    masked = masks_ran(federated)
    if not trainer.barebones and trainer.is_global_zero and federated.clients.cohorts != "secret":
        finite = of_all([(row.adversary, row.epsilon) for row in report.rows], masked)
        log_values(trainer, {**finite, "fed/delta": delta})
    if target is not None and target.delta not in (None, delta):
        delta = target.delta  # at which it is judged
        report = report_of(federated, trainer, delta)
    met = {row.adversary: is_met(Adversary[row.adversary], masked) for row in report.rows}
    over = f"over {report.rounds} rounds at delta {delta:g}"
    if target is None:
        first = least(report, masked)
        if _is_vacuous(first):
            best = format_epsilon(first.epsilon)
            yield (
                f"privacy {over}: nothing useful is promised; the smallest epsilon is {best}, towards "
                f"{_name(first)}"
            )
            return
        yield f"privacy {over}: epsilon {_said(first)}"
    else:
        first = report.secret if target.secret and report.secret is not None else report.row(target.against)
        over = "in every round" if target.over == "round" else over
        spent = of_a_round(federated, trainer, first) if target.over == "round" else first.epsilon
        if first.adversary == Adversary.SECAGG_SERVER.name and not masked:
            what = "NOT met: no masks ran, so the server could see every message"
        elif target.met(spent):
            what = f"met, {format_epsilon(spent)} spent"
        else:
            what = f"NOT met: {_said(first)}"
        yield (f"privacy: asked for epsilon {target.epsilon:g} towards {_name(first)} {over}: {what}")
    others = [row for row in report.all_rows if row is not first]
    parts = [_summed([row for row in others if met[row.adversary]])]
    if masked:
        broken = _summed([row for row in others if not met[row.adversary]])
        parts.append(f"if masks are broken, {broken}" if broken else "")
    yield "also: " + "; ".join(part for part in parts if part)


def masks_ran(federated: Federation) -> bool:
    """Whether the server was handed sums only."""
    return (secagg := federated.server.secure_aggregation) is not None and secagg.run != "accounted"


def _summed(rows: list[Row]) -> str:
    """Promises of some rows, and the rows that promise nothing."""
    useful = [f"{format_epsilon(r.epsilon)} towards {_name(r)}" for r in rows if not _is_vacuous(r)]
    nothing = [_name(row) for row in rows if _is_vacuous(row)]
    parts = [f"epsilon {', '.join(useful)}"] if useful else []
    return ", ".join([*parts, *([f"nothing useful towards {', '.join(nothing)}"] if nothing else [])])


def _is_vacuous(row: Row) -> bool:
    return row.verdict in (VACUOUS, NO_GUARANTEE)


def _said(row: Row) -> str:
    return f"{format_epsilon(row.epsilon)} ({row.verdict}) towards {_name(row)}"


def _name(row: Row) -> str:
    """The adversary of a row as it is called in a sentence."""
    secret = " who never learns who took part" if row.cohorts == "secret" else ""
    return f"{Adversary[row.adversary].value}{secret}"


def _of_samples(trainer: pl.Trainer) -> Iterator[str]:
    for account in protecting_samples(callbacks_of(trainer)):
        spent, delta = format_epsilon(account.epsilon(account.delta)), account.delta
        yield (
            f"privacy of a sample: epsilon {spent} at delta {delta:g}, against whoever sees messages "
            f"({account.unit})"
        )
