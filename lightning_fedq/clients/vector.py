"""The flat vector of an update: which parameters and buffers travel, read from a module and written to it.

What training changes, travels. Buffers that it changes, as a rule running statistics, and frozen parameters
that it writes, as the teachers of MoCo, BYOL, DINO and mean teachers, are part of what a client learns.
Shared, they are segments of the flat vector behind the trained parameters; local, every client finds its own
again in the next round (FedBN: Li et al., ICLR 2021) and the global model keeps those of the start; frozen,
normalisation layers train in eval mode. Counters of batches never travel: they advance by what the longest
client counted. Parameters and buffers that match a pattern of `local` stay with the client in the same way
(`clients.personal`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedq._lightning import pl
from lightning_fedq.clients.constraints import (
    Constraint,
    apply_constraints,
    find_constant_elements,
    layer_constraints,
    match_constraints,
)
from lightning_fedq.clients.personal import PersonalTensors, check_matches, check_something_sent, match_names
from lightning_fedq.functional.flatten import flatten, unflatten

BufferMode = Literal["share", "local", "frozen"]
_STATISTICS = ("running_mean", "running_var")
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def layers_with_statistics(module: nn.Module) -> dict[str, nn.Module]:
    """Layers that update running statistics when they train, by name, whatever their present mode."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
        and layer.track_running_stats
        and isinstance(layer.running_mean, Tensor)
    }


def updated_statistics(module: nn.Module) -> tuple[str, ...]:
    """Names of the running statistics of layers in training mode."""
    layers = [name for name, layer in layers_with_statistics(module).items() if layer.training]
    return tuple(f"{name}.{leaf}".lstrip(".") for name in layers for leaf in _STATISTICS)


def find_counters(module: nn.Module, buffers: Sequence[str]) -> tuple[str, ...]:
    """Names of the batch counters beside running statistics."""
    present = {name for name, _ in module.named_buffers()}
    wanted = [
        name[: -len("running_mean")] + "num_batches_tracked"
        for name in buffers
        if name.endswith("running_mean")
    ]
    return tuple(name for name in wanted if name in present)


def num_coordinates(
    module: nn.Module, mode: BufferMode, local: Sequence[str] = (), sharing: Sequence[str] = ()
) -> int:
    """Length of the vector that clients will send, of a module that has not begun to train.

    Parameters that train and, where buffers are shared, the running statistics of layers in training mode;
    what only a rehearsal finds is not counted.

    Args:
        local: Patterns of the names that stay with the clients.
        sharing: Patterns of the names of buffers and frozen parameters that travel in any case.

    Raises:
        ValueError: If a pattern matches nothing.
    """
    check_matches(module, local)
    check_matches(module, sharing, "shared")
    sizes = dict(module.named_buffers())
    statistics = updated_statistics(module) if mode == "share" else ()
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    shared = dict([*trained, *((name, sizes[name]) for name in statistics)])
    tensors = _tensors(module)
    said = {n: tensors[n] for n in match_names(tensors, sharing) if tensors[n].is_floating_point()}
    staying = match_names(tensors, local) - said.keys()
    return sum(tensor.numel() for name, tensor in {**shared, **said}.items() if name not in staying)


class ChangedTensors(NamedTuple):
    """Tensors that training changes beside the trained parameters, as known before the first round.

    Args:
        expected: Running statistics that were to change, by the modes of their layers.
        changed: Floating point buffers and frozen parameters that did change in the rehearsal; `expected`
            where there was none.
        integers: Integer buffers that did, beside the counters of batches: pointers, counts.
    """

    expected: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()

    @classmethod
    def from_layers(cls, module: nn.Module) -> ChangedTensors:
        """Those that the modes of normalisation layers tell of, where nothing can be tried."""
        known = updated_statistics(module)
        return cls(known, known)

    @classmethod
    def compare(cls, before: nn.Module, after: nn.Module) -> ChangedTensors:
        """Compare a module with the copy that a client has trained.

        Raises:
            ValueError: If a buffer that changes has a value that is not finite.
        """
        old, new = _tensors(before), _tensors(after)
        changed = [n for n, t in old.items() if n in new and not _equal(t, new[n])]
        buffers = dict(before.named_buffers())
        frozen = {name for name, p in before.named_parameters() if not p.requires_grad}
        floats = [n for n in changed if old[n].is_floating_point() and (n in buffers or n in frozen)]
        counters = find_counters(before, tuple(buffers))
        integers = [n for n in changed if n in buffers and old[n].dtype in _INTEGERS and n not in counters]
        return cls(updated_statistics(before), tuple(floats), tuple(integers))

    def current(self, module: nn.Module, trained: Sequence[str]) -> tuple[str, ...]:
        """Names of what training changes by the present modes of the layers, in the module's order."""
        statistics = {
            f"{name}.{leaf}".lstrip(".") for name in layers_with_statistics(module) for leaf in _STATISTICS
        }
        updated = set(updated_statistics(module))
        held = set(self.expected) - set(self.changed)
        wanted = (set(self.changed) - statistics) | (updated - held)
        names = [name for name, _ in [*module.named_buffers(), *module.named_parameters()]]
        return tuple(name for name in names if name in wanted and name not in trained)


