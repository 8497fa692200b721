"""A client's training, wherever the client is: in a simulation, on a rank, on a machine of its own.

A `ClientWorker` is given global weights and a stack of clients with their batches, and returns their updates.
What clients keep from round to round it finds and leaves in `states`; where that lies, and whether a round
counts, is its caller's business. It knows of no mechanism, no round engine and no transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fedq._lightning import rank_zero_warn
from lightning_fedq.algorithms.local_algorithm import Correction, PersistentOffsets
from lightning_fedq.clients.correction import GradientCorrector
from lightning_fedq.clients.fit import Batches, Client, ClientFit
from lightning_fedq.clients.measurement import measure
from lightning_fedq.clients.personal import ClientRows, ClientStates
from lightning_fedq.clients.stack import ClientStack, StackMemory
from lightning_fedq.clients.vector import Vector, find_changed
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.generator_turns import preserve_generators, seed_for_transforms
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.data.sampling import in_short
from lightning_fedq.functional.flatten import unflatten

_LOOKED_AT = 1_000_000
"""Values that nothing should change, up to which every client is looked at."""


class TrainedStack(NamedTuple):
    """A stack that has trained.

    Args:
        clients: Its clients.
        updates: `(clients, dim)` local - global. Those of two clients up are overwritten by the next stack.
        asks_to_stop: Whether the training has set `should_stop`.
    """

    clients: tuple[int, ...]
    updates: Tensor
    asks_to_stop: bool


class ClientWorker:
    """Trains and measures clients of one fit.

    Args:
        trainer: The Trainer that they are copied from, in its fit.
        vector: What travels.
        fit: Trains copies.
        clock: One client's: `now`, and `saw` for each that has trained.
        metrics: Takes what clients log: `attach`, and `keep_stack`.
        loader: Returns the loader of all clients.
        capacity: Most clients side by side.
        skips_empty: Is an empty batch no step at all?
        term: The local algorithm's half at the clients; None is federated averaging.
    """

    def __init__(
        self,
        trainer: Any,
        vector: Vector,
        fit: ClientFit,
        clock: Any,
        metrics: Any,
        loader: Callable[[], ClientLoader],
        capacity: int = 1,
        skips_empty: bool = False,
        term: Correction | None = None,
    ) -> None:
        self.trainer, self.vector, self.fit, self.clock, self.term = trainer, vector, fit, clock, term
        self._metrics, self._loader = metrics, loader
        self._capacity, self._skips_empty = capacity, skips_empty
        self._memory: StackMemory | None = None  # written over before it is read
        self._has_warned = False
        self._checked_tensors = -1
        parts: dict[str, ClientRows] = {"own": vector.personal}
        if isinstance(term, PersistentOffsets):
            parts["algorithm"] = term
        self.states = ClientStates(parts)

    def train(self, stack: Stack, batches: Iterator[Any], weights: Tensor) -> TrainedStack:
        """Train the clients of a stack on their batches.

        Args:
            stack: The clients.
            weights: `(dim,)` the global model.
        """
        vector, clients = self.vector, stack.clients
        logged, now = self.trainer.fit_loop.epoch_loop._batches_that_stepped, self.clock.steps_before_round
        moved = 0.0 if self.term is None else self.clock.learning_rate_sum
        before = self._unsent_tensors()
        client = self._copy(stack)
        vector.freeze_statistics(client.module)
        side_by_side = self._side_by_side(client, clients, weights) if len(clients) > 1 else None
        if side_by_side is None:
            vector.personal.load_into(
                client.module, clients[0]
            )  # its own layers, from its last round that counted
            if self._skips_empty and 0 in stack.batch_sizes:
                _skip_empty(client, stack.batch_sizes)
        self._correct(client, side_by_side, clients, weights)  # FedProx, SCAFFOLD, FedDyn: in gradients
        own = Batches(batches, len(stack.batch_sizes), self._loader())
        self.fit.train(client, own, now, logged)  # Lightning's loop, on this client's batches alone
        if side_by_side is None:
            update = (vector.read(client.module).to(weights.dtype) - weights)[None]
            vector.keep_client(client.module, clients[0], before)
            self._check_unsent_tensors(client, before)
        else:
            update = vector.select_sent_columns(side_by_side.updates())
            vector.keep_rows(clients, side_by_side.client_values())
        self.clock.count_steps(client.trainer)  # steps that are taken by hand, and loss scales
        if self.term is not None:
            trained = update[:, : vector.num_parameters]
            self.term.keep(clients, trained, moved)
            trained.copy_(self.term.sent(clients, trained))  # error feedback keeps a part back
        stops = bool(client.trainer.should_stop)
        self.fit.drop(client)
        if side_by_side is not None:
            side_by_side.drop()
        return TrainedStack(tuple(clients), update, stops)

    def evaluate(
        self, client: int, batches: Iterator[tuple[Any, int]], seed: int, personal: bool = False
    ) -> dict[str, float]:
        """Measure a model on one client's batches, in a copy and with draws of its own.

        What is measured of a client follows from its batches, the model and the seed alone.

        Args:
            batches: Its held-out batches, each with its number of samples.
            seed: Seed of what the measurement draws, the reading of batches included.
            personal: Measure the model with what the client keeps for itself, not the global one.

        Returns:
            What `validation_step` and the hooks of validation log, by name. Nothing where there is no batch.
        """
        with preserve_generators(), torch.no_grad():
            seed_for_transforms(seed)
            first = next(batches, None)
            if first is None:
                return {}
            copy = self.fit.copy(seed, (client,), alone=True)
            if personal:
                self.vector.personal.load_into(copy.module, client)
            found = measure(copy, chain([first], batches))
            self.fit.drop(copy)
        return found

    def _copy(self, stack: Stack) -> Client:
        client = self.fit.copy(stack.training_seed, stack.clients)  # nothing it writes to is the user's
        self._metrics.attach(client.trainer, stack.clients)  # what it logs goes where the run's claim lets it
        return client

    def free_stack_memory(self) -> None:
        """The vector has changed, or the fit is over: free the memory of stacks."""
        self._memory = None

    def _correct(
        self, client: Client, side_by_side: ClientStack | None, clients: Sequence[int], weights: Tensor
    ) -> None:
        """Put the algorithm's term in front of whatever else looks at gradients."""
        if self.term is None:
            return
        if side_by_side is not None:
            stack = side_by_side
            made = GradientCorrector(self.term, clients, lambda: stack.weights, stack.starts)
        else:
            vector = self.vector
            start = unflatten(weights[: vector.num_parameters], vector.shapes[: len(vector.names)])
            made = GradientCorrector(self.term, clients, lambda: vector.get_parameters(client.module), start)
        client.trainer.callbacks.insert(0, made)

    def _side_by_side(self, client: Client, clients: Sequence[int], weights: Tensor) -> ClientStack:
        vector = self.vector
        names = [*vector.trained, *vector.buffer_names]
        if self._memory is None:
            self._memory = StackMemory.allocate(self.trainer.lightning_module, names, self._capacity)
        start, own = vector.start_weights(clients, weights)
        return ClientStack(
            client.trainer,
            vector.trained,
            vector.buffer_names,
            self._memory,
            len(clients),
            start,
            own,
            self._loader().turns,
            lambda name, values: self._metrics.keep_stack(tuple(clients), name, values),
            len(vector.members.local),
        )

    def _unsent_tensors(self) -> dict[str, Tensor] | None:
        """Tensors that no update carries, as a client finds them. None where it trains a copy of them."""
        if not self.fit.itself:
            return None
        names = {*self.vector.members.counters, *self.vector.uncarried}
        return {name: attrgetter(name)(self.trainer.lightning_module).detach().clone() for name in names}

    def _check_unsent_tensors(self, client: Client, before: Mapping[str, Tensor] | None) -> None:
        """Refuse floats that training changes and no update carries, and say once which integers.

        Of every client, or of a round's first one where there is much that should not change.

        Raises:
            ValueError: Naming the tensors, with the cure.
        """
        names = self.vector.uncarried
        if (
            not names
            or self.vector.mode == "frozen"
            or self._checked_tensors == self.clock.steps_before_round
        ):
            return
        if self.vector.num_uncarried > _LOOKED_AT:
            self._checked_tensors = self.clock.steps_before_round
        changed = find_changed(before or self.trainer.lightning_module, client.module, names)
        floats = [name for name, tensor in changed.items() if tensor.is_floating_point()]
        integers = [name for name in changed if name not in floats]
        if floats:
            raise ValueError(
                f"training changed {in_short(floats, 4)}, which no update carries, because "
                "a client's first steps left it as it was; say that it travels: "
                f"Federated(shared={floats[:4]!r}), or keep it with the clients: local=[...]"
            )
        if integers and not self._has_warned:
            self._has_warned = True
            cure = "; buffers='local' keeps integers with the client that changed them"
            rank_zero_warn(
                f"training changed {in_short(integers, 4)}, which no update carries: every "
                f"client begins with what the fit began with{cure if self.vector.mode == 'share' else ''}"
            )


