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

import argparse
import concurrent.futures
import contextvars
import ctypes
import enum
import functools
import io
import logging
import math
import pickle
import pickletools
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torchmetrics import Metric

from lightning_fedq._lightning import pl
from lightning_fedq.clients.reachability import find_reachable, is_library_code
from lightning_fedq.data.generator_turns import GENERATORS, is_of_the_process, new_generator

_OUTSIDE: tuple[type, ...] = (
    *(type, types.ModuleType, types.CodeType, property, contextvars.ContextVar, torch.fx.Graph),
    torch.jit.ScriptFunction,
    *(Dataset, DataLoader, Sampler, pl.loggers.Logger, logging.Logger, argparse.ArgumentParser),
    *(pl.Trainer, pl.strategies.Strategy, pl.accelerators.Accelerator),
    *(threading.Thread, concurrent.futures.Executor, np.memmap, enum.Enum),
)
"""Classes whose instances all clients share."""
_MACHINERY = ("jsonargparse", "torch._dynamo", "torch._inductor", "torch._functorch")
"""Packages of the command line and the compiler, whose objects all clients share."""
_PLAIN = {type(None), bool, float, complex, str, bytes, frozenset}
_CONTAINERS = {dict, list, tuple, set}
_FIXED = {*_PLAIN, int, tuple, torch.dtype, torch.device, torch.Size, np.dtype}
_DISPATCH = Tensor.__torch_dispatch__
_APART = 0x9E3779B97F4A7C15
_LARGE, _MANY = 1 << 18, 10_000
"""Tensor values and container entries above which an attribute of a data module counts as data."""
_DEVICES = ("cpu", "cuda", "mps")
_CURES: dict[Any, str] = {
    types.GeneratorType: "Write it as a class with __next__, or create it in training_step if it is None.",
    _BaseDataLoaderIter: "Keep the DataLoader, and call iter() on it in training_step.",
    io.IOBase: "Open it where it is used.",
}
_OFTEN = 16
"""Loads after which the bytes are optimised. The optimisation costs what about twelve loads save."""
_ROOTS = ("", "optimizers", "lr_scheduler_configs", "precision_plugin", "callbacks", "datamodule", "trainer")


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
        if not self.path:
            return f"Each client needs its own copy of the training state, but {self.reason}. {self.cure}"
        cure = self.cure or (
            "Give its class a __deepcopy__(self, memo) that returns a copy, or self to share it."
        )
        return (
            "Each client needs its own copy of the training state, but "
            f"{''.join(self.path).lstrip('.')} can't be pickled: {self.reason}. {cure}"
        )


class _Placeholder(NamedTuple):
    """Reference to an entry of the snapshot's table that the bytes do not contain.

    Args:
        kind: "memory" for memory that each load clones, or "original" for an object that is passed as it is.
        number: Index in the table.
    """

    kind: str
    number: int


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


