"""Find out whether the loss of a batch is the mean or the sum of the per-sample losses.

Per-sample gradients are read from the backward pass of a whole batch. Clipping them bounds the effect of one
sample only if no sample affects another sample's part of the loss. So the loss of a few samples is compared
with the losses of each sample alone. Class weights, ignored labels, contrastive losses and layers that mix
samples give neither the mean nor the sum, and are refused. It would not help to double a batch: a weighted
mean and batch normalisation give the same loss for a batch and for the batch twice.

Also, row i of one layer and row i of the next layer must belong to the same sample. If a model sorts the
batch between two layers, a clipped row combines gradients of several samples, and one additional sample
shifts all rows. So the per-sample gradients of a batch are compared with those of each sample alone.

The answer is found once, before anything is charged. It follows from raw data, so later checks can't change
it. If a later check is undecided, the first answer stays. If it contradicts, the run stops.
"""

from __future__ import annotations

import copy
import dis
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_fedq._lightning import pl
from lightning_fedq.data.generator_turns import states_of_defaults
from lightning_fedq.data.sampling import in_short
from lightning_fedq.dpsgd.draws import check_draws_of_step
from lightning_fedq.dpsgd.layers import SampleGradientError, describe_layer, refuse_rows
from lightning_fedq.dpsgd.refusals import UnchangedParameters

_INDICES = 8
"""Number of batch indices with which the training step is tried."""
_TOLERANCE = 1e-3
"""Relative tolerance of losses, as large as the error of TF32 on a GPU."""

_ROWS_AGREE = 0.02
"""Relative tolerance of per-sample gradients, which are less exact than losses (float32 cancellation)."""


def loss_reduction(
    trainer: Any,
    module: pl.LightningModule,
    batch: Any,
    before: Literal["mean", "sum"] | None = None,
    again: Callable[[], Any] | None = None,
) -> Literal["mean", "sum"]:
    """Find out how `training_step` reduces the losses of a batch, on a copy of the module that logs nothing.

    Layers are in their training mode. If the loss is random in that mode (dropout), they are in eval mode.

    Args:
        trainer: The user's Trainer, or a client's copy of it.
        module: Module that is not trained yet and has no Opacus hooks yet.
        batch: Batch of a few samples, as the loader returns it.
        before: Result of the first check, which stays if this check is undecided. None at the first check.
        again: Returns the loader's batch of the same samples in reverse order. None reverses `batch` itself.

    Returns:
        "mean" or "sum".

    Raises:
        ValueError: If the loss is neither mean nor sum, if the result differs from `before`, if the first
            check is undecided, or if a row of gradients belongs to several samples.
    """
    from lightning_fedq.dpsgd.opacus import SampleGradientHooks

    def prepare(batch: Any) -> Any:
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    batch = prepare(batch)
    size = _size(batch)
    try:
        probe = copy.deepcopy(module)
    except Exception as error:
        raise ValueError(
            "DPSGD tries the loss on a copy, but the module can't be copied "
            f"({type(error).__name__}: {error}). Make it copyable, e.g. open files and sockets in setup."
        ) from error
    probe.trainer = trainer
    probe.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    probe.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    with torch.random.fork_rng(), torch.enable_grad():
        step, modes = _make_loss_function(trainer, probe), dict[torch.nn.Module, bool]()

        def compute_loss(part: Any, batch_idx: int = 0) -> float:
            return float(step(part, batch_idx).detach())

        check_draws_of_step(step, batch)
        if _is_random(compute_loss, batch):
            modes = {part: part.training for part in probe.modules()}
            probe.eval()
            if _is_random(compute_loss, batch):
                raise ValueError(
                    "The loss of one batch is random even in eval mode. "
                    "Make training_step deterministic when module.training is False."
                )
        alone = [compute_loss(_part(batch, [i])) for i in range(size)]
        whole = compute_loss(batch)
        if not math.isfinite(whole):  # samples with a non-finite loss count as zero when they are clipped
            finite = [i for i, loss in enumerate(alone) if math.isfinite(loss)]
            alone = [alone[i] for i in finite]
            whole = compute_loss(_part(batch, finite)) if finite else whole
        reduction = _reduction(whole, alone, before)
        probe.zero_grad()
        # dropout stays off, and layers with parameters go back to train mode, which Opacus's hooks need
        for part, trains in modes.items():
            part.training = trains and any(True for _ in part.parameters(recurse=False))
        _check_returns(probe, compute_loss, _part(batch, [0]))
        probe_hooks = SampleGradientHooks(probe, loss_reduction=reduction, strict=True)

        def hooked_step(part: Any) -> Tensor:
            with probe_hooks.training_step():
                return step(part)

        stepped = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
        trained = [n for n, p in module.named_parameters() if id(p) in stepped and p.requires_grad]
        _check_hooks(probe, hooked_step, batch, trained)
        _check_rows(probe, hooked_step, batch, None if again is None else lambda: prepare(again()))
        probe_hooks.remove_hooks()
    return reduction


