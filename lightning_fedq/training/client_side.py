"""The clients of one process: their checks before the first round, and their training in rounds.

State that is open until the round has ended (`PerRound`) is begun, counted and forgotten in one loop, so that
a round which is given up leaves nothing to restore.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_fedq._lightning import rank_zero_warn
from lightning_fedq.algorithms import Correction
from lightning_fedq.clients.changed_tensors import ChangedTensors
from lightning_fedq.clients.clock import ClientProgress, Clock
from lightning_fedq.clients.constraints import Constraint
from lightning_fedq.clients.fit import ClientFit
from lightning_fedq.clients.measurement import compute_statistics
from lightning_fedq.clients.personal import Packed
from lightning_fedq.clients.vector import Members, Vector
from lightning_fedq.clients.worker import ClientWorker, TrainedStack
from lightning_fedq.data.batches import BatchRule, Stack
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.rounds import Statistics
from lightning_fedq.training.checks import ClientSettingsError, check_algorithm, check_client, check_memory
from lightning_fedq.training.client_metrics import ClientMetrics, ClientMetricsChoice, RankMetrics
from lightning_fedq.training.dry_round import DryWorker
from lightning_fedq.training.rank_group import RankGroup
from lightning_fedq.training.rehearsal import (
    TrialFindings,
    check_smallest,
    check_statistics,
    first_steps,
    with_end,
)
from lightning_fedq.training.settings import Local

if TYPE_CHECKING:
    from lightning_fedq.training.population import PartitionedData


class PerRound(Protocol):
    """State that is open during a round, and that counts only when the round has ended."""

    def begin_round(self) -> None:
        """Forget the open state, which a round that was given up has left."""

    def commit(self, counted: Collection[int]) -> None:
        """Keep the open state of the clients whose updates the round has counted."""


class RankShare(NamedTuple):
    """Steps, logs and states of one rank's clients in a round. Updates are exchanged separately."""

    progress: ClientProgress
    logged: RankMetrics | None
    pending: Packed
    max_counted: Tensor


