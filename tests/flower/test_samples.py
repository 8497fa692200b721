"""`DPSGD` at real clients: each has its own account, which outlives lost answers, kills and restarts."""

import pytest
import torch

from lightning_fedq import ClientEvaluation
from lightning_fedq.callbacks import DPSGD
from lightning_fedq.data.models import Classifier
from lightning_fedq.flower.local_round import LocalRound
from lightning_fedq.flower.records import from_record
from lightning_fedq.flower.store import Store
from lightning_fedq.flower.training_description import training_words
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.rounds import RoundServer
from tests.flower.loop import CLIENTS, LoopGrid, clients, deploy, deployment, federated, module, simulate
from tests.flower.test_killed import ROUNDS, after, before, dies_when, second, serve

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*fork:DeprecationWarning")


def make(**options):
    return federated(FedAvg(), **options)


def private(seed=None):
    return {"callbacks": [DPSGD(2.0, 1.0, delta=1e-3, seed=seed)]}


def trained(folder, rounds=2, lost=None, **options):
    seed = options.pop("dp_seed", None)
    grid = LoopGrid(*clients(lambda: make(**options), folder, trainer=private(seed)))
    if lost is not None:
        grid.tamper = lambda kind, client, reply: (
            None if (kind, client, grid.log.count((kind, client))) == lost else reply
        )
    _, server = deployment(make(**options), rounds, folder, **private(seed)).run(grid)
    return server


def account(folder, client, name="account"):
    """What the next message of a client goes on with."""
    store = Store(folder / f"client-{client}")
    found = store.get_tensors("state-open") or store.get_tensors("state")
    assert found is not None
    return found["state"].get(name, [])


def test_accounts_are_those_of_a_simulation(tmp_path):
    """And weights, where the noise follows from a seed."""
    (dpsgd,) = private(1)["callbacks"]
    expected, found = simulate(make(), 2, callbacks=[dpsgd]), trained(tmp_path, dp_seed=1)
    assert torch.equal(found.engine.weights, expected.engine.weights)
    for client in range(CLIENTS):
        history = [[*entry, 1.0] for entry in dpsgd.accounts[client].accountant.history]
        assert account(tmp_path, client, "account of a seed") == history


def test_noise_is_each_client_s_own(tmp_path):
    """Whatever seeds the federation has: two runs, and two clients of the same data, draw other noise."""
    one, other = (trained(tmp_path / name, 1) for name in ("one", "other"))
    assert not torch.equal(one.engine.weights, other.engine.weights)
    words = [training_words(private(), module)["callbacks"] for _ in range(2)]
    assert words[0] == words[1] == "DPSGD(2.0, 1.0, delta=0.001, seed=None)", "and no secret is compared"


def test_a_lost_answer_stays_paid_for(tmp_path):
    """It may have been read. Where a seed repeats the noise it is one payment, as in a simulation."""
    whole = trained(tmp_path / "whole")
    assert whole.records[0].num_received == 4
    server = trained(tmp_path / "lost", lost=("train", 2, 1))
    assert [record.num_received for record in server.records] == [3, 4]
    assert [account(tmp_path / "lost", c) for c in range(CLIENTS)] == [
        account(tmp_path / "whole", c) for c in range(CLIENTS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["charged", "answered", "stepped"])
def test_accounts_outlive_a_killed_server(phase, tmp_path):
    dies = {
        "charged": lambda: after(RoundServer, "start", second),
        "answered": lambda: before(RoundServer, "finish", second),
        "stepped": lambda: after(RoundServer, "finish", lambda server: server.round == 2),
    }
    whole = serve(make, tmp_path / "whole", trainer=private())
    assert whole is not None
    assert serve(make, tmp_path / "cut", dies[phase], trainer=private()) is None
    assert serve(make, tmp_path / "cut", trainer=private()) is not None
    ((noise, rate, steps, rows),) = account(tmp_path / "whole", 0)
    again = ROUNDS if phase == "charged" else ROUNDS + 1  # nobody had trained in it yet
    assert account(tmp_path / "cut", 0) == [[noise, rate, steps // ROUNDS * again, rows]]


@pytest.mark.slow
@pytest.mark.parametrize("point, counted", [("training", 2), ("kept", 3), ("encoded", 3)])
def test_a_killed_client_has_paid_for_what_may_have_been_sent(point, counted, tmp_path):
    whole = serve(make, tmp_path / "whole", trainer=private())
    found = serve(make, tmp_path / "cut", dying={2: dies_when(point)}, trainer=private())
    assert whole is not None and found is not None and found["received"] == [4, 3, 4]
    ((noise, rate, steps, rows),) = account(tmp_path / "whole", 2)
    assert account(tmp_path / "cut", 2) == [[noise, rate, steps // ROUNDS * counted, rows]]


def test_a_training_that_fails_is_not_told(tmp_path, monkeypatch):
    """Whether it does follows from the samples, and messages without a mechanism claim nothing of them."""

    def fails(self):
        raise ZeroDivisionError("sample 7 is bad")

    monkeypatch.setattr(LocalRound, "run_round", fails)
    refusals = []
    grid = LoopGrid(*clients(make, tmp_path, trainer=private()))
    grid.tamper = lambda kind, client, reply: (
        refusals.append(from_record(reply.content).get("refused")) or reply
    )
    _, server = deployment(make(), 1, tmp_path, **private()).run(grid)
    assert server.records[0].num_received == CLIENTS and not any(refusals)


def normed():
    torch.manual_seed(0)
    layers = [torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 10)]
    return Classifier(torch.nn.Sequential(*layers))


def test_what_does_not_go_together_is_refused_before_anybody_is_charged(tmp_path):
    with pytest.raises(RuntimeError, match=r"DPSGD can't work here\. The client's log has the reason"):
        deploy(make, 1, tmp_path, module=normed, theirs=private(), **private())
    with pytest.raises(RuntimeError, match=r"callbacks is DPSGD\(2.*seed=None\) here and none there"):
        deploy(make, 1, tmp_path, theirs=private())


def test_samples_are_not_measured_in_the_open(tmp_path):
    """A client that protects its samples keeps exact measurements, though the federation claims nothing."""
    server = trained(tmp_path, 1, evaluate_clients=ClientEvaluation(0.2))
    assert server.client_evaluations[0].values == {}
    assert (tmp_path / "client-0" / "measured.jsonl").exists()
