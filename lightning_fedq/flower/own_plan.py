"""Plan and data of a client that is alone in its process: number 0 here, and `number` in the federation."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_fedq.callbacks import Federated
from lightning_fedq.data.batches import BatchRule
from lightning_fedq.data.client_splits import ClientSplits, LocalPasses, split_loader
from lightning_fedq.data.held_out import HeldOut
from lightning_fedq.data.partition import Partition
from lightning_fedq.flower.refusals import RefusedError, refused_in_private
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.rounds import RoundPlan, RoundPlanner
from lightning_fedq.training.checks import check_limit


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


def split_own_data(
    user_loader: Any,
    federated: Federated,
    limit: int | float,
    rule: BatchRule | None,
    held_out: HeldOut | None,
    trainer: Any,
) -> ClientSplits:
    """Return the samples of the user's loader as the data of one client.

    Args:
        user_loader: Training loader of the user.
        federated: Settings of the federation.
        limit: Limit of a pass over the data, `limit_train_batches` of the user's Trainer.
        rule: Rule that draws the batches in place of passes, or None.
        held_out: Choice of the samples that are not trained on, or None.
        trainer: Trainer of the client.

    Raises:
        RefusedError: If the data are a stream, since a pass over a stream has no end that a round could wait
            for. Also if the limit leaves no batch.
    """
    if isinstance(getattr(user_loader, "dataset", user_loader), IterableDataset):
        raise RefusedError(
            "Training data must be a map-style Dataset, got a stream (an IterableDataset). Give a "
            "Dataset of the samples to train on."
        )
    local, labels = federated.local, federated.clients.labels
    passes = LocalPasses(local.local_epochs, local.local_steps, limit, not trainer.overfit_batches)
    split = split_loader(user_loader, OwnData, 1, torch.Generator(), labels, passes, rule, held_out)
    words = f"limit_train_batches={limit} leaves this client without a batch. Use a larger limit, or an int"
    with refused_in_private(words):
        check_limit(split.work)
    return split
