"""Training of a stack of clients in one Lightning step: `torch.func.vmap` over the user's `training_step`.

A stack is a batch of clients that train in one step. Its memory has one tensor `(clients, *shape)` per
parameter. A step maps the user's `training_step` over the clients, and `backward` assigns the mapped
gradients. Then a copy of the user's optimiser steps all clients at once. This is correct for elementwise
optimisers only, so others are refused. The memory is that of one stack, for any number of clients in the
federation.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_unflatten

from lightning_fedq._lightning import pl
from lightning_fedq.clients.client_draws import ClientDraws, DropoutInPlace
from lightning_fedq.clients.hooks import has_user_batch_handling
from lightning_fedq.clients.stacked_logs import Keep, StackedLogs
from lightning_fedq.data.generator_turns import GeneratorTurns, generator_state, same_state
from lightning_fedq.functional.batch_stack import (
    UnequalBatches,
    flat_batch,
    group_stackable,
    stack_batches,
    stacked,
    unstack,
)

ELEMENTWISE_OPTIMIZERS = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad),
    *(torch.optim.Adadelta, torch.optim.ASGD),
)
"""Optimisers that treat every coordinate separately, so they can step a stack like one long vector."""


class _TrainingStep(nn.Module):
    """Module whose forward is `training_step`, because `functional_call` calls a forward."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.training_step(*args)


def further_arguments(module: pl.LightningModule) -> tuple[int, ...]:
    """Return the arguments of `training_step` after the batch: a batch index, if it takes one."""
    parameters = inspect.signature(module.training_step).parameters.values()
    takes_more = len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return (0,) if takes_more else ()


