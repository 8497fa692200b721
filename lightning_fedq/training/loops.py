"""Stacks of a round, and loops in which the user's Trainer counts a round as one epoch.

The stacks are a pure function of the round's plan. If a `BatchRule` draws the batches, they also depend on
the rule's state.

The loops replace Lightning's own during a fit, and clients train in separate fits. In the user's Trainer a
round counts as one epoch of one client's training: as many batches and optimiser steps as the client with the
most batches has. So `max_steps`, `global_step`, `val_check_interval` and the names of checkpoints mean the
same as without a federation. Validation, checkpoints, early stopping, averages and loggers use global models
only. `on_train_epoch_end` of the module, and of callbacks that look at batches, is called for the clients. A
module may have a hook `on_round_end(self)` for the server's work at the end of a round.

`WeightAveraging` and `EMAWeightAveraging` average after every step. Here the end of a round stands for all of
its steps. The global model enters the average once if the callback's `should_update` asks for any step of the
client with the most batches.

A loader that is passed to `fit(...)` is replaced through a private attribute (tested with Lightning 2.4 and
2.6): `fit_loop._data_source.instance` is the source of the training loader. With the module in its place,
Lightning calls the module's `train_dataloader`, which can be replaced by public means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from lightning_fedq._lightning import get_callbacks, pl, rank_zero_info
from lightning_fedq.clients.hooks import (
    call_hooks,
    has_user_hook,
    is_shared_by_clients,
    looks_at_batches,
    trains_with_clients,
)
from lightning_fedq.clients.undo import Undo
from lightning_fedq.data.batches import BatchRule, LocalWork, Stack
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.rounds import RoundPlan, RoundPlanner
from lightning_fedq.training.client_metrics import ObservedResults


def idle_stack(plan: RoundPlan) -> Stack:
    """Return a stack without clients, with one step that does nothing."""
    return Stack((), (1,), plan.stream_seed("training"), ())


def round_stacks(
    plan: RoundPlan,
    batch_sizes: Callable[[int], tuple[int, ...]],
    shuffled: Callable[[int], bool],
    clients_per_step: int,
) -> list[Stack]:
    """Divide the clients that answer into stacks that train in one step.

    Clients of a stack have equal batch shapes, and either all or none of them shuffle. The sizes of stacks
    of one kind differ by at most one client. A client's seeds do not depend on the other clients.

    Args:
        plan: Plan of the round.
        batch_sizes: Returns the sizes of a client's batches in the round.
        shuffled: Returns whether a client's data are shuffled.
        clients_per_step: Largest number of clients in a stack, >= 1.

    Returns:
        Stacks of the round. One stack without clients if no client answers.
    """
    if not plan.survivors:
        return [idle_stack(plan)]
    alike: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for client in plan.survivors:
        alike.setdefault((batch_sizes(client), shuffled(client)), []).append(client)
    stacks = []
    for (sizes, shuffles), clients in alike.items():
        num_stacks = -(-len(clients) // clients_per_step)
        bounds = [len(clients) * index // num_stacks for index in range(num_stacks + 1)]
        for start, stop in pairwise(bounds):
            members = tuple(clients[start:stop])
            orders = tuple(plan.stream_seed("data order", c) for c in members) if shuffles else ()
            first = plan.stream_seed("training", members[0])
            seed_of = partial(plan.stream_seed, "training")
            stacks.append(Stack(members, sizes, first, orders, training_seed_of=seed_of))
    return stacks


def first_steps(stacks: Sequence[Stack], num_steps: int) -> list[Stack]:
    """Return the first steps of a round, for `fast_dev_run`: whole stacks, or a part of the first one."""
    whole, remaining = [], num_steps
    for stack in stacks:
        if len(stack.batch_sizes) > remaining:
            break
        whole.append(stack)
        remaining -= len(stack.batch_sizes)
    cut: dict[str, Any] = {
        name: getattr(stacks[0], name)[:num_steps] for name in ("batch_sizes", "samples", "keys")
    }
    return whole or [replace(stacks[0], **cut)]


class Schedule:
    """Stacks of any round. The last result is stored, because a batch rule may draw its batches only once.

    Args:
        mechanism: Mechanism, which divides a cohort into groups.
        work: Batch sizes of all clients.
        rule: Rule that draws batches. None trains whole passes over the data.
        num_steps: Number of steps after which a round is cut. 0 for no limit.
    """

    def __init__(
        self,
        planner: RoundPlanner,
        mechanism: Mechanism,
        work: LocalWork,
        rule: BatchRule | None,
        num_steps: int,
    ) -> None:
        self._planner, self._mechanism, self._work = planner, mechanism, work
        self._rule, self._num_steps = rule, num_steps
        self._last_stacks: tuple[tuple[int, int, int, int | None], list[Stack]] | None = None

    @property
    def max_batches(self) -> int:
        """Number of batches of the client that has most of them in a round."""
        longest = max(map(len, self._work.sizes))
        return min(longest, self._num_steps) if self._num_steps else longest

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """Batch sizes of each client in a round."""
        return self._work.sizes

    @property
    def has_equal_batches(self) -> bool:
        """Whether all clients have the same number of batches in a round."""
        return len({len(sizes) for sizes in self._work.sizes}) == 1

    def stacks(
        self, round: int, attempt: int, clients_per_step: int, max_batches: int | None = None
    ) -> list[Stack]:
        """Return this process's stacks of one attempt at a round, with `max_batches` a client at most."""
        key = (round, attempt, clients_per_step, max_batches)
        if self._last_stacks is None or self._last_stacks[0] != key:
            self._last_stacks = (key, self._make_stacks(*key))
        return self._last_stacks[1]

    def _make_stacks(
        self, round: int, attempt: int, clients_per_step: int, max_batches: int | None
    ) -> list[Stack]:
        return self.global_stacks(round, attempt, clients_per_step, max_batches)

    def global_stacks(
        self, round: int, attempt: int, clients_per_step: int, max_batches: int | None = None
    ) -> list[Stack]:
        """Return the stacks of all processes, in the order in which one process would train them."""
        plan = self._planner.plan(round, self._mechanism, attempt)
        return self._cut_stacks(plan, attempt, clients_per_step, max_batches)

    def trial_stacks(self, round: int, clients_per_step: int) -> list[Stack]:
        """Return stacks for a dry round: those of the expected, public plan, which draws no secret cohort."""
        return self._cut_stacks(self._planner.expected(round, self._mechanism), 0, clients_per_step, None)

    def _cut_stacks(
        self, plan: RoundPlan, attempt: int, clients_per_step: int, max_batches: int | None
    ) -> list[Stack]:
        work, rule = self._work, self._rule
        if rule is None:
            stacks = round_stacks(
                plan, lambda c: work.sizes[c][:max_batches], work.shuffles, clients_per_step
            )
        else:  # one stack for each client that answers, with the batches that the rule draws for it
            stacks, drawn = [], rule.draw(plan.round, attempt, plan.survivors)
            for client, batches in zip(plan.survivors, drawn, strict=True):
                own, seed = batches[:max_batches], plan.stream_seed("training", client)
                sizes, keys = tuple(map(len, own)), rule.keys(client, len(own))
                stacks.append(Stack((client,), sizes, seed, (), own, keys))
            stacks = stacks or [idle_stack(plan)]
        return first_steps(stacks, self._num_steps) if self._num_steps else stacks


