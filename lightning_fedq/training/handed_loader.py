"""Loaders handed straight to `fit(...)`: found, taken over and given back. Lightning's private names for it.

Tried on Lightning 2.4 and 2.6: `fit_loop._data_source.instance` is whatever the training loader comes from,
the module, the data module or the loaders themselves. With the module in the loaders' place, Lightning asks
the module's `train_dataloader`, which can be replaced in public.
"""

from __future__ import annotations

from typing import Any

from lightning_fedq._lightning import pl
from lightning_fedq.clients.undo import Undo


def handed_loader(trainer: Any) -> Any:
    """The training loader handed to `fit(...)`.

    None where a module or a data module returns it.
    """
    instance = getattr(getattr(trainer.fit_loop, "_data_source", None), "instance", None)
    return None if isinstance(instance, pl.LightningModule | pl.LightningDataModule) else instance


def ask_module_instead(trainer: Any, module: pl.LightningModule, undo: Undo) -> None:
    """Let Lightning take the training loader from the module's `train_dataloader`, until undone."""
    undo.replace(trainer.fit_loop._data_source, "instance", module)


def forget_loader(trainer: Any) -> None:
    """Let Lightning ask for the training loader again before it trains, as its own tuner does."""
    if trainer.train_dataloader is not None:
        trainer.fit_loop._combined_loader = None
