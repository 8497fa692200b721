"""The clients of one fit, simulated or elsewhere: their partition of the data, and their server."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fedq._lightning import get_callbacks, pl
from lightning_fedq.clients.undo import Undo
from lightning_fedq.clients.vector import Members
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.client_splits import LocalPasses, split_loader
from lightning_fedq.data.datamodule import choose_partition
from lightning_fedq.data.held_out import HeldOut, PartitionedHeldOut
from lightning_fedq.data.labels import has_stored_labels, label_counts, read_labels
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.keys.randomness import Keys, RootKeys, SeededKeys
from lightning_fedq.rounds import RoundEngine, RoundPlan
from lightning_fedq.secagg import Aggregation
from lightning_fedq.training.checks import check_limit, check_per_client_loaders, validate_by_rounds
from lightning_fedq.training.client_evaluation import ClientEvaluator
from lightning_fedq.training.client_metrics import has_claim, sample_protectors
from lightning_fedq.training.dry_round import first_clients
from lightning_fedq.training.loops import Schedule, ask_module_instead, handed_loader
from lightning_fedq.training.rank_group import DistributedClientsStrategy, get_rank_strategy
from lightning_fedq.training.ranks import RankEngine, RankSchedule, check_for_ranks
from lightning_fedq.training.settings import Federation

Stacks = Callable[[], list[Stack]]


@dataclass(frozen=True)
class PartitionedData:
    """Partition of the training data, and the schedule of the clients' batches.

    Args:
        client_indices: Sample indices of each client, `(num_samples,)`. Empty for a stream.
        schedule: Stacks and batches of any round.
        loader: Loader of all clients.
        own_loaders: Does every client have its own loaders?
        held_out: Sample indices that each client keeps out of its training. Empty list if no client does.
    """

    client_indices: list[Tensor]
    schedule: Schedule
    loader: ClientLoader
    own_loaders: bool
    held_out: list[Tensor]

    @property
    def holds_streams(self) -> bool:
        """Whether the data of some client are a stream, which has no length."""
        return any(not len(part) for part in self.client_indices)


class Population(ABC):
    """Base class for the clients of one fit, from its setup on.

    Attributes:
        ranks: Strategy of this process if several ranks train the clients. None if there is one process.
        limit: Number of steps after which `fast_dev_run` cuts a round. 0 for no limit.
        coming: Returns the stacks of the next round, or of the open one. The fit sets it.
        is_training: Whether the training has begun, so that the training loader may be renewed.
        keeps_personal: Whether this process stores the clients' personal tensors between rounds.
    """

    keeps_personal = False
    ranks: DistributedClientsStrategy | None = None
    limit = 0

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._holdings: PartitionedData | None = None
        self.coming: Stacks = list
        self.is_training = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Population:
        """Return the same object, because a copied module or data module still uses the one federation."""
        return self

    @property
    def partitioned_data(self) -> PartitionedData:
        """Partition of the data. Made once at first use, which may be in `configure_optimizers`."""
        if self._holdings is None:
            self._holdings = self._partition_data()
        return self._holdings

    @property
    def is_partitioned(self) -> bool:
        """Whether the data have been partitioned."""
        return self._holdings is not None

    def forget_partition(self) -> None:
        """Partition the data again at the next use, because the seed of the plan has changed."""
        self._holdings = None

    def loader(self) -> ClientLoader:
        """Return the present loader of all clients."""
        return self.partitioned_data.loader

    def state_dict(self) -> dict[str, Any]:
        """Return the state of clients elsewhere for a checkpoint. Simulated clients have none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (simulated ones have none)
        """Restore the state of a checkpoint."""

    def labels(self) -> Tensor:
        """Return the labels of all samples, `(samples,)`.

        Raises:
            ValueError: If the dataset has no integer labels.
        """
        return read_labels(self.loader().dataset, self._federation.clients.labels)

    def label_counts(self) -> Tensor | None:
        """Count the samples of each label that each client holds, `(clients, labels)`.

        None if there are no labels, or reading them needs every sample.
        """
        if not has_stored_labels(self.loader().dataset, self._federation.clients.labels):
            return None
        try:
            return label_counts(self.labels(), self.partitioned_data.client_indices)
        except ValueError:
            return None

    def check_change(self, before: Members, after: Members) -> None:  # noqa: B027 (simulated ones follow any)
        """Refuse a change of the trained parameters that clients can't follow."""

    def evaluator(self, trainer: pl.Trainer, engine: Any) -> ClientEvaluator | None:
        """Return the evaluator of clients that are elsewhere. None if clients are evaluated here."""
        return None

    def check_start(self, trainer: pl.Trainer) -> None:  # noqa: B027 (simulated ones follow any schedule)
        """Refuse a schedule that clients can't follow, once the fit has its optimisers.

        Raises:
            ValueError: If they can't. The message has the cure.
        """

    @abstractmethod
    def trial_stacks(self) -> list[Stack] | None:
        """Return the stack of the first client to train, or none. None if no client can be tried."""

    @abstractmethod
    def server(
        self, weights: Tensor, segments: Sequence[int], settings: dict[str, Any], round_labels: Stacks
    ) -> Any:
        """Return a new server of these clients.

        Args:
            weights: Global model, `(dim,)`.
            segments: Sizes of the vector's segments, which add up to `dim`.
            settings: Further arguments of `RoundServer`.
            round_labels: Returns the stacks of a round as one process would train them.
        """

    @abstractmethod
    def _partition_data(self) -> PartitionedData:
        """Partition the data."""


