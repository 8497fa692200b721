"""Deferred imports: optional dependencies, and names of a package that are imported at first use."""

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
        name: Extra of this distribution that installs the dependency.
        purpose: Feature that needs the dependency, for the error.

    Raises:
        ModuleNotFoundError: If an import inside finds no module. The message has the command that installs
            it.
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
    """Return `__getattr__` and `__dir__` for a package that imports its names at first use (PEP 562).

    The names and their modules are read from the imports under `if TYPE_CHECKING:` in the package's source.
    One list therefore serves readers, type checkers and this function.

    Args:
        package: `__name__` of the package. `import *` under `TYPE_CHECKING` stands for all names of another
            package.
    """
    module = sys.modules[package]

    @functools.cache
    def homes() -> dict[str, str]:
        modules: dict[str, str] = {}
        for block in ast.parse(inspect.getsource(module)).body:
            if isinstance(block, ast.If) and isinstance(block.test, ast.Name):
                for node in block.body:
                    assert isinstance(node, ast.ImportFrom) and node.module is not None
                    for name in (alias.name for alias in node.names):
                        names = import_module(node.module).__all__ if name == "*" else [name]
                        modules.update(dict.fromkeys(names, node.module))
        return modules

    def find(name: str) -> Any:
        if name.startswith("__") or name not in homes():  # dunder names never read the source
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes()[name]), name)
        setattr(module, name, value)
        return value

    return find, lambda: sorted({*vars(module), *homes()})
