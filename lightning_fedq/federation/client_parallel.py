"""A whole stack of clients in one Lightning step: `torch.func.vmap` over the user's `training_step`.

The parameters of a stack live in one buffer, parameter by parameter, each `(clients, *shape)`. A step
maps the user's own `training_step` over the clients, `backward` hands the gradients over as they are,
and the user's own optimiser steps the buffer, which is right for elementwise optimisers and refused
for others. Memory is that of one stack, whatever the number of clients.

This is not a `Strategy` for `Trainer(strategy=...)`: one callback, and nothing else changed, is the
property to keep. While it is attached it stands in for `training_step` and `backward` of the
trainer's own single-device strategy and for `clip_grad_by_norm` of its precision plugin (public
names, all three), and leaves everything else to them. Clients alone or side by side, `training_step` is told
the batch's number among their own.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_fedq._lightning import pl
from lightning_fedq.data.generator_turns import GeneratorTurns, generator_state, same_state
from lightning_fedq.federation.client_draws import ClientDraws, DropoutInPlace
from lightning_fedq.federation.own_batches import OwnBatches
from lightning_fedq.federation.stacked_logs import StackedLogs
from lightning_fedq.functional.batch_stack import UnequalBatches, groups_alike, stack_batches

ELEMENTWISE_OPTIMIZERS = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, Adagrad, Adadelta, ASGD)
"""Optimisers that treat every coordinate on its own, so that a stack is to them a longer vector."""


class _TrainingStep(nn.Module):
    """`training_step` as the forward of a module, which is what `functional_call` calls."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.training_step(*args)


def further_arguments(module: pl.LightningModule) -> tuple[int, ...]:
    """Arguments of `training_step` behind the batch: a batch index, where there is a place for it."""
    parameters = inspect.signature(module.training_step).parameters.values()
    takes_more = len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return (0,) if takes_more else ()


