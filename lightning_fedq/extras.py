"""Optional dependencies: the error that names the extra to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
