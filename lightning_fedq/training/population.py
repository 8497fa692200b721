"""The clients of one fit, wherever they are: what they hold, their server."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fedq._lightning import pl
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
from lightning_fedq.training.dry_round import first_clients
from lightning_fedq.training.loops import Schedule, ask_module_instead, handed_loader
from lightning_fedq.training.rank_group import DistributedClientsStrategy, get_rank_strategy
from lightning_fedq.training.ranks import RankEngine, RankSchedule, check_for_ranks
from lightning_fedq.training.settings import Federation

Stacks = Callable[[], list[Stack]]


@dataclass(frozen=True)
class PartitionedData:
    """Who holds what, and the batches that follow from it.

    Args:
        client_indices: Sample indices of each client; of a stream none.
        own_loaders: Whether every client has loaders of its own.
        held_out: Sample indices that each client keeps out of its training; empty if nobody does.
    """

    client_indices: list[Tensor]
    schedule: Schedule
    loader: ClientLoader
    own_loaders: bool
    held_out: list[Tensor]

    @property
    def reads_streams(self) -> bool:
        """Do clients read loaders of their own, or streams?"""
        return self.own_loaders or self.holds_streams

    @property
    def holds_streams(self) -> bool:
        """Is some client's data a stream, which says nothing of its length?"""
        return any(not len(part) for part in self.client_indices)


class Population(ABC):
    """The clients of one fit, from its setup on.

    Attributes:
        ranks: Strategy of this process where several train the clients.
        limit: Steps after which `fast_dev_run` cuts a round; 0 is all of it.
        coming: Returns the stacks of the round to come, or of the open one. The fit sets it.
        is_training: Whether clients train, so that a new question for the loader may renew it.
    """

    ranks: DistributedClientsStrategy | None = None
    limit = 0

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._holdings: PartitionedData | None = None
        self.coming: Stacks = list
        self.is_training = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Population:
        """Itself: the user's copied module or data module still asks the one federation."""
        return self

    @property
    def partitioned_data(self) -> PartitionedData:
        """Who holds what. Dealt out once, at the first question, which `configure_optimizers` may ask."""
        if self._holdings is None:
            self._holdings = self._partition_data()
        return self._holdings

    @property
    def is_partitioned(self) -> bool:
        """Have the data been dealt out?"""
        return self._holdings is not None

    def forget_partition(self) -> None:
        """Deal out anew at the next question: the plan has changed."""
        self._holdings = None

    def loader(self) -> ClientLoader:
        """The present loader of all clients."""
        return self.partitioned_data.loader

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, of clients that keep something elsewhere. Simulated ones have none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (simulated ones have none)
        """Go on from the state of a checkpoint."""

    def labels(self) -> Tensor:
        """Labels of all samples, `(samples,)`.

        Raises:
            ValueError: If the dataset has no integer labels.
        """
        return read_labels(self.loader().dataset, self._federation.clients.labels)

    def label_counts(self) -> Tensor | None:
        """Count the samples of each label that each client holds, `(clients, labels)`.

        None where labels are not to be had without reading every sample, or there are none.
        """
        if not has_stored_labels(self.loader().dataset, self._federation.clients.labels):
            return None
        try:
            return label_counts(self.labels(), self.partitioned_data.client_indices)
        except ValueError:
            return None

    def check_change(self, before: Members, after: Members) -> None:  # noqa: B027 (simulated ones follow any)
        """Refuse parameters that join or leave where clients can't follow."""

    def evaluator(self, trainer: pl.Trainer, engine: Any) -> ClientEvaluator | None:
        """Measures clients that are elsewhere, by `evaluate_clients`. None where they are measured here."""
        return None

    def check_start(self, trainer: pl.Trainer) -> None:  # noqa: B027 (simulated ones follow any schedule)
        """Refuse what is known once a fit has its optimisers.

        Raises:
            ValueError: With the cure.
        """

    @abstractmethod
    def trial_stacks(self) -> list[Stack] | None:
        """The first client to train, or nobody. None: nothing can be tried with anybody."""

    @abstractmethod
    def server(
        self, weights: Tensor, segments: Sequence[int], settings: dict[str, Any], round_labels: Stacks
    ) -> Any:
        """A new server of these clients.

        Args:
            weights: The global model, `(dim,)`.
            segments: Sizes of its segments, `dim` in sum.
            settings: Further arguments of a `RoundServer`.
            round_labels: Returns the stacks of a round that one process would train.
        """

    @abstractmethod
    def _partition_data(self) -> PartitionedData:
        """Deal out the data."""


