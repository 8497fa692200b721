"""Checks of `DPSGD` before the fit, at every step, and before a checkpoint is saved."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedq._lightning import pl
from lightning_fedq.clients.changed_tensors import are_equal


def check_settings(trainer: Any, module: pl.LightningModule) -> None:
    """Refuse Trainer settings and callbacks that would break the privacy guarantee.

    Learning rate and batch size finders are refused because they train without clipping and noise, and their
    choice follows from raw losses, which no epsilon covers.

    Raises:
        ValueError: If there is such a setting or callback. The message names it.
    """
    if not isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy) or trainer.world_size > 1:
        raise ValueError(
            f"DPSGD runs on one device, got {type(trainer.strategy).__name__} on {trainer.world_size}. "
            "Use Trainer(strategy='auto', devices=1)."
        )
    if not module.automatic_optimization:
        raise ValueError(
            "DPSGD needs automatic optimisation. Return the loss, and leave the steps to Lightning."
        )
    for callback in trainer.callbacks:
        if isinstance(callback, pl.callbacks.LearningRateFinder | pl.callbacks.BatchSizeFinder):
            raise ValueError(
                f"{type(callback).__name__} trains without clipping and noise, so its choice is not private. "
                "Leave it out, and find the setting on public data."
            )
    check_accumulation(trainer)
    if trainer.gradient_clip_val:
        raise ValueError("gradient_clip_val clips batches, not samples. Use DPSGD(max_grad_norm=...).")
    if trainer.precision not in ("32-true", "64-true"):
        raise ValueError(f"DPSGD needs full precision, got {trainer.precision}. Use Trainer(precision=32).")
    if trainer.overfit_batches:
        raise ValueError("overfit_batches would replace the Poisson sampling. Use a small dataset instead.")


def check_accumulation(trainer: Any) -> None:
    """Refuse gradient accumulation, because every Poisson batch must be one charged step with its own noise.

    Raises:
        ValueError: If gradients are accumulated over several batches.
    """
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"DPSGD needs accumulate_grad_batches=1, got {trainer.accumulate_grad_batches}. "
            "Use a larger batch_size, and leave GradientAccumulationScheduler out."
        )


_REPLACED = {
    nn.LSTM: "opacus.layers.DPLSTM",
    nn.GRU: "opacus.layers.DPGRU",
    nn.RNN: "opacus.layers.DPRNN",
    nn.MultiheadAttention: "opacus.layers.DPMultiheadAttention",
    nn.LSTMCell: "opacus.layers.dp_rnn.DPLSTMCell",
    nn.GRUCell: "opacus.layers.dp_rnn.DPGRUCell",
    nn.RNNCell: "opacus.layers.dp_rnn.DPRNNCell",
}
"""Layers whose inner steps torch hides from hooks, and their replacements, with the same weight names."""


def check_kinds(module: nn.Module) -> None:
    """Refuse trained layers whose per-sample gradients hooks can't read, such as torch's LSTM.

    Raises:
        ValueError: If there are such layers. The message names them and their replacements.
    """
    refused, replacements, compiled = [], dict[str, None](), []
    for name, layer in module.named_modules():
        kind = next((kind for kind in _REPLACED if isinstance(layer, kind)), None)
        is_compiled = type(layer).__name__ == "OptimizedModule" or isinstance(layer, torch.jit.ScriptModule)
        is_compiled |= getattr(layer, "_compiled_call_impl", None) is not None
        if not (kind or is_compiled) or not any(p.requires_grad for p in layer.parameters()):
            continue
        if kind is not None:
            refused.append(f"{name} ({type(layer).__name__})")
            replacements[_REPLACED[kind]] = None
        if is_compiled:
            compiled.append(f"{name or 'the module'} ({type(layer).__name__})")
    if compiled:
        raise ValueError(
            f"Layers {', '.join(compiled)} are compiled, which hides per-sample gradients from hooks. Train "
            "them without torch.compile and torch.jit."
        )
    if refused:
        raise ValueError(
            f"Layers {', '.join(refused)} give hooks no per-sample gradients. Replace them by "
            f"{', '.join(replacements)} (opacus.validators.ModuleValidator.fix(model) replaces LSTM, GRU and "
            "MultiheadAttention), or freeze them (requires_grad_(False))."
        )


def check_layers(module: nn.Module) -> None:
    """Refuse layers that mix the samples of a batch, or whose per-sample gradients hooks can't read.

    Batch normalisation mixes samples in train mode, and also in eval mode if it has no running statistics.
    Instance normalisation in train mode averages its running statistics over the batch. If samples are mixed,
    one sample changes the gradients of the others, and clipping bounds nothing.

    Raises:
        ValueError: If there are such layers. The message names them.
    """
    check_kinds(module)
    mixing = []
    for name, layer in module.named_modules():
        mixes = False
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            mixes = layer.training or layer.running_mean is None
        elif isinstance(layer, nn.modules.batchnorm._NormBase):
            mixes = layer.training and layer.track_running_stats
        mixing += [f"{name} ({type(layer).__name__})"] if mixes else []
    if mixing:
        raise ValueError(
            f"Layers {', '.join(mixing)} mix the samples of a batch. Use GroupNorm, e.g. by "
            "opacus.validators.ModuleValidator.fix(model.backbone), or freeze them in eval mode with running "
            "statistics and requires_grad_(False)."
        )


class UnchangedBuffers:
    """Guard that refuses changes of a module's buffers, because buffers are released without noise.

    Args:
        module: The module, before its first training step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen = {name: (b, b._version, b.detach().clone()) for name, b in module.named_buffers()}

    def check(self, content: bool = False) -> None:
        """Refuse to go on if buffers have changed.

        Args:
            content: Whether to compare values also. A write through `.data` or numpy leaves no other trace.

        Raises:
            ValueError: If buffers were changed, replaced, added or removed. The message names them.
        """
        now = dict(self._module.named_buffers())
        if changed := _find_changes(self._seen, now, (lambda buffer: buffer) if content else None):
            raise ValueError(
                f"Training changed the buffers {', '.join(changed)}, which the model releases without noise. "
                "Freeze the layer, leave it out, or keep the values in plain attributes."
            )


