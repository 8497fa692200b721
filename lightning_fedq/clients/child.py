"""A client's Trainer: the user's own with loops, loggers and strategy of its own.

It is a copy of the user's Trainer, so that every flag is forwarded, and what a fit writes to is new: the
loops, the strategy's module, optimisers and precision, the connectors, `should_stop`. Nothing is set up
again, because the user's Trainer is.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Sequence
from typing import Any

from lightning_fedq._lightning import pl
from lightning_fedq.clients.client_loop import ClientLoop


class ClientTrainer:
    """Mixed into the class of the user's Trainer: what a client reads of the whole fit.

    Attributes:
        home: The user's Trainer.
    """

    home: Any

    @property
    def estimated_stepping_batches(self) -> Any:
        """Steps of one client in the whole fit."""
        return self.home.estimated_stepping_batches

    @property
    def enable_validation(self) -> bool:
        """Never: global models are validated, in the user's Trainer."""
        return False

    @property
    def checkpoint_callbacks(self) -> Any:
        """Callbacks of the user's Trainer, as are the next three."""
        return self.home.checkpoint_callbacks

    @property
    def checkpoint_callback(self) -> Any:
        """The first of them."""
        return self.home.checkpoint_callback

    @property
    def early_stopping_callbacks(self) -> Any:
        """Those that end the fit."""
        return self.home.early_stopping_callbacks

    @property
    def progress_bar_callback(self) -> Any:
        """The bar."""
        return self.home.progress_bar_callback

    @property
    def log_dir(self) -> Any:
        """Folder of the user's first logger."""
        return self.home.log_dir

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save the whole fit: the global model, and the start of the round."""
        self.home.save_checkpoint(*args, **kwargs)


def is_client(trainer: Any) -> bool:
    """Is a Trainer a client's, and not the user's?"""
    return isinstance(trainer, ClientTrainer)


@functools.cache
def _class_of(kind: Any) -> Any:
    return type("ClientTrainer", (ClientTrainer, kind), {"__module__": __name__})


@functools.cache
def _attributes_of_trainers() -> frozenset[str]:
    """Names of the attributes that Lightning gives every Trainer. Others are the user's."""
    own = set(inspect.unwrap(pl.Trainer.__init__).__code__.co_names)
    return frozenset(own | _SET_ELSEWHERE)


_SET_ELSEWHERE = {
    *("callbacks", "strategy", "datamodule", "profiler", "_loggers", "log_every_n_steps", "val_check_batch"),
    *("check_val_every_n_epoch", "reload_dataloaders_every_n_epochs", "_is_data_prepared", "home"),
    *("overfit_batches", "limit_train_batches", "limit_val_batches", "limit_test_batches"),
    *("limit_predict_batches", "num_sanity_val_steps", "fast_dev_run", "val_check_interval"),
    *("_default_root_dir", "_val_check_time_interval", "_last_val_time", "_train_start_time"),
}


def own_attributes(trainer: Any) -> list[str]:
    """Attributes that somebody else has given a Trainer."""
    return [name for name in vars(trainer) if name not in _attributes_of_trainers()]


def _twin(one: Any) -> Any:
    """A shallow copy, past the ways in which its class would have itself copied."""
    twin = object.__new__(type(one))
    vars(twin).update(vars(one))
    return twin


@functools.lru_cache(64)
def _lightning_kind(kind: Any) -> Any:
    return type(f"Lightning{kind.__name__}", (pl.core.optimizer.LightningOptimizer, kind), {})


def _as_lightning_s(optimizer: Any, strategy: Any) -> Any:
    """An optimiser as Lightning wraps it, without a new class for each."""
    if isinstance(optimizer, pl.core.optimizer.LightningOptimizer):
        return pl.core.optimizer.LightningOptimizer._to_lightning_optimizer(optimizer, strategy)
    kind: Any = type(optimizer)
    wrapped: Any = object.__new__(_lightning_kind(kind))
    nothing = pl.core.optimizer.do_nothing_closure
    vars(wrapped).update(_optimizer=optimizer, _strategy=weakref.proxy(strategy))
    vars(wrapped).update(_on_before_step=nothing, _on_after_step=nothing)
    return wrapped


def new_child(home: Any) -> Any:
    """A Trainer for one client of `home`'s fit, which still lacks module, optimisers and callbacks.

    Args:
        home: The user's Trainer, in its fit.
    """
    of: Any = type(home)
    kind = _class_of(of)
    child = kind.__new__(kind)
    vars(child).update(vars(home))
    child.home = home
    child.state = type(home.state)(fn=home.state.fn, status=home.state.status, stage=home.state.stage)
    child.should_stop = False
    child.training = True
    child._data_connector = _twin(home._data_connector)
    child._data_connector.trainer = child
    child._logger_connector = type(home._logger_connector)(child)
    child._accelerator_connector = _twin(home._accelerator_connector)
    strategy = _twin(home.strategy)
    child._accelerator_connector.strategy = strategy
    if hasattr(strategy, "on_its_own"):  # asks no other rank
        strategy.on_its_own = True
    loops: Any = pl.loops
    child.fit_loop = loops._FitLoop(child, home.min_epochs, home.max_epochs)
    child.fit_loop.epoch_loop.min_steps, child.fit_loop.epoch_loop.max_steps = home.min_steps, home.max_steps
    child.fit_loop.epoch_loop.val_loop._combined_loader = home.fit_loop.epoch_loop.val_loop._combined_loader
    child.fit_loop.epoch_loop.__class__ = ClientLoop
    child.fit_loop.epoch_progress = progress = _twin(home.fit_loop.epoch_progress)
    progress.current, progress.total = _twin(progress.current), _twin(progress.total)
    return child


def equip(
    child: Any,
    module: pl.LightningModule,
    optimizers: Sequence[Any],
    schedules: Sequence[Any],
    precision: Any,
    callbacks: list[Any],
    datamodule: Any,
) -> None:
    """Give a client's Trainer its own module, optimisers, schedules, precision, callbacks and data module."""
    strategy = child.strategy
    strategy._lightning_module = strategy.model = module
    strategy._precision_plugin = precision
    strategy._optimizers = list(optimizers)
    strategy._lightning_optimizers = [_as_lightning_s(one, strategy) for one in optimizers]
    strategy.lr_scheduler_configs = list(schedules)
    child.callbacks, child.datamodule = callbacks, datamodule
    selector = child._data_connector._datahook_selector
    child._data_connector._datahook_selector = type(selector)(module, datamodule)


def count_from(child: Any, steps: int, logged: int) -> None:
    """Let a client's Trainer go on counting.

    Args:
        child: Its Trainer.
        steps: Optimiser steps of one client before this round, which `global_step` shows.
        logged: Steps that loggers have seen.
    """
    loop = child.fit_loop.epoch_loop
    for progress in (
        loop.automatic_optimization.optim_progress.optimizer.step,
        loop.manual_optimization.optim_step_progress,
    ):
        progress.total.ready = progress.total.completed = steps
    loop._batches_that_stepped = logged