class StackedStep:
    """Losses and gradients of a stack of clients, by mapping one module's `training_step` over them.

    Calls of `log` and of metrics inside `training_step` are recorded, and `replay` executes them after the
    step.

    Args:
        module: Client's copy of the user's module.
        names: Names of the parameters that differ between clients, in the order of the flat vector.
        buffer_names: Names of the buffers that training changes, such as running statistics and counters.
        turns: One random sequence of torch per client. None uses one sequence for all clients.
        keep: Function that receives the clients' values of a logged metric before they are reduced.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        names: Sequence[str],
        buffer_names: Sequence[str] = (),
        turns: GeneratorTurns | None = None,
        keep: Keep | None = None,
    ) -> None:
        self.module, self._step = module, _TrainingStep(module)
        self._turns, self._draws = turns, False
        self.names = [f"module.{name}" for name in names]
        self.buffer_names = [f"module.{name}" for name in buffer_names]
        self._args: tuple[Any, ...] = ()
        self._logs = StackedLogs(module, keep)
        self._caught: list[Tensor] = []
        self._constants: dict[str, Any] = {}
        self._skipped = False
        self._gradients = grad_and_value(self._step_client, has_aux=True)

    def __call__(
        self,
        weights: Sequence[Tensor],
        batch: Any,
        *args: Any,
        common: bool = False,
        buffers: Sequence[Tensor] = (),
        rows: Sequence[int] | None = None,
    ) -> tuple[Tensor | None, list[Tensor], dict[str, Any]]:
        """Run one step.

        Args:
            weights: One tensor `(clients, *shape)` per parameter.
            batch: Batch whose tensors have a leading client dimension. All clients share its other values.
            args: Further arguments of `training_step`, equal for all clients.
            common: Whether all clients still have the same weights. Then each tensor has the shape `shape`,
                and the forward pass is one large batch.
            buffers: One tensor `(clients, *shape)` per buffer. The step overwrites them with the new values.
            rows: Indices of the clients' random sequences. None takes the first ones.

        Returns:
            The mean loss, the gradients `(clients, *shape)` each, and the other outputs of `training_step`.
            If `training_step` returned no loss, the loss is None and there are no gradients.
        """
        self._args, self._constants = args, {}
        leaves, self._spec = flat_batch(batch)
        mapped = [0 if isinstance(leaf, Tensor) else None for leaf in leaves]
        in_dims = (None if common else 0, 0, mapped)
        run = vmap(self._gradients, in_dims=in_dims, randomness="different")
        state = dict(zip(self.buffer_names, buffers, strict=True))
        weights_of = dict(zip(self.names, weights, strict=True))
        clients = range(next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor)))
        found = self._run(lambda: run(weights_of, state, leaves), clients if rows is None else rows)
        gradients, (losses, (self._caught, extra, changed)) = found
        for name, buffer in state.items():
            buffer.copy_(changed[name])
        more = {**self._constants, **extra}
        return (None, [], more) if self._skipped else (losses.mean(), list(gradients.values()), more)

    def _run(self, step: Callable[[], Any], rows: Sequence[int]) -> Any:
        """Run a mapped step. If it draws random numbers, repeat it with one random sequence per client."""
        if self._turns is None:
            with self._logs.catching(), _mapped():
                return step()
        if not self._draws:
            before = generator_state()
            with self._logs.catching(), _mapped():
                found = step()
            if same_state(before, generator_state()):
                return found
            self._draws = True
        with self._logs.catching(), _mapped(), ClientDraws(self._turns, rows), DropoutInPlace():
            return step()

    def _step_client(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], leaves: list[Any]
    ) -> tuple[Tensor, Any]:
        """Run `training_step` of one client below `vmap`. Return its loss, logs, outputs and buffers."""
        # clone buffers, so that changes in place and new assignments both appear in `state`
        state = {**parameters, **{name: buffer.clone() for name, buffer in buffers.items()}}
        output = functional_call(self._step, state, (tree_unflatten(leaves, self._spec), *self._args))
        changed = {name: state[name].detach() for name in buffers}
        loss = output["loss"] if isinstance(output, dict) else output
        self._skipped = loss is None
        if loss is None:  # Lightning skips a step without a loss
            loss = next(iter(parameters.values())).new_zeros(())
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"training_step must return a loss tensor for a stack of clients, got {type(loss).__name__}"
            )
        rest = {k: v for k, v in output.items() if k != "loss"} if isinstance(output, dict) else {}
        extra = {k: v.detach() for k, v in rest.items() if isinstance(v, Tensor)}
        self._constants = {k: v for k, v in rest.items() if not isinstance(v, Tensor)}
        return loss, (self._logs.tensors(), extra, changed)

    def replay(self, num_clients: int, batch: Any, log: Callable[..., Any] | None = None) -> None:
        """Execute the recorded calls of `log` and of metrics, see `StackedLogs.replay`."""
        self._logs.replay(self._caught, num_clients, batch, log)


_NORMS = (nn.functional.batch_norm, nn.functional.layer_norm, nn.functional.instance_norm)


class _NormsIn32Bits(TorchFunctionMode):  # type: ignore[no-untyped-call]
    """Mode that normalises 16-bit inputs in 32 bits and rounds the result, as a CPU does without `vmap`.

    Under autocast, normalisation has 16-bit inputs and 32-bit weights or statistics. Below `vmap`, torch has
    no CPU kernel for this combination.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Widen the input of a normalisation, and pass all other functions through."""
        if func in _NORMS and args[0].dtype.itemsize == 2 and args[0].device.type == "cpu":
            return func(args[0].float(), *args[1:], **(kwargs or {})).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


@contextmanager
def _mapped() -> Iterator[None]:
    """Suppress functorch's warning about slow operations, and normalise 16-bit inputs in 32 bits."""
    norms = _NormsIn32Bits() if torch.is_autocast_enabled("cpu") else nullcontext()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings(), norms:
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def batch_handler(trainer: Any) -> Callable[[Any], Any]:
    """Return the function that a Trainer applies to a batch before `training_step`."""
    before, transfer = trainer.lightning_module._on_before_batch_transfer, trainer.strategy.batch_to_device
    convert = trainer.precision_plugin.convert_input
    return lambda batch: transfer(before(convert(batch)))


