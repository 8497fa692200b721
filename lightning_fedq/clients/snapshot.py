"""A client's world as bytes: whatever the user's fit holds, pickled once a round and loaded for each client.

What is loaded is new: nothing that a client writes to, in whatever object, container, closure, hook or
optimiser, is the user's or another client's. References inside the world keep: ties of tensors, views of one
memory (PyTorch's and NumPy's), weak references, dictionaries by `id`. Tensors are not in the bytes; their
memory is cloned at each load.

Outside, and the same for all clients, are classes, modules, functions without memory, data sets and loaders,
loggers, threads, what the command line and the compiler hold, objects whose `__deepcopy__` returns
themselves, and those that the training's code also names by a global (`clients.reachability`): modules and
tensors only as long as they are frozen. Random generators
begin anew with each load, from a seed of the client's own. What has no bytes (an open file, a running
generator) is refused by the way to it.
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
"""What stays outside of every world, as it is."""
_MACHINERY = ("jsonargparse", "torch._dynamo", "torch._inductor", "torch._functorch")
"""Packages whose objects and functions belong to the program: the command line, the compiler."""
_PLAIN = {type(None), bool, float, complex, str, bytes, frozenset}
_CONTAINERS = {dict, list, tuple, set}
_FIXED = {*_PLAIN, int, tuple, torch.dtype, torch.device, torch.Size, np.dtype}
_DISPATCH = Tensor.__torch_dispatch__
_APART = 0x9E3779B97F4A7C15
_LARGE, _MANY = 1 << 18, 10_000
"""Numbers of a tensor, and entries of a container, above which a data module's attribute is data."""
_DEVICES = ("cpu", "cuda", "mps")
_CURES: dict[Any, str] = {
    types.GeneratorType: "write it as a class with __next__, or begin it in training_step, if it is None",
    _BaseDataLoaderIter: "keep the DataLoader, and call iter() on it in training_step, if there is none yet",
    io.IOBase: "open it where it is used",
}
_OFTEN = 16
"""Loads of a world after which its bytes are made shorter, which takes as long as a dozen loads save."""
_ROOTS = ("", "optimizers", "lr_scheduler_configs", "precision_plugin", "callbacks", "datamodule", "trainer")


class NotCopyableError(ValueError):
    """Something that a training holds has no bytes, so that clients would share it.

    Args:
        reason: What Python says.
        path: Keys and attributes that lead to it, the outermost first.
        cure: What to do about this kind of object; "" is what helps with any.
    """

    def __init__(self, reason: str, path: Sequence[str], cure: str = "") -> None:
        super().__init__(reason, path, cure)
        self.reason, self.path, self.cure = reason, path, cure

    def __str__(self) -> str:
        """The way to it, and the cure."""
        if not self.path:
            return (
                f"every client trains in a world of its own, loaded from bytes, and {self.reason}; "
                f"{self.cure}"
            )
        cure = self.cure or (
            "give its class a __deepcopy__(self, memo) that returns self (all clients then share it) or a "
            "new one, or open it where it is used"
        )
        return (
            "every client trains in a world of its own, loaded from bytes, and "
            f"{''.join(self.path).lstrip('.')} can't be pickled: {self.reason}; {cure}"
        )


class _Placeholder(NamedTuple):
    """Stands for something that is not in the bytes: a "memory", or an "original"."""

    kind: str
    number: int


class Twin(NamedTuple):
    """Stands for a new object with attributes of its own, and those of another one, which are not copied.

    Args:
        original: Object that it stands beside.
        attributes: Attributes of the new object alone.
        kind: Class of the new object; None is that of the other.
        is_separate: Whether the new object has none of the other's attributes.
    """

    original: Any
    attributes: dict[str, Any]
    kind: type | None = None
    is_separate: bool = False


class SharedObject(NamedTuple):
    """Stands for an object that is the same for all clients, whether or not the world has one like it."""

    value: Any


