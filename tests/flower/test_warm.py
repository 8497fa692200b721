"""What a client's process keeps from message to message, with a fault planted for each."""

import random
from dataclasses import replace

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.data.models import MLP
from lightning_fedq.flower import client_app
from lightning_fedq.mechanisms import LDPQ, CorBin
from lightning_fedq.privacy.target import PrivacyTarget
from tests.flower.loop import (
    CLIENTS,
    Digits,
    LoopGrid,
    Net,
    OwnDigits,
    clients,
    deployment,
    federated,
    module as plain_module,
    simulate,
)

pytestmark = pytest.mark.filterwarnings("ignore:node |register|round .* client|train. Training:UserWarning")
COIN = CorBin(epsilon_per_coordinate=4.0, shared_bits=5)


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


def deployed(tmp_path, module=plain_module, data=None, rounds=3, server=None, **options):
    own = data or (lambda context: OwnDigits(int(context.node_config["partition-id"])))
    apps = [client_app(module, own, federated(COIN, **options)) for _ in range(CLIENTS)]
    grid = LoopGrid(apps, [tmp_path / f"client-{client}" for client in range(CLIENTS)])
    one = deployment(federated(COIN, **options), rounds, tmp_path, module=server or module)
    return one.run(grid)[1].engine.weights


@pytest.mark.parametrize("plant", [one_number, one_tensor, one_module, one_in_a_container, new_draws])
def test_what_messages_have_in_common_is_copied_for_each(plant, tmp_path):
    """Its count would go on from message to message; in a simulation each client begins with the fit's."""
    expected = simulate(federated(COIN), 3, module=plant()()).engine.weights
    assert torch.equal(deployed(tmp_path, plant(), server=plant()), expected)


def test_data_that_messages_have_in_common_are_copied_for_each(tmp_path):
    whole = {client: Scaled(client, Number()) for client in range(CLIENTS)}
    shared = deployed(tmp_path / "a", data=lambda c: whole[int(c.node_config["partition-id"])])
    made = lambda c: Scaled(int(c.node_config["partition-id"]), Number())  # noqa: E731
    anew = deployed(tmp_path / "b", data=made)
    assert torch.equal(shared, anew)


def test_data_that_have_come_since_the_last_message_are_trained_on(tmp_path):
    held = []

    class Grows(OwnDigits):
        def setup(self, stage):
            super().setup(stage)
            self.samples.indices = self.samples.indices[: 16 + len(held)]

        def teardown(self, stage):
            held.append(len(self.samples))

    deployed(tmp_path, data=lambda context: Grows(int(context.node_config["partition-id"])), rounds=2)
    assert held[-CLIENTS:] == list(range(16 + len(held) - CLIENTS, 16 + len(held)))


def test_what_training_changes_and_no_update_carries_is_named(tmp_path):
    class Drifts(Net):
        def __init__(self, size):
            super().__init__(MLP(in_features=64, hidden=[16]), lr=0.1)
            self.register_buffer("mean", torch.zeros(size))

        def training_step(self, batch, batch_idx):
            if batch_idx == 3:  # not yet where it was tried
                self.mean += 1
            return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match="Training changed mean, which clients don't send"):
        deployed(tmp_path, lambda: seeded(Drifts, 3))


class Decays(pl.Callback):
    """A callback of the server's fit that changes what clients step with."""

    def on_train_epoch_start(self, trainer, pl_module):
        for group in trainer.optimizers[0].param_groups:
            group["weight_decay"] = 0.1 * trainer.current_epoch


def asked(tmp_path, mechanism=COIN, rounds=2, seed=5, callbacks=(), name="server"):
    """A server of these settings, in a folder of its own."""
    made = federated(mechanism, seed=seed)
    one = deployment(made, rounds, tmp_path, callbacks=list(callbacks))
    return replace(one, home=tmp_path / name)


def test_settings_of_a_task_hold_from_its_message_on(tmp_path):
    """Numbers of the server's optimisers, changed in mid-run, and back at the next server."""
    grid = LoopGrid(*clients(lambda: federated(COIN), tmp_path))
    for name, callbacks in (("changed", [Decays()]), ("plain", [])):
        expected = simulate(federated(COIN), 3, callbacks=callbacks).engine.weights
        one = asked(tmp_path, rounds=3, callbacks=callbacks, name=name)
        assert torch.equal(one.run(grid)[1].engine.weights, expected)


def test_settings_are_compared_with_those_of_each_server(tmp_path):
    """A process that has agreed with one server agrees with no other by that, nor does a refusal stay."""
    grid = LoopGrid(*clients(lambda: federated(COIN, seed=None), tmp_path))
    assert asked(tmp_path, rounds=1, seed=None).run(grid)[1].records[-1].num_received == CLIENTS
    with pytest.raises(RuntimeError, match=r"mechanism is CorBin\(epsilon_per_coordinate=4.0.*there"):
        asked(tmp_path, CorBin(epsilon_per_coordinate=3.0), seed=None, name="other").run(grid)
    records = asked(tmp_path, rounds=2, seed=None).run(grid)[1].records
    assert [record.num_received for record in records] == [CLIENTS] * 2


def test_a_client_s_own_settings_are_asked_for_each_message(tmp_path):
    """Its budget and its folder, by functions of Flower's context."""
    budgets = [1e6] * CLIENTS

    def budget(context):
        return PrivacyTarget(budgets[int(context.node_config["partition-id"])], 1e-5, "server")

    def tamper(kind, client, reply):
        if (kind, client) == ("train", 2):
            budgets[2] = 1e-3 if budgets[2] > 1.0 else 1e6
        return reply

    make = lambda: federated(LDPQ(epsilon_per_coordinate=0.5), seed=None)  # noqa: E731
    grid = LoopGrid(*clients(make, tmp_path, budget=budget), tamper)
    records = asked(tmp_path, LDPQ(epsilon_per_coordinate=0.5), 4, None).run(grid)[1].records
    assert [record.num_received for record in records] == [4, 3, 4, 3]
    for client in range(CLIENTS):  # to other folders, which hold the same
        grid.contexts[100 + client].node_config["fedq-home"] = str(tmp_path / f"moved-{client}")
        (tmp_path / f"client-{client}").rename(tmp_path / f"moved-{client}")
    assert (
        asked(tmp_path, LDPQ(epsilon_per_coordinate=0.5), 5, None).run(grid)[1].records[-1].num_received == 4
    )
