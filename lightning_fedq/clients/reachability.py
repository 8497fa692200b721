"""Search for objects that training code reaches by name: globals, class attributes, cells of closures.

A client has copies of the training state, but code that names an object by a global still refers to the
original. Changes through the global would then be invisible in the copy. Such objects are therefore not
copied, and all clients share them. The isolation trial tests whether they carry information between clients.
Modules that train can't be shared, so a global name for them is an error.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import types
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.clients.libraries import LIBRARIES, is_library_code

_PLAIN = (type(None), bool, int, float, complex, str, bytes, frozenset)
_NOTHING = ()  # Python has one empty tuple, so its `id` identifies no object
_SKIPPED = (*_PLAIN, types.ModuleType, types.CodeType, types.BuiltinFunctionType, types.FrameType)
_CODE = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)
_SETTINGS = {
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "num_devices", "num_nodes", "world_size"),
    *("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("check_val_every_n_epoch", "limit_train_batches", "limit_val_batches", "log_every_n_steps"),
    *("default_root_dir", "fast_dev_run", "is_global_zero", "global_rank", "local_rank", "node_rank"),
    "device_ids",
}
"""Trainer attributes that code may read through a global, because they are equal for clients and the user."""
_ENDS = (*_CODE, type, nn.Module, Tensor, Optimizer, pl.Trainer)
_MOST, _NAMED = 500_000, 2_000
"""Objects per global that are visited at most, and that are recorded even if not in the snapshot."""


def find_reachable(objects: Iterable[Any], known_ids: Container[int] = ()) -> dict[int, tuple[Any, str]]:
    """Find the objects that code reaches by global names, by `id`, each with its name.

    Each global is followed through all objects that it holds, up to 500,000 objects. A warning reports this
    limit.

    Args:
        objects: Functions and classes of the training state. Those of libraries are skipped.
        known_ids: `id` of each object in the snapshot. Large globals are searched for these only.

    Examples:
        >>> class Step:
        ...     __module__ = "training"
        ...     seen: list[int] = []
        ...     def __call__(self) -> int:
        ...         return len(self.seen)
        >>> [name for _, name in find_reachable([Step]).values()]
        ['Step.seen']
    """
    reachable: dict[int, tuple[Any, str]] = {}
    for value, path, number in _walk(objects):
        if (
            not isinstance(value, _PLAIN)
            and value is not _NOTHING
            and (number < _NAMED or id(value) in known_ids or isinstance(value, pl.Trainer))
        ):
            reachable.setdefault(id(value), (value, path))
    return reachable


def find_named_state(objects: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the paths and values of everything that code reaches by global names, numbers and text included.

    Examples:
        >>> class Step:
        ...     __module__ = "training"
        ...     mean, seen = 1.5, [2]
        >>> find_named_state([Step])
        [('Step.mean', 1.5), ('Step.seen', [2])]
    """
    return [(path, value) for value, path, number in _walk(objects) if path and number < _NAMED]


def _walk(used: Iterable[Any]) -> Iterator[tuple[Any, str, int]]:
    """Yield every object that code names, with its path and its number among the objects of one global.

    Code that such an object holds is followed as well.
    """
    queue = deque(code for code in used if not is_library_code(code))
    copied = {id(code) for code in queue}  # the snapshot copies these functions together with their cells
    seen_code, seen_values = set[int](), set[int]()
    while queue:
        code = queue.popleft()
        if id(code) in seen_code:
            continue
        seen_code.add(id(code))
        for named, name in _named_objects(code, id(code) in copied):
            if isinstance(named, _PLAIN):
                yield named, name, 0
            for number, (value, path) in enumerate(_contents(named, name, seen_values)):
                is_code = isinstance(value, (*_CODE, type))
                if is_code or "__wrapped__" in _get_attributes(value):
                    called = getattr(value, "__func__", value)
                    # an object that a global holds leads no further into installed packages
                    if not (is_library_code(called) or (number and _is_installed(called))):
                        queue.append(called)
                if not is_code:
                    yield value, path, number


def _is_installed(value: Any) -> bool:
    """Return whether code is of an installed package, whose registries would lead to the whole package."""
    module = sys.modules.get(str(getattr(value, "__module__", "")))
    return module is None or "site-packages" in str(getattr(module, "__file__", ""))


def _is_fit_library(value: Any) -> bool:
    """Return whether an object is of a library that refers to the whole fit, such as `Federated`."""
    root = type(value).__module__.partition(".")[0]
    return root in LIBRARIES and root not in sys.stdlib_module_names


