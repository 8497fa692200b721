"""A deployed client with a budget of its own; what it counts is in `tests/rounds/test_client_budget.py`."""

import json
import os
import shutil

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lightning_fedq.flower import client_app
from lightning_fedq.flower.remote_client import ClientConfig
from lightning_fedq.flower.store import Store
from lightning_fedq.keys.party_keys import Identities
from lightning_fedq.mechanisms import LDPQ, CorBin
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import RoundTask
from lightning_fedq.secagg import SecAgg
from tests.flower.halves import DIM, Halves, Still
from tests.flower.loop import CLIENTS, LoopGrid, clients, deployment, federated, module, own_digits

pytestmark = pytest.mark.filterwarnings("ignore:node |train|round .* client:UserWarning")
COIN, DELTA = LDPQ(epsilon_per_coordinate=0.5), 1e-5


def budget_for(messages, dim=DIM):
    """Room for so many messages of one bit a coordinate, by the accountant."""
    (claim,) = (c for c in COIN.claims(_context(dim)) if c.adversary is Adversary.SERVER)
    found = spent(claim.loss, DELTA, compositions=claim.compositions, rounds=messages)
    return PrivacyTarget(found.epsilon * 1.0001, DELTA, "server")


def _context(dim):
    one = torch.ones(1, dtype=torch.float64)
    return RoundTask(0, 0, tuple((c,) for c in range(CLIENTS)), (dim,), 0.0 * one, one).context()


def coin(**options):
    return federated(COIN, seed=None, **options)


@pytest.mark.parametrize("secagg", [None, SecAgg()])
def test_a_server_that_asks_for_more_rounds_than_agreed(secagg, tmp_path):
    """Client 2 pays for two rounds. Every message finds a new process here, so it counts by its own log."""
    played = Halves(coin(secure_aggregation=secagg), tmp_path, budgets={2: budget_for(2)})
    assert [played.round().num_received for _ in range(2)] == [4, 4]
    for _ in range(2):
        with pytest.warns(
            UserWarning, match="BudgetSpentError: .* this client's budget is epsilon .* 2 messag"
        ):
            assert played.round().num_received == 3
        assert played.line.answers["train", 2] == {"refused": "train: declined"}  # and not a word more
    lines = (tmp_path / "client-2" / "streams.jsonl").read_text().splitlines()[1:]
    assert [json.loads(line)["round"] for line in lines] == [0, 1]
    assert played.server.ledger.charges.tolist() == [4, 4, 4, 4]  # the server may count more, never less


def test_a_copy_of_a_client_s_folder(tmp_path):
    """With a log of its own it sent a third message at a budget for two: epsilon 35.7 in place of 26.7."""
    played = Halves(coin(), tmp_path, budgets={2: budget_for(2)})
    assert played.round().num_received == 4
    shutil.copytree(tmp_path / "client-2", tmp_path / "copy")
    assert played.round().num_received == 4
    honest = played.line.clients
    copied = Still(ClientConfig(played.federated, Store(tmp_path / "copy"), 2, None, budget_for(2)))
    played.line.clients = lambda number: copied if number == 2 else honest(number)
    with pytest.warns(UserWarning, match="client-2, which still exists and shares its keys and budget"):
        assert played.round().num_received == 3
    # whoever has lost the first goes on with what the copy knows
    (tmp_path / "client-2" / "keys.json").unlink()
    assert played.round().num_received == 4


def test_a_server_that_forgets_what_it_has_asked(tmp_path):
    """A new server object begins again at round 0, and with rounds that it makes up."""
    played = Halves(coin(), tmp_path, budgets={2: budget_for(2)})
    played.round()

    def tells(kind, client, fields):
        if kind == "train" and client == 2:
            task = RoundTask.from_bytes(fields["task"])
            told.append(RoundTask(rounds.pop(0), 0, task.groups, task.segments, task.center, task.radius))
            return {**fields, "task": told[-1].to_bytes()}
        return fields

    told = []
    rounds = [0, 50, 51, 10**6]
    played.line.tells = tells
    answers = []
    for _ in range(4):
        with pytest.warns(UserWarning):
            played.round()
        answers.append(played.line.answers["train", 2])
    assert "but this client has answered round" in answers[0]["refused"]
    assert set(answers[1]) == {"answer"}
    assert answers[2:] == [{"refused": "train: declined"}] * 2


