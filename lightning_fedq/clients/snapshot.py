"""Snapshot of the training state: pickled once per round, and loaded as an isolated copy for each client.

Every load creates new objects. A client can therefore change any object, container, closure, hook or
optimiser without an effect on the user's objects or on other clients. References inside the state are
preserved: tied tensors, views of one memory (PyTorch and NumPy), weak references, dictionaries with `id`
keys. The bytes do not contain tensors. Their memory is cloned at each load.

Some objects are shared by all clients and not copied: classes, modules, functions without state, data sets
and loaders, loggers, threads, objects of the command line and the compiler, and objects whose `__deepcopy__`
returns the object itself. Objects that the training's code also names by a global (`clients.reachability`)
are shared, too: modules and tensors only if they are frozen.

Random generators restart at each load from a seed of the client. An object that can't be pickled (an open
file, a running generator) raises an error with the path to it.
"""

from __future__ import annotations

import functools
import io
import pickle
import pickletools
import types
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_fedq._lightning import pl
from lightning_fedq.clients.object_table import ClonedMemory, ObjectTable, SharedObject
from lightning_fedq.clients.reachability import find_reachable
from lightning_fedq.clients.reductions import find_reduction, reduce_by_deepcopy
from lightning_fedq.clients.shared_objects import (
    PLAIN,
    FrozenObject,
    copies_itself,
    is_large,
    is_shared,
    is_trainable,
)
from lightning_fedq.data.generator_turns import GENERATORS, is_of_the_process, new_generator

_CONTAINERS = {dict, list, tuple, set}
_APART = 0x9E3779B97F4A7C15
"""Odd number between the seeds of two generators of one copy."""
_OFTEN = 16
"""Loads after which the bytes are optimised. The optimisation costs what about twelve loads save."""
_CURES: dict[Any, str] = {
    types.GeneratorType: "Write it as a class with __next__, or create it in training_step if it is None.",
    _BaseDataLoaderIter: "Keep the DataLoader, and call iter() on it in training_step.",
    io.IOBase: "Open it where it is used.",
}
_WITHOUT_PARTS: tuple[Any, ...] = (type, types.ModuleType, str, Tensor, *weakref.ProxyTypes)
_ROOTS = ("", "optimizers", "lr_scheduler_configs", "precision_plugin", "callbacks", "datamodule", "trainer")
"""Names of a snapshot's roots, in their order."""


class NotCopyableError(ValueError):
    """Error for an object of the training state that can't be pickled, so clients would share it.

    Args:
        reason: Error text of Python.
        path: Keys and attributes that lead to the object, the outermost first.
        cure: Advice for this kind of object. "" gives general advice.
    """

    def __init__(self, reason: str, path: Sequence[str], cure: str = "") -> None:
        super().__init__(reason, path, cure)
        self.reason, self.path, self.cure = reason, path, cure

    def __str__(self) -> str:
        """Return the path to the object, the reason, and the cure."""
        reason, cure = self.reason, self.cure
        if self.path:
            reason = f"{''.join(self.path).lstrip('.')} can't be pickled: {reason}"
            cure = (
                cure or "Give its class a __deepcopy__(self, memo) that returns a copy, or self to share it."
            )
        return f"Each client needs its own copy of the training state, but {reason}. {cure}"


class Twin(NamedTuple):
    """Replacement of an object in a client's copy: a new object that shares the attributes of the original.

    The Trainer, its strategy and its loops are replaced this way, because they can't be copied.

    Args:
        original: Object that is replaced.
        attributes: Attributes of the new object that differ from the original. They are copied.
        kind: Class of the new object. None keeps the class of the original.
        is_separate: Whether the new object takes no attributes of the original.
    """

    original: Any
    attributes: dict[str, Any]
    kind: type | None = None
    is_separate: bool = False


