"""A client whose training or data fail: what of it reaches the server."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedq.flower import client_app
from lightning_fedq.mechanisms import LDPQ, CorBin, FedAvg
from lightning_fedq.rounds import RoundTask
from lightning_fedq.secagg import SecAgg
from tests.flower.halves import DIM, Halves, Still, identities, update_of
from tests.flower.loop import CLIENTS, LoopGrid, OwnDigits, deployment, federated, module
from tests.flower.test_own_budget import budget_for

SECRET = 0.7324


def fails_above(self, fields, task, weights):
    """Client 2's training fails where the server's weights are above a number that only it knows."""
    if fields["client"] == 2 and float(weights[0]) > SECRET:
        raise ValueError("the loss of sample 3 is not a number")
    return update_of(fields["client"])


@pytest.mark.filterwarnings("ignore:train|node|client|round .* BudgetSpent:UserWarning")
@pytest.mark.parametrize("secagg", [None, SecAgg()])
def test_a_training_that_fails_is_no_oracle(secagg, tmp_path, monkeypatch):
    """A server that bisects a client's data by weights for which the training fails, at a cost of nothing."""
    monkeypatch.setattr(Still, "update", fails_above)
    settings = federated(LDPQ(epsilon_per_coordinate=0.5), seed=None, secure_aggregation=secagg)
    played = Halves(settings, tmp_path, budgets={2: budget_for(2)})
    weights = [0.5, 0.75, 0.5]  # below and above

    def tells(kind, client, fields):
        if kind == "train" and client == 2:
            return {**fields, "weights": torch.full((DIM,), weights[len(kinds)]).numpy().tobytes()}
        return fields

    played.line.tells = tells
    kinds = []
    with pytest.warns(UserWarning, match=r"loss of sample 3 is not a number\. Training failed, so a"):
        for _ in range(2):
            played.round()
            answer = played.line.answers["train", 2]
            kinds.append({name: len(value) for name, value in answer.items()})
    assert kinds[0] == kinds[1] and "refused" not in kinds[0]
    played.round()
    assert played.line.answers["train", 2] == {"refused": "train: declined"}  # both were paid for


@pytest.mark.filterwarnings("ignore:train|round 1:UserWarning")
@pytest.mark.parametrize("mechanism, seed", [(FedAvg(), None), (LDPQ(epsilon_per_coordinate=0.5), 5)])
def test_where_nothing_is_claimed_the_server_is_told(mechanism, seed, tmp_path, monkeypatch):
    monkeypatch.setattr(Still, "update", lambda *args: [][0])
    played = Halves(federated(mechanism, seed=seed), tmp_path)
    with pytest.warns(UserWarning, match="list index out of range"):
        played.round()
    assert "Training failed" in played.line.answers["train", 0]["refused"]


@pytest.mark.filterwarnings("ignore:node|the training samples can't|register:UserWarning")
@pytest.mark.parametrize("error", [ValueError, OSError, KeyError])
def test_data_that_cannot_be_counted_stay_with_the_client(error: Any, tmp_path: Path) -> None:
    """At registration, where the mean is weighted by samples; `client_app` in Flower's own messages."""

    class Damaged(OwnDigits):
        def setup(self, stage):
            raise error("could not convert 'HIV positive' to float, line 3")

    def make():
        return federated(FedAvg(), weighting="samples")

    apps = [client_app(module, lambda context: Damaged(0), make()) for _ in range(CLIENTS)]
    replies = []

    def tamper(kind, client, reply):
        replies.append(repr(reply))
        return reply

    with pytest.warns(UserWarning, match="HIV positive"), pytest.raises(RuntimeError) as refused:
        deployment(make(), 1, tmp_path).run(LoopGrid(apps, [None] * CLIENTS, tamper))
    assert replies and not any("HIV" in reply for reply in replies)
    assert "HIV" not in str(refused.value) and "The client's log has the reason" in str(refused.value)


def test_words_of_any_other_error_stay_with_the_client(tmp_path):
    """Flower tells the server the words of what a `ClientApp` raises."""
    played = Halves(federated(LDPQ(epsilon_per_coordinate=0.5), seed=None), tmp_path)
    client = played.client(0)
    client.register = lambda fields: {}["HIV positive"]
    asked = {"federation": b"", "server": b"", "nonce": b""}
    with pytest.warns(UserWarning, match="register: KeyError: 'HIV"), pytest.warns(match="has the reason"):
        assert client.reply("register", asked) == {
            "refused": "register: KeyError. The client's log has the reason."
        }


@pytest.mark.filterwarnings("ignore:train|shares|masked|confirm|unmask|register|explain:UserWarning")
@pytest.mark.parametrize("kind", ["register", "train", "shares", "masked", "confirm", "unmask"])
def test_fields_of_another_kind_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """A third of such refusals said "KeyError" alone; an integer in place of weights took a gigabyte."""
    settings = federated(
        CorBin(epsilon_per_coordinate=4.0), seed=None, secure_aggregation=SecAgg(active=True)
    )
    asked = {}

    def change(played):
        def tells(kind, client, fields):
            asked.setdefault(kind, dict(fields))
            return fields

        played.line.tells = tells

    played = Halves(settings, tmp_path, identities(), change=change)
    assert played.round().num_received == 4
    client, names = played.client(0), sorted(n for n in asked[kind] if not n.startswith("setting"))
    assert names
    for name in names:
        for value in (None, "text", 7, 1 << 30, 0.5, [0.5], True):
            fields = {n: v for n, v in {**asked[kind], name: value}.items() if v is not None}
            if name == "signatures" and value is None:
                continue
            if type(value) is type(asked[kind][name]):
                continue
            told = client.reply(kind, fields)
            assert set(told) == {"refused"} and f"Field {name!r} must be" in told["refused"]
    assert "Unknown kind of message" in client.reply("explain", {})["refused"]
    assert "float32 or float64" in client.reply("train", {**asked["train"], "dtype": "float8"})["refused"]


@pytest.mark.filterwarnings("ignore:train|node:UserWarning")
@pytest.mark.parametrize("lie", ["a used stream", "another length"])
def test_nobody_trains_for_nothing(lie, tmp_path, monkeypatch):
    """How long a training takes is seen by the server; asked again, or with a task that can't be answered,
    a client trained all the same, and paid nothing for it."""
    played, trained = Halves(federated(LDPQ(epsilon_per_coordinate=0.5), seed=None), tmp_path), list[int]()
    played.round()
    _, asked = played.questions()

    def update(self, fields, task, weights):
        trained.append(fields["client"])
        return update_of(fields["client"])

    monkeypatch.setattr(Still, "update", update)
    task = RoundTask.from_bytes(asked[2]["task"])
    used, length = (0, DIM) if lie == "a used stream" else (1, DIM + 1)
    told = RoundTask(used, 0, task.groups, (length,), task.center, task.radius)
    answer = played.client(2).reply("train", {**asked[2], "task": told.to_bytes()})
    words = "this client has answered round" if lie == "a used stream" else "Both sides need the same module"
    assert words in answer["refused"] and not trained
    assert set(played.client(2).reply("train", asked[2])) == {"answer"} and trained == [2]
