"""Trial before the first round: can a stack of clients train in one step, and what does a step cost?

The trial runs on a client's copy, restores random generators afterwards and logs nothing, so it does not
affect the run.
"""

from __future__ import annotations

import itertools
import math
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
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
from lightning_fedq.clients.stack import PerClientHandling, StackedStep, batch_handler, further_arguments
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
    """Result of a trial step on a copy of the module.

    Args:
        obstacle: Reason why a stack is impossible, or None.
        flops: Floating-point operations of one client's step in matrix products and convolutions.
        difference: Largest difference between a client's gradient in a stack and alone, relative to the
            largest gradient entry.
        where: Name of the parameter with the largest difference.
        rounds: Whether the step computes in less than 32 bits.
    """

    obstacle: str | None
    flops: int = 0
    difference: float = 0.0
    where: str = ""
    rounds: bool = False


def rehearse(trainer: pl.Trainer, begin: Callable[[int], Client], vector: Vector, batch: Any) -> Rehearsal:
    """Try two steps of a stack on a copy of the module, and compare its gradients with single clients.

    Args:
        trainer: User's Trainer during its fit.
        begin: Function from a seed to a client's copy that is ready to train.
        vector: Flat vector of the sent tensors.
        batch: First batch of a stack, as it is read from the loader.
    """
    if obstacle := _find_single_client_hook(trainer) or _known_obstacle(trainer.lightning_module):
        return Rehearsal(obstacle)
    devices = [trainer.strategy.root_device.index or 0] if trainer.strategy.root_device.type == "cuda" else []
    with torch.random.fork_rng(devices), pl.utilities.seed.isolate_rng(include_cuda=False):
        try:
            by_itself = has_user_batch_handling(trainer)
            if by_itself and (obstacle := _find_hook_obstacle(begin, vector, batch)):
                return Rehearsal(obstacle)
            return _judge_difference(lambda wide: _StackTrial(begin, vector, batch, by_itself, wide).run())
        except Exception as error:  # any error of the user's code or of vmap is an obstacle
            return Rehearsal(error_line(error))


_MODULE_HOOKS = (*STEP_HOOKS, "on_train_epoch_end")


def _find_single_client_hook(trainer: pl.Trainer) -> str | None:
    """Return an obstacle if a hook of the module, a callback or a parameter expects a single client.

    In a stack, the batch has a client dimension, and gradients and weights are in the stack, not in the
    module. A user's hook would not expect this, so clients then train one at a time. Callbacks that belong to
    the fit see neither batches nor gradients nor weights of clients.
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
    ".item()": "training_step reads the value of a tensor with .item() or float(), or branches on it "
    "(data-dependent control flow)",
    "requires_grad_()": "training_step calls requires_grad_(), which torch.func can't map over clients",
}
"""Explanations of errors from torch and functorch, by a part of their text."""


def _known_obstacle(module: pl.LightningModule) -> str | None:
    """Return an obstacle that is visible in the module without a trial, or None."""
    for name, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            return f"{name} ({type(part).__name__}) stores a list of its weights, shared by all clients"
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            return f"{name} ({type(part).__name__}) has sparse gradients, which torch.func can't map"
    if getattr(module, "_compiler_ctx", None) is not None:
        return (
            "torch.compile(module) has compiled training_step for one client. For stacks, compile a part: "
            "module.net = torch.compile(module.net)"
        )
    places: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter) or not (place := parameter.data_ptr()):  # type: ignore[no-untyped-call]
            continue
        if (first := places.setdefault(place, name)) != name:
            return f"{first} and {name} are two parameters in one memory, which a stack would separate"
    return None


def error_line(error: Exception) -> str:
    """Describe an error of a trial in one line, with an explanation if it is known."""
    first = str(error).strip().splitlines()[0] if str(error) else ""
    for part, words in _WORDS.items():
        if part in first:
            return words
    return f"{type(error).__name__}: {first.partition(' Please file')[0]}"


_ONCE = "a stack has once for all of its clients"


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ between two mappings. Pairs are compared by their first part."""
    first = [{n: v[0] if isinstance(v, tuple) else v for n, v in marks.items()} for marks in (one, other)]
    return sorted(name for name in {**one, **other} if first[0].get(name) != first[1].get(name))


