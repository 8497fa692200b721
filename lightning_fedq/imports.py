"""Deferred imports: optional dependencies, and names of a package that are found when used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Guard imports of an optional dependency: `with extra("wandb", "WandbRounds"): import wandb`.

    Args:
        name: Extra of this distribution that installs it.
        purpose: What needs it, for the error.

    Raises:
        ModuleNotFoundError: If an import inside finds no module; it names the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{purpose} needs {error.name}, which is not installed: pip install 'lightning-fedq[{name}]'",
            name=error.name,
            path=error.path,
        ) from error


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package: Its `__name__`.
        homes: Module of each name, as seen from the package. `__all__` of the package says no other names.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
