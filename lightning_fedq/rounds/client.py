"""The clients' half of a round: use a stream once, encode, pack. No transport, no Lightning.

`RoundClient` is one real client, with its own keys and its own memory of what it has sent.
`encode_updates` is what it does to an update, and what a simulation does to a stack of them at once.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_fedq.functional.accumulate import sum_of_squares
from lightning_fedq.keys.randomness import ClientRandomness, Keys, PublicRandomness
from lightning_fedq.mechanisms.interface import Mechanism, Message, RoundContext
from lightning_fedq.rounds.client_budget import ClientBudget, StreamLog, UsedStreamError, terms_of
from lightning_fedq.rounds.messages import RoundTask, frame

Target = Literal["updates", "weights"]

_LARGEST = float(torch.finfo(torch.float32).max)


class Encoded(NamedTuple):
    """Encoded updates of some clients.

    Args:
        message: One row a client.
        updates: `(clients, dim)`, those that are not finite replaced by zeros.
        values: `(clients, dim)`, what was encoded: updates, or weights.
        non_finite: Clients whose update held what float32 can't hold, or a NaN.
        rand: The streams that were used.
        energy: Sum of squares of all `updates`.
    """

    message: Message
    updates: Tensor
    values: Tensor
    non_finite: tuple[int, ...]
    rand: ClientRandomness
    energy: float


def encode_updates(
    mechanism: Mechanism,
    target: Target,
    keys: Keys,
    clients: Sequence[int],
    updates: Tensor,
    weights: Tensor,
    context: RoundContext,
) -> Encoded:
    """Encode the updates of one client or of a stack. What float32 can't hold, NaN too, counts as zero.

    Args:
        target: What is encoded: "updates" (local - global), or local weights.
        keys: Keys of these clients.
        clients: Clients that the updates belong to.
        updates: `(len(clients), dim)`.
        weights: `(dim,)` the global model.
    """
    energy, non_finite = sum_of_squares(updates), tuple[int, ...]()
    if not energy <= _LARGEST**2:  # also where it is NaN
        finite = (updates.abs() <= _LARGEST).all(1)
        updates = torch.where(finite[:, None], updates, 0.0)
        energy = sum_of_squares(updates)
        non_finite = tuple(c for c, good in zip(clients, finite.tolist(), strict=True) if not good)
    values = (updates if target == "updates" else updates + weights).cpu()
    rand = ClientRandomness(keys, clients, context.round, context.attempt)
    message = mechanism.encode(values, context, rand)
    return Encoded(message, updates, values, non_finite, rand, energy)


class RoundClient:
    """One real client: uses a stream once, encodes its update, packs it to bytes.

    Args:
        client: Its number in the federation.
        mechanism: Mechanism of the client's own code, never what the server says.
        keys: What this client knows.
        log: Log of the streams that the client has used.
        target: "updates" or "weights", see `RoundEngine`.
        budget: Privacy budget that the client keeps itself; None leaves that to the server's ledger.
    """

    def __init__(
        self,
        client: int,
        mechanism: Mechanism,
        keys: Keys,
        log: StreamLog,
        target: Target = "updates",
        budget: ClientBudget | None = None,
    ) -> None:
        self.client, self.mechanism, self.keys, self.log, self.target = client, mechanism, keys, log, target
        self.budget = budget

    def check(self, task: RoundTask, weights: Tensor) -> None:
        """Refuse, before anybody trains, a round that can't be answered. `encode` asks again.

        How long a training takes is seen by the server, so it is for rounds that are paid for.

        Args:
            weights: `(dim,)` the global model of the round.

        Raises:
            ValueError: See `encode`.
            UsedStreamError: See `encode`.
            BudgetSpentError: See `encode`.
        """
        self._check_length(self._context(task), weights, weights)
        self.log.check(task.round, task.attempt)
        self._check_price(task)

    def encode(self, task: RoundTask, weights: Tensor, update: Tensor) -> Message:
        """Encode this client's update. Its stream is used up, whatever happens to the message.

        Args:
            weights: `(dim,)` the global model of the round.
            update: `(dim,)` local - global; a NaN, or what float32 can't hold, makes it a zero update.

        Raises:
            ValueError: If the client is not in the cohort, or the model has another shape than the task.
            UsedStreamError: If the stream was used before.
            BudgetSpentError: If the message would overspend the client's own budget.
        """
        context = self._context(task)
        self._check_length(context, weights, update)  # first: what is refused here uses no stream
        name, terms = repr(self.mechanism), terms_of(self.mechanism, context, self.budget)
        check = partial(self._check_price, task)
        self.log.use(task.round, task.attempt, context.dim, name, terms, check)
        return encode_updates(
            self.mechanism, self.target, self.keys, [self.client], update[None], weights, context
        ).message

    def _check_price(self, task: RoundTask) -> None:
        """Refuse a round that costs more than its claims say, or than this client's own budget has room for.

        Raises:
            UsedStreamError: If it is too soon after the last, where noise that clients hand on links the two.
            BudgetSpentError: If it would overspend the budget.
        """
        needed, last = self.mechanism.separation, self.log.last
        linked = task.hand_over is not None and task.hand_over.since <= last
        if linked and task.round - last[0] < needed:
            raise UsedStreamError(
                f"the server asks for round {task.round}, and this client has answered round {last[0]} of "
                f"the same block: {self.mechanism!r} counts on {needed} rounds between the two. A server "
                "whose clients come back earlier begins a new block"
            )
        if self.budget is not None:
            self.budget.check(self.mechanism, self._context(task), self.log)

    def _check_length(self, context: RoundContext, weights: Tensor, update: Tensor) -> None:
        if not update.shape == weights.shape == (context.dim,):
            raise ValueError(
                f"the server's round is about {context.dim} coordinates, this client's model has "
                f"{update.numel()} and the server sent {weights.numel()}; both sides need the same module"
            )

    def pack(self, task: RoundTask, message: Message) -> bytes:
        """The bytes that this client sends: the packed bits in their frame."""
        context = self._context(task)
        rand = PublicRandomness(self.keys, task.round, task.attempt)
        packed = self.mechanism.message_code(self.client, context, rand).pack(message.symbols[0])
        return frame(self.client, packed, context, rand)

    def answer(self, task: RoundTask, weights: Tensor, update: Tensor) -> bytes:
        """Encode and pack, see `encode`."""
        return self.pack(task, self.encode(task, weights, update))

    def _context(self, task: RoundTask) -> RoundContext:
        context = task.context()
        if self.client not in context.members:
            raise ValueError(f"client {self.client} is not in the cohort of round {task.round}")
        return context
