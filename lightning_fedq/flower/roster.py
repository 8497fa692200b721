"""Registry of clients at the server: their numbers, keys and nodes, and clients that are left out."""

import hmac
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lightning_fedq._lightning import rank_zero_warn
from lightning_fedq.callbacks import Federated
from lightning_fedq.flower.disputes import Disputes
from lightning_fedq.flower.exchange import POLL, Exchange
from lightning_fedq.flower.records import Fields, bytes_in, number_in
from lightning_fedq.flower.settings import DECLINED
from lightning_fedq.flower.store import Store
from lightning_fedq.keys.party_keys import (
    HeldServerKeys,
    KeyVerificationError,
    ServerSecrets,
    registration_proof,
    verify_key,
)
from lightning_fedq.keys.randomness import SeededKeys, ServerKeys

_SECRETS, _ROSTER, _SIGNATURES, _SAMPLES, _GATHERED = "server", "roster", "signatures", "samples", "gathered"
_SIGNATURE_BYTES, _NONCE_BYTES = 64, 32
_WAIT_FOR_NEW = 60.0
"""Seconds that a round waits for the answer of a new node where no client is missing."""
_ASK_AGAIN = 60.0
"""Seconds until the server again asks a node that has refused, or that was not ready."""


@dataclass
class _Absence:
    """Absence of a client that has failed, until it reports that it is ready.

    Attributes:
        node: Node of the client when it failed. A client that returns as another node is present.
        reason: Why it failed.
        asked_at: Time of the last question whether it is ready. None before the first.
        question: Identifier of an open question. None if there is none.
    """

    node: int
    reason: str
    asked_at: float | None = None
    question: str | None = None


