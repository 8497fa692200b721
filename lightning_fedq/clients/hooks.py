"""Division of callbacks: some train with each client, others belong to the whole fit.

A callback with hooks for batches, losses, gradients or steps is part of a client's training, so each client
has a copy. A callback with hooks for epochs, validation and checkpoints belongs to the fit and sees only
global models. If a callback has both kinds of hooks, its copies get the batch hooks and `on_train_epoch_end`,
and the original gets all others. Hooks before the first batch of a round run once, in the fit, and every
client starts with their result.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Sequence
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
"""Hooks of a module that run within a step."""
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks of a module or a data module that transform a batch."""
_HOST = ("lightning", "lightning_fabric", "pytorch_lightning")
_OF_THE_FIT = (
    *(pl.callbacks.Checkpoint, pl.callbacks.EarlyStopping, pl.callbacks.ProgressBar),
    *(pl.callbacks.LearningRateMonitor, pl.callbacks.DeviceStatsMonitor, pl.callbacks.Timer),
    *(pl.callbacks.ModelSummary, pl.callbacks.WeightAveraging, pl.callbacks.StochasticWeightAveraging),
    *(pl.callbacks.BaseFinetuning, pl.callbacks.ModelPruning, pl.callbacks.GradientAccumulationScheduler),
)
"""Lightning's callbacks that belong to the fit even if they have batch hooks."""


def looks_at_batches(callback: pl.Callback) -> bool:
    """Return whether a callback is part of a client's training, because it has a batch hook."""
    if isinstance(callback, _OF_THE_FIT) or knows_clients(callback):
        return False
    return any(overrides(callback, hook) for hook in BATCH_HOOKS)


def knows_clients(callback: pl.Callback) -> bool:
    """Return whether a callback belongs to the fit even if it has batch hooks.

    Callbacks that work on rounds, such as all callbacks of this package, set `knows_clients = True`.
    Subclasses inherit it. The isolation trial leaves these callbacks out.
    """
    return bool(getattr(callback, "knows_clients", False))


def trains_with_clients(callback: pl.Callback) -> bool:
    """Return whether every client has a copy of this callback."""
    return looks_at_batches(callback) and not is_shared_by_clients(callback)


def overrides(callback: pl.Callback, hook: str) -> bool:
    """Return whether a callback defines a hook, in its class or as an attribute like `LambdaCallback`."""
    return hook in vars(callback) or is_overridden(hook, callback, pl.Callback)


def is_shared_by_clients(callback: pl.Callback) -> bool:
    """Return whether one callback object takes part in every client's training without being copied.

    Privacy accounting and simulated attacks need this. Such callbacks set `is_shared_by_clients = True`.
    """
    return bool(getattr(callback, "is_shared_by_clients", False))


def is_own(callback: pl.Callback) -> bool:
    """Return whether a callback's class is one of this package's."""
    return type(callback).__module__.partition(".")[0] == __name__.partition(".")[0]


def has_user_hook(callback: pl.Callback, hook: str = "on_train_batch_end") -> bool:
    """Return whether a callback has a user-defined hook."""
    return not _is_lightning_hook(type(callback), hook)


def _is_lightning_hook(kind: type, name: str) -> bool:
    """Return whether a class inherits a method from Lightning or from a callback of this package."""
    owner = next((one for one in kind.__mro__ if name in vars(one)), None)
    return owner is None or "knows_clients" in vars(owner) or owner.__module__.partition(".")[0] in _HOST


def has_user_batch_handling(trainer: Any) -> bool:
    """Return whether user code (a hook, precision plugin or strategy) transforms batches before training."""
    owners: list[Any] = [(trainer.lightning_module, pl.LightningModule)]
    if trainer.datamodule is not None:
        owners.append((trainer.datamodule, pl.LightningDataModule))
    return (
        any(is_overridden(hook, one, kind) for one, kind in owners for hook in TRANSFER_HOOKS)
        or not _is_lightning_hook(type(trainer.precision_plugin), "convert_input")
        or not _is_lightning_hook(type(trainer.strategy), "batch_to_device")
    )


def report_copied_callbacks(callbacks: list[pl.Callback]) -> None:
    """Log the callbacks that every client copies, and callbacks of the fit that have batch hooks."""
    names = [type(one).__name__ for one in callbacks if trains_with_clients(one)]
    if names:
        rank_zero_info(
            f"Each client trains with its own copies of {', '.join(names)}, which are then dropped. "
            "is_shared_by_clients = True shares one object, which sees clients' raw data without any epsilon."
        )
    of_fit = [
        c for c in callbacks if not (looks_at_batches(c) or is_shared_by_clients(c) or knows_clients(c))
    ]
    hooks = ("on_train_batch_start", "on_train_batch_end")
    if names := [type(one).__name__ for one in of_fit if any(has_user_hook(one, hook) for hook in hooks)]:
        rank_zero_info(
            f"{', '.join(names)} belong to the fit: once per round, batch hooks get a NaN loss and one "
            "sample of zeros. Read losses from trainer.callback_metrics."
        )