def _check_returns(probe: pl.LightningModule, compute_loss: Callable[..., float], batch: Any) -> None:
    """Refuse a `training_step` that returns no loss for some batches.

    Without a loss there is no step, and one sample could decide about it for the whole batch. The step is
    tried with the first batch indices, and its code is searched for a `return` without a value.

    Raises:
        ValueError: If a return without a loss is found.
    """
    for batch_idx in range(1, _INDICES):
        compute_loss(batch, batch_idx)
    code = getattr(inspect.unwrap(type(probe).training_step), "__code__", None)
    steps = [] if code is None else list(dis.get_instructions(code))
    for before, now in zip([None, *steps], steps, strict=False):
        is_none = now.opname == "RETURN_CONST" and now.argval is None
        if now.opname == "RETURN_VALUE" and before is not None:
            is_none = before.opname == "LOAD_CONST" and before.argval is None
        if is_none:
            raise ValueError(
                "training_step must return a loss for every batch, but its code can return None. Return the "
                "loss: samples with a gradient that is not finite count as zero."
            )


def _check_hooks(
    probe: pl.LightningModule, step: Callable[[Any], Tensor], batch: Any, trained: list[str]
) -> None:
    """Refuse layers whose per-sample gradients hooks can't read, and name them.

    Args:
        probe: Hooked copy of the module.
        step: Returns the loss of a batch.
        batch: Batch of which an unhooked step has returned a loss.
        trained: Names of the parameters in the optimiser.

    Raises:
        ValueError: If the step fails with hooks only, or if parameters get gradients that hooks do not see.
        RuntimeError: If a layer sees another number of rows than samples.
    """
    try:
        loss = step(batch)
    except SampleGradientError:
        raise
    except RuntimeError as error:
        raise ValueError(
            f"{_find_layer(probe, error)} can't give per-sample gradients "
            f"({(str(error).splitlines() or [''])[0][:120]}). Leave out torch.func and in-place changes of "
            "layers' outputs (x += 1, ReLU(inplace=True))."
        ) from error
    loss.backward()  # type: ignore[no-untyped-call]
    unseen, unused, size = list[str](), list[str](), _size(batch)
    for name in trained:
        parameter = probe.get_parameter(name)
        rows: Any = getattr(parameter, "grad_sample", None)
        if rows is None:
            (unused if parameter.grad is None else unseen).append(name)
        elif not isinstance(rows, list) and len(rows) != size:
            layer = probe.get_submodule(name.rpartition(".")[0])
            refuse_rows([len(rows)], size, describe_layer(probe, layer))
    if unseen or unused:
        with UnchangedParameters(probe).watch():  # names the cause if the step itself changes parameters
            step(_part(batch, [0]))
    if unseen:
        raise ValueError(
            f"{in_short(unseen)} get gradients that hooks do not see. Call the layers on the whole batch, "
            "without torch.func, torch.compile and direct use of their weights."
        )
    if unused:
        raise ValueError(
            f"{in_short(unused)} have no gradient of a batch. Freeze parameters that training_step does not "
            "use (requires_grad_(False))."
        )
    probe.zero_grad()
    for parameter in probe.parameters():
        parameter.grad_sample = None  # type: ignore[attr-defined]


def _find_layer(probe: pl.LightningModule, error: BaseException) -> str:
    """Return the innermost layer of the probe that was called when an error was raised, else the step."""
    layers, found, trace = {*probe.modules()} - {probe}, "training_step", error.__traceback__
    while trace is not None:
        layer = trace.tb_frame.f_locals.get("self")
        if isinstance(layer, torch.nn.Module) and layer in layers:
            found = describe_layer(probe, layer)
        trace = trace.tb_next
    return found


