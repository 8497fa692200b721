"""Detection of side effects of a client's training beside its update, which are put back or refused.

Only the flat vector goes through the mechanism. Everything else that training may write to is compared with
the start of the round, by identity and version after each client and once a round by content, because a
write through `.data` or numpy leaves no other trace:

* parameters and buffers outside of the vector: refused;
* tensors and NumPy's arrays, or tuples of them, that are plain attributes of the module: scratch of one
  client. The next one finds what the round began with, and so does whoever looks between rounds; a warning
  says so once;
* lists, dictionaries and other objects in attributes, modules that are not registered and NumPy's arrays
  included: refused where tensors of more than one element have come in or have changed, by content as
  well. Single numbers are what a module keeps of its losses;
* attributes of parameters and buffers: as those of the module;
* what an optimiser keeps outside of its state, its parameter groups and single numbers, which every client
  begins anew: refused where it changes, at the first client;
* other callbacks: refused where they keep tensors in the shape of the trained weights, such as an average.

Before an error is raised everything of which there is a copy is put back.
"""

from __future__ import annotations

import copy
import functools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.federation.optimizer_memory import others_of, with_nested
from lightning_fedq.federation.saved_states import SavedStates

_COPIED = 1 << 22
"""Elements up to which a tensor is copied; of larger ones a checksum is kept, and nothing can be put back."""

_CHUNK = 1 << 22
_CURE_PARAMETERS = (
    "give them to the optimiser, or update a copy of the model (an average, a target network) once a round, "
    "in on_train_epoch_end, where the module shows the global model"
)
_CURE_BUFFERS = (
    "make them floating point buffers that change from the first step on, so that buffers='share' carries "
    "them, use layers without statistics (GroupNorm), or compute them in validation"
)
_CURE_INTEGERS = (
    "integers have no mean: use buffers='local', in which every client keeps its own of those that change "
    "from the first step on, or compute them in validation"
)
_CURE_BY_HAND = (
    "in manual optimisation no first step tells which buffers change, so updates carry those of BatchNorm "
    "only: keep others in automatic optimisation, or compute them in validation"
)
_CURE_OPTIMIZERS = (
    "every client begins with a fresh optimiser: let it keep what it learns in self.state, in the state of "
    "an optimiser that it holds, or as a setting of its own in the parameter groups"
)
_DEPTH = 6
_FOREIGN = ("torch.", "pytorch_lightning.", "lightning.", "tqdm.", "rich.", "logging", "lightning_fedq.")
_SCRATCH = (Tensor, tuple, np.ndarray)
_OF_MODULES = set(vars(nn.Module()))
_PER_SAMPLE = {"grad_sample", "summed_grad", "_forward_counter", "_current_grad_sample"}
"""Attributes in which Opacus hands gradients of samples from a backward pass to a step."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Values = Tensor | np.ndarray
"""What is watched: a tensor, or an array of NumPy's without objects."""


class Kept(NamedTuple):
    """A tensor or an array as it was: itself, its version, and its values or their checksum."""

    tensor: Values
    version: int
    values: Values | int | None

    @classmethod
    def of(cls, tensor: Values) -> Kept:
        """Remember a tensor."""
        if isinstance(tensor, np.memmap) and not tensor.flags.writeable:
            return cls(tensor, 0, None)  # a file of data, which nobody can write to
        if isinstance(tensor, np.ndarray):
            return cls(tensor, 0, tensor.copy() if tensor.size <= _COPIED else checksum(tensor))
        small = tensor.numel() <= _COPIED and tensor.layout is torch.strided
        return cls(tensor, _version(tensor), tensor.detach().clone() if small else checksum(tensor))

    def same(self, tensor: Values | None, content: bool) -> bool:
        """Is `tensor` still this one, unchanged?"""
        if tensor is not self.tensor or _version(tensor) != self.version:
            return False
        return not content or self.has_values_of(tensor)

    def has_values_of(self, tensor: Values) -> bool:
        """The same values, bit for bit?"""
        if isinstance(self.values, Tensor | np.ndarray):
            alike = self.values.shape == tensor.shape and self.values.dtype == tensor.dtype
            return alike and torch.equal(_bits(self.values), _bits(tensor))
        return self.values is None or self.values == checksum(tensor)

    def put_back(self) -> bool:
        """Give the tensor its values again. False where there is no copy."""
        if isinstance(self.tensor, Tensor) and isinstance(self.values, Tensor):
            with torch.no_grad():
                self.tensor.data.copy_(self.values)
        elif isinstance(self.tensor, np.ndarray) and isinstance(self.values, np.ndarray):
            if self.tensor.flags.writeable:
                self.tensor[...] = self.values
        else:
            return False
        return True


