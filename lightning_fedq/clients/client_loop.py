"""Lightning's loop over a client's batches, in which a step calls only what somebody listens to.

A step of Lightning's calls some twenty hooks, most of which nobody overrides; for a small client they take
longer than the step. `ClientLoop` looks, before each step, whether any hook, callback, profiler, precision,
clipping or accumulation would do something in it. If none does, the step is what is left of Lightning's own:
the batch on its device, `training_step`, `zero_grad`, `backward` in the optimiser's closure, schedules,
counts, and what is logged. Else it is Lightning's, and from `training_step` on, if that has set something.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from lightning_fedq._lightning import pl
from lightning_fedq.clients.hooks import BATCH_HOOKS, STEP_HOOKS, TRANSFER_HOOKS

_loops: Any = pl.loops
_call: Any = pl.trainer.call
_takes_parameter: Any = _loops.training_epoch_loop.is_param_in_hook_signature

_OF_STRATEGY = (
    *("training_step", "backward", "optimizer_step", "batch_to_device", "on_train_batch_start"),
    *("pre_backward", "post_backward", "post_training_step"),
)


def _originals(kind: Any, *names: str) -> tuple[frozenset[str], Callable[[Any], Any], Any]:
    """Names, how to read them off a class, and what this class has."""
    names = tuple(name for name in names if hasattr(kind, name))
    read = attrgetter(*names)
    return frozenset(names), read, read(kind)


_HOOKS = {
    pl.LightningModule: _originals(pl.LightningModule, *STEP_HOOKS, *TRANSFER_HOOKS, "clip_gradients"),
    pl.LightningDataModule: _originals(pl.LightningDataModule, *TRANSFER_HOOKS),
    pl.Callback: _originals(pl.Callback, *BATCH_HOOKS),
    pl.strategies.Strategy: _originals(pl.strategies.Strategy, *_OF_STRATEGY),
}
"""Lightning's own, as they are when this is imported."""
_wanted: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _is_plain(one: Any, base: type, stack: Any = None) -> bool:
    """Are all of these hooks Lightning's own, in the class and in the instance, or a stack's?"""
    names, read, own = _HOOKS[base]
    held = vars(one)
    if read(type(one)) != own:
        return False
    return held.keys().isdisjoint(names) or all(
        held[name] == getattr(stack, name, ...) for name in names if name in held
    )


def _wants_index(step: Any) -> bool:
    """Does `training_step` take the number of the batch, too? Found by its signature, once a function."""
    function = getattr(step, "__func__", None)
    if function is None:
        return bool(_takes_parameter(step, "batch_idx", min_args=2))
    if function not in _wanted:
        _wanted[function] = bool(_takes_parameter(step, "batch_idx", min_args=2))
    return _wanted[function]


def _is_on_device(batch: Any, device: torch.device) -> bool:
    """Is it a plain tuple or list of tensors on this device, so that nothing is to be moved?"""
    return type(batch) in (list, tuple) and all(
        type(one) is torch.Tensor and one.device == device for one in batch
    )


