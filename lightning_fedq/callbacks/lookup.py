"""Lookup of the federation that a reporting callback reports on."""

from __future__ import annotations

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks.federated import Federated
from lightning_fedq.rounds import RoundEngine


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """The trainer's callbacks, in their order."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def federated_of(trainer: pl.Trainer, asking: str) -> Federated:
    """Return the trainer's `Federated` callback.

    Args:
        trainer: The trainer.
        asking: Who asks, for the message.

    Raises:
        ValueError: If there is none.
    """
    found = [callback for callback in callbacks_of(trainer) if isinstance(callback, Federated)]
    if not found:
        raise ValueError(
            f"{asking} reports on a federation, and the Trainer has no Federated callback; "
            "add lightning_fedq.callbacks.Federated to its callbacks"
        )
    return found[0]


def engine_of(trainer: pl.Trainer, asking: str) -> RoundEngine:
    """Return the engine of the trainer's federation. There is one from the start of the training on.

    Raises:
        ValueError: If there is no `Federated` callback.
    """
    engine = federated_of(trainer, asking).engine
    assert engine is not None
    return engine
