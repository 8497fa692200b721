"""What a client's process keeps from message to message, with a fault planted for each."""

import random

import pytest
import torch

from lightning_fedq.clients.fit import ClientFit
from lightning_fedq.data.models import MLP
from lightning_fedq.flower import client_app
from lightning_fedq.mechanisms import CorBin
from tests.flower.loop import (
    CLIENTS,
    Digits,
    LoopGrid,
    Net,
    OwnDigits,
    deployment,
    federated,
    module as plain_module,
    simulate,
)

pytestmark = pytest.mark.filterwarnings("ignore:node |register|round .* client|train. the:UserWarning")
COIN = CorBin(epsilon=4.0, shared_bits=5)


class Counts(Net):
    """Steps less with each batch that something has counted."""

    def __init__(self, seen):
        super().__init__(MLP(in_features=64, hidden=[16]), lr=0.1)
        self.seen = seen

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx) / float(self.seen)


class Number:
    """A count in an object."""

    def __init__(self):
        self.value = 0

    def __iadd__(self, more):
        self.value += more
        return self

    def __float__(self):
        return float(self.value)


class Draws(Counts):
    """Steps as a generator of its own says."""

    def training_step(self, batch, batch_idx):
        return Net.training_step(self, batch, batch_idx) * (0.5 + self.seen.random())


class Scaled(OwnDigits):
    """Data that fade with each batch that anybody has read from them."""

    def __init__(self, client, seen):
        super().__init__(client)
        self.seen = seen

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.seen += 1
        return batch[0] / float(self.seen), batch[1]


class ScaledWhole(Digits):
    """The same, of all clients."""

    on_after_batch_transfer = Scaled.on_after_batch_transfer


def seeded(kind, seen):
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return kind(seen)


def one_number():
    seen = Number()
    return lambda: seeded(Counts, seen)


def one_tensor():
    seen = torch.zeros(())
    return lambda: seeded(Counts, seen)


def one_module():
    one = seeded(Counts, Number())
    return lambda: one


def one_in_a_container():
    class Deep(Counts):
        def training_step(self, batch, batch_idx):
            self.seen[0]["batches"] += 1
            return Net.training_step(self, batch, batch_idx) / float(self.seen[0]["batches"])

    seen = {"batches": Number()}
    return lambda: seeded(Deep, [seen])


def new_draws():
    return lambda: seeded(Draws, random.Random(5))


@pytest.fixture
def worlds(monkeypatch):
    """For each world that is made, the kind of the message."""
    made, make = [], ClientFit._world

    def noted(fit, alone):
        made.append(grids[-1].log[-1][0] if grids else "none")
        return make(fit, alone)

    grids = []
    monkeypatch.setattr(ClientFit, "_world", noted)
    return made, grids


def deployed(tmp_path, worlds, module=plain_module, data=None, rounds=3, server=None, **options):
    own = data or (lambda context: OwnDigits(int(context.node_config["partition-id"])))
    apps = [client_app(module, own, federated(COIN, **options)) for _ in range(CLIENTS)]
    worlds[1].append(LoopGrid(apps, [tmp_path / f"client-{client}" for client in range(CLIENTS)]))
    one = deployment(federated(COIN, **options), rounds, tmp_path, module=server or module)
    return one.run(worlds[1][-1])[1].engine.weights


def test_a_message_trains_its_own_module_and_writes_no_world(tmp_path, worlds):
    expected = simulate(federated(COIN), 3).engine.weights
    del worlds[0][:]
    assert torch.equal(deployed(tmp_path, worlds), expected)
    assert set(worlds[0]) == {"register"}


@pytest.mark.parametrize("plant", [one_number, one_tensor, one_module, one_in_a_container, new_draws])
def test_what_messages_have_in_common_is_copied_for_each(plant, tmp_path, worlds):
    """Its count would go on from message to message; in a simulation each client begins with the fit's."""
    expected = simulate(federated(COIN), 3, module=plant()()).engine.weights
    assert torch.equal(deployed(tmp_path, worlds, plant(), server=plant()), expected)
    assert "train" in worlds[0]


def test_data_that_messages_have_in_common_are_copied_for_each(tmp_path, worlds):
    whole = {client: Scaled(client, Number()) for client in range(CLIENTS)}
    shared = deployed(tmp_path / "a", worlds, data=lambda c: whole[int(c.node_config["partition-id"])])
    assert "train" in worlds[0]
    made = lambda c: Scaled(int(c.node_config["partition-id"]), Number())  # noqa: E731
    anew = deployed(tmp_path / "b", worlds, data=made)
    assert torch.equal(shared, anew)


def test_data_that_have_come_since_the_last_message_are_trained_on(tmp_path, worlds):
    held = []

    class Grows(OwnDigits):
        def setup(self, stage):
            super().setup(stage)
            self.samples.indices = self.samples.indices[: 16 + len(held)]

        def teardown(self, stage):
            held.append(len(self.samples))

    deployed(tmp_path, worlds, data=lambda context: Grows(int(context.node_config["partition-id"])), rounds=2)
    assert set(worlds[0]) == {"register"}
    assert held[-CLIENTS:] == list(range(16 + len(held) - CLIENTS, 16 + len(held)))


def test_what_training_changes_and_no_update_carries_is_named_without_a_world(tmp_path, worlds):
    """The module is the one that has trained: what it was is kept beside."""

    class Drifts(Net):
        def __init__(self, size):
            super().__init__(MLP(in_features=64, hidden=[16]), lr=0.1)
            self.register_buffer("mean", torch.zeros(size))

        def training_step(self, batch, batch_idx):
            if batch_idx == 3:  # not yet where it was tried
                self.mean += 1
            return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match="training changed mean, which no update carries"):
        deployed(tmp_path, worlds, lambda: seeded(Drifts, 3))
