"""Flat vector of an update: selects the parameters and buffers that clients send, and reads and writes them.

By default, clients send all tensors that training changes: trained parameters, changed buffers (usually
running statistics), and frozen parameters that training writes (teachers of MoCo, BYOL, DINO and mean
teachers). The buffer mode decides what happens to changed buffers:

- "share": they are segments of the flat vector, after the trained parameters.
- "local": every client keeps its own for the next round (FedBN: Li et al., ICLR 2021), and the global model
  keeps the initial ones.
- "frozen": normalisation layers train in eval mode, so they do not change.

Batch counters are never sent. They advance by the number of batches of the longest client. Parameters and
buffers that match a pattern of `personal_parameters` also stay with the client (`clients.personal`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedq._lightning import pl
from lightning_fedq.clients.changed_tensors import (
    ChangedTensors,
    find_counters,
    layers_with_statistics,
    named_tensors,
    statistics_names,
    updated_statistics,
)
from lightning_fedq.clients.constraints import (
    Constraint,
    apply_constraints,
    find_constant_elements,
    layer_constraints,
    match_constraints,
)
from lightning_fedq.clients.personal import PersonalTensors, check_matches, match_names
from lightning_fedq.data.sampling import in_short
from lightning_fedq.functional.flatten import flatten, unflatten

BufferMode = Literal["share", "local", "frozen"]


def num_coordinates(
    module: nn.Module, mode: BufferMode, local: Sequence[str] = (), sharing: Sequence[str] = ()
) -> int:
    """Count the coordinates of the vector that clients will send, before training.

    The count covers trained parameters, running statistics of layers in training mode (if buffers are
    shared), and tensors that `sharing` names. Other tensors that training changes are only known after a
    rehearsal.

    Args:
        module: Module before training.
        mode: Buffer mode.
        local: Patterns of names of tensors that stay with clients.
        sharing: Patterns of names of buffers and frozen parameters that clients send in any case.

    Raises:
        ValueError: If a pattern matches nothing.
    """
    check_matches(module, local)
    check_matches(module, sharing, "extra_buffers")
    sizes = dict(module.named_buffers())
    statistics = updated_statistics(module) if mode == "share" else ()
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    shared = dict([*trained, *((name, sizes[name]) for name in statistics)])
    tensors = named_tensors(module)
    declared = {n: tensors[n] for n in match_names(tensors, sharing) if tensors[n].is_floating_point()}
    staying = match_names(tensors, local) - declared.keys()
    return sum(tensor.numel() for name, tensor in {**shared, **declared}.items() if name not in staying)


def optimised_ids(optimizers: Sequence[Optimizer]) -> set[int]:
    """Return the `id` of each parameter in some optimisers."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {id(parameter) for group in groups for parameter in group["params"]}


def train_only(module: nn.Module, optimizers: Sequence[Optimizer], trained: Collection[str]) -> None:
    """Set `requires_grad` for these parameters only, and freeze all other parameters of the optimisers."""
    optimised, trained = optimised_ids(optimizers), set(trained)
    for name, parameter in module.named_parameters():
        if name in trained or id(parameter) in optimised:
            parameter.requires_grad_(name in trained)