class StackedStep:
    """Losses and gradients of a stack of clients, by mapping one module's `training_step` over them.

    What `training_step` logs and the metrics it updates are caught and, with `replay`, made for real.

    Args:
        module: The module.
        names: Names of the parameters that differ between clients, in the order of the flat vector.
        buffer_names: Names of the buffers that training changes, such as running statistics and counters.
        turns: The clients' sequences of torch's random numbers; without it one sequence serves them all.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        names: Sequence[str],
        buffer_names: Sequence[str] = (),
        turns: GeneratorTurns | None = None,
    ) -> None:
        self.module, self._step = module, _TrainingStep(module)
        self._turns, self._draws = turns, False
        parameters = dict(module.named_parameters())
        self.names = [f"module.{name}" for name in names]
        self.buffer_names = [f"module.{name}" for name in buffer_names]
        self.shapes = [parameters[name].shape for name in names]
        self.sizes = [shape.numel() for shape in self.shapes]
        self._args: tuple[Any, ...] = ()
        self._logs = StackedLogs(module)
        self._caught: list[Tensor] = []
        self._constants: dict[str, Any] = {}
        self._skipped = False
        self._gradients = grad_and_value(self._one_client, has_aux=True)

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
            weights: One tensor a parameter, `(clients, *shape)`.
            batch: A batch whose tensors lead with a client dimension; what else it holds is common.
            args: Further arguments of `training_step`, the same for every client.
            common: All clients still share one set of weights, each of its tensors `shape`: the
                forward pass is one big batch.
            buffers: One tensor a buffer, `(clients, *shape)`; they are overwritten by what the step
                makes of them.
            rows: Which sequences of random numbers are the clients'; None is the first ones.

        Returns:
            The mean loss, the gradients, each `(clients, *shape)`, and what else `training_step`
            returned. Where it returned no loss, None and no gradients.
        """
        self._args, self._constants = args, {}
        leaves, spec = tree_flatten(batch)
        mapped = [0 if isinstance(leaf, Tensor) else None for leaf in leaves]
        in_dims = (None if common else 0, 0, tree_unflatten(mapped, spec))
        run = vmap(self._gradients, in_dims=in_dims, randomness="different")
        state = dict(zip(self.buffer_names, buffers, strict=True))
        weights_of = dict(zip(self.names, weights, strict=True))
        clients = range(next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor)))
        found = self._run(lambda: run(weights_of, state, batch), clients if rows is None else rows)
        gradients, (losses, (self._caught, extra, changed)) = found
        for name, buffer in state.items():
            buffer.copy_(changed[name])
        more = {**self._constants, **extra}
        return (None, [], more) if self._skipped else (losses.mean(), list(gradients.values()), more)

    def _run(self, step: Callable[[], Any], rows: Sequence[int]) -> Any:
        """Run a mapped step. One that draws random numbers again, each client from its own sequence."""
        if self._turns is None:
            with self._logs.catching(), _quiet():
                return step()
        if not self._draws:
            before = generator_state()
            with self._logs.catching(), _quiet():
                found = step()
            if same_state(before, generator_state()):
                return found
            self._draws = True
        with self._logs.catching(), _quiet(), ClientDraws(self._turns, rows), DropoutInPlace():
            return step()

    def _one_client(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any
    ) -> tuple[Tensor, Any]:
        # clones: what is changed in place and what is assigned anew both come back as new values
        state = {**parameters, **{name: buffer.clone() for name, buffer in buffers.items()}}
        output = functional_call(self._step, state, (batch, *self._args))
        changed = {name: state[name].detach() for name in buffers}
        loss = output["loss"] if isinstance(output, dict) else output
        self._skipped = loss is None
        if loss is None:  # which is to skip the step
            loss = next(iter(parameters.values())).new_zeros(())
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"training_step must return a loss to be mapped over clients, got {type(loss).__name__}"
            )
        rest = {k: v for k, v in output.items() if k != "loss"} if isinstance(output, dict) else {}
        extra = {k: v.detach() for k, v in rest.items() if isinstance(v, Tensor)}
        self._constants = {k: v for k, v in rest.items() if not isinstance(v, Tensor)}
        return loss, (self._logs.tensors(), extra, changed)

    def replay(self, num_clients: int, batch: Any, log: Callable[..., Any] | None = None) -> None:
        """Log for real, and update the metrics. See `StackedLogs.replay`."""
        self._logs.replay(self._caught, num_clients, batch, log)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without functorch's word on operations that it maps slowly, which asks users to report them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


