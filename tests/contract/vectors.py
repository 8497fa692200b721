"""Conformance vectors: one round of each mechanism, down to its streams, for implementations elsewhere.

    python -m tests.contract.vectors    writes `vectors/MECHANISM.json` for every row of the contract

docs/conformance.md says what is in them. Like golden symbols, they change only with a breaking change.
"""

import json
from pathlib import Path
from typing import Any

import torch

from lightning_fedq.keys.randomness import (
    ClientRandomness,
    PublicRandomness,
    SeededKeys,
    Stream,
    hkdf_expand,
    pack_fields,
)
from lightning_fedq.mechanisms.contract_suite import make_context
from lightning_fedq.mechanisms.interface import NonPrivate
from lightning_fedq.privacy.accounting import spent

FOLDER = Path(__file__).with_name("vectors")
COHORT, SEGMENTS, SEED, DELTA = (5, 1, 3), (5, 3), 42, 1e-5


class Recorded:
    """Notes the key of every stream that is asked for, in order, without repetition."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.streams = {}

    def _note(self, stream, kind, who, purpose):
        self.streams[kind, str(who), purpose] = self._key.hex()
        return stream

    def _stream(self, key, purpose, who):
        self._key = hkdf_expand(key, self._address + pack_fields(purpose) + who)
        return Stream(self._key)

    def public(self, purpose):
        return self._note(super().public(purpose), "public", "everybody", purpose)

    def members(self, purpose):
        return self._note(super().members(purpose), "members", "server and clients", purpose)

    def shared_with_server(self, client, purpose):
        return self._note(super().shared_with_server(client, purpose), "shared_with_server", client, purpose)

    def server(self, purpose):
        return self._note(super().server(purpose), "server", "server", purpose)


class RecordedPublic(Recorded, PublicRandomness):
    """What a server draws."""


class RecordedClients(Recorded, ClientRandomness):
    """What clients draw."""

    def peer(self, group, purpose):
        return self._note(super().peer(group, purpose), "peer", sorted(group), purpose)

    def private(self, client, purpose):
        return self._note(super().private(client, purpose), "private", client, purpose)


def _claim(claim):
    if isinstance(claim.loss, NonPrivate):
        return {"epsilon": None, "why": claim.loss.reason}
    epsilon = spent(claim.loss, DELTA, compositions=claim.compositions, rounds=1).epsilon
    found = {"loss": type(claim.loss).__name__, "unit": claim.unit.name.lower()}
    return {**found, "compositions": claim.compositions, "epsilon": float(f"{epsilon:.6g}")}


def vector_of(mechanism):
    """One round of three clients: keys of streams, updates, symbols, bitstreams, decoded sum, claims."""
    context = make_context(mechanism, COHORT, SEGMENTS)
    steps = torch.arange(-4, 4).float() / 16
    updates = torch.stack([steps.roll(row) for row in range(3)])
    clients = RecordedClients(SeededKeys(SEED), context.cohort, context.round)
    message = mechanism.encode(updates, context, clients)
    server = RecordedPublic(SeededKeys(SEED), context.round)
    total = mechanism.decode(message.symbols, context.cohort, context, server)
    streams = clients.streams | server.streams
    return {
        "mechanism": repr(mechanism),
        "cohort": list(context.cohort),
        "groups": [list(group) for group in context.groups],
        "segments": list(SEGMENTS),
        "center": 0.0,
        "radius": 1.0,
        "round": 0,
        "streams": [
            {"kind": kind, "who": who, "purpose": purpose, "key": key}
            for (kind, who, purpose), key in streams.items()
        ],
        "updates": updates.tolist(),
        "symbols": message.symbols.long().tolist(),
        "bits": message.num_bits,
        "clipped": message.num_clipped,
        "bitstreams": [
            mechanism.message_code(client, context, server).pack(row).hex()
            for client, row in zip(context.cohort, message.symbols, strict=True)
        ],
        "decoded_sum": [float(f"{x:.7g}") for x in total.tolist()],
        "claims": {claim.adversary.name: _claim(claim) for claim in mechanism.claims(context)},
    }


def files(rows):
    """The rows of each file: one file a class."""
    found = {}
    for row in rows:
        found.setdefault(type(row).__name__, []).append(row)
    return found


def _text(vectors):
    """JSON with one line a field."""
    fields = [
        ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in vector.items()) for vector in vectors
    ]
    return "[\n" + ",\n".join(f" {{\n{one}\n }}" for one in fields) + "\n]\n"


def main():
    """Write all files."""
    from tests.contract.test_mechanisms import ROWS

    FOLDER.mkdir(exist_ok=True)
    for name, rows in files(ROWS).items():
        (FOLDER / f"{name}.json").write_text(_text([vector_of(row) for row in rows]))
    print(f"{FOLDER.name}: {len(files(ROWS))} files, {len(ROWS)} rows")


if __name__ == "__main__":
    main()
