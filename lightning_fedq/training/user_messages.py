"""Words of a run: after a round to loggers and on the screen, at its end what it has protected from whom.

A claim is about what clients send and what is released of it. Loggers, tables, the screen and a checkpoint
hold more than that, so the page of a finished run lists what this one wrote without protection, and where.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_fedq._lightning import get_callbacks, pl, rank_zero_info, rank_zero_warn
from lightning_fedq.clients.hooks import overrides
from lightning_fedq.clients.vector import Vector
from lightning_fedq.data.sampling import in_short
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.privacy.document import adversary_phrase, headline, report_rows
from lightning_fedq.privacy.planning import GOOD, SWAMPED
from lightning_fedq.privacy.report import Row, is_met
from lightning_fedq.privacy.verdict import NO_GUARANTEE, VACUOUS, format_epsilon
from lightning_fedq.rounds import RoundRecord, RoundServer, metric_name
from lightning_fedq.training.accounts import NoiseWarning, choose_delta, finite_epsilons, make_report, stopped
from lightning_fedq.training.client_metrics import has_claim, log_values, sample_protectors
from lightning_fedq.training.settings import Federation
from lightning_fedq.wire.coding import FixedLength


def log_round(trainer: pl.Trainer, record: RoundRecord, spent: Mapping[str, float]) -> None:
    """Log a round's numbers at once. Fifteen calls of `self.log` cost a tenth of a short round.

    What is not known of this round is NaN in `spent`, and taken out: a number of an earlier round would be
    too small.
    """
    for name in (name for name, value in spent.items() if math.isnan(value)):
        trainer.callback_metrics.pop(name, None)
        trainer.logged_metrics.pop(name, None)
    spent = {name: value for name, value in spent.items() if not math.isnan(value)}
    own = {f"fed/{name}": float(v) for name, v in record.metrics().items() if v == v}
    log_values(trainer, {**own, **spent})


def warn_round_failures(record: RoundRecord, not_finite: Sequence[str] = ()) -> None:
    """Say what went wrong in a round.

    Args:
        not_finite: Names of the tensors that are not finite in some client's update.
    """
    if bad := record.non_finite_clients:
        more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
        what = f" ({in_short(not_finite)})" if not_finite else ""
        rank_zero_warn(
            f"round {record.round + 1}: the updates of clients {list(bad[:10])}{more} held a NaN or an "
            f"infinity{what} and count as zero"
        )
    if record.aborted:
        rank_zero_warn(f"round {record.round + 1} was aborted, the model stays as it was: {record.aborted}")


def report_noised_statistics(vector: Vector) -> None:
    """Say, before the first round, what of a model noise changes beside its weights, and what helps.

    Args:
        vector: What travels, with noise.
    """
    sizes, names = dict(zip(vector.sent, vector.segments, strict=True)), vector.normalised
    if names:
        count = sum(sizes[name] for name in names)
        rank_zero_info(
            f"running statistics travel with noise: {in_short(names, 4)}, {count} of {sum(vector.segments)} "
            "coordinates of an update. A small variance that is noised makes large activations: at epsilon 8 "
            "on 479 clients, BatchNorm ended at 0.39 to 0.87 where GroupNorm ended at 0.88 to 0.93 "
            "(docs/guides/batch_norm.md). GroupNorm in its place has none; buffers='frozen' keeps those of a "
            "pretrained network, buffers='local' leaves them with the clients"
        )
    if vector.constant_elements:
        rank_zero_info(
            "the row of padding_idx, and pruned weights, of "
            f"{in_short(list(vector.constant_elements), 4)} travel with "
            "noise and are put back after every round"
        )
    if unknown := [name for name in vector.shared if name not in {*names, *vector.constraints}]:
        rank_zero_info(
            f"travel with noise, which may make any number of them: {in_short(unknown, 4)}. Where one must "
            f"stay positive, as a variance, say so: Federated(constraints={{{unknown[0]!r}: 'positive'}})"
        )


def warn_of_noise(record: RoundRecord, rounds: int | None) -> None:
    """Warn after a first round whose error says that the run can hardly learn.

    Args:
        record: Record of the round; without diagnostics its error is not known.
        rounds: Rounds of the run; None or -1 where they are not known.
    """
    if math.isnan(record.snr_db) or rounds is None or rounds < 1:
        return
    noise = 10.0 ** (-record.snr_db / 10.0)
    if noise > SWAMPED * rounds:
        rank_zero_warn(
            f"this run can hardly learn: in round {record.round + 1} the squared error of the decoded mean "
            f"was {noise:.3g} times the squared mean of the updates, {noise / rounds:.3g} over {rounds} "
            f"rounds (R; no loss is seen up to {GOOD:g}). More clients, fewer parameters or a larger epsilon "
            "would help; `fedq plan` says how many",
            category=NoiseWarning,
        )


# ---- at the end --------------------------------------------------------------------------------------------


_NOTHING = (VACUOUS, NO_GUARANTEE)


def describe_outcome(federated: Federation, trainer: pl.Trainer) -> list[str]:
    """Lines that say what a run has protected from whom: two of clients, one of samples."""
    said = [*_describe_clients(federated, trainer), *_describe_samples(trainer)]
    return [*said, *filter(None, [describe_timing(trainer, federated)])]


def _describe_clients(federated: Federation, trainer: pl.Trainer) -> Iterator[str]:
    engine = federated.engine
    if engine is None or not engine.ledger.rounds:
        return
    if isinstance(engine.keys, SeededKeys):
        yield "privacy: nothing is private, because the keys come from a seed (seed=None draws secret ones)"
        return
    context = engine.charged_context(engine.planner.expected(0, engine.mechanism))
    name = type(engine.mechanism).__name__
    if not has_claim(engine.mechanism, context):
        yield f"privacy: no client is protected, because {name} claims nothing against anybody"
        return
    delta = choose_delta(federated, trainer)
    report = replace(make_report(federated, trainer, delta), ended=stopped(trainer))
    if not trainer.barebones and trainer.is_global_zero and not federated.planner.law.secret:
        finite = finite_epsilons([(row.adversary, row.epsilon) for row in report.rows], report.masked)
        log_values(trainer, {**finite, "fed/delta": delta})
    yield f"privacy: {headline(report)}"
    if report.asked is None and report.about.verdict in _NOTHING:
        return
    others = [line.row for line in report_rows(report) if line.row.name != report.about.name]
    met = _join_promises([row for row in others if is_met(row, report.masked)])
    broken = _join_promises([row for row in others if report.masked and not is_met(row, True)])
    yield "also: " + "; ".join(part for part in (met, broken and f"if masks are broken, {broken}") if part)


def _join_promises(rows: list[Row]) -> str:
    """Promises of some rows, and the rows that promise nothing."""
    useful = [
        f"{format_epsilon(r.epsilon)} towards {adversary_phrase(r)}"
        for r in rows
        if r.verdict not in _NOTHING
    ]
    nothing = [adversary_phrase(row) for row in rows if row.verdict in _NOTHING]
    parts = [f"epsilon {', '.join(useful)}"] if useful else []
    return ", ".join([*parts, *([f"nothing useful towards {', '.join(nothing)}"] if nothing else [])])


def _describe_samples(trainer: pl.Trainer) -> Iterator[str]:
    """Yield a line that says what was protected of each sample, where anything was."""
    for account in sample_protectors(get_callbacks(trainer)):
        spent, delta = format_epsilon(account.epsilon(account.delta)), account.delta
        yield (
            f"privacy of a sample: epsilon {spent} at delta {delta:g}, against whoever sees messages "
            f"({account.unit})"
        )


_OUTSIDE = tuple(f"on_{part}" for part in ("fit", "sanity", "train_start", "train_end", "exception", "load"))
_IN_ROUNDS = [
    hook
    for hook in dir(pl.Callback)
    if hook.startswith("on_") and not hook.startswith((*_OUTSIDE, "on_test", "on_predict"))
]
_SILENT = {pl.callbacks.EarlyStopping, pl.profilers.PassThroughProfiler}
"""What writes nothing in rounds, whatever its hooks; our own callbacks say so by `writes_in_rounds`."""


def has_revealing_lengths(engine: RoundServer) -> bool:
    """Does the length of messages tell of updates, so that no checkpoint may hold it?

    Not where keys come from a seed, where codes have a fixed length, and behind secure aggregation.
    """
    return not isinstance(engine.keys, SeededKeys) and _lengths_follow_from_updates(engine)


def _lengths_follow_from_updates(engine: RoundServer) -> bool:
    code = engine.mechanism.code(engine.context(engine.next_plan()))
    return not isinstance(code, FixedLength) and engine.secure_sums is None


def describe_timing(trainer: pl.Trainer, federated: Federation) -> str:
    """Sentence on the times at which a run writes, where clients draw for themselves. "" elsewhere.

    How long a round takes follows how many take part, which nobody may know there. Whatever may write while
    rounds run is named, by its class: all loggers, and every callback with a hook in rounds that is not
    known to be silent.
    """
    if not federated.planner.law.own_draws:
        return ""
    home: Any = trainer
    found = [*home.loggers, *get_callbacks(trainer), home.profiler]
    words = ", ".join(dict.fromkeys(type(one).__name__ for one in found if _may_write(one)))
    when = f"when these write during training ({words}), or " if words else ""
    return (
        f"Condition S8 holds towards nobody who sees {when}how long the run took: training takes longer the "
        "more clients take part, so that times tell how many did, and what holds is the outsider's row "
        "without secret cohorts. Keep times of files, logs, trackers and screens to yourself, or train "
        "without what is named (logger=False, enable_checkpointing=False, enable_progress_bar=False)."
    )


def _may_write(callback: Any) -> bool:
    """May it write while rounds run? A subclass of what is known may."""
    if type(callback) in _SILENT or not vars(type(callback)).get("writes_in_rounds", True):
        return False
    return not isinstance(callback, pl.Callback) or any(overrides(callback, hook) for hook in _IN_ROUNDS)


def unprotected_outputs(trainer: pl.Trainer, federated: Federation, columns: Sequence[str]) -> Iterator[str]:
    """Everything that a run has let out without noise, as far as this package wrote it.

    Args:
        columns: Columns of the run's table of rounds that hold a number.
    """
    engine, log = federated.engine, federated.client_log
    assert engine is not None
    seeded = isinstance(engine.keys, SeededKeys)
    loggers = ", ".join(type(logger).__name__ for logger in trainer.loggers)
    places = f"metrics.csv, callback_metrics{f', {loggers}' if loggers else ''}"
    checkpoints = "and in checkpoints" if seeded else "and in no checkpoint"
    if log is not None and log.names:
        names = ", ".join(f"`{name}`" for name in log.names)
        yield {
            "shared": f"Metrics that clients log in training: {names}, in {places} and pictures.",
            "local": f"Not out: {names}, which clients log in training. They are in `clients/` of this "
            "folder only, because this is a simulation that plays the clients, too; do not hand it on.",
            "none": f"Not out: {names}, which clients log in training. They were dropped.",
        }[log.choice]
    exact = [name for name in columns if name.startswith("sim_")]
    if exact:
        names = ", ".join(f"`fed/{name}`" for name in exact)
        yield (
            f"Figures made of the clients' exact updates, which only a simulation knows: {names}, "
            f"in {places}, {checkpoints}."
        )
    bad = sorted({client for record in federated.records for client in record.non_finite_clients})
    if bad:
        yield (
            f"Clients whose update held a NaN or an infinity, by name on the screen {checkpoints}: "
            f"{in_short(bad)}; how many, in `fed/{metric_name('num_non_finite')}`."
        )
    if _lengths_follow_from_updates(engine):
        yield (
            "The length of messages, which depends on the updates because the code has no fixed length: "
            f"`fed/uplink_bits`, in {places}, {checkpoints}."
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield (
            "The loss scale of 16-mixed precision, in checkpoints: the smallest that a client of the round "
            "left, with which the next round begins. One client's overflow halves it; precision='bf16-mixed' "
            "has no such scale."
        )
    if not trainer.lightning_module.automatic_optimization:
        yield (
            "How many steps clients took: `global_step`, in loggers, names of files and checkpoints. Manual "
            "optimisation may leave steps out by what it sees in a client's data, and so may what schedules "
            "and rates that it moves by hand are left at: where the client with the most steps left them."
        )
    if federated.server.weighting == "samples":
        yield "How many samples every client holds: its weight in the mean, which the server knows."
    if not federated.planner.law.secret:
        yield (
            "How long every round took, which depends on how much data clients hold: `seconds`, in "
            "metrics.csv."
        )
    writers: list[Any] = [
        callback for callback in get_callbacks(trainer) if hasattr(callback, "unprotected_outputs")
    ]
    for callback in writers:  # of something of clients' data, who say where it went
        if line := callback.unprotected_outputs(trainer):
            yield line
    yield (
        "Metrics of validation and test, whose data count as public. What a data module or `setup` computes "
        "from all training rows is not counted (`statistics=` is). What a module or another callback hands "
        "to a logger, a file or the screen by itself (`self.logger.experiment`, `print`) is not seen here."
    )
