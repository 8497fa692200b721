"""Ledger of charges: how often each client was charged. A client is charged before anything leaves it.

A charge names the random stream that it pays for, (round, attempt). The streams of a client must ascend, so
no stream is paid for twice and none carries two payloads. A repeated round is a new attempt and is charged
again. The ledger only counts. The cost of a charge follows from the mechanism's claims (`accounting`) and
from the terms of its round: number of clients in it, masks, Byzantine clients. All charges have one price, so
a ledger refuses another mechanism, another federation or other terms (`set_terms`).

This file is long because it has one class, whose methods read and write the same counts.

A ledger belongs to the clients, not to a server or a training. Every training with these clients charges the
same ledger, and its counts only grow. A server that starts with new keys calls `begin`, because its streams
are new. Every ledger object charges under a name of its own, also after it was restored or copied, and
numbers its charges. The charges of the clients are the union of all charges by name and number (a grow-only
counter): charges of saved states are added, and charges of all known journals (`scan_journals`).

With a `Journal`, every charge is on the disk before it counts. A resumed run reads the charges that its
checkpoint does not contain. With keys from the operating system, those rounds are spent, and repeating them
with new keys is charged again. With keys from a seed, the repetition sends the same messages from the same
streams and costs nothing more, if the round begins with the same model and range. Otherwise it is a new
attempt.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fedq.mechanisms.interface import RoundContext
from lightning_fedq.privacy.journal import Entry, Journal, is_journal_for


class Ledger:
    """Ledger that counts the rounds that every client was charged for.

    Args:
        num_clients: Number of clients of the federation, >= 1.
        mechanism: Mechanism whose messages are charged for, as text. A saved ledger is only accepted for the
            same mechanism.

    Attributes:
        dim: Number of coordinates of the longest vector that was charged for. Every charge counts as one of
            this length.
        terms: Settings on which the price of a charge depends, for all charges. None if they are not known.
        limits: `(num_clients,)` int32 numbers of charges after which clients are not charged any more, set by
            a privacy target. None is no limit.
        spares_other_runs: Whether `limits` leave out charges that were read from journals of other runs.
        budget_limits: Numbers like `limits`, set by a privacy budget. All charges count.
        other_runs: Number of rounds that were read from each journal of another run, by its path.
        round_limit: Number of rounds after which no client is charged, set by a budget with secret cohorts.
            None is no limit.
        journal: Journal to which charges are written first, or None.
        recorded: Path of the journal of a loaded state and position in it, or ("", 0).
        names_no_journal: Whether a loaded state had charges and named no journal.
        recorded_names: Names under which a loaded state has charges, "" for versions without names.
        folders: Folders that may have journals of other runs with the same clients, see `scan_journals`.

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
        self.spares_other_runs = False
        self.budget_limits: Tensor | None = None
        self.other_runs: dict[str, int] = {}
        self._charges_of_other_runs = torch.zeros(num_clients, dtype=torch.int32)
        self.round_limit: int | None = None
        self.journal: Journal | None = None
        self.recorded: tuple[str, int] = ("", 0)
        self.recorded_names: frozenset[str] = frozenset()
        self.names_no_journal = False
        self.folders: frozenset[Path] = frozenset()
        self._other_charges: dict[Path, Journal | str | None] = {}
        self._id = secrets.token_hex(8)
        self._own: set[str] = set()
        self._parts: dict[str, tuple[int, Tensor]] = {}
        self._keys: bytes | None = None
        self._used: dict[bytes | None, Tensor] = {}
        self._repeatable: dict[tuple[int, int], str] | None = None
        self._taken: set[tuple[int, int]] = set()

    @property
    def rounds(self) -> int:
        """Number of charged rounds, repetitions included."""
        return sum(rounds for rounds, _ in self._parts.values())

    @property
    def charges(self) -> Tensor:
        """`(num_clients,)` int32 number of charges of each client."""
        return self._sum(self._parts)

    @property
    def charges_elsewhere(self) -> Tensor:
        """`(num_clients,)` int32 number of charges that this process has not made, but loaded or read."""
        return self._sum(self._parts.keys() - self._own)

    @property
    def limited_charges(self) -> Tensor:
        """`(num_clients,)` int32 number of charges of each client to which `limits` apply."""
        return self.charges - self._charges_of_other_runs if self.spares_other_runs else self.charges

    @property
    def max_charges_of_other_runs(self) -> int:
        """Largest number of charges of a client that were read from journals of other runs."""
        return int(self._charges_of_other_runs.max())

    @property
    def other_journals(self) -> str:
        """Journals of other runs in words, for the end of a sentence. "" if none has charges."""
        if not self.other_runs:
            return ""
        rounds, paths = sum(self.other_runs.values()), ", ".join(self.other_runs)
        return f" (another run charged {rounds} rounds: {paths})"

    def _sum(self, names: Iterable[str]) -> Tensor:
        """Return the charges of each client under some names."""
        return sum((self._parts[name][1] for name in names), self._get_charges("")[1])

    @property
    def max_charges(self) -> int:
        """Number of charges of the client that was charged most often."""
        return int(self.charges.max())

    @property
    def num_byzantine(self) -> int:
        """Number of Byzantine clients of a cohort in the charged rounds, 0 where the terms do not say."""
        return int((self.terms or {}).get("num_byzantine", "0"))

    def check(self, num_clients: int, mechanism: str) -> None:
        """Check that the ledger is of this federation and mechanism.

        Raises:
            ValueError: If it is of another one, with the cure.
        """
        if num_clients != self.num_clients or mechanism != self.mechanism:
            raise ValueError(
                f"The ledger is of {self.num_clients} clients of {self.mechanism}, but this federation has "
                f"{num_clients} clients of {mechanism}. "
                "Use a new Ledger, and add up what the same people spend in both."
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which charges under a new name."""
        self.__dict__.update(state)
        self._used = {keys: streams.clone() for keys, streams in self._used.items()}
        self._parts = {name: (rounds, charges.clone()) for name, (rounds, charges) in self._parts.items()}
        self._own, self.other_runs = set(self._own), dict(self.other_runs)
        self._charges_of_other_runs = self._charges_of_other_runs.clone()
        self._rename()

    @property
    def _streams(self) -> Tensor:
        """`(clients, 2)` round and attempt for which each client was last charged, under the present keys."""
        if self._keys not in self._used:
            self._used[self._keys] = torch.full((self.num_clients, 2), -1, dtype=torch.int64)
        return self._used[self._keys]

    @_streams.setter
    def _streams(self, streams: Tensor) -> None:
        self._used[self._keys] = streams

    def _get_charges(self, name: str) -> tuple[int, Tensor]:
        """Return the number of rounds and the charges of clients under a name."""
        return self._parts.get(name) or (0, torch.zeros(self.num_clients, dtype=torch.int32))

    def _add(self, name: str, rows: Any) -> None:
        """Count one more round under a name, for the clients with these indices."""
        rounds, charges = self._get_charges(name)
        charges.numpy()[rows] += 1
        self._parts[name] = rounds + 1, charges

    def _rename(self) -> None:
        """Take a new name, so that no two ledgers charge under one name."""
        self._id = secrets.token_hex(8)

    def set_terms(self, terms: Mapping[str, str]) -> None:
        """Set the terms of the rounds to come, which must be those of the rounds that were charged.

        Args:
            terms: Names and values of all settings on which the price of a charge depends.

        Raises:
            ValueError: If rounds were charged on other terms, with the cure.
        """
        if self.rounds or self.recorded[0]:
            _check_terms(self.terms, terms)
        self.terms = dict(terms)

    def begin(self, keys: bytes | None) -> None:
        """Begin to charge for a server. With new keys its streams are new, from round 0 on.

        Args:
            keys: Name of the server's keys. None for keys from a seed, with which a training can be repeated.
        """
        if keys is None:
            self._used.pop(None, None)  # a repeated training sends the same bits from the same streams
        self._keys = keys

    def select_server(self, keys: bytes | None) -> None:
        """Switch to the streams of a server that has begun, where several servers alternate.

        Args:
            keys: Name of the server's keys, as for `begin`.
        """
        self._keys = keys

    def reset(self, mechanism: str) -> None:
        """Forget everything except the number of clients, if no round was charged.

        Args:
            mechanism: Mechanism whose messages are charged for from now on, as text.

        Raises:
            RuntimeError: If a round was charged.
        """
        if self.rounds:
            raise RuntimeError(f"Can't reset a ledger with {self.rounds} charged rounds")
        vars(self).update(vars(Ledger(self.num_clients, mechanism)))

    def keep(self, journal: Journal, repeatable: bool) -> None:
        """Write every charge to a journal from now on, and add the entries that it has after its position.

        Args:
            journal: Journal of this federation.
            repeatable: Whether a stream that is used again carries the same bits (keys from a seed).
        """
        self.journal, self._repeatable = journal, {} if repeatable else None
        if not repeatable and self._get_charges(self._id)[0]:
            self._rename()  # all charges under one name are in one journal
        self._read_entries(journal)

    def _is_known(self, name: str, number: int) -> bool:
        """Return whether a charge is counted. An entry without a name is no charge."""
        return bool(name) and number <= self._get_charges(name)[0]

    def _read_entries(self, journal: Journal, own: bool = True) -> None:
        """Count the entries of a journal that this ledger does not know yet.

        Args:
            journal: Journal to read from its position on.
            own: Whether the journal is this ledger's own, and not that of another run, which stays unchanged.
        """
        for entry in journal.read_unknown(self._is_known, mend=own):
            if entry.terms:
                terms = json.loads(entry.terms)
                _check_terms(terms, self.terms)
                self.terms = terms
            self.dim = max(self.dim, entry.dim)
            if entry.clients is not None and not len(entry.clients):  # it only raises `dim`
                continue
            if self._repeatable is not None:
                self._repeatable[entry.round, entry.attempt] = entry.state
                continue
            if own:  # the stream is used, if the keys outlive the process
                self._taken.add((entry.round, entry.attempt))
            if not self._is_known(entry.ledger, entry.number):
                rows = slice(None) if entry.clients is None else entry.clients
                self._add(entry.ledger, rows)
                if not own:
                    self._charges_of_other_runs.numpy()[rows] += 1

    def scan_journals(self) -> dict[Path, int | str]:
        """Count the entries of the own journal, and of journals of other runs in `folders`.

        With keys from a seed only the own journal counts, because nothing is private.

        Returns:
            By path of another run's journal, the number of rounds that it adds, or the reason why it is not
            counted: it is damaged, or its rounds were charged on other terms.
        """
        if self.journal is not None:
            self._read_entries(self.journal)
        results: dict[Path, int | str] = {}
        if self._repeatable is not None:
            return results
        own = None if self.journal is None else self.journal.path
        paths = {path.resolve() for folder in self.folders for path in folder.glob("ledger-*.jsonl")}
        for path in sorted(paths - {own}):
            known = self.rounds
            try:
                if path not in self._other_charges:
                    owner = self.mechanism, self.num_clients
                    is_ours = is_journal_for(path, *owner)
                    self._other_charges[path] = Journal(path, *owner) if is_ours else None
                journal = self._other_charges[path]
                if isinstance(journal, Journal):
                    self._read_entries(journal, own=False)
            except ValueError as error:  # its next lines would be read without those before
                self._other_charges[path] = str(error)
            except OSError as error:
                results[path] = str(error)
            if self.rounds > known:
                results[path] = self.rounds - known
                self.other_runs[str(path)] = self.other_runs.get(str(path), 0) + self.rounds - known
            if isinstance(refused := self._other_charges.get(path), str):
                results[path] = refused
        return results

    def follow(self, state: dict[str, Any]) -> None:
        """Take over the state of another process's ledger of the same federation, which keeps the journal.

        Args:
            state: State that the other ledger's `state_dict` returned.
        """
        self._parts, self._streams = _parts(state), state["streams"].clone()
        self._load_other_runs(state)
        self.dim, self.terms = state["dim"], state["terms"]

    def _load_other_runs(self, state: dict[str, Any]) -> None:
        """Take over which charges of a state came from journals of other runs."""
        others = state["other_runs"]
        self._charges_of_other_runs = torch.maximum(self._charges_of_other_runs, others["charges"])
        self.other_runs = {**others["journals"], **self.other_runs}

    def state(self, *tensors: Tensor) -> str:
        """Return 64 bits of a SHA-256 digest of the model and the range with which a round begins.

        Returns:
            Digest in hexadecimal. "" where none is needed, because keys are not from a seed.
        """
        if self._repeatable is None:
            return ""
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def free_attempt(self, round: int, attempt: int, state: str) -> int:
        """Return the first attempt from `attempt` on that is unused, or was used with the same state."""
        self.scan_journals()
        used = self._repeatable or {}
        while (round, attempt) in self._taken or used.get((round, attempt), state) != state:
            attempt += 1
        return attempt

    def last_round(self, clients: Sequence[int]) -> int:
        """Return the last round for which one of these clients was charged. -1 if none was.

        Only charges under the present keys count.
        """
        return int(self._streams[list(clients), 0].max())

    def charge(
        self, clients: Sequence[int], round: int, attempt: int = 0, state: str = "", dim: int = 0
    ) -> None:
        """Charge some clients for one stream each. Call it before they encode anything.

        Args:
            clients: Clients to charge, each once.
            round: Number of the round, >= 0.
            attempt: Attempt at this round, >= 0, from `free_attempt`.
            state: Digest of the model and the range, from `state`.
            dim: Number of coordinates of the vector that they are charged for, see `raise_dim`.

        Raises:
            ValueError: If a client is unknown or named twice.
            RuntimeError: If a client was already charged for this stream or a later one, or its limit is
                reached.
            OSError: If the journal can't be written. Then nothing is charged, and nothing may be sent.
        """
        rows = torch.from_numpy(np.unique(np.asarray(clients, dtype=np.int64)))  # sorted
        outside = bool(len(rows)) and not 0 <= int(rows[0]) <= int(rows[-1]) < self.num_clients
        if len(rows) != len(clients) or outside:
            raise ValueError(
                f"clients must be different numbers in [0, {self.num_clients}), got {tuple(clients)[:10]}"
            )
        last = self._streams[rows]
        # an equal pair of round and attempt is the same stream, so it is used as well
        used = (last[:, 0] > round) | ((last[:, 0] == round) & (last[:, 1] >= attempt))
        if used.any():
            raise RuntimeError(
                f"round {round}, attempt {attempt} was already charged for clients "
                f"{rows[used].tolist()[:10]}. Abandon the round, so that the next start is a new attempt."
            )
        self._check_limits(rows, round)
        if self.journal is not None and (round, attempt) not in (self._repeatable or {}):
            charged = None if len(rows) == self.num_clients else rows.tolist()
            terms = json.dumps(self.terms) if self.terms else ""
            number = self._get_charges(self._id)[0] + 1
            # written first: after a crash, clients may have paid for a message that was never sent, but
            # never have sent a message that was not paid for
            self.journal.append(Entry(round, attempt, state, charged, dim, terms, self._id, number))
            if self._repeatable is not None:
                self._repeatable[round, attempt] = state
        self._streams[rows] = torch.tensor((round, attempt))
        self._own.add(self._id)
        self._add(self._id, rows.numpy())
        self.dim = max(self.dim, dim)

    def raise_dim(self, dim: int, round: int, attempt: int) -> None:
        """Count all charges, past and to come, as charges for a vector of at least `dim` coordinates.

        Args:
            dim: Number of coordinates of the vector of the open round. Call this before a client encodes it.
            round: Number of the open round.
            attempt: Attempt at the open round.

        Raises:
            OSError: If the journal can't be written. Then nothing may be sent.
        """
        if dim > self.dim and self.journal is not None:
            self.journal.append(Entry(round, attempt, "", (), dim))  # without clients, it adds no charge
        self.dim = max(self.dim, dim)

    def check_spent(self) -> None:
        """Check that no client was charged beyond its limit.

        A limit may have fallen, because a round that costs more is open.

        Raises:
            RuntimeError: If a client was charged beyond its limit.
        """
        for limits, charges in self._limited():
            over = (charges > limits).nonzero().flatten().tolist()
            if over:
                raise RuntimeError(
                    f"The privacy budget allows client {over[0]} {int(limits[over[0]])} rounds of this "
                    f"length, but it was charged for {int(charges[over[0]])}. "
                    "Raise the budget, train fewer parameters, or stop the training here."
                )

    def _limited(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield limits of charges, each with the charges to which they apply."""
        if self.limits is not None:
            yield self.limits, self.limited_charges
        if self.budget_limits is not None:
            yield self.budget_limits, self.charges

    def _check_limits(self, rows: Tensor, round: int) -> None:
        if self.round_limit is not None and self.rounds >= self.round_limit:
            raise RuntimeError(
                f"The privacy budget allows {self.round_limit} rounds, and round {round} would exceed it. "
                "Raise the budget, or stop the training here."
            )
        for limits, charges in self._limited():
            spent = rows[charges[rows] >= limits[rows]]
            if len(spent):
                client = int(spent[0])
                raise RuntimeError(
                    f"The privacy budget allows {int(limits[client])} rounds of client {client}, and round "
                    f"{round} would exceed it. Raise the budget, or stop the training here."
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state in tensors and plain types. For the journal, it has the path and the position."""
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
            "other_runs": {"charges": self._charges_of_other_runs.clone(), "journals": dict(self.other_runs)},
            "journal": path,
            "position": position,
        }

    def load_state_dict(self, state: dict[str, Any], repeatable: bool = False) -> None:
        """Continue from a state of `state_dict`. The journal must be given again with `keep`.

        Charges that this ledger knows already stay. A state of its own past changes nothing. Any other state
        is added, because the same clients have paid for both.

        Args:
            state: State that `state_dict` returned.
            repeatable: Whether keys are from a seed. A repetition of the rounds after a state of its own is
                then identical in every bit, so this ledger goes back to that state.

        Raises:
            ValueError: If the state is of another federation, or its rounds were charged on other terms.
        """
        if state["mechanism"] != self.mechanism or len(state["charges"]) != self.num_clients:
            raise ValueError(
                f"The ledger is of {len(state['charges'])} clients of {state['mechanism']}, but this "
                f"federation has {self.num_clients} clients of {self.mechanism}. "
                "Resume with the checkpoint's federation."
            )
        _check_terms(state["terms"], self.terms)
        self.terms = self.terms or state["terms"]
        self.dim = max(self.dim, state["dim"])
        streams = state["streams"]
        if not repeatable:  # the later of two pairs of round and attempt, per client
            rounds, attempts = (streams - self._streams).T
            ahead = (rounds > 0) | ((rounds == 0) & (attempts > 0))
            streams = torch.where(ahead[:, None], streams, self._streams)
        self._streams = streams.clone()
        self._load_other_runs(state)
        parts, name = _parts(state), state["id"]
        self.recorded_names = frozenset({"", *parts})
        self.names_no_journal = bool(state["rounds"]) and not state["journal"]
        if repeatable and (name == self._id or not self.rounds):
            self._parts, self._id = parts, name
        elif not self._add_unknown(parts) and name in (self._id, *self._parts):
            return  # a state of this ledger's own past
        else:
            self._rename()
        self.journal, self.recorded = None, (state["journal"], state["position"])

    def _add_unknown(self, parts: Mapping[str, tuple[int, Tensor]]) -> bool:
        """Add the charges of a state that this ledger does not know yet, and return whether there are any.

        Args:
            parts: Rounds and charges by the name under which they were charged.
        """
        news = {}
        for name, (rounds, charges) in parts.items():
            known_rounds, known = self._get_charges(name)
            if rounds > known_rounds or bool((charges > known).any()):
                news[name] = max(rounds, known_rounds), torch.maximum(charges, known)
        self._parts |= news
        return bool(news)


def pad_segments(context: RoundContext, dim: int) -> RoundContext:
    """Return a round whose vector has at least `dim` coordinates.

    Accounts use it, because every charge counts as one of the longest vector.
    """
    more = dim - sum(context.segments)
    if more <= 0:
        return context
    ones = torch.ones(1, dtype=torch.float64)
    center, radius = torch.cat([context.center, 0.0 * ones]), torch.cat([context.radius, ones])
    return replace(context, segments=(*context.segments, more), center=center, radius=radius)


def _parts(state: dict[str, Any]) -> dict[str, tuple[int, Tensor]]:
    """Return rounds and charges of a saved state by the name under which they were charged."""
    rounds, charges, parts = state["rounds"], state["charges"].clone(), {}
    for name, other in state["others"].items():
        parts[name] = other["rounds"], other["charges"].clone()
        rounds, charges = rounds - other["rounds"], charges - other["charges"]
    return {**parts, state["id"]: (rounds, charges)}


def _check_terms(charged: Mapping[str, str] | None, terms: Mapping[str, str] | None) -> None:
    """Check that rounds are priced by the terms on which they were charged. Unknown terms count as equal.

    Raises:
        ValueError: If a term differs, with the cure.
    """
    if charged is None or terms is None:
        return
    differing = [
        f"{name} = {charged.get(name, 'unknown')} (here {terms.get(name, 'unknown')})"
        for name in sorted({**charged, **terms})
        if charged.get(name) != terms.get(name)
    ]
    if differing:
        raise ValueError(
            f"Rounds of these clients were charged with {', '.join(differing)}, which changes their cost. "
            "Go on with the settings and the version of the charged rounds, or, for other clients, "
            "with a new Federated and a new Ledger."
        )
