"""The module and the optimisers of a federation, which every client uses in turn.

The module shows the global model between clients and, to whoever asks for its `state_dict()`, also while one
of them trains. What of it travels may change from round to round: a parameter that is frozen leaves, one that
is trained joins.

Buffers that training changes, as a rule running statistics, are part of what a client learns. Shared, they
are segments of the flat vector behind the parameters; local, every client finds its own again in the next
round (FedBN: Li et al., ICLR 2021) and the module between rounds shows those of the start; frozen,
normalisation layers train in eval mode. Counters of batches never travel: they advance by what the longest
client counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedq._lightning import pl
from lightning_fedq.federation.changing_buffers import (
    Rehearsed,
    counters_of,
    layers_with_statistics,
    updated_statistics,
)
from lightning_fedq.federation.optimizer_memory import numbers_of, put_back_numbers, with_nested
from lightning_fedq.functional.flatten import flatten, unflatten

BufferMode = Literal["share", "local", "frozen"]


def check_buffer_mode(mode: str) -> None:
    """Refuse an unknown way with buffers.

    Raises:
        ValueError: Naming those there are.
    """
    if mode not in get_args(BufferMode):
        known = " or ".join(map(repr, get_args(BufferMode)))
        raise ValueError(f"buffers must be {known}, got {mode!r}")


def num_coordinates(module: nn.Module, mode: BufferMode) -> int:
    """Length of the vector that clients will send, of a module that has not begun to train.

    Parameters that train and, where buffers are shared, the running statistics of layers in training mode;
    what only a rehearsal finds is not counted.
    """
    sizes = dict(module.named_buffers())
    statistics = updated_statistics(module) if mode == "share" else ()
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return trained + sum(sizes[name].numel() for name in statistics)


class Members(NamedTuple):
    """Names of what the clients train.

    Args:
        parameters: Those that are trained and in the optimiser, in the order of the flat vector.
        buffers: Floating point buffers that training changes; where they are shared, in the same order
            behind the parameters.
        counters: Integer buffers that count batches.
        integers: Other integer buffers, which every client keeps for itself.
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()

    def plain(self) -> dict[str, list[str]]:
        """In the types that a checkpoint may hold."""
        return {kind: list(names) for kind, names in self._asdict().items()}

    @classmethod
    def of(cls, plain: dict[str, list[str]]) -> Members:
        """Read what `plain` wrote."""
        return cls(**{kind: tuple(names) for kind, names in plain.items()})