class Snapshot:
    """Beginning of every client, as bytes.

    Args:
        roots: What a client is given, with all that it leads to.
        shared: Objects that stay outside.
        twins: What a client has in the places of some objects.
        reachable: What code reaches by names of its own, of an earlier world; None looks.

    Raises:
        NotCopyableError: If something in it has no bytes, or code names a module in it by a global.

    Attributes:
        reachable: The same, to hand on.
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
        self._pieces: list[tuple[torch.device, int, int, int]] = []  # of memory: from, to, place in the table
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
        if self._overlap:  # the whole of a memory was found after a part of it
            self._pieces.sort(key=lambda piece: piece[1] - piece[2])
            self._bytes = self._dump(list(roots))
        self.fixed = dict(enumerate(self.table))

    def _dump(self, roots: list[Any]) -> bytes:
        file = io.BytesIO()
        pickler = self._pickler = _Pickler(file, self)
        try:
            pickler.dump(([twin.original for twin in self.twins.values()], roots, list(self.twins.values())))
        except NotCopyableError:
            raise
        except Exception as error:
            last = pickler.last
            cure = next((text for kind, text in _CURES.items() if isinstance(last, kind)), "")
            why = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
            raise NotCopyableError(why, _find_path(roots, last), cure) from error
        return file.getvalue()

    def shared_objects(self, other_snapshot: Snapshot) -> list[Any]:
        """Objects that a client's copy changes and that another world has, and generators that any has."""
        mine, theirs = self.copied(), other_snapshot.copied()
        return [one for key, one in mine.items() if key in theirs] + self.generators

    def copied(self) -> dict[int, Any]:
        """Objects whose copies a client may change, by `id`."""
        fixed = (*_FIXED, types.FunctionType, types.BuiltinFunctionType)  # what they hold is here by itself
        held = (one for _, one in self._pickler.memo.copy().values())
        return {id(one): one for one in held if not isinstance(one, fixed)}

    def number(self, value: Any) -> int:
        """The place of an object in the table."""
        number = self._numbers.setdefault(id(value), len(self.table))
        if number == len(self.table):
            self.table.append(value)
        return number

    def add_shared(self, value: Any) -> int:
        """Leave an object outside. Returns its place."""
        self._kept.add(id(value))
        return self.number(value)

    def place(self, value: Any) -> int | None:
        """The place of an object that stays outside."""
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
        """Look at what is held, and named by a global, too.

        Raises:
            NotCopyableError: If somebody has changed its numbers.
        """
        for name, value, sums, _ in self._frozen:
            if _checksums(value) != sums:
                raise _name_clash_error(
                    name, value, f"the original {type(value).__name__}, which training changes"
                )

    def _refuse_originals(self) -> None:
        """Refuse names by which code would find the user's Trainer, or parts by the `id` of the original."""
        for value, name in self.reachable.values():
            if isinstance(value, pl.Trainer) and id(value) in self.twins:
                raise _name_clash_error(name, value)
            if isinstance(value, dict) and any(type(key) is int and key in self.by_id for key in value):
                raise _name_clash_error(
                    f"{name}, by id", next(self.by_id[k] for k in value if k in self.by_id)
                )

    def memory(self, flat: Tensor) -> tuple[_Placeholder, int]:
        """The piece of memory that holds this one, and how many bytes behind its start that begins.

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
        """The twins, and the roots, as a client has them."""
        self._loads += 1
        if self._loads == _OFTEN:  # the memo of what is met once takes a third of a load
            self._bytes = pickletools.optimize(self._bytes)
        for *_, modes in self._frozen:  # an evaluation may have left them otherwise
            for part, training in modes:
                part.training = training
        unpickler = pickle.Unpickler(io.BytesIO(self._bytes))
        unpickler.persistent_load = _LoadedObjects(self, seed).__getitem__  # type: ignore[method-assign]
        twins, roots, _ = unpickler.load()
        return twins, roots

    def clone(self, number: int) -> Tensor:
        """A clone of a piece of memory, in the place of the last clone if nobody has that any more."""
        whole, last = self.table[number], self._used.get(number)
        if last is None or torch._C._storage_Use_Count(last.untyped_storage()._cdata) > 2:
            last = self._used[number] = torch.empty_like(whole)
        return last.copy_(whole)


class _LoadedObjects(dict[Any, Any]):
    """Objects that `_Pickler.persistent_id` has left out, by key: the table, and what one client has new."""

    def __init__(self, snapshot: Snapshot, seed: int) -> None:
        super().__init__(snapshot.fixed)
        self._world, self._seed = snapshot, seed

    def __missing__(self, key: tuple[str, Any]) -> Any:
        kind, what = key
        if kind == "id":
            return id(what)
        if kind == "memory":
            self[key] = self._world.clone(what)
        else:
            self._seed = (self._seed + _APART) % 2**63
            self[key] = new_generator(self._world.table[what], self._seed)
        return self[key]


class _Pickler(pickle.Pickler):
    """Writes a world.

    Attributes:
        last: The object that it was at when it failed.
    """

    def __init__(self, file: io.BytesIO, snapshot: Snapshot) -> None:
        super().__init__(file, 5)
        self._snapshot = snapshot
        self.last: Any = None

    def persistent_id(self, value: Any) -> Any:
        """Return the key by which the loading side finds an object. None for one that is in the bytes."""
        kind, world = type(value), self._snapshot
        if kind in _PLAIN:
            return None
        world.met.add(id(value))
        code = value if kind is types.FunctionType else kind
        world.code[id(code)] = code
        if kind is int:  # the `id` of something becomes that of its copy
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
        """Return the recipe of an object: a function, its arguments, its state, its contents."""
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
        way = _find_reducer(kind)  # type: ignore[arg-type]
        return NotImplemented if way is None else way(self, value)

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
        """A class that says how it is copied is told of what has been loaded so far."""
        begun = self.memo.copy()
        known = [one for key, one in self._snapshot.by_id.items() if key in begun]
        known += [twin.original for twin in self._snapshot.twins.values()]
        return _deepcopy_with_known, (self._original(value), [(self._original(one), one) for one in known])

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
        self._original(owner)  # lives as long as its address is known
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
        """Return a subclass of a random generator: what it holds, and the draws of an ordinary one."""
        held = {name: one for name, one in vars(value).items() if name != "gauss_next"}  # which is a draw
        return _new_of_kind, (type(value), new_generator(value, 0)), held, None, None, _fill

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
"""How what pickle can't take, or takes without its ties, is pickled."""


