"""One round, from the global model to the next one: `Rounds.play_round`. Clients train in a `ClientSide`.

The user's module contains the global model throughout. Clients train on copies, and their updates go through
the server. When the last client has trained, the server's step is written into the module. State that is open
until the round has ended (`PerRound`) is begun, counted and forgotten in one loop, so that a round which is
given up leaves nothing to restore.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_fedq._lightning import rank_zero_info, rank_zero_warn
from lightning_fedq.algorithms import Correction
from lightning_fedq.clients.changed_tensors import ChangedTensors
from lightning_fedq.clients.clock import ClientProgress, Clock
from lightning_fedq.clients.constraints import Constraint
from lightning_fedq.clients.fit import ClientFit
from lightning_fedq.clients.measurement import compute_statistics
from lightning_fedq.clients.personal import Packed
from lightning_fedq.clients.vector import Members, Vector, segment_origins
from lightning_fedq.clients.worker import ClientWorker, TrainedStack, group_updates
from lightning_fedq.data.batches import BatchRule, Stack
from lightning_fedq.data.generator_turns import seed_for_transforms
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.data.sampling import in_short
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.rounds import RoundEngine, RoundPlan, RoundRecord, Statistics
from lightning_fedq.training.checks import ClientSettingsError, check_algorithm, check_client, check_memory
from lightning_fedq.training.client_evaluation import release
from lightning_fedq.training.client_metrics import ClientMetrics, ClientMetricsChoice, RankMetrics, has_claims
from lightning_fedq.training.dry_round import (
    DryWorker,
    TrialFindings,
    check_smallest,
    check_statistics,
    first_steps,
    rehearse_end,
)
from lightning_fedq.training.rank_group import RankGroup
from lightning_fedq.training.settings import Federation, Local, check_broadcast, check_modulus

if TYPE_CHECKING:
    from lightning_fedq.training.population import PartitionedData, Population
    from lightning_fedq.training.privacy_target import CalibratedTarget

_AT_ONCE = 1 << 17
"""Largest number of values for which updates of clients that train one at a time are received together."""


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
        seconds: Time that clients have trained, in seconds.
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
        self.seconds = 0.0
        self.clock = Clock(trainer, holdings.schedule.max_batches)
        module = trainer.lightning_module
        self.findings = TrialFindings(ChangedTensors.from_layers(module))
        # from the types of the layers until the dry round has run: patterns may name what only training shows
        self.vector = self._vector(members, local.constraints if trial_stacks is None else None)
        if trial_stacks is not None:
            dry = self.dry()
            self.findings = dry.run_in_fork(
                lambda: first_steps(dry, trial_stacks, shares, self._num_statistics)
            )
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

    @property
    def _num_statistics(self) -> int | None:
        """Number of values of the clients' statistics. None if there are none."""
        return None if self._local.statistics is None else self._local.statistics.size

    def check_end(self) -> None:
        """Refuse a validation or a checkpoint that fails at the end of a round, where no client is tried.

        Raises:
            ValueError: As the user's own error, if one fails.
        """
        dry = self.dry()
        if not self._no_forks:
            end = dry.run_in_fork(lambda: rehearse_end(dry, (), self._shares, self._num_statistics))
            self.findings._replace(end=end, moved=True).check(self._trainer.lightning_module)

    def check_algorithm(self, mechanism: Mechanism) -> None:
        """Refuse a mechanism that loses what the clients' algorithm assumes was sent.

        Args:
            mechanism: Mechanism that sends the clients' updates.

        Raises:
            ClientSettingsError: If it loses something. The message has the cure.
        """
        algorithm, vector = self._local.algorithm, self.vector
        if algorithm is None:
            return
        try:
            check_memory(algorithm, mechanism, vector.num_parameters, sum(vector.segments))
        except ValueError as error:
            raise ClientSettingsError(str(error)) from error

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
        skips = rule is not None and rule.skips_empty
        return DryWorker(
            self._trainer, self.vector, self.clock, self._loader, self._no_forks, owner, skips, term
        )

    def check_smallest(self, tried: Stack) -> None:
        """Refuse data with a batch that is too small to train on, see `dry_round.check_smallest`."""
        held, sizes = self._holdings.client_indices, self._holdings.schedule.sizes
        check_smallest(self.dry(), self._loader(), held, sizes, tried)

    def check_statistics(self, tried: Stack) -> None:
        """Refuse statistics that fail or are not finite, see `dry_round.check_statistics`."""
        if self._local.statistics is not None:
            check_statistics(self.dry(), tried, self._local.statistics.size)

    def begin(
        self,
        choice: ClientMetricsChoice,
        term: Correction | None,
        clients_per_step: int = 1,
        ranks: RankGroup | None = None,
        **fit: Any,
    ) -> None:
        """Make the log and the worker, after the server has been made.

        Args:
            choice: Policy for metrics that clients log.
            term: Client half of the local algorithm. None is federated averaging.
            clients_per_step: Largest number of clients that train in one step.
            ranks: Group of the ranks that share the clients. None if there is one process.
            **fit: Further arguments of `ClientFit`.

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
            ClientFit(trainer, trainer.loggers if self.log.shared else None, **fit),
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
        began = time.perf_counter()
        self.log.begin_round()
        try:
            yield self._train_stacks(weights, statistics, on_progress)
        finally:
            self.present = None
            self.seconds += time.perf_counter() - began
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
        counted = self.vector.max_counted
        return RankShare(
            self.clock.merged_progress, self.log.rank_metrics(), self.worker.states.packed(), counted
        )

    def merge_ranks(self, shares: Sequence[RankShare]) -> None:
        """Merge clock, log and client states of all ranks, so that they equal those of one process."""
        self.clock.merge_ranks([share.progress for share in shares])
        self.log.merge_ranks([share.logged for share in shares])
        for share in shares:
            self.worker.states.unpack(share.pending)
            self.vector.max_counted = torch.maximum(self.vector.max_counted, share.max_counted)


class RoundStart(NamedTuple):
    """State at the start of the open round, which a checkpoint within the round contains."""

    engine: dict[str, Any]
    members: Members


class Rounds:
    """Server and clients of one fit, and the code of a round. `FederatedFit` fills the attributes.

    Attributes:
        population: The clients and their data.
        side: Trains the clients.
        vector: Trained vector: the tensors that are sent, as one flat vector.
        engine: The server.
        correction: State of the local algorithm. None is federated averaging.
        clients_per_step: Number of clients that train in one step.
        start: Start of the open round. None between rounds.
    """

    population: Population
    side: ClientSide
    vector: Vector
    engine: RoundEngine
    correction: Correction | None
    clients_per_step: int
    start: RoundStart | None
    _federation: Federation
    _target: CalibratedTarget | None
    _trainer: Any

    def play_round(self) -> RoundRecord:
        """Train the clients of one round on copies, and step the server.

        Raises:
            OtherRankStoppedError: If another rank has given up the round.
        """
        engine, side, vector, term = self.engine, self.side, self.vector, self.correction
        self._adopt_weights(vector.find_members())
        side.begin_round()
        self.start = RoundStart(engine.state_dict(), vector.members)  # for a checkpoint saved in this round
        self.next_stacks()  # first, because a batch rule may choose the round's noise with its batches
        before, asked = engine.weights, engine.statistics if engine.reads_statistics else None
        plan = engine.start()  # draws the cohort and charges it, before any client sends
        if engine.broadcast is not None:
            vector.write(engine.weights)  # the quantised model, which clients receive
        self._give_up_a_cut_round()
        weights = vector.read().to(engine.weights.dtype)  # rounded to the module's dtype
        # updates are received together only if the mechanism does not depend on the order of messages
        most = _AT_ONCE if engine.mechanism.order_free and asked is None else 0
        with side.training(weights, asked, self._make_progress_hook()) as trained:
            for clients, updates in group_updates(trained, most):
                known = len(engine.non_finite)
                receive = engine.receive if asked is None else engine.receive_statistics
                receive(clients, updates)  # encodes and adds them to the sum, so that no update is stored
                for client in engine.non_finite[known:] if asked is None else ():
                    side.clock.note_not_finite(vector.not_finite(updates[clients.index(client)]))
        # draws after this must not depend on the client, or the rank, that has trained last
        seed_for_transforms(plan.stream_seed("after the clients"))
        exact = bool(vector.constant_elements) and engine.broadcast is None and self._is_exact(plan)
        record = engine.finish()  # ranks exchange sums and client states, then the server decodes and steps
        if term is not None and not record.aborted and asked is None:
            # the algorithm's server step uses the mean update: the difference between the two models
            end, after = vector.num_parameters, engine.weights
            share = len(engine.last_summed_clients) / engine.planner.num_clients
            own = term.end_round(before[:end], after[:end], share, side.clock.learning_rate_sum)
            engine.weights = torch.cat([own, after[end:]])
        side.commit(engine.last_summed_clients)  # clients outside the sum keep their earlier state
        # noise may have made a variance negative, or have changed constants of layers
        vector.constrain(engine.weights, before.to(engine.weights), exact)
        vector.write(engine.weights)
        if asked is not None:
            release(vector.module, engine)
        self.start = None
        return record

    # ---- steps of a round -------------------------------------------------------------------------

    def next_stacks(self) -> list[Stack]:
        """Return this process's stacks of the next round, or of the open one."""
        return self._stacks(self.population.partitioned_data.schedule.stacks)

    def _stacks_of_all_ranks(self) -> list[Stack]:
        """Return the stacks of all ranks, for the next round or the open one."""
        return self._stacks(self.population.partitioned_data.schedule.global_stacks)

    def _stacks(self, make_stacks: Callable[[int, int, int, int | None], list[Stack]]) -> list[Stack]:
        engine = self.engine
        size = 1 if engine.reads_statistics else self.clients_per_step
        return make_stacks(engine.round, engine.attempt, size, self.side.clock.max_batches)

    def _make_progress_hook(self) -> Callable[[int], object]:
        """Return a function that tells callbacks how many clients of the round are done.

        It tells nothing if clients draw for themselves, because then the number of clients is secret.
        """
        listening = [callback for callback in self._trainer.callbacks if hasattr(callback, "on_clients_done")]
        expected = sum(len(stack.clients) for stack in self.next_stacks())

        def report_progress(done: int) -> None:
            for callback in listening if not self.engine.planner.law.own_draws else ():
                callback.on_clients_done(self._trainer, done, expected)

        return report_progress

    def _is_exact(self, plan: RoundPlan) -> bool:
        """Return whether decoding adds no error to the mean of a round, so that constants stay as trained."""
        mechanism = self.engine.mechanism
        if not mechanism.gaussian_error:  # then `noise_variance` does not describe the whole error
            return False
        context = self.engine.context(plan)
        cohort = [client for group in context.groups for client in group]
        variance = mechanism.noise_variance(context, cohort)
        return variance is not None and not bool(variance.any())

    def _give_up_a_cut_round(self) -> None:
        """Abort a round that `fast_dev_run` cuts, because privacy claims count on the whole cohort's sum."""
        engine, limit = self.engine, self.population.limit
        if not limit or not has_claims(engine):
            return
        present = sum(len(stack.clients) for stack in self._stacks_of_all_ranks())
        expected = len(engine.planner.plan(engine.round, engine.mechanism, engine.attempt).survivors)
        if present < expected:
            engine.abort(
                f"fast_dev_run={limit} cuts the round after {present} of {expected} clients, but privacy "
                "claims need all of them, so nothing is sent"
            )

    def _abandon(self) -> None:
        """Give up the open round, if there is one, and restore the module's weights."""
        self.start = None
        if self.engine.plan is not None:
            self.engine.abandon()
            if self.engine.broadcast is not None:
                self.vector.write(self.engine.weights)
        self.side.begin_round()

    # ---- for batch rules ----------------------------------------------------------------------------

    def present_batch(self, batch_idx: int) -> tuple[Stack, int]:
        """Return the stack that is training, and the index of its batch."""
        assert self.side.present is not None
        return self.side.present, batch_idx

    def fetch(self, indices: Tensor) -> Any:
        """Return samples as one batch, for `(batch,)` indices, or as a stack's, for `(clients, batch)` ones.

        No random numbers are drawn.
        """
        with torch.random.fork_rng([]):
            return self.population.loader().fetch(indices)

    # ---- changes of the module between two rounds ---------------------------------------------------

    def _adopt_weights(self, members: Members) -> None:
        """Take over the module's parameters to train, and its weights, which callbacks may have changed."""
        if members != self.vector.members:
            self._rebuild_vector(members)
            self.side.worker.free_stack_memory()
        shown = self.vector.read()
        if not torch.equal(shown, self.engine.weights.to(shown)):
            self.engine.weights = shown.to(self.engine.weights)

    def _client_weights(self) -> Tensor | None:
        sizes = [len(part) for part in self.population.partitioned_data.client_indices]
        federation = self._federation
        wanted, segments = federation.clients.num_clients, self.vector.segments
        return federation.server.client_weights(federation.mechanism, segments, sizes, wanted)

    def _rebuild_vector(self, members: Members) -> None:
        """Change the trained vector at the start of a round, because parameters were frozen or unfrozen.

        Raises:
            ValueError: If a batch rule, local algorithm or mechanism needs the parameters of the start.
            RuntimeError: If the budget does not allow a round of the new vector.
        """
        federation, vector, engine = self._federation, self.vector, self.engine
        names, ledger = vector.sent, federation.ledger
        self.population.check_change(vector.members, members)
        change = _describe_change(vector.members, members, vector.module, engine.round)
        rule, algorithm, mechanism = federation.batch_rule, federation.local.algorithm, federation.mechanism
        if rule is not None:
            raise ValueError(
                f"{change}, but {type(rule).__name__} needs the parameters that were trained when the fit "
                "began. Freeze or unfreeze before the fit, or leave it out"
            )
        if algorithm is not None and algorithm.remembers:
            raise ValueError(
                f"{change}, but clients of {type(algorithm).__name__} keep vectors of the parameters at the "
                "start. Freeze or unfreeze before the fit, or use FedProx"
            )
        if not mechanism.price_grows_with_dim:
            raise ValueError(
                f"{change}, but {type(mechanism).__name__} can't be charged for vectors of two lengths. "
                "Freeze or unfreeze before the fit, or use another mechanism"
            )
        vector.set_members(members)
        check_broadcast(federation.server, vector)
        if names != vector.sent:
            engine.rearrange(vector.parts(), segment_origins(vector.sent, names), self._client_weights())
        if federation.server.secure_aggregation is not None:
            check_modulus(federation.server.secure_aggregation, engine)
        if self._target is not None:
            self._target.limit(engine, federation, self._trainer)
        federation.vector_changed()
        ledger.check_spent()
        longest = max(ledger.dim, engine.weights.numel())
        rank_zero_info(f"{change}. The ledger goes on, and every charge counts {longest} coordinates")


def _describe_change(before: Members, after: Members, module: nn.Module, round: int) -> str:
    """Describe the parameters and buffers that join and that leave, as the beginning of a sentence."""
    sizes = {name: tensor.numel() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    phrases = []
    for verb, one, other in (("join", after, before), ("leave", before, after)):
        others = {*other.parameters, *other.buffers, *other.local}
        names = [name for name in (*one.parameters, *one.buffers, *one.local) if name not in others]
        if names:
            count = sum(sizes.get(name, 0) for name in names)
            phrases.append(f"{in_short(names)} ({count} coordinates) {verb}")
    return f"Round {round + 1}: " + (" and ".join(phrases) or "the order of the parameters changes")
