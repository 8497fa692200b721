"""Is the loss of a batch the mean or the sum of its samples' losses? Found out by trying it.

Per-sample gradients are read off the batch's own backward pass, so clipping them bounds what one sample
changes only if no sample weighs on another one's part of the loss. The loss of a few samples is compared
with the losses of each of them alone: class weights, ignored labels, contrastive losses and layers that mix
samples are neither the mean nor the sum, and are refused. Doubling a batch would not tell: a weighted mean
and batch normalisation give the same loss for a batch and for the batch twice.

Nor may a row of one layer be another sample's than the same row of the next one, as where a batch is sorted
on its way: what is clipped together would be gradients of several samples, and one sample more or less would
shift them all. So the rows of the gradients are compared with those of each sample alone, too.

The answer is found once, before anything is charged. It follows from raw data, so no later look may choose
another one: where a later one can't tell, the first answer stays, and where it contradicts, the run stops.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_fedq._lightning import pl
from lightning_fedq.data.generator_turns import states_of_defaults
from lightning_fedq.dpsgd.draws import check_draws_of_step

if TYPE_CHECKING:
    from lightning_fedq.dpsgd.opacus import SampleGradientHooks

SAMPLES = 8
_TOLERANCE = 1e-3
"""Relative; TF32 on a GPU is off by as much."""

_ROWS_AGREE = 0.02
"""Relative, of a sample's gradient; cancellation in float32 makes it less exact than a loss."""


def samples_to_try(num_samples: int, turn: int = 0) -> Tensor:
    """Up to 8 indices spread over a data set, so that one that is sorted by label shows several of them.

    Args:
        num_samples: Size of the data set.
        turn: Number of times that it was tried before: others are taken.

    Raises:
        ValueError: If there are fewer than 2 samples.
    """
    if num_samples < 2:
        raise ValueError(f"DPSGD needs 2 samples or more to tell how the loss is reduced, got {num_samples}")
    spread = torch.linspace(0, num_samples - 1, min(SAMPLES, num_samples)).long()
    return (spread + turn) % num_samples


def loss_reduction(
    trainer: Any,
    module: pl.LightningModule,
    batch: Any,
    hooks: type[SampleGradientHooks],
    before: Literal["mean", "sum"] | None = None,
    again: Callable[[], Any] | None = None,
) -> Literal["mean", "sum"]:
    """Find out how `training_step` reduces the losses of a batch, on a copy of the module that logs nothing.

    Layers are in the mode in which they train, unless the loss is random there (dropout): then in eval mode.

    Args:
        module: Not trained, and not hooked into, yet.
        batch: Batch of `samples_to_try` samples, as the loader gives it.
        hooks: Give the gradients of samples.
        before: What was found at the first look, which stays where this one can't tell; None at the first.
        again: Returns the batch that the loader makes of the samples in reverse. None is the batch reversed.

    Raises:
        ValueError: If it is neither, or another one than before, or can't be told at first, or if a row of
            gradients is of several samples; with the cure.
    """

    def arrived(batch: Any) -> Any:
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    batch = arrived(batch)
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
        step, modes = _make_loss_function(trainer, probe), dict[torch.nn.Module, bool]()

        def compute_loss(part: Any) -> float:
            return float(step(part).detach())

        check_draws_of_step(step, batch)
        if _is_random(compute_loss, batch):
            modes = {part: part.training for part in probe.modules()}
            probe.eval()
            if _is_random(compute_loss, batch):
                raise ValueError(
                    "the loss of one batch differs from call to call even in eval mode, so DPSGD can't tell "
                    "how it is reduced; make training_step deterministic where module.training is False"
                )
        alone = [compute_loss(_part(batch, [i])) for i in range(size)]
        whole = compute_loss(batch)
        if not math.isfinite(whole):  # samples that are not finite count as zero when they are clipped
            finite = [i for i, loss in enumerate(alone) if math.isfinite(loss)]
            alone = [alone[i] for i in finite]
            whole = compute_loss(_part(batch, finite)) if finite else whole
        reduction = _reduction(whole, alone, before)
        probe.zero_grad()
        for part, trains in modes.items():  # dropout stays away, and Opacus hooks into what trains
            part.training = trains and any(True for _ in part.parameters(recurse=False))
        taken_off = hooks(probe, loss_reduction=reduction, strict=True)
        _check_rows(probe, step, batch, None if again is None else lambda: arrived(again()))
        taken_off.remove_hooks()
    return reduction


def _check_rows(
    probe: pl.LightningModule, step: Callable[[Any], Tensor], batch: Any, again: Callable[[], Any] | None
) -> None:
    """Refuse gradients of a batch, as it is and reversed, whose rows are not those of its samples.

    A model that sorts the batch may have met one that is sorted: reversed, its rows tell. Where the loader
    itself gives every batch its order (`collate_fn` sorts by length, for packed sequences), no batch comes
    reversed, and the batch that it makes of the reversed samples tells.

    Raises:
        ValueError: If samples weigh on each other's loss.
    """
    first, once_more = (_rows(probe, step, _part(batch, [0]), 1) for _ in range(2))
    if first is not None and once_more is not None:
        first, once_more = torch.nan_to_num(first), torch.nan_to_num(once_more)
        if (first - once_more).norm() > _ROWS_AGREE * first.norm():
            raise ValueError(
                "gradients of one sample differ from one try to the next though its loss does not, so that "
                "nobody can tell whether samples are kept apart; draw no random numbers in backward"
            )
    alone = _alone(probe, step, batch)
    if not _are_per_sample(probe, step, batch, alone):
        raise ValueError(_MIXED)
    backwards = _part(batch, list(range(_size(batch)))[::-1])
    try:
        with torch.no_grad():
            step(backwards)
        apart = _are_per_sample(probe, step, backwards, alone)
    except RuntimeError:  # not sorted
        apart = False
    if not apart:
        other = backwards if again is None else again()
        if not _are_per_sample(probe, step, other, _alone(probe, step, other)):
            raise ValueError(_MIXED)


