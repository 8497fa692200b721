"""Callbacks and hooks that mean something else in a federation are said before round 1 and on the page."""

import logging

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, RunFolder
from lightning_fedq.mechanisms import FedAvg, GaussianNoise
from tests.digits_run import Classifier, Digits, make_trainer


def run(*callbacks, module=None, mechanism=None, seed=1):
    federated = Federated(mechanism or FedAvg(), 4, seed=seed, clients_per_step=1)
    trainer = make_trainer(federated, *callbacks, max_epochs=1)
    trainer.fit(module or Classifier(), datamodule=Digits(80))
    return federated


class Probe(pl.Callback):
    """Trains on each client's batches."""

    is_shared_by_clients = True

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.last = batch


class Copied(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pass


def test_a_callback_that_is_shared_by_clients_is_named_on_the_page(tmp_path):
    folder = RunFolder("run", root=tmp_path, show=False)
    run(Probe(), folder, mechanism=GaussianNoise(1.0, 1.0), seed=None)
    page = (tmp_path / "run" / "privacy.md").read_text()
    assert (
        "`Probe` keeps, logs or saves. One object with is_shared_by_clients = True sees the raw batches"
        in page
    )
    run(Copied(), RunFolder("other", root=tmp_path, show=False), mechanism=GaussianNoise(1.0, 1.0), seed=None)
    assert "is_shared_by_clients" not in (tmp_path / "other" / "privacy.md").read_text()


def test_the_message_that_names_is_shared_by_clients_says_its_price(caplog):
    with caplog.at_level(logging.INFO):
        run(Copied())
    [line] = [line for line in caplog.messages if "is_shared_by_clients" in line]
    assert line.endswith("shares one object, which sees clients' raw data without any epsilon.")


class Switched(torch.optim.SGD):
    """An optimiser with two sets of weights, as schedule-free ones have."""

    is_training = True

    def train(self):
        self.is_training = True

    def eval(self):
        self.is_training = False


class InValidation(Classifier):
    def configure_optimizers(self):
        return Switched(self.parameters(), lr=0.1)

    def on_validation_start(self):
        self.switch()

    def switch(self):
        self.optimizers().optimizer.eval()


class AtTheEnd(InValidation):
    def on_validation_start(self):
        pass

    def on_train_epoch_end(self):
        self.switch()


class SwitchingCallback(pl.Callback):
    def on_validation_epoch_start(self, trainer, pl_module):
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("callbacks", "module", "words"),
    [
        ([], InValidation, "InValidation.on_validation_start call an optimiser"),
        ([SwitchingCallback()], Classifier, "SwitchingCallback.on_validation_epoch_start call an optimiser"),
        ([], AtTheEnd, ""),
        ([], Classifier, ""),
    ],
)
def test_a_validation_hook_that_calls_the_optimiser_gets_one_line(callbacks, module, words, caplog):
    with caplog.at_level(logging.INFO):
        run(*callbacks, module=module())
    lines = [line for line in caplog.messages if "call an optimiser" in line]
    assert len(lines) == bool(words) and all(line.startswith(words) for line in lines)