class SimulatedClients(Population):
    """Clients that are trained here, on shares of the user's training data.

    Raises:
        ValueError: If there is a deadline and no durations.
    """

    def __init__(self, federation: Federation, trainer: Any, module: pl.LightningModule, undo: Undo) -> None:
        super().__init__(federation)
        self._trainer, self._undo = trainer, undo
        deadline = federation.clients.deadline
        if deadline is not None and deadline.durations is None:
            raise ValueError(
                f"{deadline!r} says not how long clients of a simulation need; give durations=..., seconds "
                "of one number or one a client, or leave deadline out"
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
        undo.replace(trainer, "limit_train_batches", 1.0)  # of every client's passes, not of the round
        # a plain function, so that a deep copy of the module does not copy this
        undo.replace(self._owner, "train_dataloader", lambda: self._asked())

    def _asked(self) -> ClientLoader:
        """The clients' loader. Once the training runs, over the user's new one where that is wished for."""
        if self.is_partitioned and self.is_training:
            now = self._trainer.current_epoch
            if self._asked_at is None:
                self._asked_at = now
            elif self._reload_every and now - self._asked_at >= self._reload_every:
                self._asked_at, held, rule = now, self.partitioned_data, self._federation.batch_rule
                renewed = self._renew(self._user_loader())
                if (check := getattr(rule, "check", None)) is not None:  # which data it draws from
                    check(renewed.dataset, held.client_indices)
                self._holdings = replace(held, loader=held.loader.over(renewed))
        return self.loader()

    def _partition_data(self) -> PartitionedData:
        federation, trainer = self._federation, self._trainer
        clients, local, rule = federation.clients, federation.local, federation.batch_rule
        if self.ranks is not None:
            federation.set_plan_seed(self.ranks.group.broadcast(federation.planner.seed, "the plan"))
        planner = federation.planner
        run = RoundPlan(0, (), frozenset(), planner.seed)
        measured = local.evaluate_clients
        held_out: HeldOut | PartitionedHeldOut | None = None
        if measured is not None and measured.fraction is not None:
            held_out = HeldOut(
                measured.fraction,
                lambda client: torch.Generator().manual_seed(run.stream_seed("held out", client)),
            )
        elif measured is not None and measured.partitioned is not None:
            draws = torch.Generator().manual_seed(run.stream_seed("partition"))  # the training's
            held_out = PartitionedHeldOut(measured.partitioned_dataset, draws)
        dealt = split_loader(
            self._user_loader(),
            lambda: choose_partition(self._owner, clients.partition),
            clients.num_clients,
            torch.Generator().manual_seed(run.stream_seed("partition")),
            clients.labels,
            LocalPasses(
                local.local_epochs, local.local_steps, self._limit_batches, not trainer.overfit_batches
            ),
            rule,
            held_out,
        )
        weighting = federation.server.weighting
        check_per_client_loaders(dealt.own_loaders, local.clients_per_step, weighting, dealt.client_indices)
        if self.ranks is not None:
            check_for_ranks(rule, dealt.client_indices)
        check_limit(dealt.work)
        if rule is not None:
            rule.begin(dealt.work)
        schedule = Schedule(planner, federation.mechanism, dealt.work, rule, self.limit)
        if self.ranks is not None:
            schedule = RankSchedule(schedule, self.ranks.global_rank, self.ranks.num_ranks)
        validate_by_rounds(trainer, schedule.max_batches, self._undo)
        self._renew = dealt.renew
        return PartitionedData(
            dealt.client_indices,
            schedule,
            dealt.loader(lambda: self.coming(), schedule.max_batches),
            dealt.own_loaders,
            [] if held_out is None else held_out.parts,
        )

    def trial_stacks(self) -> list[Stack] | None:
        held = self.partitioned_data
        if self._federation.batch_rule is not None or held.holds_streams:
            return None  # a rule draws once, and streams can't be read twice
        return first_clients(lambda round: held.schedule.trial_stacks(round, 1), 1)

    def server(
        self, weights: Tensor, segments: Sequence[int], settings: dict[str, Any], all: Stacks
    ) -> RoundEngine:
        """The round engine, or a rank's, see `Population.server`."""
        federation, server = self._federation, self._federation.server
        seed, root = federation.seed, os.urandom(32)
        secagg, more = server.secure_aggregation, dict[str, Any]()
        if self.ranks is not None:
            root = self.ranks.group.broadcast(root, "the keys")  # also where one has a seed
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