_MIXED = (
    "gradients of a sample in a batch differ from those of the sample alone: rows of one layer are other "
    "samples than the same rows of the next (a batch that is sorted or shuffled on its way, packed sequences "
    "that are not sorted by length), or samples are mixed, and clipping bounds nothing; keep the order of "
    "the batch in every layer (sort it where it is collated, in the loader's collate_fn)"
)


def _alone(probe: pl.LightningModule, step: Callable[[Any], Tensor], batch: Any) -> list[Tensor | None]:
    """Gradients of each sample alone, `(1, parameters)`, see `_rows`."""
    return [_rows(probe, step, _part(batch, [i]), 1) for i in range(_size(batch))]


def _are_per_sample(
    probe: pl.LightningModule, step: Callable[[Any], Tensor], batch: Any, alone: list[Tensor | None]
) -> bool:
    """Are the rows of a batch's gradients those of its samples, in any order?"""
    rows = _rows(probe, step, batch, _size(batch))
    if rows is None or any(row is None for row in alone):
        return True  # layers saw other rows than samples, which every step refuses by itself
    wanted = torch.cat([row for row in alone if row is not None])
    rows, wanted = (each[torch.isfinite(each).all(1)] for each in (rows, wanted))  # others count as zero
    if not len(rows) or not len(wanted):
        return True
    norms = wanted.norm(dim=1)
    same = torch.cdist(rows, wanted) <= _ROWS_AGREE * (norms + 0.01 * norms.max())
    return bool(same.any(0).all() & same.any(1).all())


def _rows(probe: pl.LightningModule, step: Callable[[Any], Tensor], batch: Any, size: int) -> Tensor | None:
    """Gradients of samples `(size, parameters)`, or None where a layer has other rows."""
    step(batch).backward()  # type: ignore[no-untyped-call]
    found = []
    for parameter in probe.parameters():
        if not parameter.requires_grad:
            continue
        rows = getattr(parameter, "grad_sample", None)
        if isinstance(rows, list) or (rows is not None and len(rows) != size):
            return None
        plain = torch.zeros(size, parameter.numel()).to(parameter) if rows is None else rows.reshape(size, -1)
        found.append(plain.detach())
        parameter.grad_sample = parameter.grad = None  # type: ignore[attr-defined]
    return torch.cat(found, 1)


def _reduction(
    whole: float, alone: list[float], before: Literal["mean", "sum"] | None
) -> Literal["mean", "sum"]:
    total, scale = sum(alone), sum(map(abs, alone)) / max(len(alone), 1)
    is_mean = abs(whole - total / max(len(alone), 1)) <= _TOLERANCE * scale
    is_sum = abs(whole - total) <= _TOLERANCE * scale * len(alone)
    if len(alone) < 2 or (is_mean and is_sum):  # nothing but zeros, too
        if before is not None:
            return before
        raise ValueError(
            f"the loss of the first samples is {whole:g}, from which DPSGD can't tell whether losses are "
            "averaged or summed over a batch; start from weights at which it is finite and not 0"
        )
    if is_mean or is_sum:
        found: Literal["mean", "sum"] = "mean" if is_mean else "sum"
        if before not in (None, found):
            raise ValueError(
                f"the loss of a batch was the {before} of its samples' losses and is now their {found}; "
                "reduce it in one way"
            )
        return found
    raise ValueError(
        f"the loss of a batch must be the mean or the sum of its samples' losses, or one sample weighs on "
        f"another's gradient and clipping bounds nothing; of {len(alone)} samples it is {whole:.6g}, which "
        f"is neither the mean nor the sum of theirs ({total / len(alone):.6g} and {total:.6g}); "
        "average over samples, without class weights, ignored labels, or layers and losses that compare "
        "samples"
    )


def _make_loss_function(trainer: Any, probe: pl.LightningModule) -> Callable[[Any], Tensor]:
    code = getattr(type(probe).training_step, "__code__", None)
    with_index = code is None or code.co_argcount > 2

    def compute_loss(batch: Any) -> Tensor:
        with trainer.precision_plugin.train_step_context():
            output: Any = probe.training_step(batch, 0) if with_index else probe.training_step(batch)
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise ValueError(f"training_step must return a loss for every batch, got {type(loss).__name__}")
        return loss

    return compute_loss


def _is_random(loss_of: Callable[[Any], float], batch: Any) -> bool:
    """Does a loss differ from call to call? A few may be equal by chance, so that 20 are tried."""
    before, first = states_of_defaults(), loss_of(batch)
    tries = 2 if states_of_defaults() == before else 20
    return any(not _same(first, loss_of(batch)) for _ in range(tries))


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
