"""Metrics that clients log in training: passed to loggers, kept for each client's own file, or dropped.

A metric of a training step depends on one client's data, without noise. A privacy claim covers messages and
models, but not such metrics. So a run with a claim keeps them with the clients, unless the user decides
otherwise. Metrics logged in validation are the server's, and are logged as usual. If samples are protected
without a federation, training metrics are logged, but no callback may decide by them.

Clients that share metrics log into the round's results, as batches do in an ordinary training. Otherwise each
client logs into its own results. Its training may read them, and they are dropped with the client.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fedq._lightning import get_callbacks, is_overridden, pl, rank_zero_info, rank_zero_warn
from lightning_fedq.clients.hooks import has_user_hook
from lightning_fedq.clients.undo import Undo
from lightning_fedq.data.sampling import in_short
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms.interface import Mechanism, NonPrivate, RoundContext
from lightning_fedq.rounds import RoundEngine
from lightning_fedq.training.rank_group import RankGroup

_results: Any = pl.trainer.connectors.logger_connector.result  # type: ignore[attr-defined]


class _Logged(_results._ResultMetric):  # type: ignore[misc]
    """A logged value. Lightning moves it to its device with every `log`, which copies all its tensors."""

    def to(self, device: Any, *args: Any, **kwargs: Any) -> Any:
        """Move the value, unless it is a number whose tensors are on the device already."""
        parts = (part for part in vars(self).values() if isinstance(part, Tensor))
        on_device = self.is_tensor and all(part.device == device for part in parts)
        return self if on_device else super().to(device, *args, **kwargs)


class ObservedResults(_results._ResultCollection):  # type: ignore[misc]
    """Lightning's collection of logged values, with a function that is called before each is logged.

    Args:
        training: Are these metrics of training? If not, of validation.
        on_log: Called with name and value of each metric before it is logged.
        reduce: Reduces values over several ranks. None uses the reduction of the Trainer that logs.
    """

    def __init__(self, training: bool, on_log: Callable[[str, Any], None], reduce: Any = None) -> None:
        super().__init__(training)
        self.tell, self._reduce = on_log, reduce

    def __setitem__(self, key: str, value: Any) -> None:
        """Store a new value."""
        value.__class__ = _Logged
        super().__setitem__(key, value)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Call `on_log`, and log."""
        self.tell(name, value)
        if self._reduce is not None:
            kwargs["sync_dist_fn"] = self._reduce
        super().log(fx, name, value, *args, **kwargs)


ClientMetricsChoice = Literal["local", "shared", "none"]
_EXACT, _LENGTHS = "fed/sim_", "fed/uplink_bits"
_OWN_METRICS = ("fed/", "clients/", "dp/", "leak/", "lr-")
"""Beginnings of the names of metrics that this package and `LearningRateMonitor` log after a round."""


def has_claim(mechanism: Mechanism, context: RoundContext) -> bool:
    """Return whether a mechanism protects clients against any adversary."""
    return any(not isinstance(claim.loss, NonPrivate) for claim in mechanism.claims(context))


def has_claims(engine: RoundEngine) -> bool:
    """Return whether keys are secret and the mechanism has a claim for the next round."""
    context = engine.context(engine.next_plan())
    return not isinstance(engine.keys, SeededKeys) and has_claim(engine.mechanism, context)


def log_figure(module: pl.LightningModule, name: str, value: float, prog_bar: bool = False) -> None:
    """Log a figure of the federation, past the checks of metrics that clients log."""
    results: Any = module.trainer._results
    with Undo() as undo:
        if hasattr(results, "tell"):
            undo.replace(results, "tell", lambda name, value: None)
        module.log(name, value, prog_bar, on_step=False, on_epoch=True, batch_size=1)


def sample_protectors(callbacks: Iterable[object]) -> list[Any]:
    """Return the callbacks that claim record-level privacy (attribute `protects_samples`)."""
    return [callback for callback in callbacks if getattr(callback, "protects_samples", False)]


def watch_training_log(trainer: pl.Trainer, undo: Undo) -> None:
    """Refuse callbacks and schedules that use a metric of training, for a private run without a federation.

    The check runs when a metric is logged for the first time, and stops when undone.

    Raises:
        ValueError: If a callback ends the run by losses of training steps. Also, when a metric is logged, if
            a callback or schedule monitors it, or a callback names files by it.
    """
    check_spikes(trainer)
    seen, module = set[str](), trainer.lightning_module

    def look(name: str, value: Any) -> None:
        if name in seen or module._current_fx_name == "on_train_start":
            return
        seen.add(name)
        why = "which training logs without noise, so no epsilon covers {}. {} a metric of the validation"
        of_files = why.format("the files' names, which checkpoints contain", "Use")
        for who, monitor in find_monitors(trainer):
            if monitor in metric_forks(name):
                raise ValueError(f"{who} watches {monitor!r}, {why.format('its decisions', 'Watch')}")
        for who, metric in find_file_name_metrics(trainer):
            if metric in metric_forks(name):
                raise ValueError(f"{who} names its files by {metric!r}, {of_files}")

    loop: Any = trainer.fit_loop.epoch_loop
    undo.replace(loop, "_results", ObservedResults(True, look))


