"""Trainer of a client: a copy of the user's Trainer with separate loops, loggers and strategy.

The copy keeps every flag of the user's Trainer. Objects that a fit writes to are new: the loops, the
strategy's module, optimisers and precision, the connectors, and `should_stop`. No set-up is repeated, because
the user's Trainer is set up already.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from lightning_fedq._lightning import pl
from lightning_fedq.clients.client_loop import ClientLoop
from lightning_fedq.clients.object_table import SharedObject
from lightning_fedq.clients.snapshot import Twin


class ClientTrainer:
    """Mixin for the class of the user's Trainer, with attributes that a client reads from the whole fit.

    Attributes:
        home: User's Trainer.
        clients: Numbers of the clients that train in this Trainer, in the order of a stack's rows.
    """

    home: Any
    clients: tuple[int, ...] = ()

    @property
    def client(self) -> int:
        """Number of the client that trains, from 0. The round is `current_epoch`.

        Training code that reads this attribute fails in the trial before the first round, and its clients
        then train one at a time.

        Raises:
            RuntimeError: If several clients train in one step.
        """
        if len(self.clients) != 1:
            raise RuntimeError(
                "trainer.client needs a single client, but several train in this step. trainer.clients has "
                "all of them, and Federated(clients_per_step=1) trains one at a time."
            )
        return self.clients[0]

    estimated_stepping_batches = property(
        attrgetter("home.estimated_stepping_batches"), doc="Steps of one client in the whole fit."
    )
    checkpoint_callbacks = property(attrgetter("home.checkpoint_callbacks"), doc="Callbacks of the fit.")
    checkpoint_callback = property(attrgetter("home.checkpoint_callback"), doc="First checkpoint callback.")
    early_stopping_callbacks = property(attrgetter("home.early_stopping_callbacks"), doc="Stop callbacks.")
    progress_bar_callback = property(attrgetter("home.progress_bar_callback"), doc="Bar of the whole fit.")
    log_dir = property(attrgetter("home.log_dir"), doc="Folder of the user's first logger.")

    @property
    def enable_validation(self) -> bool:
        """Always False, because only global models are validated, in the user's Trainer."""
        return False

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint of the whole fit, with the global model at the start of the round."""
        self.home.save_checkpoint(*args, **kwargs)


def is_client(trainer: Any) -> bool:
    """Return whether a Trainer is a client's, not the user's."""
    return isinstance(trainer, ClientTrainer)


@functools.cache
def _make_client_class(kind: Any) -> Any:
    """Make a subclass of the user's Trainer class with `ClientTrainer` mixed in."""
    return type("ClientTrainer", (ClientTrainer, kind), {"__module__": __name__})


_OF_LIGHTNING = {
    *inspect.unwrap(pl.Trainer.__init__).__code__.co_names,
    *("callbacks", "strategy", "datamodule", "profiler", "_loggers", "log_every_n_steps", "val_check_batch"),
    *("check_val_every_n_epoch", "reload_dataloaders_every_n_epochs", "_is_data_prepared", "home"),
    *("overfit_batches", "limit_train_batches", "limit_val_batches", "limit_test_batches"),
    *("limit_predict_batches", "num_sanity_val_steps", "fast_dev_run", "val_check_interval"),
    *("_default_root_dir", "_val_check_time_interval", "_last_val_time", "_train_start_time"),
}
"""Names of the attributes that Lightning sets on every Trainer. Others are the user's."""


def user_attributes(trainer: Any) -> list[str]:
    """Return the names of attributes that user code has set on a Trainer."""
    return [name for name in vars(trainer) if name not in _OF_LIGHTNING]


def _shallow_copy(one: Any) -> Any:
    """Make a shallow copy without the class's own copy methods."""
    twin = object.__new__(type(one))
    vars(twin).update(vars(one))
    return twin


@functools.lru_cache(64)
def _lightning_class(kind: Any) -> Any:
    """Make the class with which Lightning wraps optimisers of one class."""
    return type(f"Lightning{kind.__name__}", (pl.core.optimizer.LightningOptimizer, kind), {})