def test_a_folder_without_its_log_is_refused(tmp_path):
    """The keys are there and what they have encoded is not: every stream could be used again."""
    played = Halves(coin(), tmp_path)
    assert played.round().num_received == 4
    (tmp_path / "client-2" / "streams.jsonl").unlink()
    with pytest.warns(UserWarning, match=r"streams.jsonl is missing, .* Restore the file, or begin"):
        assert played.round().num_received == 3
    assert not (tmp_path / "client-2" / "streams.jsonl").exists()


def test_a_folder_that_is_set_back_draws_new_coins(tmp_path):
    """All machines are put back to an old copy of their folders: the log has forgotten what it had used."""
    played = Halves(coin(), tmp_path / "now")
    _, asked = played.questions()
    shutil.copytree(tmp_path / "now", tmp_path / "copy")
    first = played.line.clients(2).reply("train", asked[2])["answer"]
    shutil.rmtree(tmp_path / "now")
    shutil.copytree(tmp_path / "copy", tmp_path / "now")
    again = played.line.clients(2).reply("train", asked[2])["answer"]
    assert first[:40] == again[:40] and len(first) == len(again)  # the same round and attempt
    assert first != again


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_all_files_of_a_client_are_for_its_owner_alone(tmp_path):
    """Also in a folder that somebody else has made, which others may enter."""
    (tmp_path / "client-2").mkdir(mode=0o755)
    played = Halves(coin(secure_aggregation=SecAgg()), tmp_path)
    cohort, questions = played.questions()
    cohort.ask("train", questions)
    files = {file.name: oct(file.stat().st_mode & 0o777) for file in (tmp_path / "client-2").iterdir()}
    assert set(files) == {"keys.json", "round.json", "streams.jsonl", "symbols.pt"}
    assert set(files.values()) == {"0o600"}


def test_in_flower_s_own_app(tmp_path):
    """Of client 1's node configuration, through `client_app`, with a restart of the server in between."""
    dim = sum(parameter.numel() for parameter in module().parameters())

    def budget(context):
        return budget_for(1 if context.node_config["partition-id"] == 1 else 3, dim)

    apps, homes = clients(coin, tmp_path, budget=budget)
    _, server = deployment(coin(), 1, tmp_path).run(LoopGrid(apps, homes))
    assert [record.num_received for record in server.records] == [4]
    with pytest.warns(UserWarning, match="Node 101 refuses: train: declined"):
        _, server = deployment(coin(), 2, tmp_path).run(LoopGrid(apps, homes))
    assert [record.num_received for record in server.records] == [4, 3]


def test_a_budget_that_a_client_cannot_know_is_refused_at_once():
    def app(settings, **options):
        return client_app(module, own_digits, settings, **options)

    target = PrivacyTarget(1.0, DELTA, "server")
    with pytest.raises(ValueError, match="keys from a seed hide nothing"):
        app(federated(COIN), budget=target)
    pairs = federated(CorBin(4.0, 5), seed=None)
    with pytest.raises(
        ValueError, match=r"Give the client identities, or a budget with adversary='server_and"
    ):
        app(pairs, budget=target)
    own = Ed25519PrivateKey.generate()
    app(pairs, budget=target, identities=lambda context: Identities(own, {0: own.public_key()}))
    app(pairs, budget=PrivacyTarget(1.0, DELTA, "server_and_partner"))
    with pytest.raises(ValueError, match=r"Use SecAgg\(active=True\)"):
        app(coin(secure_aggregation=SecAgg()), budget=PrivacyTarget(1.0, DELTA, "secagg_server"))
    identities = lambda context: Identities(own, {0: own.public_key()})  # noqa: E731
    settings = coin(secure_aggregation=SecAgg(active=True))
    app(settings, budget=PrivacyTarget(1.0, DELTA, "secagg_server"), identities=identities)
