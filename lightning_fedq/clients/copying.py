"""Deep copies of whatever a training may write to, and the storage that the copies use again.

`copy.deepcopy` shares functions, so that a "copied" hook goes on training the original; it drops attributes
of optimisers, and what parameters know of their hooks. Here functions with closures, bound methods and weak
references are copied by value, through the same memo as everything else.

Random generators begin anew in a copy, from a seed of the client's own, as those of the process do. Data,
loggers and what belongs to the program (classes, modules, the command line) are shared. Whatever can't be
copied is refused, by the way to it.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_fedq._lightning import pl
from lightning_fedq.data.generator_turns import new_generator

_ATOMIC = {
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented)),
    *(types.BuiltinFunctionType, types.ModuleType, types.CodeType, types.MethodWrapperType, property),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.dtype),
}
_SHARED: tuple[type, ...] = (
    *(Dataset, DataLoader, Sampler, pl.loggers.Logger, logging.Logger, argparse.ArgumentParser, Path),
    np.generic,
    *(pl.Trainer, pl.strategies.Strategy, pl.LightningDataModule, pl.accelerators.Accelerator),
)
"""What a copy leaves as it is."""
_APART = 0x9E3779B97F4A7C15
_MACHINERY = ("jsonargparse", "torch._dynamo", "torch._inductor", "torch._functorch")
"""Packages whose objects and functions belong to the program: the command line, the compiler."""
_DICTS = {dict, OrderedDict}
_MISSING = object()
_OWN_STATE = ("__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__")


class NotCopyableError(ValueError):
    """Something that a training holds can't be copied, so that clients would share it.

    Args:
        why: What Python says.
        way: Keys and attributes that lead to it, the innermost first.
    """

    def __init__(self, why: str, way: list[str]) -> None:
        super().__init__(why, way)
        self.why, self.way = why, way

    def __str__(self) -> str:
        """The way to it, and the cure."""
        name = "".join(reversed(self.way)).lstrip(".")
        return (
            f"every client trains on a copy of the module and of callbacks that look at batches, and {name} "
            f"can't be copied: {self.why}; give its class a __deepcopy__(self, memo) that returns self (all "
            "clients then share it) or a new one, or open it where it is used"
        )


class Storage:
    """Memory of copied tensors, which the next copy of the same tensors overwrites."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Give the memory back, which holds what the last copy was trained to."""
        self._kept = {}

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a strided tensor, in memory that an earlier copy of it has used."""
        found = self._kept.get(id(tensor))
        if found is None or found[0] is not tensor or not _alike(found[1], tensor):
            found = tensor, torch.empty_like(tensor, requires_grad=False)
            self._kept[id(tensor)] = found
        kept = found[1]
        return kept.copy_(tensor.detach()).detach()


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device, one.stride()) == (
        other.shape,
        other.dtype,
        other.device,
        other.stride(),
    )


class Copier:
    """One deep copy: everything that is copied with it keeps its ties.

    Args:
        storage: Memory for tensors.
        memo: What stands for what, by the `id` of the original.
        shared: Objects that are left as they are.
        seed: Seed of the copies of random generators.
    """

    def __init__(
        self, storage: Storage, memo: dict[int, Any], shared: tuple[Any, ...] = (), seed: int = 0
    ) -> None:
        self.memo, self._storage, self._seed = memo, storage, seed
        self._cells: dict[int, Any] = {}
        self._alive: list[Any] = []
        memo.update((id(one), one) for one in shared)

    def __call__(self, value: Any) -> Any:
        """A copy of a value.

        Raises:
            NotCopyableError: If something in it can't be copied.
        """
        kind = type(value)
        if kind in _ATOMIC:
            return value
        found = self.memo.get(id(value), _MISSING)
        if found is not _MISSING:
            return found
        copy = _HOW.get(kind)
        if copy is None:
            copy = _HOW[kind] = _how(kind)
        made = copy(self, value)
        self.memo[id(value)] = made
        return made

    def attributes(self, value: Any, made: Any) -> Any:
        """Fill a new object with copies of what the old one holds."""
        self.memo[id(value)] = made
        own = vars(made)
        for name, held in vars(value).items():
            kind = type(held)
            if kind in _ATOMIC:
                own[name] = held
                continue
            if kind in _DICTS and not held and id(held) not in self.memo:  # modules have a dozen
                own[name] = self.memo[id(held)] = kind()
                continue
            try:
                own[name] = self(held)
            except NotCopyableError as error:
                error.way.append(f".{name}")
                raise
        return made

    def without_data(self, value: Any) -> Any:
        """A copy of a data module, which shares what is large: data."""
        self.memo.update((id(held), held) for held in vars(value).values() if _is_large(held))
        return self.attributes(value, _empty(value))

    # ---- containers -------------------------------------------------------------------------------

    def _dict(self, value: dict[Any, Any]) -> Any:
        made = self.memo[id(value)] = type(value)()
        for key, held in value.items():
            try:
                made[self(key)] = self(held)
            except NotCopyableError as error:
                error.way.append(f"[{key!r}]")
                raise
        return made

    def _items(self, value: Any) -> list[Any]:
        made = []
        for number, held in enumerate(value):
            try:
                made.append(self(held))
            except NotCopyableError as error:
                error.way.append(f"[{number}]")
                raise
        return made

    def _list(self, value: list[Any]) -> list[Any]:
        made: list[Any] = []
        self.memo[id(value)] = made
        made += self._items(value)
        return made

    def _deque(self, value: deque[Any]) -> deque[Any]:
        made: deque[Any] = deque(maxlen=value.maxlen)
        self.memo[id(value)] = made
        made.extend(self._items(value))
        return made

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        made = self._items(value)
        found = self.memo.get(id(value), _MISSING)  # a tuple that holds itself by way of a list
        if found is not _MISSING:
            return found  # type: ignore[no-any-return]
        return value if all(map(_same, made, value)) else tuple(made)

    def _set(self, value: Any) -> Any:
        return type(value)(self._items(value))

    # ---- functions --------------------------------------------------------------------------------

    def _function(self, value: types.FunctionType) -> Any:
        if (value.__module__ or "").startswith("jsonargparse"):
            return value
        if value.__closure__ is None and not value.__dict__ and not _mutable(value):
            return value
        cells = tuple(self._cell(cell) for cell in value.__closure__ or ())
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        self.memo[id(value)] = made
        for old, new in zip(value.__closure__ or (), cells, strict=True):
            self._fill(old, new, value)
        made.__defaults__, made.__kwdefaults__ = self(value.__defaults__), self(value.__kwdefaults__)
        made.__qualname__, made.__doc__, made.__module__ = value.__qualname__, value.__doc__, value.__module__
        made.__annotations__ = value.__annotations__
        made.__dict__.update(self(value.__dict__))
        return made

    def _cell(self, cell: Any) -> Any:
        return self._cells.setdefault(id(cell), types.CellType())

    def _fill(self, old: Any, new: Any, function: Any) -> None:
        try:
            held = old.cell_contents
        except ValueError:  # empty
            return
        if not _is_empty(new):
            return
        try:
            new.cell_contents = self(held)
        except NotCopyableError as error:
            error.way.append(f" in the closure of {function.__qualname__}")
            raise

    def _method(self, value: types.MethodType) -> Any:
        return types.MethodType(self(value.__func__), self(value.__self__))

    def _weak(self, value: weakref.ref[Any]) -> Any:
        target = value()
        made = None if target is None else self(target)
        return value if made is None or made is target else weakref.ref(made)

    def _weak_keys(self, value: Any) -> Any:
        made = self.memo[id(value)] = type(value)()
        for key, held in list(value.items()):
            made[self(key)] = self(held)
        return made

    def _weak_set(self, value: Any) -> Any:
        made = self.memo[id(value)] = type(value)()
        for held in list(value):
            made.add(self(held))
        return made

    # ---- random generators --------------------------------------------------------------------------

    def _generator(self, value: Any) -> Any:
        self._seed = (self._seed + _APART) % 2**63
        return new_generator(value, self._seed)

    # ---- tensors ----------------------------------------------------------------------------------

    def _tensor(self, value: Tensor) -> Any:
        if not value.is_leaf:
            return self._storage.copy(value) if value.layout is torch.strided else value.detach().clone()
        if (
            value.layout is not torch.strided
            or type(value) not in (Tensor, nn.Parameter)
            or not _whole(value)
        ):
            made = value.__deepcopy__(self.memo)  # type: ignore[no-untyped-call]
        elif type(value) is nn.Parameter:
            made = nn.Parameter(self._storage.copy(value), value.requires_grad)
        else:
            made = self._storage.copy(value).requires_grad_(value.requires_grad)
        self.memo[id(value)] = made
        if value.grad is not None:
            made.grad = self(value.grad)
        for hook in (value._backward_hooks or {}).values():
            made.register_hook(self(hook))
        for hook in (getattr(value, "_post_accumulate_grad_hooks", None) or {}).values():
            made.register_post_accumulate_grad_hook(self(hook))
        if value.__dict__:
            self.attributes(value, made)
        return made

    # ---- objects ----------------------------------------------------------------------------------

    def _plain(self, value: Any) -> Any:
        return self.attributes(value, _empty(value))

    def _shared(self, value: Any) -> Any:
        return value

    def _own_way(self, value: Any) -> Any:
        try:
            return value.__deepcopy__(self.memo)
        except NotCopyableError:
            raise
        except Exception as error:
            raise NotCopyableError(f"{type(error).__name__}: {error}", []) from error

    def _reduced(self, value: Any) -> Any:
        """By the protocol that `copy` and `pickle` use."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:
            raise NotCopyableError(f"{type(error).__name__}: {error}", []) from error
        if isinstance(reduced, str):
            return value
        self._alive.append(reduced)  # or its id would soon be another one's
        make, args, state, items, pairs = (*reduced, *[None] * 5)[:5]
        made = self.memo[id(value)] = make(*self._items(args))
        if state is not None:
            held = self(state)
            if hasattr(made, "__setstate__"):
                made.__setstate__(held)
            else:
                own, slots = held if isinstance(held, tuple) and len(held) == 2 else (held, None)
                if own:
                    vars(made).update(own)
                for name, content in (slots or {}).items():
                    setattr(made, name, content)
        for held in items or ():
            made.append(self(held))
        for key, held in pairs or ():
            made[self(key)] = self(held)
        return made