class SimulatedClients(Population):
    """Clients of a simulation, which train here on a partition of the user's training data.

    Raises:
        ValueError: If there is a deadline without durations.
    """

    keeps_personal = True

    def __init__(self, federation: Federation, trainer: Any, module: pl.LightningModule, undo: Undo) -> None:
        super().__init__(federation)
        self._trainer, self._undo = trainer, undo
        deadline = federation.clients.deadline
        if deadline is not None and deadline.durations is None:
            raise ValueError(
                f"{deadline!r} lacks the durations of simulated clients. Give durations=... in seconds, "
                "as one number or one a client, or leave deadline out"
            )
        self.ranks = get_rank_strategy(trainer)
        if self.ranks is not None:
            self.ranks.has_federation = True
        datamodule, handed = trainer.datamodule, handed_loader(trainer)
        self._owner = module if datamodule is None else datamodule
        self._user_loader = self._owner.train_dataloader if handed is None else lambda: handed
        if handed is not None:
            ask_module_instead(trainer, module, undo)
        self._renew: Callable[[Any], Any] = lambda given: given
        self._reload_every = int(trainer.reload_dataloaders_every_n_epochs)
        self._asked_at: int | None = None
        self.limit = int(trainer.fast_dev_run)
        self._limit_batches = 1.0 if self.limit else trainer.limit_train_batches
        undo.replace(trainer, "limit_train_batches", 1.0)  # applied to each client's passes instead
        # a lambda, so that a deep copy of the module does not copy this object
        undo.replace(self._owner, "train_dataloader", lambda: self._asked())

    def _asked(self) -> ClientLoader:
        """Return the clients' loader. After reload_dataloaders_every_n_epochs rounds, reload the user's."""
        if self.is_partitioned and self.is_training:
            now = self._trainer.current_epoch
            if self._asked_at is None:
                self._asked_at = now
            elif self._reload_every and now - self._asked_at >= self._reload_every:
                self._asked_at, held, rule = now, self.partitioned_data, self._federation.batch_rule
                renewed = self._renew(self._user_loader())
                if (check := getattr(rule, "check", None)) is not None:  # the rule draws from known data only
                    check(renewed.dataset, held.client_indices)
                self._holdings = replace(held, loader=held.loader.over(renewed))
        return self.loader()

    def _generator(self, purpose: str, client: int | None = None) -> torch.Generator:
        """Return a generator for one purpose, from the seed of the plan."""
        run = RoundPlan(0, (), frozenset(), self._federation.planner.seed)
        return torch.Generator().manual_seed(run.stream_seed(purpose, client))

    def _make_held_out(self) -> HeldOut | PartitionedHeldOut | None:
        """Return the rule for the clients' held-out samples. None if no samples are held out here."""
        measured = self._federation.local.evaluate_clients
        if measured is not None and measured.fraction is not None:
            return HeldOut(measured.fraction, lambda client: self._generator("held out", client))
        if measured is not None and measured.partitioned is not None:
            # partitioned by the same draws as the training data
            return PartitionedHeldOut(measured.partitioned_dataset, self._generator("partition"))
        return None

    def _partition_data(self) -> PartitionedData:
        federation, trainer = self._federation, self._trainer
        clients, local, rule = federation.clients, federation.local, federation.batch_rule
        if self.ranks is not None:
            federation.set_plan_seed(self.ranks.group.broadcast(federation.planner.seed, "the plan"))
        planner, held_out, shuffle = federation.planner, self._make_held_out(), not trainer.overfit_batches
        split = split_loader(
            self._user_loader(),
            lambda: choose_partition(self._owner, clients.partition),
            clients.num_clients,
            self._generator("partition"),
            clients.labels,
            LocalPasses(local.local_epochs, local.local_steps, self._limit_batches, shuffle),
            rule,
            held_out,
        )
        weighting = federation.server.weighting
        check_per_client_loaders(split.own_loaders, local.clients_per_step, weighting, split.client_indices)
        if self.ranks is not None:
            check_for_ranks(rule, split.client_indices)
        check_limit(split.work)
        if rule is not None:
            rule.begin(split.work)
        schedule = Schedule(planner, federation.mechanism, split.work, rule, self.limit)
        if self.ranks is not None:
            schedule = RankSchedule(schedule, self.ranks.global_rank, self.ranks.num_ranks)
        validate_by_rounds(trainer, schedule.max_batches, self._undo)
        self._renew = split.renew
        return PartitionedData(
            split.client_indices,
            schedule,
            split.loader(lambda: self.coming(), schedule.max_batches),
            split.own_loaders,
            [] if held_out is None else held_out.parts,
        )

    def trial_stacks(self) -> list[Stack] | None:
        data = self.partitioned_data
        if self._federation.batch_rule is not None or data.holds_streams:
            return None  # a rule can draw its batches only once, and streams can't be read twice
        return first_clients(lambda round: data.schedule.trial_stacks(round, 1), 1)

    def server(
        self, weights: Tensor, segments: Sequence[int], settings: dict[str, Any], all: Stacks
    ) -> RoundEngine:
        """Return a round engine, or a rank's engine, see `Population.server`."""
        federation, server = self._federation, self._federation.server
        seed, root = federation.seed, os.urandom(32)
        secagg, more = server.secure_aggregation, dict[str, Any]()
        if self.ranks is not None:
            root = self.ranks.group.broadcast(root, "the keys")  # sent even if this rank has a seed
            more = {"strategy": self.ranks, "stacks": all}
        keys: Keys = RootKeys(root) if seed is None else SeededKeys(seed)
        return (RoundEngine if self.ranks is None else RankEngine)(
            federation.mechanism,
            federation.planner,
            keys,
            weights,
            segments,
            server.range_rule,
            secure_sums=None if secagg is None else partial(Aggregation, secagg),
            diagnostics=server.diagnostics,
            **settings,
            **more,
        )


def will_share_metrics(federation: Federation, trainer: pl.Trainer) -> bool:
    """Return whether clients will share the metrics that they log, before there is a server.

    It follows the policy of `choose_metrics_policy`.
    """
    choice = federation.local.client_metrics
    if choice is not None:
        return choice == "shared"
    if sample_protectors(get_callbacks(trainer)):
        return False
    context = federation.planner.expected_context(federation.mechanism, 1)
    return federation.seed is not None or not has_claim(federation.mechanism, context)
