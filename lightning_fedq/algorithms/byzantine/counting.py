"""Number of clients of a cohort that lie in a simulation."""

from typing import Protocol, runtime_checkable

from lightning_fedq._lightning import pl
from lightning_fedq.rounds import RoundPlanner


@runtime_checkable
class ByzantineCallback(Protocol):
    """A callback that makes clients of a simulation lie."""

    def num_byzantine(self, num_clients: int) -> int:
        """Number of Byzantine clients among so many."""


def count_byzantine(trainer: pl.Trainer, planner: RoundPlanner) -> int:
    """Clients of a cohort, at most, that the trainer's callbacks make lie."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    numbers = [c.num_byzantine(planner.num_clients) for c in callbacks if isinstance(c, ByzantineCallback)]
    return min(sum(numbers), planner.cohort_size)
