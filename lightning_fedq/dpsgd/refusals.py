"""Checks of `DPSGD` before the fit, at every step, and before anything is saved: refusals with cures."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedq._lightning import pl


def check_settings(trainer: Any, module: pl.LightningModule) -> None:
    """Refuse Trainer settings and callbacks that would break the guarantee.

    Raises:
        ValueError: Naming the setting.
    """
    if not isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy) or trainer.world_size > 1:
        raise ValueError(
            f"DPSGD runs on one device, got {type(trainer.strategy).__name__} on {trainer.world_size}; "
            "use Trainer(strategy='auto', devices=1)"
        )
    if not module.automatic_optimization:
        raise ValueError(
            "DPSGD needs automatic optimisation; return the loss and leave the steps to Lightning"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, pl.callbacks.LearningRateFinder | pl.callbacks.BatchSizeFinder):
            raise ValueError(
                f"{type(callback).__name__} trains without clipping and noise, and what it picks follows "
                "from raw losses, which no epsilon covers; find the setting on public data, set it by hand "
                "and leave it out"
            )
    check_accumulation(trainer)
    if trainer.gradient_clip_val:
        raise ValueError("gradient_clip_val clips batches, not samples; use DPSGD(max_grad_norm=...) instead")
    if trainer.precision not in ("32-true", "64-true"):
        raise ValueError(f"DPSGD needs full precision, got {trainer.precision}; use Trainer(precision=32)")
    if trainer.overfit_batches:
        raise ValueError("overfit_batches replaces the sampling; use a small dataset")


def check_accumulation(trainer: Any) -> None:
    """Refuse gradient accumulation: every batch is a step that is charged, with noise of its own.

    Raises:
        ValueError: If it is on.
    """
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            "accumulate_grad_batches would put several Poisson batches into a step that is charged as one, "
            f"got {trainer.accumulate_grad_batches}; use a larger batch_size, and leave "
            "GradientAccumulationScheduler out"
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
"""Layers whose steps torch hides from hooks, and what takes their place, with weights of the same names."""


def check_kinds(module: nn.Module) -> None:
    """Refuse trained layers of which nobody can read the gradient of each sample.

    Raises:
        ValueError: Naming the layers, and what takes their place.
    """
    found, better = [], dict[str, None]()
    for name, layer in module.named_modules():
        kind = next((kind for kind in _REPLACED if isinstance(layer, kind)), None)
        if kind is not None and any(p.requires_grad for p in layer.parameters()):
            found.append(f"{name} ({type(layer).__name__})")
            better[_REPLACED[kind]] = None
    if found:
        raise ValueError(
            f"layers {', '.join(found)} show hooks no gradient of each sample, which DPSGD clips; put "
            f"{', '.join(better)} in their place, which take the same arguments and weights of the same "
            "names, or freeze them (requires_grad_(False)). opacus.validators.ModuleValidator.fix(model) "
            "replaces LSTM, GRU and MultiheadAttention"
        )


def check_layers(module: nn.Module) -> None:
    """Refuse layers that mix the samples of a batch, or hide the gradient of each.

    Batch normalisation does in training mode, whatever it learns or keeps, and in eval mode where it has no
    running statistics; instance normalisation with running statistics averages them over the batch.

    Raises:
        ValueError: Naming the layers.
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
            f"layers {', '.join(mixing)} mix the samples of a batch, so one sample changes the gradients of "
            "the others and clipping bounds nothing; use GroupNorm, e.g. "
            "opacus.validators.ModuleValidator.fix(model.backbone), or freeze them: eval mode, with running "
            "statistics, requires_grad False"
        )


class UnchangedBuffers:
    """Watches that training leaves a module's buffers as they were: they are released, and get no noise.

    Args:
        module: Before the first step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
        self._content = {name: buffer.detach().clone() for name, (buffer, _) in self._seen.items()}

    def check(self, content: bool = False) -> None:
        """Refuse to go on.

        Args:
            content: Compare values too; a write through `.data` or numpy leaves no other trace.

        Raises:
            ValueError: Naming the buffers that were changed, replaced, added or taken away.
        """
        now = dict(self._module.named_buffers())
        changed = sorted(now.keys() ^ self._seen.keys())
        for name in now.keys() & self._seen.keys():
            buffer, version = self._seen[name]
            known = now[name] is buffer and buffer._version == version
            if not known or (content and not equal(now[name], self._content[name])):
                changed.append(name)
        if changed:
            raise ValueError(
                f"training changed the buffers {', '.join(changed)}, which are released with the model and "
                "get no noise; leave out what keeps them (running statistics, counters, codebooks), freeze "
                "it, or keep the values in plain attributes that nobody publishes"
            )


class UnchangedParameters:
    """Watches that a training step leaves a module's parameters to the noisy step that follows."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._error = ""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Refuse what changes, replaces, adds or takes away parameters within.

        Raises:
            ValueError: Naming them.
        """
        before = {name: (p, p._version, _content(p)) for name, p in self._module.named_parameters()}
        yield
        now = dict(self._module.named_parameters())
        changed = sorted(now.keys() ^ before.keys())
        for name in now.keys() & before.keys():
            parameter, version, content = before[name]
            known = now[name] is parameter and parameter._version == version
            if not known or not equal(_content(now[name]), content):
                changed.append(name)
        if changed:
            self._error = (
                f"training_step changed the parameters {', '.join(changed)}, which are released, and what "
                "follows from a batch gets no noise there (Embedding(max_norm=...) shortens the rows that a "
                "batch asks for; codebooks and starts that depend on data are written); leave it out, or, if "
                "it follows from weights alone, do it in on_train_batch_end"
            )
        self.check()

    def check(self) -> None:
        """Refuse to go on.

        Raises:
            ValueError: If parameters were changed.
        """
        if self._error:
            raise ValueError(self._error)


def _content(parameter: Tensor) -> Tensor:
    """Values to compare. Of a frozen parameter, of which there may be many, their sum."""
    if parameter.requires_grad:
        return parameter.detach().clone()
    return parameter.detach().sum(dtype=torch.complex128 if parameter.is_complex() else torch.float64)


def equal(one: Tensor, other: Tensor) -> bool:
    """Are two tensors the same, where NaN is itself?"""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    same = (one == other) | (one != one) & (other != other)
    return bool(torch.as_tensor(same).all())
