"""The clients' half of a round: use a stream once, encode, pack. No transport, no Lightning.

`RoundClient` is one real client, with its own keys and its own memory of what it has sent.
`encode_updates` is what it does to an update, and what a simulation does to a stack of them at once.

The server's ledger protects clients from an honest server that miscounts. A client that does not trust the
server counts for itself (`ClientBudget`): its own log has one line for every stream that it has used,
repeated rounds and attempts included, and before a stream is used the accountant says what that many messages
spend. It enforces what a client can know by itself: the claim of its own messages against those who receive
them. What a message costs hangs on its round, too: who shares bits with whom, and how many hide it in a sum.
That is the server's to write, so the log holds these terms with every stream; only groups of the mechanism's
own rule are answered, and only rounds of the terms of all those before.
"""

import json
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
from lightning_fedq.privacy.journal import (
    OWN,
    Journal,
    draft_path,
    drop_drafts,
    name_file_in_errors,
    sign_entry,
)
from lightning_fedq.privacy.ledger import pad_segments
from lightning_fedq.privacy.run import Run, SecureSum
from lightning_fedq.privacy.target import PrivacyTarget, spent_on
from lightning_fedq.rounds.messages import RoundTask, pack_frame

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


_ENFORCED = (Adversary.SERVER, Adversary.SERVER_AND_PARTNER, Adversary.SECAGG_SERVER)


class UsedStreamError(RuntimeError):
    """A server asks for a round, or an attempt, that this client has answered before, or one that is over."""


_MARKED = 256
"""Lines of a log that are read at most, about, before its sum is written down."""


def _last_line_end(path: Path, position: int) -> str:
    """The end of the last line before a position, its checksum included."""
    with path.open("rb") as file:
        file.seek(max(0, position - 80))
        return file.read(min(80, position)).hex()


