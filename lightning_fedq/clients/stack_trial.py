"""Can a stack of clients train side by side here, and what does a step cost? Tried on a copy beforehand.

The copy is a client's, random generators are restored afterwards, and nothing is logged, so the run itself
does not notice.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import Metric

from lightning_fedq._lightning import callbacks_of, is_overridden, pl
from lightning_fedq.clients.fit import Client, ClientFit
from lightning_fedq.clients.hooks import (
    BATCH_HOOKS,
    STEP_HOOKS,
    call_start_hooks,
    looks_at_batches,
    overrides,
)
from lightning_fedq.clients.stack import ELEMENTWISE_OPTIMIZERS, StackedStep, further_arguments
from lightning_fedq.clients.vector import Vector
from lightning_fedq.data.generator_turns import GeneratorTurns, seed_everywhere
from lightning_fedq.functional.batch_stack import UnequalBatches, groups_alike, stack_batches


class Rehearsal(NamedTuple):
    """Findings of a first step on a copy of the module.

    Args:
        obstacle: Why clients can't train side by side, or None.
        flops: Floating-point operations of one client's step, matrix products and convolutions.
    """

    obstacle: str | None
    flops: int = 0


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Does this optimiser treat every coordinate on its own?"""
    return type(optimizer) in ELEMENTWISE_OPTIMIZERS


def rehearse(trainer: pl.Trainer, fit: ClientFit, vector: Vector, batch: Any) -> Rehearsal:
    """Try two steps of a stack on a copy of the module.

    Args:
        trainer: The user's, of a fit that has not begun to train.
        fit: Copies it.
        vector: What is trained.
        batch: First batch of a stack, on the device; its tensors lead with a client dimension of 2 or more.
    """
    if hook := _one_client_hook(trainer):
        return Rehearsal(hook)
    module = trainer.lightning_module
    if obstacle := _known_obstacle(module):
        return Rehearsal(obstacle)
    if isinstance(batch, UnequalBatches):
        groups = groups_alike(batch)
        if 2 * len(groups) > len(batch):
            return Rehearsal(
                f"the batches of {len(batch)} clients are of {len(groups)} kinds: tensors of other shapes, "
                "or strings and objects that differ"
            )
        batch = stack_batches([batch[index] for index in max(groups, key=len)])
    devices = [trainer.strategy.root_device.index or 0] if trainer.strategy.root_device.type == "cuda" else []
    with torch.random.fork_rng(devices), pl.utilities.seed.isolate_rng(include_cuda=False):
        try:

            def begin(seed: int = 0) -> Client:
                client = fit.copy(seed, (), alone=True)
                call_start_hooks(client.trainer, client.callbacks)
                vector.hold_statistics(client.module)
                return client

            return _try(begin, vector.trained, batch, vector.buffer_names)
        except Exception as error:  # whatever the user's code or vmap raises is the answer
            return Rehearsal(_in_words(error))


_MODULE_HOOKS = (*STEP_HOOKS, "on_train_epoch_end")


def _one_client_hook(trainer: pl.Trainer) -> str | None:
    """Name a hook that expects one client, of the module, the data module, a callback or a parameter.

    A stack's batch has a client dimension, its gradients and weights lie in the stack and not in the module.
    What a hook of the user's own would make of that is anybody's guess, so such a run goes one client at a
    time. Callbacks that belong to the fit see none of the three.
    """
    module, datamodule = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    for owner, parent in ((module, pl.LightningModule), (datamodule, pl.LightningDataModule)):
        for hook in _MODULE_HOOKS:
            if owner is not None and hasattr(parent, hook) and is_overridden(hook, owner, parent):
                return f"{type(owner).__name__} overrides {hook}, which expects one client's batch"
    for callback in filter(looks_at_batches, callbacks_of(trainer)):
        hook = next(hook for hook in BATCH_HOOKS if overrides(callback, hook))
        return (
            f"the callback {type(callback).__name__} has its own {hook}, which expects one client's "
            "batch, gradients and weights"
        )
    for optimizer in trainer.optimizers:  # type: ignore[attr-defined]
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return f"{type(optimizer).__name__} has a step hook, which expects one client's gradients"
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"the parameter {name} has a gradient hook, which expects one client's gradient"
    return None


_WORDS = {
    "inplace randomness": "training_step draws in place on a tensor that is the same for all clients, as "
    "torch.distributions does; torch.randn_like maps",
    ".item()": "training_step takes the value of a tensor out, with .item() or float(), or branches on one "
    "(data-dependent control flow)",
    "requires_grad_()": "training_step calls requires_grad_(), which torch.func can't map over clients",
}
"""What of functorch's and torch's errors stands for what in a training step."""


def _known_obstacle(module: pl.LightningModule) -> str | None:
    for name, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            return f"{name} ({type(part).__name__}) keeps a list of its weights, which can't be one a client"
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            return f"{name} ({type(part).__name__}) has sparse gradients, which torch.func can't map"
    if getattr(module, "_compiler_ctx", None) is not None:
        return (
            "torch.compile(module) has compiled training_step for one client; compile a part of the module, "
            "as in module.net = torch.compile(module.net), to have stacks"
        )
    places: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter) or not (place := parameter.data_ptr()):  # type: ignore[no-untyped-call]
            continue
        if (first := places.setdefault(place, name)) != name:
            return f"{first} and {name} are two parameters in one memory, which a stack would part"
    return None


def _in_words(error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error) else ""
    for part, words in _WORDS.items():
        if part in first:
            return words
    return f"{type(error).__name__}: {first.partition(' Please file')[0]}"


