"""A thousand rounds of 50 clients that are killed, silent, out of disk or lie; their server is killed, too.

Everything is drawn from one seed. A client's process is killed at a random write of its message, before, in
or after it; a full disk takes a part of a write. What is asked of each round and of all: no stream carries
two payloads, every message that ever left is in its sender's log and charged in the server's journal, sums
are exact, who does not lie is never left out, and a round ends unless too few are left or a liar is found.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fedq.flower import roster
from lightning_fedq.flower.cohort import Cohort
from lightning_fedq.flower.roster import Roster
from lightning_fedq.flower.secure import remote_sums
from lightning_fedq.flower.store import Store
from lightning_fedq.keys.randomness import PublicRandomness
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.privacy.journal import Journal
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.rounds import RoundServer
from lightning_fedq.rounds.messages import FRAME_BYTES, pack_frame
from lightning_fedq.secagg import Client, SecAgg
from tests.flower.halves import DIM, Halves, Line
from tests.flower.loop import federated
from tests.flower.test_registration import Clock

CLIENTS, LIARS = 50, {7: "words", 23: "shares", 41: "seals"}
SILENT, LOST, KILLED, FULL, SERVER = 0.02, 0.01, 0.03, 0.01, 0.0005
FAULTS = SILENT + LOST + KILLED + FULL


class Killed(BaseException):
    """The process is no more. Nothing in the package catches it."""


class Disk:
    """Where a write fails, of those to come: "before", "in" or "after" it, or "full"."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.armed, self.left = rng, "", 0

    def arm(self, kind):
        self.armed, self.left = kind, int(self.rng.integers(0, 4))

    @contextmanager
    def write(self, path, data, mode):
        due, self.left = self.armed if self.left == 0 else "", self.left - 1
        if due in ("in", "full"):
            with path.open(mode) as file:
                file.write(data[: int(self.rng.integers(0, len(data)))])
        if due == "full":
            raise OSError(errno.ENOSPC, "no space left on the device")
        if due in ("before", "in"):
            raise Killed
        yield
        if due == "after":
            raise Killed


class FaultyLine(Line):
    """Brings messages to clients that fail; counts what they do."""

    def __init__(self, soak: Soak, line: Line) -> None:
        super().__init__(line.clients, line.nodes)
        self.soak, self.clean = soak, set[int]()

    def __call__(self, kind, contents, group):
        if kind == "register":
            return super().__call__(kind, contents, group)
        if kind == "train":
            self.clean = set(contents)
        answers = {}
        for node, fields in contents.items():
            if self.soak.rng.random() < SERVER:
                self.soak.count["server killed"] += 1
                raise Killed
            if (reply := self._reply(kind, node, fields)) is not None:
                answers[node] = reply
            else:
                self.clean.discard(node)
        self.clean &= set(contents)
        return answers

    def _reply(self, kind, node, fields):
        soak, fault = self.soak, self.soak.rng.random()
        if fault < SILENT:
            soak.count["silent"] += 1
            return None
        if SILENT + LOST <= fault < SILENT + LOST + KILLED:
            soak.disk.arm(str(soak.rng.choice(["before", "in", "after"])))
        elif SILENT + LOST + KILLED <= fault < FAULTS:
            soak.disk.arm("full")
        try:
            reply = self.clients(node).reply(kind, fields)
        except Killed:
            soak.count["client killed"] += 1
            return None
        finally:
            soak.disk.armed = ""
        if kind == "train" and not {"answer", "secagg"}.isdisjoint(reply):
            soak.left[node].append((soak.server.round, soak.server.attempt))
        if fault < SILENT + LOST:
            soak.count["answer lost"] += 1
            return None
        if "refused" in reply:
            soak.count["disk full" if SILENT + LOST + KILLED <= fault < FAULTS else "refused"] += 1
            return None
        return soak.lie(kind, node, reply) if LIARS.get(node) == "words" else reply