def group_updates(
    trained: Iterable[TrainedStack], max_values: int
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Clients and updates `(clients, dim)`: those of single clients together, and of a stack behind them.

    Args:
        trained: Clients as they have trained.
        max_values: Values of updates that may wait; 0 lets none.
    """
    waiting: list[TrainedStack] = []
    for one in trained:
        waiting.append(one)
        # the next stack overwrites the rows of this one
        if len(one.clients) > 1 or (len(waiting) + 1) * one.updates.shape[1] > max_values:
            yield _join_updates(waiting)
            waiting = []
    if waiting:
        yield _join_updates(waiting)


def _join_updates(several: Sequence[TrainedStack]) -> tuple[tuple[int, ...], Tensor]:
    clients = tuple(client for trained in several for client in trained.clients)
    updates = [trained.updates for trained in several]
    return clients, updates[0] if len(updates) == 1 else torch.cat(updates)


def _skip_empty(client: Client, sizes: Sequence[int]) -> None:
    """Let a batch of nobody be a step in which nothing moves."""
    trainer, strategy = client.trainer, client.trainer.strategy
    step, backward, device = strategy.training_step, strategy.backward, strategy.root_device

    def is_empty() -> bool:
        return not sizes[trainer.fit_loop.epoch_loop.batch_idx]

    strategy.training_step = lambda *args: torch.zeros((), device=device) if is_empty() else step(*args)
    strategy.backward = lambda loss, *args, **kwargs: loss if is_empty() else backward(loss, *args, **kwargs)