def check_spikes(trainer: pl.Trainer) -> None:
    """Refuse SpikeDetection in a private run, because it ends the run by the loss of a training step.

    Its state in checkpoints also contains the last loss, without noise.

    Raises:
        ValueError: If the Trainer has such a callback. The message names it.
    """
    for callback in get_callbacks(trainer):
        if isinstance(callback, pl.callbacks.SpikeDetection):
            raise ValueError(
                f"{type(callback).__name__} uses exact losses of training steps, which no epsilon covers. "
                "Leave it out, or use EarlyStopping on a metric of the validation"
            )


def find_monitors(trainer: pl.Trainer) -> Iterator[tuple[str, str]]:
    """Yield the class of each callback or schedule that decides by a metric, with the metric's name."""
    for callback in get_callbacks(trainer):
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and not isinstance(callback, pl.callbacks.ProgressBar):
            yield type(callback).__name__, monitor
    for config in trainer.lr_scheduler_configs:
        if config.monitor is not None:
            yield type(config.scheduler).__name__, config.monitor


def warn_unlogged_monitors(trainer: pl.Trainer, names: Iterable[str]) -> None:
    """Warn, before anything is charged, of callbacks and schedules that watch a metric that is not logged.

    A trial does not run all hooks, so nothing is said if a hook of the user's that it leaves out may log it.

    Args:
        names: Names of the metrics that a trial of training and validation has logged.
    """
    hooks = [name for name in dir(pl.Callback) if name.startswith("on_")]
    callbacks, module = get_callbacks(trainer), trainer.lightning_module
    if hasattr(module, "on_round_end") or is_overridden("on_train_epoch_end", module, pl.LightningModule):
        return
    if any(has_user_hook(callback, hook) for callback in callbacks for hook in hooks):
        return
    logged = [*names]
    known = {"epoch", "step", *(fork for name in logged for fork in metric_forks(name))}
    for who, monitor in find_monitors(trainer):
        name = monitor.partition("/dataloader_idx_")[0]
        if known.isdisjoint((monitor, name)) and not monitor.startswith(_OWN_METRICS):
            rank_zero_warn(
                f"{who} watches {monitor!r}, but a trial of training and validation has logged "
                f"{in_short(logged) or 'nothing'} only. Check the name, or the run may end at that callback"
            )


Mode = Literal["max", "min"]


def find_mode(trainer: pl.Trainer, *names: str) -> Mode | None:
    """Return whether a larger ("max") or smaller ("min") value of a metric is better.

    Callbacks and schedules that watch the metric tell it. None if none does, or if they contradict.

    Args:
        names: Names of the metric.
    """
    watching: list[Any] = [(c, getattr(c, "monitor", None)) for c in get_callbacks(trainer)]
    watching += [(config.scheduler, config.monitor) for config in trainer.lr_scheduler_configs]
    modes = {getattr(one, "mode", None) for one, monitor in watching if monitor in names}
    found: list[Mode] = [mode for mode in ("max", "min") if mode in modes]
    return found[0] if len(found) == 1 else None


def find_file_name_metrics(trainer: pl.Trainer) -> Iterator[tuple[str, str]]:
    """Yield the class of each callback that names files by a metric, with the metric's name.

    For example, `ModelCheckpoint(filename="{epoch}-{loss:.2f}")` uses `epoch` and `loss`.
    """
    for callback in get_callbacks(trainer):
        for template in (
            getattr(callback, "filename", None),
            getattr(callback, "CHECKPOINT_NAME_LAST", None),
        ):
            if isinstance(template, str):
                for metric in re.findall(r"\{(.*?)[:}]", template):  # the pattern that Lightning uses
                    yield type(callback).__name__, metric


def metric_forks(name: str) -> tuple[str, str, str]:
    """Return a metric's name, and the names that Lightning derives from it."""
    return name, f"{name}_step", f"{name}_epoch"


def check_exact_monitors(trainer: pl.Trainer, has_revealing_lengths: bool) -> None:
    """Refuse a private run whose model or files' names depend on values that only a simulation knows.

    Checkpoints contain such scores and names, without noise.

    Args:
        has_revealing_lengths: Are lengths of messages refused, too?

    Raises:
        ValueError: If a callback or schedule uses such a value. The message names both.
    """
    exact = (_EXACT, _LENGTHS) if has_revealing_lengths else _EXACT
    for who, metric in find_file_name_metrics(trainer):
        if metric.startswith(exact):
            raise ValueError(
                f"{who} names its files by {metric!r}, which is computed from the clients' exact updates. "
                "Leave it out, or use a seed"
            )
    for who, monitor in find_monitors(trainer):
        if monitor.startswith(exact):
            raise ValueError(
                f"{who} watches {monitor!r}, which is computed from the clients' exact updates. "
                "Watch another metric, or use a seed"
            )


