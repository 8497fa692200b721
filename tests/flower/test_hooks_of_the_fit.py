"""Hooks of the whole fit run at the server; a client's message runs what its training needs, and no more."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fedq._lightning import pl
from lightning_fedq.clients.client_trainer import is_client
from lightning_fedq.flower.client_app import client_app
from lightning_fedq.mechanisms import LDPQ, FedAvg
from tests.flower.loop import (
    CLIENTS,
    LoopGrid,
    Net,
    OwnDigits,
    clients,
    deploy,
    deployment,
    federated,
    module as plain,
    own_digits,
    simulate,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:node|register|the client's work is done:UserWarning", "ignore:round .*training failed"
)
ROUNDS = 3


def made(kind):
    """The model of `loop.module`, of a class with hooks."""

    def build():
        found = plain()
        found.__class__ = kind
        return found

    return build


class KeepsAndPutsBack(Net):
    """What the first round has left, it puts in again after later ones."""

    def on_round_end(self):
        first = next(self.parameters())
        if self.current_epoch == 0:
            self.kept = first.detach().clone()
        else:
            first.data.copy_(self.kept)


class EndsWithTheFit(Net):
    """Looks at what a fit has when it ends: a client has no validation."""

    def on_train_end(self):
        self.found = float(self.trainer.callback_metrics["val_acc"])

    def on_fit_end(self):
        assert self.found > 0.0

    def teardown(self, stage):
        assert self.found > 0.0


@pytest.mark.parametrize("kind", [KeepsAndPutsBack, EndsWithTheFit])
def test_a_server_s_hook_runs_at_no_client(kind, tmp_path):
    make = lambda: federated(FedAvg())  # noqa: E731
    expected = simulate(make(), ROUNDS, module=made(kind)())
    server = deploy(make, ROUNDS, tmp_path, module=made(kind))
    assert torch.equal(server.engine.weights, expected.engine.weights)


OF_A_MODULE = (
    *("prepare_data", "configure_callbacks", "setup", "configure_model", "configure_optimizers"),
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_round_end"),
    *("on_validation_start", "validation_step", "on_save_checkpoint", "on_train_end", "on_fit_end"),
    "teardown",
)
CALLS = Counter()


class Recording(Net):
    """Notes calls of hooks by the Trainer that makes them."""


def _noted(name):
    def call(self, *args, **kwargs):
        CALLS[name, "client" if is_client(self._trainer) else "fit"] += 1
        inherited = getattr(Net, name, None)
        return None if inherited is None else inherited(self, *args, **kwargs)

    return call


for _name in OF_A_MODULE:
    setattr(Recording, _name, _noted(_name))


class OfTheFit(pl.callbacks.GradientAccumulationScheduler):
    """A callback that clients need, too, with hooks of the end."""

    def __init__(self):
        super().__init__({0: 1})

    def on_train_end(self, trainer, pl_module):
        CALLS["on_train_end", "callback"] += 1

    on_fit_end = on_train_end


def test_what_a_message_runs_is_what_the_page_says(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "isolation.md").read_text()
    row = page.partition("| a message of a real client runs |")[2].partition("\n")[0]
    runs = {name for name in re.findall(r"`(\w+)`", row.partition("|")[0]) if name in OF_A_MODULE}
    app = client_app(made(Recording), own_digits, federated(FedAvg()), trainer={"callbacks": [OfTheFit()]})
    grid = LoopGrid([app] * CLIENTS, [tmp_path / str(client) for client in range(CLIENTS)])
    seen = []

    def tamper(kind, client, reply):
        if kind == "train":
            seen.append({name for name, where in CALLS})
        CALLS.clear()
        return reply

    grid.tamper = tamper
    server = deployment(federated(FedAvg()), 2, tmp_path, callbacks=[OfTheFit()], module=made(Recording))
    push = grid.push_messages

    def pushed(messages):
        CALLS.clear()
        return push(messages)

    grid.push_messages = pushed
    server.run(grid)
    assert len(seen) == 2 * CLIENTS and all(one == runs for one in seen), seen[0] ^ runs


class FailsLater(Net):
    """Works in the first round's messages and in one process, where a module lives on."""

    def on_train_epoch_start(self):
        if self.current_epoch == 0:
            self.scale = 0.5
        self.used = self.scale


class FailsAlways(Net):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("there is no such layer")


class FailsOnItsData(Net):
    """On numbers far below zero, which one client has."""

    def training_step(self, batch, batch_idx):
        if float(batch[0].min()) < -5.0:
            raise RuntimeError("sample 3 is damaged")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("seed", [5, None])
@pytest.mark.parametrize("kind", [FailsLater, FailsAlways])
def test_what_fails_by_code_alone_is_met_at_registration(kind, seed, tmp_path):
    make = lambda: federated(LDPQ(epsilon_per_coordinate=4.0), seed=seed)  # noqa: E731
    grid = LoopGrid(*clients(make, tmp_path, module=made(kind)))
    told = r"A second-round message fails here, whatever the data are\. The client's log"
    own = "has no attribute 'scale'" if kind is FailsLater else "no such layer"
    with pytest.warns(UserWarning, match=own), pytest.raises(RuntimeError, match=told):
        deployment(make(), ROUNDS, tmp_path, module=made(kind)).run(grid)
    assert {asked for asked, _ in grid.log} == {"register"}


class FarBelow(OwnDigits):
    def train_dataloader(self):
        samples = [(image - 10.0, label) for image, label in self.samples]
        return DataLoader(samples, batch_size=16, shuffle=True)


@pytest.mark.filterwarnings("ignore:a trial of a second-round message:UserWarning")
def test_what_fails_by_data_is_told_to_the_site_alone(tmp_path):
    make = lambda: federated(LDPQ(epsilon_per_coordinate=4.0), seed=None)  # noqa: E731
    apps, homes = clients(make, tmp_path, module=made(FailsOnItsData))
    apps[2] = client_app(made(FailsOnItsData), lambda context: FarBelow(2), make())
    replies = []

    def tamper(kind, client, reply):
        replies.append(repr(reply))
        return reply

    grid = LoopGrid(apps, homes, tamper)
    told = "second-round message on two batches fails on this client's data: RuntimeError: sample 3"
    with pytest.warns(UserWarning, match=told):
        _, server = deployment(make(), ROUNDS, tmp_path, module=made(FailsOnItsData)).run(grid)
    assert [record.num_received for record in server.records] == [CLIENTS] * ROUNDS
    assert not any("damaged" in reply or "fails" in reply for reply in replies)
    lines = (homes[2] / "failed.jsonl").read_text().splitlines()
    assert len(lines) == ROUNDS and all("RuntimeError: sample 3 is damaged" in line for line in lines)
    assert apps[2].failures.line() == (
        "3 of 3 trainings have failed here, and the server does not know. The last one, in round 3: "
        "RuntimeError: sample 3 is damaged"
    )
    assert apps[1].failures.line() == "" and not (homes[1] / "failed.jsonl").exists()