class ClientSide:
    """The clients of one process: all clients of a simulation, those of a rank, or one on its own machine.

    This class knows no server and keeps no mechanism. It is built in two steps. The constructor checks the
    clients' own settings, and finds the trained vector, which the server needs. `begin` then gets the
    server's decision on which clients may log.

    Args:
        holdings: The clients' data and schedule of batches.
        loader: Returns the present loader of all clients.
        rule: Rule that draws batches. None trains whole passes over the data.
        owner: Callback in whose `on_fit_start` this object is made.
        no_forks: Why the process can't be forked. "" if it can.
        trial_stacks: Stack of the client for the dry round, at most one. None skips it, and the types of the
            layers tell which tensors change.
        members: Parameters and buffers of the trained vector, from a checkpoint. None finds them.
        shares: Will clients log for validation to see?

    Raises:
        ClientSettingsError: If the clients' own settings, callbacks or module are refused (`check_client`).

    Attributes:
        clock: Steps and learning rates of one client.
        findings: Findings of one client's first steps in the dry round.
        vector: Trained vector: the tensors that are sent, as one flat vector.
        log: Metrics that clients log. Set by `begin`, as `worker`.
        worker: Trains and evaluates the clients.
        present: Stack that is training. None between stacks.
    """

    log: ClientMetrics
    worker: ClientWorker

    def __init__(
        self,
        trainer: Any,
        local: Local,
        holdings: PartitionedData,
        loader: Callable[[], ClientLoader],
        rule: BatchRule | None,
        owner: Any,
        no_forks: str,
        trial_stacks: Sequence[Stack] | None,
        members: Members | None = None,
        shares: bool = False,
    ) -> None:
        self._shares = shares
        self._trainer, self._local, self._rule, self._loader = trainer, local, rule, loader
        self._holdings, self._no_forks, self._refused_to_stop = holdings, no_forks, False
        self._owner = owner
        try:
            check_client(trainer, local, rule)
            if local.algorithm is not None:
                check_algorithm(local.algorithm, trainer, rule, holdings.schedule.has_equal_batches)
        except ValueError as error:
            raise ClientSettingsError(str(error)) from error
        self.present: Stack | None = None
        self.clock = Clock(trainer, holdings.schedule.max_batches)
        module = trainer.lightning_module
        self.findings = TrialFindings(ChangedTensors.from_layers(module))
        # from the types of the layers until the dry round has run: patterns may name what only training shows
        self.vector = self._vector(members, local.constraints if trial_stacks is None else None)
        if trial_stacks is not None:
            dry = self.dry()
            self.findings = dry.run_in_fork(lambda: first_steps(dry, trial_stacks))
            self.findings.check(module)
            self.vector = self._vector(members, local.constraints)

    def _vector(self, members: Members | None, constraints: Mapping[str, Constraint] | None) -> Vector:
        local = self._local
        return Vector(
            self._trainer.lightning_module,
            lambda: self._trainer.strategy.optimizers,
            local.buffers,
            ChangedTensors() if local.buffers == "frozen" else self.findings.rehearsed,
            members,
            local.personal_parameters,
            local.extra_buffers,
            constraints,
        )

    def check_end(self) -> None:
        """Refuse a validation or a checkpoint that fails at the end of a round, where no client is tried.

        Raises:
            ValueError: As the user's own error, if one fails.
        """
        dry, seen = self.dry(), self.findings
        self.findings = dry.run_in_fork(lambda: with_end(seen, dry, ()))
        self.findings.check(self._trainer.lightning_module)

    def check_algorithm(self, mechanism: Mechanism) -> None:
        """Refuse a mechanism that loses what the clients' algorithm assumes was sent.

        Args:
            mechanism: Mechanism that sends the clients' updates.

        Raises:
            ClientSettingsError: If it loses something. The message has the cure.
        """
        algorithm, vector = self._local.algorithm, self.vector
        if algorithm is not None:
            check_memory(algorithm, mechanism, vector.num_parameters, sum(vector.segments))

    def dry(self, is_started: bool = False) -> DryWorker:
        """Return a worker that trains clients outside of the rounds.

        Args:
            is_started: Have all hooks of the start run?
        """
        owner, rule, term = self._owner, self._rule, None
        if is_started:
            owner, term = None, self.worker.term
        elif self._local.algorithm is not None:
            term = self._local.algorithm.begin(self.vector.num_parameters)
        skips, statistics = rule is not None and rule.skips_empty, self._local.statistics
        return DryWorker(
            self._trainer,
            self.vector,
            self.clock,
            self._loader,
            self._no_forks,
            owner,
            skips,
            term,
            self._shares,
            0 if statistics is None else statistics.size,
        )

    def check_smallest(self, tried: Stack) -> None:
        """Refuse data with a batch that is too small to train on, see `rehearsal.check_smallest`."""
        check_smallest(self.dry(), self._holdings, tried)

    def check_statistics(self, tried: Stack) -> None:
        """Refuse statistics that fail or are not finite, see `rehearsal.check_statistics`."""
        if self._local.statistics is not None:
            check_statistics(self.dry(), tried)

    def begin(
        self,
        choice: ClientMetricsChoice,
        term: Correction | None,
        clients_per_step: int = 1,
        ranks: RankGroup | None = None,
        number: int | None = None,
    ) -> None:
        """Make the log and the worker, after the server has been made.

        Args:
            choice: Policy for metrics that clients log.
            term: Client half of the local algorithm. None is federated averaging.
            clients_per_step: Largest number of clients that train in one step.
            ranks: Group of the ranks that share the clients. None if there is one process.
            number: Number of the only client in this process. None if there are several.

        Raises:
            ValueError: If a callback or schedule decides by metrics that stay with the clients.
        """
        trainer, rule = self._trainer, self._rule
        self.log = ClientMetrics(choice, trainer, ranks)
        self.log.names.update(self.findings.names)
        self.log.check_watched()
        self.worker = ClientWorker(
            trainer,
            self.vector,
            ClientFit(trainer, trainer.loggers if self.log.shared else None, number),
            self.clock,
            self.log,
            self._loader,
            clients_per_step,
            rule is not None and rule.skips_empty,
            term,
        )

    # ---- a round ----------------------------------------------------------------------------------

    @property
    def _parts(self) -> tuple[PerRound, ...]:
        return self.vector, self.worker.states, self.clock

    def begin_round(self) -> None:
        """Forget open state, before the first client of a round or after a round is given up."""
        for part in self._parts:
            part.begin_round()

    @contextmanager
    def training(
        self,
        weights: Tensor,
        statistics: Statistics | None = None,
        on_progress: Callable[[int], object] = lambda done: None,
    ) -> Iterator[Iterator[TrainedStack]]:
        """Yield the trained stacks of a round, and clean up after the last one.

        Args:
            weights: Global model, `(dim,)`.
            statistics: Statistics to compute of each client's data instead of an update. None trains.
            on_progress: Called after each stack with the number of clients that are done.
        """
        self.log.begin_round()
        try:
            yield self._train_stacks(weights, statistics, on_progress)
        finally:
            self.present = None
            self.worker.fit.end_round()  # drop the state that clients were copied from: it changes each round
            self.log.detach()

    def _train_stacks(
        self, weights: Tensor, statistics: Statistics | None, on_progress: Callable[[int], object]
    ) -> Iterator[TrainedStack]:
        done = 0
        for stack, batches in self._loader().iterate_stacks():
            self.present = stack
            if stack.clients and statistics is not None:
                vector = compute_statistics(self.worker.fit, stack, batches, statistics.size)
                yield TrainedStack(stack.clients, vector[None], False)
            elif stack.clients:
                trained = self.worker.train(stack, batches, weights)
                if trained.asks_to_stop:
                    self._stop(stack.clients)
                yield trained
            done += len(stack.clients)
            on_progress(done)  # after the yield, so that the server has received the stack

    def commit(self, counted: Collection[int]) -> None:
        """Keep counters and client states of the clients whose updates the round has counted."""
        for part in self._parts:
            part.commit(counted)

    def _stop(self, clients: Sequence[int]) -> None:
        """Follow or ignore a client's request to end the run.

        It is followed after the round if clients share metrics. Otherwise the end of the run would reveal one
        client's data without noise.
        """
        if self.log.shared:
            self._trainer.should_stop = True
        elif not self._refused_to_stop:
            self._refused_to_stop = True
            rank_zero_warn(
                f"Client {clients[0]} set trainer.should_stop, which is ignored: it would reveal the "
                "client's data. Use EarlyStopping on a metric of the validation, or "
                "Federated(client_metrics='shared')"
            )

    # ---- ranks ------------------------------------------------------------------------------------

    def share(self) -> RankShare:
        """Return the state of this rank's clients after a round, for `merge_ranks` on all ranks."""
        logged, pending = self.log.rank_metrics(), self.worker.states.packed()
        return RankShare(self.clock.merged_progress, logged, pending, self.vector.max_counted)

    def merge_ranks(self, shares: Sequence[RankShare]) -> None:
        """Merge clock, log and client states of all ranks, so that they equal those of one process."""
        self.clock.merge_ranks([share.progress for share in shares])
        self.log.merge_ranks([share.logged for share in shares])
        for share in shares:
            self.worker.states.unpack(share.pending)
            self.vector.max_counted = torch.maximum(self.vector.max_counted, share.max_counted)