def report_hooks(trainer: Any) -> None:
    """Log, before round 1, the user's hooks that mean something else where one epoch is a round.

    These are hooks that run once a round and ask for a period in steps, and validation hooks that call an
    optimiser, such as `optimizer.eval()` of schedule-free ones.
    """
    periods, switches = [], []
    for owner, host in [(one, pl.Callback) for one in trainer.callbacks] + [
        (trainer.lightning_module, pl.LightningModule)
    ]:
        of_clients = host is pl.LightningModule or trains_with_clients(owner)
        per_step = (*STEP_HOOKS, "on_train_epoch_end", "training_step") if of_clients else ()
        for hook in (name for name in dir(host) if name.startswith("on_") and name not in per_step):
            if has_user_hook(owner, hook) and (hook in vars(owner) or is_overridden(hook, owner, host)):
                function = getattr(getattr(owner, hook), "__func__", getattr(owner, hook))
                names = _find_code_names(type(owner), function)
                if {"global_step", "%"} <= names:
                    periods.append(f"{type(owner).__name__}.{hook}")
                if hook.startswith("on_validation") and {"optimizers", "optimizer"} & names:
                    switches.append(f"{type(owner).__name__}.{hook}")
    if switches:
        rank_zero_info(
            f"{', '.join(switches)} call an optimiser, but clients train with copies of it. Switch it in "
            "on_train_epoch_end, which every client calls (schedule-free optimisers: optimizer.eval())."
        )
    if periods:
        rank_zero_info(
            f"{', '.join(periods)} use global_step % n, but run once a round, where global_step jumps by the "
            "steps of a round. Compare global_step // n with its last value, or count trainer.current_epoch."
        )


def _find_code_names(kind: type, function: Any) -> set[str]:
    """Return the names in a function and in the methods of its class that it names, and "%" if it has one."""
    codes = [code] if (code := getattr(function, "__code__", None)) is not None else []
    seen, names = set[Any](), set[str]()
    while codes:
        code = codes.pop()
        if code in seen:
            continue
        seen.add(code)
        names |= {*code.co_names}
        names |= {
            "%"
            for one in dis.get_instructions(code)
            if "MODULO" in one.opname or (one.opname == "BINARY_OP" and one.argrepr[:1] == "%")
        }
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        methods = (getattr(kind, name, None) for name in code.co_names if name.isidentifier())
        codes += [
            one.__code__
            for one in methods
            if isinstance(one, types.FunctionType) and one.__module__.partition(".")[0] not in _HOST
        ]
    return names


def call_hooks(trainer: Any, callbacks: list[Any], hook: str, *args: Any) -> None:
    """Call one hook of some callbacks, in the way that Lightning calls it for all callbacks."""
    listening = [callback for callback in callbacks if overrides(callback, hook)]
    if not listening:
        return
    module = trainer.lightning_module
    before, module._current_fx_name = module._current_fx_name, hook
    for callback in listening:
        with trainer.profiler.profile(f"[Callback]{callback.state_key}.{hook}"):
            getattr(callback, hook)(trainer, module, *args)
    module._current_fx_name = before


def call_start_hooks(
    trainer: Any, callbacks: Sequence[Any], behind: Sequence[Any]
) -> tuple[str, Exception] | None:
    """Call the hooks that run before the first batch, in Lightning's order, for a trial.

    Args:
        trainer: Trainer of the trial.
        callbacks: Callbacks whose hooks are called.
        behind: Callbacks whose `on_fit_start` has not run yet.

    Returns:
        Name and error of the first hook that raises. The fit itself will raise it, so the others are called.
        None if no hook raises.
    """
    call: Any = pl.trainer.call
    errors: list[tuple[str, Exception]] = []
    for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
        for callback in behind if hook == "on_fit_start" else callbacks:
            try:
                call_hooks(trainer, [callback], hook)
            except Exception as error:
                errors.append((f"{type(callback).__name__}.{hook}", error))
        try:
            call._call_lightning_module_hook(trainer, hook)
        except Exception as error:
            errors.append((f"{type(trainer.lightning_module).__name__}.{hook}", error))
    return errors[0] if errors else None
