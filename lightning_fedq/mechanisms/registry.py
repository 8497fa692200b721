"""Mechanisms by name: those of this package, those that other packages declare, and any by its class path.

Another package declares its mechanisms as entry points of the group `lightning_fedq.mechanisms`, the name and
the class:

    [project.entry-points."lightning_fedq.mechanisms"]
    SQKR = "fedq_sqkr:SQKR"

They then stand in the tables of `fedq mechanisms`, `fedq audit` and `fedq plan`, and checkpoints that were
trained with them can be read. A configuration names any class by its path, declared or not.
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
    """Mechanisms that other packages declare, by name: those of entry points that import.

    Warns:
        UserWarning: Which entry point is left out, and why.
    """
    found: dict[str, type[Mechanism]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        try:
            kind = _loaded(point)
            holder = found.get(point.name) or getattr(mechanisms, point.name, kind)
            if holder is not kind:
                raise ValueError(f"{holder.__module__} has a mechanism of this name already")
            found[point.name] = kind
        except Exception as error:  # whatever the import of another package may raise
            origin = "" if point.dist is None else f" of {point.dist.name}"
            warnings.warn(
                f"the mechanism {point.name}{origin} ({point.value}) is left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
    return MappingProxyType({name: kind for name, kind in found.items() if name not in mechanisms.__all__})


def installed() -> dict[str, type[Mechanism]]:
    """All mechanisms by name: this package's, then those that others declare."""
    return {**{name: getattr(mechanisms, name) for name in mechanisms.__all__}, **declared()}


def _loaded(point: EntryPoint) -> type[Mechanism]:
    kind = point.load()
    if not _is_mechanism(kind):
        raise TypeError(f"an entry point of {GROUP} must be a class that inherits Mechanism, got {kind!r}")
    if kind.__name__ != point.name:
        raise ValueError(f"the entry point must be called as its class, {kind.__name__}")
    return kind  # type: ignore[no-any-return]


def _is_mechanism(kind: object) -> bool:
    from lightning_fedq.mechanisms.interface import (
        Mechanism,  # imports torch, which lists of names do without
    )

    return isinstance(kind, type) and issubclass(kind, Mechanism)


def mechanism_class(name: str) -> type[Mechanism]:
    """Class of a name: one of `installed`, or a class path, which is imported.

    Raises:
        ValueError: If there is no such class, or it is no mechanism.
    """
    if name in mechanisms.__all__:
        return getattr(mechanisms, name)  # type: ignore[no-any-return]
    if name in declared():
        return declared()[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        close = get_close_matches(name, [*mechanisms.__all__, *declared()], 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"there is no mechanism {name}.{hint} `fedq mechanisms` lists them")
    try:
        kind = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} does not import: {error}") from error
    if not _is_mechanism(kind):
        raise ValueError(f"{name} is no class that inherits Mechanism")
    return kind  # type: ignore[no-any-return]


def class_path(kind: type[Mechanism]) -> str:
    """Class path in a configuration: the public name of this package's, module and name of others."""
    if kind.__name__ in mechanisms.__all__ and getattr(mechanisms, kind.__name__) is kind:
        return f"{mechanisms.__name__}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"
