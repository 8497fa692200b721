"""Messages of a run to its user: logs and warnings after a round, and the privacy statement at the end.

A privacy claim covers the clients' messages and the models released from them. Loggers, tables, the screen
and checkpoints contain more than that, so the privacy page of a finished run lists outputs without
protection, and where they were written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_fedq._lightning import get_callbacks, pl, rank_zero_info, rank_zero_warn
from lightning_fedq.clients.hooks import is_own, is_shared_by_clients, overrides
from lightning_fedq.clients.vector import Vector
from lightning_fedq.data.sampling import in_short
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.privacy.document import adversary_phrase, headline
from lightning_fedq.privacy.planning import GOOD, SWAMPED
from lightning_fedq.privacy.report_rows import report_rows
from lightning_fedq.privacy.row import Row, is_met
from lightning_fedq.privacy.verdict import NO_GUARANTEE, VACUOUS, format_epsilon
from lightning_fedq.rounds import RoundRecord, RoundServer, metric_name
from lightning_fedq.training.accounts import NoiseWarning, choose_delta, finite_epsilons, make_report, stopped
from lightning_fedq.training.client_metrics import has_claim, log_values, sample_protectors
from lightning_fedq.training.settings import Federation
from lightning_fedq.wire.coding import FixedLength


def log_round(trainer: pl.Trainer, record: RoundRecord, spent: Mapping[str, float]) -> None:
    """Log the numbers of a round in one call, because 15 calls of `self.log` take 10% of a short round.

    Args:
        spent: Figures by name. NaN if not computed for this round: such a figure is removed from the
            Trainer's metrics, because its value of an earlier round would be too small.
    """
    for name in (name for name, value in spent.items() if math.isnan(value)):
        trainer.callback_metrics.pop(name, None)
        trainer.logged_metrics.pop(name, None)
    spent = {name: value for name, value in spent.items() if not math.isnan(value)}
    own = {f"fed/{name}": float(v) for name, v in record.metrics().items() if v == v}
    log_values(trainer, {**own, **spent})


def warn_round_failures(record: RoundRecord, not_finite: Sequence[str] = ()) -> None:
    """Warn about clients with updates that are not finite, and about an aborted round.

    Args:
        not_finite: Names of the tensors that are not finite in some client's update.
    """
    if bad := record.non_finite_clients:
        more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
        what = f" ({in_short(not_finite)})" if not_finite else ""
        rank_zero_warn(
            f"Round {record.round + 1}: the updates of clients {list(bad[:10])}{more} contain a NaN or an "
            f"infinity{what} and count as zero"
        )
    if record.aborted:
        rank_zero_warn(f"Round {record.round + 1} was aborted, so the model is unchanged: {record.aborted}")


def report_noised_statistics(vector: Vector) -> None:
    """Report, before the first round, the tensors other than weights that noise changes, with cures.

    A small variance with noise leads to large activations. At epsilon 8 on 479 clients, models with BatchNorm
    ended at an accuracy of 0.39 to 0.87, those with GroupNorm at 0.88 to 0.93 (docs/guides/batch_norm.md).

    Args:
        vector: Trained vector, which travels with noise.
    """
    sizes, names = dict(zip(vector.sent, vector.segments, strict=True)), vector.normalised
    if names:
        count = sum(sizes[name] for name in names)
        rank_zero_info(
            f"Running statistics travel with noise: {in_short(names, 4)}, {count} of {sum(vector.segments)} "
            "coordinates (docs/guides/batch_norm.md). Use GroupNorm, buffers='frozen' for a pretrained "
            "network, or buffers='local'"
        )
    if vector.constant_elements:
        rank_zero_info(
            "Rows of padding_idx and pruned weights are restored after every round: "
            f"{in_short(list(vector.constant_elements), 4)}. They still travel with noise"
        )
    if unknown := [name for name in vector.shared if name not in {*names, *vector.constraints}]:
        rank_zero_info(
            f"Buffers travel with noise, which may change their sign: {in_short(unknown, 4)}. For a value "
            f"that must stay positive, use Federated(constraints={{{unknown[0]!r}: 'positive'}})"
        )


FEW_STEPS = 5
"""A run with fewer steps than plain training divided by this number is reported before the first round."""


def report_steps(federation: Federation, trainer: pl.Trainer, samples: int, batch_size: int) -> None:
    """Report, before the first round, a run that takes far fewer steps than plain training.

    Args:
        samples: Number of training samples of all clients.
        batch_size: Batch size of the training loader.
    """
    batches, rounds = federation.max_batches, federation.count_rounds(trainer)
    if batches is None or not rounds or not trainer.lightning_module.automatic_optimization:
        return
    accumulated = int(trainer.accumulate_grad_batches)
    if accumulated > batches:
        rank_zero_info(
            f"accumulate_grad_batches = {accumulated} is larger than the {batches} batches of a client in a "
            "round, so each round has one step of fewer batches"
        )
    steps = math.ceil(batches / accumulated)
    plain = rounds * math.ceil(math.ceil(samples / batch_size) / accumulated)
    if steps * rounds * FEW_STEPS < plain:
        rank_zero_info(
            f"A client takes at most {steps:,} steps in a round, and the run {steps * rounds:,} in all. "
            f"Plain training of {rounds:,} epochs takes {plain:,}. Raise local_epochs or lower batch_size if "
            "the model does not learn (docs/faq.md)"
        )


def warn_of_noise(record: RoundRecord, rounds: int | None) -> None:
    """Warn after the first round if its error says that the run can hardly learn.

    Args:
        record: Record of the round. Without diagnostics its error is not known, and nothing is reported.
        rounds: Number of rounds of the run. None or -1 if not known.
    """
    if math.isnan(record.snr_db) or rounds is None or rounds < 1:
        return
    noise = 10.0 ** (-record.snr_db / 10.0)
    if noise > SWAMPED * rounds:
        rank_zero_warn(
            f"This run can hardly learn: round {record.round + 1} has a noise-to-signal ratio of "
            f"{noise:.3g}, which is {noise / rounds:.3g} over {rounds} rounds (good: up to {GOOD:g}). Use "
            "more clients, fewer parameters or a larger epsilon (`fedq plan` ranks the options)",
            category=NoiseWarning,
        )


# ---- at the end --------------------------------------------------------------------------------------------


_NOTHING = (VACUOUS, NO_GUARANTEE)


def describe_outcome(federated: Federation, trainer: pl.Trainer) -> list[str]:
    """Return lines on what a run protected against whom: two on clients, one on samples, one on timing."""
    clients, samples = list(_describe_clients(federated, trainer)), list(_describe_samples(trainer))
    return [*samples, *clients, *filter(None, [describe_timing(trainer, federated)])]


def _describe_clients(federated: Federation, trainer: pl.Trainer) -> Iterator[str]:
    engine = federated.engine
    if engine is None or not engine.ledger.rounds:
        return
    if isinstance(engine.keys, SeededKeys):
        yield "privacy: nothing is private, because the keys come from a seed (use seed=None for secret keys)"
        return
    context = engine.charged_context(engine.planner.expected(0, engine.mechanism))
    name = type(engine.mechanism).__name__
    if not has_claim(engine.mechanism, context):
        yield f"privacy: no client is protected, because {name} has no guarantee against any adversary"
        return
    delta = choose_delta(federated, trainer)
    report = replace(make_report(federated, trainer, delta), ended=stopped(federated, trainer))
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
    """Join the guarantees of some report rows, and name the adversaries without a useful one."""
    helping = [row for row in rows if row.verdict not in _NOTHING]
    useful = [f"{format_epsilon(row.epsilon)} against {adversary_phrase(row)}" for row in helping]
    nothing = [adversary_phrase(row) for row in rows if row.verdict in _NOTHING]
    parts = [f"epsilon {', '.join(useful)}"] if useful else []
    return ", ".join([*parts, *([f"nothing useful against {', '.join(nothing)}"] if nothing else [])])


def _describe_samples(trainer: pl.Trainer) -> Iterator[str]:
    """Yield a line on the privacy of single samples for each callback that protects them."""
    for account in sample_protectors(get_callbacks(trainer)):
        spent, delta = format_epsilon(account.epsilon(account.delta)), account.delta
        yield (
            f"privacy of a sample: epsilon {spent} at delta {delta:g}, against anybody who sees messages "
            f"({account.unit})"
        )


_PHASES = "fit", "sanity", "train_start", "train_end", "exception", "load", "test", "predict"
_OUTSIDE = tuple(f"on_{phase}" for phase in _PHASES)
_HOOKS = [hook for hook in dir(pl.Callback) if hook.startswith("on_")]
_IN_ROUNDS = [hook for hook in _HOOKS if not hook.startswith(_OUTSIDE)]
_SILENT = {pl.callbacks.EarlyStopping, pl.profilers.PassThroughProfiler}
"""Classes that write nothing during rounds, whatever their hooks. Our callbacks set `writes_in_rounds`."""


def has_revealing_lengths(engine: RoundServer) -> bool:
    """Return whether the length of messages reveals something about updates. Then no checkpoint contains it.

    Lengths reveal nothing if keys come from a seed (no privacy is claimed), if the code has a fixed length,
    or behind secure aggregation.
    """
    return not isinstance(engine.keys, SeededKeys) and _lengths_follow_from_updates(engine)


def _lengths_follow_from_updates(engine: RoundServer) -> bool:
    code = engine.mechanism.code(engine.context(engine.next_plan()))
    return not isinstance(code, FixedLength) and engine.secure_sums is None


def describe_timing(trainer: pl.Trainer, federated: Federation) -> str:
    """Describe how timing can reveal the cohort, if clients draw for themselves (secret cohorts). Else "".

    The length of a round depends on the number of clients that take part, which is secret then. The text
    names the classes that may write during rounds: all loggers, and each callback with a hook in rounds that
    is not known to be silent.
    """
    if not federated.planner.law.own_draws:
        return ""
    home: Any = trainer
    writers = [*home.loggers, *get_callbacks(trainer), home.profiler]
    words = ", ".join(dict.fromkeys(type(writer).__name__ for writer in writers if _may_write(writer)))
    when = f"when these write during training ({words}), or " if words else ""
    return (
        f"Condition S8 does not hold against anybody who sees {when}how long the run took. Training takes "
        "longer if more clients take part, so timing can reveal their number. Against such an observer, "
        "only the outsider's row without secret cohorts holds. Keep times of files, logs, trackers and "
        "screens secret, or train without these (logger=False, enable_checkpointing=False, "
        "enable_progress_bar=False)."
    )


def _may_write(callback: Any) -> bool:
    """Return whether a callback, logger or profiler may write during rounds. Subclasses of silent ones do."""
    if type(callback) in _SILENT or not vars(type(callback)).get("writes_in_rounds", True):
        return False
    return not isinstance(callback, pl.Callback) or any(overrides(callback, hook) for hook in _IN_ROUNDS)


def unprotected_outputs(trainer: pl.Trainer, federated: Federation, columns: Sequence[str]) -> Iterator[str]:
    """Yield a line for each output of a run that no noise protects, as far as this package wrote it.

    Args:
        columns: Columns of the run's table of rounds that contain a number.
    """
    engine, log = federated.started_engine, federated.client_log
    seeded = isinstance(engine.keys, SeededKeys)
    loggers = ", ".join(type(logger).__name__ for logger in trainer.loggers)
    places = f"metrics.csv, callback_metrics{f', {loggers}' if loggers else ''}"
    checkpoints = "and in checkpoints" if seeded else "and in no checkpoint"
    if log is not None and log.names:
        names = ", ".join(f"`{name}`" for name in log.names)
        yield {
            "shared": f"Metrics that clients log in training: {names}, in {places} and pictures.",
            "local": f"Not released: {names}, which clients log in training. They are in `clients/` of this "
            "folder only, because this is a simulation, which trains the clients, too. Do not share "
            "`clients/`.",
            "none": f"Not released: {names}, which clients log in training. They were dropped.",
        }[log.choice]
    exact = [name for name in columns if name.startswith("sim_")]
    if exact:
        names = ", ".join(f"`fed/{name}`" for name in exact)
        yield (
            f"Figures computed from the clients' exact updates, which only a simulation knows: {names}, "
            f"in {places}, {checkpoints}."
        )
    bad = sorted({client for record in federated.records for client in record.non_finite_clients})
    if bad:
        yield (
            f"Clients whose update contains a NaN or an infinity, named on the screen {checkpoints}: "
            f"{in_short(bad)}. Their number is in `fed/{metric_name('num_non_finite')}`."
        )
    if _lengths_follow_from_updates(engine):
        yield (
            "The length of messages, which depends on the updates, because the code has no fixed length: "
            f"`fed/uplink_bits`, in {places}, {checkpoints}."
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield (
            "The loss scale of 16-mixed precision, in checkpoints. It is the smallest scale of the round's "
            "clients, so one client's overflow halves it. precision='bf16-mixed' has no loss scale."
        )
    if not trainer.lightning_module.automatic_optimization:
        yield (
            "The number of steps that clients took: `global_step`, in loggers, names of files and "
            "checkpoints. Manual optimisation may skip steps because of a client's data. The same holds for "
            "schedules and rates that it moves by hand: their state is that of the client with the most "
            "steps."
        )
    if federated.server.weighting == "samples":
        yield "The number of samples of every client: its weight in the mean, which the server knows."
    if not federated.planner.law.secret:
        yield (
            "The duration of every round, which depends on how much data clients hold: `seconds`, in "
            "metrics.csv."
        )
    callbacks: list[Any] = get_callbacks(trainer)
    crossing = [one for one in callbacks if is_shared_by_clients(one) and not is_own(one)]
    if crossing:
        names = ", ".join(f"`{type(one).__name__}`" for one in crossing)
        yield (
            f"Everything that {names} keeps, logs or saves. One object with is_shared_by_clients = True sees "
            "the raw batches, losses and gradients of all clients, without noise."
        )
    for callback in callbacks:  # some write something about clients' data, and say where
        if hasattr(callback, "unprotected_outputs") and (line := callback.unprotected_outputs(trainer)):
            yield line
    yield (
        "Metrics of validation and test, whose data count as public. Not counted: values that a data module "
        "or `setup` computes from all training rows (`statistics=` is counted). Not seen: values that a "
        "module or a callback passes to a logger, a file or the screen by itself (`self.logger.experiment`, "
        "`print`)."
    )
