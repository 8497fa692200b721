"""Ways to copy objects that pickle can't handle, or whose shared memory and references it would lose.

Each `_reduce_*` returns how pickle rebuilds an object: a function, its arguments, the state, items of a list,
items of a dictionary, and a function that sets the state. The function that rebuilds follows it.
"""

from __future__ import annotations

import ctypes
import functools
import io
import random
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedq._lightning import pl
from lightning_fedq.clients.object_table import ObjectTable, SharedObject
from lightning_fedq.data.generator_turns import GENERATORS, new_generator

_DISPATCH = Tensor.__torch_dispatch__
_DEVICES = ("cpu", "cuda", "mps")


def _reduce_script(value: Any, table: ObjectTable) -> Any:
    """Copy a TorchScript module with its code."""
    file = io.BytesIO()
    torch.jit.save(value, file)
    return _load_script, (file.getvalue(),)


def _load_script(code: bytes) -> Any:
    """Load the bytes of `torch.jit.save`."""
    return torch.jit.load(io.BytesIO(code))  # type: ignore[no-untyped-call]


def _reduce_to_attributes(value: Any, table: ObjectTable) -> Any:
    """Copy all attributes, without the class's own `__init__` and `__setstate__`."""
    return object.__new__, (type(value),), vars(value), None, None, _fill_attributes


def _fill_attributes(target: Any, attributes: dict[str, Any]) -> None:
    vars(target).update(attributes)


def reduce_by_deepcopy(value: Any, known: list[Any]) -> Any:
    """Copy an object by its class's own `__deepcopy__`, with a memo of parts that are copied already."""
    return _deepcopy, (SharedObject(value), [(SharedObject(part), part) for part in known])


def _deepcopy(value: Any, known: list[tuple[Any, Any]]) -> Any:
    """Call `__deepcopy__` with a memo of pairs of an original part and its copy."""
    return value.__deepcopy__({id(original): copy for original, copy in known})


def _reduce_tensor(value: Any, table: ObjectTable) -> Any:
    """Copy a tensor as a view of a piece of memory, with its gradient, hooks and attributes."""
    kind = type(value)
    own_layout = value.layout is not torch.strided or value.is_quantized
    if own_layout or value.device.type not in _DEVICES or kind.__torch_dispatch__ is not _DISPATCH:
        return reduce_by_deepcopy(value, [])
    leaf = value if value.is_leaf else value.detach()
    storage = torch.empty(0, dtype=torch.uint8, device=value.device).set_(leaf.untyped_storage())
    memory, bytes_before = table.memory(storage)
    offset = leaf.storage_offset() + bytes_before // value.element_size()
    has_grad = value.requires_grad and value.is_leaf
    args = memory, value.dtype, offset, tuple(value.shape), value.stride(), kind, has_grad
    gradient = value.grad if value.is_leaf else None
    backward_hooks = list((value._backward_hooks or {}).values())
    accumulation_hooks = list((getattr(value, "_post_accumulate_grad_hooks", None) or {}).values())
    if gradient is None and not backward_hooks and not accumulation_hooks and not vars(value):
        return _new_tensor, args
    state = gradient, backward_hooks, accumulation_hooks, vars(value)
    return _new_tensor, args, state, None, None, _fill_tensor


def _new_tensor(
    memory: Tensor, dtype: Any, offset: int, shape: Any, stride: Any, kind: Any, has_grad: bool
) -> Any:
    """Make a tensor of class `kind` in a piece of memory. `offset` counts elements."""
    made = torch.empty(0, dtype=dtype, device=memory.device)
    made.set_(memory.untyped_storage(), offset, shape, stride)
    if kind is Tensor:
        return made.requires_grad_(has_grad)
    return Tensor._make_subclass(kind, made, has_grad)


def _fill_tensor(target: Any, state: Any) -> None:
    target.grad, backward_hooks, accumulation_hooks, attributes = state
    for hook in backward_hooks:
        target.register_hook(hook)
    for hook in accumulation_hooks:
        target.register_post_accumulate_grad_hook(hook)
    vars(target).update(attributes)


def _reduce_array(value: Any, table: ObjectTable) -> Any:
    """Copy an array as a view of a piece of memory. Memory-mapped files are shared."""
    if value.dtype.hasobject:
        return NotImplemented
    base = value
    while isinstance(base.base, np.ndarray):  # a view
        base = base.base
    if isinstance(base, np.memmap):
        return _get_original, (SharedObject(value),)
    owner = base if base.flags.c_contiguous else base.T
    if not owner.flags.c_contiguous or not owner.size:
        return np.array, (SharedObject(value),)
    address = owner.__array_interface__["data"][0]
    table.number(owner)  # the table keeps the owner alive, so its address stays valid
    raw = np.frombuffer((ctypes.c_uint8 * owner.nbytes).from_address(address), np.uint8)
    memory, bytes_before = table.memory(torch.from_numpy(raw))
    offset = value.__array_interface__["data"][0] - address + bytes_before
    return _new_array, (memory, value.shape, value.dtype, offset, value.strides, value.flags.writeable)