class Roster:
    """Registry of the clients: their numbers, their public keys and their Flower nodes.

    Args:
        federated: Settings of the federation.
        exchange: Connection to the nodes.
        store: Folder of the server, which keeps keys, roster and disputes.
        settings: Fingerprint of the server's settings, as text by name.
        directory: Verification key of each client, by number. A number then goes to its identity only.
        rounds: Number of rounds in the run, to which clients agree. None tells them no number.

    Attributes:
        nodes: Node of each client.
        samples: Number of samples of each client, where the mean is weighted by it.
        disputes: Disputes between clients, and clients that the server no longer asks.
        failures: Last failure of each client that has failed since the last completed round.
    """

    def __init__(
        self,
        federated: Federated,
        exchange: Exchange,
        store: Store,
        settings: dict[str, str],
        directory: Mapping[int, Ed25519PublicKey] | None = None,
        rounds: int | None = None,
    ) -> None:
        self._federated, self._exchange, self._store = federated, exchange, store
        self.directory = directory
        self._settings: Fields = {f"setting {name}": value for name, value in settings.items()}
        if rounds is not None:
            self._settings["rounds"] = rounds
        self.nodes: dict[int, int] = {}
        self.samples: dict[int, int] = {}
        self.disputes = Disputes(store)
        self._silent: set[int] = set()
        self._strangers: set[int] = set()
        self._refusing: dict[int, str] = {}
        self._no_at: dict[int, float] = {}
        self._queried: dict[str, int] = {}
        self._nonces: dict[int, bytes] = {}
        self._registered: dict[int, bytes] = {}
        self._signatures: dict[int, bytes] = {}
        self._patience, self._has_waited = 0.0, False
        self.failures: dict[int, str] = {}
        self._away: dict[int, _Absence] = {}
        self._secrets: ServerSecrets | None = None
        if federated.seed is None:
            self._secrets = self._load_secrets()
            self._registered = self._load_table(_ROSTER)
            self._signatures = self._load_table(_SIGNATURES)
            self.samples = self._load_table(_SAMPLES)
        all_have_registered = len(self._registered) >= federated.clients.num_clients
        self._resumed = all_have_registered or store.get(_GATHERED) is not None

    @property
    def left_out(self) -> set[int]:
        """Clients that the server no longer asks, even after a restart."""
        return self.disputes.left_out

    def _load_secrets(self) -> ServerSecrets:
        """Return the server's secrets, which are drawn at the first start and stored."""
        kept = self._store.get(_SECRETS)
        if kept is None:
            new = ServerSecrets.draw()
            kept = {"secret": new.secret, "federation": new.federation, "members": new.members}
            self._store.put(_SECRETS, kept)
        return ServerSecrets(**kept)

    def _load_table(self, name: str) -> dict[int, Any]:
        """Return a table of the folder by client number. Empty if there is none."""
        return {int(client): value for client, value in (self._store.get(name) or {}).items()}

    def gather(self, wait: float) -> None:
        """Wait until every client has registered.

        A restarted server has registered all clients before. After `wait` seconds it continues with the
        clients that are present, and later rounds wait for the others (`wait_for`).

        Args:
            wait: Seconds to wait.

        Raises:
            RuntimeError: If a client is missing after `wait` seconds at a first start, or all are after a
                restart. Also if as many nodes refuse as there are clients and none has registered.
        """
        wanted, end = self._federated.clients.num_clients, time.monotonic() + wait
        self._patience = wait
        while True:
            self._query_new_nodes()
            self._admit_nodes()
            if len(self.nodes) >= wanted:
                break
            # if as many nodes refuse as there are clients, and none has registered, the settings differ
            hopeless = not self.nodes and len(self._refusing) >= wanted
            if hopeless or time.monotonic() > end:
                here = len(self.nodes)
                missing = self._describe_missing([c for c in range(wanted) if c not in self.nodes])
                if self._resumed and self.nodes:
                    rank_zero_warn(f"The server continues with {here} of {wanted} clients. {missing}")
                    self._has_waited = True
                    break
                when = "" if hopeless else f" within {wait:g} s"
                raise RuntimeError(
                    f"{wanted} clients are needed, but {here} have registered{when}. {missing}"
                )
            time.sleep(POLL)
        self._store.put(_GATHERED, {"clients": wanted})
        if self._secrets is not None:
            tables: dict[str, dict[int, Any]] = {
                _SIGNATURES: self._signatures,
                _SAMPLES: self.samples,
                _ROSTER: self._registered,
            }
            for name, table in tables.items():
                self._store.put(name, {str(client): value for client, value in sorted(table.items())})

    def wait_for(self, cohort: Sequence[int], needed: int, name: str) -> None:
        """Wait until enough clients of a cohort are connected, before anybody is charged.

        The wait is as long as that of `gather`. If `gather` ended with clients missing, the first round does
        not wait again.

        Args:
            cohort: Clients of the round.
            needed: Number of answers without which the round has no mean.
            name: Name of the round, for messages.

        Raises:
            RuntimeError: If too few clients are connected after the wait. The message names the missing
                clients.
        """
        patience, self._has_waited = 0.0 if self._has_waited else self._patience, False
        end, has_warned = time.monotonic() + patience, not patience
        while True:
            self._query_absent()
            self._admit_nodes()
            online, left_out = set(self._exchange.online()), self.left_out
            missing = sorted(client for client in cohort if self.nodes.get(client) not in online)
            out = {*missing, *left_out, *filter(self.absence_reason, cohort)}
            here = [client for client in cohort if client not in out]
            if len(here) >= needed:
                return
            words = f"it needs {needed} of its {len(cohort)} clients, but {len(here)} are connected"
            if broken := sorted(left_out.intersection(cohort)):
                words += f", and clients {broken[:10]} are left out (disputes.json)"
            if any(map(self.absence_reason, cohort)):
                words += f". Failures: {self.describe_failures(filter(self.absence_reason, cohort))}"
            if time.monotonic() >= end:
                raise RuntimeError(
                    f"{name} has not begun and nobody is charged: {words}. "
                    f"{self._describe_missing(missing)}. Then start this run again with the same home"
                )
            if not has_warned:
                rank_zero_warn(
                    f"{name} waits at most {patience:g} s: {words}. Missing clients: {missing[:10]}"
                )
                has_warned = True
            time.sleep(POLL)
            self._query_new_nodes()

    def mark_failed(self, client: int, reason: str) -> None:
        """Mark a client as away after a failure, until it reports that it is ready (`absence_reason`)."""
        # an open question is forgotten, because its answer describes the client before this failure
        self._away[client] = _Absence(self.nodes[client], reason)
        self.failures[client] = reason

    def mark_present(self, client: int) -> None:
        """Mark a client as present, because it has answered."""
        self._away.pop(client, None)

    def absence_reason(self, client: int) -> str:
        """Return why a connected client does not count as present, or "" if it does."""
        absence = self._away.get(client)
        return absence.reason if absence is not None and absence.node == self.nodes.get(client) else ""

    def _query_absent(self) -> set[str]:
        """Ask failed clients whether they are ready, at once and then every minute.

        Clients that have declined are not asked.

        Returns:
            Identifiers of the messages to wait for. A client that has reported its failure itself answers at
            once, so its first message is among them.
        """
        now, online = time.monotonic(), set(self._exchange.online())
        due = {}
        for client, absence in self._away.items():
            is_here = absence.node in online and self.absence_reason(client)
            is_open = absence.question is not None or absence.reason.endswith(DECLINED)
            if is_here and not is_open and (absence.asked_at is None or now - absence.asked_at >= _ASK_AGAIN):
                due[absence.node] = absence
        if not due:
            return set()
        awaited = set[str]()
        for question, node in self._exchange.push("ready", {n: Fields() for n in due}, "ready").items():
            if due[node].asked_at is None and not due[node].reason.startswith("no answer"):
                awaited.add(question)
            due[node].question = question
        for absence in due.values():
            absence.asked_at = now
        return awaited

    @property
    def _open_questions(self) -> dict[str, int]:
        """Node of each question to an absent client that is not answered, by its identifier."""
        return {one.question: one.node for one in self._away.values() if one.question is not None}

    def _admit_ready(self) -> None:
        """Mark clients as present that have reported ready, and note the others' reasons."""
        if not (unanswered := self._open_questions):
            return
        answers = self._exchange.pull(unanswered)  # removes the answered ones
        for client, absence in list(self._away.items()):
            if absence.question is None or absence.question in unanswered:
                continue
            absence.question, answer = None, answers.get(absence.node)
            if answer is not None and "refused" in answer:
                self.failures[client] = absence.reason = str(answer["refused"])
            elif answer is not None:
                del self._away[client]

    def describe_failures(self, clients: Iterable[int] | None = None) -> str:
        """Describe which clients have failed since the last completed round, and why.

        Args:
            clients: Numbers of the clients to describe. None describes all that have failed.
        """
        chosen = sorted(self.failures if clients is None else clients)
        texts = [f"client {client} has failed ({self.failures.get(client)})" for client in chosen]
        return "; ".join(texts[:5]) + (f"; {len(texts) - 5} more" if texts[5:] else "")

    def _describe_missing(self, missing: Sequence[int]) -> str:
        """Describe which clients are missing, and what an operator can do."""
        quiet = sorted(self._queried.values())
        text = f"Missing clients: {missing[:10]}" + (", ..." if missing[10:] else "")
        if self._refusing:
            node, words = next(reversed(self._refusing.items()))
            text += f". A node refuses: {words} (node {node}, one of {len(self._refusing)} that refuse)"
        if quiet:
            text += f". Nodes {quiet[:10]} are connected and have not answered: look at their logs, or"
        elif not self._refusing:
            text += ". No other node is connected:"
        else:
            return text
        return f"{text} start more SuperNodes"

    def refresh(self) -> None:
        """Ask new nodes to register and failed clients whether they are ready, and wait for answers.

        If a client is missing, a new node may be that client, so the wait is as long as for any answer.
        Otherwise it is at most a minute, because a client may return before its old node counts as gone. A
        silent node is waited for once.
        """
        for node in list(self._refusing):  # ask again, because the cause of the refusal may be fixed
            self._no_at.pop(node)
        new_questions, questions, began = self._query_new_nodes(), self._query_absent(), time.monotonic()
        self._admit_nodes()
        while True:
            waits_for_new = bool(new_questions & set(self._queried))
            if not waits_for_new and not questions & set(self._open_questions):
                return
            online, clients = set(self._exchange.online()), range(self._federated.clients.num_clients)
            is_client_gone = any(self.nodes.get(client) not in online for client in clients)
            limit = self._exchange.timeout if is_client_gone and waits_for_new else _WAIT_FOR_NEW
            if time.monotonic() - began >= min(limit, self._exchange.timeout):
                return
            time.sleep(POLL)
            self._admit_nodes()

    def _query_new_nodes(self) -> set[str]:
        """Ask unknown nodes to register, and again every minute those that have refused or are no clients.

        A node that has left is forgotten, because the cause of its refusal may be fixed when it returns.

        Returns:
            Identifiers of the messages to wait for, without those to nodes that were silent before.
        """
        online, now = set(self._exchange.online()), time.monotonic()
        self._silent &= online  # a node that left and returned is waited for again
        self._queried = {number: node for number, node in self._queried.items() if node in online}
        for gone in self._no_at.keys() - online:
            self._forget(gone)
        lately = {node for node, at in self._no_at.items() if now - at < _ASK_AGAIN}
        known = {*self.nodes.values(), *lately, *self._queried.values()}
        new = sorted(online - known)
        if not new:
            return set()
        self._nonces |= {node: os.urandom(_NONCE_BYTES) for node in new}
        requests: dict[int, Fields] = dict.fromkeys(new, self._settings)
        if self._secrets is not None:
            public = {"federation": self._secrets.federation, "server": self._secrets.public_key}
            requests = {node: {**self._settings, **public, "nonce": self._nonces[node]} for node in new}
        sent = self._exchange.push("register", requests, "register")
        self._queried |= sent
        return {number for number, node in sent.items() if node not in self._silent | self._strangers}

    def _forget(self, node: int) -> None:
        """Forget that a node has refused, or that it is no client."""
        self._no_at.pop(node, None)
        self._refusing.pop(node, None)
        self._strangers.discard(node)

    def _refuse_node(self, node: int, reason: str) -> None:
        """Mark a node as no client, and warn of it once.

        Args:
            node: Number of the node.
            reason: Text that follows the node in the warning.
        """
        if node not in self._strangers:
            rank_zero_warn(f"Node {node}{reason}. The server asks it again every minute")
        self._forget(node)
        self._no_at[node] = time.monotonic()
        self._strangers.add(node)

    def _admit_nodes(self) -> None:
        """Register the nodes that have answered, and warn of those that refuse."""
        self._admit_ready()
        queried = set(self._queried.values())
        answers = self._exchange.pull(self._queried) if self._queried else {}
        # Flower reported an error for these nodes
        self._silent |= queried - set(self._queried.values()) - set(answers)
        for node in sorted(answers):
            if "refused" in answers[node]:
                words = str(answers[node]["refused"])
                if self._refusing.get(node) != words:
                    rank_zero_warn(f"Node {node} refuses, and is asked again every minute: {words}")
                self._forget(node)
                self._refusing[node], self._no_at[node] = words, time.monotonic()
                continue
            samples = number_in(answers[node], "samples")
            if self._federated.server.weighting == "samples" and (samples is None or samples < 1):
                self._refuse_node(node, " does not report its number of samples, which must be at least 1")
                continue
            try:
                client = self._find_number(node, answers[node])
            except ValueError as error:
                self._refuse_node(node, f": {error}")
                continue
            if client is None:
                self._refuse_node(node, " is no client of this federation, or its number is taken")
                continue
            self._forget(node)
            self.nodes[client] = node
            if len(signature := bytes_in(answers[node], "signature")) == _SIGNATURE_BYTES:
                self._signatures[client] = signature
            if samples is not None:
                self.samples[client] = samples

    def _find_number(self, node: int, answer: Fields) -> int | None:
        """Return a node's client number: that of its key, else its own number, else the next free one.

        Args:
            node: Number of the node.
            answer: Fields of its answer to "register".

        Returns:
            The client number, or None if the node is no client or its number is taken.

        Raises:
            ValueError: If its key, or a signature, does not verify.
        """
        total, partition = self._federated.clients.num_clients, number_in(answer, "partition")
        if partition is None:
            return None
        if self._secrets is None:
            free = [c for c in range(total) if c not in self.nodes]
            if partition >= 0:  # the client has its own number, and may return as another node
                return partition if partition < total else None
            return free[0] if free else None
        key = bytes_in(answer, "key")
        client = next((known for known, known_key in self._registered.items() if known_key == key), -1)
        if client < 0:
            free = [client for client in range(total) if client not in self._registered]
            client = partition if partition >= 0 else (free[0] if free else -1)
            if client not in free:
                return None
        self._check_key(client, key, self._nonces.pop(node), answer)
        self._registered[client] = key
        return client

    def _check_key(self, client: int, key: bytes, nonce: bytes, answer: Fields) -> None:
        """Check that a node holds a client's private key, and that the client's identity signed the key.

        Args:
            client: Number of the client.
            key: Public key that the node sent, 32 bytes.
            nonce: Nonce that the server drew for this registration.
            answer: Fields of the node's answer, with its proof and signature.

        Raises:
            KeyVerificationError: If the proof or the signature does not verify.
        """
        assert self._secrets is not None
        wanted = registration_proof(self._secrets.secret, key, self._secrets.federation, key, nonce)
        if not hmac.compare_digest(wanted, bytes_in(answer, "proof")):
            raise KeyVerificationError(
                f"The proof for client {client}'s public key is wrong, so this node is left out. It lacks "
                "the private key, or repeats a recorded proof."
            )
        if self.directory is not None:
            signature = bytes_in(answer, "signature")
            verify_key(self.directory, client, self._secrets.federation, key, signature)

    def keys(self) -> ServerKeys:
        """Return the keys that the server holds, once all clients have registered."""
        if self._secrets is None:
            assert self._federated.seed is not None
            return SeededKeys(self._federated.seed)
        return HeldServerKeys(self._secrets, self._registered)

    def introduction(self, keys: ServerKeys, client: int, group: Sequence[int]) -> Fields:
        """Return the fields with public and sealed keys that a client needs for one round.

        Args:
            keys: Keys that the server holds. Keys of a seed need no fields.
            client: Number of the client.
            group: Clients whose public keys are included, except the client itself.
        """
        if not isinstance(keys, HeldServerKeys):
            return {}
        assert self._secrets is not None
        peers = [other for other in group if other != client]
        # a missing signature is sent as zeros, unless all are missing
        signed = [self._signatures.get(other, bytes(_SIGNATURE_BYTES)) for other in peers]
        return {
            "federation": self._secrets.federation,
            "server": self._secrets.public_key,
            "salt": keys.salt,
            "sealed": keys.sealed_members(client),
            "peers": peers,
            "peer_keys": b"".join(keys.roster[other] for other in peers),
            "signatures": b"".join(signed) if self._signatures else b"",
        }