class PerClientHandling:
    """Batch handling that calls `batch_handler` separately for each client of a stack.

    The user's batch hooks then see the batch of one client, and draw from its random sequence.

    Args:
        trainer: Trainer of the stack.
        turns: Random sequences of the clients.
    """

    def __init__(self, trainer: Any, turns: GeneratorTurns) -> None:
        self._trainer, self._turns, self._handle = trainer, turns, batch_handler(trainer)

    def __call__(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Handle each client's batch in turn. Return one stacked batch if the results have equal shapes."""
        made = []
        for index, client_batch in enumerate(unstack(batch)):
            with self._turns.activate_all(index):
                made.append(self._handle(client_batch))
        return stacked(made)

    def installed(self) -> None:
        """Replace the methods that Lightning would call with the batch of the whole stack."""
        trainer = self._trainer
        trainer.precision_plugin.convert_input = _unchanged_batch
        trainer.lightning_module._on_before_batch_transfer = _unchanged_batch
        trainer.strategy.batch_to_device = self


def _unchanged_batch(batch: Any, dataloader_idx: int = 0) -> Any:
    return batch


class StackMemory(NamedTuple):
    """Preallocated tensors in which all stacks train, one stack after the other.

    Args:
        members: One tensor `(capacity, *shape)` per parameter and buffer.
        updates: `(capacity, dim)` memory for the updates.
    """

    members: list[Tensor]
    updates: Tensor

    @classmethod
    def allocate(cls, module: nn.Module, names: Sequence[str], capacity: int) -> StackMemory:
        """Allocate memory for the parameters and buffers of a module.

        Args:
            module: Module with these parameters and buffers.
            names: Names of the parameters, then of the buffers.
            capacity: Largest number of clients in a stack.
        """
        members = [attrgetter(name)(module).detach() for name in names]
        dtype = torch.promote_types(members[0].dtype, torch.float32)
        dim = sum(member.numel() for member in members)
        stacks = [member.new_empty(capacity, *member.shape) for member in members]
        return cls(stacks, members[0].new_empty(capacity, dim, dtype=dtype))


class ClientStack:
    """Stack of clients that train together in one client's Trainer.

    It replaces `training_step` and `backward` of the Trainer's strategy, and `clip_grad_by_norm` of its
    precision plugin. All other methods stay unchanged. With zero clients, a step does nothing.

    Args:
        trainer: Trainer of a client, with copies of the module and the optimiser.
        names: Names of the trained parameters, in the order of the flat vector.
        buffer_names: Names of the buffers that training changes, of any dtype. They follow the parameters.
        memory: Memory for the stack's tensors, with a capacity of at least `num_clients`.
        num_clients: Number of clients in this stack.
        weights: `(dim,)` start values of all clients: parameters, then buffers.
        personal: `(clients, own_dim)` start values of each client that replace the last `own_dim` values of
            `weights`. None if there are none.
        turns: One random sequence of torch per client. None uses one sequence for the stack.
        keep: Function that receives the clients' values `(clients, ...)` of a logged metric before they are
            reduced.
        num_local: Number of parameters, at the end of `names`, that stay with the clients.
    """

    def __init__(
        self,
        trainer: Any,
        names: Sequence[str],
        buffer_names: Sequence[str],
        memory: StackMemory,
        num_clients: int,
        weights: Tensor,
        personal: Tensor | None = None,
        turns: GeneratorTurns | None = None,
        keep: Keep | None = None,
        num_local: int = 0,
    ) -> None:
        self._trainer, self._strategy = trainer, trainer.strategy
        self._precision, self._num_clients, self._common = trainer.precision_plugin, num_clients, True
        module, optimizer = trainer.lightning_module, trainer.optimizers[0]
        self._step = StackedStep(module, names, buffer_names, turns, keep)
        parameters = [attrgetter(name)(module) for name in names]
        self._sizes = [member[0].numel() for member in memory.members]
        shapes = [member.shape[1:] for member in memory.members]
        parts = torch.split(weights, self._sizes)
        self._start = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        members = [member[:num_clients] for member in memory.members]
        for member, start in zip(members, self._start, strict=True):
            member.copy_(start)
        self._updates = memory.updates[:num_clients]
        self._active, self._buffers = members[: len(names)], members[len(names) :]
        self._num_shared = len(names) - num_local
        if personal is not None:
            rows = torch.split(personal, self._sizes[self._num_shared :], dim=1)
            for member, row in zip(members[self._num_shared :], rows, strict=True):
                member.copy_(row.view_as(member))
            self._common = not num_local
        self._gradients: list[Tensor] = []
        self._adopt_optimizer(optimizer, parameters)
        self._strategy.training_step, self._strategy.backward = self.training_step, self.backward
        trainer.fit_loop.epoch_loop.stack = self
        if has_user_batch_handling(trainer):
            PerClientHandling(trainer, turns or GeneratorTurns()).installed()
        self._precision.clip_grad_by_norm = self.clip_grad_by_norm

    def _adopt_optimizer(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Replace the module's parameters in the optimiser, which is a copy, by the stack's tensors."""
        pairs = list(zip(parameters, self._active, strict=True))
        for group in optimizer.param_groups:
            own = {id(parameter) for parameter in group["params"]} if self._num_clients else ()
            group["params"] = [active for parameter, active in pairs if id(parameter) in own]
        for parameter, active in pairs:
            if state := optimizer.state.pop(parameter, None):  # Adagrad has a state before its first step
                optimizer.state[active] = {
                    name: _stacked(value, parameter, self._num_clients) for name, value in state.items()
                }

    @property
    def weights(self) -> list[Tensor]:
        """Trained parameters that clients send, `(clients, *shape)` each."""
        return self._active[: self._num_shared]

    @property
    def starts(self) -> list[Tensor]:
        """Start values of `weights`, `shape` each."""
        return self._start[: self._num_shared]

    def drop(self) -> None:
        """Free the gradients of the last step."""
        self._gradients = []

    def updates(self) -> Tensor:
        """Return the updates `(clients, dim)`, local - global: parameters, then buffers.

        The next stack overwrites them. The global values are those of `weights`, also for personal tensors.
        """
        columns = torch.split(self._updates, self._sizes, dim=1)
        members = [*self._active, *self._buffers]
        for column, member, start in zip(columns, members, self._start, strict=True):
            torch.sub(member.reshape(column.shape), start.flatten(), out=column)
        return self._updates

    def client_values(self) -> Tensor:
        """Return the clients' current local parameters and buffers, `(clients, rest_dim)`.

        The dtype is that of the updates. With float32, integers above 2^24 are rounded.
        """
        members = [*self._active[self._num_shared :], *self._buffers]
        rows = [member.reshape(self._num_clients, -1).to(self._updates.dtype) for member in members]
        return torch.cat(rows, dim=1) if rows else self._updates.new_empty(self._num_clients, 0)

    # ---- what Lightning calls -------------------------------------------------------------------

    def training_step(self, batch: Any, *indices: int) -> Any:
        """Run one step of all clients of the stack, and keep its gradients for `backward`."""
        if self._num_clients == 0:
            return torch.zeros((), device=self._updates.device)
        with self._precision.train_step_context():
            if isinstance(batch, UnequalBatches):
                return self._unequal_step(batch, indices)
            weights = self._active
            if self._common:
                weights = [s.to(weights[0].dtype) for s in self._start[: len(weights)]]
            loss, self._gradients, extra = self._step(
                weights, batch, *indices, common=self._common, buffers=self._buffers
            )
        self._common = False
        self._step.replay(self._num_clients, batch)
        if loss is None:
            return None
        return {"loss": loss, **extra} if extra else loss

    def _unequal_step(self, batches: UnequalBatches, args: Sequence[Any]) -> Tensor | None:
        """Run one step of clients with unequal batches: one mapped step per group of equal shapes."""
        losses: list[Tensor] = []
        self._gradients, self._common = [torch.empty_like(weight) for weight in self._active], False
        for rows in group_stackable(batches):
            batch, index = stack_batches([batches[row] for row in rows]), torch.tensor(rows)
            weights, buffers = ([m[index] for m in members] for members in (self._active, self._buffers))
            loss, gradients, _ = self._step(weights, batch, *args, buffers=buffers, rows=rows)
            self._step.replay(len(rows), batch)
            if loss is None:  # skipping depends on the batch index, so it applies to all clients
                self._gradients = []
                return None
            losses += [loss] * len(rows)
            for whole, part in zip((*self._gradients, *self._buffers), (*gradients, *buffers), strict=True):
                whole[index] = part
        return torch.stack(losses).mean()

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Assign the gradients that `training_step` computed, with the calls that Lightning expects."""
        module = self._trainer.lightning_module
        self._strategy.pre_backward(closure_loss)
        loss: Tensor = self._precision.pre_backward(closure_loss, module)
        every = int(self._trainer.accumulate_grad_batches)  # Lightning has divided the loss by it already
        # without clients or without a loss there are no gradients
        for weight, gradient in zip(self._active, self._gradients, strict=False):
            gradient = gradient.contiguous() if every == 1 else gradient / every
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
        loss = self._precision.post_backward(loss, module)
        self._strategy.post_backward(loss)
        return loss

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip every client's gradient by its own norm, as if the client trained alone."""
        gradients = [weight.grad for weight in self._active if weight.grad is not None]
        if not gradients:
            return
        norms = torch.cat([gradient.reshape(len(gradient), -1) for gradient in gradients], dim=1).norm(dim=1)
        factors = (clip_val / (norms + 1e-6)).clamp(max=1.0)  # as in torch's clip_grad_norm_
        for weight, gradient in zip(self._active, gradients, strict=True):
            # not in place, because two parameters may share one gradient tensor
            weight.grad = gradient * factors.view(-1, *[1] * (gradient.dim() - 1))


def _stacked(value: Any, parameter: Tensor, num_clients: int) -> Any:
    """Expand a fresh optimiser's state of one parameter to a stack of clients."""
    if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
        return value.expand(num_clients, *value.shape).clone()
    return deepcopy(value)
