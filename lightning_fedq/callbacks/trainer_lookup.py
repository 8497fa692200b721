"""The federation of a Trainer, for callbacks that report on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fedq._lightning import get_callbacks, pl
from lightning_fedq.rounds import RoundEngine
from lightning_fedq.training.settings import Federation

if TYPE_CHECKING:
    from lightning_fedq.callbacks.federated import Federated


def find_federated(trainer: pl.Trainer, asking: str) -> Federated:
    """Return the trainer's `Federated` callback.

    Args:
        asking: Name of the caller, for the message.

    Raises:
        ValueError: If there is none.
    """
    of_the_fit = getattr(trainer, "home", trainer)  # a client's own Trainer has its own callbacks only
    found: list[Any] = [
        callback for callback in get_callbacks(of_the_fit) if isinstance(callback, Federation)
    ]
    if not found:
        raise ValueError(
            f"{asking} reports on a federation, and the Trainer has no Federated callback; "
            "add lightning_fedq.callbacks.Federated to its callbacks"
        )
    federated: Federated = found[0]
    return federated


def find_engine(trainer: pl.Trainer, asking: str) -> RoundEngine:
    """Return the engine of the trainer's federation. There is one from the start of the training on.

    Raises:
        ValueError: If there is no `Federated` callback.
    """
    engine = find_federated(trainer, asking).engine
    assert engine is not None
    return engine
