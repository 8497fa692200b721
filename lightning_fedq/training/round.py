"""One round, from the global model to the next one: `Rounds.play_round`. Clients train in a `ClientSide`.

The user's module contains the global model throughout. Clients train on copies, and their updates go through
the server. When the last client has trained, the server's step is written into the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fedq._lightning import rank_zero_info
from lightning_fedq.algorithms import Correction
from lightning_fedq.clients.vector import Members, Vector, segment_origins
from lightning_fedq.clients.worker import group_updates
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.generator_turns import seed_for_transforms
from lightning_fedq.data.sampling import in_short
from lightning_fedq.rounds import RoundEngine, RoundPlan, RoundRecord, Statistics
from lightning_fedq.training.client_evaluation import release
from lightning_fedq.training.client_metrics import has_claims
from lightning_fedq.training.client_side import ClientSide
from lightning_fedq.training.settings import Federation, check_broadcast, check_modulus

if TYPE_CHECKING:
    from lightning_fedq.training.population import Population
    from lightning_fedq.training.privacy_target import CalibratedTarget

_AT_ONCE = 1 << 17
"""Largest number of values for which updates of clients that train one at a time are received together."""


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
        engine, side, vector = self.engine, self.side, self.vector
        self._adopt_weights(vector.find_members())
        side.begin_round()
        self.start = RoundStart(engine.state_dict(), vector.members)  # for a checkpoint saved in this round
        self.next_stacks()  # first, because a batch rule may choose the round's noise with its batches
        before, statistics = engine.weights, engine.statistics if engine.reads_statistics else None
        plan = engine.start()  # draws the cohort and charges it, before any client sends
        if engine.broadcast is not None:
            vector.write(engine.weights)  # the quantised model, which clients receive
        self._give_up_a_cut_round()
        self._receive_clients(statistics)
        # draws after this must not depend on the client, or the rank, that has trained last
        seed_for_transforms(plan.stream_seed("after the clients"))
        exact = bool(vector.constant_elements) and engine.broadcast is None and self._is_exact(plan)
        record = engine.finish()  # ranks exchange sums and client states, then the server decodes and steps
        if statistics is None and not record.aborted:
            self._end_algorithm(before)
        side.commit(engine.last_summed_clients)  # clients outside the sum keep their earlier state
        # noise may have made a variance negative, or have changed constants of layers
        vector.constrain(engine.weights, before.to(engine.weights), exact)
        vector.write(engine.weights)
        if statistics is not None:
            release(vector.module, engine)
        self.start = None
        return record

    # ---- steps of a round -------------------------------------------------------------------------

    def _receive_clients(self, statistics: Statistics | None) -> None:
        """Train the clients, and let the server encode each update and add it to its sum.

        Args:
            statistics: Statistics that clients send instead of an update. None if they train.
        """
        engine, side, vector = self.engine, self.side, self.vector
        weights = vector.read().to(engine.weights.dtype)  # rounded to the module's dtype
        # updates are received together only if the mechanism does not depend on the order of messages
        most = _AT_ONCE if engine.mechanism.order_free and statistics is None else 0
        with side.training(weights, statistics, self._make_progress_hook()) as trained:
            for clients, values in group_updates(trained, most):
                if statistics is not None:
                    engine.receive_statistics(clients, values)
                    continue
                known = len(engine.non_finite)
                engine.receive(clients, values)
                for client in engine.non_finite[known:]:
                    side.clock.note_not_finite(vector.not_finite(values[clients.index(client)]))

    def _end_algorithm(self, before: Tensor) -> None:
        """Take the server step of the local algorithm. Its mean update is the difference of the two models.

        Args:
            before: Global model at the start of the round, `(dim,)`.
        """
        if self.correction is None:
            return
        engine, end = self.engine, self.vector.num_parameters
        share = len(engine.last_summed_clients) / engine.planner.num_clients
        rates = self.side.clock.learning_rate_sum
        own = self.correction.end_round(before[:end], engine.weights[:end], share, rates)
        engine.weights = torch.cat([own, engine.weights[end:]])

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
