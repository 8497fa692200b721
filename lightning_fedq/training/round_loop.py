"""The user's Trainer counts rounds: an epoch of its loops is a round, and clients train in fits of their own.

The loops stand in for Lightning's own during a fit. To whoever looks at the Trainer a round is what an epoch
is in one client's training: as many batches and optimiser steps as the longest client has. So `max_steps`,
`global_step`, `val_check_interval` and the names of checkpoints mean what they mean without a federation, and
validation, checkpoints, early stopping, averages and loggers see global models only.

`on_train_epoch_end` belongs to the clients, of the module and of callbacks that look at batches. What a
server would do when a round ends goes into a hook that a module may have, `on_round_end(self)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from lightning_fedq._lightning import pl
from lightning_fedq.clients.hooks import (
    call_hooks,
    crosses_clients,
    has_own_hook,
    looks_at_batches,
    trains_with_clients,
)
from lightning_fedq.clients.undo import Undo

OF_THE_FIT = ("on_round_end", "on_train_end", "on_fit_end")
"""Hooks of whoever ends rounds and fits: over a network the server's, and no client's message runs them."""
_loops: Any = pl.loops
_results: Any = pl.trainer.connectors.logger_connector.result  # type: ignore[attr-defined]


class _Logged(_results._ResultMetric):  # type: ignore[misc]
    """A logged value, which Lightning moves to its device with every `log`: a copy of all that it holds."""

    def to(self, device: Any, *args: Any, **kwargs: Any) -> Any:
        """Move, unless it is a number that is there."""
        there = self.is_tensor and all(
            held.device == device for held in vars(self).values() if isinstance(held, torch.Tensor)
        )
        return self if there else super().to(device, *args, **kwargs)


class _RoundResults(_results._ResultCollection):  # type: ignore[misc]
    """Lightning's collection of logged values, which tells who wants to know what is logged."""

    def __init__(self, training: bool, tell: Callable[[str, Any], None], reduce: Any) -> None:
        super().__init__(training)
        self.tell, self._reduce = tell, reduce

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


def told_results(training: bool, tell: Callable[[str, Any], None], reduce: Any = None) -> Any:
    """A collection of logged values that tells name and value of each.

    Args:
        training: Whether these are metrics of training, not of validation.
        tell: Called with both before they are logged.
        reduce: How values of several ranks become one, whoever logs; None is that of the Trainer that logs.
    """
    return _RoundResults(training, tell, reduce)


class RoundLoop(_loops._TrainingEpochLoop):  # type: ignore[misc]
    """Lightning's epoch loop with one step: a round.

    Attributes:
        run_round: Trains the clients of a round, lets the module be the new global model, and returns the
            optimiser steps of one client in it. None where the round was given up.
    """

    run_round: Callable[[], int | None]

    def advance(self, data_fetcher: Any) -> None:
        """Train one round."""
        trainer, progress = self.trainer, self.batch_progress
        if self.restarting and progress.current.ready and self._should_check_val_fx(data_fetcher):
            if self.val_loop.restarted_mid_evaluation:
                return
            if self.restarted_on_last:
                self._skip_next_val = True
                return
            self.val_loop.increment_progress_to_evaluation_end()
        self.val_loop.restarting = False
        for_fit = [c for c in trainer.callbacks if not (looks_at_batches(c) or crosses_clients(c))]
        for callback in for_fit:
            batch = self._batch_of_nobody() if has_own_hook(callback, "on_train_batch_start") else None
            call_hooks(trainer, [callback], "on_train_batch_start", batch, 0)
        before = self.global_step
        steps = self.run_round()
        if steps is None:
            raise StopIteration
        batches = int(trainer.num_training_batches)
        for counts in (progress.total, progress.current):
            counts.ready += batches
            counts.started += batches
            counts.processed += batches
            counts.completed += batches - 1  # as in the middle of Lightning's last batch
        progress.is_last_batch = True
        self._count_steps(before + steps)
        trainer._logger_connector._first_loop_iter = False
        for callback in for_fit:
            own = has_own_hook(callback)
            seen = ({"loss": torch.tensor(math.nan)}, self._batch_of_nobody()) if own else (None, None)
            call_hooks(trainer, [callback], "on_train_batch_end", *seen, batches - 1)
        trainer._logger_connector.on_batch_end()
        progress.increment_completed()
        self._batches_that_stepped += steps - 1  # Lightning adds the last

    def _batch_of_nobody(self) -> Any:
        """One sample of zeros in the structure of a batch, None where every client has its own loader."""
        try:
            return self.trainer.train_dataloader.fetch(torch.empty(0, dtype=torch.int64))
        except (AttributeError, ValueError):
            return None

    def _count_steps(self, steps: int) -> None:
        for counts in (
            self.automatic_optimization.optim_progress.optimizer.step.total,
            self.manual_optimization.optim_step_progress.total,
        ):
            counts.ready = counts.completed = steps

    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Only schedules that follow a metric: the clock moves the others on."""
        if interval == "epoch" and update_plateau_schedulers:
            super()._update_learning_rates(interval, update_plateau_schedulers)


class RoundFitLoop(_loops._FitLoop):  # type: ignore[misc]
    """Lightning's loop over epochs, which leaves `on_train_epoch_end` to the clients."""

    def on_advance_end(self) -> None:
        """End a round."""
        trainer, module = self.trainer, self.trainer.lightning_module
        trainer._logger_connector.epoch_end_reached()
        self.epoch_progress.increment_processed()
        for_fit = [c for c in trainer.callbacks if not trains_with_clients(c)]
        monitoring = [
            c for c in for_fit if isinstance(c, pl.callbacks.EarlyStopping | pl.callbacks.Checkpoint)
        ]
        call_hooks(trainer, [c for c in for_fit if c not in monitoring], "on_train_epoch_end")
        if hasattr(module, "on_round_end"):
            module._current_fx_name = "on_train_epoch_end"  # in which Lightning lets it log
            module.on_round_end()
            module._current_fx_name = None
        call_hooks(trainer, monitoring, "on_train_epoch_end")
        trainer._logger_connector.on_epoch_end()
        if not self.restarting and self.epoch_loop._num_ready_batches_reached():
            self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        self.epoch_loop._batches_that_stepped -= 1
        trainer._logger_connector.update_train_epoch_metrics()
        self.epoch_loop._batches_that_stepped += 1
        self.epoch_progress.increment_completed()
        if trainer.received_sigterm:
            raise pl.utilities.exceptions.SIGTERMException


def install(
    trainer: Any, run_round: Callable[[], int | None], tell: Callable[[str, Any], None], undo: Undo
) -> None:
    """Let a Trainer's fit train rounds, until undone.

    Args:
        trainer: In the `setup` of a fit.
        run_round: Trains one, see `RoundLoop`.
        tell: Called with name and value of whatever is logged in validation.
        undo: Gives Lightning's own loops back.
    """
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    round_fit: Any = RoundFitLoop.__new__(RoundFitLoop)
    vars(round_fit).update(vars(fit))
    round_epoch: Any = RoundLoop.__new__(RoundLoop)
    vars(round_epoch).update(vars(epoch))
    round_epoch.run_round, round_fit.epoch_loop = run_round, round_epoch
    results = epoch.val_loop._results
    epoch.val_loop._results = told_results(False, tell)
    trainer.fit_loop = round_fit

    def put_back() -> None:
        del round_epoch.run_round
        vars(epoch).update(vars(round_epoch))
        vars(fit).update({**vars(round_fit), "epoch_loop": epoch})
        epoch.val_loop._results = results
        trainer.fit_loop = fit

    undo.callback(put_back)
