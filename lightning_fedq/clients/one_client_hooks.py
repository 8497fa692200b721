"""Hooks of a run that expect one client's batch, gradients or parameters, and so rule a stack out.

A stack's batch has a client dimension, its gradients and weights lie in the stack and not in the module.
What a hook of the user's own would make of that is anybody's guess, so such a run goes one client at a time.
Lightning's own callbacks that look at none of the three, and those of this package, are known to be harmless.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_fedq._lightning import is_overridden, pl

_MODULE_HOOKS = (
    "backward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
)
_CALLBACK_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
_HARMLESS = (
    "Callback",
    "ModelCheckpoint",
    "Timer",
    "LearningRateMonitor",
    "DeviceStatsMonitor",
    "ProgressBar",
    "TQDMProgressBar",
    "RichProgressBar",
    "WeightAveraging",
)
"""Lightning's callbacks whose hooks look at no batch, output or gradient; `WeightAveraging` reads the module,
which shows the global model while a stack trains. Not so `ThroughputMonitor`, which measures the batch, and
`SpikeDetection`, which looks at each loss."""


def one_client_hook(trainer: pl.Trainer) -> str | None:
    """Name a hook that expects one client, of the module, the data module, a callback or a parameter."""
    module, datamodule = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    for owner, parent in ((module, pl.LightningModule), (datamodule, pl.LightningDataModule)):
        for hook in _MODULE_HOOKS:
            if owner is not None and hasattr(parent, hook) and is_overridden(hook, owner, parent):
                return f"{type(owner).__name__} overrides {hook}, which expects one client's batch"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for hook in _hooks_of(callback):
            return (
                f"the callback {type(callback).__name__} has its own {hook}, which expects one client's "
                "batch, gradients and weights"
            )
    return _hooked_parameter(module)


def _hooks_of(callback: Any) -> Iterator[str]:
    for hook in _CALLBACK_HOOKS:
        if hook in vars(callback):  # as LambdaCallback does
            yield hook
            continue
        owner = next(kind for kind in type(callback).__mro__ if hook in vars(kind))
        if not _is_known(owner):
            yield hook


def _is_known(owner: type) -> bool:
    package, _, _ = owner.__module__.partition(".")
    if package == "lightning_fedq":
        return True
    known = (getattr(pl.callbacks, name, None) for name in _HARMLESS)
    return any(owner is kind for kind in known)


def _hooked_parameter(module: nn.Module) -> str | None:
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"the parameter {name} has a gradient hook, which expects one client's gradient"
    return None
