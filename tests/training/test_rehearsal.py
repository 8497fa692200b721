import pytest
import torch
from torch import nn

from lightning_fedq.callbacks import Federated
from lightning_fedq.clients import stack_size
from lightning_fedq.clients.forks import find_fork_obstacle
from lightning_fedq.clients.stale import digests
from lightning_fedq.mechanisms import LDPQ, FedAvg
from tests.digits_run import Classifier, Digits, make_trainer, weights_of


def test_the_run_does_not_notice_the_rehearsal():
    """The chosen stack by rehearsal and the same by number: bit for bit the same run."""
    calls = []

    class Counting(Classifier):
        def training_step(self, batch, batch_idx):
            calls.append(batch_idx)
            return super().training_step(batch, batch_idx)

    runs = []
    for clients_per_step in ("auto", 6):
        fed, module = Federated(FedAvg(), 6, seed=0, clients_per_step=clients_per_step), Counting()
        trainer = make_trainer(fed, max_epochs=2)
        trainer.fit(module, datamodule=Digits(60))
        runs.append((fed.clients_per_step_chosen, weights_of(module)))
    assert runs[0][0] == runs[1][0] == 6
    assert torch.equal(runs[0][1], runs[1][1])
    assert len(calls) == 4 or find_fork_obstacle(trainer), "one a round: what is tried is done in forks"


@pytest.mark.parametrize(
    ("width", "num_clients", "chosen"), [(8, 6, 6), (8, 3, 1), (4000, 6, 1)], ids=["small", "few", "large"]
)
def test_the_automatic_choice_follows_from_sizes(width, num_clients, chosen, monkeypatch, caplog):
    monkeypatch.setitem(stack_size._STEP_FLOPS, "cpu", 1e6)
    fed = Federated(FedAvg(), num_clients, seed=0)
    module = Classifier(nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10)))
    with caplog.at_level("INFO"):
        make_trainer(fed, max_epochs=1).fit(module, datamodule=Digits(120))
    assert fed.clients_per_step_chosen == chosen
    assert f"clients_per_step = {chosen}" in caplog.text


@pytest.mark.parametrize(("cheap", "chosen"), [(1e12, 9), (0.0, 5)], ids=["cheap steps", "dear steps"])
def test_stacks_of_cheap_steps_are_larger_than_their_memory_allows_for(cheap, chosen, monkeypatch):
    """The same integers are summed, so that the model is the same."""
    runs = []
    for wanted in ("auto", 9):
        held = sum(p.numel() for p in Classifier().parameters())
        monkeypatch.setitem(stack_size._STACK_VALUES, "cpu", 5 * held)
        monkeypatch.setitem(stack_size._CHEAP_FLOPS, "cpu", cheap)
        fed, module = Federated(LDPQ(4.0), 9, seed=0, clients_per_step=wanted), Classifier()
        make_trainer(fed, max_epochs=1).fit(module, datamodule=Digits(90))
        runs.append((fed.clients_per_step_chosen, weights_of(module)))
    assert [size for size, _ in runs] == [chosen, 9]
    assert torch.equal(runs[0][1], runs[1][1])


def test_a_training_step_without_a_batch_index_is_mapped():
    class Bare(Classifier):
        def training_step(self, batch):
            return nn.functional.cross_entropy(self.backbone(batch[0]), batch[1])

    class Renamed(Classifier):
        def training_step(self, batch, number):
            return nn.functional.cross_entropy(self.backbone(batch[0]), batch[1])

    for kind in (Bare, Renamed):
        results = []
        for size in (1, 6):
            fed, module = Federated(FedAvg(), 6, seed=0, clients_per_step=size), kind()
            make_trainer(fed).fit(module, datamodule=Digits(60))
            assert fed.clients_per_step_chosen == size
            results.append(weights_of(module))
        torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)


def test_objects_that_lead_to_each_other_are_looked_at_once():
    nodes = [type("Node", (), {})() for _ in range(20)]
    for node in nodes:
        node.near = nodes
    assert len(digests(nodes, "nodes")) < 100
