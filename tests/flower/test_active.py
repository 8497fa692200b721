"""Secure aggregation against a server that lies, on the halves: `SecAgg(active=True)`."""

from dataclasses import replace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from lightning_fedq.keys.party_keys import Identities
from lightning_fedq.mechanisms import CorBin
from lightning_fedq.rounds import RoundTask
from lightning_fedq.secagg import Client, SecAgg, messages as wire
from tests.flower.halves import Fields, Halves, identities
from tests.flower.loop import CLIENTS, federated

pytestmark = pytest.mark.filterwarnings(
    "ignore:client|confirm|unmask|train|register|masked|shares|node:UserWarning"
)
COIN = CorBin(epsilon_per_coordinate=4.0, shared_bits=5)


def halves(folder, **options):
    given = {"secure_aggregation": SecAgg(active=True), "seed": None, **options}
    return Halves(federated(COIN, **given), folder, identities())


def survivors(played, client, listed):
    """The message in which a server tells one client who has survived."""
    machine = played.server.secure_sum.machine
    body = wire.client_bits(listed, machine.terms)
    return wire.seal(wire.Kind.SURVIVORS, machine.terms, client, body, machine._channel_keys[client])


@pytest.mark.parametrize("seed", [None, 5])
def test_the_sum_is_that_of_the_same_round_without_it(seed, tmp_path):
    """With a seed to the last bit; without one coins differ, so the counts are compared."""
    played = halves(tmp_path / "active", seed=seed)
    record = played.round()
    assert (record.num_received, record.aborted) == (CLIENTS, "")
    kinds = {kind for kind, _ in played.line.answers}
    assert kinds == {"register", "train", "shares", "masked", "confirm", "unmask"}
    if seed is not None:
        plain = Halves(federated(COIN, seed=seed), tmp_path / "plain")
        plain.round()
        assert torch.equal(played.server.weights, plain.server.weights)
    left = {path.name for path in (tmp_path / "active" / "client-1").iterdir()}
    assert left <= {"keys.json", "streams.jsonl"}  # nothing of a round outlives it


def test_one_of_four_may_drop_out_and_two_may_not(tmp_path):
    played = halves(tmp_path)
    played.line.tells = lambda kind, client, fields: fields if (kind, client) != ("masked", 3) else {}
    assert played.round().num_received == 3
    played.line.tells = lambda kind, client, fields: fields if kind != "masked" or client < 2 else {}
    before = played.server.weights.clone()
    assert "3 clients are needed, 2 are left" in played.round().aborted
    assert torch.equal(played.server.weights, before)


@pytest.mark.parametrize(("due", "asked"), [("confirm", "unmask"), ("unmask", "confirm")])
def test_a_message_out_of_turn_is_refused_and_changes_nothing(due, asked, tmp_path):
    """The server asks for shares without a confirmation, or to confirm a second list of survivors."""
    played = halves(tmp_path)

    def tells(kind, client, fields):
        if kind == due:
            answer = played.client(client).reply(asked, {"secagg": survivors(played, client, [0, 1, 2])})
            assert f"expects {due!r} now, not {asked!r}" in answer["refused"]
        return fields

    played.line.tells = tells
    assert played.round().num_received == CLIENTS


@pytest.mark.parametrize(("active", "method"), [(False, "unmask"), (True, "confirm"), (True, "unmask")])
def test_of_two_messages_at_once_one_is_answered(active, method, tmp_path, monkeypatch):
    """Flower answers each message in a process of its own: a server may send two that overlap."""
    played = halves(tmp_path, secure_aggregation=SecAgg(active=active))
    whole, inner = getattr(Client, method), dict[int, Fields]()

    def overlapping(self, message):
        if self.client not in inner:
            inner[self.client] = {}
            inner[self.client] = played.client(self.client).reply(method, {"secagg": message})
        return bytes(whole(self, message))

    monkeypatch.setattr(Client, method, overlapping)
    monkeypatch.setattr("lightning_fedq.flower.store._PATIENCE", 0.1)  # seconds that the second one waits
    assert played.round().num_received == CLIENTS
    assert len(inner) == CLIENTS
    for answer in inner.values():
        assert "Another process answers a message in" in answer["refused"]


@pytest.mark.parametrize(
    "lie",
    [
        lambda task: replace(task, groups=task.groups[::-1] if len(task.groups) > 1 else task.groups),
        lambda task: replace(task, radius=task.radius * 2.0),
    ],
)
def test_a_server_that_tells_clients_different_tasks_is_refused(lie, tmp_path):
    """Client 0 hears of other pairs, or of another range, than everybody else."""
    played = halves(tmp_path)

    def tells(kind, client, fields):
        if kind == "train" and client == 0:
            return {**fields, "task": lie(RoundTask.from_bytes(fields["task"])).to_bytes()}
        return fields

    played.line.tells = tells
    assert played.round().num_received == CLIENTS - 1
    assert "belongs to another session" in played.line.answers["train", 0]["refused"]


def test_a_number_that_is_another_identity_s_is_refused(tmp_path):
    played = halves(tmp_path, seed=5)
    _, questions = played.questions()
    answer = played.client(1).reply("train", {**questions[1], "client": 2})
    assert "number 2, which the directory gives to another identity" in answer["refused"]


def test_a_client_whose_key_its_identity_has_not_signed_is_turned_away(tmp_path):
    known, stranger = identities(), Ed25519PrivateKey.generate()
    known[2] = Identities(stranger, known[0].directory)
    settings = federated(COIN, secure_aggregation=SecAgg(active=True), seed=None)
    with (
        pytest.warns(UserWarning, match="public key of client 2 is not signed by its identity"),
        pytest.raises(RuntimeError, match="4 clients are needed, but 3 have registered"),
    ):
        Halves(settings, tmp_path, known)


def test_a_partner_s_key_that_the_server_has_exchanged_is_refused(tmp_path):
    """Whoever holds the exchanged one would know what the pair shares."""
    played, known = halves(tmp_path), X25519PrivateKey.generate().public_key().public_bytes_raw()

    def tells(kind, client, fields):
        if (kind, client) == ("train", 0):
            return {**fields, "peer_keys": known + fields["peer_keys"][32:]}
        return fields

    played.line.tells = tells
    assert played.round().num_received == CLIENTS - 1
    assert "is not signed by its identity" in played.line.answers["train", 0]["refused"]
    assert not (tmp_path / "client-0" / "streams.jsonl").exists()  # nothing was encoded
