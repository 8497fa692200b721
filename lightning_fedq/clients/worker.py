"""Training of clients in one round: in a simulation, on a rank, or on a client's own machine.

A `ClientWorker` receives global weights and a stack of clients with their batches, and returns their updates.
It reads and writes the state that clients keep between rounds in `states`. The caller stores this state and
decides whether a round counts. The module depends on no mechanism, round engine or transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.algorithms.local_algorithm import Correction, PersistentOffsets
from lightning_fedq.clients.changed_tensors import find_changed
from lightning_fedq.clients.fit import Batches, Client, ClientFit
from lightning_fedq.clients.measurement import measure
from lightning_fedq.clients.personal import ClientRows, ClientStates
from lightning_fedq.clients.stack import ClientStack, StackMemory
from lightning_fedq.clients.vector import Vector
from lightning_fedq.data.batches import Stack
from lightning_fedq.data.generator_turns import preserve_generators, seed_for_transforms
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.data.sampling import in_short
from lightning_fedq.functional.flatten import unflatten

_LOOKED_AT = 1_000_000
"""Number of uncarried values up to which every client is checked, not only one per round."""


class TrainedStack(NamedTuple):
    """Result of training one client or a stack of clients.

    Args:
        clients: Numbers of the clients.
        updates: `(clients, dim)` updates, local - global. With two clients or more, the next stack overwrites
            them.
        asks_to_stop: Whether the training has set `trainer.should_stop`.
    """

    clients: tuple[int, ...]
    updates: Tensor
    asks_to_stop: bool


class GradientCorrector(pl.Callback):
    """Callback that adds offset + pull (w - x) to the gradients before clipping and the optimiser step.

    It is the first callback of a client's Trainer. Here w are the weights and x their start values.

    Args:
        term: Local algorithm, with its pull and its offsets per client.
        clients: Numbers of the clients.
        weights: Function that returns the trained parameters: `shape` each, or `(clients, *shape)` of a
            stack.
        start: Weights at the start of the round, `shape` each.
    """

    knows_clients = True

    def __init__(
        self,
        term: Correction,
        clients: Sequence[int],
        weights: Callable[[], Sequence[Tensor]],
        start: Sequence[Tensor],
    ) -> None:
        self._pull, self._weights, self._start = term.pull, weights, start
        offsets = term.offsets(clients)
        self._offsets: Sequence[Tensor | None] = [None] * len(start)
        if offsets is not None:
            parts = torch.split(offsets, [one.numel() for one in start], dim=1)
            shapes = [weight.shape for weight in weights()]
            self._offsets = [p.to(w).reshape(s) for p, s, w in zip(parts, shapes, start, strict=True)]

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Add the term to the gradients of the optimiser's parameters."""
        optimised = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        if all(weight.grad is None for group in optimizer.param_groups for weight in group["params"]):
            return  # no gradients: the step is skipped
        for weight, start, offset in zip(self._weights(), self._start, self._offsets, strict=True):
            if id(weight) not in optimised:
                continue
            term = 0.0 if offset is None else offset
            if self._pull:
                term = term + self._pull * (weight - start)
            if not isinstance(term, float):  # not in place, because two weights may share a gradient
                weight.grad = term.to(weight) if weight.grad is None else weight.grad + term


