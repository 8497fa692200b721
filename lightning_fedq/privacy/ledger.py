"""Who was charged how often: one small counter per client, charged before anything leaves it.

A charge names the stream that it pays for, (round, attempt). Streams of a client must come in ascending
order, so no stream is ever paid for twice and none carries two payloads: a repeated round is a new attempt,
and is charged again. Counting is all that the ledger does; what a charge costs follows from the mechanism's
claims (`accounting`) and from the terms of its round: how many others were in it, whether masks hid it, who
lied. All charges have one price, so a ledger is refused to another mechanism, another federation, or other
terms (`agree`).

A ledger belongs to the clients, not to a server or a training: whoever trains with them charges the same
one, and it only grows. A server that begins with keys of its own says so (`begin`), because its streams are
new. Every object charges under a name of its own, a restored or copied one too, and numbers its charges. What
the same clients have paid is the union of all charges by name and number (a grow-only counter): of a saved
state that is added, and of all journals that can be seen (`look`). There is no other count.

With a `Journal` every charge is on the disk before it counts. Whoever resumes reads what the checkpoint does
not know. With keys from the system those rounds are spent, and their repetition, with new keys, is charged
again. With keys from a seed the repetition sends the same messages from the same streams and costs nothing
more, provided that the round begins with the same model and range; if it does not, it is a new attempt.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fedq.mechanisms.interface import RoundContext
from lightning_fedq.privacy.journal import Entry, Journal, is_journal_for


class Ledger:
    """Counts the rounds that every client was charged for.

    Args:
        num_clients: Clients 0 to num_clients - 1.
        mechanism: What is charged for, as text; a saved ledger is only taken back for the same.

    Attributes:
        dim: Coordinates of the longest vector that was charged for; every charge counts as one of it.
        terms: Settings that the price of a charge hangs on, of all that was charged; None if not said.
        limits: `(num_clients,)` int32, charges after which a client is charged no more; a budget sets them.
        round_limit: Rounds after which nobody is charged, whoever was charged in them; a budget of secret
            cohorts sets it. None is no limit.
        journal: Where charges are written first, or None.
        recorded: Journal and position of a loaded state, or ("", 0).
        names_no_journal: Whether a loaded state had charges and named no journal.
        recorded_names: Names that a loaded state has charged under, "" of versions that had none.
        folders: Folders in which journals of other runs with the same clients may lie, see `scan_journals`.

    Raises:
        ValueError: If num_clients < 1.
    """

    def __init__(self, num_clients: int, mechanism: str) -> None:
        if num_clients < 1:
            raise ValueError(f"num_clients must be >= 1, got {num_clients}")
        self.num_clients, self.mechanism = num_clients, mechanism
        self.dim = 0
        self.terms: dict[str, str] | None = None
        self.limits: Tensor | None = None
        self.round_limit: int | None = None
        self.journal: Journal | None = None
        self.recorded: tuple[str, int] = ("", 0)
        self.recorded_names: frozenset[str] = frozenset()
        self.names_no_journal = False
        self.folders: frozenset[Path] = frozenset()
        self._other_charges: dict[Path, Journal | None] = {}
        self._id = secrets.token_hex(8)
        self._own: set[str] = set()
        self._parts: dict[str, tuple[int, Tensor]] = {}
        self._keys: bytes | None = None
        self._used: dict[bytes | None, Tensor] = {}
        self._repeatable: dict[tuple[int, int], str] | None = None
        self._taken: set[tuple[int, int]] = set()

    @property
    def rounds(self) -> int:
        """Rounds that were charged, repetitions included."""
        return sum(rounds for rounds, _ in self._parts.values())

    @property
    def charges(self) -> Tensor:
        """`(num_clients,)` int32, how often each client was charged."""
        return self._sum(self._parts)

    @property
    def charges_elsewhere(self) -> Tensor:
        """`(num_clients,)` int32, those of `charges` that this process has not made: loaded or read."""
        return self._sum(self._parts.keys() - self._own)

    def _sum(self, names: Iterable[str]) -> Tensor:
        return sum((self._parts[name][1] for name in names), self._get_charges("")[1])

    @property
    def max_charges(self) -> int:
        """Charges of the client that was charged most often."""
        return int(self.charges.max())

    @property
    def num_byzantine(self) -> int:
        """Clients of a cohort that lied in the charged rounds, as far as anybody has said."""
        return int((self.terms or {}).get("num_byzantine", "0"))

    def check(self, num_clients: int, mechanism: str) -> None:
        """Refuse to pay for another federation.

        Raises:
            ValueError: With the cure.
        """
        if num_clients != self.num_clients or mechanism != self.mechanism:
            raise ValueError(
                f"the ledger is of {self.num_clients} clients of {self.mechanism}, this federation has "
                f"{num_clients} with {mechanism}; give it a new Ledger, and what the same people have spent "
                "before comes on top of what that one says"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy charges under a name of its own."""
        self.__dict__.update(state)
        self._used = {keys: streams.clone() for keys, streams in self._used.items()}
        self._parts = {name: (rounds, charges.clone()) for name, (rounds, charges) in self._parts.items()}
        self._own = set(self._own)
        self._rename()

    @property
    def _streams(self) -> Tensor:
        """Round and attempt that each client was charged for last, `(clients, 2)`, under the present keys."""
        if self._keys not in self._used:
            self._used[self._keys] = torch.full((self.num_clients, 2), -1, dtype=torch.int64)
        return self._used[self._keys]

    @_streams.setter
    def _streams(self, streams: Tensor) -> None:
        self._used[self._keys] = streams

    def _get_charges(self, name: str) -> tuple[int, Tensor]:
        """Rounds and charges under a name, as far as they are known here."""
        return self._parts.get(name) or (0, torch.zeros(self.num_clients, dtype=torch.int32))

    def _add(self, name: str, rows: Any) -> None:
        """Count one round more under a name, of these rows of clients."""
        rounds, charges = self._get_charges(name)
        charges.numpy()[rows] += 1
        self._parts[name] = rounds + 1, charges

    def _rename(self) -> None:
        """Go on under a new name, so that no two ledgers charge under one."""
        self._id = secrets.token_hex(8)

    def set_terms(self, terms: Mapping[str, str]) -> None:
        """Say on what terms the rounds to come are charged: those of the charged ones, if there are any.

        Args:
            terms: Names and values of all settings that the price of a charge hangs on.

        Raises:
            ValueError: If rounds of other terms are charged; with the cure.
        """
        if self.rounds or self.recorded[0]:
            _check_terms(self.terms, terms)
        self.terms = dict(terms)

    def begin(self, keys: bytes | None) -> None:
        """A server begins: with keys that were not here before, its streams are new, from round 0 on.

        Args:
            keys: Name of its keys; None where they come from a seed, so that a training can be repeated.
        """
        if keys is None:
            self._used.pop(None, None)  # a repeated training uses these streams again, for the same bits
        self._keys = keys

    def select_server(self, keys: bytes | None) -> None:
        """Speak of the streams of a server that has begun, where several take turns with these clients.

        Args:
            keys: Name of its keys, as for `begin`.
        """
        self._keys = keys

    def reset(self, mechanism: str) -> None:
        """Forget everything but who the clients are, as long as nobody has paid.

        Args:
            mechanism: What is charged for from now on, as text.

        Raises:
            RuntimeError: If a round is charged.
        """
        if self.rounds:
            raise RuntimeError(f"{self.rounds} rounds are charged, which nothing takes back")
        vars(self).update(vars(Ledger(self.num_clients, mechanism)))

    def keep(self, journal: Journal, repeatable: bool) -> None:
        """Write every charge to a journal from now on, and take in what it holds beyond its position.

        Args:
            journal: Journal of this federation.
            repeatable: Whether a stream that is used again carries the same bits (keys from a seed).
        """
        self.journal, self._repeatable = journal, {} if repeatable else None
        if not repeatable and self._get_charges(self._id)[0]:
            self._rename()  # all that is charged under a name lies in one journal
        self._read_entries(journal.unread())

    def _read_entries(self, entries: Iterable[Entry], own: bool = True) -> None:
        """Count what stands in a journal, the own one or another run's, and is not known here."""
        for entry in entries:
            if entry.terms:
                terms = _current_terms(json.loads(entry.terms))
                _check_terms(terms, self.terms)
                self.terms = terms
            self.dim = max(self.dim, entry.dim)
            if entry.clients == ():  # a length only, see `lengthen`
                continue
            if self._repeatable is not None:
                self._repeatable[entry.round, entry.attempt] = entry.state
                continue
            if own:  # used, where keys outlive the process
                self._taken.add((entry.round, entry.attempt))
            name = entry.ledger or self._id  # of a version that wrote no names
            if not entry.ledger or entry.number > self._get_charges(name)[0]:
                self._add(name, slice(None) if entry.clients is None else list(entry.clients))

    def scan_journals(self) -> dict[Path, int | str]:
        """Count what stands in the journal and in those of other runs with the same clients, in `folders`.

        With keys from a seed only the journal counts: nothing is private.

        Returns:
            By path of another run's journal, the rounds that it adds, or why it is not counted: it is
            damaged, or its rounds were charged on other terms.
        """
        if self.journal is not None:
            self._read_entries(self.journal.unread())
        found: dict[Path, int | str] = {}
        if self._repeatable is not None:
            return found
        own = None if self.journal is None else self.journal.path
        paths = {path.resolve() for folder in self.folders for path in folder.glob("ledger-*.jsonl")}
        for path in sorted(paths - {own}):
            known = self.rounds
            try:
                if path not in self._other_charges:
                    ours = is_journal_for(path, self.mechanism, self.num_clients)
                    self._other_charges[path] = (
                        Journal(path, self.mechanism, self.num_clients) if ours else None
                    )
                if (journal := self._other_charges[path]) is not None:
                    self._read_entries(journal.unread(mend=False), own=False)
            except (ValueError, OSError) as error:
                found[path] = str(error)
            if self.rounds > known:
                found[path] = self.rounds - known
        return found

    def follow(self, state: dict[str, Any]) -> None:
        """Say what another process's ledger of the same federation says, which keeps the journal.

        Args:
            state: State that its `state_dict` returned.
        """
        self._parts, self._streams = _parts(state), state["streams"].clone()
        self.dim, self.terms = state["dim"], _current_terms(state["terms"])

    def state(self, *tensors: Tensor) -> str:
        """Name what a round begins with: 64 bits of SHA-256 of its model and range. "" where none is kept."""
        if self._repeatable is None:
            return ""
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def free_attempt(self, round: int, attempt: int, state: str) -> int:
        """The first attempt from `attempt` on that nobody else, or no other state of this round, has used."""
        self.scan_journals()
        used = self._repeatable or {}
        while (round, attempt) in self._taken or used.get((round, attempt), state) != state:
            attempt += 1
        return attempt

    def last_round(self, clients: Sequence[int]) -> int:
        """The last round under the present keys that one of these clients was charged for. -1 if none was."""
        return int(self._streams[list(clients), 0].max())

    def charge(
        self, clients: Sequence[int], round: int, attempt: int = 0, state: str = "", dim: int = 0
    ) -> None:
        """Charge some clients for one stream each. Call it before they encode anything.

        Args:
            clients: Clients to charge, without repetition.
            round: Round number, >= 0.
            attempt: Attempt at this round, >= 0, from `free_attempt`.
            state: State of the streams, as `state` returned it.
            dim: Coordinates of the vector that they are charged for, see `raise_dim`.

        Raises:
            ValueError: If a client is unknown or named twice.
            RuntimeError: If a client was charged for this stream, or a later one, before, or its limit
                is reached.
            OSError: If the journal can't be written; then nothing is charged and nothing may be sent.
        """
        listed = sorted(set(clients))
        rows = torch.tensor(listed, dtype=torch.int64)
        outside = bool(listed) and not 0 <= listed[0] <= listed[-1] < self.num_clients
        if len(listed) != len(clients) or outside:
            raise ValueError(
                f"clients must be distinct and in [0, {self.num_clients}), got {tuple(clients)[:10]}"
            )
        last = self._streams.numpy()[listed]
        # an equal pair is the same stream, so it is used
        used = (last[:, 0] > round) | ((last[:, 0] == round) & (last[:, 1] >= attempt))
        if used.any():
            raise RuntimeError(
                f"round {round}, attempt {attempt} was charged before for {rows[used].tolist()[:10]}; "
                "a stream serves one payload. Abandon the round, so that the next start is a new attempt"
            )
        self._check_limits(rows, round)
        if self.journal is not None and (round, attempt) not in (self._repeatable or {}):
            everybody = len(rows) == self.num_clients
            who, terms = None if everybody else rows.tolist(), json.dumps(self.terms) if self.terms else ""
            number = self._get_charges(self._id)[0] + 1
            # on the disk first: a crash may then cost what nobody sent, and never hides what somebody did
            self.journal.append(round, attempt, state, who, dim, terms, self._id, number)
            if self._repeatable is not None:
                self._repeatable[round, attempt] = state
        self._streams.numpy()[listed] = round, attempt
        self._own.add(self._id)
        self._add(self._id, listed)
        self.dim = max(self.dim, dim)

    def raise_dim(self, dim: int, round: int, attempt: int) -> None:
        """Let all charges, past and to come, count as those of a vector of at least `dim` coordinates.

        Args:
            dim: What the vector of an open round has grown to; call it before anybody encodes it.
            attempt: At that round.

        Raises:
            OSError: If the journal can't be written; then nothing may be sent.
        """
        if dim > self.dim and self.journal is not None:
            self.journal.append(round, attempt, "", (), dim)  # of nobody: no charge is added
        self.dim = max(self.dim, dim)

    def check_spent(self) -> None:
        """Refuse to go on where a limit has come down below what is spent: a round that costs more is open.

        Raises:
            RuntimeError: If a client has been charged beyond its limit.
        """
        if self.limits is None:
            return
        over = (self.charges > self.limits).nonzero().flatten().tolist()
        if over:
            raise RuntimeError(
                f"the privacy budget allows client {over[0]} {int(self.limits[over[0]])} rounds as long as "
                f"this one, and {int(self.charges[over[0]])} are charged; raise the budget, train fewer "
                "parameters, or stop the training here"
            )

    def _check_limits(self, rows: Tensor, round: int) -> None:
        if self.round_limit is not None and self.rounds >= self.round_limit:
            raise RuntimeError(
                f"the privacy budget allows {self.round_limit} rounds, and round {round} would be one more; "
                "raise the budget, or stop the training here"
            )
        if self.limits is None:
            return
        spent = rows[self.charges[rows] >= self.limits[rows]]
        if len(spent):
            client = int(spent[0])
            raise RuntimeError(
                f"the privacy budget allows {int(self.limits[client])} rounds of client {client} and round "
                f"{round} would be one more; raise the budget, or stop the training here"
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything, in tensors and plain types. Of the journal, where it is and how much it held."""
        path, position = self.recorded
        if self.journal is not None:
            path, position = str(self.journal.path), self.journal.position
        return {
            "id": self._id,
            "others": {
                name: {"rounds": rounds, "charges": charges.clone()}
                for name, (rounds, charges) in self._parts.items()
                if name != self._id
            },
            "mechanism": self.mechanism,
            "charges": self.charges,
            "rounds": self.rounds,
            "dim": self.dim,
            "terms": None if self.terms is None else dict(self.terms),
            "streams": self._streams.clone(),
            "journal": path,
            "position": position,
        }

    def load_state_dict(self, state: dict[str, Any], repeatable: bool = False) -> None:
        """Continue from `state_dict`. A journal has to be given again (`keep`).

        What this ledger knows already stays: a state of its own past changes nothing, and any other state is
        added, because the same clients have paid for both.

        Args:
            state: State that `state_dict` returned.
            repeatable: With keys from a seed, what came after a state of its own is repeated bit for bit, so
                this ledger goes back to it.

        Raises:
            ValueError: If the state is of another federation, or its rounds were charged on other terms.
        """
        mechanism, beside = state["mechanism"], state.get("beside")
        if isinstance(beside, dict):  # of 0.2: a ledger of what clients released beside the rounds
            mechanism += f", and {beside['mechanism']} beside" if beside["rounds"] else ""
        if mechanism != self.mechanism or len(state["charges"]) != self.num_clients:
            raise ValueError(
                f"the ledger is of {len(state['charges'])} clients of {mechanism}, this federation has "
                f"{self.num_clients} with {self.mechanism}; resume with the checkpoint's own federation"
            )
        terms = _current_terms(state.get("terms"))
        _check_terms(terms, self.terms)
        self.terms = self.terms or terms
        self.dim = max(self.dim, state.get("dim", 0))
        self._streams = (
            state["streams"].clone() if repeatable else _latest_attempts(self._streams, state["streams"])
        )
        parts, name = _parts(state), state.get("id")
        self.recorded_names = frozenset({"", name or "", *parts})
        self.names_no_journal = bool(state["rounds"]) and not state["journal"]
        if repeatable and (name == self._id or not self.rounds):
            self._parts, self._id = parts, name or self._id
        else:
            news = {
                who: (
                    max(rounds, self._get_charges(who)[0]),
                    torch.maximum(charges, self._get_charges(who)[1]),
                )
                for who, (rounds, charges) in parts.items()
                if rounds > self._get_charges(who)[0] or bool((charges > self._get_charges(who)[1]).any())
            }
            if not news and name in (self._id, *self._parts):
                return
            self._rename()
            self._parts |= news
        self.journal, self.recorded = None, (state["journal"], state["position"])


def pad_segments(context: RoundContext, dim: int) -> RoundContext:
    """The round of a vector of at least `dim` coordinates, as accounts see it: a charge has no length."""
    more = dim - sum(context.segments)
    if more <= 0:
        return context
    one = torch.ones(1, dtype=torch.float64)
    center, radius = torch.cat([context.center, 0.0 * one]), torch.cat([context.radius, one])
    return replace(context, segments=(*context.segments, more), center=center, radius=radius)


def _parts(state: dict[str, Any]) -> dict[str, tuple[int, Tensor]]:
    """Rounds and charges of a saved state, by the name that they were charged under."""
    rounds, charges, parts = state["rounds"], state["charges"].clone(), {}
    for name, other in state.get("others", {}).items():
        parts[name] = other["rounds"], other["charges"].clone()
        rounds, charges = rounds - other["rounds"], charges - other["charges"]
    return {**parts, state.get("id") or secrets.token_hex(8): (rounds, charges)}


def _current_terms(terms: dict[str, str] | None) -> dict[str, str] | None:
    """Terms of an earlier version by their present names."""
    return terms and {{"liars": "num_byzantine"}.get(name, name): value for name, value in terms.items()}


def _check_terms(charged: Mapping[str, str] | None, terms: Mapping[str, str] | None) -> None:
    """Refuse to price rounds by other terms than their own. Unknown ones count as the same."""
    if charged is None or terms is None:
        return
    differing = [
        f"{name} = {charged.get(name, 'unknown')} (here {terms.get(name, 'unknown')})"
        for name in sorted({**charged, **terms})
        if charged.get(name) != terms.get(name)
    ]
    if differing:
        raise ValueError(
            f"these clients' rounds were charged with {', '.join(differing)}, and what they have cost hangs "
            "on it; go on with the settings of the charged rounds, and the version that charged them, or, "
            "where really other clients train, with a new Federated and a new Ledger"
        )


def _latest_attempts(left: Tensor, right: Tensor) -> Tensor:
    """Of two streams of every client, `(clients, 2)` round and attempt, the one that comes later."""
    rounds, attempts = (right - left).T
    ahead = (rounds > 0) | ((rounds == 0) & (attempts > 0))
    return torch.where(ahead[:, None], right, left)
