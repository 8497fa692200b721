"""Plan and data of a client that is alone in its process: number 0 here, and `number` in the federation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedq.data.partition import Partition
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.rounds import RoundPlan, RoundPlanner


@dataclass(frozen=True)
class OwnData(Partition):
    """Partition with one client, which holds all samples in their given order."""

    needs_labels = False

    def split(
        self, labels: Tensor | None, num_samples: int, num_clients: int, generator: torch.Generator
    ) -> list[Tensor]:
        return [torch.arange(num_samples)]


@dataclass(frozen=True)
class OwnPlan(RoundPlan):
    """Round plan of one client, which is number 0 in this process and `number` in the federation.

    Random streams are drawn for the number in the federation, so they equal those of a simulation.
    """

    number: int = 0

    def stream_seed(self, purpose: str, client: int | None = None) -> int:
        return super().stream_seed(purpose, None if client is None else self.number)


@dataclass(frozen=True)
class OwnPlanner(RoundPlanner):
    """Planner of rounds with one client, which is number 0 here and `number` in the federation."""

    number: int = 0

    def plan(self, round: int, mechanism: Mechanism, attempt: int = 0) -> RoundPlan:
        return OwnPlan(round, ((0,),), frozenset(), self.seed, self.number)
