"""Can a stack of clients train side by side here, and what does a step cost? Tried on a copy beforehand.

The copy is a client's, random generators are restored afterwards, and nothing is logged, so the run itself
does not notice.
"""

from __future__ import annotations

import itertools
import math
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import Metric

from lightning_fedq._lightning import get_callbacks, is_overridden, pl
from lightning_fedq.clients.fit import Client
from lightning_fedq.clients.hooks import (
    BATCH_HOOKS,
    STEP_HOOKS,
    has_user_batch_handling,
    looks_at_batches,
    overrides,
)
from lightning_fedq.clients.stack import (
    ELEMENTWISE_OPTIMIZERS,
    PerClientHandling,
    StackedStep,
    batch_handler,
    further_arguments,
)
from lightning_fedq.clients.vector import Vector
from lightning_fedq.data.generator_turns import GENERATORS, GeneratorTurns, get_state, seed_for_transforms
from lightning_fedq.functional.batch_stack import (
    UnequalBatches,
    flat_batch,
    group_stackable,
    map_tensors,
    stack_batches,
)


class Rehearsal(NamedTuple):
    """Findings of a first step on a copy of the module.

    Args:
        obstacle: Why clients can't train side by side, or None.
        flops: Floating-point operations of one client's step, matrix products and convolutions.
        difference: Largest difference of a client's gradient in a stack from that of the client alone, as a
            share of the largest entry of all.
        where: Name of the parameter where that is.
        rounds: Does the step compute in less than 32 bits?
    """

    obstacle: str | None
    flops: int = 0
    difference: float = 0.0
    where: str = ""
    rounds: bool = False


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Does this optimiser treat every coordinate on its own?"""
    return type(optimizer) in ELEMENTWISE_OPTIMIZERS


def rehearse(trainer: pl.Trainer, begin: Callable[[int], Client], vector: Vector, batch: Any) -> Rehearsal:
    """Try two steps of a stack on a copy of the module.

    Args:
        begin: Returns a client's copy that is about to train, for a seed.
        batch: First batch of a stack, as it is read.
    """
    if obstacle := _find_single_client_hook(trainer) or _known_obstacle(trainer.lightning_module):
        return Rehearsal(obstacle)
    devices = [trainer.strategy.root_device.index or 0] if trainer.strategy.root_device.type == "cuda" else []
    with torch.random.fork_rng(devices), pl.utilities.seed.isolate_rng(include_cuda=False):
        try:
            by_itself = has_user_batch_handling(trainer)
            if by_itself and (obstacle := _find_hook_obstacle(begin, vector, batch)):
                return Rehearsal(obstacle)
            return _judge_difference(lambda wide: _try(begin, vector, batch, by_itself, wide))
        except Exception as error:  # whatever the user's code or vmap raises is the answer
            return Rehearsal(error_line(error))


_MODULE_HOOKS = (*STEP_HOOKS, "on_train_epoch_end")


def _find_single_client_hook(trainer: pl.Trainer) -> str | None:
    """Name a hook that expects one client, of the module, a callback or a parameter.

    A stack's batch has a client dimension, its gradients and weights lie in the stack and not in the module.
    What a hook of the user's own would make of that is anybody's guess, so such a run goes one client at a
    time. Callbacks that belong to the fit see none of the three.
    """
    module = trainer.lightning_module
    for hook in _MODULE_HOOKS:
        if is_overridden(hook, module, pl.LightningModule):
            return f"{type(module).__name__} overrides {hook}, which expects one client's batch"
    for callback in filter(looks_at_batches, get_callbacks(trainer)):
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


def error_line(error: Exception) -> str:
    """One line of what an error of a trial says of a training step."""
    first = str(error).strip().splitlines()[0] if str(error) else ""
    for part, words in _WORDS.items():
        if part in first:
            return words
    return f"{type(error).__name__}: {first.partition(' Please file')[0]}"


_ONCE = "a stack has once for all of its clients"


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what is not the same in both: of pairs, their first part."""
    first = [{n: v[0] if isinstance(v, tuple) else v for n, v in marks.items()} for marks in (one, other)]
    return sorted(name for name in {**one, **other} if first[0].get(name) != first[1].get(name))


def _make_turns() -> GeneratorTurns:
    turns = GeneratorTurns()
    turns.begin(int)
    return turns


def _find_hook_obstacle(begin: Callable[[int], Client], vector: Vector, batch: Any) -> str | None:
    """Why hooks on batches can't serve one client of a stack after the other. None if they can."""
    client, other = begin(0), begin(0)
    before, drawn = _state_marks(client), _collect_numbers(client.module)
    made = PerClientHandling(client.trainer, _make_turns())(batch)
    kept, used = _differ(before, _state_marks(client)), _differ(drawn, _collect_numbers(client.module))
    if names := ", ".join((kept or used)[:4]):
        what = "keep something beside the batch" if kept else "draw from a random generator of their own"
        return f"hooks on batches {what} ({names}), which {_ONCE}"
    for name in (*vector.trained, *vector.buffer_names):
        tensor = attrgetter(name)(other.module).detach()
        tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.add_(1)
    follows = "hooks on batches follow the weights, of which every client of a stack has its own"
    try:
        again = PerClientHandling(other.trainer, _make_turns())(batch)
    except Exception:  # over what no weights are
        return follows
    pairs = zip(flat_batch(made)[0], flat_batch(again)[0], strict=True)
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor)]
    return None if all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in tensors) else follows


