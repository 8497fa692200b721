"""Statement of what a finished run has protected from whom, or that it has protected nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_fedq._lightning import callbacks_of, pl
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.privacy.document import headline, lines, name_of
from lightning_fedq.privacy.report import Row, is_met
from lightning_fedq.privacy.verdict import NO_GUARANTEE, VACUOUS, format_epsilon
from lightning_fedq.training.client_metrics import claims_something, protecting_samples
from lightning_fedq.training.figures import delta_of, of_all
from lightning_fedq.training.records import log_values
from lightning_fedq.training.spending import report_of
from lightning_fedq.training.unprotected import clocks

if TYPE_CHECKING:
    from lightning_fedq.training.federation import Federation

_NOTHING = (VACUOUS, NO_GUARANTEE)


def outcome(federated: Federation, trainer: pl.Trainer) -> list[str]:
    """Lines that say what a run has protected from whom: two of clients, one of samples.

    Args:
        federated: Its federation, after a fit.
    """
    said = [*_of_clients(federated, trainer), *_of_samples(trainer)]
    return [*said, *filter(None, [clocks(trainer, federated)])]


def _of_clients(federated: Federation, trainer: pl.Trainer) -> Iterator[str]:
    engine = federated.engine
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
    if not trainer.barebones and trainer.is_global_zero and federated.clients.cohorts != "secret":
        finite = of_all([(row.adversary, row.epsilon) for row in report.rows], report.masked)
        log_values(trainer, {**finite, "fed/delta": delta})
    yield f"privacy: {headline(report)}"
    if report.asked is None and report.about.verdict in _NOTHING:
        return
    others = [line.row for line in lines(report) if line.row.name != report.about.name]
    met = _summed([row for row in others if is_met(row, report.masked)])
    broken = _summed([row for row in others if report.masked and not is_met(row, True)])
    yield "also: " + "; ".join(part for part in (met, broken and f"if masks are broken, {broken}") if part)


def _summed(rows: list[Row]) -> str:
    """Promises of some rows, and the rows that promise nothing."""
    useful = [f"{format_epsilon(r.epsilon)} towards {name_of(r)}" for r in rows if r.verdict not in _NOTHING]
    nothing = [name_of(row) for row in rows if row.verdict in _NOTHING]
    parts = [f"epsilon {', '.join(useful)}"] if useful else []
    return ", ".join([*parts, *([f"nothing useful towards {', '.join(nothing)}"] if nothing else [])])


def _of_samples(trainer: pl.Trainer) -> Iterator[str]:
    """Yield a line that says what was protected of each sample, where anything was."""
    for account in protecting_samples(callbacks_of(trainer)):
        spent, delta = format_epsilon(account.epsilon(account.delta)), account.delta
        yield (
            f"privacy of a sample: epsilon {spent} at delta {delta:g}, against whoever sees messages "
            f"({account.unit})"
        )
