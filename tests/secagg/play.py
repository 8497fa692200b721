"""Plays a round message by message, with clients that fall silent at a given stage."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lightning_fedq.keys.randomness import SeededKeys, Stream
from lightning_fedq.secagg import Client, SecAgg, Server, Stage, Terms
from lightning_fedq.secagg.layout import sum_layout

MODEL = bytes(range(32))
STAGES = (Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.UNMASK)
ACTIVE_STAGES = (Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK)


def make_terms(num_clients=6, size=5, *, active=False, layout=None, **changes):
    layout = layout or sum_layout(size, -3, 12, num_clients)
    terms = SecAgg(active=active).terms(b"test", 0, 0, range(num_clients), layout, num_clients=num_clients)
    return replace(terms, **changes)


def make_inputs(terms, seed=0):
    stream = Stream(SeededKeys(seed).public())
    low, high = int(np.min(terms.layout.low)), int(np.max(terms.layout.high))
    return {
        client: stream.uniform_below(high - low + 1, terms.layout.size).astype(np.int64) + low
        for client in terms.cohort
    }


def seeded_entropy(who):
    """Reproducible bytes, so that a failing pattern fails again."""
    stream = Stream(SeededKeys(who).private(who))
    return lambda count: stream.words((count + 3) // 4).tobytes()[:count]


class Round:
    """Server, clients and the messages under way; tests reach in to tamper.

    Args:
        terms: The round.
        models: A client's own idea of the model hash, where it differs.
    """

    def __init__(self, terms: Terms, models: Mapping[int, bytes] | None = None) -> None:
        self.terms, models = terms, models or {}
        self.identities = (
            {c: Ed25519PrivateKey.from_private_bytes(c.to_bytes(32, "big")) for c in terms.cohort}
            if terms.active
            else {}
        )
        self.directory = {c: key.public_key() for c, key in self.identities.items()} if terms.active else None
        self.server = Server(terms, MODEL, directory=self.directory, entropy=seeded_entropy(10**6))
        self.clients = {c: self.client(c, models.get(c, MODEL)) for c in terms.cohort}
        self.incoming = {c: self.server.invitation(c) for c in terms.cohort}
        self.stages = ACTIVE_STAGES if terms.active else STAGES

    def client(self, client, model=MODEL):
        return Client(
            client,
            self.terms,
            model,
            identity=self.identities.get(client),
            directory=self.directory,
            entropy=seeded_entropy(client),
        )

    def answer(self, stage, client, symbols=None):
        """What one client sends at one stage."""
        state, message = self.clients[client], self.incoming[client]
        if stage is Stage.MASK:
            state.accept_shares(message)
            return state.masked_input(symbols)
        return {
            Stage.ADVERTISE: state.advertise,
            Stage.SHARE: state.share_keys,
            Stage.CONFIRM: state.confirm,
            Stage.UNMASK: state.unmask,
        }[stage](message)

    def run(self, inputs, silent=None, until=None):
        """Play on from the start to the end of the stage before `until`."""
        gone = set()
        for stage in self.stages:
            if stage is until:
                break
            gone |= {client for client, when in (silent or {}).items() if when is stage}
            self.step(stage, inputs, [client for client in self.incoming if client not in gone])
        return self

    def collect(self, stage, inputs=None, clients=None):
        """Have the server receive what clients send at one stage: these, or all who were asked."""
        for client in self.incoming if clients is None else clients:
            self.server.receive(self.answer(stage, client, None if inputs is None else inputs[client]))

    def step(self, stage, inputs=None, clients=None):
        """Play one stage."""
        self.collect(stage, inputs, clients)
        self.incoming = self.server.close()


def total(inputs, clients):
    return sum(inputs[client] for client in clients)