def _get_original(value: Any) -> Any:
    return value


def _new_array(memory: Tensor, shape: Any, dtype: Any, offset: int, strides: Any, writeable: bool) -> Any:
    """Make an array in a piece of memory. `offset` counts bytes."""
    made: Any = np.ndarray(shape, dtype, memory.view(-1).numpy(), offset, strides)  # type: ignore[call-overload]
    made.flags.writeable = writeable
    return made


def _reduce_function(value: Any, table: ObjectTable) -> Any:
    """Copy a function with its closure and attributes. It shares code and globals with the original."""
    names = SharedObject(value.__globals__)
    args = SharedObject(value.__code__), names, value.__name__, None, value.__closure__
    state = value.__defaults__, value.__kwdefaults__, value.__qualname__, value.__module__, vars(value)
    return types.FunctionType, args, state, None, None, _fill_function


def _fill_function(target: Any, state: Any) -> None:
    target.__defaults__, target.__kwdefaults__, target.__qualname__, target.__module__, attributes = state
    vars(target).update(attributes)


def _reduce_cell(value: Any, table: ObjectTable) -> Any:
    try:
        return types.CellType, (), (value.cell_contents,), None, None, _fill_cell
    except ValueError:  # empty
        return types.CellType, ()


def _fill_cell(target: Any, state: Any) -> None:
    (target.cell_contents,) = state


def _reduce_method(value: Any, table: ObjectTable) -> Any:
    return types.MethodType, (value.__func__, value.__self__)


def _reduce_reference(value: Any, table: ObjectTable) -> Any:
    """Copy a weak reference. Its target is the copy of the original target."""
    target = value()
    return (_new_dead, (weakref.ref,)) if target is None else (weakref.ref, (target, value.__callback__))


def _reduce_proxy(value: Any, table: ObjectTable) -> Any:
    try:
        return weakref.proxy, (value.__reduce__.__self__,)
    except ReferenceError:
        return _new_dead, (weakref.proxy,)


class _DeadReferent:
    """Target of dead weak references and proxies."""


def _new_dead(kind: Any) -> Any:
    """Make a `weakref.ref` or `weakref.proxy` of an object that is deleted at once."""
    return kind(_DeadReferent())


def _reduce_weak_dict(value: Any, table: ObjectTable) -> Any:
    return type(value), (), None, None, iter(list(value.items()))


def _reduce_weak_set(value: Any, table: ObjectTable) -> Any:
    return type(value), (), list(value), None, None, weakref.WeakSet.update


def _reduce_cache(value: Any, table: ObjectTable) -> Any:
    return _new_cache, (value.__wrapped__, value.cache_parameters())


def _new_cache(function: Any, settings: Any) -> Any:
    """Make an empty `lru_cache` with the same settings."""
    return functools.lru_cache(**settings)(function)


def _reduce_view(value: Any, table: ObjectTable) -> Any:
    return types.MappingProxyType, (dict(value),)


def _reduce_lock(value: Any, table: ObjectTable) -> Any:
    return (threading.Lock if type(value) is type(threading.Lock()) else threading.RLock), ()


def _reduce_generator(value: Any, table: ObjectTable) -> Any:
    """Rebuild a random generator of a subclass: its attributes, and the draws of the library's class."""
    # `gauss_next` is a stored draw, not an attribute of the subclass
    attributes = {name: item for name, item in vars(value).items() if name != "gauss_next"}
    return _new_generator, (type(value), new_generator(value, 0)), attributes, None, None, _fill_attributes


def _new_generator(kind: Any, like: Any) -> Any:
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


Reduction = Callable[[Any, ObjectTable], Any]
_REDUCTIONS: dict[Any, Reduction] = {
    **dict.fromkeys(GENERATORS, _reduce_generator),
    torch.jit.ScriptModule: _reduce_script,
    Tensor: _reduce_tensor,
    **dict.fromkeys((nn.Module, pl.LightningDataModule, Optimizer), _reduce_to_attributes),
    np.ndarray: _reduce_array,
    types.FunctionType: _reduce_function,
    types.CellType: _reduce_cell,
    types.MethodType: _reduce_method,
    weakref.ProxyType: _reduce_proxy,
    weakref.CallableProxyType: _reduce_proxy,
    weakref.ReferenceType: _reduce_reference,
    **dict.fromkeys((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), _reduce_weak_dict),
    weakref.WeakSet: _reduce_weak_set,
    functools._lru_cache_wrapper: _reduce_cache,
    types.MappingProxyType: _reduce_view,
    **dict.fromkeys((type(threading.Lock()), type(threading.RLock())), _reduce_lock),
}


@functools.cache
def find_reduction(kind: type) -> Reduction | None:
    """Return the reduction of a class or of its first base that has one. None leaves it to pickle."""
    return next((reduce for parent, reduce in _REDUCTIONS.items() if issubclass(kind, parent)), None)
