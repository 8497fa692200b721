"""Look up callbacks of a Trainer, such as its federation, for callbacks that report on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fedq._lightning import get_callbacks, pl
from lightning_fedq.training.settings import Federation

if TYPE_CHECKING:
    from lightning_fedq.callbacks.federated import Federated


def find_callback(trainer: pl.Trainer, kind: type) -> Any:
    """Return the trainer's first callback of a class. None if it has none."""
    return next((callback for callback in get_callbacks(trainer) if isinstance(callback, kind)), None)


def find_federated(trainer: pl.Trainer, asking: str) -> Federated:
    """Return the trainer's `Federated` callback.

    Args:
        trainer: The user's Trainer, or a client's Trainer.
        asking: Name of the calling callback, for the error message.

    Raises:
        ValueError: If the trainer has no `Federated` callback.
    """
    user_trainer = getattr(trainer, "home", trainer)  # a client's Trainer has the client's callbacks only
    federated: Federated | None = find_callback(user_trainer, Federation)
    if federated is None:
        raise ValueError(
            f"{asking} needs a federation, but the Trainer has no Federated callback. "
            "Add lightning_fedq.callbacks.Federated to its callbacks."
        )
    return federated