class Watch:
    """Compares what is outside of the flat vector with the start of a round.

    Args:
        trainer: Of the fit in progress.
        inside: Names of the parameters and buffers that are taken care of.
        withheld: Do clients' metrics stay with the clients? Then no checkpoint may hold a state of theirs.
    """

    def __init__(
        self, trainer: pl.Trainer, inside: Callable[[], set[str]], withheld: Callable[[], bool]
    ) -> None:
        self._module, self._inside, self._withheld = trainer.lightning_module, inside, withheld
        self._saved: SavedStates | None = None
        self._callbacks: list[pl.Callback] = [
            callback
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if not type(callback).__module__.startswith("lightning_fedq.")
        ]
        self._machinery = set(vars(pl.LightningModule())) - {"_example_input_array"}
        self._datamodule = trainer.datamodule  # type: ignore[attr-defined]
        self._skipped = {id(trainer), id(self._datamodule)}
        self._outside: dict[str, Kept] = {}
        self._attributes: list[tuple[str, nn.Module | Tensor, dict[str, Any]]] = []
        self._scratch: dict[int, Kept] = {}
        self._optimizers = with_nested(trainer.optimizers)
        self._others: list[tuple[Optimizer, dict[str, Any]]] = []
        self._of_optimizers: dict[str, Kept | float] = {}
        self._containers: dict[str, dict[str, Kept]] = {}
        self._contents: list[tuple[Any, Any]] = []
        self._averages: dict[str, Kept] = {}
        self._parts_sent: Sequence[Tensor] = ()
        self._told: set[str] = set()
        self._thorough = True

    def begin(self, parts: Sequence[Tensor], data: dict[str, Any]) -> None:
        """Remember the start of a round.

        Args:
            parts: The global weights, a tensor a segment of the flat vector; they stay as they are.
            data: State of the data module, before it was asked for a batch.
        """
        self._saved = None
        if self._withheld():
            self._saved = SavedStates(self._module, self._datamodule, data, self._callbacks)
        self._parts_sent = parts
        self._shapes = {part.shape for part in parts}
        self._dim = sum(part.numel() for part in parts)
        self._outside = {name: Kept.of(tensor) for name, tensor in self._tensors()}
        self._attributes = [(name, part, self._plain(part)) for name, part in self._owners()]
        self._scratch = {
            id(leaf): Kept.of(leaf)
            for _, _, values in self._attributes
            for value in values.values()
            if isinstance(value, _SCRATCH)
            for leaf in _tensors_in(value)
        }
        self._containers = {
            path: {way: Kept.of(tensor) for way, tensor in held.items()}
            for path, held in self._in_containers()
        }
        self._contents = [
            (value, copy.copy(value))
            for _, _, values in self._attributes
            for value in values.values()
            if isinstance(value, list | dict)
        ]
        self._others = [(optimizer, others_of(optimizer, in_groups=False)) for optimizer in self._optimizers]
        self._contents += [
            (value, copy.copy(value))
            for _, values in self._others
            for value in values.values()
            if isinstance(value, list | dict)
        ]
        self._of_optimizers = {path: _kept(leaf) for path, leaf in self._in_optimizers()}
        self._averages = {path: Kept.of(tensor) for path, tensor in self._of_callbacks()}
        self._thorough = True

    def end_client(self, batches: int) -> None:
        """After a client's last batch. The first of a round is looked at as closely as a whole round.

        Args:
            batches: How many the client had.

        Raises:
            ValueError: If it has left something behind.
        """
        if self._saved is not None:
            self._saved.check(batches)
        self._check(content=False)
        self._check_optimizers()
        if self._thorough:
            self._check_closely()
        self._thorough = False

    def check_saved(self) -> None:
        """Before a checkpoint, too.

        Raises:
            ValueError: If a client has changed what checkpoints hold beside parameters and buffers.
        """
        if self._saved is not None:
            self._saved.check()

    def end_clients(self) -> None:
        """After the last client of a round, before its sum is used.

        Raises:
            ValueError: If one of them has left something behind.
        """
        self._check(content=True)
        self._check_optimizers()
        self._check_closely()

    def end_round(self) -> None:
        """Put attributes back. What hooks write to them from now on stays."""
        self.put_back_scratch()
        self._attributes, self._outside, self._scratch, self._averages = [], {}, {}, {}
        self._containers, self._contents, self._parts_sent = {}, [], ()
        self._others, self._of_optimizers, self._saved = [], {}, None

    def put_back(self) -> None:
        """Put back what a round that is given up has left behind, as far as there are copies."""
        now = dict(self._tensors())
        self._put_back([name for name, kept in self._outside.items() if not kept.same(now.get(name), True)])
        self.end_round()

    # ---- parameters and buffers ------------------------------------------------------------------------

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        inside = self._inside()
        for name, tensor in [*self._module.named_parameters(), *self._module.named_buffers()]:
            if name not in inside and not _in_metric(self._module, name):
                yield name, tensor

    def _check(self, content: bool) -> None:
        now = dict(self._tensors())
        names = [*self._outside, *(name for name in now if name not in self._outside)]
        changed = [
            n for n in names if n not in self._outside or not self._outside[n].same(now.get(n), content)
        ]
        if not changed:
            return
        parameters = [name for name, _ in self._module.named_parameters() if name in changed]
        lost = self._put_back(changed)
        kind, cure = ("parameters", _CURE_PARAMETERS) if parameters else ("buffers", _CURE_BUFFERS)
        tensors = [self._outside[name].tensor if name in self._outside else now[name] for name in changed]
        if not parameters and not any(
            isinstance(tensor, Tensor) and tensor.is_floating_point() for tensor in tensors
        ):
            cure = _CURE_INTEGERS
        if not parameters and not self._module.automatic_optimization:
            cure = _CURE_BY_HAND
        raise ValueError(
            f"training changed the {kind} {', '.join(parameters or changed)}, which no update carries: "
            f"clients would mix, and what they wrote would be in the model without noise; {cure}"
            + (f". {', '.join(lost)} could not be put back: do not publish this model" if lost else "")
        )

    def _put_back(self, names: Sequence[str]) -> list[str]:
        lost = []
        for name in names:
            path, _, leaf = name.rpartition(".")
            owner, kept = self._module.get_submodule(path), self._outside.get(name)
            if kept is None:
                owner._parameters.pop(leaf, None)
                owner._buffers.pop(leaf, None)
                continue
            if leaf in owner._buffers and isinstance(kept.tensor, Tensor):
                owner._buffers[leaf] = kept.tensor
            if not kept.put_back():
                lost.append(name)
        return lost

    # ---- plain attributes --------------------------------------------------------------------------------

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        for name, part in self._module.named_modules():
            if not isinstance(part, Metric) and not _in_metric(self._module, name):
                yield name, part

    def _owners(self) -> Iterator[tuple[str, nn.Module | Tensor]]:
        """Modules, parameters and buffers: whatever of the model may be given an attribute."""
        yield from self._parts()
        for name, tensor in [*self._module.named_parameters(), *self._module.named_buffers()]:
            if not _in_metric(self._module, name):
                yield name, tensor

    def _plain(self, part: nn.Module | Tensor) -> dict[str, Any]:
        machinery = self._machinery if isinstance(part, nn.Module) else ()
        return {name: value for name, value in vars(part).items() if name not in machinery}

    def put_back_scratch(self) -> None:
        """Give plain attributes back what they held when the round began."""
        for path, part, before in self._attributes:
            now = self._plain(part)
            for name in [n for n, value in now.items() if self._is_scratch(value, before.get(n, self))]:
                old = before.get(name, self)
                leaves = list(_tensors_in(old)) if isinstance(old, _SCRATCH) else []
                for leaf in leaves:
                    self._scratch[id(leaf)].put_back()
                if old is self:
                    delattr(part, name)
                else:
                    vars(part)[name] = old
                self._tell(f"{path}.{name}".lstrip("."), part, name)

    def _is_scratch(self, value: Any, before: Any) -> bool:
        if not any(isinstance(one, _SCRATCH) for one in (value, before)):
            return False
        now = list(_tensors_in(value)) if isinstance(value, _SCRATCH) else []
        if value is before:
            return any(not self._scratch[id(leaf)].same(leaf, content=True) for leaf in now)
        return bool(now) or isinstance(before, _SCRATCH)

    def _tell(self, path: str, part: nn.Module | Tensor, name: str) -> None:
        recomputed = any(
            name in (getattr(hook, "name", None), getattr(hook, "_tensor_name", None))
            for hook in getattr(part, "_forward_pre_hooks", {}).values()
        )
        if not recomputed and name not in _PER_SAMPLE and path not in self._told:
            self._told.add(path)
            rank_zero_warn(
                f"training left tensors in the attribute {path}, which no update carries: every client "
                "starts with what the round began with, and what it leaves is dropped; make it a floating "
                "point buffer if it is part of the model"
            )

    # ---- optimisers --------------------------------------------------------------------------------------

    def _in_optimizers(self) -> Iterator[tuple[str, Values | float]]:
        """Tensors and numbers that optimisers hold where no client begins anew."""
        known = [one for o in self._optimizers for one in (o, o.state, o.param_groups, *o.param_groups)]
        seen = self._skipped | self._own() | {id(one) for one in (*known, *self._module.modules())}
        for optimizer in self._optimizers:
            for name, value in others_of(optimizer).items():
                yield from _walk(value, f"{type(optimizer).__name__}.{name}", seen, numbers=True)

    def _check_optimizers(self) -> None:
        now = dict(self._in_optimizers())
        paths = [*self._of_optimizers, *(path for path in now if path not in self._of_optimizers)]
        changed = [path for path in paths if not _as_kept(self._of_optimizers.get(path), now.get(path))]
        if not changed:
            return
        for optimizer, before in self._others:
            for name in others_of(optimizer, in_groups=False):
                if name not in before:
                    delattr(optimizer, name)
            vars(optimizer).update(before)
        self._put_contents_back()
        for path in changed:
            kept = self._of_optimizers.get(path)
            if isinstance(kept, Kept):
                kept.put_back()
        raise ValueError(
            f"training changed {', '.join(changed[:4])} of the optimiser, which would go on from client to "
            f"client, past the mechanism; {_CURE_OPTIMIZERS}"
        )

    def _put_contents_back(self) -> None:
        for value, before in self._contents:
            value.clear()
            value.update(before) if isinstance(value, dict) else value.extend(before)

    # ---- what is inside of other things --------------------------------------------------------------------

    def _in_containers(self) -> Iterator[tuple[str, dict[str, Values]]]:
        """Which tensors the lists, dictionaries and other objects in attributes hold, by the way to them."""
        skipped = self._known()
        for path, part in self._owners():
            for name, value in self._plain(part).items():
                attribute = f"{path}.{name}".lstrip(".")
                inside = tree_leaves(value) if isinstance(value, _SCRATCH) else [value]
                held = {
                    way: tensor
                    for number, one in enumerate(inside)
                    if not _plain_values(one)  # which are scratch
                    for way, tensor in _walk(one, f"{attribute}.{number}", skipped)
                    if math.prod(tensor.shape) > 1
                }
                if held:
                    yield attribute, held

    def _known(self) -> set[int]:
        """Identities of what is looked at elsewhere."""
        others = (*self._module.modules(), *self._optimizers)
        return self._skipped | self._own() | {id(one) for one in others}

    def _own(self) -> set[int]:
        """Tensors that the module itself registers.

        A recurrent layer keeps a list of its weights.
        """
        return {id(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())}

    def _of_callbacks(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that callbacks keep in the shape of the trained weights."""
        skipped = self._known()
        shown = {_storage(tensor) for tensor in (*self._module.parameters(), *self._module.buffers())}
        for callback in self._callbacks:
            for path, tensor in _walk(vars(callback), type(callback).__name__, skipped):
                if isinstance(tensor, np.ndarray):
                    continue
                like_weights = tensor.shape in self._shapes or tuple(tensor.shape) == (self._dim,)
                if like_weights and _storage(tensor) not in shown:
                    yield path, tensor

    def _is_of_clients(self, path: str, tensor: Tensor) -> bool:
        """Has it changed, and is not what the server has sent?"""
        if path in self._averages and self._averages[path].same(tensor, content=True):
            return False
        sent = [part for part in self._parts_sent if part.shape == tensor.shape]
        if tuple(tensor.shape) == (self._dim,):
            sent = [torch.cat([part.reshape(-1) for part in self._parts_sent])]
        return not any(torch.equal(tensor.detach().to(part), part) for part in sent)

    def _as_before(self, path: str, held: dict[str, Values]) -> bool:
        before = self._containers.get(path, {})
        return all(way in before and before[way].same(tensor, content=True) for way, tensor in held.items())

    def _put_containers_back(self, taken: Sequence[str]) -> None:
        self._put_contents_back()
        for path in taken:
            for kept in self._containers.get(path, {}).values():
                kept.put_back()
        for path, part, before in self._attributes:
            for name in self._plain(part):
                if f"{path}.{name}".lstrip(".") in taken:
                    vars(part).pop(name)
                    vars(part).update({name: before[name]} if name in before else {})

    def _check_closely(self) -> None:
        now = dict(self._in_containers())
        taken = [path for path, held in now.items() if not self._as_before(path, held)]
        if taken:
            self._put_containers_back(taken)
            raise ValueError(
                f"training put tensors of clients into {', '.join(taken)} of the module, where they would "
                "last; log a metric, keep single numbers (.item()), or empty it before training_step returns"
            )
        kept = dict(self._of_callbacks())
        grown = [path for path, tensor in kept.items() if self._is_of_clients(path, tensor)]
        if any(kept[path].dim() > 1 or kept[path].numel() == self._dim for path in grown):
            for path in grown:
                if path not in self._averages or not self._averages[path].put_back():
                    kept[path].data.zero_()
            raise ValueError(
                f"{grown[0].partition('.')[0]} keeps weights of clients ({', '.join(grown[:4])}), past the "
                "mechanism; average once a round, in on_train_epoch_end or on_validation_end, where the "
                "module shows the global model, or use Lightning's WeightAveraging"
            )


def checksum(tensor: Values) -> int | None:
    """A number that any change of values or their order changes, up to one in 2^64.

    Every value counts times an odd number that is a hash of its place, modulo 2^64. None where values can't
    be read.
    """
    if isinstance(tensor, Tensor) and (
        tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized
    ):
        return None
    flat = _bits(tensor)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    factors = _factors(flat.device, _CHUNK if flat.numel() > _CHUNK else flat.numel())
    for chunk in torch.split(flat, _CHUNK):
        total = total * 0x3F58476D1CE4E5B9 + (factors[: len(chunk)] * chunk).sum()
    return int(total)


@functools.lru_cache(maxsize=2)
def _factors(device: torch.device, length: int) -> Tensor:
    """Odd hashes of 0, 1, 2, ..., int64."""
    places = torch.arange(length, dtype=torch.int64, device=device).mul_(0x1E3779B97F4A7C15)
    places.bitwise_xor_(places >> 29).mul_(0x3F58476D1CE4E5B9)
    return places.bitwise_xor_(places >> 32).bitwise_or_(1)


def _bits(tensor: Values) -> Tensor:
    if isinstance(tensor, np.ndarray):
        array = np.ascontiguousarray(tensor).reshape(-1)
        return torch.from_numpy((array if array.flags.writeable else array.copy()).view(np.uint8))
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view(_INTEGERS[flat.element_size()])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _version(tensor: Values) -> int:
    return 0 if isinstance(tensor, np.ndarray) or tensor.is_inference() else tensor._version


def _in_metric(module: nn.Module, name: str) -> bool:
    """Is this inside of a metric? Its states are what is logged of clients, and Lightning resets them."""
    part: Any = module
    for step in name.split(".")[:-1]:
        part = getattr(part, step)
        if isinstance(part, Metric):
            return True
    return False


def _tensors_in(value: Any) -> Iterator[Values]:
    return (leaf for leaf in tree_leaves(value) if _plain_values(leaf))


def _plain_values(value: Any) -> TypeGuard[Values]:
    return isinstance(value, Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject)


def _kept(leaf: Values | float) -> Kept | float:
    return Kept.of(leaf) if isinstance(leaf, Values) else leaf


def _as_kept(kept: Kept | float | None, leaf: Values | float | None) -> bool:
    if isinstance(kept, Kept):
        return isinstance(leaf, Values) and kept.same(leaf, content=True)
    return not isinstance(leaf, Values) and (kept is leaf or kept == leaf)


def _walk(value: Any, path: str, skipped: set[int], depth: int = 0, numbers: bool = False) -> Iterator[Any]:
    """Tensors that can be reached from a value, with the way to them. Into no other library's objects.

    Args:
        value: Where to begin.
        path: The way to it.
        skipped: Identities of what is not looked into.
        depth: How deep this is.
        numbers: Yield single numbers, too.
    """
    if id(value) in skipped or depth > _DEPTH:
        return
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield path, value
        return
    if isinstance(value, Tensor) or (numbers and isinstance(value, int | float | complex)):
        yield path, value
        return
    if isinstance(value, Metric | torch.utils.data.Dataset | torch.utils.data.DataLoader):
        return
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        inner = enumerate(value)
    elif isinstance(value, nn.Module):
        inner = [*value.named_parameters(), *value.named_buffers(), *_attributes_within(value)]
    elif isinstance(value, np.ndarray):
        inner = enumerate(value.flat)
    elif isinstance(value, types.MethodType):
        inner = [("self", value.__self__), ("function", value.__func__)]
    elif isinstance(value, functools.partial):
        inner = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    elif isinstance(value, Optimizer) or not _foreign(value):
        inner = _attributes_of(value).items()
    skipped = skipped | {id(value)}
    for name, part in list(inner):
        yield from _walk(part, f"{path}.{name}", skipped, depth + 1, numbers)


def _attributes_within(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes of a module and of those inside of it that are no parameters, buffers or modules."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _OF_MODULES:
                yield f"{path}.{name}", value


def _attributes_of(value: Any) -> dict[str, Any]:
    """Attributes of an object, those in slots included, or what a function encloses."""
    if isinstance(value, types.FunctionType):
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        filled = {name: cell.cell_contents for name, cell in cells.items() if _filled(cell)}
        return {**filled, "defaults": value.__defaults__, "keywords": value.__kwdefaults__, **vars(value)}
    slots = [
        slot
        for kind in type(value).__mro__
        if "__slots__" in vars(kind)
        for slot in vars(kind).values()
        if isinstance(slot, types.MemberDescriptorType) and hasattr(value, slot.__name__)
    ]
    held = {slot.__name__: slot.__get__(value) for slot in slots}
    return {**held, **getattr(value, "__dict__", {})}


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _foreign(value: Any) -> bool:
    """Is this of a library that looks after its own objects?"""
    if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
        return True
    home = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    return f"{home}.".startswith(_FOREIGN)