class UnchangedParameters:
    """Guard that refuses changes of parameters in `training_step`, outside of the noisy optimiser step.

    Examples are `Embedding(max_norm=...)`, which shortens the rows that a batch asks for, and codebooks or
    initial values that are computed from data.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._error = ""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Refuse changes of parameters within the context.

        Raises:
            ValueError: If parameters were changed, replaced, added or removed. The message names them.
        """
        before = {name: (p, p._version, _content(p)) for name, p in self._module.named_parameters()}
        yield
        if changed := _find_changes(before, dict(self._module.named_parameters()), _content):
            self._error = (
                f"training_step changed the parameters {', '.join(changed)} without noise, as "
                "Embedding(max_norm=...) does. Leave the change out, or, if it follows from weights alone, "
                "make it in on_train_batch_end."
            )
        self.check()

    def check(self) -> None:
        """Refuse to go on if a watched step has changed parameters.

        Raises:
            ValueError: If parameters were changed.
        """
        if self._error:
            raise ValueError(self._error)


def _find_changes(
    before: Mapping[str, tuple[Tensor, int, Tensor]],
    now: Mapping[str, Tensor],
    read: Callable[[Tensor], Tensor] | None,
) -> list[str]:
    """Return the names of tensors that were added, removed, replaced or written to.

    Args:
        before: Tensor, version and content of each tensor before.
        now: The tensors now.
        read: Returns the content of a tensor, to compare it also. None compares versions only.
    """
    changed = sorted(now.keys() ^ before.keys())
    for name in now.keys() & before.keys():
        tensor, version, content = before[name]
        known = now[name] is tensor and tensor._version == version
        if not known or (read is not None and not are_equal(read(now[name]), content)):
            changed.append(name)
    return changed


def _content(parameter: Tensor) -> Tensor:
    """Return a parameter's values to compare. For a frozen parameter it is their sum, to save memory."""
    if parameter.requires_grad:
        return parameter.detach().clone()
    return parameter.detach().sum(dtype=torch.complex128 if parameter.is_complex() else torch.float64)
