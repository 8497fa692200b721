"""Groups of three or more between real clients: one more exchange, on the halves."""

from typing import Any

import pytest
import torch

from lightning_fedq.flower import remote_client as client_half
from lightning_fedq.flower.store import Store
from lightning_fedq.keys.party_keys import (
    ClientSecrets,
    HeldClientKeys,
    HeldServerKeys,
    NotHeldError,
    ServerSecrets,
)
from lightning_fedq.mechanisms import StratifiedCorBin
from lightning_fedq.mechanisms.interface.ranges import AdaptiveRange
from lightning_fedq.rounds import RoundEngine
from tests.flower.halves import DIM, Halves, update_of
from tests.flower.loop import CLIENTS, federated
from tests.keys.test_party_keys import agreed

pytestmark = pytest.mark.filterwarnings("ignore:round .* client|train|contribute|node:UserWarning")
THREES = StratifiedCorBin(epsilon=4.0, group_size=3)


def halves(folder, **options):
    return Halves(federated(THREES, seed=None, **options), folder)


def secrets_of(folder):
    """What each party has kept for itself."""
    server = Store(folder / "server").get("server")
    own = [Store(folder / f"client-{client}").get("keys") for client in range(CLIENTS)]
    assert server is not None and None not in own
    return ServerSecrets(**server), [ClientSecrets(one["secret"], one["seed"]) for one in own if one]


class KeptKeys(HeldClientKeys):
    """Keys that follow from what a client has kept, and from nothing that it draws for each message."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given, entropy=lambda size: b"")


def test_the_model_is_that_of_one_process_with_everybody_s_keys(tmp_path, monkeypatch):
    """So the bits that a group shares are the same to each of its members, and to no server."""
    monkeypatch.setattr(client_half, "HeldClientKeys", KeptKeys)
    played = halves(tmp_path)
    planner, keys = played.server.planner, agreed(*secrets_of(tmp_path))
    engine = RoundEngine(THREES, planner, keys, torch.zeros(DIM), [DIM], AdaptiveRange())
    for _ in range(3):
        plan = engine.start()
        for client in plan.survivors:
            engine.receive([client], update_of(client)[None])
        expected, found = engine.finish(), played.round()
        assert found.num_received == expected.num_received == CLIENTS
        assert torch.equal(played.server.weights, engine.weights)
        assert max(map(len, plan.groups)) == 3


def group_of(played):
    """The three of the round that comes."""
    return max(played.server.coming_plan().groups, key=len)


@pytest.mark.parametrize("given", [{"refused": "busy"}, {"contributions": b"short"}, {"contributions": 7}])
def test_a_group_s_key_is_made_without_a_silent_member(given, tmp_path):
    """Those who lacked its contribution were left out of the round."""
    played = halves(tmp_path)
    silent, *_ = group_of(played)
    played.line.answered = lambda kind, client, fields: (
        given if (kind, client) == ("contribute", silent) else fields
    )
    with pytest.warns(UserWarning, match=f"is made without those of \\[{silent}\\]"):
        record = played.round()
    assert record.num_received == CLIENTS  # who was silent knows the others' contributions, as they all do
    played.line.answered = None
    assert played.round().num_received == CLIENTS


def test_a_contribution_that_the_server_has_exchanged_is_refused(tmp_path):
    """It has one of the right length, and no member's key."""
    played = halves(tmp_path)

    def tells(kind, client, fields):
        if kind == "train" and "contributions" in fields:
            return {**fields, "contributions": bytes(48) + fields["contributions"][48:]}
        return fields

    group = group_of(played)
    played.line.tells = tells
    assert played.round().num_received == CLIENTS - len(group)
    for client in group:
        assert "to a group's key does not open" in played.line.answers["train", client]["refused"]
        log = tmp_path / f"client-{client}" / "streams.jsonl"
        assert not log.exists()  # nothing was encoded


TENS = StratifiedCorBin(epsilon=4.0, group_size=10)


@pytest.mark.parametrize("cheated", [9, 2, 1])
def test_junk_contributions(cheated, tmp_path):
    """One member of a group of ten ended the round of nine others, in every round. Now in one at most."""
    played = Halves(federated(TENS, seed=None, num_clients=12), tmp_path)
    liar, *_ = group_of(played)

    def lies(kind, client, fields):
        if (kind, client) != ("contribute", liar) or "contributions" not in fields:
            return fields
        return {"contributions": bytes(48 * cheated) + fields["contributions"][48 * cheated :]}

    played.line.answered = lies
    with pytest.warns(UserWarning, match=f"could not open what client {liar} sealed"):
        assert played.round().num_received == 12 - cheated
    assert played.roster.left_out == ({liar} if cheated > 1 else set())
    for _ in range(2):
        assert played.round().num_received >= 11
        assert played.roster.left_out <= {liar}


def test_a_false_accuser_harms_itself_alone(tmp_path):
    played = Halves(federated(TENS, seed=None, num_clients=12), tmp_path)
    liar, *others = group_of(played)
    played.line.answered = lambda kind, client, fields: (
        {"refused": "no", "accused": others[:3]} if (kind, client) == ("train", liar) else fields
    )
    for _ in range(2):
        assert played.round().num_received == 11
        assert played.roster.left_out == {liar}


def test_what_is_shared_without_a_silent_member_is_shared(tmp_path):
    """Every member draws the same bits with the rest of its group, and other ones than with all."""
    played = halves(tmp_path)
    server, own = secrets_of(tmp_path)
    group, keys = group_of(played), played.roster.keys()
    assert isinstance(keys, HeldServerKeys)
    public = {client: secrets.public_key for client, secrets in enumerate(own)}
    held = {
        client: HeldClientKeys(
            client,
            own[client],
            server.federation,
            server.public_key,
            keys.salt,
            keys.sealed_members(client),
            public,
        )
        for client in group
    }
    sent = {client: one.contributions(group) for client, one in held.items()}
    found = []
    for chosen in (group, group[1:], group[:1]):
        for client, one in held.items():
            others = {other: sent[other][client] for other in chosen if other != client}
            one.take_contributions(group, others, chosen)
        made = {one.peer(group) for one in held.values()}
        assert len(made) == 1
        found += made
    assert len(set(found)) == 3
    for chosen in ((), (99,)):
        with pytest.raises(NotHeldError, match="can't be made of contributions"):
            held[group[0]].take_contributions(group, {}, chosen)