@functools.cache
def _find_reducer(kind: type) -> Callable[[_Pickler, Any], Any] | None:
    found = next((way for parent, way in _WAYS.items() if issubclass(kind, parent)), None)
    return _Pickler._reduce_by_deepcopy if found is None and _copies_itself(kind) else found


@functools.cache
def _copies_itself(kind: type) -> bool:
    """Has a class, in Python, a `__deepcopy__` of its own?"""
    own = next((base for base in kind.__mro__ if "__deepcopy__" in vars(base)), None)
    if own is None or issubclass(kind, (Tensor, nn.Module, Optimizer)):
        return False
    return isinstance(vars(own)["__deepcopy__"], types.FunctionType) and own.__module__ != "weakref"


@functools.cache
def _is_program_object(kind: type) -> bool:
    if issubclass(kind, (nn.Module, Tensor, Optimizer, pl.LightningDataModule)):
        return False
    return kind is object or issubclass(kind, _OUTSIDE) or str(kind.__module__).startswith(_MACHINERY)


def _is_shared(kind: type, value: Any) -> bool:
    if kind is types.FunctionType:
        return _is_stateless(value)
    if _copies_itself(kind):
        return value.__deepcopy__({}) is value
    if isinstance(value, io.IOBase):  # a log; who reads what others have written, is not isolated
        return not value.closed and value.writable() and not value.readable()
    return _is_program_object(kind) or kind in GENERATORS


def _is_stateless(function: types.FunctionType) -> bool:
    if (function.__module__ or "").startswith("jsonargparse"):
        return True
    kept = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    fixed = all(type(one) in _FIXED or isinstance(one, type) or _is_module_function(one) for one in kept)
    if function.__closure__ is None and not function.__dict__ and fixed:
        return True
    return is_library_code(function) and _is_named(function)