def optimised_ids(optimizers: Sequence[Optimizer]) -> set[int]:
    """Identities of the parameters that some optimisers hold."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {id(parameter) for group in groups for parameter in group["params"]}


def train_only(module: nn.Module, optimizers: Sequence[Optimizer], trained: Collection[str]) -> None:
    """Train these parameters, and freeze all others that the optimisers hold."""
    held, trained = optimised_ids(optimizers), set(trained)
    for name, parameter in module.named_parameters():
        if name in trained or id(parameter) in held:
            parameter.requires_grad_(name in trained)


def find_changed(
    before: nn.Module | Mapping[str, Tensor], after: nn.Module, names: Sequence[str]
) -> dict[str, Tensor]:
    """Which of these tensors have other values, of the same shape and type, after a training."""
    found = {}
    for name in names:
        try:
            one = before[name] if isinstance(before, Mapping) else attrgetter(name)(before)
            other = attrgetter(name)(after)
        except AttributeError:
            continue
        alike = isinstance(other, Tensor) and (one.shape, one.dtype) == (other.shape, other.dtype)
        if alike and not _equal(one.detach(), other.detach()):
            found[name] = other
    return found


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in [*module.named_parameters(), *module.named_buffers()]}


def _equal(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    # NaN differs from itself
    return bool(torch.equal(left, right) or torch.equal(left.nan_to_num(), right.nan_to_num()))


class Members(NamedTuple):
    """Names of what the clients train.

    Args:
        parameters: Those that are trained and in the optimiser, in the order of the flat vector.
        buffers: Floating point buffers and frozen parameters that training changes; where they are shared, in
            the same order behind the trained parameters.
        counters: Integer buffers that count batches.
        integers: Other integer buffers, which every client keeps for itself.
        local: Parameters that are trained and stay with the client.
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    local: tuple[str, ...] = ()

    def plain(self) -> dict[str, list[str]]:
        """In the types that a checkpoint may hold."""
        return {kind: list(names) for kind, names in self._asdict().items()}

    @classmethod
    def from_plain(cls, plain: dict[str, list[str]]) -> Members:
        """Read what `plain` wrote."""
        return cls(**{kind: tuple(names) for kind, names in plain.items()})


