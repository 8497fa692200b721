"""Can a stack of clients train side by side here, and is it faster? Tried on a copy, before the first step.

The copy is a deep copy of the module, torch's generators are restored afterwards, and nothing is
logged, so the run itself does not notice.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_fedq._lightning import pl
from lightning_fedq.strategies.client_parallel import ELEMENTWISE_OPTIMIZERS, StackedStep
from lightning_fedq.strategies.one_client_hooks import one_client_hook


class Rehearsal(NamedTuple):
    """What the rehearsal found.

    Args:
        obstacle: Why clients can't train side by side, or None.
        stacked_seconds: Seconds of one step of the whole stack, all clients.
        single_seconds: Seconds of one step of one client.
    """

    obstacle: str | None
    stacked_seconds: float = 0.0
    single_seconds: float = 0.0


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Does this optimiser treat every coordinate on its own?"""
    return type(optimizer) in ELEMENTWISE_OPTIMIZERS


def rehearse(
    trainer: pl.Trainer, names: Sequence[str], batch: Any, measure: bool, buffer_names: Sequence[str] = ()
) -> Rehearsal:
    """Try one step of a stack on a copy of the module.

    Args:
        trainer: Trainer of a fit that has not begun to train.
        names: Names of the trained parameters.
        batch: First batch of a stack, on the device; its tensors lead with a client dimension of 2 or more.
        measure: Also take the time, and that of one client's ordinary step.
        buffer_names: Names of the buffers that training changes.
    """
    if hook := one_client_hook(trainer):
        return Rehearsal(hook)
    module = trainer.lightning_module
    devices = [trainer.strategy.root_device.index or 0] if trainer.strategy.root_device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            return _try(trainer, copy.deepcopy(module), names, batch, measure, buffer_names)
        except Exception as error:  # whatever the user's code or vmap raises is the answer
            return Rehearsal(
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            )


def _try(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    names: Sequence[str],
    batch: Any,
    measure: bool,
    buffer_names: Sequence[str],
) -> Rehearsal:
    module.trainer = trainer
    module.train()
    step = StackedStep(module, names, buffer_names)
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    if len({parameters[name].dtype for name in names}) > 1:
        return Rehearsal("the parameters are of several dtypes")
    num_clients = _num_clients(batch)
    own = [parameters[name].detach() for name in names]
    stack = [weight.expand(num_clients, *weight.shape).contiguous() for weight in own]
    changing = [buffers[n].expand(num_clients, *buffers[n].shape).contiguous() for n in buffer_names]
    first = tree_map_only(Tensor, lambda t: t[0], batch)

    def stacked() -> None:
        with trainer.precision_plugin.train_step_context():
            step(stack, batch, 0, buffers=changing)

    def single() -> None:
        module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        with trainer.precision_plugin.train_step_context():
            output = module.training_step(first, 0)
        loss: Any = output["loss"] if isinstance(output, dict) else output
        module.zero_grad()
        loss.backward()

    stacked()
    step.replay(num_clients, batch, log=lambda *args, **kwargs: None)
    if leak := _leak(module):
        return Rehearsal(f"training_step keeps tensors in {leak}")
    single()
    unused = [name for name in names if parameters[name].grad is None]
    if unused:
        return Rehearsal(f"parameters {unused} get no gradient, which a stack can't tell from a zero one")
    return Rehearsal(None, _seconds(stacked), _seconds(single)) if measure else Rehearsal(None)


def _seconds(run: Callable[[], None]) -> float:
    """Best of three, after the caller's warm-up."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def _num_clients(batch: Any) -> int:
    sizes = [len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not sizes or len(set(sizes)) != 1:
        raise TypeError("the batch holds no tensors with one leading client dimension")
    return sizes[0]


def _leak(module: torch.nn.Module) -> str | None:
    """Name an attribute that holds a tensor of a vmap that is over: state that `training_step` keeps."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if any(_is_dead(leaf) for leaf in tree_leaves(value)):
                return f"{prefix}.{name}".lstrip(".")
    return None


def _is_dead(value: Any) -> bool:
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)
