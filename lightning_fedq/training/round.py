"""One round, from the global model to the next one: `Rounds.play`. Clients train in a `ClientSide`.

The global model is in the user's module from the first to the last line. Clients train on copies; their
updates go through the server, and when the last one has trained, the server's step is written into the
module. What is open until the round has ended (`PerRound`) begins, counts and is forgotten in one loop, so
that a round which is given up leaves nothing to put back.
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
from lightning_fedq.clients.clock import ClientProgress, Clock
from lightning_fedq.clients.constraints import Constraint
from lightning_fedq.clients.fit import ClientFit
from lightning_fedq.clients.measurement import compute_statistics
from lightning_fedq.clients.personal import Packed
from lightning_fedq.clients.vector import ChangedTensors, Members, Vector, segment_origins
from lightning_fedq.clients.worker import ClientWorker, TrainedStack, group_updates
from lightning_fedq.data.batches import BatchRule, Stack
from lightning_fedq.data.generator_turns import seed_for_transforms
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.data.sampling import in_short
from lightning_fedq.rounds import RoundEngine, RoundPlan, RoundRecord, Statistics
from lightning_fedq.training.client_evaluation import release
from lightning_fedq.training.client_metrics import ClientMetrics, ClientMetricsChoice, RankMetrics, has_claims
from lightning_fedq.training.dry_round import (
    DryWorker,
    TrialFindings,
    check_smallest,
    check_statistics,
    first_steps,
)
from lightning_fedq.training.rank_group import RankGroup
from lightning_fedq.training.settings import Federation, Local, check_broadcast, check_modulus

if TYPE_CHECKING:
    from lightning_fedq.training.population import PartitionedData, Population
    from lightning_fedq.training.privacy_target import CalibratedTarget

_AT_ONCE = 1 << 17
"""Values of updates up to which those of clients that train one at a time are received together."""


class PerRound(Protocol):
    """State that is open until a round has ended, and counts then."""

    def begin_round(self) -> None:
        """Forget what is open, of a round that was given up."""

    def commit(self, counted: Collection[int]) -> None:
        """The round has ended, with the answers of these clients in its sum."""


class RankShare(NamedTuple):
    """Steps, logs and states of one rank's clients in a round, beside their updates."""

    progress: ClientProgress
    logged: RankMetrics | None
    pending: Packed
    max_counted: Tensor