def _check_rows(
    probe: pl.LightningModule, step: Callable[[Any], Tensor], batch: Any, again: Callable[[], Any] | None
) -> None:
    """Refuse a batch whose rows of gradients are not the gradients of its samples.

    The batch is tried as it is and in reverse, because a model that sorts batches may have got a sorted one.
    If the loader itself sorts every batch (a `collate_fn` that sorts by length, for packed sequences), the
    model may refuse a reversed batch. Then the loader's batch of the reversed samples is tried.

    Raises:
        ValueError: If rows combine several samples, or if gradients of one sample are random.
    """
    first, second = (_rows(probe, step, _part(batch, [0]), 1) for _ in range(2))
    if first is not None and second is not None:
        first, second = torch.nan_to_num(first), torch.nan_to_num(second)
        if (first - second).norm() > _ROWS_AGREE * first.norm():
            raise ValueError(
                "Gradients of one sample are random, though its loss is not. "
                "Draw no random numbers in backward."
            )
    alone = _alone(probe, step, batch)
    reverse = _part(batch, list(range(_size(batch)))[::-1])
    is_per_sample = _are_per_sample(probe, step, batch, alone)
    if is_per_sample and not _is_reverse_per_sample(probe, step, reverse, alone):
        other = reverse if again is None else again()
        is_per_sample = _are_per_sample(probe, step, other, _alone(probe, step, other))
    if not is_per_sample:
        raise ValueError(
            "Gradients of a sample in a batch differ from those of the sample alone: layers sort, shuffle or "
            "mix samples. Keep the order of the batch in every layer (sort it in the loader's collate_fn)."
        )


def _is_reverse_per_sample(
    probe: pl.LightningModule, step: Callable[[Any], Tensor], reverse: Any, alone: list[Tensor | None]
) -> bool:
    """Return whether `_are_per_sample` holds for a reversed batch. False if the module refuses the batch."""
    try:
        with torch.no_grad():
            step(reverse)
        return _are_per_sample(probe, step, reverse, alone)
    except RuntimeError:  # packed sequences refuse a batch that is not sorted by length
        return False


def _alone(probe: pl.LightningModule, step: Callable[[Any], Tensor], batch: Any) -> list[Tensor | None]:
    """Return the gradients of each sample alone, `(1, parameters)`, or None as in `_rows`."""
    return [_rows(probe, step, _part(batch, [i]), 1) for i in range(_size(batch))]


def _are_per_sample(
    probe: pl.LightningModule, step: Callable[[Any], Tensor], batch: Any, alone: list[Tensor | None]
) -> bool:
    """Return whether the rows of a batch's gradients are the gradients of its samples, in any order.

    Args:
        probe: Hooked copy of the module.
        step: Returns the loss of a batch.
        batch: Batch to try.
        alone: Gradients of each sample alone, from `_alone`.
    """
    rows = _rows(probe, step, batch, _size(batch))
    if rows is None or any(row is None for row in alone):
        return True  # layers saw another number of rows than samples, which every step refuses by itself
    expected = torch.cat([row for row in alone if row is not None])
    # gradients that are not finite count as zero in training, so they are left out
    rows, expected = (matrix[torch.isfinite(matrix).all(1)] for matrix in (rows, expected))
    if not len(rows) or not len(expected):
        return True
    norms = expected.norm(dim=1)
    same = torch.cdist(rows, expected) <= _ROWS_AGREE * (norms + 0.01 * norms.max())
    return bool(same.any(0).all() & same.any(1).all())


def _rows(probe: pl.LightningModule, step: Callable[[Any], Tensor], batch: Any, size: int) -> Tensor | None:
    """Return the per-sample gradients `(size, parameters)`, or None if a layer has another number of rows."""
    step(batch).backward()  # type: ignore[no-untyped-call]
    columns = []
    for parameter in probe.parameters():
        if not parameter.requires_grad:
            continue
        rows = getattr(parameter, "grad_sample", None)
        if isinstance(rows, list) or (rows is not None and len(rows) != size):
            return None
        plain = torch.zeros(size, parameter.numel()).to(parameter) if rows is None else rows.reshape(size, -1)
        columns.append(plain.detach())
        parameter.grad_sample = parameter.grad = None  # type: ignore[attr-defined]
    return torch.cat(columns, 1)