def _is_named(function: types.FunctionType) -> bool:
    """Is it what its module, or a class there, has by its name: `SGD.step`, which torch has wrapped?"""
    try:
        return attrgetter(function.__qualname__)(sys.modules[function.__module__]) is function
    except (KeyError, AttributeError):
        return False


def _is_module_function(value: Any) -> bool:
    """Is it a builtin function, and no method of some object?"""
    owner = getattr(value, "__self__", None)
    return isinstance(value, types.BuiltinFunctionType) and isinstance(owner, types.ModuleType | type(None))


def _get_tensors(value: Any) -> list[Tensor]:
    return [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value]


def _is_trainable(value: Any) -> bool:
    """Is a module, or a tensor, one that may train?"""
    if isinstance(value, pl.LightningModule | Metric):
        return True
    return any(tensor.requires_grad for tensor in _get_tensors(value))


def _checksums(value: Any) -> list[str]:
    """Sums of its numbers and of their squares, which tell whether somebody has changed them."""
    wide = [tensor.detach().double() for tensor in _get_tensors(value)]
    return [f"{float(one.sum())!r} {float(one.square().sum())!r}" for one in wide]


def _modes(value: Any) -> list[tuple[nn.Module, bool]]:
    return [(part, part.training) for part in value.modules()] if isinstance(value, nn.Module) else []


def _is_large(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return math.prod(value.shape) > _LARGE
    return isinstance(value, list | tuple | dict | set) and len(value) > _MANY


def _in_scripts(modules: Sequence[nn.Module]) -> Iterator[tuple[int, tuple[Any, str]]]:
    """Tensors and parts of what TorchScript has compiled, by `id`: the whole, and the name in it.

    The whole is what `torch.jit.load` makes new; the optimiser has its tensors.
    """
    inside: set[int] = set()
    for whole in modules:
        if isinstance(whole, torch.jit.ScriptModule) and id(whole) not in inside:
            parts = [(name, one) for name, one in whole.named_modules() if name]
            inside |= {id(one) for _, one in parts}
            for name, one in (*whole.named_parameters(), *whole.named_buffers(), *parts):
                yield id(one), (whole, name)


# ---- loading ------------------------------------------------------------------------------------------


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
    """Return nothing, as a weak reference to nothing does."""


def _dead_proxy() -> Any:
    return weakref.proxy(_DeadReferent())


class _DeadReferent:
    """Of which nobody has a reference."""


def _new_of_kind(kind: Any, like: Any) -> Any:
    """A random generator of a subclass that will draw what another one, of the library's class, would."""
    own: Any = type(like)
    if own is torch.Generator:
        return kind.__new__(kind, device=like.device).set_state(like.get_state())
    made = kind.__new__(kind)
    if own is np.random.Generator:
        own.__init__(made, like.bit_generator)
    elif own is np.random.RandomState:
        own.__init__(made)
        own.set_state(made, like.get_state())
    elif issubclass(kind, random.SystemRandom):  # which asks the operating system
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
    what = what or f"the original {type(value).__name__}, which no client trains"
    return NotCopyableError(
        f"the code names {name} past it: {what}",
        (),
        "reach it by self (an attribute of the module, self.trainer), not by a global, a class or a closure",
    )


def _find_path(roots: Sequence[Any], target: Any) -> list[str]:
    """The shortest way to an object, by attributes, keys and closures."""
    seen: set[int] = set()
    names = (f".{name}" if name else "" for name in _ROOTS)
    queue = deque((root, [name]) for root, name in zip(roots, names, strict=True))
    while queue:
        one, way = queue.popleft()
        if one is target:
            return way
        if id(one) not in seen and not isinstance(one, type | types.ModuleType | str | Tensor):
            seen.add(id(one))
            queue.extend((held, [*way, name]) for name, held in _contained_values(one))
    return [f" {type(target).__name__}"]


def _contained_values(value: Any) -> Iterator[tuple[str, Any]]:
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
