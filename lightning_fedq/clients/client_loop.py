"""Lightning's epoch loop for a client, with a fast path for steps without active hooks.

A step of Lightning calls about twenty hooks, most of which nobody overrides. For a small client they take
longer than the step itself. Before each step, `ClientLoop` checks whether any hook, callback, profiler,
precision plugin, clipping or accumulation is active. If none is, the step consists of the rest of Lightning's
step: move the batch to its device, call `training_step`, `zero_grad` and `backward` in the optimiser's
closure, then update schedules, counters and logs. Otherwise Lightning's own step runs. If `training_step`
itself installs a hook, the rest of the step is Lightning's.
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
    """Return method names, a getter for them, and the methods of this class."""
    names = tuple(name for name in names if hasattr(kind, name))
    read = attrgetter(*names)
    return frozenset(names), read, read(kind)


_HOOKS = {
    pl.LightningModule: _originals(pl.LightningModule, *STEP_HOOKS, *TRANSFER_HOOKS, "clip_gradients"),
    pl.LightningDataModule: _originals(pl.LightningDataModule, *TRANSFER_HOOKS),
    pl.Callback: _originals(pl.Callback, *BATCH_HOOKS),
    pl.strategies.Strategy: _originals(pl.strategies.Strategy, *_OF_STRATEGY),
}
"""Methods of Lightning's classes at import time, to detect overrides."""
_wanted: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _is_plain(one: Any, base: type, stack: Any = None) -> bool:
    """Return whether an object overrides no hook of its Lightning class, except with a stack's methods."""
    names, read, originals = _HOOKS[base]
    attributes = vars(one)
    if read(type(one)) != originals:
        return False
    return attributes.keys().isdisjoint(names) or all(
        attributes[name] == getattr(stack, name, ...) for name in names if name in attributes
    )


def _wants_index(step: Any) -> bool:
    """Return whether `training_step` takes a batch index. The result is cached per function."""
    function = getattr(step, "__func__", None)
    if function is None:
        return bool(_takes_parameter(step, "batch_idx", min_args=2))
    if function not in _wanted:
        _wanted[function] = bool(_takes_parameter(step, "batch_idx", min_args=2))
    return _wanted[function]


def _is_on_device(batch: Any, device: torch.device) -> bool:
    """Return whether a batch is a plain tuple or list of tensors that are on the device already."""
    return type(batch) in (list, tuple) and all(
        type(item) is torch.Tensor and item.device == device for item in batch
    )


class ClientLoop(_loops._TrainingEpochLoop):  # type: ignore[misc]
    """Lightning's epoch loop with a fast path for steps without active hooks.

    Attributes:
        stack: Stack of clients whose `training_step` and `backward` replace those of the strategy, or None.
        steps_before: Optimiser steps of one client before this round.
    """

    stack: Any = None
    steps_before = 0
    _quiet = True
    """Whether no hook was active after `training_step` of the last step."""

    def __getattr__(self, name: str) -> Any:
        """Make the validation loop or the manual optimisation loop on first use.

        Few clients need them, and copying them would take a fifth of the time to load a client's copy.
        """
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
        """Return whether no hook, plugin or option is active in a step, so that the fast path applies."""
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
        """Train on all batches of a fetcher that was set up."""
        if self.batch_progress.current.ready:  # a fresh loop needs no reset
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
            self._warning_cache.warn("train_dataloader yielded None. No step was taken.")
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
        """End a batch without validation, because only global models are validated."""
        if self.trainer.lr_scheduler_configs:
            self.update_lr_schedulers("step", update_plateau_schedulers=True)
        if not self._should_accumulate():
            self._batches_that_stepped += 1
        self._save_loggers_on_train_batch_end()
        if self.trainer.received_sigterm and not self._is_training_done:
            raise pl.utilities.exceptions.SIGTERMException

    def _step(self, optimizer: Any, batch: Any, index: int) -> Any:
        """Step the optimiser with a closure of `training_step`, `zero_grad` and `backward`.

        Returns:
            Output of `training_step` for the hooks that follow. Empty if no hook is active.
        """
        trainer, loop = self.trainer, self.automatic_optimization
        result: Any = None

        def closure() -> Any:
            nonlocal result
            with torch.enable_grad():
                loss, result = self._compute_loss(batch, index)
                self._zero_gradients(optimizer, index)
                if loss is None:
                    self._warning_cache.warn("`training_step` returned `None`, so no gradient was computed")
                else:
                    self._backward(loss, optimizer)
            if not self._quiet:
                trainer.precision_plugin._after_closure(trainer.lightning_module, optimizer)
            return loss.detach() if result is None else result.loss

        progress = loop.optim_progress.optimizer.step
        progress.increment_ready()
        self._in_hook("optimizer_step", partial(optimizer.step, closure=closure))
        progress.increment_completed()
        return {} if result is None or result.loss is None else result.asdict()

    def _in_hook(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call a function as a hook of the module, whose name `log` reads from `_current_fx_name`."""
        attributes = vars(self.trainer.lightning_module)
        before, attributes["_current_fx_name"] = attributes["_current_fx_name"], name
        output = call(*args)
        attributes["_current_fx_name"] = before
        return output

    def _compute_loss(self, batch: Any, index: int) -> tuple[Any, Any]:
        """Return the loss of `training_step`, and Lightning's result object. None if no hook needs it."""
        module = self.trainer.lightning_module
        args = (batch, index) if _wants_index(module.training_step) else (batch,)
        output = self._in_hook("training_step", (self.stack or module).training_step, *args)
        self._quiet = self.is_quiet()  # `training_step` may have installed a hook
        if self._quiet and isinstance(output, torch.Tensor):
            return output, None
        kind, every = self.automatic_optimization.output_result_cls, self.trainer.accumulate_grad_batches
        result = kind.from_training_step_output(output, every)
        return result.closure_loss, result

    def _zero_gradients(self, optimizer: Any, index: int) -> None:
        """Call `zero_grad`, with the hooks around it if any is active."""
        loop = self.automatic_optimization
        if not self._quiet:
            loop._on_before_zero_grad(optimizer)
            loop._optimizer_zero_grad(index, optimizer)
            return
        progress = loop.optim_progress.optimizer.zero_grad
        progress.increment_ready()
        progress.increment_started()
        self._in_hook("optimizer_zero_grad", optimizer.zero_grad)
        progress.increment_completed()

    def _backward(self, loss: Any, optimizer: Any) -> None:
        """Compute the gradients, through the strategy if a hook is active or clients train in a stack."""
        if self._quiet and self.stack is None:
            self._in_hook("backward", loss.backward)
        else:
            _call._call_strategy_hook(self.trainer, "backward", loss, optimizer)