def _make_turns() -> GeneratorTurns:
    """Make random sequences with the client's index as the seed."""
    turns = GeneratorTurns()
    turns.begin(int)
    return turns


def _find_hook_obstacle(begin: Callable[[int], Client], vector: Vector, batch: Any) -> str | None:
    """Return why hooks on batches can't run for each client of a stack in turn. None if they can.

    Such hooks must not store anything, draw from a separate generator, or depend on the weights.
    """
    client, other = begin(0), begin(0)
    before, drawn = _state_marks(client), _collect_numbers(client.module)
    made = PerClientHandling(client.trainer, _make_turns())(batch)
    stored, used = _differ(before, _state_marks(client)), _differ(drawn, _collect_numbers(client.module))
    if names := ", ".join((stored or used)[:4]):
        action = "store something besides the batch" if stored else "draw from a separate random generator"
        return f"hooks on batches {action} ({names}), which {_ONCE}"
    for name in (*vector.trained, *vector.buffer_names):
        tensor = attrgetter(name)(other.module).detach()
        tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.add_(1)
    follows = "hooks on batches depend on the weights, which differ between the clients of a stack"
    try:
        again = PerClientHandling(other.trainer, _make_turns())(batch)
    except Exception:  # the hook failed with NaN weights, so it depends on them
        return follows
    pairs = zip(flat_batch(made)[0], flat_batch(again)[0], strict=True)
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor)]
    return None if all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in tensors) else follows


_LOOKED_AT = 1000
"""Number of entries up to which a container is searched."""
_LIBRARIES = ("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fedq", "numpy")
_TOLERANCE = 0.02
"""Largest relative difference of gradients that rounding explains in 32 bits, from another order of sums."""
_TOLERANCE_OF_16 = 0.25
"""The same tolerance for a step that runs only in 16 bits, where each product is rounded to 8 bits."""


def _judge_difference(tried: Callable[[bool], Rehearsal]) -> Rehearsal:
    """Decide whether rounding explains the difference between gradients in a stack and alone.

    Args:
        tried: Function that tries the step: with False in the training's own precision, with True in 32 bits.
            In 32 bits only the order of sums causes rounding differences.
    """
    result = tried(False)
    if result.obstacle is not None or result.difference <= _TOLERANCE:
        return result
    size = f"{result.difference:.2g} of the largest entry"
    if result.rounds:
        try:
            wide = tried(True)
        except Exception:  # the step works in 16 bits only
            if result.difference <= _TOLERANCE_OF_16:
                return result
        else:
            if wide.obstacle is None and wide.difference <= _TOLERANCE:
                return result
            size += f", and {wide.difference:.2g} in 32 bits"
    return Rehearsal(
        f"a client's gradient of {result.where} differs between a stack and the client alone, by {size}"
    )


