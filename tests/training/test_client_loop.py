"""A client trains in loops of its own, which are freed with it."""

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch

from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.fit import Batches, Client, ClientFit
from lightning_fedq.mechanisms import QSGD, CorBin, FedAvg, GaussianNoise
from lightning_fedq.rounds import RoundEngine
from lightning_fedq.training import round as one_round
from tests.digits_run import Classifier, Digits, make_trainer, weights_of

pytestmark = pytest.mark.filterwarnings("ignore")


def train():
    federated = Federated(FedAvg(), 4, seed=0, clients_per_step=1, diagnostics=False)
    make_trainer(federated).fit(Classifier(), datamodule=Digits(160))


def test_a_client_s_objects_are_freed_without_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    left, own = list[Any](), ClientFit.drop

    def drop(fit: ClientFit, client: Client) -> None:
        left.extend(map(weakref.ref, (client.module, client.trainer, client.trainer.fit_loop)))
        own(fit, client)

    monkeypatch.setattr(ClientFit, "drop", drop)
    gc.disable()
    try:
        train()
        assert len(left) == 3 * (4 * 2 + 1), "one has tried before the first round"
        assert not any(one() for one in left)
    finally:
        gc.enable()


def test_a_client_that_trains_twice_begins_its_batches_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, own = list[int](), ClientFit.train

    def twice(fit: ClientFit, client: Client, batches: Batches, *args: Any) -> None:
        kept = list(batches)
        for _ in range(2):
            own(fit, client, Batches(iter(kept), len(kept), None), *args)
            seen.append(client.trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    monkeypatch.setattr(ClientFit, "train", twice)
    train()
    assert set(seen) == {4}


@pytest.mark.parametrize("mechanism", [FedAvg(), CorBin(5.0), GaussianNoise(1.0, 0.5), QSGD()], ids=repr)
def test_updates_that_are_received_together_end_with_the_same_model(mechanism, monkeypatch):
    """Those of clients that train one at a time wait for each other where the sum has no order."""
    lengths, receive = [], RoundEngine.receive

    def counted(engine, clients, updates):
        lengths.append(len(clients))
        receive(engine, clients, updates)

    def fit():
        module = Classifier()
        federated = Federated(mechanism, 20, seed=0, clients_per_step=1)
        make_trainer(federated).fit(module, datamodule=Digits())
        return weights_of(module), [record.num_received for record in federated.records]

    monkeypatch.setattr(RoundEngine, "receive", counted)
    together, received = fit()
    assert (max(lengths) > 10) == mechanism.order_free
    lengths.clear()
    monkeypatch.setattr(one_round, "_AT_ONCE", 0)
    alone, one_by_one = fit()
    assert set(lengths) == {1}
    assert torch.equal(together, alone)
    assert received == one_by_one == [20, 20]


class AsksForItsLoops(Classifier):
    """Notes what is rarely asked of a client's Trainer."""

    seen: ClassVar[list] = []

    def training_step(self, batch, batch_idx):
        loop = self.trainer.fit_loop.epoch_loop
        if self.trainer.max_epochs and hasattr(self.trainer, "home"):
            steps = loop.manual_optimization.optim_step_progress.total.completed
            self.seen.append((steps, loop.val_loop, self.trainer.num_val_batches))
            assert loop.val_loop is loop.val_loop
            assert not hasattr(loop, "no_such_loop")
        return super().training_step(batch, batch_idx)


def test_loops_that_a_client_rarely_needs_are_made_when_it_asks():
    AsksForItsLoops.seen.clear()
    federated = Federated(FedAvg(), 4, seed=0, clients_per_step=1)
    make_trainer(federated).fit(AsksForItsLoops(), datamodule=Digits(40))
    steps, loops, batches = zip(*AsksForItsLoops.seen[-8:], strict=True)
    assert set(steps) == {0, 1}
    assert len(set(map(id, loops))) == 8
    assert all(length == [1] for length in batches)