class Snapshot:
    """Training state at the start of a round, from which each client's copy is loaded.

    Args:
        roots: Objects that a client needs. Everything they refer to is copied with them.
        shared: Objects that all clients share.
        twins: Replacements of objects in a client's copy.
        reachable: Objects that code reaches by global names, from an earlier snapshot. None searches for
            them.

    Raises:
        NotCopyableError: If an object can't be pickled, or code names a trainable module by a global.

    Attributes:
        reachable: Objects that code reaches by global names, by `id`, to pass to the next snapshot.
        table: Objects and memory that are not in the bytes.
        code: Functions and classes of the pickled objects, by `id`.
        met: `id` of every object that pickling visited.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        shared: Sequence[Any] = (),
        twins: Sequence[Twin] = (),
        reachable: dict[int, tuple[Any, str]] | None = None,
    ) -> None:
        self.table, self._shared_ids = ObjectTable(), set[int]()
        self.twins = {id(twin.original): twin for twin in twins}
        for one in shared:
            self.share(one)
        modules = [part for root in roots if isinstance(root, nn.Module) for part in root.modules()]
        tensors = [t for part in modules for t in (*part.parameters(False), *part.buffers(False))]
        self.by_id = {id(one): one for one in (*modules, *tensors)}
        self.in_script = dict(_in_scripts(modules))
        optimizers = [one for root in roots if isinstance(root, list) for one in root]
        groups = [g for one in optimizers if isinstance(one, Optimizer) for g in one.param_groups]
        self._trained = {id(parameter) for group in groups for parameter in group["params"]}
        self._frozen: list[FrozenObject] = []
        self.reachable: dict[int, tuple[Any, str]] = reachable or {}
        self.code, self.met = dict[int, Any](), set[int]()
        self._bytes, self._loads = self._dump(list(roots)), 0
        if reachable is None:
            self.reachable = find_reachable(self.code.values(), self.met)
            self._refuse_originals()
            if self.met & self.reachable.keys():
                self._bytes = self._dump(list(roots))
        if self.table.has_overlap:  # a part of a memory was visited before the whole
            self.table.search_largest_first()
            self._bytes = self._dump(list(roots))
        self._entries = dict(enumerate(self.table.entries))

    def _dump(self, roots: list[Any]) -> bytes:
        """Pickle the state. An error names the path to the object that can't be pickled."""
        file = io.BytesIO()
        pickler = _Pickler(file, self)
        try:
            pickler.dump(([twin.original for twin in self.twins.values()], roots, list(self.twins.values())))
        except NotCopyableError:
            raise
        except Exception as error:
            culprit = pickler.last
            cure = next((text for kind, text in _CURES.items() if issubclass(type(culprit), kind)), "")
            reason = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
            raise NotCopyableError(reason, _find_path(roots, culprit), cure) from error
        return file.getvalue()

    def share(self, value: Any) -> int:
        """Share an object among all clients. Return its index in the table."""
        self._shared_ids.add(id(value))
        return self.table.number(value)

    def shared_number(self, value: Any) -> int | None:
        """Return the index of an object that all clients share. None for an object that is copied.

        Raises:
            NotCopyableError: If code names a trainable module by a global, so that it can't be shared.
        """
        if id(value) in self._shared_ids:
            return self.table.number(value)
        name = self.reachable[id(value)][1] if id(value) in self.reachable else ""
        if not name and self.reachable:
            name = self.reachable.get(id(getattr(value, "__dict__", None)), (None, ""))[1]
        if not name:
            return None
        if id(value) in self.by_id or isinstance(value, Optimizer | pl.LightningModule):
            if id(value) not in self.by_id or id(value) in self._trained or is_trainable(value):
                raise _name_clash_error(name, value)
            self._frozen.append(FrozenObject.record(name, value))
        return self.share(value)

    def check_frozen(self) -> None:
        """Check that shared modules and tensors which were frozen are unchanged.

        Raises:
            NotCopyableError: If the values of one have changed.
        """
        for one in self._frozen:
            if one.has_changed():
                what = f"the original {type(one.value).__name__}, which training changes"
                raise _name_clash_error(one.name, one.value, what)

    def _refuse_originals(self) -> None:
        """Raise if a global leads code to the user's Trainer, or to an original part by its `id`."""
        for value, name in self.reachable.values():
            if isinstance(value, pl.Trainer) and id(value) in self.twins:
                raise _name_clash_error(name, value)
            if isinstance(value, dict) and any(type(key) is int and key in self.by_id for key in value):
                raise _name_clash_error(
                    f"{name}, by id", next(self.by_id[k] for k in value if k in self.by_id)
                )

    def load(self, seed: int = 0) -> tuple[list[Any], list[Any]]:
        """Load one client's copy. Return its twins and its roots.

        Args:
            seed: Seed of the copy's random generators.
        """
        self._loads += 1
        if self._loads == _OFTEN:  # memo entries that are used once take a third of the time of a load
            self._bytes = pickletools.optimize(self._bytes)
        for part, training in (mode for one in self._frozen for mode in one.modes):
            part.training = training  # an evaluation may have changed the recorded one
        twins, roots, _ = _Unpickler(self._bytes, _LoadedObjects(self._entries, self.table, seed)).load()
        return twins, roots


