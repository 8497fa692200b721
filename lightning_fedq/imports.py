"""Deferred imports: optional dependencies, and names of a package that are found when used (PEP 562)."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
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


def lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package, from its imports under `if TYPE_CHECKING:`.

    They are read from the source, so that the home of a name stands once, for people, type checkers and here.

    Args:
        package: Its `__name__`. `import *` there stands for all names of another package.
    """
    module = sys.modules[package]

    @functools.cache
    def homes() -> dict[str, str]:
        found: dict[str, str] = {}
        for block in ast.parse(inspect.getsource(module)).body:
            if isinstance(block, ast.If) and isinstance(block.test, ast.Name):
                for node in block.body:
                    assert isinstance(node, ast.ImportFrom) and node.module is not None
                    for name in (alias.name for alias in node.names):
                        names = import_module(node.module).__all__ if name == "*" else [name]
                        found.update(dict.fromkeys(names, node.module))
        return found

    def find(name: str) -> Any:
        if name.startswith("__") or name not in homes():  # the source is read when a name is first asked for
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes()[name]), name)
        setattr(module, name, value)
        return value

    return find, lambda: sorted({*vars(module), *homes()})