class ClientLoop(_loops._TrainingEpochLoop):  # type: ignore[misc]
    """Lightning's epoch loop, with steps that leave out what nobody listens to.

    Attributes:
        stack: A stack, whose `training_step` and `backward` stand in for the strategy's.
        steps_before: Optimiser steps of one client before this round.
    """

    stack: Any = None
    steps_before = 0
    _quiet = True
    """Was the step quiet when `training_step` had run?"""

    def __getattr__(self, name: str) -> Any:
        """Loops that few clients need, which take a fifth of a world to load: made when one is asked for."""
        if name == "manual_optimization":
            made: Any = _loops._ManualOptimization(self.trainer)
            steps = made.optim_step_progress.total
            steps.ready = steps.completed = self.steps_before
        elif name == "val_loop":
            states = pl.trainer.states
            stage = states.TrainerFn.FITTING, states.RunningStage.VALIDATING
            made = _loops._EvaluationLoop(self.trainer, *stage, verbose=False, inference_mode=False)
            home = self.trainer.home.fit_loop.epoch_loop.val_loop
            made._combined_loader, made._max_batches = home._combined_loader, list(home._max_batches)
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        setattr(self, name, made)
        return made

    def is_quiet(self) -> bool:
        """Would every hook of a step be Lightning's own, which does nothing?"""
        trainer = self.trainer
        strategy, module, data = trainer.strategy, trainer.lightning_module, trainer.datamodule
        return (
            type(trainer.precision_plugin) is pl.plugins.precision.Precision
            and type(trainer.profiler) is pl.profilers.PassThroughProfiler
            and trainer.accumulate_grad_batches == 1
            and not trainer.gradient_clip_val
            and not self.restarting
            and module.automatic_optimization
            and strategy.model is module
            and trainer.world_size == 1
            and not self.automatic_optimization._skip_backward
            and _is_plain(module, pl.LightningModule)
            and _is_plain(strategy, pl.strategies.Strategy, self.stack)
            and (data is None or _is_plain(data, pl.LightningDataModule))
            and all(_is_plain(callback, pl.Callback) for callback in trainer.callbacks)
        )

    def run(self, data_fetcher: Any) -> None:
        """Train on all batches, of a fetcher that has begun."""
        if self.batch_progress.current.ready:  # else there is nothing to reset
            self.reset()
        if type(self.trainer.profiler) is not pl.profilers.PassThroughProfiler:
            data_fetcher._start_profiler = self._on_before_fetch
            data_fetcher._stop_profiler = self._on_after_fetch
        while not self.done:
            try:
                self.advance(data_fetcher)
                self.on_advance_end(data_fetcher)
            except StopIteration:
                break

    def advance(self, data_fetcher: Any) -> None:
        """Train on one batch."""
        if isinstance(data_fetcher, _loops.fetchers._DataLoaderIterDataFetcher) or not self.is_quiet():
            super().advance(data_fetcher)
            return
        trainer, progress, results = self.trainer, self.batch_progress, self._results
        connector, strategy = trainer._logger_connector, trainer.strategy
        batch, *_ = next(data_fetcher)
        index = self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        if not _is_on_device(batch, strategy.root_device):
            batch = trainer.lightning_module.transfer_batch_to_device(batch, strategy.root_device, 0)
        progress.increment_ready()
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None; no step was taken")
        else:
            progress.increment_started()
            output = self._step(strategy._lightning_optimizers[0].optimizer, batch, index)
        progress.increment_processed()
        if trainer.lr_scheduler_configs:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self._num_ready_batches_reached():
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if batch is not None and not self._quiet:
            for call in (_call._call_callback_hooks, _call._call_lightning_module_hook):
                call(trainer, "on_train_batch_end", output, batch, index)
        if not results:  # nothing was logged
            results.batch = results.batch_size = None
            progress.increment_completed()
            return
        connector.on_batch_end()
        progress.increment_completed()
        connector.update_train_step_metrics()

    def on_advance_end(self, data_fetcher: Any) -> None:
        """End a batch: global models are validated in the user's Trainer, and no client's."""
        if self.trainer.lr_scheduler_configs:
            self.update_lr_schedulers("step", update_plateau_schedulers=True)
        if not self._should_accumulate():
            self._batches_that_stepped += 1
        self._save_loggers_on_train_batch_end()
        if self.trainer.received_sigterm and not self._is_training_done:
            raise pl.utilities.exceptions.SIGTERMException

    def _step(self, optimizer: Any, batch: Any, index: int) -> Any:
        """`training_step`, `zero_grad` and `backward`, in the closure of the optimiser's step."""
        trainer, own = self.trainer, self.automatic_optimization
        module, done = trainer.lightning_module, own.optim_progress.optimizer
        said = vars(module)  # which hook it is in, by which `log` knows what it may do
        made: Any = None

        def in_hook(name: str, call: Callable[..., Any], *args: Any) -> Any:
            before, said["_current_fx_name"] = said["_current_fx_name"], name
            found = call(*args)
            said["_current_fx_name"] = before
            return found

        def closure() -> Any:
            nonlocal made
            made = None
            with torch.enable_grad():
                args = (batch, index) if _wants_index(module.training_step) else (batch,)
                loss = in_hook("training_step", (self.stack or module).training_step, *args)
                quiet = self._quiet = self.is_quiet()  # what it has set is listened to at once
                if not (quiet and isinstance(loss, torch.Tensor)):
                    made = own.output_result_cls.from_training_step_output(
                        loss, trainer.accumulate_grad_batches
                    )
                    loss = made.closure_loss
                zero()
                if loss is None:
                    self._warning_cache.warn("`training_step` returned `None`: no gradient was taken")
                else:
                    backward(loss)
            if not quiet:
                trainer.precision_plugin._after_closure(module, optimizer)
            return loss.detach() if made is None else made.loss

        def zero() -> None:
            if not self._quiet:
                own._on_before_zero_grad(optimizer)
                own._optimizer_zero_grad(index, optimizer)
                return
            done.zero_grad.increment_ready()
            done.zero_grad.increment_started()
            in_hook("optimizer_zero_grad", optimizer.zero_grad)
            done.zero_grad.increment_completed()

        def backward(loss: Any) -> None:
            if self._quiet and self.stack is None:
                in_hook("backward", loss.backward)
            else:
                _call._call_strategy_hook(trainer, "backward", loss, optimizer)

        done.step.increment_ready()
        in_hook("optimizer_step", partial(optimizer.step, closure=closure))
        done.step.increment_completed()
        return {} if made is None or made.loss is None else made.asdict()
