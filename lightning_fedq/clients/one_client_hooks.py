"""Hooks of a run that expect one client's batch, gradients or parameters, and so rule a stack out.

A stack's batch has a client dimension, its gradients and weights lie in the stack and not in the module.
What a hook of the user's own would make of that is anybody's guess, so such a run goes one client at a time.
Callbacks that belong to the fit see none of the three.
"""

from __future__ import annotations

from torch import nn

from lightning_fedq._lightning import is_overridden, pl
from lightning_fedq.clients.hooks import BATCH_HOOKS, STEP_HOOKS, looks_at_batches, overrides

_MODULE_HOOKS = (*STEP_HOOKS, "on_train_epoch_end")


def one_client_hook(trainer: pl.Trainer) -> str | None:
    """Name a hook that expects one client, of the module, the data module, a callback or a parameter."""
    module, datamodule = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    for owner, parent in ((module, pl.LightningModule), (datamodule, pl.LightningDataModule)):
        for hook in _MODULE_HOOKS:
            if owner is not None and hasattr(parent, hook) and is_overridden(hook, owner, parent):
                return f"{type(owner).__name__} overrides {hook}, which expects one client's batch"
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in filter(looks_at_batches, callbacks):
        hook = next(hook for hook in BATCH_HOOKS if overrides(callback, hook))
        return (
            f"the callback {type(callback).__name__} has its own {hook}, which expects one client's "
            "batch, gradients and weights"
        )
    for optimizer in trainer.optimizers:  # type: ignore[attr-defined]
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return f"{type(optimizer).__name__} has a step hook, which expects one client's gradients"
    return _hooked_parameter(module)


def _hooked_parameter(module: nn.Module) -> str | None:
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"the parameter {name} has a gradient hook, which expects one client's gradient"
    return None