class LocalModel:
    """Trained parameters and buffers as one flat vector, with their optimisers.

    Args:
        module: The user's own.
        optimizers: Of the trained parameters; several where the module optimises by hand.
        mode: What happens to buffers.
        rehearsed: Buffers that a rehearsal has seen change.
        members: What is trained, as a checkpoint has it; None looks at the module.

    Attributes:
        members: What is trained.
        views: The global weights, a tensor a segment of the flat vector; from `use` on.

    Raises:
        ValueError: If there is no trained parameter, or several devices.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
        mode: BufferMode,
        rehearsed: Rehearsed,
        members: Members | None,
    ) -> None:
        self.module, self.mode, self._rehearsed = module, mode, rehearsed
        self.optimizers = list(optimizers)
        self._all_optimizers = with_nested(self.optimizers)
        self._fresh = [_before_a_step(optimizer.state) for optimizer in self._all_optimizers]
        self._numbers = [numbers_of(optimizer) for optimizer in self._all_optimizers]
        self._own: dict[int, Tensor] = {}  # of every client that has trained: its buffers
        self._new: dict[int, Tensor] = {}  # the same, of the open round
        self._in_eval: list[nn.Module] = []
        if members is not None:
            self._train_only(members)
        self.take(self.found() if members is None else members)
        self.flat()

    def _train_only(self, members: Members) -> None:
        """As in the run that a checkpoint is of: what was frozen there is frozen again, the rest trained."""
        optimised = self._optimised()
        for name, parameter in self.module.named_parameters():
            if name in members.parameters or id(parameter) in optimised:
                parameter.requires_grad_(name in members.parameters)

    def _optimised(self) -> set[int]:
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return {id(parameter) for group in groups for parameter in group["params"]}

    def found(self) -> Members:
        """Parameters and buffers that module, optimiser and the modes of the layers would train now."""
        optimised = self._optimised()
        named = self.module.named_parameters()
        parameters = tuple(name for name, p in named if p.requires_grad and id(p) in optimised)
        if self.mode == "frozen":
            return Members(parameters)
        buffers = self._rehearsed.now(self.module)
        integers = self._rehearsed.integers if self.mode == "local" else ()
        return Members(parameters, buffers, counters_of(self.module, buffers), integers)

    def take(self, members: Members) -> None:
        """Let the flat vector be made of these.

        Raises:
            ValueError: If the module lacks one of them.
        """
        parameters, buffers = dict(self.module.named_parameters()), dict(self.module.named_buffers())
        wanted = [*members.parameters, *members.buffers, *members.integers, *members.counters]
        missing = [name for name in wanted if name not in parameters and name not in buffers]
        if missing:
            raise ValueError(f"the model has no {', '.join(missing)}; use the checkpoint's own model")
        self.members = members
        self.parameters = [parameters[name] for name in members.parameters]
        self._owners = [_owner(self.module, name) for name in wanted[len(self.parameters) :]]
        self.shared = members.buffers if self.mode == "share" else ()
        self._shapes = [p.shape for p in self.parameters] + [buffers[name].shape for name in self.shared]
        self._fixed = [buffers[name].detach().clone() for name in wanted[len(self.parameters) :]]
        self._own = {
            c: row for c, row in self._own.items() if len(row) == sum(f.numel() for f in self._fixed)
        }
        self._most = torch.zeros(self._num_counted, dtype=torch.int64)

    @property
    def names(self) -> list[str]:
        """Names of the trained parameters, in the order of the flat vector."""
        return list(self.members.parameters)

    @property
    def buffer_names(self) -> list[str]:
        """Names of the buffers that differ between clients: those of floats, of integers, then counters."""
        return [*self.members.buffers, *self.members.integers, *self.members.counters]

    @property
    def travelling(self) -> tuple[str, ...]:
        """Names of what travels, a segment each, in the order of the flat vector."""
        return (*self.members.parameters, *self.shared)

    @property
    def segments(self) -> list[int]:
        """Coordinates of each segment of the flat vector."""
        return [shape.numel() for shape in self._shapes]

    @property
    def num_buffers(self) -> int:
        """Coordinates of the flat vector that are buffers."""
        return sum(self.segments[len(self.parameters) :])

    @property
    def _counters(self) -> list[Tensor]:
        """Counters of batches, as they were when the round began."""
        return self._fixed[len(self._fixed) - len(self.members.counters) :]

    @property
    def _num_counted(self) -> int:
        return sum(fixed.numel() for fixed in self._counters)

    def _buffers(self) -> list[Tensor]:
        """The present buffers, floats and counters. Training may have put another tensor in place of one."""
        found = [owner._buffers[leaf] for owner, leaf in self._owners]
        for name, buffer, fixed in zip(self.buffer_names, found, self._fixed, strict=True):
            if buffer is None or buffer.shape != fixed.shape:
                shape = None if buffer is None else tuple(buffer.shape)
                raise ValueError(
                    f"training gave the buffer {name} the shape {shape}, it was {tuple(fixed.shape)}; "
                    "only buffers of a fixed shape can be averaged over clients"
                )
        return [buffer for buffer in found if buffer is not None]

    def flat(self) -> Tensor:
        """`(dim,)` the present weights."""
        return flatten([*self.parameters, *self._buffers()[: len(self.shared)]])

    def parts(self) -> list[Tensor]:
        """The present weights of each segment."""
        return [
            part.detach().reshape(-1) for part in (*self.parameters, *self._buffers()[: len(self.shared)])
        ]

    # ---- the global model ----------------------------------------------------------------------------

    def use(self, weights: Tensor) -> None:
        """Take `weights` for the global ones from now on. Nothing moves before `show`."""
        self.views = unflatten(weights, self._shapes)
        self._most.zero_()
        self._new = {}

    def constrain(self, weights: Tensor) -> None:
        """Variances are not below zero, in place. Whatever was decoded."""
        parts = torch.split(weights, self.segments)
        for name, part in zip(self.travelling, parts, strict=True):
            if name in self.shared and name.rpartition(".")[2] == "running_var":
                part.clamp_(min=0.0)

    def commit(self) -> None:
        """A round has ended: counters advance by what its longest client has counted, clients keep theirs."""
        ends = torch.split(self._most, [fixed.numel() for fixed in self._counters])
        for fixed, steps in zip(self._counters, ends, strict=True):
            fixed += steps.to(fixed.device).view_as(fixed)
        self._own.update(self._new)

    def show(self) -> None:
        """Load the global weights into the module. Buffers that do not travel are those of the start."""
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self.views, strict=False):
                parameter.copy_(view)
            for buffer, value in zip(self._buffers(), self._global_buffers(), strict=True):
                buffer.copy_(value)

    def _global_buffers(self) -> list[Tensor]:
        return [*self.views[len(self.parameters) :], *self._fixed[len(self.shared) :]]

    def show_in_state_dict(self, training: Callable[[], bool], check: Callable[[], object]) -> Any:
        """A hook that puts the global weights into the module's `state_dict()` while a client trains.

        Args:
            training: Does a client train on the module's own weights?
            check: Raises where the rest of a `state_dict()` must not be seen. A file of the weights alone
                asks no callback.
        """

        def hook(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
            check()
            if training():
                values = [*self.views[: len(self.parameters)], *self._global_buffers()]
                for names, view in zip(self._all_names(), values, strict=True):
                    for key in (prefix + name for name in names):
                        if key in state_dict:  # a buffer may be left out of it
                            state_dict[key] = view.to(state_dict[key].dtype).clone()

        return hook

    def _all_names(self) -> list[list[str]]:
        """Every name of each parameter and buffer. Tied weights and shared layers have several."""
        module, names = self.module, (*self.names, *self.buffer_names)
        named: list[tuple[str, Tensor]] = [*module.named_parameters(remove_duplicate=False)]
        named += module.named_buffers(remove_duplicate=False)
        tensors = dict(named)
        return [[other for other, tensor in named if tensor is tensors[name]] for name in names]

    # ---- a client ------------------------------------------------------------------------------------

    def begin_client(self, client: int) -> None:
        """Global weights, its own buffers if they are local, and a fresh optimiser."""
        self.renew_optimizer()
        self.show()
        if client in self._own:
            with torch.no_grad():
                for buffer, row in zip(self._buffers(), self._split(self._own[client]), strict=True):
                    buffer.copy_(row.view_as(buffer))

    def end_client(self, client: int) -> Tensor:
        """Take what the client has counted and keeps. Return its weights, `(dim,)`."""
        weights, buffers = self.flat(), self._buffers()
        if buffers:
            wide = torch.float64 if self.members.integers else torch.float32  # exact up to 2^53
            self.keep([client], flatten([b.to(torch.promote_types(b.dtype, wide)) for b in buffers])[None])
        return weights

    def keep(self, clients: Sequence[int], buffers: Tensor) -> None:
        """Take what clients have counted and, where buffers are local, those that each keeps.

        Args:
            clients: Whose.
            buffers: `(len(clients), buffer_dim)`, floats and counters.
        """
        if self._num_counted:
            start = flatten(self._counters).cpu()
            most = buffers[:, -self._num_counted :].amax(0).cpu().round().long() - start
            self._most = torch.maximum(self._most, most)
        if self.mode == "local":
            self._new.update({client: row.clone() for client, row in zip(clients, buffers, strict=True)})

    def start_of(self, clients: Sequence[int], weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where a stack of clients starts.

        Args:
            clients: Whose.
            weights: `(dim,)`, the global ones as the module shows them.

        Returns:
            `(dim + rest,)` parameters and all buffers, and `(len(clients), buffer_dim)` the clients' own
            buffers, None where none has any.
        """
        rest = [fixed.reshape(-1).to(weights) for fixed in self._fixed[len(self.shared) :]]
        start = torch.cat([weights, *rest]) if rest else weights
        if not any(client in self._own for client in clients):
            return start, None
        common = start[sum(p.numel() for p in self.parameters) :]
        return start, torch.stack([self._own.get(client, common).to(common) for client in clients])

    def _split(self, row: Tensor) -> Sequence[Tensor]:
        return torch.split(row, [fixed.numel() for fixed in self._fixed])

    # ---- layers in eval mode -------------------------------------------------------------------------

    def hold_statistics(self) -> None:
        """Where buffers are frozen, put layers that keep running statistics into eval mode."""
        if self.mode != "frozen":
            return
        for layer in layers_with_statistics(self.module).values():
            if layer.training:
                layer.training = False
                self._in_eval.append(layer)

    def release_statistics(self) -> None:
        """Undo `hold_statistics`."""
        while self._in_eval:
            self._in_eval.pop().training = True

    # ---- the optimiser -------------------------------------------------------------------------------

    def renew_optimizer(self) -> None:
        """No momentum, and what an optimiser was made with. Settings and schedules are the clock's."""
        remembered = zip(self._all_optimizers, self._fresh, self._numbers, strict=True)
        for optimizer, fresh, numbers in remembered:
            optimizer.state.clear()
            optimizer.state.update(_copied(fresh))
            put_back_numbers(optimizer, numbers)

    def forget_client(self) -> None:
        """Global weights in the module, and nothing of a client in the optimisers."""
        self.show()
        self.renew_optimizer()


def origins(names: Sequence[str], before: Sequence[str]) -> list[int | None]:
    """For each name of a segment the index of the segment that it was before, None if it was none."""
    index = {name: number for number, name in enumerate(before)}
    return [index.get(name) for name in names]


def _before_a_step(state: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """State that an optimiser was made with. One that somebody has loaded into it is not fresh."""
    return _copied({parameter: own for parameter, own in state.items() if own.get("step", 1) == 0})


def _copied(state: Mapping[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """An optimiser's state, of the same parameters."""
    return {parameter: deepcopy(own) for parameter, own in state.items()}


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