class SharedObject(NamedTuple):
    """Marker for an object that all clients share, even if the snapshot also has a copy of it."""

    value: Any


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
        table: Objects and memory that are not in the bytes. A load takes them from here.
        code: Functions and classes of the pickled objects, by `id`.
        met: `id` of every object that pickling visited.
        generators: Random generators that the state holds.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        shared: Sequence[Any] = (),
        twins: Sequence[Twin] = (),
        reachable: dict[int, tuple[Any, str]] | None = None,
    ) -> None:
        self.table: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._kept: set[int] = set()
        # pieces of memory: device, first address, end address, index in the table
        self._pieces: list[tuple[torch.device, int, int, int]] = []
        self._overlap = False
        self.fixed: dict[int, Any] = {}
        self._used: dict[int, Tensor] = {}
        self.twins = {id(twin.original): twin for twin in twins}
        for one in shared:
            self.add_shared(one)
        modules = [part for root in roots if isinstance(root, nn.Module) for part in root.modules()]
        tensors = [t for part in modules for t in (*part.parameters(False), *part.buffers(False))]
        self.by_id = {id(one): one for one in (*modules, *tensors)}
        self.in_script = dict(_in_scripts(modules))
        optimizers = [one for root in roots if isinstance(root, list) for one in root]
        groups = [g for one in optimizers if isinstance(one, Optimizer) for g in one.param_groups]
        self._trained = {id(parameter) for group in groups for parameter in group["params"]}
        self._frozen: list[tuple[str, Any, list[str], list[tuple[nn.Module, bool]]]] = []
        self.reachable: dict[int, tuple[Any, str]] = reachable or {}
        self.code, self.met = dict[int, Any](), set[int]()
        self.generators = list[Any]()
        self._bytes, self._loads = self._dump(list(roots)), 0
        if reachable is None:
            self.reachable = find_reachable(self.code.values(), self.met)
            self._refuse_originals()
            if self.met & self.reachable.keys():
                self._bytes = self._dump(list(roots))
        if self._overlap:
            # a part of a memory was visited before the whole: pickle again, with the largest pieces first
            self._pieces.sort(key=lambda piece: piece[1] - piece[2])
            self._bytes = self._dump(list(roots))
        self.fixed = dict(enumerate(self.table))

    def _dump(self, roots: list[Any]) -> bytes:
        """Pickle the state. An error names the path to the object that can't be pickled."""
        file = io.BytesIO()
        pickler = self._pickler = _Pickler(file, self)
        try:
            pickler.dump(([twin.original for twin in self.twins.values()], roots, list(self.twins.values())))
        except NotCopyableError:
            raise
        except Exception as error:
            last = pickler.last
            cure = next((text for kind, text in _CURES.items() if isinstance(last, kind)), "")
            reason = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
            raise NotCopyableError(reason, _find_path(roots, last), cure) from error
        return file.getvalue()

    def shared_objects(self, other_snapshot: Snapshot) -> list[Any]:
        """Return objects that both snapshots copy, and this snapshot's random generators."""
        mine, theirs = self.copied(), other_snapshot.copied()
        return [value for key, value in mine.items() if key in theirs] + self.generators

    def copied(self) -> dict[int, Any]:
        """Return the objects whose copies a client may change, by `id`."""
        # objects that functions hold have their own entries
        fixed = (*_FIXED, types.FunctionType, types.BuiltinFunctionType)
        values = (value for _, value in self._pickler.memo.copy().values())
        return {id(value): value for value in values if not isinstance(value, fixed)}

    def number(self, value: Any) -> int:
        """Return the index of an object in the table, and add the object if it is new."""
        number = self._numbers.setdefault(id(value), len(self.table))
        if number == len(self.table):
            self.table.append(value)
        return number

    def add_shared(self, value: Any) -> int:
        """Share an object among all clients. Return its index in the table."""
        self._kept.add(id(value))
        return self.number(value)

    def place(self, value: Any) -> int | None:
        """Return the index of an object that all clients share. None for an object that is copied.

        Raises:
            NotCopyableError: If code names a trainable module by a global, so that it can't be shared.
        """
        if id(value) in self._kept:
            return self._numbers[id(value)]
        name = self.reachable[id(value)][1] if id(value) in self.reachable else ""
        if not name and self.reachable:
            name = self.reachable.get(id(getattr(value, "__dict__", None)), (None, ""))[1]
        if not name:
            return None
        if id(value) in self.by_id or isinstance(value, Optimizer | pl.LightningModule):
            if id(value) not in self.by_id or id(value) in self._trained or _is_trainable(value):
                raise _name_clash_error(name, value)
            self._frozen.append((name, value, _checksums(value), _modes(value)))
        return self.add_shared(value)

    def check_frozen(self) -> None:
        """Check that shared modules and tensors which were frozen are unchanged.

        Raises:
            NotCopyableError: If the values of one have changed.
        """
        for name, value, sums, _ in self._frozen:
            if _checksums(value) != sums:
                raise _name_clash_error(
                    name, value, f"the original {type(value).__name__}, which training changes"
                )

    def _refuse_originals(self) -> None:
        """Raise if a global leads code to the user's Trainer, or to an original part by its `id`."""
        for value, name in self.reachable.values():
            if isinstance(value, pl.Trainer) and id(value) in self.twins:
                raise _name_clash_error(name, value)
            if isinstance(value, dict) and any(type(key) is int and key in self.by_id for key in value):
                raise _name_clash_error(
                    f"{name}, by id", next(self.by_id[k] for k in value if k in self.by_id)
                )

    def memory(self, flat: Tensor) -> tuple[_Placeholder, int]:
        """Return the piece of memory that contains these bytes, and their offset in it in bytes.

        Tensors that share memory refer to one piece, so their copies share memory, too.

        Args:
            flat: All bytes of a storage or of an array, uint8.
        """
        start, end, device = flat.data_ptr(), flat.data_ptr() + flat.numel(), flat.device
        for other, first, last, number in self._pieces:
            if device == other and start < last and first < end:
                if first <= start and end <= last:
                    return _Placeholder("memory", number), start - first
                self._overlap = True
        self.table.append(flat)
        self._pieces.append((device, start, end, len(self.table) - 1))
        return _Placeholder("memory", len(self.table) - 1), 0

    def load(self, seed: int = 0) -> tuple[list[Any], list[Any]]:
        """Load one client's copy. Return its twins and its roots.

        Args:
            seed: Seed of the copy's random generators.
        """
        self._loads += 1
        if self._loads == _OFTEN:  # memo entries that are used once take a third of the time of a load
            self._bytes = pickletools.optimize(self._bytes)
        for *_, modes in self._frozen:  # an evaluation may have changed the modes of shared modules
            for part, training in modes:
                part.training = training
        twins, roots, _ = _Unpickler(self._bytes, _LoadedObjects(self, seed)).load()
        return twins, roots

    def clone(self, number: int) -> Tensor:
        """Clone a piece of memory. The last clone's memory is reused if nothing refers to it."""
        whole, last = self.table[number], self._used.get(number)
        if last is None or torch._C._storage_Use_Count(last.untyped_storage()._cdata) > 2:
            last = self._used[number] = torch.empty_like(whole)
        return last.copy_(whole)