class ClientSide:
    """The clients of one Trainer: all of a simulation, a rank's own, or one on its machine.

    Nothing here knows of a server or a mechanism. It is made in two steps: what travels is found first, which
    a server has to know; who may log what is the server's to say.

    Args:
        rule: Draws the batches; None is whole passes.
        owner: Callback in whose `on_fit_start` it is made.
        no_forks: Why nothing is tried in forks. "" if it is.
        trial_stacks: Client that rehearses, one at most. None leaves it to the layers.
        members: What travels, as a checkpoint has it; None finds it.

    Attributes:
        clock: One client's.
        findings: What one client's first steps have shown.
        vector: What travels.
        log: What clients log. From `begin` on, as `worker`.
        worker: Trains and measures them.
        present: The stack that trains. None between stacks.
        seconds: Time that clients have trained.
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
    ) -> None:
        self._trainer, self._local, self._rule, self._loader = trainer, local, rule, loader
        self._holdings, self._no_forks, self._refused_to_stop = holdings, no_forks, False
        self._owner = owner
        self.present: Stack | None = None
        self.seconds = 0.0
        self.clock = Clock(trainer, holdings.schedule.max_batches)
        module = trainer.lightning_module
        self.findings = TrialFindings(ChangedTensors.from_layers(module))
        # as the layers say, until a client has tried: patterns may be of what only training shows
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
            local.patterns,
            local.shared,
            constraints,
        )

    def dry(self, is_started: bool = False) -> DryWorker:
        """Trains clients beside the rounds.

        Args:
            is_started: Have all hooks of the start run?
        """
        owner, rule, term = self._owner, self._rule, None
        if is_started:
            owner, term = None, self.worker.term
        skips = rule is not None and rule.skips_empty
        return DryWorker(
            self._trainer, self.vector, self.clock, self._loader, self._no_forks, owner, skips, term
        )

    def check_smallest(self, tried: Stack) -> None:
        """Refuse data that leave a batch on which the training fails, see `dry_round.check_smallest`."""
        held, sizes = self._holdings.client_indices, self._holdings.schedule.sizes
        check_smallest(self.dry(), self._loader(), held, sizes, tried)

    def check_statistics(self, tried: Stack) -> None:
        """Refuse statistics that can't be made, see `dry_round.check_statistics`."""
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
        """Make what trains the clients.

        Args:
            choice: Where goes what they log?
            term: The local algorithm's half at the clients; None is federated averaging.
            clients_per_step: Most of them side by side.
            ranks: The ranks that they are spread over, where there are several.
            **fit: Further settings of a `ClientFit`.

        Raises:
            ValueError: If something decides by what stays with them.
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
        """Before the first client, or where a round is given up."""
        for part in self._parts:
            part.begin_round()

    @contextmanager
    def training(
        self,
        weights: Tensor,
        statistics: Statistics | None = None,
        on_progress: Callable[[int], object] = lambda done: None,
    ) -> Iterator[Iterator[TrainedStack]]:
        """Give the clients of the round as they have trained, and put everything away behind them.

        Args:
            weights: `(dim,)` the global model.
            statistics: Asks for a vector of each client's data in place of an update; None trains.
            on_progress: Called with the number of clients that are done, after each stack.
        """
        began = time.perf_counter()
        self.log.begin_round()
        try:
            yield self._train_stacks(weights, statistics, on_progress)
        finally:
            self.present = None
            self.seconds += time.perf_counter() - began
            self.worker.fit.end_round()  # the world that all were copied from: the next round has another
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
            on_progress(done)  # behind the yield: the server has had it

    def commit(self, counted: Collection[int]) -> None:
        """The round has ended: what clients have counted and keep is so."""
        for part in self._parts:
            part.commit(counted)

    def _stop(self, clients: Sequence[int]) -> None:
        """A client's training has asked to end the run: after the round, where clients may be heard."""
        if self.log.shared:
            self._trainer.should_stop = True
        elif not self._refused_to_stop:
            self._refused_to_stop = True
            rank_zero_warn(
                f"client {clients[0]} set trainer.should_stop, which is not followed: the run would end by "
                "what one client's data say, without noise; stop by a metric of the validation "
                "(EarlyStopping), or let clients be heard by Federated(client_metrics='shared')"
            )

    # ---- ranks ------------------------------------------------------------------------------------

    def share(self) -> RankShare:
        """Share of this rank's clients in the round, for `merge_ranks` on all."""
        counted = self.vector.max_counted
        return RankShare(
            self.clock.merged_progress, self.log.rank_metrics(), self.worker.states.packed(), counted
        )

    def merge_ranks(self, shares: Sequence[RankShare]) -> None:
        """Bring clock, log and clients' states to where one process would have them."""
        self.clock.merge_ranks([one.progress for one in shares])
        self.log.merge_ranks([one.logged for one in shares])
        for one in shares:
            self.worker.states.unpack(one.pending)
            self.vector.max_counted = torch.maximum(self.vector.max_counted, one.max_counted)


class RoundStart(NamedTuple):
    """State that a checkpoint of an open round goes back to."""

    engine: dict[str, Any]
    members: Members


