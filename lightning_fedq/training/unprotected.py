"""Unprotected outputs of a run beside messages and models: a list for its privacy page.

A claim is about what clients send and what is released of it. Loggers, tables, the screen and a checkpoint
hold more than that, so the page of a finished run says what this one wrote and where it went.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_fedq._lightning import callbacks_of, pl
from lightning_fedq.clients.hooks import overrides
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.rounds import RoundServer, metric_name
from lightning_fedq.wire.coding import FixedLength

if TYPE_CHECKING:
    from lightning_fedq.training.federation import Federation

_NAMED = 10
"""Clients that a line names."""

_OUTSIDE = tuple(f"on_{part}" for part in ("fit", "sanity", "train_start", "train_end", "exception", "load"))
_IN_ROUNDS = [
    hook
    for hook in dir(pl.Callback)
    if hook.startswith("on_") and not hook.startswith((*_OUTSIDE, "on_test", "on_predict"))
]
_SILENT = {pl.callbacks.EarlyStopping, pl.profilers.PassThroughProfiler}
"""What writes nothing in rounds, whatever its hooks; our own callbacks say so by `writes_in_rounds`."""


def lengths_tell(engine: RoundServer) -> bool:
    """Does the length of messages tell of updates, so that no checkpoint may hold it?

    Not where keys come from a seed, where codes have a fixed length, and behind secure aggregation.
    """
    return not isinstance(engine.keys, SeededKeys) and _lengths_follow_from_updates(engine)


def _lengths_follow_from_updates(engine: RoundServer) -> bool:
    code = engine.mechanism.code(engine.context(engine.coming_plan()))
    return not isinstance(code, FixedLength) and engine.secure_sums is None


def clocks(trainer: pl.Trainer, federated: Federation) -> str:
    """Sentence on the times at which a run writes, where clients draw for themselves. "" elsewhere.

    How long a round takes follows how many take part, which nobody may know there. Whatever may write while
    rounds run is named, by its class: all loggers, and every callback with a hook in rounds that is not
    known to be silent.
    """
    if not federated.planner.own_draws:
        return ""
    home: Any = trainer
    found = [*home.loggers, *callbacks_of(trainer), home.profiler]
    words = ", ".join(dict.fromkeys(type(one).__name__ for one in found if _may_write(one)))
    when = f"when these write during training ({words}), or " if words else ""
    return (
        f"Condition S8 holds towards nobody who sees {when}how long the run took: training takes longer the "
        "more clients take part, so that times tell how many did, and what holds is the outsider's row "
        "without secret cohorts. Keep times of files, logs, trackers and screens to yourself, or train "
        "without what is named (logger=False, enable_checkpointing=False, enable_progress_bar=False)."
    )


def _may_write(one: Any) -> bool:
    """May it write while rounds run? A subclass of what is known may."""
    if type(one) in _SILENT or not vars(type(one)).get("writes_in_rounds", True):
        return False
    return not isinstance(one, pl.Callback) or any(overrides(one, hook) for hook in _IN_ROUNDS)


def what_left(trainer: pl.Trainer, federated: Federation, columns: Sequence[str]) -> tuple[str, ...]:
    """Everything that a run has let out without noise, as far as this package wrote it.

    Args:
        trainer: After a fit.
        columns: Columns of the run's table of rounds that hold a number.
    """
    return tuple(line for line in _lines(trainer, federated, columns) if line)


def _lines(trainer: pl.Trainer, federated: Federation, columns: Sequence[str]) -> Iterator[str]:
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
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        yield (
            f"Clients whose update held a NaN or an infinity, by name on the screen {checkpoints}: "
            f"{bad[:_NAMED]}{more}; how many, in `fed/{metric_name('num_non_finite')}`."
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
    if federated.clients.cohorts == "known":
        yield (
            "How long every round took, which depends on how much data clients hold: `seconds`, in "
            "metrics.csv."
        )
    writers: list[Any] = [callback for callback in callbacks_of(trainer) if hasattr(callback, "lets_out")]
    for callback in writers:  # of something of clients' data, who say where it went
        yield callback.lets_out(trainer)
    yield (
        "Metrics of validation and test, whose data count as public. What a data module or `setup` computes "
        "from all training rows is not counted (`statistics=` is). What a module or another callback hands "
        "to a logger, a file or the screen by itself (`self.logger.experiment`, `print`) is not seen here."
    )