@dataclass
class _StackTrial:
    """Trial of two steps of a stack, and of the same step of its first and last client alone.

    Args:
        begin: Function from a seed to a client's copy that is ready to train.
        vector: Flat vector of the sent tensors.
        user_batch: First batch of a stack, as it is read from the loader.
        is_single: Whether user hooks handle the batch of each client separately.
        in_32_bits: Whether to compute in 32 bits although the training uses 16.
        turns: Random sequences of the clients.
    """

    begin: Callable[[int], Client]
    vector: Vector
    user_batch: Any
    is_single: bool
    in_32_bits: bool
    turns: GeneratorTurns = field(default_factory=_make_turns)

    def run(self) -> Rehearsal:
        """Run the steps, and return the first obstacle or the difference of the gradients."""
        client = self._copy(0)
        trainer, module = client.trainer, client.module
        handle: Any = PerClientHandling(trainer, self.turns) if self.is_single else batch_handler(trainer)
        batch, rows = handle(self.user_batch), list[int]()
        if isinstance(batch, UnequalBatches):
            groups = group_stackable(batch)
            if 2 * len(groups) > len(batch):
                return Rehearsal(
                    f"the batches of {len(batch)} clients are of {len(groups)} kinds, with different shapes, "
                    "strings or objects"
                )
            rows = max(groups, key=len)
            batch = stack_batches([batch[row] for row in rows])
        batch = self._widen(batch)
        names, parameters = self.vector.trained, dict(module.named_parameters())
        if len({parameters[name].dtype for name in names}) > 1:
            return Rehearsal("the parameters have several dtypes")
        rows = rows or [*range(_num_clients(batch))]
        weight = parameters[names[0]]
        with self._precision(trainer):
            rounds = weight.dtype.itemsize == 2 or torch.is_autocast_enabled(weight.device.type)
        gradients = self._step_stack(client, batch, rows)
        if isinstance(gradients, str):
            return Rehearsal(gradients)
        with FlopCounterMode(display=False) as counter, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using `torch.compile")  # caused by the counter's hooks
            self._step_alone(client, rows[0])
        if unused := [name for name in names if parameters[name].grad is None]:
            return Rehearsal(f"parameters {unused} get no gradient, but a stack would give them zeros")
        difference, where = self._compare_with_single_clients(gradients, rows)
        return Rehearsal(None, counter.get_total_flops(), difference, where, rounds)

    def _copy(self, seed: int) -> Client:
        """Load a client's copy, in 32 bits if the trial computes so."""
        client = self.begin(seed)
        if self.in_32_bits:
            client.module.float()
        return client

    def _widen(self, batch: Any) -> Any:
        """Convert the 16-bit tensors of a batch, if the trial computes in 32 bits."""
        narrow = (torch.float16, torch.bfloat16) if self.in_32_bits else ()
        return map_tensors(lambda t: t.float() if t.dtype in narrow else t, batch)

    def _precision(self, trainer: Any) -> Any:
        """Return the context in which the trial's steps compute."""
        return nullcontext() if self.in_32_bits else trainer.precision_plugin.train_step_context()

    def _step_stack(self, client: Client, batch: Any, rows: Sequence[int]) -> list[Tensor] | str:
        """Take two steps of a stack. Return the gradients of the first, or an obstacle.

        The second step may fail with state that the first one has stored.

        Args:
            client: Copy whose module steps.
            batch: Batch of the stack.
            rows: Index of each client in the user's batch.
        """
        module, vector = client.module, self.vector
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())

        def repeat(tensor: Tensor) -> Tensor:
            return tensor.expand(len(rows), *tensor.shape).contiguous()

        weights = [repeat(parameters[name].detach()) for name in vector.trained]
        changing = [repeat(buffers[name]) for name in vector.buffer_names]
        step = StackedStep(module, vector.trained, vector.buffer_names, self.turns)
        further = further_arguments(module)
        before, numbers, first = _global_generator_state(), _collect_numbers(module), None
        for _ in range(2):
            with self._precision(client.trainer):
                gradients = step(weights, batch, *further, buffers=changing, rows=rows)[1]
            first = gradients if first is None else first
            step.replay(len(rows), batch, log=lambda *args, **kwargs: None)
            # checked after each step, because torch crashes with some leaked tensors
            if leak := _find_leak(module):
                return f"training_step keeps tensors in {leak}"
            now = _collect_numbers(module)
            if changed := _differ(numbers, now):
                action = "changes numbers of Python"
                if isinstance(now.get(changed[0]), _GeneratorState):
                    action = "draws from a separate random generator"
                return f"training_step {action} ({', '.join(changed[:4])}), which {_ONCE}"
        if before != _global_generator_state():
            what = "random numbers from Python or NumPy, which would be equal for all clients"
            return f"training_step draws {what}"
        return first or []

    def _step_alone(self, client: Client, row: int) -> None:
        """Run the step of one client alone, with its own random draws."""
        module, batches = client.module, self.user_batch
        module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        seed_for_transforms(row)  # the seed that the stack's turns use for this row
        is_unequal = isinstance(batches, UnequalBatches)
        batch = batches[row] if is_unequal else map_tensors(itemgetter(row), batches)
        batch = self._widen(batch_handler(client.trainer)(batch))
        with self._precision(client.trainer):
            output = module.training_step(batch, *further_arguments(module))
        loss: Any = output["loss"] if isinstance(output, dict) else output
        if loss is None:
            raise ValueError("training_step returns no loss for the first batch, so it can't be tried")
        module.zero_grad()
        loss.backward()

    def _compare_with_single_clients(
        self, gradients: Sequence[Tensor], rows: Sequence[int]
    ) -> tuple[float, str]:
        """Return the largest difference of a client's gradient in a stack and alone, and its parameter.

        Args:
            gradients: `(clients, *shape)` gradients of the stack. Empty if its step has no loss.
            rows: Index of each client in the user's batch.
        """
        names, largest = self.vector.trained, (0.0, "")
        for place in (0, len(rows) - 1) if gradients else ():
            alone = self._copy(1 + place)  # another seed per client for the generators in its copy
            self._step_alone(alone, rows[place])
            reference = [attrgetter(name)(alone.module).grad for name in names]
            shares = _gradient_differences([gradient[place] for gradient in gradients], reference)
            largest = max(largest, *zip(shares, names, strict=True))
        return largest


def _gradient_differences(gradients: Sequence[Tensor], reference: Sequence[Tensor | None]) -> list[float]:
    """Return the largest difference per parameter, by the largest reference entry. NaN counts as 0."""
    largest = max((float(b.abs().max()) for b in reference if b is not None and b.numel()), default=0.0)
    shares = []
    for one, other in zip(gradients, reference, strict=True):
        furthest = 0.0 if other is None or not one.numel() else float((one - other).abs().max())
        share = furthest / largest if largest else furthest and math.inf
        shares.append(0.0 if math.isnan(share) else share)
    return shares


class _GeneratorState(bytes):
    """State of a random generator as bytes."""


def _iterate_values(module: nn.Module, metrics: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the values of a module's attributes with their paths, also inside containers and user objects."""
    for prefix, part in module.named_modules():
        if metrics or not isinstance(part, Metric):  # `StackedStep.replay` handles the updates of metrics
            yield from _values_in(vars(part), f"{prefix}." if prefix else "")


def _values_in(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield values with their paths, up to three levels deep."""

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
    """Return Python's numbers in a module as text, and the states of its random generators, by path."""
    found = dict[str, Any]()
    for name, value in _iterate_values(module):
        if isinstance(value, bool | int | float | itertools.count):
            found[name] = repr(value)
        elif isinstance(value, GENERATORS):
            state = get_state(value)
            found[name] = _GeneratorState(pickle.dumps(state.numpy() if isinstance(state, Tensor) else state))
    return found


def _state_marks(client: Client) -> dict[str, tuple[Any, Any]]:
    """Return a mark of each value of module and data module that changes with it, and the value.

    The value is returned to keep it alive, so that its `id` stays unique.
    """
    module, found = client.module, dict[str, tuple[Any, Any]]()
    data = vars(client.trainer.datamodule) if client.trainer.datamodule is not None else {}
    tensors = (*module.named_parameters(), *module.named_buffers())
    for name, value in (*tensors, *_iterate_values(module, metrics=True), *_values_in(data, "data.")):
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
    """Return whether an object has attributes and its class is not of a known library."""
    if isinstance(value, torch.nn.Module | Tensor | type) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _LIBRARIES


def _global_generator_state() -> tuple[Any, bytes, int]:
    """Return the state of the global generators of Python and NumPy."""
    states: dict[str, Any] = pl.utilities.seed._collect_rng_states(include_cuda=False)  # type: ignore[attr-defined]
    return states["python"], states["numpy"][1].tobytes(), states["numpy"][2]


def _num_clients(batch: Any) -> int:
    """Return the size of the leading client dimension of a stack's batch."""
    sizes = [len(leaf) for leaf in flat_batch(batch)[0] if isinstance(leaf, Tensor)]
    if not sizes or len(set(sizes)) != 1:
        raise TypeError("The batch must have tensors with one common leading client dimension")
    return sizes[0]


def _find_leak(module: torch.nn.Module) -> str | None:
    """Return the name of an attribute in which `training_step` stored a tensor of a finished vmap."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
                return f"{prefix}.{name}".lstrip(".")
    return None
