"""Callbacks, loaders and modules as people write them, beside the federation."""

from collections import OrderedDict

import pytest
import torch
from torch.utils.data import get_worker_info

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:Federated trains one client at a time")


class LossBar(pl.callbacks.TQDMProgressBar):
    """A progress bar that shows the loss of the batch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.shown = (float(outputs["loss"]), len(batch[0]))


class CountsSamples(pl.callbacks.ModelCheckpoint):
    """A checkpoint that looks at a batch when it begins, and has a state of its own."""

    samples = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.samples += len(batch[0])

    def state_dict(self):
        return super().state_dict() | {"samples": self.samples}


class Mine(Federated):
    """A federation with a hook of one's own."""

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        self.rounds_seen = getattr(self, "rounds_seen", 0) + 1


class Ordered(Classifier):
    """Histories in an OrderedDict, as old code has them."""

    def __init__(self) -> None:
        super().__init__()
        self.history = OrderedDict(losses=[], last=OrderedDict())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.history["last"]["loss"] = float(loss.detach())
        return loss


def by_worker(number):
    """Seeds a worker by its data set."""
    info = get_worker_info()
    torch.manual_seed(len(info.dataset) + number)


def run(module, *callbacks, data=None, kind=Federated, **trainer):
    fed = kind(FedAvg(), 4, seed=0)
    make_trainer(fed, *callbacks, **trainer).fit(module, datamodule=data or Digits(80, 10))
    assert len(fed.records) == 2
    return fed


def test_a_progress_bar_that_reads_outputs_and_batch():
    run(Classifier(), LossBar(), enable_progress_bar=True)


def test_a_checkpoint_that_reads_a_batch(tmp_path):
    run(
        Classifier(),
        CountsSamples(dirpath=tmp_path, every_n_epochs=1, save_top_k=-1),
        enable_checkpointing=True,
    )
    assert len(list(tmp_path.glob("*.ckpt"))) == 2


def test_a_subclass_of_the_federation():
    assert run(Classifier(), kind=Mine).rounds_seen == 2


def test_an_ordered_dict():
    run(Ordered())


def test_a_worker_that_asks_for_its_data_set():
    run(Classifier(), data=Digits(80, 10, num_workers=1, worker_init_fn=by_worker))
