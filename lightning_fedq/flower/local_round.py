"""One client's round on its own machine: global weights in, update out.

The client's Trainer counts rounds as a simulation's does, and its client trains as a simulated one: a fit of
its own on a copy, with the same draws, the same batches and the same clock. Nothing is encoded here.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
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
    check_algorithm,
    check_batch_rule,
    check_limit,
    check_loader_is_ours,
    check_optimizers,
    check_setup,
    check_shapes,
)
from lightning_fedq.training.client_evaluation import ClientEvaluator, none_if_nan, pass_statistic_to_module
from lightning_fedq.training.client_metrics import metric_forks
from lightning_fedq.training.loops import OF_THE_FIT, Schedule, forget_loader, install_round_loop
from lightning_fedq.training.population import PartitionedData
from lightning_fedq.training.round import ClientSide
from lightning_fedq.training.settings import Local

_RATES = re.compile("lr|momentum|dampening|weight_decay")
"""Numbers of optimisers that are no count, also where somebody has written 0."""
_registry: Any = sys.modules[pl.trainer.connectors.callback_connector._load_external_callbacks.__module__]  # type: ignore[attr-defined]
_setup: Any = pl.trainer.setup  # type: ignore[attr-defined]
_kept: dict[tuple[Any, str], Any] = {
    (_registry, "entry_points"): functools.cache(_registry.entry_points),
    (torch.cuda, "device_count"): functools.cache(torch.cuda.device_count),
}
"""What a Trainer looks for whenever one is made, and a process need know once."""


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
    """Draws the rounds of client `number` of the federation, which is number 0 here."""

    number: int = 0

    def plan(self, round: int, mechanism: Mechanism, attempt: int = 0) -> RoundPlan:
        return _OwnPlan(round, ((0,),), frozenset(), self.seed, self.number)


class RoundInputs(NamedTuple):
    """Return all that a client goes on with, beside the global weights.

    Args:
        saved: What it has kept of its earlier rounds.
        algorithm_vector: `(num_parameters,)` vector of the local algorithm's server; None where it sends
            none.
        groups: Numbers of the groups of the server's optimisers; None where it sends none.
        trained: Names of the parameters that the server's fit trains now; None where it does not say.
        statistic: `(size,)` mean of all clients' statistics; None before it is released.
    """

    saved: State
    algorithm_vector: Tensor | None = None
    groups: list[list[dict[str, Any]]] | None = None
    trained: list[str] | None = None
    statistic: Tensor | None = None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], saved: State) -> RoundInputs:
        """Read a message.

        Args:
            saved: What the client has kept.

        Raises:
            RefusedError: If it says something else.
        """
        theirs, groups, trained = (fields.get(name) for name in ("algorithm", "groups", "trained"))
        statistic = fields.get("statistic")
        try:
            vector = None if theirs is None else torch.frombuffer(bytearray(theirs), dtype=torch.float32)
            mean = None if statistic is None else torch.frombuffer(bytearray(statistic), dtype=torch.float32)
            numbers = [[dict(group) for group in one] for one in json.loads(groups or "[]")]
            names = [str(name) for name in json.loads(trained or "[]")]
            if json.dumps(numbers) != (groups or "[]") or json.dumps(names) != (trained or "[]"):
                raise ValueError("neither groups of numbers nor names")
            given = None if groups is None else numbers, None if trained is None else names
            return cls(saved, vector, *given, mean)
        except (ValueError, TypeError) as error:
            raise RefusedError(
                f"the server's message says nothing readable of its optimisers: {error}"
            ) from error


class LaterRound(NamedTuple):
    """A message of a later round that is tried before the first: two batches, from the module's own weights.

    Args:
        has_zero_batches: Put zeros in the place of the data's tensors.
    """

    has_zero_batches: bool = False
    round: int = 1


class LocalRound(pl.Callback):
    """One client's local training in one round.

    Args:
        number: The client's number in it.
        seed: Seed of data order and of the training's random numbers.
        task: The round, or a later one to be tried; None only looks at what would travel. A number measures
            the model after this round.
        weights: `(dim,)` the global model.
        inputs: What the client goes on with beside it.
        held_out_seed: Seed of the choice of samples that are measured on, and never trained on; None is
            `seed`.
        is_reset: Is all that this message trains made for it alone, so that nothing need be copied?

    Attributes:
        measured: By model, what validation logs, None where it is not defined.
        update: `(dim,)` local - global, once the fit is over; in a round of statistics the `(size,)` vector.
        state: What this client would keep, if the round counts.
        segments: Sizes of the segments of what travels, once the fit has begun.
        vector: What travels, once the fit has begun.
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
        """Train the client for its round, or measure it, in a Trainer of its own. Returns this object.

        Args:
            module: The client's own; its weights are overwritten.
            data: The client's own.
            trainer: Arguments of the client's `Trainer`.

        Raises:
            RefusedError: If the model is of another shape than the server's, or a setting can't work.
        """
        task, round = self._task, self._plan.round
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        given = {**quiet, "num_sanity_val_steps": 0, **trainer}
        own = given.pop("callbacks", None) or []
        own = [own] if isinstance(own, pl.Callback) else own
        if task is None and (left := sorted(type(one).__name__ for one in own if not changes_training(one))):
            rank_zero_info(f"{', '.join(left)}: of the whole fit, which is the server's; left out here")
        own = [one for one in own if changes_training(one)]
        # as they were made: what they keep of one message is not there in the next
        callbacks = [self, *map(deepcopy, own)]
        wanted = given.pop("max_epochs", None) or 0
        rounds = 0 if task is None else max(wanted, round + 1)
        with Undo() as undo, warnings.catch_warnings():
            for (owner, name), known in _kept.items():
                undo.replace(owner, name, known)
            fit = pl.Trainer(
                **{**given, "max_epochs": rounds, "limit_val_batches": 0, "enable_checkpointing": False},
                callbacks=callbacks,
            )
            _kept[_setup, "_log_device_info"] = _no_operation  # two lines of the log, which have been said
            epochs: Any = fit.fit_loop.epoch_progress.current
            epochs.processed = epochs.completed = round  # the round is `current_epoch`
            # what is validated is the server's model
            warnings.filterwarnings("ignore", message="You defined a `validation_step` but have no")
            try:
                fit.fit(module, datamodule=data)
            except Exception as error:
                if not self._is_done:
                    raise
                rank_zero_warn(f"after the work of a message, which counts: {type(error).__name__}: {error}")
        return self

    def shared_objects(self, other_round: LocalRound) -> list[Any]:
        """Objects that another message would find as this one's training leaves them, and generators."""
        return self._snapshot.shared_objects(other_round._snapshot)

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Put the client's loader and loops in place of the Trainer's own."""
        if stage != "fit":
            return
        check_setup(trainer, pl_module)
        run = self._measure if isinstance(self._task, int) else self.run_round
        run = self._train if isinstance(self._task, LaterRound) else run

        def work() -> int:
            steps = run()
            self._is_done = True
            return steps

        install_round_loop(trainer, work, lambda name, value: None, self._undo)
        for one in (pl_module, *(c for c in trainer.callbacks if not knows_clients(c))):
            for hook in OF_THE_FIT:
                if hasattr(one, hook):
                    self._undo.replace(one, hook, _no_operation)
        owner = trainer.datamodule
        self._user_loader = owner.train_dataloader
        self._limit = 1.0 if trainer.fast_dev_run else trainer.limit_train_batches
        self._undo.replace(trainer, "limit_train_batches", 1.0)
        self._undo.replace(owner, "train_dataloader", lambda: self._deal(trainer).loader)

    # ---- what a rule of the batches asks of a federation -------------------------------------------------

    engine = None  # which is elsewhere

    @property
    def fit(self) -> LocalRound:
        """This one."""
        return self

    @property
    def client_indices(self) -> list[Tensor]:
        """Sample indices of this client."""
        return [] if self._holdings is None else self._holdings.client_indices

    def use_batches(self, rule: Any) -> None:
        """Let a rule draw the batches, and go on with the account that this client has kept of it."""
        check_batch_rule(rule, self._rule, self._federated.local)
        self._account = "account" if rule.protects_samples else "account of a seed"
        self._rule, rule.account = rule, self._told.saved.get(self._account, [])
        rule.loss_reduction = self._told.saved.get("loss_reduction")  # decided in the first round

    def fetch(self, indices: Tensor) -> Any:
        """Some samples as one batch. Draws nothing."""
        with torch.random.fork_rng([]):
            return self._loader().fetch(indices)

    def present_batch(self, batch_idx: int) -> tuple[Stack, int]:
        """The only stack, and which of its batches that is."""
        return self._stacks()[0], batch_idx

    def _deal(self, trainer: Any) -> PartitionedData:
        """The client's own data. Dealt out at the first question, which `configure_optimizers` may ask."""
        if self._holdings is None:
            local, labels = self._federated.local, self._federated.clients.labels
            given = self._user_loader()
            if isinstance(getattr(given, "dataset", given), IterableDataset):
                raise RefusedError(
                    "the data are a stream (an IterableDataset), whose passes have no end that a round could "
                    "wait for; give a map-style Dataset of what the round is to train on"
                )
            dealt = split_loader(
                given,
                _OwnData,
                1,
                torch.Generator(),
                labels,
                LocalPasses(local.local_epochs, local.local_steps, self._limit, not trainer.overfit_batches),
                self._rule,
                self._held_out,
            )
            check_limit(dealt.work)
            rule = self._rule
            if rule is not None:
                rule.begin(dealt.work)
            steps = int(rule is not None and self._task is None)  # only one is tried
            steps = 2 if isinstance(self._task, LaterRound) else steps
            schedule = Schedule(self._planner, self._federated.mechanism, dealt.work, rule, steps)
            loader: Any = dealt.loader(self._stacks, schedule.max_batches)
            if isinstance(self._task, LaterRound) and self._task.has_zero_batches:
                loader.iterate_stacks = functools.partial(_zero_batches, loader.iterate_stacks)
            held_out = [] if self._held_out is None else self._held_out.parts
            self._holdings = PartitionedData(
                list(dealt.work.client_indices), schedule, loader, False, held_out
            )
        return self._holdings

    def _loader(self) -> ClientLoader:
        return self._deal(self._trainer).loader

    def _stacks(self) -> Sequence[Stack]:
        schedule = self._deal(self._trainer).schedule
        return schedule.stacks(self._plan.round, 0, 1, self._side.clock.max_batches)

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Find what travels, and move model, counters and schedules to the round at hand.

        Raises:
            RefusedError: If the model is of another shape than the server's, or there is a schedule that
                clients can't follow.
        """
        check_shapes(pl_module)
        check_optimizers(trainer)
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
        # later messages rehearse where that finds more than the layers say; the first one also to fail early
        rehearses = self._task is None or (local.buffers != "frozen" and has_other_state(pl_module))
        to_try = schedule.trial_stacks(self._plan.round, 1) if self._rule is None and rehearses else None
        self._side = ClientSide(trainer, local, holdings, self._loader, self._rule, self, _NO_FORKS, to_try)
        self.vector, self.segments = self._side.vector, self._side.vector.segments
        if self._task is None:
            self._side.begin("shared", None, number=self.number)
            self._try_client(to_try)
            self._is_done = True
            return
        if isinstance(self._task, RoundTask) and self.segments != list(self._task.segments):
            raise RefusedError(
                f"the server's model is cut into segments of {_segments_text(self._task.segments)}, this "
                "client's "
                f"into {_segments_text(self.segments)}; both sides need the same module, with the same "
                "parameters frozen"
            )
        statistics = local.statistics
        if (mean := self._told.statistic) is not None:
            if statistics is None or len(mean) != statistics.size:
                raise RefusedError(
                    f"the server sends a mean of {len(mean)} numbers, here {statistics!r} is asked for; "
                    "both sides need the same settings"
                )
            pass_statistic_to_module(pl_module, mean)
        if not isinstance(self._task, LaterRound):
            self.vector.write(self._given)
        self._counting: list[Tensor] = [
            attrgetter(f"{name}.num_batches_tracked")(pl_module) for name in counting
        ]
        before = self._plan.round + isinstance(self._task, int)
        before = max(before - (0 if statistics is None else statistics.rounds), 0)  # which count no batch
        for counter in self._counting:  # what the rounds before have counted, which is the same for everybody
            counter += before * schedule.max_batches
        self._side.begin("shared", self._begin_term(), number=self.number, itself=self._is_reset)
        check_names(self._told.saved, self.vector.personal.names)
        self._side.worker.states.put(0, self._told.saved)
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau:  # the server has the validation that it follows
                continue
            ahead = steps if config.interval == "step" else self._plan.round
            with warnings.catch_warnings():  # torch expects the optimiser to have stepped; other rounds' have
                warnings.simplefilter("ignore", UserWarning)
                for _ in range(ahead // config.frequency):
                    config.scheduler.step()
        self._copy_optimizer_settings(trainer)

    def _try_client(self, to_try: Sequence[Stack] | None) -> None:
        """Refuse, before the first round, what can't work on this client's data.

        Raises:
            RefusedError: In words that tell the server nothing of the data; a warning here says more.
        """
        side = self._side
        if to_try is None:  # one step of a rule's, which may refuse the module or its loss, and is dropped
            side.begin_round()
            with side.training(self.vector.read()) as trained:
                list(trained)
        else:
            words = "the training fails on this client's data; its own log says why"
            self._refuse(words, lambda: side.check_smallest(to_try[0]))
            words = "client_statistics fails here; the client's own log says why"
            self._refuse(words, lambda: side.check_statistics(to_try[0]))
        self._check_watched()

    @staticmethod
    def _refuse(message: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            rank_zero_warn(f"{type(error).__name__}: {error}")
            raise RefusedError(message) from error

    def _evaluator(self) -> ClientEvaluator | None:
        """Measures this client, as a simulation does."""
        settings, trainer, side = self._federated.local.evaluate_clients, self._trainer, self._side
        if settings is None or self._held_out is None:
            return None
        settings.check(trainer.lightning_module, self._federated.clients.num_clients, False)
        seed_of = lambda round, client: self._plan.stream_seed("evaluation", client)  # noqa: E731
        return ClientEvaluator(settings, trainer, side.worker, self._held_out.parts, self._loader, seed_of)

    def _check_watched(self) -> None:
        """Refuse schedules that follow what clients log in training, of which the server hears nothing.

        What is logged in validation, too, the server has by itself.

        Raises:
            RefusedError: Naming the schedule and the metric.
        """
        side, loader, held = self._side, self._loader(), self.client_indices[0]
        of_training = {fork for name in side.log.names for fork in metric_forks(name)}
        watched = {config.monitor: config for config in self._trainer.lr_scheduler_configs if config.monitor}
        for name in sorted(of_training.intersection(watched)):
            one = held[: loader.batch_size]
            try:
                if name in side.worker.evaluate(0, iter([(loader.fetch(one), len(one))]), 0):
                    continue
            except Exception as error:  # batches of the validation may be others, and nothing is known
                rank_zero_warn(f"whether validation logs {name!r} was not tried out: {error}")
                continue
            raise RefusedError(
                f"{type(watched[name].scheduler).__name__} watches {name!r}, which clients log in training, "
                "and the server hears nothing of it; watch a metric of the validation, which is the server's"
            )

    def _copy_optimizer_settings(self, trainer: Any) -> None:
        """Step with the numbers of the server's optimisers, which callbacks of its fit may change."""
        theirs = self._told.groups
        if theirs is None:
            return
        if [len(one) for one in theirs] != [len(one.param_groups) for one in trainer.optimizers]:
            raise RefusedError("the server's optimisers have other groups; both sides need the same module")
        for optimizer, groups in zip(trainer.optimizers, theirs, strict=True):
            for own, given in zip(optimizer.param_groups, groups, strict=True):
                known = {name for name, value in own.items() if type(value) in (bool, int, float)}
                taken = {name: value for name, value in given.items() if name in known}
                for name, value in taken.items():  # an optimiser loops over whole numbers: steps of L-BFGS
                    counts = type(own[name]) is int and value != own[name] and not _RATES.search(name)
                    if counts or type(value) not in (bool, int, float):
                        raise RefusedError(
                            f"{name} of the optimiser is {own[name]} here, and the server says "
                            f"{str(value)[:40]}; a server changes rates, and no count"
                        )
                own.update(taken)

    def _begin_term(self) -> Correction | None:
        """The local algorithm's half at this client, with the vector of the server's half."""
        algorithm, theirs = self._federated.local.algorithm, self._told.algorithm_vector
        if algorithm is None:
            return None
        check_algorithm(algorithm, self._trainer, self._rule, True)
        term = algorithm.begin(self.vector.num_parameters)
        if theirs is not None and isinstance(term, PersistentOffsets):
            if theirs.shape != term.server.shape:
                raise RefusedError(
                    f"the server's vector of {type(algorithm).__name__} has {len(theirs)} values, this "
                    f"client's model trains {len(term.server)}; both sides need the same module"
                )
            term.server = theirs
        return term

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Refuse to train on a loader that is not the client's."""
        check_loader_is_ours(trainer, self._loader())

    def _measure(self) -> int:
        """Measure the client. See `RoundLoop`."""
        assert isinstance(self._task, int)
        evaluator = self._evaluator()
        values = {} if evaluator is None else evaluator.measure(self._task).values
        self.measured = {
            model: {name: none_if_nan(float(value)) for name, value in found.items()}
            for model, found in values.items()
        }
        self._trainer.should_stop = True
        return 0

    def run_round(self) -> int:
        """Train the client, and note what it goes on with. See `RoundLoop`."""
        steps, rule = self._train(), cast(Any, self._rule)
        if rule is not None:
            self.state |= {self._account: rule.account, "loss_reduction": rule.loss_reduction}
            rank_zero_info(f"round {self._plan.round + 1}: {rule.statement().line}")
        return steps

    def _train(self) -> int:
        side, vector, statistics = self._side, self.vector, self._federated.local.statistics
        side.begin_round()
        if self._told.trained is not None:  # the hooks of this round have run
            train_only(vector.module, self._trainer.optimizers, self._told.trained)
        start = vector.read().to(torch.promote_types(self._given.dtype, torch.float32))
        asked = statistics if statistics is not None and self._plan.round < statistics.rounds else None
        with side.training(start, asked) as trained:
            [self.update] = [one.updates[0] for one in trained]
            if isinstance(self._task, LaterRound):  # of which is asked what it shares
                self._snapshot = side.worker.fit.snapshot
        if asked is None:
            self._check_counts()
        opened = side.worker.states.pending().get(0, {})
        self.state = {**self._told.saved, **opened, "names": list(vector.personal.names)}
        steps = side.clock.next_round_steps
        if not side.worker.fit.itself:  # else schedules, counters and loss scale have moved with the client
            side.commit([0])  # here: whether it counts in the federation, the next message says
            steps = side.clock.steps
        strategy = self._trainer.strategy  # what is validated, and followed by a plateau, is the server's
        strategy.lr_scheduler_configs = [c for c in strategy.lr_scheduler_configs if not c.reduce_on_plateau]
        self._trainer.should_stop = True  # last: a client that begins so trains nothing
        return steps

    def _check_counts(self) -> None:
        """Refuse layers that count anything but each batch once: what others count would not be known."""
        batches = len(self._stacks()[0].batch_sizes)
        vector = self.vector
        own = {id(counter) for counter in self._counting}
        counters = [attrgetter(name)(vector.module) for name in vector.members.counters]
        found = torch.split(vector.max_counted, [counter.numel() for counter in counters])
        for counter, counted in zip(counters, found, strict=True):
            if id(counter) in own and int(counted) != batches:
                raise RefusedError(
                    f"a layer with momentum=None has counted {int(counted)} batches where this client has "
                    f"trained on {batches}, so what others count is not known; {_COUNTED}"
                )

    def teardown(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Take everything off again."""
        if stage == "fit":
            self._undo.close()

    def on_exception(self, trainer: Any, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Take everything off again."""
        self._undo.close()


def _no_operation(*args: Any) -> None:
    """Stand in for a hook of the whole fit, which is the server's."""


_NO_FORKS = "a client tries in its own process"


def _zero_batches(by_stack: Callable[[], Iterator[tuple[Stack, Any]]]) -> Iterator[tuple[Stack, Any]]:
    """The batches of a loader, with zeros in the place of their tensors."""
    for stack, batches in by_stack():
        yield stack, (map_tensors(torch.zeros_like, batch) for batch in batches)


def has_other_state(module: torch.nn.Module) -> bool:
    """Are there tensors that a training may change beside those that it trains?"""
    return any(True for _ in module.buffers()) or not all(p.requires_grad for p in module.parameters())


_COUNTED = "use momentum=0.1, or buffers='local' or 'frozen'"


def check_counted(module: torch.nn.Module, local: Local) -> list[str]:
    """Layers whose running statistics depend on how many batches all rounds before have had.

    Returns:
        Their names; none where statistics stay with each client, or as they are.

    Raises:
        RefusedError: If a round's longest client sets that number, whom nobody knows over a network.
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
            f"{names[0]} has momentum=None, the mean of all batches so far: their number follows from the "
            f"longest client, whom nobody knows over a network; say local_steps=..., or {_COUNTED}"
        )
    return names


def check_schedules(trainer: pl.Trainer, local_steps: int | None) -> None:
    """Refuse schedules whose steps nobody knows.

    Args:
        local_steps: Steps of every client in a round, where they are given.

    Raises:
        RefusedError: If a schedule counts steps of the longest client, whom no side knows.
    """
    if local_steps is None and any(config.interval == "step" for config in trainer.lr_scheduler_configs):
        raise RefusedError(
            "a schedule with interval='step' goes on by the steps of the longest client, and over a network "
            "nobody knows who that is; say Federated(local_steps=...), or step by rounds (interval='epoch')"
        )


def _segments_text(segments: Sequence[int]) -> str:
    shown = ", ".join(map(str, segments[:6])) + (", ..." if len(segments) > 6 else "")
    return f"[{shown}] ({sum(segments)} in all)"
