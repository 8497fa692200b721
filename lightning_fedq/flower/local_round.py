"""One client's round on its own machine: global weights in, update out, trained by `Federated` itself.

Everything that `Federated` does to a client in a simulation happens here to the only one there is: its
checks, its loader, a fresh optimiser, buffers, one client's clock. The engine encodes nothing; it hands the
update over.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.core import Mechanism
from lightning_fedq.data.batches import BatchRule
from lightning_fedq.data.partition import Partition
from lightning_fedq.federation.clock import LocalClock
from lightning_fedq.flower.settings import RefusedError
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.randomness import SeededKeys
from lightning_fedq.rounds import RoundEngine, RoundPlan, RoundPlanner, RoundTask


@dataclass(frozen=True)
class _OwnData(Partition):
    """All that there is, in the order in which it is there."""

    needs_labels = False

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        return [torch.arange(num_samples)]


@dataclass(frozen=True)
class _OwnPlan(RoundPlan):
    """A round of one client, which is number 0 here and `number` in the federation."""

    number: int = 0

    def stream_seed(self, purpose: str, client: int | None = None) -> int:
        return super().stream_seed(purpose, None if client is None else self.number)


@dataclass(frozen=True)
class _OwnPlanner(RoundPlanner):
    number: int = 0

    def plan(self, round: int, mechanism: Mechanism) -> RoundPlan:
        return _OwnPlan(round, ((0,),), frozenset(), self.seed, self.number)


class _KeepsUpdate(RoundEngine):
    """An engine that keeps the update. Nothing is sent, and the model stays as it is."""

    update: Tensor | None = None

    def receive(self, clients: Sequence[int], updates: Tensor) -> None:
        """Keep the only update."""
        self.update = updates[0].clone()


class LocalRound(Federated):
    """One client's local training in one round.

    Args:
        federated: The federation's settings.
        number: The client's number in it.
        seed: Of data order and of the training's random numbers.
        task: The round.
        weights: `(dim,)` the global model.
    """

    def __init__(
        self, federated: Federated, number: int, seed: int, task: RoundTask, weights: Tensor
    ) -> None:
        super().__init__(
            FedAvg(),
            1,
            partition=_OwnData(),
            labels=federated.labels,
            local_epochs=federated.local_epochs,
            local_steps=federated.local_steps,
            clients_per_step=1,
            buffers=federated.buffers,
            seed=seed,
            diagnostics=False,
        )
        self.planner = _OwnPlanner(1, seed, number=number)
        self._task, self._given = task, weights

    def _new_engine(self, weights: Tensor, segments: Sequence[int]) -> RoundEngine:
        if list(segments) != list(self._task.segments):
            raise RefusedError(
                f"the server's model is cut into segments of {_shown(self._task.segments)}, this client's "
                f"into {_shown(segments)}; both sides need the same module, with the same parameters frozen"
            )
        engine = _KeepsUpdate(
            self.mechanism,
            self.planner,
            SeededKeys(0),
            self._given.to(weights),
            segments,
            self.ranges,
            diagnostics=False,
        )
        engine.round, engine.attempt = self._task.round, self._task.attempt
        return engine

    @property
    def update(self) -> Tensor:
        """`(dim,)` local - global, once the fit is over."""
        assert isinstance(self.engine, _KeepsUpdate) and self.engine.update is not None
        return self.engine.update

    def use_batches(self, rule: BatchRule) -> None:
        """Refuse: what a rule remembers of a client would be lost between two rounds.

        Raises:
            RefusedError: Always.
        """
        raise RefusedError(
            f"{type(rule).__name__} remembers what a client has spent, and a client between two messages "
            "does not keep it yet; leave it out, or use a mechanism that protects clients"
        )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set up as for any fit, and move schedules to the round at hand."""
        super().on_fit_start(trainer, pl_module)
        check_schedules(trainer)
        assert self._clock is not None
        for config in trainer.lr_scheduler_configs:
            steps = self._clock.now if config.interval == "step" else self._task.round
            with warnings.catch_warnings():  # torch expects the optimiser to have stepped; other rounds' have
                warnings.simplefilter("ignore", UserWarning)
                for _ in range(steps // config.frequency):
                    config.scheduler.step()  # type: ignore[call-arg]

    def _start_clock(self, trainer: Any, optimizers: Sequence[Optimizer]) -> LocalClock:
        clock = super()._start_clock(trainer, optimizers)
        clock.now = self._task.round * -(-self._schedule.longest // int(trainer.accumulate_grad_batches))
        return clock


def check_schedules(trainer: pl.Trainer) -> None:
    """Refuse schedules that clients can't follow by themselves.

    Raises:
        RefusedError: If there is one that follows a metric.
    """
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        raise RefusedError(
            "ReduceLROnPlateau follows a validation metric, which the server has and clients do not; use a "
            "schedule by rounds, such as StepLR, or a server_optimizer"
        )


def _shown(segments: Sequence[int]) -> str:
    shown = ", ".join(map(str, segments[:6])) + (", ..." if len(segments) > 6 else "")
    return f"[{shown}] ({sum(segments)} in all)"


def train_locally(
    federated: Federated,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    number: int,
    seed: int,
    task: RoundTask,
    weights: Tensor,
    trainer: dict[str, Any],
) -> Tensor:
    """Train one client for one round.

    Args:
        federated: The federation's settings.
        module: The client's own; its weights are overwritten.
        data: The client's own.
        number: The client's number.
        seed: Of data order and of the training's random numbers.
        task: The round.
        weights: `(dim,)` the global model.
        trainer: Arguments of the client's `Trainer`.

    Returns:
        `(dim,)` local - global.

    Raises:
        RefusedError: If the model is of another shape than the server's, or a setting can't work.
    """
    local = LocalRound(federated, number, seed, task, weights)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {**quiet, "num_sanity_val_steps": 0, **trainer}
    callbacks = [local, *given.pop("callbacks", [])]
    fit = pl.Trainer(
        **{**given, "max_epochs": task.round + 1, "limit_val_batches": 0, "enable_checkpointing": False},
        callbacks=callbacks,
    )
    epochs: Any = fit.fit_loop.epoch_progress.current
    epochs.processed = epochs.completed = task.round  # the round is `current_epoch`
    with warnings.catch_warnings():  # what is validated is the server's model
        warnings.filterwarnings("ignore", message="You defined a `validation_step` but have no")
        fit.fit(module, datamodule=data)
    return local.update
