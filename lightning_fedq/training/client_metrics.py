"""Where it goes what clients log while they train: to the loggers, to a file of their own, or nowhere.

A metric of a training step follows from one client's data without noise. A claim about messages and models
says nothing about it, so a run that claims something keeps it with the clients unless it is told otherwise.
What is logged in validation is the server's and passes. Where samples are protected without a federation,
what is logged in training is logged, and nobody decides by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from lightning_fedq._lightning import callbacks_of, pl, rank_zero_info
from lightning_fedq.clients.undo import Undo
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms.interface import Mechanism, NonPrivate, RoundContext
from lightning_fedq.rounds import RoundEngine
from lightning_fedq.training.round_loop import told_results

ClientMetricsChoice = Literal["local", "shared", "none"]
_EXACT, _LENGTHS = "fed/sim_", "fed/uplink_bits"


def claims_something(mechanism: Mechanism, context: RoundContext) -> bool:
    """Does a mechanism protect clients against anybody?"""
    return any(not isinstance(claim.loss, NonPrivate) for claim in mechanism.claims(context))


def log_figure(module: pl.LightningModule, name: str, value: float, prog_bar: bool = False) -> None:
    """Log a figure of the federation: no metric of clients, of which nobody who watches these is told."""
    results: Any = module.trainer._results
    with Undo() as undo:
        if hasattr(results, "tell"):
            undo.replace(results, "tell", lambda name, value: None)
        module.log(name, value, prog_bar, on_step=False, on_epoch=True, batch_size=1)


def protecting_samples(callbacks: Iterable[object]) -> list[Any]:
    """Callbacks that claim privacy for the samples that clients train on: `protects_samples` says so."""
    return [one for one in callbacks if getattr(one, "protects_samples", False)]


def watch_training_log(trainer: pl.Trainer, undo: Undo) -> None:
    """Watch what training logs until undone, and refuse whoever decides by it, or names files by it.

    Args:
        trainer: Trainer of the fit in progress.

    Raises:
        ValueError: If a callback looks at the losses of training steps by itself, and decides by them. When
            a metric is logged: if a callback or a schedule decides by it.
    """
    check_spikes(trainer)
    seen, module = set[str](), trainer.lightning_module

    def look(name: str, value: Any) -> None:
        if name in seen or module._current_fx_name == "on_train_start":
            return
        seen.add(name)
        why = "which training logs, without noise: no epsilon covers {}; {} a metric of the validation"
        of_files = why.format("the files' names, which checkpoints hold", "take")
        for who, monitor in monitors_of(trainer):
            if monitor in forks(name):
                raise ValueError(f"{who} watches {monitor!r}, {why.format('what it decides', 'watch')}")
        for who, metric in in_file_names(trainer):
            if metric in forks(name):
                raise ValueError(f"{who} names its files by {metric!r}, {of_files}")

    loop: Any = trainer.fit_loop.epoch_loop
    undo.replace(loop, "_results", told_results(True, look))


def check_spikes(trainer: pl.Trainer) -> None:
    """Refuse to end a private run by the loss of a training step.

    Raises:
        ValueError: Naming the callback.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, pl.callbacks.SpikeDetection):
            raise ValueError(
                f"{type(callback).__name__} ends the run by the exact losses of training steps, and its "
                "state in checkpoints holds the last one: no epsilon covers either; leave it out, or "
                "stop by a metric of the validation (EarlyStopping)"
            )


def monitors_of(trainer: pl.Trainer) -> Iterator[tuple[str, str]]:
    """Who decides by which metric."""
    for callback in callbacks_of(trainer):
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and not isinstance(callback, pl.callbacks.ProgressBar):
            yield type(callback).__name__, monitor
    for config in trainer.lr_scheduler_configs:
        if config.monitor is not None:
            yield type(config.scheduler).__name__, config.monitor


def in_file_names(trainer: pl.Trainer) -> Iterator[tuple[str, str]]:
    """Who names files by which metric: `ModelCheckpoint(filename="{epoch}-{loss:.2f}")`."""
    for callback in callbacks_of(trainer):
        for template in (
            getattr(callback, "filename", None),
            getattr(callback, "CHECKPOINT_NAME_LAST", None),
        ):
            if isinstance(template, str):
                for metric in re.findall(r"\{(.*?)[:}]", template):  # as Lightning reads it
                    yield type(callback).__name__, metric


def forks(name: str) -> tuple[str, str, str]:
    """A metric's name, and those that Lightning makes of it."""
    return name, f"{name}_step", f"{name}_epoch"


def check_exact_monitors(trainer: pl.Trainer, lengths_tell: bool) -> None:
    """Refuse to choose a private run's model, or to name its files, by what only a simulation knows.

    Checkpoints keep such scores and names.

    Args:
        trainer: Trainer with all its callbacks.
        lengths_tell: Whether lengths of messages are refused, too.

    Raises:
        ValueError: Naming who watches what.
    """
    exact = (_EXACT, _LENGTHS) if lengths_tell else _EXACT
    for who, metric in in_file_names(trainer):
        if metric.startswith(exact):
            raise ValueError(
                f"{who} names its files by {metric!r}, which is made of the clients' exact updates: names, "
                "and checkpoints, which hold them, would tell it without noise; leave it out, or use a seed"
            )
    for who, monitor in monitors_of(trainer):
        if monitor.startswith(exact):
            raise ValueError(
                f"{who} watches {monitor!r}, which is made of the clients' exact updates: the model and its "
                "checkpoint would depend on it without noise; watch something else, or use a seed"
            )


def choose(
    choice: ClientMetricsChoice | None, trainer: pl.Trainer, engine: RoundEngine
) -> ClientMetricsChoice:
    """Policy for clients' metrics.

    Said in the log where nobody has chosen and something is withheld.
    """
    if choice is not None:
        return choice
    context = engine.context(engine.coming_plan())
    clients = not isinstance(engine.keys, SeededKeys) and claims_something(engine.mechanism, context)
    if not (clients or protecting_samples(callbacks_of(trainer))):
        return "shared"
    rank_zero_info(
        "what self.log says in training stays with the clients (client_metrics='local'), because this run "
        "claims privacy; Federated(client_metrics='shared') logs it without noise"
    )
    return "local"
