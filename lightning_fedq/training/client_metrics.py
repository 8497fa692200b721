"""Metrics that clients log while they train, on their way to loggers, to files of their own, or nowhere.

A metric of a training step follows from one client's data without noise. A claim about messages and models
says nothing about it, so a run that claims something keeps it with the clients unless it is told otherwise.
What is logged in validation is the server's and passes. Where samples are protected without a federation,
what is logged in training is logged, and nobody decides by it.

Clients that share log into the round's results, as batches do in an ordinary training. Otherwise every client
logs into results of its own, which its own training may read, and which are dropped with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fedq._lightning import get_callbacks, pl, rank_zero_info
from lightning_fedq.clients.undo import Undo
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms.interface import Mechanism, NonPrivate, RoundContext
from lightning_fedq.rounds import RoundEngine
from lightning_fedq.training.rank_group import RankGroup

_results: Any = pl.trainer.connectors.logger_connector.result  # type: ignore[attr-defined]


class _Logged(_results._ResultMetric):  # type: ignore[misc]
    """A logged value, which Lightning moves to its device with every `log`: a copy of all that it holds."""

    def to(self, device: Any, *args: Any, **kwargs: Any) -> Any:
        """Move, unless it is a number that is there."""
        there = self.is_tensor and all(
            held.device == device for held in vars(self).values() if isinstance(held, torch.Tensor)
        )
        return self if there else super().to(device, *args, **kwargs)


class ObservedResults(_results._ResultCollection):  # type: ignore[misc]
    """Lightning's collection of logged values, which tells who wants to know what is logged.

    Args:
        training: Whether these are metrics of training, not of validation.
        on_log: Called with name and value of each before it is logged.
        reduce: How values of several ranks become one, whoever logs; None is that of the Trainer that logs.
    """

    def __init__(self, training: bool, on_log: Callable[[str, Any], None], reduce: Any = None) -> None:
        super().__init__(training)
        self.tell, self._reduce = on_log, reduce

    def __setitem__(self, key: str, value: Any) -> None:
        """Keep a new value."""
        value.__class__ = _Logged
        super().__setitem__(key, value)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Tell, and log."""
        self.tell(name, value)
        if self._reduce is not None:
            kwargs["sync_dist_fn"] = self._reduce
        super().log(fx, name, value, *args, **kwargs)


ClientMetricsChoice = Literal["local", "shared", "none"]
_EXACT, _LENGTHS = "fed/sim_", "fed/uplink_bits"


def has_claim(mechanism: Mechanism, context: RoundContext) -> bool:
    """Does a mechanism protect clients against anybody?"""
    return any(not isinstance(claim.loss, NonPrivate) for claim in mechanism.claims(context))


def has_claims(engine: RoundEngine) -> bool:
    """Are keys secret, and is something claimed of the round to come?"""
    context = engine.context(engine.next_plan())
    return not isinstance(engine.keys, SeededKeys) and has_claim(engine.mechanism, context)


def log_figure(module: pl.LightningModule, name: str, value: float, prog_bar: bool = False) -> None:
    """Log a figure of the federation: no metric of clients, of which nobody who watches these is told."""
    results: Any = module.trainer._results
    with Undo() as undo:
        if hasattr(results, "tell"):
            undo.replace(results, "tell", lambda name, value: None)
        module.log(name, value, prog_bar, on_step=False, on_epoch=True, batch_size=1)


def sample_protectors(callbacks: Iterable[object]) -> list[Any]:
    """Callbacks that claim privacy for the samples that clients train on: `protects_samples` says so."""
    return [one for one in callbacks if getattr(one, "protects_samples", False)]


def watch_training_log(trainer: pl.Trainer, undo: Undo) -> None:
    """Watch what training logs until undone, and refuse whoever decides by it, or names files by it.

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
        for who, monitor in find_monitors(trainer):
            if monitor in metric_forks(name):
                raise ValueError(f"{who} watches {monitor!r}, {why.format('what it decides', 'watch')}")
        for who, metric in find_file_name_metrics(trainer):
            if metric in metric_forks(name):
                raise ValueError(f"{who} names its files by {metric!r}, {of_files}")

    loop: Any = trainer.fit_loop.epoch_loop
    undo.replace(loop, "_results", ObservedResults(True, look))


def check_spikes(trainer: pl.Trainer) -> None:
    """Refuse to end a private run by the loss of a training step.

    Raises:
        ValueError: Naming the callback.
    """
    for callback in get_callbacks(trainer):
        if isinstance(callback, pl.callbacks.SpikeDetection):
            raise ValueError(
                f"{type(callback).__name__} ends the run by the exact losses of training steps, and its "
                "state in checkpoints holds the last one: no epsilon covers either; leave it out, or "
                "stop by a metric of the validation (EarlyStopping)"
            )


def find_monitors(trainer: pl.Trainer) -> Iterator[tuple[str, str]]:
    """Who decides by which metric."""
    for callback in get_callbacks(trainer):
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and not isinstance(callback, pl.callbacks.ProgressBar):
            yield type(callback).__name__, monitor
    for config in trainer.lr_scheduler_configs:
        if config.monitor is not None:
            yield type(config.scheduler).__name__, config.monitor


def find_file_name_metrics(trainer: pl.Trainer) -> Iterator[tuple[str, str]]:
    """Who names files by which metric: `ModelCheckpoint(filename="{epoch}-{loss:.2f}")`."""
    for callback in get_callbacks(trainer):
        for template in (
            getattr(callback, "filename", None),
            getattr(callback, "CHECKPOINT_NAME_LAST", None),
        ):
            if isinstance(template, str):
                for metric in re.findall(r"\{(.*?)[:}]", template):  # as Lightning reads it
                    yield type(callback).__name__, metric


def metric_forks(name: str) -> tuple[str, str, str]:
    """A metric's name, and those that Lightning makes of it."""
    return name, f"{name}_step", f"{name}_epoch"