class Vector:
    """Trained parameters and buffers of a module as one flat vector.

    Args:
        optimizers: Returns the optimisers of the trained parameters; there may be others in every round.
        rehearsed: What training changes beside the trained parameters.
        members: What is trained, as a checkpoint has it; None looks at the module.
        local: Patterns of the names that stay with the clients.
        shared: Patterns of the names of buffers and frozen parameters that travel though the rehearsal did
            not change them.
        constraints: What tensors are, by patterns of their names.

    Attributes:
        members: What is trained.
        constraints: What buffers and parameters that travel are, by name.
        constant_elements: What layers hold constant of the parameters that travel, by name.
        uncarried: Names of what is in no update and stays with no client; training should not change it.
        num_uncarried: Values of these.
        shapes: Shape of every segment.
        personal: Tensors that every client keeps for itself.
        max_counted: Most that a client of the open round has counted, of each counter.

    Raises:
        ValueError: If there is no trained parameter, or several devices, or a pattern matches nothing or all.
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
        check_matches(module, shared, "shared")
        self.module, self.mode, self._rehearsed, self._optimizers = module, mode, rehearsed, optimizers
        self._sharing, self._declared = tuple(shared), dict(constraints or {})
        self.personal, self._patterns = PersonalTensors(), tuple(local)
        self._match_patterns()
        if members is not None:
            # as in the run that a checkpoint is of: what was frozen there is frozen again, the rest trained
            train_only(module, optimizers(), (*members.parameters, *members.local))
        self.set_members(self.find_members() if members is None else members)
        self.read()

    def _match_patterns(self) -> None:
        """Find what the patterns say of the names that the module has now."""
        names = _tensors(self.module)
        self._staying, self._said = match_names(names, self._patterns), match_names(names, self._sharing)

    def find_members(self) -> Members:
        """Parameters and buffers that module, optimiser and the modes of the layers would train now.

        Raises:
            ValueError: If every parameter that is trained stays with the clients.
        """
        self._match_patterns()
        in_optimizers = optimised_ids(self._optimizers())
        named = self.module.named_parameters()
        trained = tuple(name for name, p in named if p.requires_grad and id(p) in in_optimizers)
        local = tuple(name for name in trained if name in self._staying)
        parameters = tuple(name for name in trained if name not in local)
        check_something_sent(parameters, local, self._patterns)
        floats = [name for name, tensor in _tensors(self.module).items() if tensor.is_floating_point()]
        said = tuple(name for name in floats if name in self._said and name not in trained)
        if self.mode == "frozen":
            return Members(parameters, said, local=local)
        found = self._rehearsed.current(self.module, trained)
        # what is said to stay stays, whether or not the rehearsal's steps have changed it
        held = {name: b for name, b in self.module.named_buffers() if name in self._staying}
        said += tuple(name for name, buffer in held.items() if buffer.is_floating_point())
        found = (*found, *(name for name in said if name not in found))
        buffers = tuple(sorted(found, key=self._is_personal))  # those that travel lead
        counters = find_counters(self.module, buffers)
        whole = (name for name, buffer in held.items() if not buffer.is_floating_point())
        others = dict.fromkeys((*self._rehearsed.integers, *whole))
        integers = tuple(name for name in others if self._is_personal(name) and name not in counters)
        return Members(parameters, buffers, counters, integers, local)

    def _is_personal(self, buffer: str) -> bool:
        """Does every client have its own of this buffer?"""
        return buffer not in self._said and (self.mode == "local" or buffer in self._staying)

    def set_members(self, members: Members) -> None:
        """Let the flat vector be made of these.

        Raises:
            ValueError: If the module lacks one of them.
        """
        tensors = _tensors(self.module)
        wanted = [name for names in members for name in names]
        if missing := [name for name in wanted if name not in tensors]:
            raise ValueError(f"the model has no {', '.join(missing)}; use the checkpoint's own model")
        self.members = members
        self.shared = tuple(name for name in members.buffers if not self._is_personal(name))
        self.shapes = [tensors[name].shape for name in self.sent]
        self._get = [attrgetter(name) for name in self.sent]
        self._get_unsent = [attrgetter(name) for name in self.unsent]
        self._unsent_sizes = [tensors[name].numel() for name in self.unsent]
        self._is_personal_unsent = [name in members.local or self._is_personal(name) for name in self.unsent]
        own = [name for name, is_own in zip(self.unsent, self._is_personal_unsent, strict=True) if is_own]
        self.personal.set_names(own, self.module)
        self._constrain()
        self._note_frozen()
        counted = sum(tensors[name].numel() for name in members.counters)
        self.max_counted = torch.zeros(counted, dtype=torch.int64)

    def _constrain(self) -> None:
        """Say what the tensors that travel are: as declared, and as their layers know."""
        for name in self.shared:
            if not bool(attrgetter(name)(self.module).isfinite().all()):
                raise ValueError(
                    f"{name} travels as a coordinate of the update, and is not finite before training, so "
                    "that no difference to it can be sent; give it a finite value (calibrated on public data)"
                    f", or keep it with the clients: Federated(local=[{name!r}])"
                )
        known = layer_constraints(self.module)
        found = {name: known[name] for name in self.shared if name in known}
        named = self.module.named_parameters()
        frozen = [name for name, p in named if not p.requires_grad and name not in self._staying]
        self.constraints = found | match_constraints(self._declared, self.sent, frozen)
        held = find_constant_elements(self.module)
        self.constant_elements = {name: held[name] for name in self.names if name in held}

    def _note_frozen(self) -> None:
        """Note what is in no update and stays with no client: training should not change it."""
        buffers = {name for name, _ in self.module.named_buffers()}
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        carried = {*self.sent, *self.trained, *self.buffer_names}
        tensors = _tensors(self.module)
        self.uncarried = [name for name in tensors if name in buffers | frozen and name not in carried]
        self.num_uncarried = sum(tensors[name].numel() for name in self.uncarried)

    @property
    def names(self) -> list[str]:
        """Names of the trained parameters that travel, in the order of the flat vector."""
        return list(self.members.parameters)

    @property
    def trained(self) -> list[str]:
        """Names of all trained parameters: those that travel, then those that stay with the clients."""
        return [*self.members.parameters, *self.members.local]

    @property
    def unsent(self) -> list[str]:
        """Names of what differs between clients beside what `names` has: local parameters, then buffers."""
        return [*self.members.local, *self.buffer_names]

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters of the global model."""
        return [get(self.module) for get in self._get[: len(self.members.parameters)]]

    def get_parameters(self, module: nn.Module) -> list[Tensor]:
        """The trained parameters of a client's copy."""
        return [get(module) for get in self._get[: len(self.members.parameters)]]

    @property
    def num_parameters(self) -> int:
        """Coordinates of the trained parameters, which lead the flat vector."""
        return sum(self.segments[: len(self.members.parameters)])

    @property
    def normalised(self) -> list[str]:
        """Names of the running statistics of normalisation layers that travel."""
        layers = layers_with_statistics(self.module)
        names = {f"{name}.{leaf}".lstrip(".") for name in layers for leaf in _STATISTICS}
        return [name for name in self.shared if name in names]

    @property
    def buffer_names(self) -> list[str]:
        """Names of the buffers that differ between clients: those of floats, of integers, then counters."""
        return [*self.members.buffers, *self.members.integers, *self.members.counters]

    @property
    def sent(self) -> tuple[str, ...]:
        """Names of what travels, a segment each, in the order of the flat vector."""
        return (*self.members.parameters, *self.shared)

    @property
    def segments(self) -> list[int]:
        """Coordinates of each segment of the flat vector."""
        return [shape.numel() for shape in self.shapes]

    @property
    def width(self) -> int:
        """Values of the flat vector and of the parameters that stay with a client."""
        return sum(self.segments) + sum(self._unsent_sizes[: len(self.members.local)])

    @property
    def num_buffers(self) -> int:
        """Coordinates of the flat vector that are no trained parameters."""
        return sum(self.segments[len(self.members.parameters) :])

    # ---- the global model ----------------------------------------------------------------------------

    def read(self, module: nn.Module | None = None) -> Tensor:
        """`(dim,)` the weights of the global model, or of a client's copy.

        Raises:
            ValueError: If training has replaced one by something of another shape.
        """
        found = self._read_tensors(self.module if module is None else module, self._get, self.sent)
        for name, tensor, shape in zip(self.sent, found, self.shapes, strict=True):
            if tensor.shape != shape:
                raise ValueError(
                    f"training gave {name} the shape {tuple(tensor.shape)}, it was {tuple(shape)}; only "
                    "tensors of a fixed shape can be averaged over clients"
                )
        return flatten(found)

    def _read_tensors(self, module: nn.Module, getters: Sequence[Any], names: Sequence[str]) -> list[Tensor]:
        found = []
        for get, name in zip(getters, names, strict=True):
            try:
                tensor = get(module)
            except AttributeError:
                tensor = None
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    f"training took {name} out of the model, which is averaged over clients under this name; "
                    "build the model in its constructor, in setup or in configure_model"
                )
            found.append(tensor)
        return found

    def parts(self) -> list[Tensor]:
        """The present weights of each segment of the global model."""
        return [get(self.module).detach().reshape(-1) for get in self._get]

    def write(self, weights: Tensor) -> None:
        """Write weights `(dim,)` into the global model."""
        with torch.no_grad():
            for get, view in zip(self._get, unflatten(weights, self.shapes), strict=True):
                get(self.module).copy_(view)

    def constrain(self, weights: Tensor, previous: Tensor, exact: bool = False) -> None:
        """Let tensors be what they are, in place, whatever was decoded (`clients.constraints`).

        Args:
            weights: `(dim,)` the new global model.
            previous: `(dim,)` the last one.
            exact: Is what was decoded the mean of what clients have trained, without an error?
        """
        if not self.constraints and (exact or not self.constant_elements):
            return
        both = zip(unflatten(weights, self.shapes), unflatten(previous, self.shapes), strict=True)
        apply_constraints(
            dict(zip(self.sent, both, strict=True)), self.constraints, self.constant_elements, exact
        )

    def not_finite(self, update: Tensor) -> list[str]:
        """Names of what is not finite in an update `(dim,)`."""
        parts = zip(self.sent, torch.split(update, self.segments), strict=True)
        return [name for name, part in parts if not bool(part.isfinite().all())]

    def begin_round(self) -> None:
        """Forget what the clients of a round that was given up have counted."""
        self.max_counted.zero_()

    def commit(self, counted: Collection[int]) -> None:
        """The round has ended: counters advance by what its longest client has counted, whoever counts."""
        counters = [attrgetter(name)(self.module) for name in self.members.counters]
        ends = torch.split(self.max_counted, [counter.numel() for counter in counters])
        for counter, steps in zip(counters, ends, strict=True):
            counter += steps.to(counter.device).view_as(counter)
        self.max_counted.zero_()

    # ---- a client ------------------------------------------------------------------------------------

    def keep_client(self, module: nn.Module, client: int, before: Mapping[str, Tensor] | None = None) -> None:
        """Take what a client's copy has counted and keeps.

        Args:
            before: Counters as the client found them, where it has trained no copy.
        """
        if not self._get_unsent:
            return
        rest = self._read_tensors(module, self._get_unsent, self.unsent)
        wide = torch.float64 if self.members.integers else torch.float32  # exact up to 2^53
        row = flatten([t.detach().to(torch.promote_types(t.dtype, wide)) for t in rest])
        self.keep_rows([client], row[None], before)

    def keep_rows(
        self, clients: Sequence[int], values: Tensor, before: Mapping[str, Tensor] | None = None
    ) -> None:
        """Take what clients have counted, and what each keeps for itself.

        Args:
            values: `(len(clients), rest_dim)`, local parameters, buffers of floats, of integers and counters.
        """
        if len(self.max_counted):
            names = self.members.counters
            start = flatten([before[n] if before else attrgetter(n)(self.module) for n in names]).cpu()
            most = values[:, -len(self.max_counted) :].amax(0).cpu().round().long() - start
            self.max_counted = torch.maximum(self.max_counted, most)
        if not self.personal.names:
            return
        parts = torch.split(values, self._unsent_sizes, dim=1)
        own = [part for part, is_own in zip(parts, self._is_personal_unsent, strict=True) if is_own]
        for client, row in zip(clients, torch.cat(own, dim=1), strict=True):
            self.personal.keep(client, row)

    def start_weights(self, clients: Sequence[int], weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where a stack of clients starts.

        Args:
            weights: `(dim,)`, the global ones.

        Returns:
            `(num_parameters + rest_dim,)` the parameters that travel and the rest of the global model, and
            `(len(clients), rest_dim)` the rest that each client starts from, None where nobody has its own.
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
        own = iter(self.personal.get_tensors(client).values())
        if client not in self.personal:
            return torch.cat(list(common))
        pairs = zip(common, self._is_personal_unsent, strict=True)
        return torch.cat([next(own).reshape(-1).to(part) if is_own else part for part, is_own in pairs])

    def select_sent_columns(self, updates: Tensor) -> Tensor:
        """Columns `(clients, dim)` that travel, of a stack's `(clients, num_parameters + rest_dim)`."""
        lead, dim = self.num_parameters, sum(self.segments)
        stay = sum(self._unsent_sizes[: len(self.members.local)])
        if not stay:
            return updates[:, :dim]
        return torch.cat([updates[:, :lead], updates[:, lead + stay : dim + stay]], dim=1)

    def freeze_statistics(self, module: nn.Module) -> None:
        """Where buffers are frozen, put layers of a copy that keep running statistics into eval mode."""
        if self.mode == "frozen":
            for layer in layers_with_statistics(module).values():
                layer.training = False


def segment_origins(names: Sequence[str], before: Sequence[str]) -> list[int | None]:
    """For each name of a segment the index of the segment that it was before, None if it was none."""
    index = {name: number for number, name in enumerate(before)}
    return [index.get(name) for name in names]