class ClientParallelStrategy:
    """Trains stacks of clients on the trainer's own strategy, between `attach` and `detach`.

    `open(n)` starts a stack of `n` clients, `close()` ends it; outside of a stack every step is the
    strategy's own. A stack of no clients makes a step that does nothing.

    Args:
        trainer: Trainer of a fit in progress, with its optimiser set up.
        names: Names of the trained parameters, in the order of the flat vector.
        capacity: Most clients a stack holds.
        buffer_names: Names of the buffers that training changes, of any dtype; they follow the
            parameters in the flat vector.
        turns: The clients' sequences of torch's random numbers; None lets a stack share one.

    Attributes:
        batches: Which of the clients' own batches is the present one.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        names: Sequence[str],
        capacity: int,
        buffer_names: Sequence[str] = (),
        turns: GeneratorTurns | None = None,
    ) -> None:
        self.batches = OwnBatches(trainer)
        self._trainer, self._strategy = trainer, trainer.strategy
        self._precision = trainer.precision_plugin
        self._optimizer: Optimizer = trainer.optimizers[0]
        module = trainer.lightning_module
        self._step = StackedStep(module, names, buffer_names, turns)
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self._parameters = [parameters[name] for name in names]
        self._owners = _owners(self._parameters, self._optimizer)
        members = [*(parameters[name] for name in names), *(buffers[name] for name in buffer_names)]
        self._shapes, self._sizes = [m.shape for m in members], [m.numel() for m in members]
        self._stacks = [member.detach().new_empty(capacity, *member.shape) for member in members]
        like = parameters[names[0]].detach()
        dtype = torch.promote_types(like.dtype, torch.float32)
        self._updates = like.new_empty(capacity, sum(self._sizes), dtype=dtype)
        self._originals: list[list[Tensor]] = []
        self._active: list[Tensor] | None = None
        self._buffers: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def attach(self) -> None:
        """Stand in for three methods of the trainer's strategy and precision plugin."""
        self._ordinary_step, self._ordinary_backward = self._strategy.training_step, self._strategy.backward
        self._ordinary_clip = self._precision.clip_grad_by_norm
        self._strategy.training_step = self.training_step  # type: ignore[method-assign]
        self._strategy.backward = self.backward  # type: ignore[method-assign]
        self._precision.clip_grad_by_norm = self.clip_grad_by_norm  # type: ignore[method-assign]
        self.batches.attach()

    def detach(self) -> None:
        """Close an open stack and give the methods back."""
        self.close()
        self.batches.detach()
        del self._strategy.training_step, self._strategy.backward, self._precision.clip_grad_by_norm

    def open(self, num_clients: int, weights: Tensor, buffers: Tensor | None = None) -> None:
        """Start a stack.

        Args:
            num_clients: 0 to `capacity`.
            weights: `(dim,)`, where every client starts from: parameters, then buffers.
            buffers: `(clients, buffer_dim)`, the buffers that each client starts from instead.
        """
        self._start = [
            part.view(shape)
            for part, shape in zip(torch.split(weights, self._sizes), self._shapes, strict=True)
        ]
        self._num_clients, self._common = num_clients, True
        members = [stack[:num_clients] for stack in self._stacks]
        for member, start in zip(members, self._start, strict=True):
            member.copy_(start)
        self._active, self._buffers = members[: len(self._owners)], members[len(self._owners) :]
        if buffers is not None:
            rows = torch.split(buffers, self._sizes[len(self._owners) :], dim=1)
            for member, row in zip(self._buffers, rows, strict=True):
                member.copy_(row.view_as(member))
        self._originals = [group["params"] for group in self._optimizer.param_groups]
        for index, group in enumerate(self._optimizer.param_groups):
            pairs = zip(self._active, self._owners, strict=True) if num_clients else ()
            group["params"] = [active for active, owner in pairs if owner == index]
        for parameter, active in zip(self._parameters, self._active, strict=True):
            if state := self._optimizer.state.get(parameter):  # Adagrad is made with one
                self._optimizer.state[active] = {
                    name: _stacked(value, parameter, num_clients) for name, value in state.items()
                }

    def updates(self) -> Tensor:
        """Return `(clients, dim)`, local - global of the open stack. Overwritten by the next one.

        Parameters, then buffers. Where `open` was given the clients' own buffers, global is still `weights`.
        """
        assert self._active is not None
        updates = self._updates[: self._num_clients]
        columns = torch.split(updates, self._sizes, dim=1)
        members = [*self._active, *self._buffers]
        for column, member, start in zip(columns, members, self._start, strict=True):
            torch.sub(member.reshape(column.shape), start.flatten(), out=column)
        return updates

    def buffers(self) -> Tensor:
        """Return `(clients, buffer_dim)`, the present buffers of the open stack's clients.

        In the updates' dtype: integers above 2^24 are rounded where that is float32.
        """
        dim = sum(self._sizes[len(self._owners) :])
        rows = [member.reshape(self._num_clients, -1).to(self._updates.dtype) for member in self._buffers]
        return torch.cat(rows, dim=1) if rows else self._updates.new_empty(self._num_clients, dim)

    def close(self) -> None:
        """End the stack, if one is open: the optimiser holds the module's own parameters again."""
        if self._active is None:
            return
        for group, originals in zip(self._optimizer.param_groups, self._originals, strict=True):
            group["params"] = originals
        for active in self._active:
            self._optimizer.state.pop(active, None)
        self._active, self._buffers, self._gradients = None, [], []

    # ---- what Lightning calls -------------------------------------------------------------------

    def training_step(self, batch: Any, *indices: int) -> Any:
        """One step of all clients of the stack. The strategy's own step outside of one."""
        with self.batches.told() as number:
            rest = (number,) if indices else ()
            return self._ordinary_step(batch, *rest) if self._active is None else self._all(batch, rest)

    def _all(self, batch: Any, rest: Sequence[int]) -> Any:
        if self._num_clients == 0:
            return torch.zeros((), device=self._updates.device)
        assert self._active is not None
        with self._precision.train_step_context():
            if isinstance(batch, UnequalBatches):
                return self._unequal_step(batch, rest)
            weights = self._active
            if self._common:
                weights = [s.to(weights[0].dtype) for s in self._start[: len(weights)]]
            loss, self._gradients, extra = self._step(
                weights, batch, *rest, common=self._common, buffers=self._buffers
            )
        self._common = False
        self._step.replay(self._num_clients, batch)
        if loss is None:
            return None
        return {"loss": loss, **extra} if extra else loss

    def _unequal_step(self, batches: UnequalBatches, args: Sequence[Any]) -> Tensor | None:
        """One step of clients whose batches do not stack: of every group of them that do, in turn."""
        assert self._active is not None
        losses: list[Tensor] = []
        self._gradients, self._common = [torch.empty_like(weight) for weight in self._active], False
        for rows in groups_alike(batches):
            batch, index = stack_batches([batches[row] for row in rows]), torch.tensor(rows)
            weights, buffers = ([m[index] for m in members] for members in (self._active, self._buffers))
            loss, gradients, _ = self._step(weights, batch, *args, buffers=buffers, rows=rows)
            self._step.replay(len(rows), batch)
            if loss is None:  # which goes by the batch's number, and so for all
                self._gradients = []
                return None
            losses += [loss] * len(rows)
            for whole, own in zip((*self._gradients, *self._buffers), (*gradients, *buffers), strict=True):
                whole[index] = own
        return torch.stack(losses).mean()

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Hand over the gradients that the step has found. The strategy's own backward outside of a stack."""
        if self._active is None:
            return self._ordinary_backward(closure_loss, optimizer, *args, **kwargs)
        module = self._trainer.lightning_module
        self._strategy.pre_backward(closure_loss)
        loss: Tensor = self._precision.pre_backward(closure_loss, module)
        every = int(self._trainer.accumulate_grad_batches)  # of a loss, Lightning has divided it already
        for weight, gradient in zip(self._active, self._gradients, strict=False):  # no gradients: nobody
            gradient = gradient.contiguous() if every == 1 else gradient / every
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
        loss = self._precision.post_backward(loss, module)
        self._strategy.post_backward(loss)
        return loss

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip every client's gradient by its own norm, as it would be one client at a time."""
        if self._active is None:
            return self._ordinary_clip(optimizer, clip_val)
        gradients = [weight.grad for weight in self._active if weight.grad is not None]
        if not gradients:
            return None
        norms = torch.cat([gradient.reshape(len(gradient), -1) for gradient in gradients], dim=1).norm(dim=1)
        factors = (clip_val / (norms + 1e-6)).clamp(max=1.0)
        for weight, gradient in zip(self._active, gradients, strict=True):
            # not in place: two parameters may have been given one and the same gradient
            weight.grad = gradient * factors.view(-1, *[1] * (gradient.dim() - 1))
        return None


def _stacked(value: Any, parameter: Tensor, num_clients: int) -> Any:
    """A fresh optimiser's state of one parameter, of a stack of them."""
    if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
        return value.expand(num_clients, *value.shape).clone()
    return deepcopy(value)


def _owners(parameters: Sequence[Tensor], optimizer: Optimizer) -> list[int]:
    """For each parameter, the index of its parameter group. -1 where another optimiser holds it."""
    owner = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return [owner.get(id(parameter), -1) for parameter in parameters]
