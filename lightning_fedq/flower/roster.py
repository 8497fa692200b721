"""Who is who at the server of a real federation: numbers, keys and nodes, and who is asked no more."""

import hmac
import os
import time
from collections.abc import Iterable, Mapping, Sequence

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
"""Seconds that a round waits for a node that has just come, where no client is missing."""
_ASK_AGAIN = 60.0
"""Seconds after which somebody is asked again that has refused, or was not ready."""


class Roster:
    """Who is who: the clients' numbers, their public keys and the nodes that they sit at.

    Args:
        settings: The server's fingerprint.
        rounds: Rounds of the run, which clients agree to; None tells them no number.
        directory: Everybody's verification key; with it a number is given to its identity only.

    Attributes:
        nodes: The node of each client.
        samples: How many samples each client holds, where the mean is weighted by that.
        disputes: Clients that have broken rounds and are asked no more.
        failures: Why clients have failed last, of those that have since a round has come to something.
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
        self._away: dict[int, tuple[int, str]] = {}
        self._queried_absent_at: dict[str, int] = {}
        self._queried_at: dict[int, float] = {}
        self._secrets: ServerSecrets | None = None
        if federated.seed is None:
            self._secrets = self._load_secrets()
            kept = store.get(_ROSTER) or {}
            self._registered = {int(client): key for client, key in kept.items()}
            signed = store.get(_SIGNATURES) or {}
            self._signatures = {int(client): signature for client, signature in signed.items()}
            self.samples = {int(client): number for client, number in (store.get(_SAMPLES) or {}).items()}
        self._resumed = (
            store.get(_GATHERED) is not None or len(self._registered) >= federated.clients.num_clients
        )

    @property
    def left_out(self) -> set[int]:
        """Clients that are asked no more, also after a restart of the server."""
        return self.disputes.left_out

    def _load_secrets(self) -> ServerSecrets:
        kept = self._store.get(_SECRETS)
        if kept is None:
            new = ServerSecrets.draw()
            kept = {"secret": new.secret, "federation": new.federation, "members": new.members}
            self._store.put(_SECRETS, kept)
        return ServerSecrets(**kept)

    def gather(self, wait: float) -> None:
        """Wait until every client has registered, and no longer, whoever else is silent or refuses.

        A server that is started again has seen everybody, and after `wait` seconds goes on with whoever is
        mark_present: the others are missed, as in mid-run, until they come back (`wait_for`).

        Raises:
            RuntimeError: If some are missing after `wait` seconds, at a first start, or everybody is.
        """
        wanted, end = self._federated.clients.num_clients, time.monotonic() + wait
        self._patience = wait
        while True:
            self._query_new_nodes()
            self._admit_nodes()
            if len(self.nodes) >= wanted:
                break
            # whether as many nodes as there are clients refuse and none has registered: settings differ
            hopeless = not self.nodes and len(self._refusing) >= self._federated.clients.num_clients
            if hopeless or time.monotonic() > end:
                missing = self._describe_missing(
                    [client for client in range(wanted) if client not in self.nodes]
                )
                if self._resumed and self.nodes:
                    rank_zero_warn(
                        f"the server goes on with {len(self.nodes)} of {wanted} clients; {missing}"
                    )
                    self._has_waited = True
                    break
                raise RuntimeError(
                    f"{wanted} clients are needed and {len(self.nodes)} have registered"
                    + ("; " if hopeless else f" within {wait:g} s; ")
                    + missing
                )
            time.sleep(POLL)
        self._store.put(_GATHERED, {"clients": wanted})
        if self._secrets is not None:
            signed = {str(client): signature for client, signature in sorted(self._signatures.items())}
            self._store.put(_SIGNATURES, signed)
            self._store.put(_SAMPLES, {str(client): number for client, number in self.samples.items()})
            self._store.put(_ROSTER, {str(client): key for client, key in sorted(self._registered.items())})

    def wait_for(self, cohort: Sequence[int], needed: int, name: str) -> None:
        """Wait until so many of a cohort are connected, as long as `gather` did, before anybody is charged.

        Where `gather` has waited in vain already, the first round does not wait again.

        Args:
            cohort: Clients of the round.
            needed: Answers without which it has no mean.
            name: The round's.

        Raises:
            RuntimeError: If they are fewer still, with who is missing.
        """
        patience, self._has_waited = 0.0 if self._has_waited else self._patience, False
        end, said = time.monotonic() + patience, not patience
        while True:
            self._query_absent()
            self._admit_nodes()
            online, left_out = set(self._exchange.online()), self.left_out
            missing = sorted(client for client in cohort if self.nodes.get(client) not in online)
            out = {*missing, *left_out, *filter(self.absence_reason, cohort)}
            here = [client for client in cohort if client not in out]
            if len(here) >= needed:
                return
            words = f"it needs {needed} of its {len(cohort)} clients, {len(here)} are connected"
            if broken := sorted(left_out.intersection(cohort)):
                words += f", and clients {broken[:10]} are left out (disputes.json)"
            if any(map(self.absence_reason, cohort)):
                words += f"; {self.describe_failures(filter(self.absence_reason, cohort))}"
            if time.monotonic() >= end:
                raise RuntimeError(
                    f"{name} is not begun and nobody is charged for it: {words}; "
                    f"{self._describe_missing(missing)}; "
                    "then start this run again with the same home"
                )
            if not said:
                rank_zero_warn(f"{name} waits {patience:g} s at most: {words}; missing are {missing[:10]}")
                said = True
            time.sleep(POLL)
            self._query_new_nodes()

    def mark_failed(self, client: int, reason: str) -> None:
        """A client has failed in a round: it is away until it says that it is ready (`absence_reason`)."""
        node = self.nodes[client]
        self._away[client], self.failures[client] = (node, reason), reason
        self._queried_at.pop(client, None)
        # what it says to a question of before is of before
        self._queried_absent_at = {
            number: asked for number, asked in self._queried_absent_at.items() if asked != node
        }

    def mark_present(self, client: int) -> None:
        """A client has answered."""
        self._away.pop(client, None)

    def absence_reason(self, client: int) -> str:
        """Why a client that is connected does not count as there, "" if it does."""
        node, why = self._away.get(client, (None, ""))
        return why if node == self.nodes.get(client) else ""

    def _query_absent(self) -> set[str]:
        """Ask who has failed whether it is ready, at once and then every minute. Who has declined stays out.

        Returns messages to wait for: answers of those that have failed with words of their own come at once.
        """
        now, online = time.monotonic(), set(self._exchange.online())
        nodes = {
            node: client
            for client, (node, why) in self._away.items()
            if node in online and self.absence_reason(client) and not why.endswith(DECLINED)
            if node not in self._queried_absent_at.values()
            if now - self._queried_at.get(client, -_ASK_AGAIN) >= _ASK_AGAIN
        }
        if not nodes:
            return set()
        first = {node for node, client in nodes.items() if client not in self._queried_at}
        self._queried_at |= dict.fromkeys(nodes.values(), now)
        sent = self._exchange.push("ready", {node: Fields() for node in nodes}, "ready")
        self._queried_absent_at |= sent
        quiet = {node for node, why in self._away.values() if why.startswith("no answer")}
        return {number for number, node in sent.items() if node in first - quiet}

    def _admit_ready(self) -> None:
        """Count those as there again who are ready."""
        answers = self._exchange.pull(self._queried_absent_at) if self._queried_absent_at else {}
        clients = {node: client for client, (node, _) in self._away.items()}
        for node in set(answers) & set(clients):
            client, found = clients[node], answers[node]
            if "refused" in found:
                self.failures[client] = str(found["refused"])
                self._away[client] = node, self.failures[client]
            else:
                del self._away[client]

    def describe_failures(self, clients: Iterable[int] | None = None) -> str:
        """Which clients have failed since the last round that came to something, and why, for people."""
        chosen = sorted(self.failures if clients is None else clients)
        found = [f"client {client} has failed ({self.failures.get(client)})" for client in chosen]
        return "; ".join(found[:5]) + (f"; {len(found) - 5} more" if found[5:] else "")

    def _describe_missing(self, missing: Sequence[int]) -> str:
        """Who is not there, and what an operator can do."""
        quiet = sorted(self._queried.values())
        found = f"missing are clients {missing[:10]}" + (", ..." if missing[10:] else "")
        if self._refusing:
            node, words = next(reversed(self._refusing.items()))
            found += f"; one refuses: {words} (node {node} of {len(self._refusing)} that refuse)"
        if quiet:
            found += f", and nodes {quiet[:10]} are connected and have not answered; look at their logs, or"
        elif not self._refusing:
            found += "; no other node is connected:"
        else:
            return found
        return f"{found} start more SuperNodes"

    def refresh(self) -> None:
        """Ask new nodes, such as a client that comes back, who they are. A silent one is waited for once.

        That is as long as for an answer where a client is missing, and else a minute at most: a client may be
        back before its old node counts as gone.
        """
        for node in list(self._refusing):  # asked again: what it refused for may be put right
            self._no_at.pop(node)
        new, again, began = self._query_new_nodes(), self._query_absent(), time.monotonic()
        self._admit_nodes()
        while new & set(self._queried) or again & set(self._queried_absent_at):
            online, clients = set(self._exchange.online()), range(self._federated.clients.num_clients)
            somebody_is_gone = any(self.nodes.get(client) not in online for client in clients)
            waits = somebody_is_gone and new & set(self._queried)
            limit = self._exchange.timeout if waits else _WAIT_FOR_NEW
            if time.monotonic() - began >= min(limit, self._exchange.timeout):
                break
            time.sleep(POLL)
            self._admit_nodes()

    def _query_new_nodes(self) -> set[str]:
        """Ask nodes of which nothing is known, and every minute those that have refused or are no clients.

        A node that has left is forgotten: if it comes back, the reason of its refusal may be put right.

        Returns messages to wait for, none to a silent one.
        """
        online, now = set(self._exchange.online()), time.monotonic()
        self._silent &= online  # whoever was away and is back is waited for again
        self._queried = {number: node for number, node in self._queried.items() if node in online}
        for gone in self._no_at.keys() - online:
            self._forget(gone)
        lately = {node for node, at in self._no_at.items() if now - at < _ASK_AGAIN}
        known = {*self.nodes.values(), *lately, *self._queried.values()}
        new = sorted(online - known)
        if not new:
            return set()
        self._nonces |= {node: os.urandom(_NONCE_BYTES) for node in new}
        asked: dict[int, Fields] = dict.fromkeys(new, self._settings)
        if self._secrets is not None:
            public = {"federation": self._secrets.federation, "server": self._secrets.public_key}
            asked = {node: {**self._settings, **public, "nonce": self._nonces[node]} for node in new}
        sent = self._exchange.push("register", asked, "register")
        self._queried |= sent
        return {number for number, node in sent.items() if node not in self._silent | self._strangers}

    def _forget(self, node: int) -> None:
        """A node's refusal, or that it is no client."""
        self._no_at.pop(node, None)
        self._refusing.pop(node, None)
        self._strangers.discard(node)

    def _refuse_node(self, node: int, reason: str) -> None:
        """A node is no client, as long as it says the same."""
        if node not in self._strangers:
            rank_zero_warn(f"node {node}{reason}; it is asked again every minute")
        self._forget(node)
        self._no_at[node] = time.monotonic()
        self._strangers.add(node)

    def _admit_nodes(self) -> None:
        """Give numbers to those who have answered by now, and name those who refuse."""
        self._admit_ready()
        asked = set(self._queried.values())
        answers = self._exchange.pull(self._queried) if self._queried else {}
        self._silent |= asked - set(self._queried.values()) - set(answers)  # Flower answers for them
        for node in sorted(answers):
            if "refused" in answers[node]:
                words = str(answers[node]["refused"])
                if self._refusing.get(node) != words:
                    rank_zero_warn(f"node {node} refuses: {words}; it is asked again every minute")
                self._forget(node)
                self._refusing[node], self._no_at[node] = words, time.monotonic()
                continue
            samples = number_in(answers[node], "samples")
            if self._federated.server.weighting == "samples" and (samples is None or samples < 1):
                self._refuse_node(node, " does not say how many samples it holds, at least one")
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
        """Whose node this is: by its key, else by its own number, else the next that is free.

        Raises:
            ValueError: If its key, or a signature, does not verify.
        """
        total, partition = self._federated.clients.num_clients, number_in(answer, "partition")
        if partition is None:
            return None
        if self._secrets is None:
            free = [c for c in range(total) if c not in self.nodes]
            if partition >= 0:  # a number of its own: a client that comes back has another node
                return partition if partition < total else None
            return free[0] if free else None
        key = bytes_in(answer, "key")
        client = next((known for known, kept in self._registered.items() if kept == key), -1)
        if client < 0:
            free = [client for client in range(total) if client not in self._registered]
            client = partition if partition >= 0 else (free[0] if free else -1)
            if client not in free:
                return None
        self._check_key(client, key, self._nonces.pop(node), answer)
        self._registered[client] = key
        return client

    def _check_key(self, client: int, key: bytes, nonce: bytes, answer: Fields) -> None:
        """Make sure that whoever registers holds this key, and that a client's identity has signed it."""
        assert self._secrets is not None
        wanted = registration_proof(self._secrets.secret, key, self._secrets.federation, key, nonce)
        if not hmac.compare_digest(wanted, bytes_in(answer, "proof")):
            raise KeyVerificationError(
                f"whoever registers with the public key of client {client} does not hold the private key, or "
                "repeats what it has recorded; it is left out"
            )
        if self.directory is not None:
            signature = bytes_in(answer, "signature")
            verify_key(self.directory, client, self._secrets.federation, key, signature)

    def keys(self) -> ServerKeys:
        """Keys that the server holds, once everybody has registered."""
        if self._secrets is None:
            assert self._federated.seed is not None
            return SeededKeys(self._federated.seed)
        return HeldServerKeys(self._secrets, self._registered)

    def introduction(self, keys: ServerKeys, client: int, group: Sequence[int]) -> Fields:
        """Public keys and sealed ones that a client needs for one round: those of `group`, itself aside."""
        if not isinstance(keys, HeldServerKeys):
            return {}
        assert self._secrets is not None
        peers = [other for other in group if other != client]
        signed = (
            [self._signatures.get(other, bytes(_SIGNATURE_BYTES)) for other in peers]
            if self._signatures
            else []
        )
        return {
            "federation": self._secrets.federation,
            "server": self._secrets.public_key,
            "salt": keys.salt,
            "sealed": keys.sealed_members(client),
            "peers": peers,
            "peer_keys": b"".join(keys.roster[other] for other in peers),
            "signatures": b"".join(signed),
        }
