"""Train one client for one round on its own machine, from the global weights to an update.

The round counter of the client's Trainer equals that of a simulation. The client trains as a simulated client
does: in a separate fit on a copy of the module, with the same random draws, batches and clock.
`remote_client` encodes the update.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.changed_tensors import has_other_state
from lightning_fedq.clients.client_trainer import resume_counters
from lightning_fedq.clients.hooks import knows_clients
from lightning_fedq.clients.personal import State
from lightning_fedq.clients.undo import Undo
from lightning_fedq.clients.vector import train_only
from lightning_fedq.data.batches import BatchRule, Stack
from lightning_fedq.data.held_out import HeldOut
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.flower.batch_counters import BatchCounters, check_counted
from lightning_fedq.flower.own_plan import OwnPlan, OwnPlanner, split_own_data
from lightning_fedq.flower.persistent_state import check_names
from lightning_fedq.flower.refusals import RefusedError, refused_in_private, refused_settings
from lightning_fedq.flower.round_inputs import LaterRound, RoundInputs
from lightning_fedq.flower.settings import check_schedules, check_watched
from lightning_fedq.flower.training_description import callbacks_in, changes_training
from lightning_fedq.functional.batch_stack import map_tensors
from lightning_fedq.rounds import RoundTask
from lightning_fedq.training.checks import (
    ClientSettingsError,
    check_batch_rule,
    check_loader_is_ours,
    check_setup,
)
from lightning_fedq.training.client_evaluation import ClientEvaluator, none_if_nan
from lightning_fedq.training.client_side import ClientSide
from lightning_fedq.training.loops import OF_THE_FIT, Schedule, forget_loader, install_round_loop
from lightning_fedq.training.population import PartitionedData

_registry: Any = sys.modules[pl.trainer.connectors.callback_connector._load_external_callbacks.__module__]  # type: ignore[attr-defined]
_setup: Any = pl.trainer.setup  # type: ignore[attr-defined]
_CACHED_LOOKUPS: dict[tuple[Any, str], Any] = {
    (_registry, "entry_points"): functools.cache(_registry.entry_points),
    (torch.cuda, "device_count"): functools.cache(torch.cuda.device_count),
}
"""Look-ups that every new Trainer repeats, cached once a process."""


class LocalRound(pl.Callback):
    """Callback that trains or measures one client for one round, in the client's own Trainer.

    Args:
        federated: Settings of the federation.
        number: Number of the client in the federation.
        seed: Seed of the data order and of the random numbers in training.
        task: Work of the message. A `RoundTask` trains in its round. A `LaterRound` tries a later round. An
            integer measures the model after this round. None tries the smallest batch and counts the numbers
            that travel.
        weights: `(dim,)` global model.
        inputs: State and server values besides the weights. None stands for an empty state.
        held_out_seed: Seed that chooses the held-out samples, which are measured and never trained on. None
            takes `seed`.

    Attributes:
        measured: Validation metrics by model. A metric that is not defined is None.
        update: `(dim,)` local - global, once the fit is over. A round of statistics has their `(size,)`
            vector here.
        state: State that this client keeps if the round counts.
        segments: Sizes of the segments of the vector that travels, once the fit has begun.
        vector: Parameters and buffers that travel, once the fit has begun.
    """

    knows_clients = True

    update: Tensor
    state: State
    segments: list[int]
    measured: dict[str, dict[str, float | None]]

    def __init__(
        self,
        federated: Federated,
        number: int,
        seed: int,
        task: RoundTask | LaterRound | int | None,
        weights: Tensor,
        inputs: RoundInputs | None = None,
        held_out_seed: int | None = None,
    ) -> None:
        self._federated, self._task, self._weights = federated, task, weights
        self._inputs = inputs or RoundInputs({})
        round = task.round if isinstance(task, RoundTask | LaterRound) else task or 0
        self._is_done = False
        self._planner = OwnPlanner(1, seed, number=number)
        self._plan = self._planner.plan(round, federated.mechanism)
        self._held_out: HeldOut | None = None
        settings = federated.local.evaluate_clients
        if settings is not None and settings.fraction is not None:
            split = seed if held_out_seed is None else held_out_seed
            of_run = OwnPlan(0, ((0,),), frozenset(), split, number)
            self._held_out = HeldOut(
                settings.fraction,
                lambda client: torch.Generator().manual_seed(of_run.stream_seed("held out", client)),
            )
        self._undo, self.number = Undo(), number
        self._rule: BatchRule | None = None
        self._holdings: PartitionedData | None = None

    def run(
        self, module: pl.LightningModule, data: pl.LightningDataModule, trainer: dict[str, Any]
    ) -> LocalRound:
        """Train the client for its round, or measure it, in its own Trainer, and return this object.

        Args:
            module: Module of the client. Its weights are overwritten.
            data: Data module of the client.
            trainer: Arguments of the client's `Trainer`.

        Raises:
            RefusedError: If the model's shape differs from the server's, or a setting can't work.
        """
        round = self._plan.round
        callbacks = [callback for callback in callbacks_in(trainer) if changes_training(callback)]
        skipped = [type(callback).__name__ for callback in callbacks_in(trainer) if callback not in callbacks]
        rounds = max(trainer.get("max_epochs") or 0, round + 1)
        if self._task is None:
            rounds = 0
            if skipped:
                names = ", ".join(sorted(skipped))
                rank_zero_info(f"{names}: left out on this client, because it runs on the server")
        arguments = {
            **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
            "num_sanity_val_steps": 0,
            **trainer,
            "max_epochs": rounds,
            "limit_val_batches": 0,
            "enable_checkpointing": False,
            # each message gets fresh copies, so that callbacks keep nothing from message to message
            "callbacks": [self, *map(deepcopy, callbacks)],
        }
        with Undo() as undo, warnings.catch_warnings():
            for (owner, name), cached in _CACHED_LOOKUPS.items():
                undo.replace(owner, name, cached)
            fit = pl.Trainer(**arguments)
            # the first Trainer has logged these lines already
            _CACHED_LOOKUPS[_setup, "_log_device_info"] = _no_operation
            epochs: Any = fit.fit_loop.epoch_progress.current
            epochs.processed = epochs.completed = round  # the round is `current_epoch`
            # the server validates the model, so a client needs no validation data
            warnings.filterwarnings("ignore", message="You defined a `validation_step` but have no")
            try:
                fit.fit(module, datamodule=data)
            except Exception as error:
                if not self._is_done:
                    raise
                rank_zero_warn(
                    f"The client's work is done and counts. The fit then failed with {type(error).__name__}: "
                    f"{error}"
                )
        return self

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace the Trainer's loader and loops with those of the client."""
        if stage != "fit":
            return
        with refused_settings():
            check_setup(trainer, pl_module)
        run = self._measure if isinstance(self._task, int) else self.run_round
        run = self._train if isinstance(self._task, LaterRound) else run

        def work() -> int:
            steps = run()
            self._is_done = True
            return steps

        install_round_loop(trainer, work, lambda name, value: None, self._undo)
        for target in (pl_module, *(c for c in trainer.callbacks if not knows_clients(c))):
            for hook in OF_THE_FIT:
                if hasattr(target, hook):
                    self._undo.replace(target, hook, _no_operation)
        owner = trainer.datamodule
        self._user_loader = owner.train_dataloader
        self._limit = 1.0 if trainer.fast_dev_run else trainer.limit_train_batches
        self._undo.replace(trainer, "limit_train_batches", 1.0)
        self._undo.replace(owner, "train_dataloader", lambda: self._deal(trainer).loader)

    # ---- interface of a federation that batch rules use ----------------------------------------------------

    engine = None  # the round engine is on the server

    @property
    def fit(self) -> LocalRound:
        """This object, because batch rules look up the fit of a federation."""
        return self

    @property
    def client_indices(self) -> list[Tensor]:
        """Sample indices of this client, in a list of one tensor. Empty before the data are split."""
        return [] if self._holdings is None else self._holdings.client_indices

    def use_batches(self, rule: Any) -> None:
        """Let a batch rule draw the batches, and restore the privacy account that this client kept."""
        with refused_settings():
            check_batch_rule(rule, self._rule, self._federated.local)
        self._account = "account" if rule.protects_samples else "account of a seed"
        self._rule, rule.account = rule, self._inputs.saved.get(self._account, [])
        rule.loss_reduction = self._inputs.saved.get("loss_reduction")  # the first round decides it

    def fetch(self, indices: Tensor) -> Any:
        """Return some samples as one batch, without drawing random numbers."""
        with torch.random.fork_rng([]):
            return self._loader().fetch(indices)

    def present_batch(self, batch_idx: int) -> tuple[Stack, int]:
        """Return the only stack, and the index of a batch in it."""
        return self._stacks()[0], batch_idx

    def _deal(self, trainer: Any) -> PartitionedData:
        """Return the client's data, split at the first call, which `configure_optimizers` may make."""
        if self._holdings is None:
            rule, task = self._rule, self._task
            split = split_own_data(
                self._user_loader(), self._federated, self._limit, rule, self._held_out, trainer
            )
            if rule is not None:
                rule.begin(split.work)
            steps = int(rule is not None and task is None)  # registration tries one batch
            steps = 2 if isinstance(task, LaterRound) else steps
            schedule = Schedule(self._planner, self._federated.mechanism, split.work, rule, steps)
            loader: Any = split.loader(self._stacks, schedule.max_batches)
            if isinstance(task, LaterRound) and task.has_zero_batches:
                loader.iterate_stacks = functools.partial(_zero_batches, loader.iterate_stacks)
            held_out = [] if self._held_out is None else self._held_out.parts
            indices = list(split.work.client_indices)
            self._holdings = PartitionedData(indices, schedule, loader, False, held_out)
        return self._holdings

    def _loader(self) -> ClientLoader:
        """Return the loader of the client's own data."""
        return self._deal(self._trainer).loader

    def _stacks(self) -> Sequence[Stack]:
        """Return the client's stack of batches in this round, in a sequence of one."""
        schedule = self._deal(self._trainer).schedule
        return schedule.stacks(self._plan.round, 0, 1, self._side.clock.max_batches)

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Find the parameters that travel, and move model, counters and schedules to this round.

        Raises:
            RefusedError: If the model's shape differs from the server's, or clients can't follow a schedule.
        """
        local, inputs = self._federated.local, self._inputs
        check_schedules(trainer, local.local_steps)
        counting_layers = check_counted(pl_module, local)
        if inputs.trained is not None:
            train_only(pl_module, trainer.optimizers, inputs.trained)
        self._trainer = trainer
        holdings = self._deal(trainer)
        forget_loader(trainer)
        max_batches = holdings.schedule.max_batches
        steps = self._plan.round * -(-max_batches // int(trainer.accumulate_grad_batches))
        resume_counters(trainer, steps, steps)
        # a first step may reveal more changed state than the layers declare, so a batch is tried where a
        # module has such state. Registration always tries one, to fail early
        has_state, to_try = local.buffers != "frozen" and has_other_state(pl_module), None
        if self._rule is None and (self._task is None or has_state):
            to_try = holdings.schedule.trial_stacks(self._plan.round, 1)
        self._make_side(holdings, to_try)
        if self._task is None:
            self._side.begin("shared", None, number=self.number)
            self._try_client(to_try)
            self._is_done = True
            return
        self._check_segments()
        inputs.pass_statistic(pl_module, local.statistics)
        if not isinstance(self._task, LaterRound):
            self.vector.write(self._weights)
        self._counters = BatchCounters(self.vector, counting_layers)
        # a measured round is over, and rounds of statistics count no batches
        rounds = self._plan.round + isinstance(self._task, int)
        rounds -= 0 if local.statistics is None else local.statistics.rounds
        self._counters.advance(max(rounds, 0) * max_batches)
        term = inputs.begin_term(local.algorithm, self.vector.num_parameters)
        self._side.begin("shared", term, number=self.number)
        check_names(inputs.saved, self.vector.personal.names)
        self._side.worker.states.put(0, inputs.saved)
        self._advance_schedules(steps)
        inputs.copy_options(trainer.optimizers)

    def _make_side(self, holdings: PartitionedData, to_try: Sequence[Stack] | None) -> None:
        """Make the client's side of a federation, which finds the parameters that travel."""
        with refused_settings(ClientSettingsError):
            local = self._federated.local
            parts = local, holdings, self._loader, self._rule, self, _NO_FORKS, to_try
            self._side = ClientSide(self._trainer, *parts)
            self._side.check_algorithm(self._federated.mechanism)
        self.vector, self.segments = self._side.vector, self._side.vector.segments

    def _check_segments(self) -> None:
        """Refuse a round whose model has other segments than this client's."""
        if isinstance(self._task, RoundTask) and self.segments != list(self._task.segments):
            raise RefusedError(
                f"The server's model has segments of {_segments_text(self._task.segments)}, this client's "
                f"has {_segments_text(self.segments)}. Both sides need the same module with the same frozen "
                "parameters."
            )

    def _advance_schedules(self, steps: int) -> None:
        """Step the learning rate schedules to this round.

        Schedules that follow the validation are left out, because the server runs them.

        Args:
            steps: Optimiser steps before this round.
        """
        for config in self._trainer.lr_scheduler_configs:
            if config.reduce_on_plateau:
                continue
            ahead = steps if config.interval == "step" else self._plan.round
            # torch warns that this optimiser has not stepped, but those of earlier rounds have
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                for _ in range(ahead // config.frequency):
                    config.scheduler.step()

    def _try_client(self, to_try: Sequence[Stack] | None) -> None:
        """Refuse settings that can't work on this client's data, before the first round.

        Raises:
            RefusedError: If a training step or the statistics fail. The message tells the server nothing
                about the data. A warning in the client's log has the reason.
        """
        side = self._side
        # take one step, because a batch rule may refuse the module or its loss, and drop the result
        if to_try is None:
            side.begin_round()
            with side.training(self.vector.read()) as trained:
                list(trained)
        else:
            with refused_in_private("Training fails on this client's data"):
                side.check_smallest(to_try[0])
            with refused_in_private("client_statistics fails on this client's data"):
                side.check_statistics(to_try[0])
        check_watched(self._trainer, side, self._loader(), self.client_indices[0])

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Refuse to train on a loader other than the client's."""
        check_loader_is_ours(trainer, self._loader())

    def _measure(self) -> int:
        """Measure the models on this client's held-out samples, as the work of a `RoundLoop`."""
        assert isinstance(self._task, int)
        settings, trainer, held_out = self._federated.local.evaluate_clients, self._trainer, self._held_out
        self.measured = {}
        if settings is not None and held_out is not None:
            settings.check(trainer.lightning_module, self._federated.clients.num_clients, False)
            seed_of = lambda round, client: self._plan.stream_seed("evaluation", client)  # noqa: E731
            known = settings, trainer, self._side.worker, held_out.parts, self._loader, seed_of
            for model, metrics in ClientEvaluator(*known).measure(self._task).values.items():
                self.measured[model] = {name: none_if_nan(float(v)) for name, v in metrics.items()}
        self._trainer.should_stop = True
        return 0

    def run_round(self) -> int:
        """Train the client and store its new state, as the work of a `RoundLoop`."""
        steps, rule = self._train(), cast(Any, self._rule)
        if rule is not None:
            self.state |= {self._account: rule.account, "loss_reduction": rule.loss_reduction}
            rank_zero_info(f"round {self._plan.round + 1}: {rule.statement().line}")
        return steps

    def _train(self) -> int:
        """Train for one round, set `update` and `state`, and return the number of steps for the Trainer."""
        side, vector, statistics = self._side, self.vector, self._federated.local.statistics
        side.begin_round()
        if self._inputs.trained is not None:  # apply the server's choice after the hooks of this round
            train_only(vector.module, self._trainer.optimizers, self._inputs.trained)
        start = vector.read().to(torch.promote_types(self._weights.dtype, torch.float32))
        is_over = statistics is None or self._plan.round >= statistics.rounds
        round_statistics = None if is_over else statistics
        with side.training(start, round_statistics) as trained:
            [self.update] = [result.updates[0] for result in trained]
        if is_over:
            self._counters.check(len(self._stacks()[0].batch_sizes))
        new_state = side.worker.states.pending().get(0, {})
        self.state = {**self._inputs.saved, **new_state, "names": list(vector.personal.names)}
        # the commit is local: the server says with its next message whether the round counts
        side.commit([0])
        # the server validates, so it also runs schedules that follow the validation
        strategy = self._trainer.strategy
        strategy.lr_scheduler_configs = [c for c in strategy.lr_scheduler_configs if not c.reduce_on_plateau]
        # set at the end, because a client that starts with it trains nothing
        self._trainer.should_stop = True
        return side.clock.steps

    def teardown(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore everything that `setup` replaced."""
        if stage == "fit":
            self._undo.close()

    def on_exception(self, trainer: Any, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore everything that `setup` replaced."""
        self._undo.close()


def _no_operation(*args: Any) -> None:
    """Do nothing, in place of a hook of the whole fit, which runs on the server."""


_NO_FORKS = "a client tries in its own process"


def _zero_batches(by_stack: Callable[[], Iterator[tuple[Stack, Any]]]) -> Iterator[tuple[Stack, Any]]:
    """Yield the stacks and batches of a loader, with zeros in place of their tensors."""
    for stack, batches in by_stack():
        yield stack, (map_tensors(torch.zeros_like, batch) for batch in batches)


def _segments_text(segments: Sequence[int]) -> str:
    """Return up to six segment sizes and the sum of all sizes, as text."""
    shown = ", ".join(map(str, segments[:6])) + (", ..." if len(segments) > 6 else "")
    return f"[{shown}] ({sum(segments)} in all)"
