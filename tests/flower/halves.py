"""Both halves of a deployment without Flower, a Trainer or a network: fields in, fields out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lightning_fedq.flower.cohort import Cohort
from lightning_fedq.flower.remote_client import ClientConfig, RemoteClient
from lightning_fedq.flower.roster import Roster
from lightning_fedq.flower.secure import remote_sums
from lightning_fedq.flower.store import Store
from lightning_fedq.keys.party_keys import Identities
from lightning_fedq.rounds import RoundServer

DIM = 40
Fields = dict[str, Any]


def update_of(client):
    """The same in every round."""
    return torch.linspace(-1.0, 1.0, DIM) * (client + 1)


def identities(count=4):
    """Identities of clients that know each other's."""
    own = [Ed25519PrivateKey.generate() for _ in range(count)]
    return [Identities(key, {c: one.public_key() for c, one in enumerate(own)}) for key in own]


class Still(RemoteClient):
    """A client that has trained already: its update is always the same."""

    def __init__(self, own):
        super().__init__(own, None, None, {})

    def settings(self):
        return {}

    def _count_samples(self):
        return 1

    def update(self, fields, task, weights):
        return update_of(fields["client"])


class Line:
    """An exchange that brings each message to its client at once, as Flower would, through a new object.

    Args:
        clients: Makes client i at node i.
        nodes: How many there are.

    Attributes:
        tells: What the server really sends `(kind, client, fields)`; a lying one changes it.
        answers: `(kind, client)` to the fields that came back last.
        answered: What comes back in their place; None is themselves.
    """

    def __init__(self, clients: Callable[[int], RemoteClient], nodes: int) -> None:
        self.clients, self.nodes = clients, nodes
        self.tells = lambda kind, client, fields: fields
        self.answers = {}
        self.answered = None
        self.timeout = 1.0
        self._come = {}

    def online(self):
        return list(range(self.nodes))

    def push(self, kind, contents, group):
        self._come |= self(kind, contents, group)
        return {f"to {node}": node for node in contents}

    def pull(self, asked):
        arrived = [number for number, node in asked.items() if node in self._come]
        return {node: self._come.pop(node) for node in map(asked.pop, arrived)}

    def __call__(self, kind, contents, group):
        for node, fields in contents.items():
            told = self.tells(kind, node, fields)
            self.answers[kind, node] = self.clients(node).reply(kind, told)
            if self.answered is not None:
                self.answers[kind, node] = self.answered(kind, node, self.answers[kind, node])
        return {node: self.answers[kind, node] for node in contents}


class Halves:
    """A server and its clients.

    Args:
        federated: The settings.
        folder: Of everybody's folders.
        identities: Of each client, and the server's directory; None for none.
        budgets: Of clients that have one of their own.
        wait: Seconds to wait for everybody.
        change: Done before anybody registers.
    """

    def __init__(
        self, federated, folder, identities=None, budgets=None, wait=1.0, change=lambda played: None
    ):
        self.federated = federated
        directory = None if identities is None else identities[0].directory

        def client(number):
            own = None if identities is None else identities[number]
            store, budget = Store(folder / f"client-{number}"), (budgets or {}).get(number)
            return Still(ClientConfig(federated, store, number, own, budget))

        self.client, self.line = client, Line(client, federated.clients.num_clients)
        self.roster = Roster(federated, self.line, Store(folder / "server"), {}, directory)
        change(self)
        self.roster.gather(wait)
        secagg = federated.server.secure_aggregation
        self.server = RoundServer(
            federated.mechanism,
            federated.planner,
            self.roster.keys(),
            torch.zeros(DIM),
            [DIM],
            federated.server.range_rule,
            secure_sums=None if secagg is None else remote_sums(secagg, directory),
        )

    def questions(self):
        """Open a round, and return what each client is to be asked."""
        self.server.abandon()
        self.server.start()
        cohort = Cohort(self.server, self.line, self.roster)
        model = {"weights": self.server.weights.numpy().tobytes(), "dtype": "float32"}
        return cohort, {client: {**model, **fields} for client, fields in cohort.client_requests().items()}

    def round(self):
        """Play one round."""
        cohort, questions = self.questions()
        cohort.conclude(cohort.ask("train", questions))
        return self.server.finish()