class _LoadedObjects(dict[Any, Any]):
    """Objects that `_Pickler.persistent_id` left out of the bytes, by key.

    These are the entries of the table, and new memory and generators for one client, made on demand.
    """

    def __init__(self, entries: dict[int, Any], table: ObjectTable, seed: int) -> None:
        super().__init__(entries)
        self._table, self._seed = table, seed

    def __missing__(self, key: tuple[str, Any]) -> Any:
        kind, item = key
        if kind == "id":
            return id(item)
        if kind == "memory":
            self[key] = self._table.clone(item)
        else:
            self._seed = (self._seed + _APART) % 2**63
            self[key] = new_generator(self._table.entries[item], self._seed)
        return self[key]


class _Unpickler(pickle.Unpickler):
    """Unpickler that reads a snapshot. Since Python 3.13, an instance cannot be given `persistent_load`."""

    def __init__(self, content: bytes, loaded: _LoadedObjects) -> None:
        super().__init__(io.BytesIO(content))
        self._loaded = loaded

    def persistent_load(self, key: Any) -> Any:
        return self._loaded[key]


class _Pickler(pickle.Pickler):
    """Pickler that writes a snapshot.

    Attributes:
        last: Last object that was visited, which names the culprit after an error.
    """

    def __init__(self, file: io.BytesIO, snapshot: Snapshot) -> None:
        super().__init__(file, 5)
        self._snapshot = snapshot
        self.last: Any = None

    def persistent_id(self, value: Any) -> Any:
        """Return the key under which a load finds an object. None for an object that the bytes contain."""
        kind, snapshot = type(value), self._snapshot
        if kind in PLAIN:
            return None
        snapshot.met.add(id(value))
        code = value if kind is types.FunctionType else kind
        snapshot.code[id(code)] = code
        if kind is int:  # the `id` of a copied object is replaced by the `id` of its copy
            return ("id", snapshot.by_id[value]) if value in snapshot.by_id else None
        if kind is ClonedMemory:
            return "memory", value.number
        if kind is SharedObject:
            return snapshot.table.number(value.value)
        # a look at a weak proxy is a look at its target, which may be gone
        if id(value) in snapshot.twins or kind in weakref.ProxyTypes:
            return None
        number = snapshot.shared_number(value)
        if number is not None or kind in _CONTAINERS:
            return number
        if kind in GENERATORS and not is_of_the_process(value):
            return "generator", snapshot.table.number(value)
        self.last = value
        return snapshot.share(value) if is_shared(kind, value) else None

    def reducer_override(self, value: Any) -> Any:
        """Return how pickle rebuilds an object (`clients.reductions`)."""
        kind, snapshot = type(value), self._snapshot
        self.last = value
        if id(value) in snapshot.twins:
            return object.__new__, (snapshot.twins[id(value)].kind or kind,)
        if kind is Twin:
            # a twin inside of another twin's attributes has no object yet, so its class is passed
            is_made = id(value.original) in snapshot.twins
            target = value.original if is_made else SharedObject(value.kind or type(value.original))
            shared = {} if value.is_separate else SharedObject(vars(value.original))
            return _new_twin, (target, shared, value.attributes)
        if id(value) in snapshot.in_script:
            return _get_part_of_script, snapshot.in_script[id(value)]
        if issubclass(kind, pl.LightningDataModule) and not issubclass(kind, nn.Module):
            for held in filter(is_large, vars(value).values()):
                snapshot.share(held)
        reduce = find_reduction(kind)  # type: ignore[arg-type]
        if reduce is not None:
            return reduce(value, snapshot.table)
        if not copies_itself(kind):  # type: ignore[arg-type]
            return NotImplemented
        copied = self.memo.copy()
        known = [part for key, part in snapshot.by_id.items() if key in copied]
        return reduce_by_deepcopy(value, known + [twin.original for twin in snapshot.twins.values()])