class ClientWorker:
    """Worker that trains and evaluates the clients of one fit.

    Args:
        trainer: User's Trainer during its fit, from which clients are copied.
        vector: Flat vector of the tensors that clients send.
        fit: `ClientFit` that makes and trains copies.
        clock: `Clock` of steps and learning rate schedules. Each trained client calls its `count_steps`.
        metrics: Receiver of the values that clients log, with methods `attach` and `keep_stack`.
        loader: Function that returns the loader of all clients.
        capacity: Largest number of clients in a stack.
        skips_empty: Whether a step on an empty batch is skipped.
        term: Client part of the local algorithm. None is federated averaging.
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
        self._memory: StackMemory | None = None  # reused by all stacks, each of which overwrites it
        self._has_warned = False
        self._checked_tensors = -1
        parts: dict[str, ClientRows] = {"own": vector.personal}
        if isinstance(term, PersistentOffsets):
            parts["algorithm"] = term
        self.states = ClientStates(parts)

    def train(self, stack: Stack, batches: Iterator[Any], weights: Tensor) -> TrainedStack:
        """Train the clients of a stack on their batches.

        Args:
            stack: One client, or several that train in one step.
            batches: Batches of the stack.
            weights: `(dim,)` flat vector of the global model.

        Raises:
            ValueError: If training changed a float tensor that no update carries.
        """
        vector, clients = self.vector, stack.clients
        logged, now = self.trainer.fit_loop.epoch_loop._batches_that_stepped, self.clock.steps_before_round
        moved = 0.0 if self.term is None else self.clock.learning_rate_sum
        client = self._copy(stack)
        vector.freeze_statistics(client.module)
        side_by_side = self._side_by_side(client, clients, weights) if len(clients) > 1 else None
        if side_by_side is None:
            # personalised parameters, from the client's last round that counted
            vector.personal.load_into(client.module, clients[0])
            if self._skips_empty and 0 in stack.batch_sizes:
                _skip_empty(client, stack.batch_sizes)
        self._correct(client, side_by_side, clients, weights)  # FedProx, SCAFFOLD and FedDyn add to gradients
        own = Batches(batches, len(stack.batch_sizes), self._loader())
        self.fit.train(client, own, now, logged)  # Lightning's loop, on this stack's batches only
        if side_by_side is None:
            update = (vector.read(client.module).to(weights.dtype) - weights)[None]
            vector.keep_client(client.module, clients[0])
            self._check_unsent_tensors(client)
        else:
            update = vector.select_sent_columns(side_by_side.updates())
            vector.keep_rows(clients, side_by_side.client_values())
        self.clock.count_steps(client.trainer)  # also records manual steps and loss scales
        if self.term is not None:
            trained = update[:, : vector.num_parameters]
            self.term.keep(clients, trained, moved)
            trained.copy_(self.term.sent(clients, trained))  # error feedback withholds a part of the update
        stops = bool(client.trainer.should_stop)
        self.fit.drop(client)
        if side_by_side is not None:
            side_by_side.drop()
        return TrainedStack(tuple(clients), update, stops)

    def evaluate(
        self, client: int, batches: Iterator[tuple[Any, int]], seed: int, personal: bool = False
    ) -> dict[str, float]:
        """Evaluate a model on one client's batches, in a copy and with separate random draws.

        The result depends only on the client's batches, the model and the seed.

        Args:
            client: Number of the client.
            batches: Held-out batches, each with its number of samples.
            seed: Seed of all random draws in the evaluation, including data transforms.
            personal: Whether to evaluate the model with the client's personalised parameters.

        Returns:
            Values that `validation_step` and the validation hooks log, by name. Empty if there is no batch.
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
        """Load a copy of the training state, with a log that respects the run's privacy claim."""
        client = self.fit.copy(stack.training_seed, stack.clients)
        self._metrics.attach(client.trainer, stack.clients)
        return client

    def free_stack_memory(self) -> None:
        """Free the memory of stacks, after the vector has changed or at the end of the fit."""
        self._memory = None

    def _correct(
        self, client: Client, side_by_side: ClientStack | None, clients: Sequence[int], weights: Tensor
    ) -> None:
        """Add the local algorithm's gradient term as the first callback, before others read gradients."""
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
        """Make the stack of several clients in the Trainer of a copy."""
        vector = self.vector
        names, buffers, num_local = vector.trained, vector.buffer_names, len(vector.members.local)
        if self._memory is None:
            module = self.trainer.lightning_module
            self._memory = StackMemory.allocate(module, [*names, *buffers], self._capacity)
        start, own = vector.start_weights(clients, weights)
        turns, keep = self._loader().turns, partial(self._metrics.keep_stack, tuple(clients))
        return ClientStack(
            client.trainer, names, buffers, self._memory, len(clients), start, own, turns, keep, num_local
        )

    def _check_unsent_tensors(self, client: Client) -> None:
        """Raise if training changed float tensors that no update carries. Warn once about integers.

        Every client is checked, or only the first of a round if there are many uncarried values.

        Raises:
            ValueError: If a float tensor that no update carries has changed.
        """
        names = self.vector.uncarried
        is_checked = self._checked_tensors == self.clock.steps_before_round
        if not names or self.vector.mode == "frozen" or is_checked:
            return
        if self.vector.num_uncarried > _LOOKED_AT:
            self._checked_tensors = self.clock.steps_before_round
        changed = find_changed(self.trainer.lightning_module, client.module, names)
        floats = [name for name, tensor in changed.items() if tensor.is_floating_point()]
        integers = [name for name in changed if name not in floats]
        if floats:
            raise ValueError(
                f"Training changed {in_short(floats, 4)}, which clients don't send, "
                "because the first steps left it unchanged. "
                f"Set Federated(extra_buffers={floats[:4]!r}) to send it, or personal_parameters=[...] to "
                "keep it with clients."
            )
        if integers and not self._has_warned:
            self._has_warned = True
            cure = " Set buffers='local' to keep each client's own values."
            rank_zero_warn(
                f"Training changed {in_short(integers, 4)}, which clients don't send, so every client starts "
                f"with the initial values.{cure if self.vector.mode == 'share' else ''}"
            )


def group_updates(
    trained: Iterable[TrainedStack], max_values: int
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield clients and updates `(clients, dim)` in groups, so that encoding has fewer calls.

    Updates of single clients are joined. A stack ends a group, because the next stack overwrites its updates.

    Args:
        trained: Clients and stacks in the order of training.
        max_values: Largest number of update values in a group of single clients. 0 joins none.
    """
    waiting: list[TrainedStack] = []
    for stack in trained:
        waiting.append(stack)
        if len(stack.clients) > 1 or (len(waiting) + 1) * stack.updates.shape[1] > max_values:
            yield _join_updates(waiting)
            waiting = []
    if waiting:
        yield _join_updates(waiting)


def _join_updates(several: Sequence[TrainedStack]) -> tuple[tuple[int, ...], Tensor]:
    clients = tuple(client for trained in several for client in trained.clients)
    updates = [trained.updates for trained in several]
    return clients, updates[0] if len(updates) == 1 else torch.cat(updates)


def _skip_empty(client: Client, sizes: Sequence[int]) -> None:
    """Let a step on an empty batch change nothing."""
    trainer, strategy = client.trainer, client.trainer.strategy
    step, backward, device = strategy.training_step, strategy.backward, strategy.root_device

    def is_empty() -> bool:
        return not sizes[trainer.fit_loop.epoch_loop.batch_idx]

    strategy.training_step = lambda *args: torch.zeros((), device=device) if is_empty() else step(*args)
    strategy.backward = lambda loss, *args, **kwargs: loss if is_empty() else backward(loss, *args, **kwargs)