class _LoadedObjects(dict[Any, Any]):
    """Objects that `_Pickler.persistent_id` left out of the bytes, by key.

    These are the entries of the table, and new memory and generators for one client, made on demand.
    """

    def __init__(self, snapshot: Snapshot, seed: int) -> None:
        super().__init__(snapshot.fixed)
        self._world, self._seed = snapshot, seed

    def __missing__(self, key: tuple[str, Any]) -> Any:
        kind, item = key
        if kind == "id":
            return id(item)
        if kind == "memory":
            self[key] = self._world.clone(item)
        else:
            self._seed = (self._seed + _APART) % 2**63
            self[key] = new_generator(self._world.table[item], self._seed)
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
        kind, world = type(value), self._snapshot
        if kind in _PLAIN:
            return None
        world.met.add(id(value))
        code = value if kind is types.FunctionType else kind
        world.code[id(code)] = code
        if kind is int:  # the `id` of a copied object is replaced by the `id` of its copy
            known = world.by_id.get(value)
            return None if known is None else ("id", known)
        if kind is _Placeholder:
            return value.number if value.kind == "original" else tuple(value)
        if kind is SharedObject:
            return world.number(value.value)
        if id(value) in world.twins:
            return None
        place = world.place(value)
        if place is not None or kind in _CONTAINERS:
            return place
        if kind in GENERATORS and not is_of_the_process(value):
            world.generators.append(value)
            return "generator", world.number(value)
        self.last = value
        return world.add_shared(value) if _is_shared(kind, value) else None

    def reducer_override(self, value: Any) -> Any:
        """Return how pickle rebuilds an object: a function, its arguments, its state, its contents."""
        kind, world = type(value), self._snapshot
        self.last = value
        if id(value) in world.twins:
            return object.__new__, (world.twins[id(value)].kind or kind,)
        if kind is Twin:
            made = (
                value.original
                if id(value.original) in world.twins
                else SharedObject(value.kind or type(value.original))
            )
            return _twin, (
                made,
                {} if value.is_separate else SharedObject(vars(value.original)),
                value.attributes,
            )
        if id(value) in world.in_script:
            return _of_script, world.in_script[id(value)]
        reducer = _find_reducer(kind)  # type: ignore[arg-type]
        return NotImplemented if reducer is None else reducer(self, value)

    # Each method below returns the pickle reduction of one kind of object, see `_WAYS`.

    def _script(self, value: Any) -> Any:
        file = io.BytesIO()
        torch.jit.save(value, file)
        return _load_script, (file.getvalue(),)

    def _attributes(self, value: Any) -> Any:
        return object.__new__, (type(value),), vars(value), None, None, _fill

    def _datamodule(self, value: Any) -> Any:
        for held in vars(value).values():
            if _is_large(held):
                self._snapshot.add_shared(held)
        return self._attributes(value)

    def _reduce_by_deepcopy(self, value: Any) -> Any:
        """Copy an object by its class's own `__deepcopy__`, with a memo of parts that are copied already."""
        begun = self.memo.copy()
        known = [part for key, part in self._snapshot.by_id.items() if key in begun]
        known += [twin.original for twin in self._snapshot.twins.values()]
        return _deepcopy_with_known, (self._original(value), [(self._original(part), part) for part in known])

    def _original(self, value: Any) -> _Placeholder:
        return _Placeholder("original", self._snapshot.number(value))

    def _tensor(self, value: Any) -> Any:
        world, kind, grad = self._snapshot, type(value), value.requires_grad and value.is_leaf
        own_layout = value.layout is not torch.strided or value.is_quantized
        if own_layout or value.device.type not in _DEVICES or kind.__torch_dispatch__ is not _DISPATCH:
            return _deepcopy_with_known, (self._original(value), [])
        value_ = value.detach() if not value.is_leaf else value
        storage = value_.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
        memory, behind = world.memory(flat)
        offset = value_.storage_offset() + behind // value.element_size()
        args = memory, value.dtype, offset, tuple(value.shape), value.stride(), kind, grad
        hooks = list((value._backward_hooks or {}).values())
        later = list((getattr(value, "_post_accumulate_grad_hooks", None) or {}).values())
        own, last = vars(value), value.grad if value.is_leaf else None
        if last is None and not hooks and not later and not own:
            return _new_tensor, args
        return _new_tensor, args, (last, hooks, later, own), None, None, _fill_tensor

    def _array(self, value: Any) -> Any:
        if value.dtype.hasobject:
            return NotImplemented
        base = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        if isinstance(base, np.memmap):
            return _identity, (self._original(value),)
        owner = base if base.flags.c_contiguous else base.T
        if not owner.flags.c_contiguous or not owner.size:
            return np.array, (self._original(value),)
        address = owner.__array_interface__["data"][0]
        self._original(owner)  # the table keeps the owner alive, so its address stays valid
        raw = np.frombuffer((ctypes.c_uint8 * owner.nbytes).from_address(address), np.uint8)
        memory, behind = self._snapshot.memory(torch.from_numpy(raw))
        offset = value.__array_interface__["data"][0] - address + behind
        return _new_array, (memory, value.shape, value.dtype, offset, value.strides, value.flags.writeable)

    def _function(self, value: Any) -> Any:
        code, names = self._original(value.__code__), self._original(value.__globals__)
        args = code, names, value.__name__, value.__closure__
        state = value.__defaults__, value.__kwdefaults__, value.__qualname__, value.__module__, vars(value)
        return _new_function, args, state, None, None, _fill_function

    def _cell(self, value: Any) -> Any:
        try:
            return types.CellType, (), (value.cell_contents,), None, None, _fill_cell
        except ValueError:  # empty
            return types.CellType, ()

    def _method(self, value: Any) -> Any:
        return types.MethodType, (value.__func__, value.__self__)

    def _weak(self, value: Any) -> Any:
        target = value()
        return (_dead_reference, ()) if target is None else (weakref.ref, (target, value.__callback__))

    def _proxy(self, value: Any) -> Any:
        try:
            return weakref.proxy, (value.__reduce__.__self__,)
        except ReferenceError:
            return _dead_proxy, ()

    def _weak_dict(self, value: Any) -> Any:
        return type(value), (), None, None, iter(list(value.items()))

    def _weak_set(self, value: Any) -> Any:
        return type(value), (), list(value), None, None, _fill_set

    def _cache(self, value: Any) -> Any:
        return _new_cache, (value.__wrapped__, value.cache_parameters())

    def _view(self, value: Any) -> Any:
        return types.MappingProxyType, (dict(value),)

    def _generator(self, value: Any) -> Any:
        """Rebuild a random generator of a subclass: its attributes, and the draws of the library's class."""
        # `gauss_next` is a stored draw, not an attribute of the subclass
        attributes = {name: item for name, item in vars(value).items() if name != "gauss_next"}
        return _new_of_kind, (type(value), new_generator(value, 0)), attributes, None, None, _fill

    def _lock(self, value: Any) -> Any:
        return (threading.Lock if type(value) is type(threading.Lock()) else threading.RLock), ()