_TOLERANCE = 0.02
"""Largest difference of two gradients that are computed in another order, in 32 bits."""
_TOLERANCE_OF_16 = 0.25
"""The same where a step can be tried in 16 bits only. bfloat16 keeps 8 bits, and each product is rounded."""


def _judge_difference(tried: Callable[[bool], Rehearsal]) -> Rehearsal:
    """Tell rounding from what else differs in a stack.

    Args:
        tried: Tries the step in the training's own precision, or in 32 bits: then the sums' order is all
            that rounding has to explain.
    """
    found = tried(False)
    if found.obstacle is not None or found.difference <= _TOLERANCE:
        return found
    said = f"{found.difference:.2g} of the largest"
    if found.rounds:
        try:
            wide = tried(True)
        except Exception:  # a step that is written for 16 bits
            if found.difference <= _TOLERANCE_OF_16:
                return found
        else:
            if wide.obstacle is None and wide.difference <= _TOLERANCE:
                return found
            said += f", and {wide.difference:.2g} in 32 bits"
    return Rehearsal(
        f"in a stack a client's gradient of {found.where} is not that of the client alone: they are {said} "
        "apart"
    )


def _try(
    begin: Callable[[int], Client], vector: Vector, user_batch: Any, is_single: bool, in_double: bool
) -> Rehearsal:
    turns = _make_turns()
    names, buffer_names = vector.trained, vector.buffer_names

    def begun(seed: int = 0) -> Client:
        client = begin(seed)
        if in_double:
            client.module.float()
        return client

    def widened(batch: Any) -> Any:
        narrow = (torch.float16, torch.bfloat16) if in_double else ()
        return map_tensors(lambda t: t.float() if t.dtype in narrow else t, batch)

    client = begun()
    trainer, module = client.trainer, client.module
    context = nullcontext if in_double else trainer.precision_plugin.train_step_context
    batch = (PerClientHandling(trainer, turns) if is_single else batch_handler(trainer))(user_batch)
    rows: Sequence[int] = range(len(batch)) if isinstance(batch, UnequalBatches) else ()
    if rows:
        groups = group_stackable(batch)
        if 2 * len(groups) > len(batch):
            return Rehearsal(
                f"the batches of {len(batch)} clients are of {len(groups)} kinds: tensors of other shapes, "
                "or strings and objects that differ"
            )
        rows = max(groups, key=len)
        batch = stack_batches([batch[row] for row in rows])
    batch = widened(batch)
    step = StackedStep(module, names, buffer_names, turns)
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    if len({parameters[name].dtype for name in names}) > 1:
        return Rehearsal("the parameters are of several dtypes")
    num_clients = _num_clients(batch)
    rows = rows or range(num_clients)
    own = [parameters[name].detach() for name in names]
    with context():
        rounds = own[0].dtype.itemsize == 2 or torch.is_autocast_enabled(own[0].device.type)
    stack = [weight.expand(num_clients, *weight.shape).contiguous() for weight in own]
    changing = [buffers[n].expand(num_clients, *buffers[n].shape).contiguous() for n in buffer_names]
    args = further_arguments(module)

    def stacked() -> list[Tensor]:
        with context():
            return step(stack, batch, *args, buffers=changing, rows=rows)[1]

    def single(alone: Client, row: int) -> None:
        """Take the step of a row's client by itself, with its own draws."""
        module, trainer = alone.module, alone.trainer
        module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        seed_for_transforms(row)  # as the stack's turns
        own = (
            user_batch[row]
            if isinstance(user_batch, UnequalBatches)
            else map_tensors(itemgetter(row), user_batch)
        )
        own = widened(batch_handler(trainer)(own))
        with context():
            output = module.training_step(own, *args)
        loss: Any = output["loss"] if isinstance(output, dict) else output
        if loss is None:
            raise ValueError("training_step returns no loss for the first batch, on which it is tried")
        module.zero_grad()
        loss.backward()

    before, numbers, gradients = _global_generator_state(), _collect_numbers(module), list[list[Tensor]]()
    for _ in range(2):  # what the first step keeps, the second may stumble over
        gradients.append(stacked())
        step.replay(num_clients, batch, log=lambda *args, **kwargs: None)
        if leak := _find_leak(module):  # at once: torch itself crashes over some of them
            return Rehearsal(f"training_step keeps tensors in {leak}")
        now = _collect_numbers(module)
        if changed := _differ(numbers, now):
            what = "changes numbers of Python"
            if isinstance(now.get(changed[0]), _GeneratorState):
                what = "draws from a random generator of its own"
            return Rehearsal(f"training_step {what} ({', '.join(changed[:4])}), which {_ONCE}")
    if before != _global_generator_state():
        return Rehearsal(
            "training_step draws random numbers of Python's or NumPy's, which would be the same for all"
        )
    with FlopCounterMode(display=False) as counter, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using `torch.compile")  # speaks of the counter's own hooks
        single(client, rows[0])
    unused = [name for name in names if parameters[name].grad is None]
    if unused:
        return Rehearsal(f"parameters {unused} get no gradient, which a stack can't tell from a zero one")
    apart, where = 0.0, ""
    for place in (0, num_clients - 1) if gradients[0] else ():
        alone = begun(1 + place)  # generators that it holds are each client's own
        single(alone, rows[place])
        of_alone = [attrgetter(name)(alone.module).grad for name in names]
        shares = _gradient_differences([one[place] for one in gradients[0]], of_alone)
        apart, where = max((apart, where), *zip(shares, names, strict=True))
    return Rehearsal(None, counter.get_total_flops(), apart, where, rounds)


def _gradient_differences(gradients: Sequence[Tensor], reference: Sequence[Tensor | None]) -> list[float]:
    """Largest differences of gradients, by the largest entry of all. NaN is another matter, and none."""
    largest = max((float(b.abs().max()) for b in reference if b is not None and b.numel()), default=0.0)
    shares = []
    for one, other in zip(gradients, reference, strict=True):
        furthest = 0.0 if other is None or not one.numel() else float((one - other).abs().max())
        share = furthest / largest if largest else furthest and math.inf
        shares.append(0.0 if math.isnan(share) else share)
    return shares


class _GeneratorState(bytes):
    """The state of a random generator."""


def _iterate_values(module: nn.Module, metrics: bool = False) -> Iterator[tuple[str, Any]]:
    """Values of a module's attributes, in containers and objects in these, too, with the ways to them."""
    for prefix, part in module.named_modules():
        if metrics or not isinstance(part, Metric):  # whose updates are made again, see `StackedStep.replay`
            yield from _values_in(vars(part), f"{prefix}." if prefix else "")


def _values_in(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    def look(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
        if isinstance(value, list | tuple | deque) and len(value) <= _LOOKED_AT and depth:
            yield f"len({name})", len(value)
            for number, one in enumerate(value):
                yield from look(one, f"{name}[{number}]", depth - 1)
        elif isinstance(value, dict) and len(value) <= _LOOKED_AT and depth:
            for key, one in value.items():
                yield from look(one, f"{name}[{key!r}]", depth - 1)
        elif depth and _is_of_the_user(value):
            for key, one in vars(value).items():
                yield from look(one, f"{name}.{key}", depth - 1)
        else:
            yield name, value

    for name, value in values.items():
        if name not in ("_modules", "_parameters", "_buffers", "_trainer", "_fabric", "trainer"):
            yield from look(value, f"{prefix}{name}", 3)


def _collect_numbers(module: nn.Module) -> dict[str, Any]:
    """Python's numbers in a module, and the states of random generators."""
    found = dict[str, Any]()
    for name, value in _iterate_values(module):
        if isinstance(value, bool | int | float | itertools.count):
            found[name] = repr(value)
        elif isinstance(value, GENERATORS):
            state = get_state(value)
            found[name] = _GeneratorState(pickle.dumps(state.numpy() if isinstance(state, Tensor) else state))
    return found


def _state_marks(client: Client) -> dict[str, tuple[Any, Any]]:
    """By what one sees whether a value of module or data module is another one: and the value, kept alive."""
    module, found = client.module, dict[str, tuple[Any, Any]]()
    own = vars(client.trainer.datamodule) if client.trainer.datamodule is not None else {}
    tensors = (*module.named_parameters(), *module.named_buffers())
    for name, value in (*tensors, *_iterate_values(module, metrics=True), *_values_in(own, "data.")):
        mark: Any = id(value)
        if isinstance(value, Tensor):
            mark = id(value), value._version
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            mark = value.tobytes()
        elif isinstance(value, bool | int | float | str | itertools.count):
            mark = repr(value)
        found[name] = mark, value
    return found


def _is_of_the_user(value: Any) -> bool:
    if isinstance(value, torch.nn.Module | Tensor | type) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _LIBRARIES


_LOOKED_AT = 1000
_LIBRARIES = ("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fedq", "numpy")


def _global_generator_state() -> tuple[Any, bytes, int]:
    """State of the global generators that are not torch's."""
    states: dict[str, Any] = pl.utilities.seed._collect_rng_states(include_cuda=False)  # type: ignore[attr-defined]
    return states["python"], states["numpy"][1].tobytes(), states["numpy"][2]


def _num_clients(batch: Any) -> int:
    sizes = [len(leaf) for leaf in flat_batch(batch)[0] if isinstance(leaf, Tensor)]
    if not sizes or len(set(sizes)) != 1:
        raise TypeError("the batch holds no tensors with one leading client dimension")
    return sizes[0]


def _find_leak(module: torch.nn.Module) -> str | None:
    """Name an attribute that holds a tensor of a vmap that is over: state that `training_step` keeps."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if any(_is_dead(leaf) for leaf in tree_leaves(value)):
                return f"{prefix}.{name}".lstrip(".")
    return None


def _is_dead(value: Any) -> bool:
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)
