"""Where it goes what clients log while they train: to the loggers, to a file of their own, or nowhere.

A metric of a training step follows from one client's data without noise. A claim about messages and models
says nothing about it, so a run that claims something keeps it with the clients unless it is told otherwise.
What is logged in validation is the server's and passes. Where samples are protected without a federation,
what is logged in training is logged, and nobody decides by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_fedq._lightning import pl, rank_zero_info
from lightning_fedq.core import Mechanism, NonPrivate, RoundContext
from lightning_fedq.federation.rank_group import RankGroup
from lightning_fedq.federation.undo import Undo
from lightning_fedq.randomness import SeededKeys
from lightning_fedq.rounds import RoundEngine

ClientMetricsChoice = Literal["local", "shared", "none"]
_EXACT, _LENGTHS = "fed/sim_", "fed/uplink_bits"


def check_choice(choice: str | None) -> None:
    """Refuse what is no choice.

    Raises:
        ValueError: Naming the choices.
    """
    if choice is not None and choice not in get_args(ClientMetricsChoice):
        raise ValueError(f"client_metrics must be 'local', 'shared', 'none' or None, got {choice!r}")


def claims_something(mechanism: Mechanism, context: RoundContext) -> bool:
    """Does a mechanism protect clients against anybody?"""
    return any(not isinstance(claim.loss, NonPrivate) for claim in mechanism.claims(context))


def log_figure(module: pl.LightningModule, name: str, value: float, prog_bar: bool = False) -> None:
    """Log a figure of the federation: no metric of clients, so `client_metrics` says nothing about it."""
    log = vars(module).get("log")
    with log.passing() if isinstance(log, TrainingLog) else nullcontext():
        type(module).log(module, name, value, prog_bar, on_step=False, on_epoch=True, batch_size=1)


class Logged(NamedTuple):
    """Record of what one rank's clients have logged in a round.

    Args:
        values: Of each of Lightning's results, its sum or extreme so far and the size of its batches, in
            plain numbers.
        names: Of all metrics so far, in order.
    """

    values: dict[Any, tuple[Any, Any]]
    names: dict[str, None]


@runtime_checkable
class ProtectsSamples(Protocol):
    """A callback that claims privacy for the samples that clients train on."""

    @property
    def protects_samples(self) -> bool:
        """Does it, as it is set?"""


class TrainingLog:
    """Stands in for a module's `log` during a fit, and lets nobody decide by what is logged in training.

    Args:
        trainer: Of the fit in progress.
        module: Whose `log`.

    Attributes:
        names: Of what was logged in training, in order.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.names: dict[str, None] = {}
        self._trainer, self._module, self._log = trainer, module, module.log
        self._passes = False

    def attach(self, undo: Undo) -> None:
        """Stand in for the module's `log`, also where it calls that of its base class.

        Raises:
            ValueError: If a callback looks at the losses of training steps by itself, and decides by them.
        """
        spikes = getattr(pl.callbacks, "SpikeDetection", ())  # older versions of Lightning lack it
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, spikes) and not self._lets_out:
                raise ValueError(
                    f"{type(callback).__name__} ends the run by the exact losses of training steps, and its "
                    "state in checkpoints holds the last one: no epsilon covers either; leave it out, or "
                    "stop by a metric of the validation (EarlyStopping)"
                )
        own = pl.LightningModule.log

        @wraps(own)
        def log(module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
            if module is self._module and not self._passes:
                self(*args, **kwargs)
            else:
                own(module, *args, **kwargs)

        undo.replace(pl.LightningModule, "log", log)
        undo.replace(self._module, "log", self)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Let the base class log what is called within."""
        before, self._passes = self._passes, True
        try:
            yield
        finally:
            self._passes = before

    @property
    def _lets_out(self) -> bool:
        """Does what training logs go where it would go anyway?"""
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingLog:
        """A copy of the module logs through the same."""
        return self

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for `LightningModule.log`.

        Raises:
            ValueError: If a callback or a schedule decides by what is logged in training.
        """
        if self._in_training() and name not in self.names:
            self.names[name] = None
            why = "which training logs, without noise: no epsilon covers {}; {} a metric of the validation"
            self._check_monitors(name, why.format("what it decides", "watch"))
            self._check_file_names(name, why.format("the files' names, which checkpoints hold", "take"))
        with self.passing():
            self._log(name, value, *args, **kwargs)

    def _in_training(self) -> bool:
        return bool(self._trainer.training) and self._module._current_fx_name != "on_train_start"

    def _check_monitors(self, name: str, why: str, except_for: Collection[str] = ()) -> None:
        for who, monitor in _monitors(self._trainer):
            if monitor in _forks(name) and monitor not in except_for:
                raise ValueError(f"{who} watches {monitor!r}, {why}")

    def _check_file_names(self, name: str, why: str) -> None:
        for who, metric in _in_file_names(self._trainer):
            if metric in _forks(name):
                raise ValueError(f"{who} names its files by {metric!r}, {why}")


class ClientMetrics(TrainingLog):
    """Stands in for a module's `log` during a fit, and sends on what is not the clients' to keep.

    Args:
        choice: "shared" logs as usual, "none" drops, "local" keeps for `take` and logs nothing.
        trainer: Of the fit in progress.
        module: Whose `log`.
        clients: Returns who trains.
        ranks: The ranks that the clients are spread over, where there are several.

    Attributes:
        names: What clients have logged, in order.
        keep: Whether somebody takes the clients' values; else they are dropped at once.
    """

    def __init__(
        self,
        choice: ClientMetricsChoice,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        clients: Callable[[], tuple[int, ...]],
        ranks: RankGroup | None = None,
    ) -> None:
        super().__init__(trainer, module)
        self._ranks = ranks
        self.choice, self.keep = choice, False
        self._clients = clients
        self._elsewhere: set[str] = set()
        self._sums: dict[int, dict[str, tuple[float, int]]] = {}
        self._metrics: list[Any] = []
        self._last: tuple[int, ...] = ()
        self._shared: dict[Any, Any] = {}

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for `LightningModule.log`. In a stack, of a value that is reduced over its clients."""
        training = self._in_training()
        if training and self._ranks is not None and isinstance(value, nn.Module) and self.choice == "shared":
            raise ValueError(
                f"{name!r} is a metric object that clients update in training, and every rank's own has seen "
                "its own clients only; log the metric's value of each batch, leave it to the validation, or "
                "train in one process (devices=1)"
            )
        if training and self.withholds(name):
            self._hold(name, value)
            return
        if not training:
            self._elsewhere.add(name)
        with self.passing():
            self._log(name, value, *args, **kwargs)

    def _hold(self, name: str, value: Any) -> None:
        clients = self._present()
        if isinstance(value, nn.Module):  # a metric object
            if all(value is not metric for metric in self._metrics):
                self._metrics.append(value)
            value = getattr(value, "_forward_cache", None)
        if len(clients) == 1 and value is not None:
            self.add(name, clients, [value])

    @property
    def _lets_out(self) -> bool:
        return self.choice == "shared"

    def _present(self) -> tuple[int, ...]:
        """Whom a hook is about. After a client's last batch still that client."""
        if str(self._module._current_fx_name).startswith("on_train_epoch"):
            return ()
        self._last = self._clients() or self._last
        return self._last

    def withholds(self, name: str) -> bool:
        """Note that clients log a metric in training, and say whether it stays with them.

        Raises:
            ValueError: If it does, and somebody watches it.
        """
        if name not in self.names:
            self.names[name] = None
            why = "which clients log in training, {}; watch a metric of the validation{}".format
            if self.choice != "shared":
                stays = f"and which stays with them (client_metrics={self.choice!r})"
                cure = ", or let it out without noise by Federated(client_metrics='shared')"
                self._check_monitors(name, why(stays, cure), self._elsewhere)
            elif self._ranks is not None:
                self._check_monitors(name, why("each rank those of its own clients", ""), self._elsewhere)
        return self.choice != "shared"

    def add(self, name: str, clients: tuple[int, ...], values: Any) -> None:
        """Keep one value of each of some clients, where they are to be kept."""
        if not self.keep or self.choice != "local":
            return
        for client, value in zip(clients, values, strict=True):
            own = self._sums.setdefault(client, {})
            total, count = own.get(name, (0.0, 0))
            number = float(value.detach() if isinstance(value, Tensor) else value)
            own[name] = (total + number, count + 1)

    def add_stack(self, name: str, values: Tensor) -> bool:
        """Take the values of a stack, `(clients, ...)`, before they are reduced. Whether that is all."""
        if not self._trainer.training or not self.withholds(name):
            return False
        clients = self._clients()
        if len(clients) == len(values):
            self.add(name, clients, values.detach().tolist())
        return True

    def begin_round(self) -> None:
        """Forget a round that was stopped on the way."""
        self._sums, self._last = {}, ()
        for metric in self._metrics:  # Lightning resets only what it logs
            metric.reset()
        self._metrics = []

    def of_rank(self) -> Logged | None:
        """Record of what this rank's clients have logged in a round. None if nothing is shared."""
        self._shared = {}
        if self.choice != "shared":
            return None
        results: Any = self._trainer._results  # type: ignore[attr-defined]
        self._shared = {
            key: result
            for key, result in results.items()
            if result.meta.name in self.names and result.meta.on_epoch and not result.has_reset
        }
        own = {
            key: (_plain(result.value), _plain(result.cumulated_batch_size))
            for key, result in self._shared.items()
        }
        return Logged(own, self.names)

    def of_all_ranks(self, everybody: Sequence[Logged | None]) -> None:
        """Let what clients have logged in a round be that of all ranks: its mean, or what reduces it.

        A rank none of whose clients has logged a metric goes without; rank 0 has clients if any rank has.
        """
        logged = [part for part in everybody if part is not None]
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

    def take(self) -> dict[int, dict[str, float]]:
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
        self.begin_round()
        return taken


def _plain(value: Any) -> Any:
    """Numbers in place of a tensor, which takes a quarter of a millisecond to pickle."""
    return value.tolist() if isinstance(value, Tensor) else value


def _monitors(trainer: pl.Trainer) -> Iterator[tuple[str, str]]:
    """Who decides by which metric."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and not isinstance(callback, pl.callbacks.ProgressBar):
            yield type(callback).__name__, monitor
    for config in trainer.lr_scheduler_configs:
        if config.monitor is not None:
            yield type(config.scheduler).__name__, config.monitor


def _in_file_names(trainer: pl.Trainer) -> Iterator[tuple[str, str]]:
    """Who names files by which metric: `ModelCheckpoint(filename="{epoch}-{loss:.2f}")`."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for template in (
            getattr(callback, "filename", None),
            getattr(callback, "CHECKPOINT_NAME_LAST", None),
        ):
            if isinstance(template, str):
                for metric in re.findall(r"\{(.*?)[:}]", template):  # as Lightning reads it
                    yield type(callback).__name__, metric