def _try(
    begin: Callable[..., Client], names: Sequence[str], batch: Any, buffer_names: Sequence[str]
) -> Rehearsal:
    client = begin()
    trainer, module = client.trainer, client.module
    turns = GeneratorTurns()
    turns.begin(int)
    step = StackedStep(module, names, buffer_names, turns)
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    if len({parameters[name].dtype for name in names}) > 1:
        return Rehearsal("the parameters are of several dtypes")
    num_clients = _num_clients(batch)
    own = [parameters[name].detach() for name in names]
    stack = [weight.expand(num_clients, *weight.shape).contiguous() for weight in own]
    changing = [buffers[n].expand(num_clients, *buffers[n].shape).contiguous() for n in buffer_names]
    first = tree_map_only(Tensor, lambda t: t[0], batch)

    args = further_arguments(module)

    def stacked() -> list[Tensor]:
        with trainer.precision_plugin.train_step_context():
            return step(stack, batch, *args, buffers=changing)[1]

    def single(module: pl.LightningModule, own: Any) -> None:
        module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        with trainer.precision_plugin.train_step_context():
            output = module.training_step(own, *args)
        loss: Any = output["loss"] if isinstance(output, dict) else output
        if loss is None:
            raise ValueError("training_step returns no loss for the first batch, on which it is tried")
        module.zero_grad()
        loss.backward()

    before, numbers, gradients = _state_of_others(), _numbers_of(module), list[list[Tensor]]()
    for _ in range(2):  # what the first step keeps, the second may stumble over
        gradients.append(stacked())
        step.replay(num_clients, batch, log=lambda *args, **kwargs: None)
        if leak := _leak(module):  # at once: torch itself crashes over some of them
            return Rehearsal(f"training_step keeps tensors in {leak}")
        now = _numbers_of(module)
        if changed := sorted(name for name in {**numbers, **now} if numbers.get(name) != now.get(name)):
            return Rehearsal(
                f"training_step changes numbers of Python ({', '.join(changed[:4])}), which a stack has once "
                "for all of its clients"
            )
    if before != _state_of_others():
        return Rehearsal(
            "training_step draws random numbers of Python's or NumPy's, which would be the same for all"
        )
    with FlopCounterMode(display=False) as counter, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using `torch.compile")  # speaks of the counter's own hooks
        single(module, first)
    unused = [name for name in names if parameters[name].grad is None]
    if unused:
        return Rehearsal(f"parameters {unused} get no gradient, which a stack can't tell from a zero one")
    if gradients[0]:
        for row in (0, num_clients - 1):
            alone = begin(1 + row).module  # generators that it holds are each client's own
            seed_everywhere(row)  # as the stack's turns
            single(alone, tree_map_only(Tensor, itemgetter(row), batch))
            of_alone = [attrgetter(name)(alone).grad for name in names]
            if not _are_alike([one[row] for one in gradients[0]], of_alone):
                return Rehearsal(
                    "training_step has other gradients in a stack than for a client alone; a generator of "
                    "its own, say, would be one for all"
                )
    return Rehearsal(None, counter.get_total_flops())


_TOLERANCE = 0.02
"""Largest difference of two gradients that are computed in another order, by the largest gradient; bfloat16's
rounding is half of it."""


def _are_alike(some: Sequence[Tensor], others: Sequence[Tensor | None]) -> bool:
    pairs = [(a, b) for a, b in zip(some, others, strict=True) if b is not None]
    largest = max((float(b.abs().max()) for _, b in pairs if b.numel()), default=0.0)
    differences = [float((a - b).abs().max()) for a, b in pairs if b.numel()]
    return not any(difference > _TOLERANCE * largest for difference in differences)  # NaN is another matter


def _numbers_of(module: torch.nn.Module) -> dict[str, str]:
    """Python's numbers in a module's attributes, alone and in containers, and in objects in these."""
    found: dict[str, str] = {}

    def look(value: Any, name: str, depth: int) -> None:
        if isinstance(value, bool | int | float | itertools.count):
            found[name] = repr(value)
        elif isinstance(value, list | tuple | deque) and len(value) <= _LOOKED_AT and depth:
            found[f"len({name})"] = str(len(value))
            for number, one in enumerate(value):
                look(one, f"{name}[{number}]", depth - 1)
        elif isinstance(value, dict) and len(value) <= _LOOKED_AT and depth:
            for key, one in value.items():
                look(one, f"{name}[{key!r}]", depth - 1)
        elif depth and _is_of_the_user(value):
            for key, one in vars(value).items():
                look(one, f"{name}.{key}", depth - 1)

    for prefix, part in module.named_modules():
        if not isinstance(part, Metric):  # whose updates are made again, see `StackedStep.replay`
            for name, value in vars(part).items():
                if name not in ("_modules", "_parameters", "_buffers", "_trainer", "_fabric"):
                    look(value, f"{prefix}.{name}".lstrip("."), 3)
    return found


def _is_of_the_user(value: Any) -> bool:
    if isinstance(value, torch.nn.Module | Tensor | type) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _LIBRARIES


_LOOKED_AT = 1000
_LIBRARIES = ("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fedq", "numpy")


def _state_of_others() -> tuple[Any, bytes, int]:
    """State of the global generators that are not torch's."""
    states: dict[str, Any] = pl.utilities.seed._collect_rng_states(include_cuda=False)  # type: ignore[attr-defined]
    return states["python"], states["numpy"][1].tobytes(), states["numpy"][2]


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
