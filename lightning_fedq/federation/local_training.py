"""The clients of a round take turns on the user's one module: global weights in, updates out.

A client, or a stack of clients, starts from the global weights with a fresh optimiser, trains on its batches,
and hands its update to the server; after the last one the server steps and the module shows the new global
weights. `Federated` says when, by Lightning's hooks.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.data.batches import Stack
from lightning_fedq.federation.client_memory import ClientMemory
from lightning_fedq.federation.client_parallel import ClientParallelStrategy
from lightning_fedq.federation.clock import LocalClock
from lightning_fedq.federation.local_model import LocalModel, Members
from lightning_fedq.federation.resume import RoundStart
from lightning_fedq.federation.watch import Watch
from lightning_fedq.rounds import RoundEngine, RoundRecord
from lightning_fedq.simulation.ranks import OtherRankStoppedError


class LocalTraining:
    """Round after round of one fit.

    Args:
        trainer: Of the fit in progress.
        local: The module's trained parameters, and its optimiser.
        parallel: Makes what trains stacks of clients, of the vector as it is now.
        engine: The server.
        clock: Of every client.
        stacks: Returns the stacks of the round to come, or of the open one.
        skips_empty: Is an empty batch no step at all?
        changed: Called with the new members of the flat vector when a round finds it changed; puts the server
            right, or raises what speaks against it.
        withheld: See `Watch`.

    Attributes:
        start: What a checkpoint of the open round goes back to; None between rounds.
        present: The stack that trains.
        memory: What module, data module and callbacks keep from batch to batch.
        steps: Of the longest client in the last round, counted from the first round on.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        local: LocalModel,
        parallel: Callable[[], ClientParallelStrategy],
        engine: RoundEngine,
        clock: LocalClock,
        stacks: Callable[[], list[Stack]],
        skips_empty: bool,
        changed: Callable[[Members], None],
        withheld: Callable[[], bool],
    ) -> None:
        self._trainer, self._local, self._engine, self.clock = trainer, local, engine, clock
        self._new_parallel, self._attached = parallel, False
        self._stacks, self._skips_empty, self._changed = stacks, skips_empty, changed
        self._watch = Watch(trainer, lambda: {*local.names, *local.buffer_names}, withheld)
        self.memory = ClientMemory(trainer)
        self.start: RoundStart | None = None
        self.present: Stack | None = None
        self.steps = range(0)
        self._pending: list[Stack] = []
        self._steps_left, self._first = 0, True

    def open(self) -> None:
        """Open a round."""
        engine, found = self._engine, self._local.found()
        if found != self._local.members:
            self._change(found)
        if not self._attached:
            self._attach()
        self.memory.open()
        self.start = RoundStart.now(self._trainer, self._local, engine.state_dict())
        self._local.use(engine.weights)  # before the round is open: what gives it up shows these
        self._stacks()  # a rule may choose the round's noise with its batches
        engine.start()
        self._local.show()
        self._weights = self._local.flat().to(engine.weights.dtype)  # as rounded to the module's dtype
        self._pending = list(reversed(self._stacks()))
        self.present, self._first = None, True

    def _change(self, members: Members) -> None:
        """Rearrange the vector: what joins begins as the module has it, what leaves stays as it is."""
        self.detach()
        self._changed(members)
        if self._engine.plan is not None:  # changed after the round was opened, by a later hook
            self._attach()
            self._local.use(self._engine.weights)
            self._weights = self._local.flat().to(self._engine.weights.dtype)

    def _attach(self) -> None:
        self._parallel = self._new_parallel()
        self._parallel.attach()
        self._attached = True

    def detach(self) -> None:
        """Give the trainer's strategy back."""
        if self._attached:
            self._parallel.detach()
            del self._parallel
        self._attached = False

    def begin_batch(self) -> None:
        """At the first batch of a client or a stack: global weights, a fresh optimiser."""
        if self.present is None:
            self._begin_stack()
        assert self.present is not None
        empty = self._skips_empty and not self.present.batch_sizes[-self._steps_left]
        if empty or self.clock.client_is_over:
            self._parallel.open(0, *self._local.start_of((), self._weights))  # nobody's step
        length = len(self.present.batch_sizes)
        self._parallel.batches.begin(length - self._steps_left, length)
        self.clock.begin_batch()

    def _begin_stack(self) -> None:
        if self._engine.plan is None:  # resumed after a last batch, Lightning leaves on_train_epoch_start out
            self.open()
        stack = self.present = self._pending.pop()
        self._steps_left = len(stack.batch_sizes)
        if self._first:
            self._begin_first()
        else:
            self.memory.begin_client()
        self.clock.begin_client(self._stacks())
        self._watch.put_back_scratch()
        self._local.hold_statistics()
        if len(stack.clients) == 1:
            self._local.begin_client(stack.clients[0])
        else:
            self._local.renew_optimizer()
            self._parallel.open(len(stack.clients), *self._local.start_of(stack.clients, self._weights))

    def _begin_first(self) -> None:
        """Every hook that may freeze or unfreeze for the round has run."""
        found = self._local.found()
        if found != self._local.members:
            self._change(found)
        assert self.start is not None
        self._watch.begin(self._local.views, self.start.data)
        self.memory.begin()
        self._first = False

    def end_batch(self) -> RoundRecord | None:
        """At the last batch of a client or a stack: encode. At the last of the round: step the server."""
        self.clock.end_batch()
        self._steps_left -= 1
        if self.present is None:
            return None
        clients = self.present.clients
        if len(clients) == 1:
            self._parallel.close()  # it may have stood still
        if self._steps_left:
            return None
        self._watch.end_client(len(self.present.batch_sizes))
        self.memory.end_client(len(self.present.batch_sizes), last=not self._pending)
        if len(clients) == 1:
            self._engine.receive(clients, (self._local.end_client(clients[0]) - self._weights)[None])
        elif clients:
            self._local.keep(clients, self._parallel.buffers())
            self._engine.receive(clients, self._parallel.updates()[:, : len(self._weights)])
        self._parallel.close()
        self._local.forget_client()
        self.clock.end_client(last=not self._pending)
        self.present = None
        return None if self._pending else self._finish()

    def _finish(self) -> RoundRecord | None:
        self._watch.end_clients()
        try:
            record = self._engine.finish()
        except OtherRankStoppedError as error:
            rank_zero_warn(f"the run ends before the round is over: {error}")
            self._trainer.should_stop = True
            self.abandon()
            return None
        first = self.clock.now
        self.clock.end_round()
        self.steps = range(first, self.clock.now)
        self._local.constrain(self._engine.weights)
        self._local.commit()
        self._local.use(self._engine.weights)
        self._local.show()
        self.start, self._steps_left = None, 0
        return record

    def end_round(self) -> None:
        """After the hooks that may look at gradients: those of the last client go, and what it left."""
        self._trainer.lightning_module.zero_grad()
        self.forget_scratch()

    def forget_scratch(self) -> None:
        """Plain attributes hold what they did when the round began."""
        self._watch.end_round()
        self.memory.end_round()

    def check_saved(self) -> None:
        """See `Watch.check_saved`."""
        self._watch.check_saved()

    def abandon(self) -> None:
        """Give up the open round, if there is one. The last global model is back in the module."""
        self.clock.abandon()
        if self._engine.plan is None:
            return
        self._engine.abandon()
        if self._attached:
            self._parallel.close()
        self._local.forget_client()
        self._trainer.lightning_module.zero_grad()
        self._watch.put_back()
        self.memory.end_round()
        self.present, self._pending, self._steps_left = None, [], 0