def _reduction(
    whole: float, alone: list[float], before: Literal["mean", "sum"] | None
) -> Literal["mean", "sum"]:
    """Compare the loss of a batch with the mean and the sum of the losses of each sample alone.

    Args:
        whole: Loss of the batch.
        alone: Loss of each sample alone.
        before: Result of the first check, or None.

    Raises:
        ValueError: As in `loss_reduction`.
    """
    total, scale = sum(alone), sum(map(abs, alone)) / max(len(alone), 1)
    is_mean = abs(whole - total / max(len(alone), 1)) <= _TOLERANCE * scale
    is_sum = abs(whole - total) <= _TOLERANCE * scale * len(alone)
    if len(alone) < 2 or (is_mean and is_sum):  # also if all losses are zero
        if before is not None:
            return before
        raise ValueError(
            f"DPSGD can't find the loss reduction, because the loss of the first samples is {whole:g}. "
            "Start from weights at which the loss is finite and not 0."
        )
    if is_mean or is_sum:
        reduction: Literal["mean", "sum"] = "mean" if is_mean else "sum"
        if before not in (None, reduction):
            raise ValueError(
                f"The loss of a batch was the {before} of per-sample losses and is now the {reduction}. "
                "Use one reduction."
            )
        return reduction
    raise ValueError(
        f"The loss of {len(alone)} samples is {whole:.6g}, neither the mean ({total / len(alone):.6g}) nor "
        f"the sum ({total:.6g}) of per-sample losses. Average over samples, without class weights, ignored "
        "labels, or layers and losses that compare samples."
    )


def _make_loss_function(trainer: Any, probe: pl.LightningModule) -> Callable[..., Tensor]:
    """Return a function that computes the loss of a batch by the module's `training_step`."""
    code = getattr(type(probe).training_step, "__code__", None)
    with_index = code is None or code.co_argcount > 2

    def compute_loss(batch: Any, batch_idx: int = 0) -> Tensor:
        with trainer.precision_plugin.train_step_context():
            output: Any = probe.training_step(batch, batch_idx) if with_index else probe.training_step(batch)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"training_step must return a loss for every batch, got {type(loss).__name__} at batch "
                f"{batch_idx}"
            )
        if loss.numel() != 1:
            raise ValueError(
                f"training_step must return one number, got a loss of shape {tuple(loss.shape)}. Return the "
                "mean over samples."
            )
        if torch.is_grad_enabled() and loss.grad_fn is None:
            raise ValueError(
                f"The loss at batch {batch_idx} depends on no parameter that requires a gradient. Return a "
                "loss of the parameters for every batch."
            )
        return loss

    return compute_loss


def _is_random(loss_of: Callable[[Any], float], batch: Any) -> bool:
    """Return whether the loss of a batch differs from call to call.

    Two calls suffice if no default generator has moved. Otherwise 20 are made, because a few random losses
    may be equal by chance.
    """
    before, first = states_of_defaults(), loss_of(batch)
    tries = 2 if states_of_defaults() == before else 20
    return any(not _same(first, loss_of(batch)) for _ in range(tries))


def _same(one: float, other: float) -> bool:
    """Return whether two losses agree up to rounding, or are both not finite."""
    return abs(one - other) <= 0.1 * _TOLERANCE * abs(one) or not (math.isfinite(one) or math.isfinite(other))


def _size(batch: Any) -> int:
    """Return the number of samples of a batch: the common size of the first axis of its tensors."""
    sizes = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        raise ValueError(
            "DPSGD needs batches of tensors with the samples along axis 0, got first axes of "
            f"{sorted(sizes) or 'no tensors'}. Collate samples along axis 0 (pad graphs to one size)."
        )
    return sizes.pop()


def _part(batch: Any, samples: list[int]) -> Any:
    """Return a batch of the given samples of a batch."""
    return tree_map_only(Tensor, lambda leaf: leaf[samples] if leaf.dim() else leaf, batch)
