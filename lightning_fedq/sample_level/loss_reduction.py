"""Is the loss of a batch the mean or the sum of its samples' losses? Found out by trying it.

Per-sample gradients are read off the batch's own backward pass, so clipping them bounds what one sample
changes only if no sample weighs on another one's part of the loss. The loss of a few samples is compared
with the losses of each of them alone: class weights, ignored labels, contrastive losses and layers that mix
samples are neither the mean nor the sum, and are refused. Doubling a batch would not tell: a weighted mean
and batch normalisation give the same loss for a batch and for the batch twice.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_fedq._lightning import pl

SAMPLES = 8
_TOLERANCE = 1e-3
"""Relative; TF32 on a GPU is off by as much."""


def samples_to_try(num_samples: int) -> Tensor:
    """Up to 8 indices spread over a data set, so that one that is sorted by label shows several of them.

    Raises:
        ValueError: If there are fewer than 2 samples.
    """
    if num_samples < 2:
        raise ValueError(f"DPSGD needs 2 samples or more to tell how the loss is reduced, got {num_samples}")
    return torch.linspace(0, num_samples - 1, min(SAMPLES, num_samples)).long()


def loss_reduction(trainer: Any, module: pl.LightningModule, batch: Any) -> Literal["mean", "sum"]:
    """Find out how `training_step` reduces the losses of a batch, on a copy of the module that logs nothing.

    Layers are in the mode in which they train, unless the loss is random there (dropout): then in eval mode.

    Args:
        trainer: Of the fit in progress.
        module: Not trained, and not hooked into, yet.
        batch: Of `samples_to_try`, as the loader gives it.

    Raises:
        ValueError: If it is neither, or can't be told; with the cure.
    """
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    size = _size(batch)
    try:
        probe = copy.deepcopy(module)
    except Exception as error:
        raise ValueError(
            "DPSGD tries the loss on a copy of the module, which can't be copied "
            f"({type(error).__name__}: {error}); make it copyable, e.g. by opening files and sockets in setup"
        ) from error
    probe.trainer = trainer
    probe.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    probe.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    with torch.random.fork_rng(), torch.enable_grad():
        loss_of = _loss_of(trainer, probe)
        if not _same(loss_of(batch), loss_of(batch)):
            probe.eval()
            if not _same(loss_of(batch), loss_of(batch)):
                raise ValueError(
                    "the loss of one batch differs from call to call even in eval mode, so DPSGD can't tell "
                    "how it is reduced; make training_step deterministic where module.training is False"
                )
        alone = [loss_of(_part(batch, [i])) for i in range(size)]
        whole = loss_of(batch)
        if not math.isfinite(whole):  # samples that are not finite count as zero when they are clipped
            finite = [i for i, loss in enumerate(alone) if math.isfinite(loss)]
            alone = [alone[i] for i in finite]
            whole = loss_of(_part(batch, finite)) if finite else whole
    return _reduction(whole, alone)


def _reduction(whole: float, alone: list[float]) -> Literal["mean", "sum"]:
    if len(alone) < 2 or not (whole or any(alone)):
        raise ValueError(
            f"the loss of the first samples is {whole:g}, from which DPSGD can't tell whether losses are "
            "averaged or summed over a batch; start from weights at which it is finite and not 0"
        )
    scale = sum(map(abs, alone)) / len(alone)
    if abs(whole - sum(alone) / len(alone)) <= _TOLERANCE * scale:
        return "mean"
    if abs(whole - sum(alone)) <= _TOLERANCE * scale * len(alone):
        return "sum"
    raise ValueError(
        f"the loss of a batch must be the mean or the sum of its samples' losses, or one sample weighs on "
        f"another's gradient and clipping bounds nothing; of {len(alone)} samples it is {whole:.6g}, which "
        f"is neither the mean nor the sum of theirs ({sum(alone) / len(alone):.6g} and {sum(alone):.6g}); "
        "average over samples, without class weights, ignored labels, or layers and losses that compare "
        "samples"
    )


def _loss_of(trainer: Any, probe: pl.LightningModule) -> Callable[[Any], float]:
    code = getattr(type(probe).training_step, "__code__", None)
    with_index = code is None or code.co_argcount > 2

    def loss_of(batch: Any) -> float:
        with trainer.precision_plugin.train_step_context():
            output: Any = probe.training_step(batch, 0) if with_index else probe.training_step(batch)
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise ValueError(f"training_step must return a loss for every batch, got {type(loss).__name__}")
        return float(loss.detach())

    return loss_of


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= 0.1 * _TOLERANCE * abs(one) or not (math.isfinite(one) or math.isfinite(other))


def _size(batch: Any) -> int:
    sizes = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        raise ValueError(
            "DPSGD needs batches of tensors whose first axis counts the samples, got first axes of "
            f"{sorted(sizes) or 'no tensors'}; collate samples along axis 0"
        )
    return sizes.pop()


def _part(batch: Any, samples: list[int]) -> Any:
    """A batch of some of its samples."""
    return tree_map_only(Tensor, lambda leaf: leaf[samples] if leaf.dim() else leaf, batch)