def choose_metrics_policy(
    choice: ClientMetricsChoice | None, trainer: pl.Trainer, engine: RoundEngine
) -> ClientMetricsChoice:
    """Return the policy for metrics that clients log: the user's choice, else a default.

    The default is "local" for a run that claims privacy, with a message to the user, and else "shared".
    """
    if choice is not None:
        return choice
    if not (has_claims(engine) or sample_protectors(get_callbacks(trainer))):
        return "shared"
    rank_zero_info(
        "Metrics of training stay with the clients (client_metrics='local'), because this run "
        "claims privacy. Federated(client_metrics='shared') logs them without noise"
    )
    return "local"


def log_values(trainer: pl.Trainer, values: Mapping[str, float]) -> None:
    """Log numbers of a round by name, to `callback_metrics` and the loggers."""
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)
    for logger in trainer.loggers:
        logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=trainer.global_step - 1)
        logger.save()


class RankMetrics(NamedTuple):
    """Metrics that one rank's clients have logged in a round.

    Args:
        values: For each of Lightning's results its sum or extreme so far, and the size of its batches. Plain
            numbers, not tensors.
        names: Names of all metrics so far, in order.
    """

    values: dict[Any, tuple[Any, Any]]
    names: dict[str, None]


class ClientMetrics:
    """Collects the metrics that clients log in training.

    Args:
        choice: "shared" logs as usual, "none" drops, "local" keeps for `pop_metrics` and does not log.
        ranks: Group of the ranks that share the clients. None if there is one process.

    Attributes:
        names: Names of the metrics that clients have logged, in order.
        keep: Does a callback take the clients' values? Otherwise they are dropped at once.
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
        """Whether metrics are logged as in an ordinary training."""
        return self.choice == "shared"

    def note_validation_metric(self, name: str, value: Any) -> None:
        """Note that validation logs a metric, so that callbacks may watch it."""
        self._validation_names.add(name)

    def check_watched(self) -> None:
        """Refuse callbacks and schedules that watch metrics of the dry round, before the first round.

        Raises:
            ValueError: If there are some. The message names callback and metric.
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
            why = f"but clients keep it (client_metrics={self.choice!r})"
            cure = ", or use Federated(client_metrics='shared')"
        elif self._ranks is not None:
            why, cure = "but each rank logs its own clients' only", ""
        else:
            return
        for who, monitor in find_monitors(self._trainer):
            if monitor in metric_forks(name) and monitor not in self._validation_names:
                raise ValueError(
                    f"{who} watches {monitor!r}, which clients log in training, {why}. Watch a metric of the "
                    f"validation{cure}"
                )

    # ---- where clients log --------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Drop values of the last round that no callback has taken."""
        self._sums = {}

    def attach(self, trainer: Any, clients: tuple[int, ...]) -> None:
        """Set the results into which a client's Trainer logs."""
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
        connector._first_loop_iter = False  # or the first batch would drop what other clients have logged

    def detach(self) -> None:
        """Stop the logging of clients, at the end of a round."""
        self._results.tell = lambda name, value: None

    def _log_round_metric(self, name: str, value: Any) -> None:
        if self._ranks is not None and isinstance(value, nn.Module):
            raise ValueError(
                f"{name!r} is a metric object that clients update in training, but each rank has its own "
                "copy. Log the metric's value of each batch, use it in the validation only, or use devices=1"
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
        """Keep the values of a stack, `(clients, ...)`, before they are reduced over the clients."""
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
        """Return the metrics that this rank's clients have logged in a round. None if metrics stay local."""
        self._shared = {}
        if not self.shared:
            return None
        logged = [(key, one) for key, one in self._results.items() if one.meta.name in self.names]
        self._shared = {key: one for key, one in logged if one.meta.on_epoch and not one.has_reset}
        shared = self._shared.items()
        own = {key: (_plain(one.value), _plain(one.cumulated_batch_size)) for key, one in shared}
        return RankMetrics(own, self.names)

    def merge_ranks(self, rank_metrics: Sequence[RankMetrics | None]) -> None:
        """Reduce the metrics of a round over all ranks: their mean, or the metric's own reduction.

        A rank whose clients have not logged a metric does not get it. Rank 0 has clients if any rank has.
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
        """Return the mean over batches of each metric that each client has logged since the round began."""
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
    """Convert a tensor to plain numbers, because pickling a tensor takes a quarter of a millisecond."""
    return value.tolist() if isinstance(value, Tensor) else value
