"""Number of Byzantine clients in a cohort of a simulation."""

from typing import Protocol, runtime_checkable

from lightning_fedq._lightning import pl
from lightning_fedq.rounds import RoundPlanner


@runtime_checkable
class ByzantineCallback(Protocol):
    """Callback that makes clients of a simulation Byzantine."""

    def num_byzantine(self, num_clients: int) -> int:
        """Return the number of Byzantine clients among `num_clients`."""


def count_byzantine(trainer: pl.Trainer, planner: RoundPlanner) -> int:
    """Return the largest number of clients of a cohort that the trainer's callbacks make Byzantine."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    numbers = [c.num_byzantine(planner.num_clients) for c in callbacks if isinstance(c, ByzantineCallback)]
    return min(sum(numbers), planner.cohort_size)