def _is_large(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return math.prod(value.shape) > _LARGE
    return isinstance(value, list | tuple | dict | set) and len(value) > _MANY


_LARGE, _MANY = 1 << 18, 10_000
"""Numbers of a tensor, and entries of a container, above which an attribute is shared as data."""


def _same(one: Any, other: Any) -> bool:
    return one is other


def _empty(value: Any) -> Any:
    kind: Any = type(value)
    return kind.__new__(kind)


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is _MISSING
    except ValueError:
        return True


def _mutable(function: types.FunctionType) -> bool:
    """Has a function defaults that it might keep something in?"""
    kept = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return any(type(one) not in _ATOMIC and not isinstance(one, type) for one in kept)


def _whole(tensor: Tensor) -> bool:
    """Is the tensor alone in its memory?"""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _how(kind: type) -> Callable[[Copier, Any], Any]:
    """Way to copy objects of a class."""
    if issubclass(kind, Tensor):
        return Copier._tensor
    of_the_program = kind.__module__.startswith(_MACHINERY) and not issubclass(kind, nn.Module)
    if issubclass(kind, (type, *_SHARED)) or of_the_program:
        return Copier._shared
    if issubclass(kind, Optimizer) or (issubclass(kind, nn.Module) and not _own_state(kind)):
        return Copier._plain
    if hasattr(kind, "__deepcopy__"):
        return Copier._own_way
    if kind.__reduce_ex__ is object.__reduce_ex__ and not _own_state(kind) and _only_attributes(kind):
        return Copier._plain
    return Copier._reduced


def _own_state(kind: type) -> bool:
    """Does a class say by itself what its state is? These leave out what is tied to the original."""
    known = (object, nn.Module, pl.LightningModule, Optimizer)
    return any(name in vars(base) for base in kind.__mro__ if base not in known for name in _OWN_STATE)


def _only_attributes(kind: type) -> bool:
    """Is `__dict__` all that objects of a class hold?"""
    in_python = all(
        base is object or (base.__flags__ & _WRITTEN_IN_PYTHON and not vars(base).get("__slots__"))
        for base in kind.__mro__
    )
    return in_python and bool(kind.__dictoffset__) and kind.__basicsize__ <= object.__basicsize__ + 16


_WRITTEN_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


_HOW: dict[type, Callable[[Copier, Any], Any]] = {
    dict: Copier._dict,
    OrderedDict: Copier._dict,
    list: Copier._list,
    tuple: Copier._tuple,
    set: Copier._set,
    frozenset: Copier._set,
    deque: Copier._deque,
    types.FunctionType: Copier._function,
    types.MethodType: Copier._method,
    weakref.ref: Copier._weak,
    weakref.ReferenceType: Copier._weak,
    weakref.WeakKeyDictionary: Copier._weak_keys,
    weakref.WeakValueDictionary: Copier._weak_keys,
    weakref.WeakSet: Copier._weak_set,
    torch.Generator: Copier._generator,
    np.random.Generator: Copier._generator,
    np.random.RandomState: Copier._generator,
    random.Random: Copier._generator,
    functools.partial: Copier._reduced,
    np.ndarray: Copier._own_way,
}
"""Way to copy objects of each class that was met."""