# ---- the user's Trainer ------------------------------------------------------------------------------------


OF_THE_FIT = ("on_round_end", "on_train_end", "on_fit_end")
"""Hooks that end rounds and fits. In a deployment the server calls them, and no client's message does."""
_loops: Any = pl.loops


class StepPeriod(int):
    """Period in steps, which counts as reached if a multiple of it is among the steps of a round.

    Lightning asks `step % period == 0`, where `step` is the last step of a round. So `step % period` is 0
    here if the period is reached.

    Examples:
        >>> 12 % StepPeriod(10, range(7, 13)), 18 % StepPeriod(10, range(13, 19))
        (0, 1)
    """

    steps: range

    def __new__(cls, period: int, steps: range) -> StepPeriod:
        made = super().__new__(cls, period)
        made.steps = steps
        return made

    def __rmod__(self, step: int) -> int:
        """Return 0 if the steps contain a multiple of the period, otherwise 1."""
        period = int(self)
        return int((self.steps.stop - 1) // period == (self.steps.start - 1) // period)


class RoundLoop(_loops._TrainingEpochLoop):  # type: ignore[misc]
    """Lightning's epoch loop with a round as its only step.

    Attributes:
        run_round: Trains a round and writes the new global model into the module. Returns the number of one
            client's optimiser steps in the round, or None if the round was given up.
    """

    run_round: Callable[[], int | None]

    def advance(self, data_fetcher: Any) -> None:
        """Train one round."""
        if self._resumes_behind_round(data_fetcher):
            return
        trainer, progress, batches = self.trainer, self.batch_progress, int(self.trainer.num_training_batches)
        for_fit = [c for c in trainer.callbacks if not (looks_at_batches(c) or is_shared_by_clients(c))]
        start = self._batches_that_stepped + 1  # logged step of the first step of this round
        since_last = range(getattr(self, "_logged", start - 1) + 1, start + 1)
        self._logged = start
        for callback in for_fit:
            batch = self._empty_batch() if has_user_hook(callback, "on_train_batch_start") else None
            with self._periods(callback, since_last, since_last):
                call_hooks(trainer, [callback], "on_train_batch_start", batch, 0)
        before = self.global_step
        steps = self.run_round()
        if steps is None:
            raise StopIteration
        for counts in (progress.total, progress.current):
            counts.ready += batches
            counts.started += batches
            counts.processed += batches
            counts.completed += batches - 1  # the last one is completed after its hooks, as in Lightning
        progress.is_last_batch = True
        automatic = self.automatic_optimization.optim_progress.optimizer.step.total
        for counts in (automatic, self.manual_optimization.optim_step_progress.total):
            counts.ready = counts.completed = before + steps
        trainer._logger_connector._first_loop_iter = False
        of_round, logged = range(before + 1, before + steps + 1), range(start, start + steps)
        for callback in for_fit:
            own = has_user_hook(callback)
            seen = ({"loss": torch.tensor(math.nan)}, self._empty_batch()) if own else (None, None)
            with self._periods(callback, of_round, logged):
                call_hooks(trainer, [callback], "on_train_batch_end", *seen, batches - 1)
        trainer._logger_connector.on_batch_end()
        progress.increment_completed()
        self._batches_that_stepped += steps - 1  # Lightning counts the last step

    def _resumes_behind_round(self, data_fetcher: Any) -> bool:
        """Return whether a resumed fit goes on with the validation of a finished round, as in Lightning."""
        validation = self.val_loop
        if self.restarting and self.batch_progress.current.ready and self._should_check_val_fx(data_fetcher):
            if validation.restarted_mid_evaluation:
                return True
            if self.restarted_on_last:
                self._skip_next_val = True
                return True
            validation.increment_progress_to_evaluation_end()
        validation.restarting = False
        return False

    @contextmanager
    def _periods(self, callback: Any, steps: range, logged: range) -> Iterator[None]:
        """Let a callback's hook find periods in steps reached if one of the round's steps reaches them.

        Args:
            steps: Optimiser steps of one client that the hook stands for.
            logged: The same steps on the axis of the loggers.
        """
        with Undo() as undo:
            every = getattr(callback, "_every_n_train_steps", 0)  # of `ModelCheckpoint`
            if isinstance(every, int) and every >= 1:
                undo.replace(callback, "_every_n_train_steps", StepPeriod(every, steps))
            if self.trainer.log_every_n_steps:
                period = StepPeriod(self.trainer.log_every_n_steps, logged)
                undo.replace(self.trainer, "log_every_n_steps", period)
            yield

    def _empty_batch(self) -> Any:
        """Return one sample of zeros in the structure of a batch. None if clients have their own loaders."""
        try:
            return self.trainer.train_dataloader.fetch(torch.empty(0, dtype=torch.int64))
        except (AttributeError, ValueError):
            return None

    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Update only schedules that follow a metric, because the clock steps the others."""
        if interval == "epoch" and update_plateau_schedulers:
            super()._update_learning_rates(interval, update_plateau_schedulers)


class RoundFitLoop(_loops._FitLoop):  # type: ignore[misc]
    """Lightning's loop over epochs, which leaves `on_train_epoch_end` to the clients."""

    def on_advance_end(self) -> None:
        """End a round: call the hooks, and count the epoch."""
        trainer, module = self.trainer, self.trainer.lightning_module
        trainer._logger_connector.epoch_end_reached()
        self.epoch_progress.increment_processed()
        # callbacks that watch metrics come last, because other callbacks and the module may log them
        for_fit = [c for c in trainer.callbacks if not trains_with_clients(c)]
        watchers = [c for c in for_fit if isinstance(c, pl.callbacks.EarlyStopping | pl.callbacks.Checkpoint)]
        call_hooks(trainer, [c for c in for_fit if c not in watchers], "on_train_epoch_end")
        if hasattr(module, "on_round_end"):
            module._current_fx_name = "on_train_epoch_end"  # a hook in which Lightning allows logging
            module.on_round_end()
            module._current_fx_name = None
        call_hooks(trainer, watchers, "on_train_epoch_end")
        trainer._logger_connector.on_epoch_end()
        if not self.restarting and self.epoch_loop._num_ready_batches_reached():
            self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        # metrics of the round are logged at its last step, which is counted already
        self.epoch_loop._batches_that_stepped -= 1
        trainer._logger_connector.update_train_epoch_metrics()
        self.epoch_loop._batches_that_stepped += 1
        self.epoch_progress.increment_completed()
        if trainer.received_sigterm:
            raise pl.utilities.exceptions.SIGTERMException


def install_round_loop(
    trainer: Any, run_round: Callable[[], int | None], on_log: Callable[[str, Any], None], undo: Undo
) -> None:
    """Replace the loops of a Trainer's fit by loops over rounds, until undone.

    Args:
        run_round: Trains a round, see `RoundLoop`.
        on_log: Called with name and value of each metric that validation logs.
    """
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    round_fit: Any = RoundFitLoop.__new__(RoundFitLoop)
    vars(round_fit).update(vars(fit))
    round_epoch: Any = RoundLoop.__new__(RoundLoop)
    vars(round_epoch).update(vars(epoch))
    round_epoch.run_round, round_fit.epoch_loop = run_round, round_epoch
    results = epoch.val_loop._results
    epoch.val_loop._results = ObservedResults(False, on_log)
    trainer.fit_loop = round_fit

    def put_back() -> None:
        del round_epoch.run_round
        vars(round_epoch).pop("_logged", None)
        vars(epoch).update(vars(round_epoch))
        vars(fit).update({**vars(round_fit), "epoch_loop": epoch})
        epoch.val_loop._results = results
        trainer.fit_loop = fit

    undo.callback(put_back)


def average_by_rounds(trainer: pl.Trainer, count_steps: Callable[[], range | None], undo: Undo) -> None:
    """Let averaging callbacks of a Trainer average once a round, until undone.

    Args:
        count_steps: Returns the steps of one client in the last round, as a range counted from the first
            round on. None if the round was given up.
    """

    def unless_given_up(hook: Callable[..., Any], *arguments: Any) -> None:
        if count_steps() is not None:
            hook(*arguments)

    def any_step(due: Callable[..., bool], step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is None:
            return due(epoch_idx=epoch_idx)
        return any(due(step_idx=step) for step in count_steps() or ())

    for callback in get_callbacks(trainer):
        if isinstance(callback, pl.callbacks.WeightAveraging):
            rank_zero_info(f"{type(callback).__name__} averages the global model, once a round")
            hook = partial(unless_given_up, callback.on_train_epoch_end)
            undo.replace(callback, "on_train_epoch_end", hook)
            undo.replace(callback, "should_update", partial(any_step, callback.should_update))


def handed_loader(trainer: Any) -> Any:
    """Return the training loader that was passed to `fit(...)`. None if a module or data module has it."""
    instance = getattr(getattr(trainer.fit_loop, "_data_source", None), "instance", None)
    return None if isinstance(instance, pl.LightningModule | pl.LightningDataModule) else instance


def ask_module_instead(trainer: Any, module: pl.LightningModule, undo: Undo) -> None:
    """Let Lightning take the training loader from the module's `train_dataloader`, until undone."""
    undo.replace(trainer.fit_loop._data_source, "instance", module)


def forget_loader(trainer: Any) -> None:
    """Let Lightning ask for the training loader again before it trains, as its own tuner does."""
    if trainer.train_dataloader is not None:
        trainer.fit_loop._combined_loader = None
