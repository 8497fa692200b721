"""Train one client for one round on its own machine, from the global weights to an update.

The round counter of the client's Trainer equals that of a simulation. The client trains as a simulated client
does: in a separate fit on a copy of the module, with the same random draws, batches and clock.
`remote_client` encodes the update.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_fedq._lightning import get_callbacks, pl, rank_zero_info, rank_zero_warn
from lightning_fedq.algorithms.local_algorithm import Correction, PersistentOffsets
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.client_trainer import resume_counters
from lightning_fedq.clients.hooks import knows_clients
from lightning_fedq.clients.personal import State
from lightning_fedq.clients.undo import Undo
from lightning_fedq.clients.vector import train_only
from lightning_fedq.data.batches import BatchRule, Stack
from lightning_fedq.data.client_splits import LocalPasses, split_loader
from lightning_fedq.data.held_out import HeldOut
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.data.partition import Partition
from lightning_fedq.flower.persistent_state import check_names
from lightning_fedq.flower.settings import RefusedError
from lightning_fedq.flower.training_description import changes_training
from lightning_fedq.functional.batch_stack import map_tensors
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.rounds import RoundPlan, RoundPlanner, RoundTask
from lightning_fedq.training.checks import (
    ClientSettingsError,
    check_batch_rule,
    check_limit,
    check_loader_is_ours,
    check_setup,
)
from lightning_fedq.training.client_evaluation import ClientEvaluator, none_if_nan, pass_statistic_to_module
from lightning_fedq.training.client_metrics import metric_forks
from lightning_fedq.training.client_side import ClientSide
from lightning_fedq.training.loops import OF_THE_FIT, Schedule, forget_loader, install_round_loop
from lightning_fedq.training.population import PartitionedData
from lightning_fedq.training.settings import Local

_RATES = re.compile("lr|momentum|dampening|weight_decay")
"""Names of optimiser options that are rates, even where the user has written an integer such as 0."""
_registry: Any = sys.modules[pl.trainer.connectors.callback_connector._load_external_callbacks.__module__]  # type: ignore[attr-defined]
_setup: Any = pl.trainer.setup  # type: ignore[attr-defined]
_kept: dict[tuple[Any, str], Any] = {
    (_registry, "entry_points"): functools.cache(_registry.entry_points),
    (torch.cuda, "device_count"): functools.cache(torch.cuda.device_count),
}
"""Look-ups that every new Trainer repeats, cached once a process."""


@dataclass(frozen=True)
class _OwnData(Partition):
    """Partition with one client, which holds all samples in their given order."""

    needs_labels = False

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        return [torch.arange(num_samples)]


@dataclass(frozen=True)
class _OwnPlan(RoundPlan):
    """Round plan of one client, which is number 0 in this process and `number` in the federation.

    Random streams are drawn for the number in the federation, so they equal those of a simulation.
    """

    number: int = 0

    def stream_seed(self, purpose: str, client: int | None = None) -> int:
        return super().stream_seed(purpose, None if client is None else self.number)


@dataclass(frozen=True)
class _OwnPlanner(RoundPlanner):
    """Planner of rounds with one client, which is number 0 here and `number` in the federation."""

    number: int = 0

    def plan(self, round: int, mechanism: Mechanism, attempt: int = 0) -> RoundPlan:
        return _OwnPlan(round, ((0,),), frozenset(), self.seed, self.number)


class RoundInputs(NamedTuple):
    """State and server values that a client needs for a round, besides the global weights.

    Args:
        saved: State that the client kept from its earlier rounds.
        algorithm_vector: `(num_parameters,)` vector of the server's half of the local algorithm, or None if
            it sends none.
        groups: Options of the parameter groups, such as learning rates, for each optimiser of the server.
            None if the server sends none.
        trained: Names of the parameters that the server's fit trains now, or None if the server sends none.
        statistic: `(size,)` mean of all clients' statistics, or None before its release.
    """

    saved: State
    algorithm_vector: Tensor | None = None
    groups: list[list[dict[str, Any]]] | None = None
    trained: list[str] | None = None
    statistic: Tensor | None = None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], saved: State) -> RoundInputs:
        """Read the inputs from a message of the server.

        Args:
            fields: Fields of the message by name.
            saved: State that the client kept from its earlier rounds.

        Raises:
            RefusedError: If a field can't be read, or is not of the expected form.
        """
        algorithm_bytes, groups, trained = (fields.get(name) for name in ("algorithm", "groups", "trained"))
        statistic = fields.get("statistic")
        try:
            vector = (
                None
                if algorithm_bytes is None
                else torch.frombuffer(bytearray(algorithm_bytes), dtype=torch.float32)
            )
            mean = None if statistic is None else torch.frombuffer(bytearray(statistic), dtype=torch.float32)
            numbers = [[dict(group) for group in optimizer] for optimizer in json.loads(groups or "[]")]
            names = [str(name) for name in json.loads(trained or "[]")]
            if json.dumps(numbers) != (groups or "[]") or json.dumps(names) != (trained or "[]"):
                raise ValueError("expected JSON lists of groups and of names")
            groups_and_names = None if groups is None else numbers, None if trained is None else names
            return cls(saved, vector, *groups_and_names, mean)
        except (ValueError, TypeError) as error:
            raise RefusedError(
                f"The server's message has unreadable vectors or optimiser settings: {error}"
            ) from error


class LaterRound(NamedTuple):
    """Trial of a later round's message at registration: two batches, from the module's initial weights.

    Args:
        has_zero_batches: Whether zeros replace the tensors of the data.
        round: Index of the round, from 0.
    """

    has_zero_batches: bool = False
    round: int = 1


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
        is_reset: Whether all objects that this message trains were made for it alone, so that no copy is
            needed.

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
        is_reset: bool = False,
    ) -> None:
        self._is_reset = is_reset
        self._told, self._federated, self._task, self._given = (
            inputs or RoundInputs({}),
            federated,
            task,
            weights,
        )
        round = task.round if isinstance(task, RoundTask | LaterRound) else task or 0
        self._is_done = False
        self._planner = _OwnPlanner(1, seed, number=number)
        self._plan = self._planner.plan(round, federated.mechanism)
        self._held_out: HeldOut | None = None
        settings = federated.local.evaluate_clients
        if settings is not None and settings.fraction is not None:
            split = seed if held_out_seed is None else held_out_seed
            of_run = _OwnPlan(0, ((0,),), frozenset(), split, number)
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
        task, round = self._task, self._plan.round
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        arguments = {**quiet, "num_sanity_val_steps": 0, **trainer}
        user_callbacks = arguments.pop("callbacks", None) or []
        user_callbacks = [user_callbacks] if isinstance(user_callbacks, pl.Callback) else user_callbacks
        if task is None and (
            skipped := sorted(
                type(callback).__name__ for callback in user_callbacks if not changes_training(callback)
            )
        ):
            rank_zero_info(f"{', '.join(skipped)}: left out on this client, because it runs on the server")
        user_callbacks = [callback for callback in user_callbacks if changes_training(callback)]
        # each message gets fresh copies, so that callbacks keep nothing from message to message
        callbacks = [self, *map(deepcopy, user_callbacks)]
        max_epochs = arguments.pop("max_epochs", None) or 0
        rounds = 0 if task is None else max(max_epochs, round + 1)
        with Undo() as undo, warnings.catch_warnings():
            for (owner, name), known in _kept.items():
                undo.replace(owner, name, known)
            fit = pl.Trainer(
                **{**arguments, "max_epochs": rounds, "limit_val_batches": 0, "enable_checkpointing": False},
                callbacks=callbacks,
            )
            # the first Trainer has logged these lines already
            _kept[_setup, "_log_device_info"] = _no_operation
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

    def shared_objects(self, other_round: LocalRound) -> list[Any]:
        """Return generators, and objects that this training changes for the next message.

        Args:
            other_round: A second trial of the same message. Objects in the copies of both trials are shared.
        """
        return self._snapshot.shared_objects(other_round._snapshot)

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace the Trainer's loader and loops with those of the client."""
        if stage != "fit":
            return
        with _refused_settings():
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
        with _refused_settings():
            check_batch_rule(rule, self._rule, self._federated.local)
        self._account = "account" if rule.protects_samples else "account of a seed"
        self._rule, rule.account = rule, self._told.saved.get(self._account, [])
        rule.loss_reduction = self._told.saved.get("loss_reduction")  # the first round decides it

    def fetch(self, indices: Tensor) -> Any:
        """Return some samples as one batch, without drawing random numbers."""
        with torch.random.fork_rng([]):
            return self._loader().fetch(indices)

    def present_batch(self, batch_idx: int) -> tuple[Stack, int]:
        """Return the only stack, and the index of a batch in it."""
        return self._stacks()[0], batch_idx

    def _deal(self, trainer: Any) -> PartitionedData:
        """Return the client's data, split at the first call, which `configure_optimizers` may make.

        Raises:
            RefusedError: If the data are a stream, since a pass over a stream has no end that a round could
                wait for.
        """
        if self._holdings is None:
            local, labels = self._federated.local, self._federated.clients.labels
            user_loader = self._user_loader()
            if isinstance(getattr(user_loader, "dataset", user_loader), IterableDataset):
                raise RefusedError(
                    "Training data must be a map-style Dataset, got a stream (an IterableDataset). Give a "
                    "Dataset of the samples to train on."
                )
            split = split_loader(
                user_loader,
                _OwnData,
                1,
                torch.Generator(),
                labels,
                LocalPasses(local.local_epochs, local.local_steps, self._limit, not trainer.overfit_batches),
                self._rule,
                self._held_out,
            )
            self._refuse(
                f"limit_train_batches={self._limit} leaves this client without a batch. Use a larger limit, "
                "or an int.",
                lambda: check_limit(split.work),
            )
            rule = self._rule
            if rule is not None:
                rule.begin(split.work)
            steps = int(rule is not None and self._task is None)  # registration tries one batch
            steps = 2 if isinstance(self._task, LaterRound) else steps
            schedule = Schedule(self._planner, self._federated.mechanism, split.work, rule, steps)
            loader: Any = split.loader(self._stacks, schedule.max_batches)
            if isinstance(self._task, LaterRound) and self._task.has_zero_batches:
                loader.iterate_stacks = functools.partial(_zero_batches, loader.iterate_stacks)
            held_out = [] if self._held_out is None else self._held_out.parts
            self._holdings = PartitionedData(
                list(split.work.client_indices), schedule, loader, False, held_out
            )
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
        check_schedules(trainer, self._federated.local.local_steps)
        counting = check_counted(pl_module, self._federated.local)
        if self._told.trained is not None:
            train_only(pl_module, trainer.optimizers, self._told.trained)
        self._trainer = trainer
        holdings = self._deal(trainer)
        forget_loader(trainer)
        local, schedule = self._federated.local, holdings.schedule
        steps = self._plan.round * -(-schedule.max_batches // int(trainer.accumulate_grad_batches))
        resume_counters(trainer, steps, steps)
        # A first step may reveal more changed state than the layers declare, so a batch is tried where a
        # module has such state. Registration always tries one, to fail early.
        rehearses = self._task is None or (local.buffers != "frozen" and has_other_state(pl_module))
        to_try = schedule.trial_stacks(self._plan.round, 1) if self._rule is None and rehearses else None
        with _refused_settings(ClientSettingsError):
            parts = local, holdings, self._loader, self._rule, self, _NO_FORKS, to_try
            self._side = ClientSide(trainer, *parts)
            self._side.check_algorithm(self._federated.mechanism)
        self.vector, self.segments = self._side.vector, self._side.vector.segments
        if self._task is None:
            self._side.begin("shared", None, number=self.number)
            self._try_client(to_try)
            self._is_done = True
            return
        if isinstance(self._task, RoundTask) and self.segments != list(self._task.segments):
            raise RefusedError(
                f"The server's model has segments of {_segments_text(self._task.segments)}, this client's "
                f"has {_segments_text(self.segments)}. Both sides need the same module with the same frozen "
                "parameters."
            )
        statistics = local.statistics
        if (mean := self._told.statistic) is not None:
            if statistics is None or len(mean) != statistics.size:
                raise RefusedError(
                    f"The server sends a mean of {len(mean)} numbers, but this client's statistics are "
                    f"{statistics!r}. Both sides need the same settings."
                )
            pass_statistic_to_module(pl_module, mean)
        if not isinstance(self._task, LaterRound):
            self.vector.write(self._given)
        self._counting: list[Tensor] = [
            attrgetter(f"{name}.num_batches_tracked")(pl_module) for name in counting
        ]
        before = self._plan.round + isinstance(self._task, int)
        # rounds of statistics count no batch
        before = max(before - (0 if statistics is None else statistics.rounds), 0)
        for counter in self._counting:  # each client counts the same number of batches in a round
            counter += before * schedule.max_batches
        self._side.begin("shared", self._begin_term(), number=self.number, itself=self._is_reset)
        check_names(self._told.saved, self.vector.personal.names)
        self._side.worker.states.put(0, self._told.saved)
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau:  # this schedule follows the validation, which the server runs
                continue
            ahead = steps if config.interval == "step" else self._plan.round
            # torch warns that this optimiser has not stepped, but those of earlier rounds have
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                for _ in range(ahead // config.frequency):
                    config.scheduler.step()
        self._copy_optimizer_settings(trainer)

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
            words = "Training fails on this client's data. The client's log has the reason."
            self._refuse(words, lambda: side.check_smallest(to_try[0]))
            words = "client_statistics fails on this client's data. The client's log has the reason."
            self._refuse(words, lambda: side.check_statistics(to_try[0]))
        self._check_watched()

    @staticmethod
    def _refuse(message: str, work: Callable[[], object]) -> None:
        """Run `work`. If it fails, log the error here and refuse with `message`, which the server reads."""
        try:
            work()
        except Exception as error:
            rank_zero_warn(f"{type(error).__name__}: {error}")
            raise RefusedError(message) from error

    def _evaluator(self) -> ClientEvaluator | None:
        """Return this client's evaluator, or None where clients are not evaluated."""
        settings, trainer, side = self._federated.local.evaluate_clients, self._trainer, self._side
        if settings is None or self._held_out is None:
            return None
        settings.check(trainer.lightning_module, self._federated.clients.num_clients, False)
        seed_of = lambda round, client: self._plan.stream_seed("evaluation", client)  # noqa: E731
        return ClientEvaluator(settings, trainer, side.worker, self._held_out.parts, self._loader, seed_of)

    def _check_watched(self) -> None:
        """Refuse schedules that watch a metric which clients log in training only.

        The server gets no training metrics from clients. Metrics of the validation are its own.

        Raises:
            RefusedError: If there is such a schedule. The message names the schedule and the metric.
        """
        side, loader, indices = self._side, self._loader(), self.client_indices[0]
        of_training = {fork for name in side.log.names for fork in metric_forks(name)}
        watched = {config.monitor: config for config in self._trainer.lr_scheduler_configs if config.monitor}
        for name in sorted(of_training.intersection(watched)):
            first_indices = indices[: loader.batch_size]
            try:
                if name in side.worker.evaluate(
                    0, iter([(loader.fetch(first_indices), len(first_indices))]), 0
                ):
                    continue
            # a training batch may not suit the validation, so the check has no result
            except Exception as error:
                rank_zero_warn(f"Could not check whether validation logs {name!r}: {error}")
                continue
            raise RefusedError(
                f"{type(watched[name].scheduler).__name__} watches {name!r}, which clients log only in "
                "training. Watch a metric of the server's validation."
            )

    def _copy_optimizer_settings(self, trainer: Any) -> None:
        """Copy the options of the server's optimisers, which callbacks of the server's fit may change.

        Raises:
            RefusedError: If the groups differ, or the server changes an integer option that is not a rate.
        """
        server_optimizers = self._told.groups
        if server_optimizers is None:
            return
        if [len(item) for item in server_optimizers] != [
            len(item.param_groups) for item in trainer.optimizers
        ]:
            raise RefusedError(
                "The server's optimisers have other parameter groups. Both sides need the same module."
            )
        for optimizer, groups in zip(trainer.optimizers, server_optimizers, strict=True):
            for group, server_group in zip(optimizer.param_groups, groups, strict=True):
                known = {name for name, value in group.items() if type(value) in (bool, int, float)}
                copied = {name: value for name, value in server_group.items() if name in known}
                # an integer may be a loop count, such as the steps of L-BFGS
                for name, value in copied.items():
                    counts = type(group[name]) is int and value != group[name] and not _RATES.search(name)
                    if counts or type(value) not in (bool, int, float):
                        raise RefusedError(
                            f"Optimiser option {name} is {group[name]} here, but the server sends "
                            f"{str(value)[:40]}. A server may change rates, not counts."
                        )
                group.update(copied)

    def _begin_term(self) -> Correction | None:
        """Return the client's half of the local algorithm, with the vector that the server sent, or None.

        Raises:
            RefusedError: If the vector's size differs from the number of parameters that this client trains.
        """
        algorithm, server_vector = self._federated.local.algorithm, self._told.algorithm_vector
        if algorithm is None:
            return None
        term = algorithm.begin(self.vector.num_parameters)
        if server_vector is not None and isinstance(term, PersistentOffsets):
            if server_vector.shape != term.server.shape:
                raise RefusedError(
                    f"The server's vector of {type(algorithm).__name__} has {len(server_vector)} values, but "
                    f"this client trains {len(term.server)}. Both sides need the same module."
                )
            term.server = server_vector
        return term

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Refuse to train on a loader other than the client's."""
        check_loader_is_ours(trainer, self._loader())

    def _measure(self) -> int:
        """Measure the models on this client's held-out samples, as the work of a `RoundLoop`."""
        assert isinstance(self._task, int)
        evaluator = self._evaluator()
        values = {} if evaluator is None else evaluator.measure(self._task).values
        self.measured = {
            model: {name: none_if_nan(float(value)) for name, value in metrics.items()}
            for model, metrics in values.items()
        }
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
        if self._told.trained is not None:  # apply the server's choice after the hooks of this round
            train_only(vector.module, self._trainer.optimizers, self._told.trained)
        start = vector.read().to(torch.promote_types(self._given.dtype, torch.float32))
        round_statistics = (
            statistics if statistics is not None and self._plan.round < statistics.rounds else None
        )
        with side.training(start, round_statistics) as trained:
            [self.update] = [result.updates[0] for result in trained]
            if isinstance(self._task, LaterRound):  # read by `shared_objects`
                self._snapshot = side.worker.fit.snapshot
        if round_statistics is None:
            self._check_counts()
        new_state = side.worker.states.pending().get(0, {})
        self.state = {**self._told.saved, **new_state, "names": list(vector.personal.names)}
        steps = side.clock.next_round_steps
        # with `itself`, the training has already advanced schedules, counters and loss scale
        if not side.worker.fit.itself:
            # the commit is local: the server says with its next message whether the round counts
            side.commit([0])
            steps = side.clock.steps
        # the server validates, so it also runs schedules that follow the validation
        strategy = self._trainer.strategy
        strategy.lr_scheduler_configs = [c for c in strategy.lr_scheduler_configs if not c.reduce_on_plateau]
        # set at the end, because a client that starts with it trains nothing
        self._trainer.should_stop = True
        return steps

    def _check_counts(self) -> None:
        """Refuse layers with momentum=None that have not counted each batch exactly once.

        A client computes the counts of earlier rounds from the settings, so these layers must count every
        batch once.

        Raises:
            RefusedError: If a layer has counted another number of batches than this client has trained on.
        """
        batches = len(self._stacks()[0].batch_sizes)
        vector = self.vector
        checked = {id(counter) for counter in self._counting}
        counters = [attrgetter(name)(vector.module) for name in vector.members.counters]
        counts = torch.split(vector.max_counted, [counter.numel() for counter in counters])
        for counter, counted in zip(counters, counts, strict=True):
            if id(counter) in checked and int(counted) != batches:
                raise RefusedError(
                    f"A layer with momentum=None counted {int(counted)} batches, but this client trained on "
                    f"{batches}: {_COUNTED}"
                )

    def teardown(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore everything that `setup` replaced."""
        if stage == "fit":
            self._undo.close()

    def on_exception(self, trainer: Any, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore everything that `setup` replaced."""
        self._undo.close()


def _no_operation(*args: Any) -> None:
    """Do nothing, in place of a hook of the whole fit, which runs on the server."""


@contextmanager
def _refused_settings(kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Raise an error about settings as `RefusedError`, because its text tells nothing about the data.

    Args:
        kind: Class of the errors about settings. Other errors pass.
    """
    try:
        yield
    except kind as error:
        raise RefusedError(str(error)) from error


_NO_FORKS = "a client tries in its own process"


def _zero_batches(by_stack: Callable[[], Iterator[tuple[Stack, Any]]]) -> Iterator[tuple[Stack, Any]]:
    """Yield the stacks and batches of a loader, with zeros in place of their tensors."""
    for stack, batches in by_stack():
        yield stack, (map_tensors(torch.zeros_like, batch) for batch in batches)


def has_other_state(module: torch.nn.Module) -> bool:
    """Return whether training may change tensors that it does not train: buffers or frozen parameters."""
    return any(True for _ in module.buffers()) or not all(p.requires_grad for p in module.parameters())


_COUNTED = "use momentum=0.1, or buffers='local' or 'frozen'"


def check_counted(module: torch.nn.Module, local: Local) -> list[str]:
    """Return layers whose running statistics depend on the number of batches in all earlier rounds.

    Returns:
        Names of these layers. Empty where buffers stay with each client or are frozen.

    Raises:
        RefusedError: If there is such a layer and `local_steps` is not set. The client with the most batches
            then determines the number, and no side knows that client over a network.
    """
    names = [
        name
        for name, layer in module.named_modules()
        if getattr(layer, "num_batches_tracked", None) is not None and getattr(layer, "momentum", 0) is None
    ]
    if local.buffers != "share":
        return []
    if names and local.local_steps is None:
        raise RefusedError(
            f"{names[0]} has momentum=None, but its number of batches is unknown over a network. Set "
            f"local_steps=..., or {_COUNTED}"
        )
    return names


def check_schedules(trainer: pl.Trainer, local_steps: int | None) -> None:
    """Refuse schedules and checkpoints that count steps where no side knows the number of steps.

    Args:
        trainer: Trainer of the client or the server.
        local_steps: Steps of every client in a round, or None where they follow from the data.

    Raises:
        RefusedError: If one of them counts steps and `local_steps` is None. The client with the most steps
            then sets the pace, and no side knows that client over a network.
    """
    callbacks: Any = get_callbacks(trainer)
    if local_steps is None and any(getattr(one, "_every_n_train_steps", 0) for one in callbacks):
        raise RefusedError(
            "ModelCheckpoint(every_n_train_steps=...) counts steps, which are unknown over a network. Set "
            "Federated(local_steps=...), or every_n_epochs to save every n rounds."
        )
    if local_steps is None and any(config.interval == "step" for config in trainer.lr_scheduler_configs):
        raise RefusedError(
            "A schedule has interval='step', but the longest client's steps are unknown over a network. Set "
            "Federated(local_steps=...), or interval='epoch' to step by rounds."
        )


def _segments_text(segments: Sequence[int]) -> str:
    """Return up to six segment sizes and the sum of all sizes, as text."""
    shown = ", ".join(map(str, segments[:6])) + (", ..." if len(segments) > 6 else "")
    return f"[{shown}] ({sum(segments)} in all)"