class StreamLog:
    """A client's own memory of the streams that have carried a payload, written before the payload exists.

    One keystream must never carry two payloads, and a client can't rely on the server to see to that: whoever
    holds both learns how they differ. Attempts come in order, so a log of the last one says it all.

    Args:
        path: A file on the client's own disk; None forgets with the process, so that a client which comes
            back must not use its old keys again.
        owner: Names the client and its federation; a file of somebody else is refused.

    One process uses a log at a time; drafts that one has left which was killed are taken away.

    Attributes:
        last: Round and attempt of the last stream that was used. (-1, -1) if none was.
        charges: Streams that were used, which is what the client has paid for.
        dim: Coordinates of the longest vector that one of them was used for.
        mechanisms: Mechanisms that the streams were used with, as text; "" if an earlier version did not say.
        terms: Terms of their rounds on which the price of a message depends, as text; "" likewise.
        lines_read: Lines of the file that were read; the rest is known from the `.mark` beside it.

    Raises:
        ValueError: If the file is damaged, or another client's or federation's.
        OSError: If it can't be read or written.
    """

    def __init__(self, path: Path | None, owner: str) -> None:
        self.last, self.charges, self.dim = (-1, -1), 0, 0
        self.mechanisms: set[str] = set()
        self.terms: set[str] = set()
        self._owner, self._journal, self.lines_read = owner, None, 0
        if path is not None:
            drop_drafts(path)
            self._journal = Journal(path, owner, 1, self._read_position(path))
        self._read()

    def _read(self) -> None:
        found = [] if self._journal is None else self._journal.unread()
        self.lines_read += len(found)
        for entry in found:
            self._used(entry.round, entry.attempt, entry.dim, entry.state, entry.terms)
        if len(found) >= _MARKED:
            self._write_position()

    def _write_position(self) -> None:
        """Write down what the log says so far, or each message would read the lines of all rounds."""
        assert self._journal is not None
        path, position = self._journal.path, self._journal.position
        known = {
            "owner": self._owner,
            "position": position,
            "before": _last_line_end(path, position),
            "last": self.last,
            "charges": self.charges,
            "dim": self.dim,
            "mechanisms": sorted(self.mechanisms),
            "terms": sorted(self.terms),
        }
        new = draft_path(path)
        with name_file_in_errors(path), open(new, "wb", opener=OWN) as file:
            file.write(sign_entry(known))
        # not synced: without it, or torn, the log is read from its start
        new.replace(path.with_suffix(".mark"))

    def _read_position(self, path: Path) -> int:
        """Take over what `_write_position` wrote. Return up to which byte, or 0 if nothing can be trusted."""
        try:
            line = path.with_suffix(".mark").read_bytes()
            known = json.loads(line)
            position = int(known["position"])
            if line != sign_entry(known) or known["owner"] != self._owner:
                return 0
            whole = path.exists() and path.stat().st_size >= position  # else the journal says what is lost
            if whole and _last_line_end(path, position) != known["before"]:
                return 0  # another log: its lines say
            last, charges, dim = tuple(known["last"]), int(known["charges"]), int(known["dim"])
            mechanisms, terms = set(known["mechanisms"]), set(known["terms"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return 0
        self.last, self.charges, self.dim = (last[0], last[1]), charges, dim
        self.mechanisms, self.terms = mechanisms, terms
        return position

    def _used(self, round: int, attempt: int, dim: int, mechanism: str, terms: str) -> None:
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
        """Use up one stream. When it returns, the disk knows.

        Args:
            dim: Coordinates of the vector that is encoded.
            mechanism: Mechanism that encodes the message, as text.
            terms: Terms of the round, as text.
            check: Raises where one more is too much, by what the log holds now.

        Raises:
            UsedStreamError: If it, or a later one, was used before.
            RuntimeError: If another process uses one at the same time.
            OSError: If it can't be written; then nothing may be sent.
        """
        self._read()
        self.check(round, attempt)
        check()
        if self._journal is not None:
            self._journal.append(round, attempt, mechanism, None, dim, terms)
        self._used(round, attempt, dim, mechanism, terms)

    def check(self, round: int, attempt: int) -> None:
        """Refuse a stream that was used, by what is known here. `use` asks again, of the disk.

        Raises:
            UsedStreamError: If it, or a later one, was used before.
        """
        if (round, attempt) <= self.last:
            raise UsedStreamError(
                f"the server asks for round {round}, attempt {attempt}, and this client has answered round "
                f"{self.last[0]}, attempt {self.last[1]}: a stream serves one payload. A server that was "
                "restarted goes on with a new attempt; one that has lost its state needs a new federation"
            )


class BudgetSpentError(RuntimeError):
    """A message that would overspend the client's own budget. Nothing is encoded, and no stream is used."""


@dataclass(frozen=True)
class ClientBudget:
    """One client's own budget over all messages that its log knows.

    Args:
        target: Over the "run", which is the life of the client's log. Against the server that receives its
            messages, that server and the partner that it shares bits with, or the server behind secure
            aggregation.
        num_clients: Clients in the federation; the target's delta is below 1 / num_clients.
        secure_sum: Guarantee of the secure aggregation, `SecAgg.guarantee`. Without one against a server that
            may lie there is no budget against the server behind it: a client can not see that the others'
            coins are in the sum.

    Raises:
        ValueError: If the target is over a round, or against somebody of whom a client knows too little.
    """

    target: PrivacyTarget
    num_clients: int
    secure_sum: SecureSum | None = None

    def __post_init__(self) -> None:
        against = self.target.against
        check_delta(self.target.delta, self.num_clients, "clients")
        if self.target.over != "run":
            raise ValueError(
                "a client's own budget is over the run: all that it sends; leave over='round' out"
            )
        if against not in _ENFORCED:
            raise ValueError(
                f"a client can't see what {against.value} learns, so it can't hold to a budget against it; "
                "take adversary='server' or 'server_and_partner'"
            )
        if against is Adversary.SECAGG_SERVER and self.required_sum is None:
            raise ValueError(
                "whether a sum hides a client is the server's to say, unless it is held to it: use "
                "SecAgg(active=True), or a budget with adversary='server', which counts on no sum"
            )

    @property
    def required_sum(self) -> SecureSum | None:
        """The guarantee, where clients insist on survivors. None where the server's word is all there is."""
        sums = self.secure_sum
        return None if sums is None or sums.min_survivors is None else sums

    def check(self, mechanism: Mechanism, context: RoundContext, log: StreamLog) -> None:
        """Refuse one more message.

        Args:
            log: What was sent before; all of it counts as encoded by `mechanism` and as long as the longest.

        Raises:
            BudgetSpentError: If it would overspend, if the groups are not the mechanism's, or if the log has
                messages of another mechanism or other terms.
        """
        target, charges = self.target, log.charges
        if others := log.mechanisms - {repr(mechanism)}:
            raise BudgetSpentError(
                f"this client's log has messages of {', '.join(sorted(others)) or 'an unknown mechanism'}, "
                f"and what they spent is not known to {mechanism!r}; begin a new federation in a new folder, "
                "whose privacy adds to that of the old one"
            )
        sizes, wanted = tuple(map(len, context.groups)), tuple(mechanism.group_sizes(len(context.cohort)))
        if sizes != wanted:
            raise BudgetSpentError(
                f"the server asks for groups of {sizes[:10]}, the mechanism's are {wanted[:10]}, so what a "
                "message spends is not what was agreed; nothing is sent"
            )
        terms = describe_price_terms(mechanism, context, self)
        if others := log.terms - {terms}:
            known = "; ".join(other or "unknown terms" for other in sorted(others))
            raise BudgetSpentError(
                f"this client's log has messages of {known}, and the server asks for one of {terms}, at "
                "which those are not priced; begin a new federation in a new folder, whose privacy adds to "
                "that of the old one"
            )
        # what it can't see, others' weights, lies and silence, no view of its own message hangs on
        run = Run.ideal(mechanism, pad_segments(context, log.dim), charges + 1, None)
        clients, sums = max(self.num_clients, run.cohort_size), self.required_sum
        if sums is not None:
            sums = replace(sums, colluders=replace(sums.colluders, clients=clients, cohort=run.cohort_size))
        sampling, threat = replace(run.sampling, num_clients=clients), replace(run.threat, secure_sum=sums)
        run = replace(run, sampling=sampling, threat=threat)
        spent = spent_on(target, run, charges + 1)
        if spent > target.epsilon:
            raise BudgetSpentError(
                f"this client's own budget is {target}: {charges} messages were encoded before, and with one "
                f"more they would spend epsilon {spent:.4g}; nothing is sent. Raise the budget, or leave the "
                "federation"
            )


def describe_price_terms(mechanism: Mechanism, context: RoundContext, budget: ClientBudget | None) -> str:
    """Terms of the price of a client's message, beside the mechanism, in words.

    Args:
        mechanism: Its length is among them where a long message does not cover a shorter one.
        budget: Budget of the client, which says what it insists on behind secure aggregation.
    """
    sizes = Counter(map(len, context.groups))
    groups = ", ".join(f"{number} of {size}" for size, number in sorted(sizes.items()))
    terms = f"{len(context.cohort)} clients in groups: {groups}"
    if not mechanism.covers_shorter:
        terms += f"; {context.dim} coordinates"
    if budget is None or (sums := budget.required_sum) is None:
        return terms
    terms += f"; {sums.min_survivors} confirm a sum, a share of {sums.colluders.fraction:g} may collude"
    drawn = sums.colluders.num_in_federation and sums.colluders.clients > sums.colluders.cohort
    return f"{terms}; {sums.settings}" if drawn else terms  # whose graph earlier versions made for a share


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
        name, terms = repr(self.mechanism), describe_price_terms(self.mechanism, context, self.budget)
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
        return pack_frame(self.client, packed, context, rand)

    def answer(self, task: RoundTask, weights: Tensor, update: Tensor) -> bytes:
        """Encode and pack, see `encode`."""
        return self.pack(task, self.encode(task, weights, update))

    def _context(self, task: RoundTask) -> RoundContext:
        context = task.context()
        if self.client not in context.members:
            raise ValueError(f"client {self.client} is not in the cohort of round {task.round}")
        return context