def _named_objects(value: Any, copied: bool) -> Iterator[tuple[Any, str]]:
    """Yield the objects that a function or a class names, with the name. Copied cells are skipped."""
    if isinstance(value, type):
        for base in value.__mro__:
            if not is_library_code(base):
                yield from ((v, f"{base.__name__}.{n}") for n, v in vars(base).items() if n[:2] != "__")
                yield from (
                    (vars(base)[n], n) for n in ("__new__", "__init__", "__call__") if n in vars(base)
                )
        return
    if isinstance(value, property):
        yield from ((part, "") for part in (value.fget, value.fset, value.fdel) if part is not None)
    yield from ((getattr(value, part), "") for part in ("func", "__wrapped__") if hasattr(value, part))
    if isinstance(value, types.FunctionType):
        cells = () if copied else value.__closure__ or ()
        for name, cell in zip(value.__code__.co_freevars, cells, strict=not copied):
            if cell != types.CellType() and name != "__class__":
                yield cell.cell_contents, name
        for code in _codes(value.__code__):
            yield from _reachable_globals(code, value.__globals__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and the code objects of its inner functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.lru_cache(2**16)  # a Hugging Face data set reaches 19,000 code objects, again for each snapshot
def _loaded_names(code: types.CodeType) -> tuple[set[tuple[str, bool]], set[str]]:
    """Return the globals that code uses, and the modules that it imports.

    Each global has a flag: whether the code only reads a Trainer setting from it.
    """
    loaded, imported = set[tuple[str, bool]](), set[str]()
    for instruction, following in pairwise((*dis.get_instructions(code), None)):
        if instruction is not None and instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
            setting = (
                following is not None and following.opname == "LOAD_ATTR" and following.argval in _SETTINGS
            )
            loaded.add((instruction.argval, setting))
        elif instruction is not None and instruction.opname == "IMPORT_NAME":
            imported.add(instruction.argval)
    return loaded, imported


def _reachable_globals(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield the global objects that code uses, including attributes of modules, with their names."""
    modules = {} if "site-packages" in str(names.get("__file__", "")) else sys.modules
    if not any(name in names or name in modules for name in code.co_names):
        return
    loads, imported = _loaded_names(code)
    loaded = {n for n, setting in loads if not (setting and isinstance(names.get(n), pl.Trainer))}
    values = {name: names[name] for name in loaded & names.keys()}
    values = {name: modules[name] for name in imported & modules.keys()} | values
    queue, seen = deque((value, name) for name, value in values.items()), set[int]()
    while queue:
        value, name = queue.popleft()
        if not isinstance(value, types.ModuleType):
            yield value, name
        elif id(value) not in seen and value.__name__.partition(".")[0] not in LIBRARIES:
            seen.add(id(value))
            attributes = vars(value)
            queue.extend((attributes[part], f"{name}.{part}") for part in code.co_names if part in attributes)


def _contents(value: Any, name: str, seen: set[int]) -> Iterator[tuple[Any, str]]:
    """Yield an object and everything that it holds, with paths, except objects that were seen before."""
    queue, number = deque([(value, name)]), 0
    while queue:
        current, path = queue.popleft()
        if isinstance(current, _SKIPPED) or id(current) in seen:
            continue
        seen.add(id(current))
        yield current, path
        number += 1
        if number == _MOST:
            rank_zero_warn(
                f"The training code names {name}, but only {_MOST:,} of its objects were checked. "
                "Reach it by self alone, because unchecked objects are copied per client."
            )
            return
        if not isinstance(current, _ENDS) and not _is_fit_library(current):
            queue.extend(
                (item, part)
                for item, part in _contained_values(current, path)
                if not isinstance(item, _PLAIN)
            )


def _contained_values(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield the objects that an object holds directly, with their paths."""
    if isinstance(value, dict):
        yield from (
            (held, f"{path}[{key!r:.40}]") for key, held in value.items() if not isinstance(held, _PLAIN)
        )
        yield from ((key, path) for key in value)
    elif isinstance(value, list | tuple | set | deque):
        yield from ((held, f"{path}[{n}]") for n, held in enumerate(value) if not isinstance(held, _PLAIN))
    own = _get_attributes(value)
    if own:
        yield own, path
        yield from ((held, f"{path}.{key}") for key, held in own.items())
    if isinstance(value, functools._lru_cache_wrapper):
        wrapped = value.__wrapped__
        yield from (
            (held, f"what {path} has cached") for held in gc.get_referents(value) if held is not wrapped
        )
    elif isinstance(value, functools.partial | types.MethodType) or hasattr(type(value), "__slots__"):
        yield from (
            (held, path) for held in gc.get_referents(value) if held is not own and held is not type(value)
        )


def _get_attributes(value: Any) -> dict[str, Any]:
    """Return an object's attribute dictionary, or {} if it has none."""
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}