_WAYS: dict[Any, Callable[[_Pickler, Any], Any]] = {
    **dict.fromkeys(GENERATORS, _Pickler._generator),
    torch.jit.ScriptModule: _Pickler._script,
    Tensor: _Pickler._tensor,
    nn.Module: _Pickler._attributes,
    pl.LightningDataModule: _Pickler._datamodule,
    Optimizer: _Pickler._attributes,
    np.ndarray: _Pickler._array,
    types.FunctionType: _Pickler._function,
    types.CellType: _Pickler._cell,
    types.MethodType: _Pickler._method,
    weakref.ProxyType: _Pickler._proxy,
    weakref.CallableProxyType: _Pickler._proxy,
    weakref.ReferenceType: _Pickler._weak,
    weakref.WeakKeyDictionary: _Pickler._weak_dict,
    weakref.WeakValueDictionary: _Pickler._weak_dict,
    weakref.WeakSet: _Pickler._weak_set,
    functools._lru_cache_wrapper: _Pickler._cache,
    types.MappingProxyType: _Pickler._view,
    type(threading.Lock()): _Pickler._lock,
    type(threading.RLock()): _Pickler._lock,
}
"""Reductions of classes that pickle can't handle, or whose shared memory and references it would lose."""


@functools.cache
def _find_reducer(kind: type) -> Callable[[_Pickler, Any], Any] | None:
    """Return the reduction of a class from `_WAYS`, or by `__deepcopy__`. None leaves it to pickle."""
    reducer = next((reduce for parent, reduce in _WAYS.items() if issubclass(kind, parent)), None)
    return _Pickler._reduce_by_deepcopy if reducer is None and _copies_itself(kind) else reducer


