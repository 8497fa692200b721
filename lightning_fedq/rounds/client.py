"""The clients' half of a round: mark a stream as used, encode, pack. No transport, no Lightning.

`RoundClient` is one real client, with its own keys and its own log of used streams. `encode_updates` encodes
the update of a real client, or a stack of updates in a simulation.

The server's ledger protects clients from an honest server that miscounts. A client that does not trust the
server counts its messages itself (`ClientBudget`). Its log has one line for every stream that it has used,
including repeated rounds and attempts. Before a stream is used, the accountant computes the epsilon of all
these messages.

The budget covers only claims that a client can check alone: the claims of its own messages against the
parties that receive them. The epsilon of a message also depends on its round, because clients share bits
within a group and a sum hides a message among others. The server chooses these terms, so the log stores them
with every stream. A client answers only rounds whose groups follow the mechanism's rule and whose terms equal
the terms of all earlier rounds.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_fedq.functional.accumulate import sum_of_squares
from lightning_fedq.keys.randomness import ClientRandomness, Keys, PublicRandomness
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, Message, RoundContext
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.journal import Entry, Journal
from lightning_fedq.privacy.ledger import pad_segments
from lightning_fedq.privacy.run import Run, SecureSum
from lightning_fedq.privacy.target import PrivacyTarget, spent_on
from lightning_fedq.rounds.messages import RoundTask, pack_frame

Target = Literal["updates", "weights"]

_LARGEST = float(torch.finfo(torch.float32).max)


class Encoded(NamedTuple):
    """Encoded updates of some clients.

    Args:
        message: Encoded message with one row per client.
        updates: `(clients, dim)` updates. An update that is not finite is replaced by zeros.
        values: `(clients, dim)` encoded values: updates or local weights, depending on the target.
        non_finite: Clients whose update contained a NaN or a value outside the range of float32.
        rand: Random streams that the encoding used.
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
    """Encode the updates of one client, or of a stack of clients.

    An update with a NaN or with a value outside the range of float32 counts as a zero update.

    Args:
        mechanism: Mechanism that encodes.
        target: "updates" to encode updates (local - global), or "weights" to encode local weights.
        keys: Keys of these clients.
        clients: Clients that the updates belong to.
        updates: `(len(clients), dim)` updates.
        weights: `(dim,)` global model.
        context: Public facts of the round.
    """
    energy, non_finite = sum_of_squares(updates), tuple[int, ...]()
    if not energy <= _LARGEST**2:  # true for a NaN as well
        finite = (updates.abs() <= _LARGEST).all(1)
        updates = torch.where(finite[:, None], updates, 0.0)
        energy = sum_of_squares(updates)
        non_finite = tuple(c for c, good in zip(clients, finite.tolist(), strict=True) if not good)
    values = (updates if target == "updates" else updates + weights).cpu()
    rand = ClientRandomness(keys, clients, context.round, context.attempt)
    message = mechanism.encode(values, context, rand)
    return Encoded(message, updates, values, non_finite, rand, energy)


_ENFORCED = (Adversary.SERVER, Adversary.SERVER_AND_PARTNER, Adversary.SECAGG_SERVER)


class UsedStreamError(RuntimeError):
    """Error for a task whose stream this client has used before, or whose round or attempt is over."""


