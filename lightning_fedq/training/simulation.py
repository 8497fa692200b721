"""The rounds of one fit: every client of a cohort trains in a fit of its own, and the server hears of it.

The global model is in the user's module from the first to the last line. Clients train on copies; their
updates go through the round engine, and when the last one has trained, the server's step is written into the
module. A round that is given up leaves nothing to put back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_fedq._lightning import callbacks_of, rank_zero_warn
from lightning_fedq.algorithms import Correction
from lightning_fedq.clients.fit import ClientFit
from lightning_fedq.clients.vector import Members, Vector
from lightning_fedq.clients.worker import ClientWorker, Trained
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.generator_turns import seed_for_transforms
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.rounds import RoundEngine, RoundRecord
from lightning_fedq.training.clock import Clock, Taken
from lightning_fedq.training.metrics import ClientMetrics

_AT_ONCE = 1 << 17
"""Values of updates up to which those of clients that train one at a time are received together."""


class Listens(Protocol):
    """A callback that wants to know how far a round has come."""

    def on_clients_done(self, trainer: Any, done: int, expected: int) -> None:
        """Some more clients of a round have trained."""


class RoundStart(NamedTuple):
    """State that a checkpoint of an open round goes back to.

    Args:
        engine: State of the server.
        members: What travels.
    """

    engine: dict[str, Any]
    members: Members


class Simulation:
    """Trains round after round of one fit.

    Args:
        trainer: The user's Trainer, in its fit.
        engine: The server.
        vector: What travels.
        fit: Trains clients.
        clock: One client's.
        metrics: Collects what clients log.
        loader: Returns the loader of all clients.
        stacks: Returns the stacks of the round to come, or of the open one.
        capacity: Most clients side by side.
        skips_empty: Is an empty batch no step at all?
        changed: Called with the new members of the flat vector when a round finds it changed; puts the server
            right, or raises what speaks against it.
        opened: Called when a round is open, before its clients train; may give it up.
        correction: State of the local algorithm; None is federated averaging.

    Attributes:
        start: Start of the open round; None between rounds.
        present: The stack that trains.
        taken: Steps that clients of the round have taken, on all ranks once the engine has finished.
        seconds: For which clients have trained, by the clock on the wall.
    """

    def __init__(
        self,
        trainer: Any,
        engine: RoundEngine,
        vector: Vector,
        fit: ClientFit,
        clock: Clock,
        metrics: ClientMetrics,
        loader: Callable[[], ClientLoader],
        stacks: Callable[[], list[Stack]],
        capacity: int,
        skips_empty: bool,
        changed: Callable[[Members], None],
        opened: Callable[[], None],
        correction: Correction | None = None,
    ) -> None:
        self.trainer, self.engine, self.vector, self.fit, self.clock = trainer, engine, vector, fit, clock
        self._metrics, self._loader, self._stacks = metrics, loader, stacks
        self.worker = ClientWorker(
            trainer, vector, fit, clock, metrics, loader, capacity, skips_empty, correction
        )
        self._changed, self._opened, self.correction = changed, opened, correction
        self._listening: list[Listens] = []
        if not engine.planner.own_draws:  # how many clients take part is nobody's to know
            listening = [c for c in callbacks_of(trainer) if hasattr(c, "on_clients_done")]
            self._listening = listening  # type: ignore[assignment]
        self.start: RoundStart | None = None
        self.present: Stack | None = None
        self.taken = Taken()
        self._refused_to_stop = False
        self._waiting: list[Trained] = []
        self.seconds = 0.0

    def run(self) -> tuple[RoundRecord, int]:
        """Train the next round. Returns its record and the steps of one client.

        Raises:
            OtherRankStoppedError: If another rank has given it up.
        """
        engine, vector = self.engine, self.vector
        found = vector.found()
        if found != vector.members:
            self._changed(found)
            self.worker.forget_shapes()
        vector.begin_round()
        self.worker.states.count(())  # of a round that was given up
        self._metrics.begin_round()
        self.clock.begin_round()
        self._take_over()
        self.start = RoundStart(engine.state_dict(), vector.members)
        self._stacks()  # a rule may choose the round's noise with its batches
        before = engine.weights
        plan = engine.start()
        if engine.broadcast is not None:
            vector.show(engine.weights)
        self._opened()
        self._train_all(vector.read().to(engine.weights.dtype))  # as rounded to the module's dtype
        seed_for_transforms(plan.stream_seed("after the clients"))
        record = engine.finish()
        self.worker.states.count(engine.in_last_sum)
        if self.correction is not None:
            self._end_round_of_algorithm(self.correction, before, bool(record.aborted))
        steps = self.clock.end_round(self.taken)
        vector.constrain(engine.weights, before.to(engine.weights))
        vector.commit()
        vector.show(engine.weights)
        self.start = None
        return record, steps

    def _end_round_of_algorithm(self, correction: Correction, before: Tensor, aborted: bool) -> None:
        """Let the algorithm's server have the mean update, which lies between two models."""
        if aborted:
            return
        trained = self.vector.num_parameters
        after = self.engine.weights
        own = correction.end_round(before[:trained], after[:trained])
        self.engine.weights = torch.cat([own, after[trained:]])

    def _take_over(self) -> None:
        """Keep what somebody has written into the global model between two rounds, pruned weights say."""
        shown = self.vector.read()
        if not torch.equal(shown, self.engine.weights.to(shown)):
            self.engine.weights = shown.to(self.engine.weights)

    def _train_all(self, weights: Tensor) -> None:
        self._not_finite: dict[str, None] = {}
        done, expected = 0, sum(len(stack.clients) for stack in self._stacks())
        began = time.perf_counter()
        try:
            for stack, batches in self._loader().by_stack():
                if stack.clients:
                    self._train(stack, batches, weights)
                done += len(stack.clients)
                for callback in self._listening:
                    callback.on_clients_done(self.trainer, done, expected)
            self._receive()
        finally:
            self._waiting.clear()
            self.present = None
            self.seconds += time.perf_counter() - began
            self.fit.end_round()
            self._metrics.end_round()
        self.taken = self.clock.taken._replace(not_finite=tuple(self._not_finite))

    def _train(self, stack: Stack, batches: Iterator[Any], weights: Tensor) -> None:
        self.present = stack
        trained = self.worker.train(stack, batches, weights)
        if trained.asks_to_stop:
            self._stop(trained.clients)
        self._waiting.append(trained)
        full = (len(self._waiting) + 1) * len(weights) > _AT_ONCE
        if len(trained.clients) > 1 or full or not self.engine.mechanism.order_free:
            self._receive()

    def _receive(self) -> None:
        """Let the server have the updates that wait: those of single clients, and of a stack behind them."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        clients = tuple(client for trained in waiting for client in trained.clients)
        updates = [trained.updates for trained in waiting]
        rows = updates[0] if len(updates) == 1 else torch.cat(updates)
        before = len(self.engine.non_finite)
        self.engine.receive(clients, rows)
        for client in self.engine.non_finite[before:]:
            self._not_finite |= dict.fromkeys(self.vector.not_finite(rows[clients.index(client)]))

    def _stop(self, clients: Sequence[int]) -> None:
        """A client's training has asked to end the run: after the round, where clients may be heard."""
        if self._metrics.shared:
            self.trainer.should_stop = True
        elif not self._refused_to_stop:
            self._refused_to_stop = True
            rank_zero_warn(
                f"client {clients[0]} set trainer.should_stop, which is not followed: the run would end by "
                "what one client's data say, without noise; stop by a metric of the validation "
                "(EarlyStopping), or let clients be heard by Federated(client_metrics='shared')"
            )

    def abandon(self) -> None:
        """Give up the open round, if there is one."""
        self.start, self.present = None, None
        if self.engine.plan is not None:
            self.engine.abandon()
            if self.engine.broadcast is not None:
                self.vector.show(self.engine.weights)
        self.vector.begin_round()

    def free(self) -> None:
        """Free the memory of stacks."""
        self.worker.forget_shapes()