class Soak:
    """A federation, its faults and what is known of it from outside."""

    def __init__(self, secagg: SecAgg | None, folder: Path, monkeypatch: Any) -> None:
        self.rng, self.folder, self.secagg = np.random.default_rng(28), folder, secagg
        self.disk, self.count = Disk(self.rng), Counter[str]()
        self.left = {client: [] for client in range(CLIENTS)}
        self.symbols = {}
        self.out = set()
        self.settings = federated(
            LDPQ(epsilon_per_coordinate=1.0), seed=None, num_clients=CLIENTS, secure_aggregation=secagg
        )
        self.halves = Halves(self.settings, folder)
        self.line, self.clock = FaultyLine(self, self.halves.line), Clock()
        monkeypatch.setattr(roster, "time", self.clock)
        self.start_server()
        self._patch(monkeypatch)

    def _patch(self, monkeypatch):
        journal, store, soak = Journal._write, Store._replace, self
        masked, unmask, share = Client.masked_input, Client.unmask, Client._make_shares

        def write(self, data, path=None):
            with soak.disk.write(path or self.path, data, "ab"):
                return journal(self, data, path)

        def replace(self, name, data):
            with soak.disk.write(self.folder / f"{name}.new", data, "wb"):
                store(self, name, data)

        def masked_input(self, symbols):
            soak.symbols[self.client] = np.array(symbols)
            return masked(self, symbols)

        def opened(self, message):
            if LIARS.get(self.client) == "shares":
                self._held = {owner: 2 * (bytes(1) + soak.rng.bytes(15)) for owner in self._held}
            return unmask(self, message)

        def make_shares(self):
            keys = self._pair_keys
            if LIARS.get(self.client) == "seals":
                self._pair_keys = {other: bytes(32) if other % 3 else key for other, key in keys.items()}
            made = share(self)
            self._pair_keys = keys
            return made

        monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # is for power cuts: test_store
        monkeypatch.setattr(Journal, "_write", write)
        monkeypatch.setattr(Store, "_replace", replace)
        monkeypatch.setattr(Client, "masked_input", masked_input)
        monkeypatch.setattr(Client, "unmask", opened)
        monkeypatch.setattr(Client, "_make_shares", make_shares)

    def lie(self, kind, node, reply):
        """Other bytes under the client's own tag, junk, or a false accusation."""
        self.count["lies in words"] += 1
        junk = self.rng.bytes(int(self.rng.integers(0, 2 * DIM)))
        if "answer" not in reply:
            accused = [int(self.rng.integers(0, CLIENTS))]
            return (
                {**reply, "secagg": junk} if self.rng.random() < 0.5 else {"refused": "", "accused": accused}
            )
        context = self.server._context
        rand = PublicRandomness(self.server.keys, context.round, context.attempt)
        own = reply["answer"][FRAME_BYTES - 16 : -16]
        packed = junk if self.rng.random() < 0.5 else self.rng.bytes(len(own))
        return {"answer": pack_frame(node, packed, context, rand)}

    def start_server(self):
        """As after a crash: from its folder alone, and the model that it had."""
        before = getattr(self, "server", None)
        store, path = Store(self.folder / "server"), self.folder / "server" / "ledger.jsonl"
        self.roster = Roster(self.settings, self.line, store, {})
        self.roster.gather(1.0)
        ledger = Ledger(CLIENTS, repr(self.settings.mechanism))
        used = Journal(path, ledger.mechanism, CLIENTS).unread()
        ledger.keep(Journal(path, ledger.mechanism, CLIENTS), False)
        self.server = RoundServer(
            self.settings.mechanism,
            self.settings.planner,
            self.roster.keys(),
            torch.zeros(DIM) if before is None else before.weights,
            [DIM],
            self.settings.server.range_rule,
            secure_sums=None if self.secagg is None else remote_sums(self.secagg, None),
            ledger=ledger,
        )
        self.server.round = max((entry.round + 1 for entry in used), default=0)

    def round(self):
        """One round a minute, or None where the server is killed in it and started again."""
        self.clock.sleep(60.0)  # who has failed is asked again
        try:
            if self.rng.random() < 0.01:
                self.disk.arm(str(self.rng.choice(["before", "in", "after"])))
                self.disk.left = 0
            self.server.start()
            self.disk.armed = ""
            cohort = Cohort(self.server, self.line, self.roster)
            model = {"weights": self.server.weights.numpy().tobytes(), "dtype": "float32"}
            asked = {client: {**model, **fields} for client, fields in cohort.client_requests().items()}
            cohort.conclude(cohort.ask("train", asked))
        except Killed:
            self.disk.armed = ""
            self.count["server restarted"] += 1
            self.start_server()
            self.out = set()
            return None
        if cohort._sum is not None and not self.server._aborted:
            machine = cohort._sum.machine
            wanted = sum(self.symbols[client] for client in machine.survivors)
            assert np.array_equal(machine.total, wanted)
        return self.server.finish()

    def check(self):
        """No stream twice, and every message that left is logged by its sender and charged by the server."""
        entries = Journal(self.folder / "server" / "ledger.jsonl", repr(self.settings.mechanism), CLIENTS)
        charged = {(entry.round, entry.attempt) for entry in entries.unread() if entry.clients is None}
        for client, sent in self.left.items():
            lines = (self.folder / f"client-{client}" / "streams.jsonl").read_bytes().split(b"\n")
            logged = [json.loads(line) for line in lines[1:] if line.endswith(b"}")]
            used = [(entry["round"], entry["attempt"]) for entry in logged]
            assert used == sorted(set(used)) and len(sent) == len(set(sent))
            assert set(sent) <= set(used) <= charged
            self.count["streams used"] += len(used)
            self.count["messages that left"] += len(sent)
        self.count["rounds charged"] = len(charged)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("secagg, rounds", [(None, 800), (SecAgg(), 200)], ids=["plain", "secagg"])
def test_a_thousand_rounds(secagg, rounds, tmp_path, monkeypatch):
    """Prints its figures (-s), which stand in docs/deployment_faults.md."""
    soak = Soak(secagg, tmp_path, monkeypatch)
    fewest = CLIENTS
    for _ in range(rounds):
        record = soak.round()
        assert soak.roster.left_out <= set(LIARS)
        if record is None:
            continue
        new, soak.out = soak.roster.left_out - soak.out, soak.roster.left_out
        assert torch.isfinite(soak.server.weights).all()
        if record.aborted:
            soak.count["given up"] += 1
            assert secagg is not None and new, record.aborted  # a liar was found, and is asked no more
            continue
        honest = soak.line.clean - set(LIARS)
        assert record.num_received >= len(honest)
        assert record.num_received > CLIENTS // 2
        fewest = min(fewest, record.num_received)
        soak.count["ended"] += 1
        soak.count["answers in means"] += record.num_received
    soak.check()
    assert secagg is None or {23, 41} <= soak.roster.left_out, "their lies are not told"
    assert soak.count["ended"] + soak.count["given up"] + soak.count["server restarted"] == rounds
    print({"fewest answers": fewest, **soak.count})