def _new_twin(target: Any, shared_attributes: dict[str, Any], own_attributes: dict[str, Any]) -> Any:
    """Set the attributes of a twin: those of the original, then its own. `target` may be its class."""
    target = object.__new__(target) if isinstance(target, type) else target
    vars(target).update(shared_attributes)
    vars(target).update(own_attributes)
    return target


def _get_part_of_script(script: Any, name: str) -> Any:
    """Return a tensor or a part of a copied TorchScript module, by its name."""
    return attrgetter(name)(script)


def _in_scripts(modules: Sequence[nn.Module]) -> Iterator[tuple[int, tuple[Any, str]]]:
    """Yield the `id` of each tensor and part of a TorchScript module, with the module and the name in it.

    `torch.jit.load` makes a new module, and the copied optimiser must refer to the tensors of that module.
    """
    inside: set[int] = set()
    for whole in modules:
        if isinstance(whole, torch.jit.ScriptModule) and id(whole) not in inside:
            parts = [(name, part) for name, part in whole.named_modules() if name]
            inside |= {id(part) for _, part in parts}
            for name, part in (*whole.named_parameters(), *whole.named_buffers(), *parts):
                yield id(part), (whole, name)


def _name_clash_error(name: str, value: Any, what: str = "") -> NotCopyableError:
    """Make the error for code that reaches an original object by a global, not the client's copy."""
    what = what or f"the original {type(value).__name__}, which no client trains"
    return NotCopyableError(
        f"the code names {name} directly: {what}",
        (),
        "Reach it by self (an attribute of the module, self.trainer), not by a global, class or closure.",
    )


def _find_path(roots: Sequence[Any], target: Any) -> list[str]:
    """Return the shortest path to an object, by attributes, keys and closures."""
    seen: set[int] = set()
    names = (f".{name}" if name else "" for name in _ROOTS)
    queue = deque((root, [name]) for root, name in zip(roots, names, strict=True))
    while queue:
        value, path = queue.popleft()
        if value is target:
            return path
        if id(value) not in seen and not issubclass(type(value), _WITHOUT_PARTS):
            seen.add(id(value))
            queue.extend((item, [*path, name]) for name, item in _contained_values(value))
    return [f" {type(target).__name__}"]


def _contained_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that an object holds directly, with their part of the path."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", held) for key, held in value.items())
    elif isinstance(value, list | tuple | set | deque):
        yield from ((f"[{number}]", held) for number, held in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("", value.func), ("", value.args), ("", value.keywords))
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):
                yield f" in the closure of {value.__qualname__}", cell.cell_contents
    for name, held in (getattr(value, "__dict__", None) or {}).items():
        if isinstance(value, nn.Module) and name in ("_modules", "_parameters", "_buffers"):
            yield from ((f".{key}", value) for key, value in held.items())
        else:
            yield f".{name}", held
