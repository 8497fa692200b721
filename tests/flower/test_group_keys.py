"""Groups of three or more between real clients: one more exchange, on the halves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedq.flower import client as client_half
from lightning_fedq.flower.store import Store
from lightning_fedq.mechanisms import StratifiedCorBin
from lightning_fedq.party_keys import ClientSecrets, HeldClientKeys, ServerSecrets
from lightning_fedq.ranges import AdaptiveRange
from lightning_fedq.rounds import RoundEngine
from tests.flower.halves import DIM, Fields, Halves, update_of
from tests.flower.loop import CLIENTS, federated
from tests.test_party_keys import agreed

pytestmark = pytest.mark.filterwarnings("ignore:round .* client|train|contribute|node:UserWarning")
THREES = StratifiedCorBin(epsilon=4.0, group_size=3)


def halves(folder: Path, **options: Any) -> Halves:
    return Halves(federated(THREES, seed=None, **options), folder)


def secrets_of(folder: Path) -> tuple[ServerSecrets, list[ClientSecrets]]:
    """What each party has kept for itself."""
    server = Store(folder / "server").get("server")
    own = [Store(folder / f"client-{client}").get("keys") for client in range(CLIENTS)]
    assert server is not None and None not in own
    return ServerSecrets(**server), [ClientSecrets(one["secret"], one["seed"]) for one in own if one]


class KeptKeys(HeldClientKeys):
    """Keys that follow from what a client has kept, and from nothing that it draws for each message."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given, entropy=lambda size: b"")


def test_the_model_is_that_of_one_process_with_everybody_s_keys(tmp_path: Path, monkeypatch: Any) -> None:
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


def group_of(played: Halves) -> tuple[int, ...]:
    """The three of the round that comes."""
    return max(played.server.coming_plan().groups, key=len)


def test_a_group_with_a_silent_member_drops_out_and_nobody_else(tmp_path: Path) -> None:
    played = halves(tmp_path)
    silent, *_ = group_of(played)
    played.line.answered = lambda kind, client, fields: (
        {"refused": "busy"} if (kind, client) == ("contribute", silent) else fields
    )
    with pytest.warns(UserWarning, match=f"is left out, as \\[{silent}\\] of its group are silent"):
        record = played.round()
    assert record.num_received == 2  # who was silent had everybody else's, and the fourth needs none
    played.line.answered = None
    assert played.round().num_received == CLIENTS


def test_a_contribution_that_the_server_has_exchanged_is_refused(tmp_path: Path) -> None:
    """It has one of the right length, and no member's key."""
    played = halves(tmp_path)

    def tells(kind: str, client: int, fields: Fields) -> Fields:
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


@pytest.mark.parametrize("value", [None, "text", 1 << 40, b"short"])
def test_a_malformed_contribution_is_that_of_a_silent_member(value: Any, tmp_path: Path) -> None:
    played = halves(tmp_path)
    silent, *_ = group_of(played)
    played.line.answered = lambda kind, client, fields: (
        {"contributions": value} if (kind, client) == ("contribute", silent) else fields
    )
    with pytest.warns(UserWarning, match="of its group are silent"):
        assert played.round().num_received == 2
