"""Numbers of a server that a client loops over, or keeps for ever: agreed at registration, and bounded."""

import json
from dataclasses import replace

import pytest
import torch

from lightning_fedq.flower.local_round import LocalRound
from lightning_fedq.flower.remote_client import ClientConfig, RemoteClient
from lightning_fedq.flower.roster import Roster
from lightning_fedq.flower.round_inputs import RoundInputs
from lightning_fedq.flower.settings import MOST_ROUNDS, RefusedError, server_rounds
from lightning_fedq.flower.store import Store
from lightning_fedq.mechanisms import CorBin, FedAvg
from lightning_fedq.rounds import RoundTask
from tests.flower.halves import Halves
from tests.flower.loop import CLIENTS, Net, OwnDigits, deploy, federated, module

pytestmark = pytest.mark.filterwarnings("ignore:client|confirm|unmask|train|register|masked|node:UserWarning")
COIN = CorBin(epsilon_per_coordinate=4.0, shared_bits=5)


def lying(change):
    """What a server sends in place of its question, by a change of the round's task."""

    def tells(kind, client, fields):
        if kind != "train":
            return fields
        return {**fields, "task": replace(RoundTask.from_bytes(fields["task"]), **change).to_bytes()}

    return tells


@pytest.mark.parametrize(
    "change, agreed",
    [
        *(({"round": 1 << 31}, 7), ({"round": 7}, 7), ({"round": -1}, 7), ({"attempt": 1 << 20}, 7)),
        ({"round": MOST_ROUNDS}, None),  # without a number there is a limit
    ],
    ids=str,
)
def test_a_round_beyond_the_agreed_ones_is_refused_and_costs_nothing(change, agreed, tmp_path):
    """Round 2^31 was answered, and every honest round after it refused as used."""
    told = {} if agreed is None else {"rounds": agreed}
    played = Halves(federated(COIN, seed=None), tmp_path, change=lambda p: p.roster._settings.update(told))
    played.line.tells = lying(change)
    assert played.round().num_received == 0
    assert "the agreed run has" in str(played.line.answers["train", 1])
    played.line.tells = lambda kind, client, fields: fields
    assert played.round().num_received == 4


def test_more_rounds_are_agreed_when_the_server_is_started_again(tmp_path):
    """And no more than the client's own Trainer says."""
    settings = federated(COIN, seed=None)
    played = Halves(settings, tmp_path, change=lambda p: p.roster._settings.update(rounds=2))
    kept = Store(tmp_path / "client-1")
    assert kept.get("keys")["rounds"] == 2
    Roster(settings, played.line, Store(tmp_path / "server"), {}, None, 5).gather(1.0)
    assert kept.get("keys")["rounds"] == 5
    client = played.client(1)
    client._trainer = {"max_epochs": 3}
    told = {"federation": bytes(32), "server": bytes(32), "nonce": bytes(32), "rounds": 4}
    with pytest.raises(RefusedError, match="run has 4 rounds, but this client answers at most 3"):
        client.answer("register", told)


@pytest.mark.parametrize(
    "field, value", [("server", bytes(32)), ("server", b"k"), ("federation", b"f" * 1000), ("nonce", b"")]
)
def test_a_registration_that_no_server_sends_binds_nobody(field, value, tmp_path):
    """A client kept the federation's name and key as they came, for ever, before it found them useless."""

    def change(played):
        told = {"federation": b"f" * 32, "server": bytes(range(32)), "nonce": bytes(32), field: value}
        assert "refused" in played.client(1).reply("register", told)

    assert Halves(federated(COIN, seed=None), tmp_path, change=change).round().num_received == 4


@pytest.mark.parametrize("number", [0, CLIENTS, -1, 1 << 40])
def test_the_number_of_another_client_is_not_kept(number, tmp_path):
    """The first message named the owner of the folder's log, for ever."""
    played = Halves(federated(COIN, seed=None), tmp_path)
    played.line.tells = lambda kind, client, fields: {**fields, "client": number} if client == 1 else fields
    assert played.round().num_received == 3
    assert "calls this client number" in str(played.line.answers["train", 1])
    played.line.tells = lambda kind, client, fields: fields
    assert played.round().num_received == 4


def test_a_round_to_measure_is_one_of_the_run_and_is_kept_once(tmp_path):
    from tests.flower.test_remote_evaluator import settings

    client = RemoteClient(
        ClientConfig(settings(client_metrics="local"), Store(tmp_path), 1),
        module,
        lambda: OwnDigits(1),
        {"max_epochs": 9},
    )
    weights = torch.zeros(sum(p.numel() for p in module().parameters())).numpy().tobytes()
    told = {"client": 1, "weights": weights, "dtype": "float32"}
    for round in (3, 4, 3):
        assert client.answer("evaluate", {**told, "round": round}) == {}
    for round in (9, 1 << 40, -1):
        with pytest.raises(RefusedError, match="the agreed run has"):
            client.answer("evaluate", {**told, "round": round})
    lines = (tmp_path / "measured.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [5, 4]


class Searches(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=1, max_iter=2)


@pytest.mark.parametrize(
    "name, value", [("max_iter", 10**9), ("history_size", 10**9), ("lr", [1]), ("max_eval", None)]
)
def test_a_server_sets_rates_and_no_counts(name, value):
    """L-BFGS steps as often as its group says, and the server sends groups."""
    fed = federated(FedAvg(), num_clients=1)
    weights = torch.zeros(sum(p.numel() for p in module().parameters()))
    task = RoundTask(
        0, 0, ((0,),), tuple(p.numel() for p in module().parameters()), *torch.ones(2, 4).double()
    )

    def train(groups):
        told = RoundInputs.from_fields({"groups": json.dumps([[groups]])}, {})
        made = Searches(module().backbone, lr=0.1)
        return LocalRound(fed, 0, 5, task, weights, told).run(made, OwnDigits(0), {"accelerator": "cpu"})

    assert train({"lr": 0.5, "max_iter": 2}).update.any()
    with pytest.raises(RefusedError, match=f"Optimiser option {name} is .* here, but the server sends"):
        train({name: value})


@pytest.mark.parametrize(
    "given, rounds",
    [({}, 1000), ({"max_epochs": 7}, 7), ({"max_steps": 30}, 30), ({"max_epochs": -1}, MOST_ROUNDS)],
)
def test_rounds_of_a_server(given, rounds):
    assert server_rounds(given) == rounds
    with pytest.raises(ValueError, match="Set a smaller max_epochs"):
        server_rounds({"max_epochs": MOST_ROUNDS + 1})


def test_a_deployment_says_its_rounds(tmp_path):
    new = lambda: federated(COIN, seed=None)  # noqa: E731
    with pytest.raises(RuntimeError, match="run has 3 rounds, but this client answers at most 2"):
        deploy(new, 3, tmp_path, theirs={"max_epochs": 2}, patience=0.0)
    assert deploy(new, 2, tmp_path, theirs={"max_epochs": 2}).records[-1].num_received == CLIENTS
    assert Store(tmp_path / "client-2").get("keys")["rounds"] == 2