@functools.cache
def _copies_itself(kind: type) -> bool:
    """Return whether a class defines `__deepcopy__` in Python. False for tensors, modules and optimisers."""
    owner = next((base for base in kind.__mro__ if "__deepcopy__" in vars(base)), None)
    if owner is None or issubclass(kind, (Tensor, nn.Module, Optimizer)):
        return False
    return isinstance(vars(owner)["__deepcopy__"], types.FunctionType) and owner.__module__ != "weakref"


@functools.cache
def _is_program_object(kind: type) -> bool:
    """Return whether all clients share instances of this class, as the program's own machinery."""
    if issubclass(kind, (nn.Module, Tensor, Optimizer, pl.LightningDataModule)):
        return False
    return kind is object or issubclass(kind, _OUTSIDE) or str(kind.__module__).startswith(_MACHINERY)


def _is_shared(kind: type, value: Any) -> bool:
    """Return whether all clients share an object, by its class or its content."""
    if kind is types.FunctionType:
        return _is_stateless(value)
    if _copies_itself(kind):
        return value.__deepcopy__({}) is value
    if isinstance(value, io.IOBase):  # share files that are only written to: readers would not be isolated
        return not value.closed and value.writable() and not value.readable()
    return _is_program_object(kind) or kind in GENERATORS


def _is_stateless(function: types.FunctionType) -> bool:
    """Return whether a function has no closure, attributes or mutable defaults, or is of a library."""
    if (function.__module__ or "").startswith("jsonargparse"):
        return True
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    fixed = all(type(one) in _FIXED or isinstance(one, type) or _is_module_function(one) for one in defaults)
    if function.__closure__ is None and not function.__dict__ and fixed:
        return True
    return is_library_code(function) and _is_named(function)


def _is_named(function: types.FunctionType) -> bool:
    """Return whether the function's module has it under its qualified name, as torch's wrapped `SGD.step`."""
    try:
        return attrgetter(function.__qualname__)(sys.modules[function.__module__]) is function
    except (KeyError, AttributeError):
        return False


def _is_module_function(value: Any) -> bool:
    """Return whether a value is a builtin function of a module, not a bound method."""
    owner = getattr(value, "__self__", None)
    return isinstance(value, types.BuiltinFunctionType) and isinstance(owner, types.ModuleType | type(None))


def _get_tensors(value: Any) -> list[Tensor]:
    """Return the parameters and buffers of a module, or the tensor itself."""
    return [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value]


def _is_trainable(value: Any) -> bool:
    """Return whether training may change a module or a tensor."""
    if isinstance(value, pl.LightningModule | Metric):
        return True
    return any(tensor.requires_grad for tensor in _get_tensors(value))


