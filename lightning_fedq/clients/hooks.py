"""Which callbacks train with the clients, and which belong to the whole fit.

A callback that looks at batches, losses, gradients or steps is part of a client's training: each client has
a copy. One that looks at epochs, validation and checkpoints belongs to the fit and sees global models only.
One of both kinds is in both places: its copies get the hooks of batches and `on_train_epoch_end`, and the
original all others. Whatever runs before the first batch of a round runs once, in the fit, and every client
begins with what it has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightning_fedq._lightning import is_overridden, pl, rank_zero_info

BATCH_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
STEP_HOOKS = (
    *("backward", *BATCH_HOOKS, "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
)
"""Hooks of a module within a step."""
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks of a module, or a data module, that are given a batch and return another."""
_HOST = ("lightning", "lightning_fabric", "pytorch_lightning")
_OF_THE_FIT = (
    *(pl.callbacks.Checkpoint, pl.callbacks.EarlyStopping, pl.callbacks.ProgressBar),
    *(pl.callbacks.LearningRateMonitor, pl.callbacks.DeviceStatsMonitor, pl.callbacks.Timer),
    *(pl.callbacks.ModelSummary, pl.callbacks.WeightAveraging, pl.callbacks.StochasticWeightAveraging),
    *(pl.callbacks.BaseFinetuning, pl.callbacks.ModelPruning, pl.callbacks.GradientAccumulationScheduler),
)
"""Lightning's callbacks that belong to the fit whatever hooks they have."""


def looks_at_batches(callback: pl.Callback) -> bool:
    """Is a callback of the user's own part of a client's training?"""
    if isinstance(callback, _OF_THE_FIT) or knows_clients(callback):
        return False
    return any(overrides(callback, hook) for hook in BATCH_HOOKS)


def knows_clients(callback: pl.Callback) -> bool:
    """Does a callback belong to the fit whatever hooks it has, and take no part in a client's training?

    Those that work on rounds do, as all of this package: they say so by `knows_clients = True`, for their
    subclasses, too. The trial of isolation leaves them out.
    """
    return bool(getattr(callback, "knows_clients", False))


def trains_with_clients(callback: pl.Callback) -> bool:
    """Has every client a copy of this callback?"""
    return looks_at_batches(callback) and not crosses_clients(callback)


def overrides(callback: pl.Callback, hook: str) -> bool:
    """Has a callback a hook of its own? Some, as `LambdaCallback`, hold it as an attribute."""
    return hook in vars(callback) or is_overridden(hook, callback, pl.Callback)


def crosses_clients(callback: pl.Callback) -> bool:
    """Does a callback take part in every client's training without being copied?

    Accounts of privacy do, and those who simulate attacks: they say so by `crosses_clients = True`.
    """
    return bool(getattr(callback, "crosses_clients", False))


def has_user_hook(callback: pl.Callback, hook: str = "on_train_batch_end") -> bool:
    """Has a callback of the fit a hook of the user's own at the end, or the start, of a batch?"""
    return not _is_lightning_hook(type(callback), hook)


def _is_lightning_hook(kind: type, name: str) -> bool:
    """Does a class have a method from Lightning, or from a callback of this package?"""
    owner = next((one for one in kind.__mro__ if name in vars(one)), None)
    return owner is None or "knows_clients" in vars(owner) or owner.__module__.partition(".")[0] in _HOST


def has_user_batch_handling(trainer: Any) -> bool:
    """Is a batch handed to the user's own code before it is trained on: to a hook, precision or strategy?"""
    owners: list[Any] = [(trainer.lightning_module, pl.LightningModule)]
    if trainer.datamodule is not None:
        owners.append((trainer.datamodule, pl.LightningDataModule))
    return (
        any(is_overridden(hook, one, kind) for one, kind in owners for hook in TRANSFER_HOOKS)
        or not _is_lightning_hook(type(trainer.precision_plugin), "convert_input")
        or not _is_lightning_hook(type(trainer.strategy), "batch_to_device")
    )


def report_copied_callbacks(callbacks: list[pl.Callback]) -> None:
    """Name the callbacks of which every client has a copy."""
    names = [type(one).__name__ for one in callbacks if trains_with_clients(one)]
    if names:
        rank_zero_info(
            f"every client trains with copies of {', '.join(names)}, which look at batches; what the copies "
            "keep is dropped with the client (crosses_clients = True on a callback makes it one for all)"
        )
    of_fit = [c for c in callbacks if not (looks_at_batches(c) or crosses_clients(c) or knows_clients(c))]
    hooks = ("on_train_batch_start", "on_train_batch_end")
    if names := [type(one).__name__ for one in of_fit if any(has_user_hook(one, hook) for hook in hooks)]:
        rank_zero_info(
            f"{', '.join(names)} belong to the fit and see no client's batch: batch hooks get a loss of NaN "
            "and a batch of one sample of zeros, once a round; losses are in trainer.callback_metrics"
        )


def call_hooks(trainer: Any, callbacks: list[Any], hook: str, *args: Any) -> None:
    """Call one hook of some callbacks, as Lightning calls that of all."""
    listening = [callback for callback in callbacks if overrides(callback, hook)]
    if not listening:
        return
    module = trainer.lightning_module
    before, module._current_fx_name = module._current_fx_name, hook
    for callback in listening:
        with trainer.profiler.profile(f"[Callback]{callback.state_key}.{hook}"):
            getattr(callback, hook)(trainer, module, *args)
    module._current_fx_name = before


def call_start_hooks(trainer: Any, callbacks: Sequence[Any], behind: Sequence[Any]) -> None:
    """Call what runs before the first batch, in Lightning's order. What it raises the fit itself will raise.

    Args:
        behind: Those of the callbacks whose `on_fit_start` is still to come, as the module's is.
    """
    call: Any = pl.trainer.call
    for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
        for callback in behind if hook == "on_fit_start" else callbacks:
            with suppress(Exception):
                call_hooks(trainer, [callback], hook)
        with suppress(Exception):
            call._call_lightning_module_hook(trainer, hook)