class StreamLog:
    """A client's log of used random streams. Each entry is written before its message is encoded.

    A keystream must never mask two different messages, because a party that holds both learns their
    difference. A client cannot rely on the server for this, so it keeps its own log. Attempts come in
    increasing order, so the last entry is enough to recognise a used stream.

    Only one process may use a log at a time.

    Args:
        path: File on the client's own disk. With None the log ends with the process, and a client that
            restarts must not use its old keys again.
        owner: Name of the client and its federation. A file of another owner is refused.

    Attributes:
        last: Round and attempt of the last used stream. (-1, -1) if there is none.
        charges: Number of used streams, each of which counts as one message in the budget.
        dim: Coordinates of the longest vector that was encoded.
        mechanisms: Mechanisms that encoded the messages, as text. "" for entries of versions that did not
            record them.
        terms: Terms of the rounds that affect the epsilon of a message, as text. "" for entries of versions
            that did not record them.

    Raises:
        ValueError: If the file is damaged, or belongs to another client or federation.
        OSError: If the file can't be read or written.
    """

    def __init__(self, path: Path | None, owner: str) -> None:
        self.last, self.charges, self.dim = (-1, -1), 0, 0
        self.mechanisms: set[str] = set()
        self.terms: set[str] = set()
        self._journal = None if path is None else Journal(path, owner, 1)
        self._read()

    def _read(self) -> None:
        """Add the entries that were appended to the file since the last read."""
        for entry in [] if self._journal is None else self._journal.unread():
            self._used(entry.round, entry.attempt, entry.dim, entry.state, entry.terms)

    def _used(self, round: int, attempt: int, dim: int, mechanism: str, terms: str) -> None:
        """Add one used stream to the totals in memory."""
        self.last, self.dim = max(self.last, (round, attempt)), max(self.dim, dim)
        self.charges += 1
        self.mechanisms.add(mechanism)
        self.terms.add(terms)

    def use(
        self,
        round: int,
        attempt: int,
        dim: int,
        mechanism: str,
        terms: str,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Mark the stream of one attempt as used. The entry is on disk when the method returns.

        Args:
            round: Round number, from 0.
            attempt: Number of earlier attempts at the round.
            dim: Coordinates of the vector that is encoded.
            mechanism: Mechanism that encodes the message, as text.
            terms: Terms of the round, as text.
            check: Function that raises if the log as it is now allows no further message.

        Raises:
            UsedStreamError: If this stream or a later one was used before.
            RuntimeError: If another process uses the log at the same time.
            OSError: If the entry can't be written. The message must not be sent then.
        """
        self._read()
        self.check(round, attempt)
        check()
        if self._journal is not None:
            self._journal.append(Entry(round, attempt, mechanism, None, dim, terms))
        self._used(round, attempt, dim, mechanism, terms)

    def check(self, round: int, attempt: int) -> None:
        """Check that a stream is unused, from the totals in memory. `use` repeats the check with the file.

        Raises:
            UsedStreamError: If this stream or a later one was used before.
        """
        if (round, attempt) <= self.last:
            raise UsedStreamError(
                f"Round {round}, attempt {attempt} was asked, but this client has answered round "
                f"{self.last[0]}, attempt {self.last[1]}. A restarted server needs a new attempt, "
                "or a new federation if its state is lost."
            )


class BudgetSpentError(RuntimeError):
    """Error for a message that would exceed the client's own budget. No stream is used."""


@dataclass(frozen=True)
class ClientBudget:
    """Privacy budget that one client enforces itself, over all messages in its log.

    Args:
        target: Target over the "run", which is the lifetime of the client's log. The adversary is one of
            three: the server that receives the messages, this server together with the partner that shares
            bits, or the server behind secure aggregation.
        num_clients: Clients in the federation. The target's delta must be below 1 / num_clients.
        secure_sum: Guarantee of the secure aggregation, `SecAgg.guarantee`. A budget against the server
            behind secure aggregation needs a guarantee against a server that may lie. Otherwise a client
            cannot verify that the randomised bits of other clients are in the sum.

    Raises:
        ValueError: If the target is not over the run, if a client cannot observe what the target's adversary
            learns, or if the secure aggregation has no guarantee against a lying server.
    """

    target: PrivacyTarget
    num_clients: int
    secure_sum: SecureSum | None = None

    def __post_init__(self) -> None:
        against = self.target.against
        check_delta(self.target.delta, self.num_clients, "clients")
        if self.target.over != "run":
            raise ValueError(
                "A client's own budget is over the run, which means all its messages. Leave over='round' out."
            )
        if against not in _ENFORCED:
            raise ValueError(
                f"A client can't enforce a budget against {against.value}. "
                "Use adversary='server' or 'server_and_partner'."
            )
        if against is Adversary.SECAGG_SERVER and self.required_sum is None:
            raise ValueError(
                "A client can't verify that the sum hides its message. "
                "Use SecAgg(active=True), or a budget with adversary='server', which assumes no sum."
            )

    @property
    def required_sum(self) -> SecureSum | None:
        """Guarantee of secure aggregation, if clients verify the number of survivors. None otherwise."""
        sums = self.secure_sum
        return None if sums is None or sums.min_survivors is None else sums

    def check(self, mechanism: Mechanism, context: RoundContext, log: StreamLog) -> None:
        """Check that one more message fits the budget.

        Args:
            mechanism: Mechanism that encodes the message.
            context: Public facts of the message's round.
            log: Log of earlier messages. All of them are priced like the longest one, encoded by `mechanism`.

        Raises:
            BudgetSpentError: If it does not, or its price differs from that of the logged messages.
        """
        self._check_same_terms(mechanism, context, log)
        num_messages = log.charges + 1
        run = self._run(mechanism, pad_segments(context, log.dim), num_messages)
        spent = spent_on(self.target, run, num_messages)
        if spent > self.target.epsilon:
            raise BudgetSpentError(
                f"Nothing is sent: this client's budget is {self.target}, and after {log.charges} messages "
                f"one more would spend epsilon {spent:.4g}. Raise the budget, or leave the federation."
            )

    def _check_same_terms(self, mechanism: Mechanism, context: RoundContext, log: StreamLog) -> None:
        """Refuse a round whose message has another price than the logged ones, or unknown groups."""
        if others := log.mechanisms - {repr(mechanism)}:
            raise BudgetSpentError(
                f"This client's log has messages of {', '.join(sorted(others)) or 'an unknown mechanism'}, "
                f"not of {mechanism!r}. Start a new federation in a new folder: the epsilons of both add up."
            )
        sizes, wanted = tuple(map(len, context.groups)), tuple(mechanism.group_sizes(len(context.cohort)))
        if sizes != wanted:
            raise BudgetSpentError(
                f"Nothing is sent, because the server's groups change the epsilon of a message. "
                f"Its group sizes are {sizes[:10]}, the mechanism's are {wanted[:10]}."
            )
        terms = describe_price_terms(mechanism, context, self)
        if others := log.terms - {terms}:
            known = "; ".join(other or "unknown terms" for other in sorted(others))
            raise BudgetSpentError(
                f"This client's log has messages of {known}, but the server asks for {terms}. "
                "Start a new federation in a new folder: the epsilons of both add up."
            )

    def _run(self, mechanism: Mechanism, context: RoundContext, num_messages: int) -> Run:
        """Return a run of this client's messages, all of them like the longest one.

        A client cannot see the weights, false updates or dropouts of others. No adversary's view of its own
        message depends on them, so `Run.ideal` is enough.
        """
        run = Run.ideal(mechanism, context, num_messages, None)
        clients, sums = max(self.num_clients, run.cohort_size), self.required_sum
        if sums is not None:
            sums = replace(sums, colluders=replace(sums.colluders, clients=clients, cohort=run.cohort_size))
        sampling, threat = replace(run.sampling, num_clients=clients), replace(run.threat, secure_sum=sums)
        return replace(run, sampling=sampling, threat=threat)


def describe_price_terms(mechanism: Mechanism, context: RoundContext, budget: ClientBudget | None) -> str:
    """Describe the terms of a round that affect the epsilon of a client's message, apart from the mechanism.

    The text is stored in the log, and rounds with different texts are not summed.

    Args:
        mechanism: Mechanism of the message. If the charge of a long vector does not cover a shorter one, the
            terms include the number of coordinates.
        context: Public facts of the round.
        budget: Budget of the client, with its requirements on secure aggregation, or None.
    """
    sizes = Counter(map(len, context.groups))
    groups = ", ".join(f"{number} of {size}" for size, number in sorted(sizes.items()))
    terms = f"{len(context.cohort)} clients in groups: {groups}"
    if not mechanism.price_grows_with_dim:
        terms += f"; {context.dim} coordinates"
    if budget is None or (sums := budget.required_sum) is None:
        return terms
    terms += f"; {sums.min_survivors} confirm a sum, a share of {sums.colluders.fraction:g} may collude"
    drawn = sums.colluders.num_in_federation and sums.colluders.clients > sums.colluders.cohort
    # earlier versions made the graph for the cohort's share of colluders, so settings are named too
    return f"{terms}; {sums.settings}" if drawn else terms


@dataclass(eq=False, repr=False)
class RoundClient:
    """One real client in a round: it marks a stream as used, encodes its update, and packs it to bytes.

    Args:
        client: Number of the client in the federation.
        mechanism: Mechanism of the client's own configuration. The server cannot change it.
        keys: Secret keys of this client.
        log: Log of the streams that the client has used.
        target: "updates" or "weights", see `RoundServer`.
        budget: Privacy budget that the client enforces itself. With None only the server's ledger counts.
    """

    client: int
    mechanism: Mechanism
    keys: Keys
    log: StreamLog
    target: Target = "updates"
    budget: ClientBudget | None = None

    def check(self, task: RoundTask, weights: Tensor) -> None:
        """Check before training that the client can answer a round. `encode` repeats the check.

        The server can measure the training time, so a client trains only in rounds that its budget covers.

        Args:
            task: Task that the server sent.
            weights: `(dim,)` global model of the round.

        Raises:
            ValueError: See `encode`.
            UsedStreamError: See `encode`.
            BudgetSpentError: See `encode`.
        """
        self._check_length(self._context(task), weights, weights)
        self.log.check(task.round, task.attempt)
        self._check_price(task)

    def encode(self, task: RoundTask, weights: Tensor, update: Tensor) -> Message:
        """Encode this client's update. The stream counts as used even if the message is never sent.

        Args:
            task: Task that the server sent.
            weights: `(dim,)` global model of the round.
            update: `(dim,)` local - global. With a NaN or a value outside the range of float32, it counts as
                a zero update.

        Raises:
            ValueError: If the client is not in the cohort, or if the model and the task differ in length.
            UsedStreamError: If the stream was used before.
            BudgetSpentError: If the message would exceed the client's own budget.
        """
        context = self._context(task)
        self._check_length(context, weights, update)  # first, so that a refused task uses no stream
        name, terms = repr(self.mechanism), describe_price_terms(self.mechanism, context, self.budget)
        check = partial(self._check_price, task)
        self.log.use(task.round, task.attempt, context.dim, name, terms, check)
        known = [self.client], update[None], weights, context
        return encode_updates(self.mechanism, self.target, self.keys, *known).message

    def _check_price(self, task: RoundTask) -> None:
        """Check that the round is not too early for the mechanism's claims, and fits the client's own budget.

        Raises:
            UsedStreamError: If correlated noise links this round to the client's last one, and the mechanism
                requires more rounds between them.
            BudgetSpentError: If the message would exceed the budget.
        """
        needed, last = self.mechanism.separation, self.log.last
        linked = task.hand_over is not None and task.hand_over.since <= last
        if linked and task.round - last[0] < needed:
            raise UsedStreamError(
                f"Round {task.round} is too soon after this client's round {last[0]}: {self.mechanism!r} "
                f"needs {needed} rounds between them. The server must start a new block of correlated noise."
            )
        if self.budget is not None:
            self.budget.check(self.mechanism, self._context(task), self.log)

    def _check_length(self, context: RoundContext, weights: Tensor, update: Tensor) -> None:
        """Check that task, model and update have the same number of coordinates."""
        if not update.shape == weights.shape == (context.dim,):
            raise ValueError(
                f"The round has {context.dim} coordinates, this client's model {update.numel()}, and the "
                f"server sent {weights.numel()}. Both sides need the same module."
            )

    def pack(self, task: RoundTask, message: Message) -> bytes:
        """Return the bytes that this client sends: the packed bits in a frame."""
        context = self._context(task)
        rand = PublicRandomness(self.keys, task.round, task.attempt)
        packed = self.mechanism.message_code(self.client, context, rand).pack(message.symbols[0])
        return pack_frame(self.client, packed, context, rand)

    def answer(self, task: RoundTask, weights: Tensor, update: Tensor) -> bytes:
        """Encode an update and pack it to bytes. Arguments and errors are those of `encode`."""
        return self.pack(task, self.encode(task, weights, update))

    def _context(self, task: RoundTask) -> RoundContext:
        """Return the public facts of the task's round, if this client is in its cohort."""
        context = task.context()
        if self.client not in context.members:
            raise ValueError(f"Client {self.client} is not in the cohort of round {task.round}")
        return context
