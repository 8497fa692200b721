"""The one module that binds to Lightning: `lightning.pytorch` or `pytorch_lightning`, never both.

The classes of the two packages never mix, so a callback must come from the package that the
program's Trainer comes from: whichever was imported first. Without either it is `pytorch_lightning`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
    from pytorch_lightning.utilities.model_helpers import is_overridden
else:
    _NAMES = ("pytorch_lightning", "lightning.pytorch")
    # sys.modules keeps the order of import
    _PACKAGE = next((name for name in sys.modules if name in _NAMES), _NAMES[0])
    pl = importlib.import_module(_PACKAGE)
    is_overridden = importlib.import_module(f"{_PACKAGE}.utilities.model_helpers").is_overridden
    rank_zero_info, rank_zero_warn = pl.utilities.rank_zero_info, pl.utilities.rank_zero_warn

__all__ = ["callbacks_of", "is_overridden", "pl", "rank_zero_info", "rank_zero_warn"]


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The trainer's callbacks, in their order."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
