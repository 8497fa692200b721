"""Objects that a training's code reaches past its own: globals, attributes of classes, cells of closures.

A client's world holds copies. Code that names an object by a global still means the original, so that one
object would become two: what is written by the one name is not seen by the other. Such objects stay outside
of the world, one for all clients, as in any program; the trial of isolation looks at whether they carry
anything. Modules with tensors can't be shared, and are refused by name.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedq._lightning import pl

_LIBRARIES = {
    *sys.stdlib_module_names,
    *("torch", "torchvision", "torchmetrics", "numpy", "lightning", "pytorch_lightning", "lightning_fabric"),
    *("lightning_fedq", "lightning_utilities", "jsonargparse", "pytest", "_pytest"),
} - {"__main__"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, frozenset)
_ATOMS = (*_PLAIN, type, types.ModuleType, types.CodeType)
_CODE = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)
_DEEP, _MOST = 3, 2_000
"""Steps into the contents of a global, and objects in all that are looked at."""


def reached_by(used: Iterable[Any]) -> dict[int, tuple[Any, str]]:
    """Objects that code reaches by a name of its own, by `id`, with that name.

    Args:
        used: Functions and classes of a training's objects; those of libraries are passed over.

    Example:
        >>> class Step:
        ...     __module__ = "training"
        ...     seen: list[int] = []
        ...     def __call__(self) -> int:
        ...         return len(self.seen)
        >>> [name for _, name in reached_by([Step]).values()]
        ['Step.seen']
    """
    found: dict[int, tuple[Any, str]] = {}
    code, seen = deque(one for one in used if not _of_a_library(one)), set[int]()
    copied = {id(one) for one in code}  # functions with their cells, where a client's objects hold them
    while code:
        one = code.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for value, name in _named_in(one, id(one) in copied):
            if isinstance(value, (*_CODE, type)) or hasattr(value, "__wrapped__"):
                value = getattr(value, "__func__", value)
                if not _of_a_library(value):
                    code.append(value)
            for held, way in _contents(value, name):
                found.setdefault(id(held), (held, way))
    return found


def _of_a_library(one: Any) -> bool:
    return str(getattr(one, "__module__", "") or "").partition(".")[0] in _LIBRARIES


def _is_machinery(one: Any) -> bool:
    """Is it of a library that knows the whole fit, as `Federated` does?"""
    root = type(one).__module__.partition(".")[0]
    return root in _LIBRARIES and root not in sys.stdlib_module_names


def _named_in(one: Any, copied: bool) -> Iterator[tuple[Any, str]]:
    """Objects that a function or a class names, with the name. Not in its cells, where these are copied."""
    if isinstance(one, type):
        for base in one.__mro__:
            if not _of_a_library(base):
                values = ((v, f"{base.__name__}.{n}") for n, v in vars(base).items() if n[:2] != "__")
                yield from values
                yield from (
                    (vars(base)[n], n) for n in ("__new__", "__init__", "__call__") if n in vars(base)
                )
        return
    if isinstance(one, property):
        yield from ((part, "") for part in (one.fget, one.fset, one.fdel) if part is not None)
    yield from ((getattr(one, part), "") for part in ("func", "__wrapped__") if hasattr(one, part))
    if isinstance(one, types.FunctionType):
        cells = () if copied else one.__closure__ or ()
        for name, cell in zip(one.__code__.co_freevars, cells, strict=not copied):
            if cell != types.CellType() and name != "__class__":
                yield cell.cell_contents, name
        for code in _codes(one.__code__):
            yield from _globals_of(code, one.__globals__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _globals_of(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    if not any(name in names and not isinstance(names[name], _PLAIN) for name in code.co_names):
        return
    loaded = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for name in loaded & names.keys():
        value = names[name]
        yield value, name
        if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in _LIBRARIES:
            own = vars(value)
            yield from ((own[part], f"{name}.{part}") for part in code.co_names if part in own)


def _contents(value: Any, name: str) -> Iterator[tuple[Any, str]]:
    """An object and what it holds, a few steps deep."""
    queue, number, seen = deque([(value, name, 0)]), 0, set[int]()
    while queue and number < _MOST:
        one, way, depth = queue.popleft()
        if isinstance(one, (*_ATOMS, types.BuiltinFunctionType)) or id(one) in seen:
            continue
        seen.add(id(one))
        number += 1
        if not isinstance(one, _CODE):
            yield one, way
        if (
            depth == _DEEP
            or isinstance(one, nn.Module | Tensor | Optimizer | pl.Trainer)
            or _is_machinery(one)
        ):
            continue
        if isinstance(one, dict):
            queue.extend((held, f"{way}[{key!r:.40}]", depth + 1) for key, held in one.items())
            queue.extend((key, way, depth + 1) for key in one)
        elif isinstance(one, list | tuple | set | deque):
            queue.extend((held, f"{way}[{n}]", depth + 1) for n, held in enumerate(list(one)[:_MOST]))
        elif isinstance(one, functools._lru_cache_wrapper):
            held = [h for h in gc.get_referents(one) if h is not one.__wrapped__ and not isinstance(h, str)]
            queue.extend((h, f"what {way} has cached", depth + 1) for h in held)
        elif not isinstance(one, _CODE):
            own = getattr(one, "__dict__", None)
            if isinstance(own, dict):
                yield own, way
                queue.extend((held, f"{way}.{key}", depth + 1) for key, held in own.items())
