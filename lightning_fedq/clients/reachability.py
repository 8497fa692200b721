"""Objects that a training's code reaches past its own: globals, attributes of classes, cells of closures.

A client's world holds copies. Code that names an object by a global still means the original, so that one
object would become two: what is written by the one name is not seen by the other. Such objects stay outside
of the world, one for all clients, as in any program; the trial of isolation looks at whether they carry
anything. Modules that train can't be shared, and are refused by name.
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

_LIBRARIES = {
    *sys.stdlib_module_names,
    *("torch", "torchvision", "torchmetrics", "numpy", "lightning", "pytorch_lightning", "lightning_fabric"),
    *("lightning_fedq", "lightning_utilities", "jsonargparse", "pytest", "_pytest"),
} - {"__main__"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, frozenset)
_NOTHING = ()  # one object, wherever it stands
_SKIPPED = (*_PLAIN, types.ModuleType, types.CodeType, types.BuiltinFunctionType, types.FrameType)
_CODE = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)
_SETTINGS = {
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "num_devices", "num_nodes", "world_size"),
    *(
        "precision",
        "accumulate_grad_batches",
        "gradient_clip_val",
        "gradient_clip_algorithm",
        "log_every_n_steps",
    ),
    *(
        "check_val_every_n_epoch",
        "default_root_dir",
        "fast_dev_run",
        "limit_train_batches",
        "limit_val_batches",
    ),
    *("is_global_zero", "global_rank", "local_rank", "node_rank", "device_ids"),
}
"""What code may read of a Trainer that it names by a global: the same for a client's and the user's."""
_ENDS = (*_CODE, type, nn.Module, Tensor, Optimizer, pl.Trainer)
_MOST, _NAMED = 500_000, 2_000
"""Objects of one global that are looked at, and those that are noted though the world did not meet them."""


def find_reachable(objects: Iterable[Any], known_ids: Container[int] = ()) -> dict[int, tuple[Any, str]]:
    """Objects that code reaches by a name of its own, by `id`, with that name.

    A global is followed to its end, or to the first half of a million objects, which is said.

    Args:
        objects: Functions and classes of a training's objects; those of libraries are passed over.
        known_ids: By `id`, what matters of a large global: objects that the world holds.

    Example:
        >>> class Step:
        ...     __module__ = "training"
        ...     seen: list[int] = []
        ...     def __call__(self) -> int:
        ...         return len(self.seen)
        >>> [name for _, name in find_reachable([Step]).values()]
        ['Step.seen']
    """
    found: dict[int, tuple[Any, str]] = {}
    for value, way, number in _walk(objects):
        if (
            not isinstance(value, _PLAIN)
            and value is not _NOTHING
            and (number < _NAMED or id(value) in known_ids or isinstance(value, pl.Trainer))
        ):
            found.setdefault(id(value), (value, way))
    return found


def find_named_state(objects: Iterable[Any]) -> list[tuple[str, Any]]:
    """Ways and values of what code names past its own, with all that it holds, numbers and text, too.

    Example:
        >>> class Step:
        ...     __module__ = "training"
        ...     mean, seen = 1.5, [2]
        >>> find_named_state([Step])
        [('Step.mean', 1.5), ('Step.seen', [2])]
    """
    return [(way, value) for value, way, number in _walk(objects) if way and number < _NAMED]


def _walk(used: Iterable[Any]) -> Iterator[tuple[Any, str, int]]:
    """Everything that code names, with the way to it and its number behind one name."""
    code, seen, walked = deque(one for one in used if not is_library_code(one)), set[int](), set[int]()
    copied = {id(one) for one in code}  # functions with their cells, where a client's objects hold them
    while code:
        one = code.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for value, name in _named_objects(one, id(one) in copied):
            if isinstance(value, _PLAIN):
                yield value, name, 0
            for number, (held, way) in enumerate(_contents(value, name, walked)):
                if isinstance(held, (*_CODE, type)) or "__wrapped__" in _get_attributes(held):
                    called = getattr(held, "__func__", held)
                    if not (is_library_code(called) or (number and _is_installed(called))):
                        code.append(called)
                if not isinstance(held, (*_CODE, type)):
                    yield held, way, number


def is_library_code(value: Any) -> bool:
    """Is it code of Python, of torch, of this package or the like, which carries nothing of a training?"""
    return str(getattr(value, "__module__", "") or "").partition(".")[0] in _LIBRARIES


def _is_installed(value: Any) -> bool:
    """Is it of a package's code, whose registries lead to all of the package?"""
    module = sys.modules.get(str(getattr(value, "__module__", "")))
    return module is None or "site-packages" in str(getattr(module, "__file__", ""))


def _is_fit_library(value: Any) -> bool:
    """Is it of a library that knows the whole fit, as `Federated` does?"""
    root = type(value).__module__.partition(".")[0]
    return root in _LIBRARIES and root not in sys.stdlib_module_names


def _named_objects(value: Any, copied: bool) -> Iterator[tuple[Any, str]]:
    """Objects that a function or a class names, with the name. Not in its cells, where these are copied."""
    if isinstance(value, type):
        for base in value.__mro__:
            if not is_library_code(base):
                values = ((v, f"{base.__name__}.{n}") for n, v in vars(base).items() if n[:2] != "__")
                yield from values
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
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.lru_cache(2**16)  # a data set of Hugging Face reaches 19,000, in the same order for each world
def _loaded_names(code: types.CodeType) -> tuple[set[tuple[str, bool]], set[str]]:
    """Globals that code loads or stores, whether only to read a Trainer's setting, and what it imports."""
    loaded, imported = set[tuple[str, bool]](), set[str]()
    for one, behind in pairwise((*dis.get_instructions(code), None)):
        if one is not None and one.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
            setting = behind is not None and behind.opname == "LOAD_ATTR" and behind.argval in _SETTINGS
            loaded.add((one.argval, setting))
        elif one is not None and one.opname == "IMPORT_NAME":
            imported.add(one.argval)
    return loaded, imported


def _reachable_globals(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
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
        elif id(value) not in seen and value.__name__.partition(".")[0] not in _LIBRARIES:
            seen.add(id(value))
            own = vars(value)
            queue.extend((own[part], f"{name}.{part}") for part in code.co_names if part in own)


def _contents(value: Any, name: str, seen: set[int]) -> Iterator[tuple[Any, str]]:
    """An object and all that it holds, but what was seen before."""
    queue, number = deque([(value, name)]), 0
    while queue:
        one, way = queue.popleft()
        if isinstance(one, _SKIPPED) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one, way
        number += 1
        if number == _MOST:
            rank_zero_warn(
                f"the training's code names {name}, and {_MOST:,} of its objects were looked at: what a "
                "client's objects share with the rest becomes two objects; name it by self alone"
            )
            return
        if not isinstance(one, _ENDS) and not _is_fit_library(one):
            queue.extend(
                (held, own) for held, own in _contained_values(one, way) if not isinstance(held, _PLAIN)
            )


def _contained_values(value: Any, path: str) -> Iterator[tuple[Any, str]]:
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
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else {}