def _checksums(value: Any) -> list[str]:
    """Return sums of values and of their squares per tensor, to detect changes."""
    wide = [tensor.detach().double() for tensor in _get_tensors(value)]
    return [f"{float(tensor.sum())!r} {float(tensor.square().sum())!r}" for tensor in wide]


def _modes(value: Any) -> list[tuple[nn.Module, bool]]:
    """Return the training mode of each part of a module."""
    return [(part, part.training) for part in value.modules()] if isinstance(value, nn.Module) else []


def _is_large(value: Any) -> bool:
    """Return whether a data module's attribute is large enough to count as data, which clients share."""
    if isinstance(value, Tensor | np.ndarray):
        return math.prod(value.shape) > _LARGE
    return isinstance(value, list | tuple | dict | set) and len(value) > _MANY


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


# ---- loading ------------------------------------------------------------------------------------------
# Functions that pickle calls to rebuild the objects of a client's copy.


def _load_script(code: bytes) -> Any:
    return torch.jit.load(io.BytesIO(code))  # type: ignore[no-untyped-call]


def _of_script(script: Any, name: str) -> Any:
    return attrgetter(name)(script)


def _deepcopy_with_known(value: Any, memo: list[tuple[Any, Any]]) -> Any:
    return value.__deepcopy__({id(one): made for one, made in memo})


def _new_tensor(
    memory: Tensor, dtype: Any, offset: int, shape: Any, stride: Any, kind: Any, grad: bool
) -> Any:
    made = torch.empty(0, dtype=dtype, device=memory.device)
    made.set_(memory.untyped_storage(), offset, shape, stride)
    if kind is Tensor:
        return made.requires_grad_(grad)
    return Tensor._make_subclass(kind, made, grad)


def _new_array(memory: Tensor, shape: Any, dtype: Any, offset: int, strides: Any, writeable: bool) -> Any:
    made: Any = np.ndarray(shape, dtype, memory.view(-1).numpy(), offset, strides)  # type: ignore[call-overload]
    made.flags.writeable = writeable
    return made


def _identity(value: Any) -> Any:
    return value


def _new_function(code: Any, names: Any, name: str, cells: Any) -> Any:
    return types.FunctionType(code, names, name, None, cells)


def _new_cache(function: Any, settings: Any) -> Any:
    return functools.lru_cache(**settings)(function)


def _dead_reference() -> None:
    """Return None, as a weak reference to a deleted object does."""


def _dead_proxy() -> Any:
    """Return a weak proxy of an object that is deleted at once."""
    return weakref.proxy(_DeadReferent())


class _DeadReferent:
    """Target of dead weak proxies."""


def _new_of_kind(kind: Any, like: Any) -> Any:
    """Make a random generator of a subclass with the state of a generator of the library's class."""
    own: Any = type(like)
    if own is torch.Generator:
        return kind.__new__(kind, device=like.device).set_state(like.get_state())
    made = kind.__new__(kind)
    if own is np.random.Generator:
        own.__init__(made, like.bit_generator)
    elif own is np.random.RandomState:
        own.__init__(made)
        own.set_state(made, like.get_state())
    elif issubclass(kind, random.SystemRandom):  # has no state, because it asks the operating system
        made.gauss_next = None
    else:
        own.setstate(made, like.getstate())
    return made


def _fill(target: Any, state: Any) -> None:
    vars(target).update(state)


def _twin(target: Any, attributes: dict[str, Any], twin_attributes: dict[str, Any]) -> Any:
    target = object.__new__(target) if isinstance(target, type) else target
    vars(target).update(attributes)
    vars(target).update(twin_attributes)
    return target


def _fill_tensor(target: Any, state: Any) -> None:
    target.grad, hooks, later, own = state
    for hook in hooks:
        target.register_hook(hook)
    for hook in later:
        target.register_post_accumulate_grad_hook(hook)
    vars(target).update(own)


def _fill_function(target: Any, state: Any) -> None:
    target.__defaults__, target.__kwdefaults__, target.__qualname__, target.__module__, own = state
    vars(target).update(own)


def _fill_cell(target: Any, state: Any) -> None:
    (target.cell_contents,) = state


def _fill_set(target: Any, state: Any) -> None:
    target.update(state)


# ---- errors -------------------------------------------------------------------------------------------


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
        if id(value) not in seen and not isinstance(value, type | types.ModuleType | str | Tensor):
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