class Members(NamedTuple):
    """Names of the tensors that clients train or change.

    Args:
        parameters: Trained parameters that clients send, in the order of the flat vector.
        buffers: Floating-point buffers and frozen parameters that training changes. Shared ones come first
            and follow the trained parameters in the flat vector.
        counters: Integer buffers that count batches.
        integers: Other integer buffers, which every client keeps for itself.
        local: Trained parameters that stay with the client.
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    local: tuple[str, ...] = ()

    def plain(self) -> dict[str, list[str]]:
        """Convert to types that a checkpoint may contain."""
        return {kind: list(names) for kind, names in self._asdict().items()}

    @classmethod
    def from_plain(cls, plain: dict[str, list[str]]) -> Members:
        """Convert back from the result of `plain`."""
        return cls(**{kind: tuple(names) for kind, names in plain.items()})


class Vector:
    """Trained parameters and changed buffers of a module as one flat vector.

    The vector has one segment per sent tensor: trained parameters, then shared buffers.

    Args:
        module: User's module, which holds the global model.
        optimizers: Function that returns the current optimisers of the trained parameters.
        mode: Buffer mode.
        rehearsed: Tensors that training changes in addition to the trained parameters.
        members: Names of trained tensors from a checkpoint. None derives them from the module.
        local: Patterns of names of tensors that stay with clients.
        shared: Patterns of names of buffers and frozen parameters that clients send even if the rehearsal did
            not change them.
        constraints: Constraints on values of tensors, by patterns of names.

    Attributes:
        members: Names of the trained and changed tensors.
        shared: Names of the buffers and frozen parameters that clients send.
        names: Names of the trained parameters that clients send, in the order of the flat vector.
        trained: Names of all trained parameters: sent ones, then local ones.
        buffer_names: Names of the buffers that differ between clients: floats, integers, then counters.
        sent: Names of all tensors that clients send, one per segment of the flat vector.
        unsent: Names of the other tensors that differ between clients: local parameters, then buffers.
        constraints: Constraint of each sent tensor that has one, by name.
        constant_elements: Elements of sent parameters that layers keep constant, by name.
        uncarried: Names of buffers and frozen parameters that clients neither send nor keep. Training should
            not change them.
        num_uncarried: Number of values of the uncarried tensors.
        shapes: Shape of each segment.
        segments: Number of coordinates of each segment.
        num_parameters: Coordinates of the trained parameters, which come first in the flat vector.
        num_buffers: Coordinates of the flat vector that belong to buffers, not to trained parameters.
        width: Number of values in the flat vector and in the local parameters of one client.
        personal: Tensors that every client keeps for itself.
        max_counted: Largest increase of each counter over the clients of the open round, int64.

    Raises:
        ValueError: If a pattern matches nothing or every trained parameter, if the module lacks a member, or
            if a shared buffer is not finite.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        optimizers: Any,
        mode: BufferMode,
        rehearsed: ChangedTensors,
        members: Members | None = None,
        local: Sequence[str] = (),
        shared: Sequence[str] = (),
        constraints: Mapping[str, Constraint] | None = None,
    ) -> None:
        check_matches(module, local)
        check_matches(module, shared, "extra_buffers")
        self.module, self.mode, self._rehearsed, self._optimizers = module, mode, rehearsed, optimizers
        self._extra_patterns, self._declared = tuple(shared), dict(constraints or {})
        self.personal, self._patterns = PersonalTensors(), tuple(local)
        self._match_patterns()
        if members is not None:
            # freeze and train the same parameters as the run of the checkpoint
            train_only(module, optimizers(), (*members.parameters, *members.local))
        self.set_members(self.find_members() if members is None else members)
        self.read()

    def _match_patterns(self) -> None:
        """Match the patterns with the module's current names."""
        names = named_tensors(self.module)
        self._staying = match_names(names, self._patterns)
        self._extra = match_names(names, self._extra_patterns)

    def find_members(self) -> Members:
        """Derive the members from the module, its optimisers and the modes of its layers.

        Raises:
            ValueError: If every trained parameter stays with clients.
        """
        self._match_patterns()
        in_optimizers = optimised_ids(self._optimizers())
        named = self.module.named_parameters()
        trained = tuple(name for name, p in named if p.requires_grad and id(p) in in_optimizers)
        local = tuple(name for name in trained if name in self._staying)
        parameters = tuple(name for name in trained if name not in local)
        if local and not parameters:
            raise ValueError(
                f"personal_parameters={list(self._patterns)} matches every trained parameter "
                f"({in_short(local)}), so clients send nothing. Use patterns that leave some parameters out."
            )
        floats = {name: t for name, t in named_tensors(self.module).items() if t.is_floating_point()}
        extra = tuple(name for name in floats if name in self._extra and name not in trained)
        if self.mode == "frozen":
            return Members(parameters, extra, local=local)
        # buffers that match `personal_parameters` stay with clients, even if no step changed them
        staying_buffers = [name for name, _ in self.module.named_buffers() if name in self._staying]
        staying_floats = [name for name in staying_buffers if name in floats]
        changed = self._rehearsed.current(self.module, trained)
        all_floats = dict.fromkeys((*changed, *extra, *staying_floats))
        buffers = tuple(sorted(all_floats, key=self._is_personal))  # sent buffers first
        counters = find_counters(self.module, buffers)
        staying_integers = [name for name in staying_buffers if name not in floats]
        all_integers = dict.fromkeys((*self._rehearsed.integers, *staying_integers))
        integers = tuple(name for name in all_integers if self._is_personal(name) and name not in counters)
        return Members(parameters, buffers, counters, integers, local)

    def _is_personal(self, buffer: str) -> bool:
        """Return whether every client keeps its own values of this buffer."""
        return buffer not in self._extra and (self.mode == "local" or buffer in self._staying)

    def set_members(self, members: Members) -> None:
        """Build the flat vector from these members.

        Raises:
            ValueError: If the module lacks a member, or a shared buffer is not finite.
        """
        tensors = named_tensors(self.module)
        wanted = [name for names in members for name in names]
        if missing := [name for name in wanted if name not in tensors]:
            raise ValueError(f"The model has no {', '.join(missing)}. Use the checkpoint's own model.")
        self.members = members
        self.shared = tuple(name for name in members.buffers if not self._is_personal(name))
        self.names, self.trained = [*members.parameters], [*members.parameters, *members.local]
        self.buffer_names = [*members.buffers, *members.integers, *members.counters]
        self.sent, self.unsent = (*members.parameters, *self.shared), [*members.local, *self.buffer_names]
        self.shapes = [tensors[name].shape for name in self.sent]
        self.segments = [shape.numel() for shape in self.shapes]
        self.num_parameters = sum(self.segments[: len(self.names)])
        self.num_buffers = sum(self.segments[len(self.names) :])
        self._get = [attrgetter(name) for name in self.sent]
        self._get_unsent = [attrgetter(name) for name in self.unsent]
        self._unsent_sizes = [tensors[name].numel() for name in self.unsent]
        self._num_local = sum(self._unsent_sizes[: len(members.local)])
        self.width = sum(self.segments) + self._num_local
        self._is_personal_unsent = [name in members.local or self._is_personal(name) for name in self.unsent]
        own = [name for name, is_own in zip(self.unsent, self._is_personal_unsent, strict=True) if is_own]
        self.personal.set_names(own, self.module)
        self._constrain()
        named = self.module.named_parameters()
        carried = {name for name, p in named if p.requires_grad} | {*self.sent, *self.unsent}
        self.uncarried = [name for name in tensors if name not in carried]
        self.num_uncarried = sum(tensors[name].numel() for name in self.uncarried)
        counted = sum(tensors[name].numel() for name in members.counters)
        self.max_counted = torch.zeros(counted, dtype=torch.int64)

    def _constrain(self) -> None:
        """Collect the constraints of sent tensors: declared ones, and those of known layers."""
        for name in self.shared:
            if not bool(attrgetter(name)(self.module).isfinite().all()):
                raise ValueError(
                    f"{name} is not finite before training, so clients can't send its difference. "
                    "Set a finite value (from public data), or keep it with clients: "
                    f"Federated(personal_parameters=[{name!r}])."
                )
        known = layer_constraints(self.module)
        found = {name: known[name] for name in self.shared if name in known}
        named = self.module.named_parameters()
        frozen = [name for name, p in named if not p.requires_grad and name not in self._staying]
        self.constraints = found | match_constraints(self._declared, self.sent, frozen)
        constant = find_constant_elements(self.module)
        self.constant_elements = {name: constant[name] for name in self.names if name in constant}

    @property
    def parameters(self) -> list[Tensor]:
        """Trained and sent parameters of the global model."""
        return [get(self.module) for get in self._get[: len(self.names)]]

    def get_parameters(self, module: nn.Module) -> list[Tensor]:
        """Return the trained and sent parameters of a client's copy."""
        return [get(module) for get in self._get[: len(self.names)]]

    @property
    def normalised(self) -> list[str]:
        """Names of the running statistics of normalisation layers that clients send."""
        names = statistics_names(layers_with_statistics(self.module))
        return [name for name in self.shared if name in names]

    # ---- the global model ----------------------------------------------------------------------------

    def read(self, module: nn.Module | None = None) -> Tensor:
        """Read the flat vector `(dim,)` of the global model, or of a client's copy.

        Args:
            module: Client's copy. None reads the global model.

        Raises:
            ValueError: If training has removed a tensor, or changed its shape.
        """
        tensors = self._read_tensors(self.module if module is None else module, self._get, self.sent)
        for name, tensor, shape in zip(self.sent, tensors, self.shapes, strict=True):
            if tensor.shape != shape:
                raise ValueError(
                    f"Training changed the shape of {name} to {tuple(tensor.shape)} from {tuple(shape)}. "
                    "Only tensors of a fixed shape can be averaged over clients."
                )
        return flatten(tensors)

    def _read_tensors(self, module: nn.Module, getters: Sequence[Any], names: Sequence[str]) -> list[Tensor]:
        """Read tensors by name, and raise if training has removed one."""
        found = []
        for get, name in zip(getters, names, strict=True):
            try:
                tensor = get(module)
            except AttributeError:
                tensor = None
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    f"Training removed {name} from the model, but clients must send it. "
                    "Build the model in its constructor, in setup or in configure_model."
                )
            found.append(tensor)
        return found

    def parts(self) -> list[Tensor]:
        """Return the current values of each segment of the global model."""
        return [get(self.module).detach().reshape(-1) for get in self._get]

    def write(self, weights: Tensor) -> None:
        """Write a flat vector `(dim,)` into the global model."""
        with torch.no_grad():
            for get, view in zip(self._get, unflatten(weights, self.shapes), strict=True):
                get(self.module).copy_(view)

    def constrain(self, weights: Tensor, previous: Tensor, exact: bool = False) -> None:
        """Apply the constraints to a decoded global model, in place (`clients.constraints`).

        Args:
            weights: `(dim,)` new global model.
            previous: `(dim,)` last global model.
            exact: Whether the new model is the exact mean of the clients' models, without noise.
        """
        if not self.constraints and (exact or not self.constant_elements):
            return
        both = zip(unflatten(weights, self.shapes), unflatten(previous, self.shapes), strict=True)
        apply_constraints(
            dict(zip(self.sent, both, strict=True)), self.constraints, self.constant_elements, exact
        )

    def not_finite(self, update: Tensor) -> list[str]:
        """Return the names of the tensors that are not finite in an update `(dim,)`."""
        parts = zip(self.sent, torch.split(update, self.segments), strict=True)
        return [name for name, part in parts if not bool(part.isfinite().all())]

    def begin_round(self) -> None:
        """Discard the counts of an abandoned round."""
        self.max_counted.zero_()

    def commit(self, counted: Collection[int]) -> None:
        """End a round: advance each counter by the largest increase among its clients.

        Args:
            counted: Clients in the round's sum, which make no difference here.
        """
        counters = [attrgetter(name)(self.module) for name in self.members.counters]
        ends = torch.split(self.max_counted, [counter.numel() for counter in counters])
        for counter, steps in zip(counters, ends, strict=True):
            counter += steps.to(counter.device).view_as(counter)
        self.max_counted.zero_()

    # ---- a client ------------------------------------------------------------------------------------

    def keep_client(self, module: nn.Module, client: int) -> None:
        """Store a trained client's counters and personal tensors.

        Args:
            module: Trained copy of the client.
            client: Number of the client.
        """
        if not self._get_unsent:
            return
        rest = self._read_tensors(module, self._get_unsent, self.unsent)
        wide = torch.float64 if self.members.integers else torch.float32  # exact up to 2^53
        row = flatten([t.detach().to(torch.promote_types(t.dtype, wide)) for t in rest])
        self.keep_rows([client], row[None])

    def keep_rows(self, clients: Sequence[int], values: Tensor) -> None:
        """Store the counters and personal tensors of several trained clients.

        Args:
            clients: Numbers of the clients.
            values: `(len(clients), rest_dim)` tensors in the order of `unsent`: local parameters, float
                buffers, integer buffers and counters.
        """
        if len(self.max_counted):
            start = flatten([attrgetter(name)(self.module) for name in self.members.counters]).cpu()
            increase = values[:, -len(self.max_counted) :].amax(0).cpu().round().long() - start
            self.max_counted = torch.maximum(self.max_counted, increase)
        if not self.personal.names:
            return
        parts = torch.split(values, self._unsent_sizes, dim=1)
        own = [part for part, is_own in zip(parts, self._is_personal_unsent, strict=True) if is_own]
        for client, row in zip(clients, torch.cat(own, dim=1), strict=True):
            self.personal.keep(client, row)

    def start_weights(self, clients: Sequence[int], weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the values from which the clients of a stack start.

        Args:
            clients: Numbers of the clients.
            weights: `(dim,)` flat vector of the global model.

        Returns:
            `(num_parameters + rest_dim,)` sent parameters and `unsent` tensors of the global model, and
            `(len(clients), rest_dim)` `unsent` tensors of each client. The second is None if no client has
            trained before.
        """
        lead = self.num_parameters
        rest = [get(self.module).detach().reshape(-1).to(weights) for get in self._get_unsent]
        at = len(self.members.local)
        rest[at : at + len(self.shared)] = torch.split(weights[lead:], self.segments[len(self.names) :])
        start = torch.cat([weights[:lead], *rest]) if rest else weights
        if not any(client in self.personal for client in clients):
            return start, None
        return start, torch.stack([self._personal_start(client, rest) for client in clients])

    def _personal_start(self, client: int, common: Sequence[Tensor]) -> Tensor:
        """Return the `unsent` values of one client, with its personal tensors in place of the global ones."""
        own = iter(self.personal.get_tensors(client).values())
        if client not in self.personal:
            return torch.cat(list(common))
        pairs = zip(common, self._is_personal_unsent, strict=True)
        return torch.cat([next(own).reshape(-1).to(part) if is_own else part for part, is_own in pairs])

    def select_sent_columns(self, updates: Tensor) -> Tensor:
        """Select the sent columns `(clients, dim)` of a stack's `(clients, num_parameters + rest_dim)`."""
        lead, dim, stay = self.num_parameters, sum(self.segments), self._num_local
        if not stay:
            return updates[:, :dim]
        return torch.cat([updates[:, :lead], updates[:, lead + stay : dim + stay]], dim=1)

    def freeze_statistics(self, module: nn.Module) -> None:
        """If buffers are frozen, put layers with running statistics of a copy into eval mode."""
        if self.mode == "frozen":
            for layer in layers_with_statistics(module).values():
                layer.training = False


def segment_origins(names: Sequence[str], before: Sequence[str]) -> list[int | None]:
    """Return, per segment name, the index of the segment in an earlier vector. None if it was not there."""
    index = {name: number for number, name in enumerate(before)}
    return [index.get(name) for name in names]
