"""Mechanisms by name: those of this package, of other packages, and any class by its path.

Another package declares its mechanisms as entry points of the group `lightning_fedq.mechanisms`, by name and
class:

    [project.entry-points."lightning_fedq.mechanisms"]
    SQKR = "fedq_sqkr:SQKR"

They then appear in the tables of `fedq mechanisms`, `fedq audit` and `fedq plan`, and checkpoints that were
trained with them can be read. A configuration may name any class by its path, even if it is not declared.
"""

from __future__ import annotations

import warnings
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING

from lightning_fedq import mechanisms

if TYPE_CHECKING:
    from lightning_fedq.mechanisms.interface import Mechanism

GROUP = "lightning_fedq.mechanisms"


@lru_cache(maxsize=1)
def declared() -> MappingProxyType[str, type[Mechanism]]:
    """Return the mechanisms that other packages declare, by name, if their entry points can be imported.

    Warns:
        UserWarning: If an entry point is left out, with the reason.
    """
    by_name: dict[str, type[Mechanism]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        try:
            kind = _loaded(point)
            holder = by_name.get(point.name) or getattr(mechanisms, point.name, kind)
            if holder is not kind:
                raise ValueError(f"{holder.__module__} has a mechanism of this name already")
            by_name[point.name] = kind
        except Exception as error:  # the import of another package may raise any exception
            origin = "" if point.dist is None else f" of {point.dist.name}"
            reason = f"{type(error).__name__}: {error}"
            text = f"mechanism {point.name}{origin} ({point.value}) is left out: {reason}"
            warnings.warn(text, stacklevel=2)
    return MappingProxyType({name: kind for name, kind in by_name.items() if name not in mechanisms.__all__})


def installed() -> dict[str, type[Mechanism]]:
    """Return all mechanisms by name: those of this package, then those that other packages declare."""
    return {**{name: getattr(mechanisms, name) for name in mechanisms.__all__}, **declared()}


def _loaded(point: EntryPoint) -> type[Mechanism]:
    """Import the class of an entry point, and check that it is a mechanism of this name."""
    kind = point.load()
    if not _is_mechanism(kind):
        raise TypeError(f"an entry point of {GROUP} must be a subclass of Mechanism, got {kind!r}")
    if kind.__name__ != point.name:
        raise ValueError(f"the entry point must have the name of its class, {kind.__name__}")
    return kind  # type: ignore[no-any-return]


def _is_mechanism(kind: object) -> bool:
    # lazy, because it imports torch, which lists of names do not need
    from lightning_fedq.mechanisms.interface import Mechanism

    return isinstance(kind, type) and issubclass(kind, Mechanism)


def mechanism_class(name: str) -> type[Mechanism]:
    """Return the class of a name: one of `installed`, or a class path, which is imported.

    Raises:
        ValueError: If there is no such class, or it is not a mechanism.
    """
    if name in mechanisms.__all__:
        return getattr(mechanisms, name)  # type: ignore[no-any-return]
    if name in declared():
        return declared()[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        close = get_close_matches(name, [*mechanisms.__all__, *declared()], 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"there is no mechanism {name}.{hint} Run `fedq mechanisms` to list them.")
    try:
        kind = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} can't be imported: {error}") from error
    if not _is_mechanism(kind):
        raise ValueError(f"{name} must be a subclass of Mechanism")
    return kind  # type: ignore[no-any-return]


def class_path(kind: type[Mechanism]) -> str:
    """Return the class path for a configuration: the public name here, module and name elsewhere."""
    if kind.__name__ in mechanisms.__all__ and getattr(mechanisms, kind.__name__) is kind:
        return f"{mechanisms.__name__}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"