def _wrap_optimizer(optimizer: Any, strategy: Any) -> Any:
    """Wrap an optimiser as Lightning does, with a cached class in place of a new class per optimiser."""
    if isinstance(optimizer, pl.core.optimizer.LightningOptimizer):
        return pl.core.optimizer.LightningOptimizer._to_lightning_optimizer(optimizer, strategy)
    kind: Any = type(optimizer)
    wrapped: Any = object.__new__(_lightning_class(kind))
    nothing = pl.core.optimizer.do_nothing_closure
    vars(wrapped).update(_optimizer=optimizer, _strategy=weakref.proxy(strategy))
    vars(wrapped).update(_on_before_step=nothing, _on_after_step=nothing)
    return wrapped


def make_twins(
    home: Any, loggers: Sequence[Any], callbacks: Sequence[Any], copied: Sequence[Any]
) -> list[Twin]:
    """Make the replacements of the user's Trainer, strategy and loops in a client's copy.

    Args:
        home: User's Trainer.
        loggers: Loggers of the client.
        callbacks: Callbacks of the client.
        copied: Callbacks of which the client has its own copy. All clients share the others.
    """
    fit_loop, epoch_loop = _new_loops(home)
    client_class = _make_client_class(type(home))  # type: ignore[arg-type]
    state, data, strategy = home.state, home._data_connector, home.strategy
    selector = Twin(data._datahook_selector, {"model": home.lightning_module, "datamodule": home.datamodule})
    of_trainer = {
        "home": SharedObject(home),
        "state": type(state)(state.status, state.fn, pl.trainer.states.RunningStage.TRAINING),
        "should_stop": False,
        "_data_connector": Twin(data, {"trainer": home, "_datahook_selector": selector}),
        "_logger_connector": type(home._logger_connector)(home),
        "_accelerator_connector": Twin(home._accelerator_connector, {"strategy": strategy}),
        "fit_loop": home.fit_loop,
        "_loggers": [SharedObject(logger) for logger in loggers],
        "callbacks": [one if one in copied else SharedObject(one) for one in callbacks],
        "datamodule": home.datamodule,
        **{name: getattr(home, name) for name in user_attributes(home)},
    }
    of_strategy = {
        "_lightning_module": home.lightning_module,
        "_model": home.lightning_module,
        "_precision_plugin": strategy.precision_plugin,
        "_optimizers": list(strategy.optimizers),
        "_lightning_optimizers": [_wrap_optimizer(one, strategy) for one in strategy.optimizers],
        "lr_scheduler_configs": list(strategy.lr_scheduler_configs),
        **({"is_single": True} if hasattr(strategy, "is_single") else {}),  # no communication with ranks
    }
    return [
        Twin(home, of_trainer, client_class),
        Twin(strategy, of_strategy),
        Twin(home.fit_loop, vars(fit_loop), type(fit_loop), is_separate=True),
        Twin(home.fit_loop.epoch_loop, vars(epoch_loop), ClientLoop, is_separate=True),
    ]


def _new_loops(home: Any) -> tuple[Any, Any]:
    """Make new fit and epoch loops of Lightning, with the user's limits and the index of the round."""
    loops: Any = pl.loops
    fit_loop = loops._FitLoop(home, home.min_epochs, home.max_epochs)
    epoch_loop = fit_loop.epoch_loop
    epoch_loop.min_steps, epoch_loop.max_steps = home.min_steps, home.max_steps
    del (epoch_loop.val_loop, epoch_loop.manual_optimization)  # `ClientLoop` makes them
    fit_loop.epoch_loop = home.fit_loop.epoch_loop  # a copy has its twin in this place
    progress = fit_loop.epoch_progress = _shallow_copy(home.fit_loop.epoch_progress)
    progress.current, progress.total = _shallow_copy(progress.current), _shallow_copy(progress.total)
    return fit_loop, epoch_loop


def resume_counters(child: Any, steps: int, logged: int) -> None:
    """Set the step counters of a client's Trainer, so that they continue over rounds.

    Args:
        child: Trainer of the client.
        steps: Optimiser steps of one client before this round, the value of `global_step`.
        logged: Number of steps on the loggers' axis.
    """
    loop = child.fit_loop.epoch_loop
    progress = loop.automatic_optimization.optim_progress.optimizer.step.total
    progress.ready = progress.completed = loop.steps_before = steps
    loop._batches_that_stepped = logged
