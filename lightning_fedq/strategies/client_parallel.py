"""A whole stack of clients in one Lightning step: `torch.func.vmap` over the user's `training_step`.

The parameters of a stack live in one `(clients, dim)` buffer. A step maps the user's own
`training_step` over the clients, `backward` hands the gradients over, and the user's own optimiser
steps the buffer, which is right for elementwise optimisers and refused for others. Memory is that of
one stack, whatever the number of clients.

This is not a `Strategy` for `Trainer(strategy=...)`: one callback, and nothing else changed, is the
property to keep. While it is attached it stands in for `training_step` and `backward` of the
trainer's own single-device strategy and for `clip_grad_by_norm` of its precision plugin (public
names, all three), and leaves everything else to them.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from lightning_fedq._lightning import pl

ELEMENTWISE_OPTIMIZERS = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, Adagrad, Adadelta, ASGD)
"""Optimisers that treat every coordinate on its own, so that a stack is to them a longer vector."""


class _TrainingStep(nn.Module):
    """`training_step` as the forward of a module, which is what `functional_call` calls."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.training_step(*args)


class StackedStep:
    """Losses and gradients of a stack of clients, by mapping one module's `training_step` over them.

    What `training_step` logs is caught, averaged over the clients and, with `replay`, logged for real.

    Args:
        module: The module.
        names: Names of the parameters that differ between clients, in the order of the flat vector.
    """

    def __init__(self, module: pl.LightningModule, names: Sequence[str]) -> None:
        self.module, self._step = module, _TrainingStep(module)
        parameters = dict(module.named_parameters())
        self.names = [f"module.{name}" for name in names]
        self.shapes = [parameters[name].shape for name in names]
        self.sizes = [shape.numel() for shape in self.shapes]
        self._args: tuple[Any, ...] = ()
        self._logged: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        self._constants: dict[str, Any] = {}
        gradients = grad_and_value(self._one_client, has_aux=True)
        self._own = vmap(gradients, in_dims=(0, 0), randomness="different")
        self._common = vmap(gradients, in_dims=(None, 0), randomness="different")

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut `(..., dim)` into one view a parameter, `(..., *shape)`."""
        parts = torch.split(flat, self.sizes, dim=-1)
        return {
            name: part.view(*flat.shape[:-1], *shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def __call__(
        self, weights: Tensor, batch: Any, *args: Any
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
        """Run one step.

        Args:
            weights: `(clients, dim)`, or `(dim,)` where all clients still share one set of weights;
                then the forward pass is one big batch.
            batch: A batch whose tensors lead with a client dimension.
            args: Further arguments of `training_step`, the same for every client.

        Returns:
            The mean loss, the gradients by name, each `(clients, *shape)`, and what else
            `training_step` returned.
        """
        run = self._common if weights.dim() == 1 else self._own
        self._args, self._logged, self._constants = args, {}, {}
        self.module.log = self._catch  # type: ignore[method-assign]
        try:
            gradients, (losses, (values, extra)) = run(self.views(weights), batch)
        finally:
            del self.module.log
        self._values = values
        return losses.mean(), gradients, {**self._constants, **extra}

    def _one_client(self, parameters: dict[str, Tensor], batch: Any) -> tuple[Tensor, Any]:
        output = functional_call(self._step, parameters, (batch, *self._args))
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"training_step must return a loss to be mapped over clients, got {type(loss).__name__}"
            )
        rest = {k: v for k, v in output.items() if k != "loss"} if isinstance(output, dict) else {}
        extra = {k: v.detach() for k, v in rest.items() if isinstance(v, Tensor)}
        self._constants = {k: v for k, v in rest.items() if not isinstance(v, Tensor)}
        values = {k: v.detach() for k, (v, _, _) in self._logged.items() if isinstance(v, Tensor)}
        self._logged = {k: (None if k in values else v, a, kw) for k, (v, a, kw) in self._logged.items()}
        return loss, (values, extra)

    def _catch(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(value, Tensor | float | int):
            raise TypeError(
                f"self.log({name!r}, ...) of a {type(value).__name__} can't be averaged over clients"
            )
        self._logged[name] = (value, args, kwargs)

    def replay(self, num_clients: int, batch: Any) -> None:
        """Log the averages over the clients, weighted by all their samples."""
        first = next((leaf for leaf in _leaves(batch) if leaf.dim() > 1), None)
        samples = 1 if first is None else first.shape[1]
        for name, (constant, args, kwargs) in self._logged.items():
            value = self._values[name].float().mean(0) if constant is None else constant
            size = num_clients * (kwargs.get("batch_size") or samples)
            self.module.log(name, value, *args, **{**kwargs, "batch_size": size})


def _leaves(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = batch.values()
    elif not isinstance(batch, list | tuple):
        return []
    return [leaf for item in batch for leaf in _leaves(item)]


class ClientParallelStrategy:
    """Trains stacks of clients on the trainer's own strategy, between `attach` and `detach`.

    `open(n)` starts a stack of `n` clients, `close()` ends it; outside of a stack every step is the
    strategy's own. A stack of no clients makes a step that does nothing.

    Args:
        trainer: Trainer of a fit in progress, with its optimiser set up.
        names: Names of the trained parameters, in the order of the flat vector.
        capacity: Most clients a stack holds.
    """

    def __init__(self, trainer: pl.Trainer, names: Sequence[str], capacity: int) -> None:
        self._trainer, self._strategy = trainer, trainer.strategy
        self._precision = trainer.precision_plugin
        self._optimizer: Optimizer = trainer.optimizers[0]
        self._step = StackedStep(trainer.lightning_module, names)
        parameters = dict(trainer.lightning_module.named_parameters())
        self._runs = _runs([parameters[name] for name in names], self._optimizer)
        like = parameters[names[0]].detach()
        self._weights = like.new_empty(capacity, sum(self._step.sizes))
        self._gradients = torch.empty_like(self._weights)
        self._originals: list[list[Tensor]] = []
        self._active: Tensor | None = None
        self._common: Tensor | None = None

    def attach(self) -> None:
        """Stand in for three methods of the trainer's strategy and precision plugin."""
        self._ordinary_step, self._ordinary_backward = self._strategy.training_step, self._strategy.backward
        self._ordinary_clip = self._precision.clip_grad_by_norm
        self._strategy.training_step = self.training_step  # type: ignore[method-assign]
        self._strategy.backward = self.backward  # type: ignore[method-assign]
        self._precision.clip_grad_by_norm = self.clip_grad_by_norm  # type: ignore[method-assign]

    def detach(self) -> None:
        """Close an open stack and give the methods back."""
        self.close()
        del self._strategy.training_step, self._strategy.backward, self._precision.clip_grad_by_norm

    def open(self, num_clients: int, weights: Tensor) -> None:
        """Start a stack.

        Args:
            num_clients: 0 to `capacity`.
            weights: `(dim,)`, where every client starts from.
        """
        self._active, self._common = self._weights[:num_clients], weights.to(self._weights.dtype)
        self._active.copy_(weights)
        self._originals = [group["params"] for group in self._optimizer.param_groups]
        self._pairs = []
        for group, runs in zip(self._optimizer.param_groups, self._runs, strict=True):
            pairs = [
                (self._active[:, a:b], self._gradients[:num_clients, a:b]) for a, b in runs if num_clients
            ]
            group["params"] = [weight for weight, _ in pairs]
            self._pairs += pairs

    @property
    def weights(self) -> Tensor:
        """`(clients, dim)`, the weights of the open stack's clients; overwritten by the next stack."""
        assert self._active is not None
        return self._active

    def close(self) -> None:
        """End the stack, if one is open: the optimiser holds the module's own parameters again."""
        if self._active is None:
            return
        for group, originals in zip(self._optimizer.param_groups, self._originals, strict=True):
            group["params"] = originals
        self._optimizer.state.clear()
        self._active = self._common = None

    # ---- what Lightning calls -------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One step of all clients of the stack; the strategy's own step outside of one."""
        if self._active is None:
            return self._ordinary_step(*args, **kwargs)
        num_clients = len(self._active)
        if num_clients == 0:
            return torch.zeros((), device=self._active.device)
        batch, *rest = (*args, *kwargs.values())
        with self._precision.train_step_context():
            weights = self._active if self._common is None else self._common
            loss, gradients, extra = self._step(weights, batch, *rest)
        self._common = None
        columns = [gradient.reshape(num_clients, -1) for gradient in gradients.values()]
        torch.cat(columns, dim=1, out=self._gradients[:num_clients])
        self._step.replay(num_clients, batch)
        return {"loss": loss, **extra} if extra else loss

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Hand over the gradients that the step has found; the strategy's own backward outside of a stack."""
        if self._active is None:
            return self._ordinary_backward(closure_loss, optimizer, *args, **kwargs)
        module = self._trainer.lightning_module
        self._strategy.pre_backward(closure_loss)
        loss: Tensor = self._precision.pre_backward(closure_loss, module)
        for weight, gradient in self._pairs:
            weight.grad = gradient
        loss = self._precision.post_backward(loss, module)
        self._strategy.post_backward(loss)
        return loss

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip every client's gradient by its own norm, as it would be one client at a time."""
        if self._active is None:
            return self._ordinary_clip(optimizer, clip_val)
        gradients = self._gradients[: len(self._active)]
        norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
        gradients.mul_((clip_val / (norms + 1e-6)).clamp(max=1.0))
        return None


def _runs(parameters: Sequence[Tensor], optimizer: Optimizer) -> list[list[tuple[int, int]]]:
    """For each parameter group, the intervals of the flat vector that it owns, neighbours merged."""
    owner = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    runs: list[list[tuple[int, int]]] = [[] for _ in optimizer.param_groups]
    start = 0
    for parameter in parameters:
        own, stop = runs[owner[id(parameter)]], start + parameter.numel()
        if own and own[-1][1] == start:
            own[-1] = (own[-1][0], stop)
        else:
            own.append((start, stop))
        start = stop
    return runs
