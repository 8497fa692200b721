"""One client's round on its own machine: global weights in, update out.

The client's Trainer counts rounds as a simulation's does, and its client trains as a simulated one: a fit of
its own on a copy, with the same draws, the same batches and the same clock. Nothing is encoded here.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.child import count_from
from lightning_fedq.clients.correction import Corrects
from lightning_fedq.clients.fit import Batches, ClientFit
from lightning_fedq.clients.hooks import trains_with_clients
from lightning_fedq.clients.vector import Rehearsed, Vector
from lightning_fedq.data.batches import LocalWork, Stack
from lightning_fedq.data.dealing import LocalPasses, deal
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.data.partition import Partition
from lightning_fedq.federation.checks import (
    check_limit,
    check_loader_is_ours,
    check_optimizers,
    check_setup,
    check_shapes,
)
from lightning_fedq.federation.handed_loader import forget_loader
from lightning_fedq.federation.undo import Undo
from lightning_fedq.flower.settings import RefusedError
from lightning_fedq.functional.flatten import unflatten
from lightning_fedq.rounds import RoundPlan, RoundTask
from lightning_fedq.simulation.clock import Clock
from lightning_fedq.simulation.metrics import ClientMetrics
from lightning_fedq.simulation.rehearsal import Trial, rehearse
from lightning_fedq.simulation.round_loop import install
from lightning_fedq.simulation.schedule import round_stacks


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


class LocalRound(pl.Callback):
    """One client's local training in one round.

    Args:
        federated: The federation's settings.
        number: The client's number in it.
        seed: Seed of data order and of the training's random numbers.
        task: The round.
        weights: `(dim,)` the global model.

    Attributes:
        update: `(dim,)` local - global, once the fit is over.
    """

    update: Tensor

    def __init__(
        self, federated: Federated, number: int, seed: int, task: RoundTask, weights: Tensor
    ) -> None:
        self._federated, self._task, self._given = federated, task, weights
        self._plan = _OwnPlan(task.round, ((0,),), frozenset(), seed, number)
        self._undo = Undo()
        self._dealt: ClientLoader | None = None

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Put the client's loader and loops in place of the Trainer's own."""
        if stage != "fit":
            return
        check_setup(trainer, pl_module)
        install(trainer, self, lambda name, value: None, self._undo)
        owner = trainer.datamodule
        self._user_loader = owner.train_dataloader
        self._limit = 1.0 if trainer.fast_dev_run else trainer.limit_train_batches
        self._undo.replace(trainer, "limit_train_batches", 1.0)
        self._undo.replace(owner, "train_dataloader", lambda: self._loader(trainer))

    def _loader(self, trainer: Any) -> ClientLoader:
        if self._dealt is None:
            local, labels = self._federated.local, self._federated.clients.labels
            dealt = deal(
                self._user_loader(),
                _OwnData,
                1,
                torch.Generator(),
                labels,
                LocalPasses(local.local_epochs, local.local_steps, self._limit, not trainer.overfit_batches),
                None,
            )
            check_limit(dealt.work)
            self._work: LocalWork = dealt.work
            self._dealt = dealt.loader(self._stacks, lambda: len(self._work.sizes[0]))
        return self._dealt

    def _stacks(self) -> Sequence[Stack]:
        most = self._clock.most_batches
        return round_stacks(self._plan, lambda c: self._work.sizes[c][:most], self._work.shuffles, 1)

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Find what travels, and move model, counters and schedules to the round at hand.

        Raises:
            RefusedError: If the model is of another shape than the server's, or there is a schedule that
                clients can't follow.
        """
        check_shapes(pl_module)
        check_optimizers(trainer)
        check_schedules(trainer)
        loader = self._loader(trainer)
        forget_loader(trainer)
        self._trainer, self._fit = trainer, ClientFit(trainer, trainer.loggers)
        every, longest = int(trainer.accumulate_grad_batches), len(self._work.sizes[0])
        steps = self._task.round * -(-longest // every)
        count_from(trainer, steps, steps)
        self._clock = Clock(trainer, longest)
        mode = self._federated.local.buffers
        trial = Trial(ClientFit(trainer), self._clock, lambda: loader, {})
        found = rehearse(trial, pl_module, self._stacks(), mode)
        optimizers = trainer.strategy
        self._vector = Vector(
            pl_module,
            lambda: optimizers.optimizers,
            mode,
            Rehearsed() if mode == "frozen" else found,
            shared=self._federated.local.shared,
        )
        if self._vector.segments != list(self._task.segments):
            raise RefusedError(
                f"the server's model is cut into segments of {_shown(self._task.segments)}, this client's "
                f"into {_shown(self._vector.segments)}; both sides need the same module, with the same "
                "parameters frozen"
            )
        self._vector.show(self._given)
        for config in trainer.lr_scheduler_configs:
            ahead = steps if config.interval == "step" else self._task.round
            with warnings.catch_warnings():  # torch expects the optimiser to have stepped; other rounds' have
                warnings.simplefilter("ignore", UserWarning)
                for _ in range(ahead // config.frequency):
                    config.scheduler.step()

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Refuse to train on a loader that is not the client's."""
        check_loader_is_ours(trainer, self._dealt)

    def run_round(self) -> int:
        """Train the client. See `RoundLoop`."""
        vector, clock, loader = self._vector, self._clock, self._dealt
        assert loader is not None
        metrics = ClientMetrics("shared", self._trainer)
        clock.begin_round()
        wide = torch.promote_types(self._given.dtype, torch.float32)
        start = vector.read().to(wide)
        for stack, batches in loader.by_stack():
            client = self._fit.copy(stack.training_seed)
            metrics.attach(client.trainer, stack.clients)
            vector.hold_statistics(client.module)
            if self._federated.local.algorithm is not None:
                term = self._federated.local.algorithm.begin(1, vector.num_parameters)
                begun = unflatten(start[: vector.num_parameters], vector.shapes[: len(vector.names)])
                own = Corrects(term, [0], partial(vector.parameters_of, client.module), begun)
                client.trainer.callbacks.insert(0, own)
            self._fit.train(client, Batches(batches, len(stack.batch_sizes), loader), clock.now, clock.now)
            self.update = vector.read(client.module).to(wide) - start
            clock.saw(client.trainer)
        metrics.end_round()
        return clock.end_round(clock.taken)

    def teardown(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Take everything off again."""
        if stage == "fit":
            self._undo.all()

    def on_exception(self, trainer: Any, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Take everything off again."""
        self._undo.all()


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
        seed: Seed of data order and of the training's random numbers.
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
    own = given.pop("callbacks", None) or []
    own = [own] if isinstance(own, pl.Callback) else own
    # as they were made: what they keep of one message is not there in the next
    callbacks = [local, *(deepcopy(one) if trains_with_clients(one) else one for one in own)]
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