def check_exact_monitors(trainer: pl.Trainer, has_revealing_lengths: bool) -> None:
    """Refuse to choose a private run's model, or to name its files, by what only a simulation knows.

    Checkpoints keep such scores and names.

    Args:
        has_revealing_lengths: Whether lengths of messages are refused, too.

    Raises:
        ValueError: Naming who watches what.
    """
    exact = (_EXACT, _LENGTHS) if has_revealing_lengths else _EXACT
    for who, metric in find_file_name_metrics(trainer):
        if metric.startswith(exact):
            raise ValueError(
                f"{who} names its files by {metric!r}, which is made of the clients' exact updates: names, "
                "and checkpoints, which hold them, would tell it without noise; leave it out, or use a seed"
            )
    for who, monitor in find_monitors(trainer):
        if monitor.startswith(exact):
            raise ValueError(
                f"{who} watches {monitor!r}, which is made of the clients' exact updates: the model and its "
                "checkpoint would depend on it without noise; watch something else, or use a seed"
            )


def choose_metrics_policy(
    choice: ClientMetricsChoice | None, trainer: pl.Trainer, engine: RoundEngine
) -> ClientMetricsChoice:
    """Policy for clients' metrics.

    Said in the log where nobody has chosen and something is withheld.
    """
    if choice is not None:
        return choice
    if not (has_claims(engine) or sample_protectors(get_callbacks(trainer))):
        return "shared"
    rank_zero_info(
        "what self.log says in training stays with the clients (client_metrics='local'), because this run "
        "claims privacy; Federated(client_metrics='shared') logs it without noise"
    )
    return "local"


def log_values(trainer: pl.Trainer, values: Mapping[str, float]) -> None:
    """Log numbers of a round by name, where `callback_metrics` and the loggers have metrics."""
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)
    for logger in trainer.loggers:
        logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=trainer.global_step - 1)
        logger.save()


class RankMetrics(NamedTuple):
    """Record of what one rank's clients have logged in a round.

    Args:
        values: For each of Lightning's results its sum or extreme so far and the size of its batches, in
            plain numbers.
        names: Names of all metrics so far, in order.
    """

    values: dict[Any, tuple[Any, Any]]
    names: dict[str, None]