def _forks(name: str) -> tuple[str, str, str]:
    """A metric's name, and those that Lightning makes of it."""
    return name, f"{name}_step", f"{name}_epoch"


def check_exact_monitors(trainer: pl.Trainer, lengths_tell: bool) -> None:
    """Refuse to choose a private run's model, or to name its files, by what only a simulation knows.

    Checkpoints keep such scores and names.

    Args:
        trainer: With all callbacks.
        lengths_tell: Whether lengths of messages are refused, too.

    Raises:
        ValueError: Naming who watches what.
    """
    exact = (_EXACT, _LENGTHS) if lengths_tell else _EXACT
    for who, metric in _in_file_names(trainer):
        if metric.startswith(exact):
            raise ValueError(
                f"{who} names its files by {metric!r}, which is made of the clients' exact updates: names, "
                "and checkpoints, which hold them, would tell it without noise; leave it out, or use a seed"
            )
    for who, monitor in _monitors(trainer):
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
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    samples = any(
        isinstance(callback, ProtectsSamples) and callback.protects_samples for callback in callbacks
    )
    context = engine.context(engine.coming_plan())
    clients = not isinstance(engine.keys, SeededKeys) and claims_something(engine.mechanism, context)
    if not (samples or clients):
        return "shared"
    rank_zero_info(
        "what self.log says in training stays with the clients (client_metrics='local'), because this run "
        "claims privacy; Federated(client_metrics='shared') logs it without noise"
    )
    return "local"