class Rounds:
    """Server and clients of one fit while its rounds are played. `FederatedFit` begins and keeps them.

    Attributes:
        population: The clients, and what they hold.
        side: What trains them.
        vector: What travels.
        engine: The server.
        correction: State of the local algorithm; None is federated averaging.
        clients_per_step: How many clients train side by side.
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
        """One round: every client in a fit of its own, and the server's step.

        Raises:
            OtherRankStoppedError: If another rank has given it up.
        """
        engine, side, vector, term = self.engine, self.side, self.vector, self.correction
        self._adopt_weights(vector.find_members())
        side.begin_round()
        self.start = RoundStart(engine.state_dict(), vector.members)  # of a checkpoint that is saved within
        self.next_stacks()  # a rule may choose the round's noise with its batches
        before, asked = engine.weights, engine.statistics if engine.reads_statistics else None
        plan = engine.start()  # draws the cohort and charges it, before anybody sends
        if engine.broadcast is not None:
            vector.write(engine.weights)  # in few bits, as clients are sent it
        self._give_up_a_cut_round()
        weights = vector.read().to(engine.weights.dtype)  # as rounded to the module's dtype
        # a mechanism that draws by place, and a vector that is spread over an update, wait for nobody
        most = _AT_ONCE if engine.mechanism.order_free and asked is None else 0
        with side.training(weights, asked, self._make_progress_hook()) as trained:
            for clients, updates in group_updates(trained, most):
                known = len(engine.non_finite)
                receive = engine.receive if asked is None else engine.receive_statistics
                receive(clients, updates)  # encoded, and added to the sum: no update is kept
                for client in engine.non_finite[known:] if asked is None else ():
                    side.clock.note_not_finite(vector.not_finite(updates[clients.index(client)]))
        seed_for_transforms(plan.stream_seed("after the clients"))  # whoever has trained last, or where
        exact = bool(vector.constant_elements) and engine.broadcast is None and self._is_exact(plan)
        record = engine.finish()  # ranks exchange sums and sides; the sum is decoded, and the server steps
        if term is not None and not record.aborted and asked is None:
            # the algorithm's server has the mean update, which lies between two models
            end, after = vector.num_parameters, engine.weights
            share = len(engine.last_summed_clients) / engine.planner.num_clients
            own = term.end_round(before[:end], after[:end], share, side.clock.learning_rate_sum)
            engine.weights = torch.cat([own, after[end:]])
        side.commit(engine.last_summed_clients)  # clients in no sum go on with what they had
        vector.constrain(engine.weights, before.to(engine.weights), exact)  # noise knows of no variance
        vector.write(engine.weights)
        if asked is not None:
            release(vector.module, engine)
        self.start = None
        return record

    # ---- its steps --------------------------------------------------------------------------------

    def next_stacks(self) -> list[Stack]:
        """The stacks of the round to come, or of the open one."""
        return self._stacks(self.population.partitioned_data.schedule.stacks)

    def _stacks_of_all_ranks(self) -> list[Stack]:
        """The stacks of the round to come, or of the open one, that one process would train."""
        return self._stacks(self.population.partitioned_data.schedule.global_stacks)

    def _stacks(self, make_stacks: Callable[[int, int, int, int | None], list[Stack]]) -> list[Stack]:
        engine = self.engine
        size = 1 if engine.reads_statistics else self.clients_per_step
        return make_stacks(engine.round, engine.attempt, size, self.side.clock.max_batches)

    def _make_progress_hook(self) -> Callable[[int], object]:
        """Tells callbacks how many clients of the round are done, unless that is nobody's to know."""
        listening = [one for one in self._trainer.callbacks if hasattr(one, "on_clients_done")]
        expected = sum(len(stack.clients) for stack in self.next_stacks())

        def report_progress(done: int) -> None:
            for callback in listening if not self.engine.planner.law.own_draws else ():
                callback.on_clients_done(self._trainer, done, expected)

        return report_progress

    def _is_exact(self, plan: RoundPlan) -> bool:
        """Does decoding add no error to the mean of a round? Then constants of layers are as trained."""
        mechanism = self.engine.mechanism
        if not mechanism.gaussian_error:  # of whose error `noise_variance` has not the whole law
            return False
        context = self.engine.context(plan)
        cohort = [client for group in context.groups for client in group]
        variance = mechanism.noise_variance(context, cohort)
        return variance is not None and not bool(variance.any())

    def _give_up_a_cut_round(self) -> None:
        """Under `fast_dev_run`, release no sum that holds fewer clients than its claims count on."""
        engine, limit = self.engine, self.population.limit
        if not limit or not has_claims(engine):
            return
        present = sum(len(stack.clients) for stack in self._stacks_of_all_ranks())
        expected = len(engine.planner.plan(engine.round, engine.mechanism, engine.attempt).survivors)
        if present < expected:
            engine.abort(
                f"fast_dev_run={limit} cuts the round after {present} of {expected} clients, and "
                "what is claimed counts on all of them; nothing is sent and the model stays as it was"
            )

    def _abandon(self) -> None:
        """Give up the open round, if there is one."""
        self.start = None
        if self.engine.plan is not None:
            self.engine.abandon()
            if self.engine.broadcast is not None:
                self.vector.write(self.engine.weights)
        self.side.begin_round()

    # ---- what rules of the batches ask for ----------------------------------------------------------

    def present_batch(self, batch_idx: int) -> tuple[Stack, int]:
        """The stack that trains on a batch of this round, and which of its batches that is."""
        assert self.side.present is not None
        return self.side.present, batch_idx

    def fetch(self, indices: Tensor) -> Any:
        """Some samples as one batch, `(batch,)`, or as a stack's, `(clients, batch)`. Draws nothing."""
        with torch.random.fork_rng([]):
            return self.population.loader().fetch(indices)

    # ---- what callbacks have done to the module between two rounds ----------------------------------

    def _adopt_weights(self, members: Members) -> None:
        """Go on with what is trained now, and with the weights that the module has, pruned ones say."""
        if members != self.vector.members:
            self._rebuild_vector(members)
            self.side.worker.free_stack_memory()
        shown = self.vector.read()
        if not torch.equal(shown, self.engine.weights.to(shown)):
            self.engine.weights = shown.to(self.engine.weights)

    def _client_weights(self) -> Tensor | None:
        held = [len(part) for part in self.population.partitioned_data.client_indices]
        federation = self._federation
        wanted, segments = federation.clients.num_clients, self.vector.segments
        return federation.server.client_weights(federation.mechanism, segments, held, wanted)

    def _rebuild_vector(self, members: Members) -> None:
        """Parameters join or leave at the start of a round.

        Raises:
            ValueError: If something rests on the parameters of the start.
            RuntimeError: If a budget can't pay for the new vector.
        """
        federation, vector, engine = self._federation, self.vector, self.engine
        names, ledger = vector.sent, federation.ledger
        self.population.check_change(vector.members, members)
        change = _describe_change(vector.members, members, vector.module, engine.round)
        rule, algorithm, mechanism = federation.batch_rule, federation.local.algorithm, federation.mechanism
        if rule is not None:
            raise ValueError(
                f"{change}, and {type(rule).__name__} is made for the parameters that were trained "
                "when the fit began; freeze or unfreeze before the fit, or leave it out"
            )
        if algorithm is not None and algorithm.remembers:
            raise ValueError(
                f"{change}, and clients of {type(algorithm).__name__} keep vectors of the parameters "
                "that were trained when the fit began; freeze or unfreeze before the fit, or use FedProx"
            )
        if not mechanism.covers_shorter:
            raise ValueError(
                f"{change}, and {type(mechanism).__name__} can't be charged for vectors of two lengths; "
                "freeze or unfreeze before the fit, or take another mechanism"
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
        rank_zero_info(f"{change}; the ledger goes on, and every charge counts {longest} coordinates")


def _describe_change(before: Members, after: Members, module: nn.Module, round: int) -> str:
    """Which parameters and buffers join and which leave, as the beginning of a sentence."""
    sizes = {name: tensor.numel() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    said = []
    for verb, one, other in (("join", after, before), ("leave", before, after)):
        others = {*other.parameters, *other.buffers, *other.local}
        names = [name for name in (*one.parameters, *one.buffers, *one.local) if name not in others]
        if names:
            count = sum(sizes.get(name, 0) for name in names)
            said.append(f"{in_short(names)} ({count} coordinates) {verb}")
    return f"round {round + 1}: " + (" and ".join(said) or "the order of the parameters changes")