class ClientMetrics:
    """Collects what clients log.

    Args:
        choice: "shared" logs as usual, "none" drops, "local" keeps for `pop_metrics` and logs nothing.

    Attributes:
        names: Names of what clients have logged, in order.
        keep: Whether somebody takes the clients' values; else they are dropped at once.
    """

    def __init__(self, choice: ClientMetricsChoice, trainer: Any, ranks: RankGroup | None = None) -> None:
        self.choice, self.keep = choice, False
        self.names: dict[str, None] = {}
        self._trainer, self._ranks = trainer, ranks
        self._validation_names: set[str] = set()
        self._checked: set[str] = set()
        self._sums: dict[int, dict[str, tuple[float, int]]] = {}
        self._shared: dict[Any, Any] = {}
        self._results = ObservedResults(True, lambda name, value: None, trainer.strategy.reduce)
        if self.shared:
            trainer.fit_loop.epoch_loop._results = self._results

    @property
    def shared(self) -> bool:
        """Does it all go where it would go anyway?"""
        return self.choice == "shared"

    def note_validation_metric(self, name: str, value: Any) -> None:
        """Note that validation logs a metric, which may be watched then."""
        self._validation_names.add(name)

    def check_watched(self) -> None:
        """Refuse, before anybody trains, what decides by metrics that clients are known to log.

        Raises:
            ValueError: Naming who watches what.
        """
        if not self.shared:
            check_spikes(self._trainer)
        for name in self.names:
            self._check(name)

    def _check(self, name: str) -> None:
        if name in self._checked:
            return
        self._checked.add(name)
        if self.choice != "shared":
            why = f"and which stays with them (client_metrics={self.choice!r})"
            cure = ", or let it out without noise by Federated(client_metrics='shared')"
        elif self._ranks is not None:
            why, cure = "each rank those of its own clients", ""
        else:
            return
        for who, monitor in find_monitors(self._trainer):
            if monitor in metric_forks(name) and monitor not in self._validation_names:
                raise ValueError(
                    f"{who} watches {monitor!r}, which clients log in training, {why}; watch a metric of the "
                    f"validation{cure}"
                )

    # ---- where clients log --------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Forget what nobody has taken of the last round."""
        self._sums = {}

    def attach(self, trainer: Any, clients: tuple[int, ...]) -> None:
        """Let a client's Trainer log where it is to."""
        loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        if not self.shared:
            loop._results = ObservedResults(True, partial(self._log_client_metric, clients))
            return
        home = self._trainer
        loop._results = self._results
        self._results.tell = self._log_round_metric
        connector._callback_metrics = home._logger_connector._callback_metrics
        connector._logged_metrics = home._logger_connector._logged_metrics
        connector._progress_bar_metrics = home._logger_connector._progress_bar_metrics
        connector._first_loop_iter = False  # or the first batch would forget what others have logged

    def detach(self) -> None:
        """Clients log no more in this round."""
        self._results.tell = lambda name, value: None

    def _log_round_metric(self, name: str, value: Any) -> None:
        if self._ranks is not None and isinstance(value, nn.Module):
            raise ValueError(
                f"{name!r} is a metric object that clients update in training, and every rank's own has seen "
                "its own clients only; log the metric's value of each batch, leave it to the validation, or "
                "train in one process (devices=1)"
            )
        self.names.setdefault(name)
        self._check(name)

    def _log_client_metric(self, clients: tuple[int, ...], name: str, value: Any) -> None:
        self.names.setdefault(name)
        self._check(name)
        if isinstance(value, nn.Module):
            value = getattr(value, "_forward_cache", None)
        if len(clients) == 1 and value is not None:
            self._add(name, clients, [value])

    def keep_stack(self, clients: tuple[int, ...], name: str, values: Tensor) -> None:
        """Keep the values of a stack, `(clients, ...)`, before they are reduced."""
        if not self.shared and len(clients) == len(values):
            self._add(name, clients, values.detach().tolist())

    def _add(self, name: str, clients: tuple[int, ...], values: Any) -> None:
        if not self.keep or self.choice != "local":
            return
        for client, value in zip(clients, values, strict=True):
            own = self._sums.setdefault(client, {})
            total, count = own.get(name, (0.0, 0))
            number = float(value.detach() if isinstance(value, Tensor) else value)
            own[name] = (total + number, count + 1)

    # ---- ranks --------------------------------------------------------------------------------------

    def rank_metrics(self) -> RankMetrics | None:
        """Record of what this rank's clients have logged in a round. None if nothing is shared."""
        self._shared = {}
        if not self.shared:
            return None
        self._shared = {
            key: result
            for key, result in self._results.items()
            if result.meta.name in self.names and result.meta.on_epoch and not result.has_reset
        }
        own = {
            key: (_plain(result.value), _plain(result.cumulated_batch_size))
            for key, result in self._shared.items()
        }
        return RankMetrics(own, self.names)

    def merge_ranks(self, rank_metrics: Sequence[RankMetrics | None]) -> None:
        """Let what clients have logged in a round be that of all ranks: its mean, or what reduces it.

        A rank none of whose clients has logged a metric goes without; rank 0 has clients if any rank has.
        """
        logged = [part for part in rank_metrics if part is not None]
        for part in logged:
            self.names |= part.names
        for key, result in self._shared.items():
            values = [part.values[key] for part in logged if key in part.values]
            meta = result.meta
            both = torch.stack([torch.as_tensor(value).to(result.value) for value, _ in values])
            extreme = both.amax(0) if meta.is_max_reduction else both.amin(0)
            result.value = extreme if meta.is_max_reduction or meta.is_min_reduction else both.sum(0)
            size = torch.as_tensor(sum(size for _, size in values))
            result.cumulated_batch_size = size.to(result.cumulated_batch_size)
            result._computed = None

    def pop_metrics(self) -> dict[int, dict[str, float]]:
        """Metrics that each client has logged since the round began: the mean of each over its batches."""
        taken = {
            client: {name: total / count for name, (total, count) in own.items()}
            for client, own in self._sums.items()
        }
        if self._ranks is not None:
            everybody = self._ranks.gather((taken, self.names), "what stays with clients")
            for others, names in everybody:
                taken |= others
                self.names |= names
        self._sums = {}
        return taken


def _plain(value: Any) -> Any:
    """Numbers in place of a tensor, which takes a quarter of a millisecond to pickle."""
    return value.tolist() if isinstance(value, Tensor) else value
