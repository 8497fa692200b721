"""The one module that binds to Lightning: `lightning.pytorch` or `pytorch_lightning`, never both.

The classes of the two packages never mix, so a callback must come from the package that the program's
Trainer comes from: the one that the program names, whatever its libraries import; if it names both, or
neither, whichever was imported first. Without either it is `pytorch_lightning`.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

_NAMES = ("pytorch_lightning", "lightning.pytorch")


def find_package(name: str) -> str | None:
    """Which of the two a module belongs to."""
    if name == "lightning" or name.startswith("lightning.pytorch"):
        return _NAMES[1]
    return _NAMES[0] if name.partition(".")[0] == _NAMES[0] else None


def _named_by_the_program() -> str | None:
    """The package that whoever imports this names, in what it has run or is about to. None if it is not one.

    The innermost code that names one decides: its modules, classes and their bases, functions, and imports.
    """
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if str(frame.f_globals.get("__name__")).partition(".")[0] in ("lightning_fedq", "importlib"):
            continue
        names = set(frame.f_code.co_names)
        for value in (*frame.f_globals.values(), *frame.f_locals.values()):
            if isinstance(value, types.ModuleType):
                names.add(value.__name__)
            elif isinstance(value, type | types.FunctionType):
                kinds: tuple[Any, ...] = value.__mro__ if isinstance(value, type) else (value,)
                names |= {str(kind.__module__) for kind in kinds}
        found = set(map(find_package, names)) - {None}
        if found:
            return found.pop() if len(found) == 1 else None
    return None


if TYPE_CHECKING:
    import pytorch_lightning as pl
    from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
    from pytorch_lightning.utilities.model_helpers import is_overridden
else:
    # sys.modules keeps the order of import
    _first = next((name for name in sys.modules if name in _NAMES), _NAMES[0])
    _PACKAGE = _named_by_the_program() or _first
    pl = importlib.import_module(_PACKAGE)
    is_overridden = importlib.import_module(f"{_PACKAGE}.utilities.model_helpers").is_overridden
    rank_zero_info, rank_zero_warn = pl.utilities.rank_zero_info, pl.utilities.rank_zero_warn

__all__ = ["get_callbacks", "is_overridden", "pl", "rank_zero_info", "rank_zero_warn"]


def get_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """The trainer's callbacks, in their order."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
