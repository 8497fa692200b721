"""Choice of the Lightning package: either `lightning.pytorch` or `pytorch_lightning`.

All other modules import Lightning from here, since classes of the two packages can't be mixed. A callback
must come from the package of the program's Trainer. This module uses the package that the program names. If
the program names both or neither, it uses the package that was imported first, or `pytorch_lightning`.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

_NAMES = ("pytorch_lightning", "lightning.pytorch")


def find_package(name: str) -> str | None:
    """Return the Lightning package that a module belongs to, or None."""
    if name == "lightning" or name.startswith("lightning.pytorch"):
        return _NAMES[1]
    return _NAMES[0] if name.partition(".")[0] == _NAMES[0] else None


def _named_by_the_program() -> str | None:
    """Return the Lightning package that the importing program names, or None if it names both or neither.

    The search goes through the call stack from the inside out. The first frame decides that names one of the
    packages in its modules, classes and their bases, functions, or imports that have not run yet.
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
    # sys.modules is in the order of import
    _first = next((name for name in sys.modules if name in _NAMES), _NAMES[0])
    _PACKAGE = _named_by_the_program() or _first
    pl = importlib.import_module(_PACKAGE)
    is_overridden = importlib.import_module(f"{_PACKAGE}.utilities.model_helpers").is_overridden
    rank_zero_info, rank_zero_warn = pl.utilities.rank_zero_info, pl.utilities.rank_zero_warn

__all__ = ["get_callbacks", "is_overridden", "pl", "rank_zero_info", "rank_zero_warn"]


def get_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the callbacks of a trainer, in their order."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
