"""Cures that a fit names while it runs: samples, isolation, what checkpoints and names would tell."""

import collections
from typing import Any, ClassVar

import torch
from pytorch_lightning.loggers import WandbLogger
from torch.utils.data import DataLoader

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import PrivacyBudget, RunFolder, WandbRounds
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.mechanisms import LDPQ, RotatedAxes
from lightning_fedq.mechanisms.interface import Adversary
from tests.callbacks import test_dpsgd_guards as guards, test_dpsgd_own_backward as own_backward
from tests.cures.rows import dpsgd, fed, fit, module_with, row
from tests.cures.rows_data import part
from tests.cures.rows_statistics import survey
from tests.digits_run import Classifier
from tests.training.test_saved_states import Counts
from tests.training.test_unfreezing import TwoLayers


def private(mechanism=None, **settings):
    return fed(mechanism or LDPQ(0.5), seed=None, **settings)


class Unused(Classifier):
    """A layer that no batch, or the first ones only, goes through, frozen or not."""

    def __init__(self, frozen: bool, batches: int = 0) -> None:
        super().__init__()
        self.spare, self.batches = torch.nn.Linear(64, 10).requires_grad_(not frozen), batches

    def training_step(self, batch, batch_idx):
        more = self.spare(batch[0]).sum(1).mean() if batch_idx < self.batches else 0.0
        return torch.nn.functional.cross_entropy(self.backbone(batch[0]), batch[1]) + more

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class StepsItself(Classifier):
    """Leaves optimizer steps to Lightning, or takes some of them only."""

    def __init__(self, leaves: bool) -> None:
        super().__init__()
        self.leaves = leaves

    def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
        if self.leaves or batch_idx != 1:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
        else:
            closure()


class Rows(guards.InRows):
    """A linear layer that gets `(batch, time, features)`."""

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        steps = torch.stack([inputs, inputs, inputs], 1)
        return torch.nn.functional.cross_entropy(self.net(steps).mean(1), labels)


def sampled(module, *more, **settings):
    """DP-SGD of the module's own data."""
    guards.trainer(guards.dpsgd(), *more, epochs=1, **settings).fit(module)


class Stills(Classifier):
    """Its second layer does not train: in eval mode alone, frozen as well, or back in train mode."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.head = how, torch.nn.Linear(10, 10)
        self.head.requires_grad_(how != "frozen")

    def on_train_epoch_start(self):
        self.head.train(self.how == "train")

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.head(self.backbone(images)), labels)


class LogsIn(Classifier):
    """Logs the mean loss of training, in a hook of validation or in the step."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.where == "training_step":
            self.log("mean_loss", loss)
        else:
            self.losses.append(loss.detach())
        return loss

    def on_validation_epoch_end(self):
        if self.losses:
            self.log("mean_loss", torch.stack(self.losses).mean())
        self.losses.clear()


class Remembers(Classifier):
    """The loss hangs on the clients before, or on the earlier batches of the client itself."""

    seen: ClassVar[Any] = collections.Counter()

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.own = collections.Counter()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.where == "draws":
            return loss * (1.0 + 0.1 * torch.rand(()))
        if self.where == "callback":
            counter = next(c for c in self.trainer.callbacks if isinstance(c, Remembering)).own
        else:
            counter = self.own if self.where == "module" else Remembers.seen
        counter["batches"] += 1
        return loss * counter["batches"]


class Remembering(pl.Callback):
    def __init__(self) -> None:
        self.own = collections.Counter()


def isolated(where, *more, check=True):
    fit(fed(check_isolation=check), *more, module=Remembers(where))


class Looks(Classifier):
    """Counts samples before the first round: of all clients' batches, of the data set, or of public data."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def setup(self, stage):
        data = self.trainer.datamodule
        loaders = {
            "loader": data.train_dataloader,
            "dataset": lambda: DataLoader(data.train_set(), 10),
            "public": data.val_dataloader,
        }
        self.count = sum(len(labels) for _, labels in loaders[self.at]())


class Empty(DataLoader[Any]):
    """Says that it has batches, and gives none."""

    def __iter__(self):
        return iter(())


def loaders(*last):
    """Three clients' own loaders, and others."""
    own = [DataLoader(part(20, 20 * client), batch_size=5 - client % 2) for client in range(3)]
    return FederatedDataModule(clients=[*own, *last])


def named(name, **settings):
    """A private run whose checkpoints are named so."""
    keep = pl.callbacks.ModelCheckpoint("best", filename=name)
    fit(fed(LDPQ(0.5), **{"seed": None, **settings}), keep, enable_checkpointing=True)


class Extra(Classifier):
    """The module's extra state follows from batches."""

    seen = 0.0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def training_step(self, batch, batch_idx):
        self.seen = float(batch[0].mean())
        return super().training_step(batch, batch_idx)


class KeepsHparam(Classifier):
    """A hyperparameter follows from batches, or does not."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.save_hyperparameters({"scale": 1.0})
        self.changes = changes

    def training_step(self, batch, batch_idx):
        if self.changes:
            self.hparams["scale"] = float(batch[0].mean())
        return super().training_step(batch, batch_idx)


def kept(module):
    """A DP-SGD fit."""
    fit(dpsgd(), module=module)


def online(*order):
    """A fit with Weights & Biases, offline, and a run folder where it is named."""
    logger = WandbLogger(project="tests", save_dir=".", offline=True)
    made = [RunFolder("mine", ".", show=False) if kind is RunFolder else kind() for kind in order]
    try:
        fit(fed(), *made, logger=logger)
    finally:
        logger.experiment.finish()


def budgeted(epsilon, **trainer):
    limit = PrivacyBudget(epsilon, 1e-4, Adversary.OUTSIDER)
    fit(dpsgd(seed=None), limit, **{"max_epochs": 2, "min_epochs": 2, **trainer})


def charged(epsilon, **trainer):
    limit = PrivacyBudget(epsilon, 1e-5, "server")
    fit(private(), limit, **{"max_epochs": 2, "min_epochs": 2, **trainer})


def grows(epsilon, change_at=2, rounds=3):
    """Most parameters join in the third round."""
    limit = PrivacyBudget(epsilon, 1e-5, "server")
    fit(private(), limit, module=TwoLayers(change_at=change_at), max_epochs=rounds)


row(
    "Got the batch of step {} of client {} after {} charged steps. Return a loss for every batch, and leave",
    lambda: fit(dpsgd(), module=StepsItself(False)),
    lambda: fit(dpsgd(), module=StepsItself(True)),
    lambda: fit(dpsgd(), module=Classifier()),
    error=RuntimeError,
)
row(
    "training_step must return a loss for every batch, but its code can return None. Return the loss",
    lambda: fit(dpsgd(), module=own_backward.ReturnsIfFinite()),
    lambda: fit(dpsgd(), module=Classifier()),
)
row(
    "of {} parameters have no gradient of this batch. Return a loss for every batch, and freeze parameters",
    lambda: fit(dpsgd(), module=Unused(False, batches=1)),
    lambda: fit(dpsgd(), module=Unused(True)),
    error=RuntimeError,
)
row(
    "{} have no gradient of a batch. Freeze parameters that training_step does not use (requires_grad_",
    lambda: fit(dpsgd(), module=Unused(False)),
    lambda: fit(dpsgd(), module=Unused(True)),
)
row(
    "{} get gradients that hooks do not see. Call the layers on the whole batch, without torch.func,",
    lambda: fit(dpsgd(), module=own_backward.Mapped()),
    lambda: fit(dpsgd(), module=Classifier()),
)
row(
    "can't give per-sample gradients ({}). Leave out torch.func and in-place changes of layers' outputs",
    lambda: fit(dpsgd(), module=own_backward.ChangesOutputs()),
    lambda: fit(dpsgd(), module=Classifier()),
)
row(
    "has trained parameters but was in eval mode in a training step. Freeze its parameters with",
    lambda: fit(dpsgd(), module=Stills("eval")),
    lambda: fit(dpsgd(), module=Stills("frozen")),
    lambda: fit(dpsgd(), module=Stills("train")),
    error=RuntimeError,
)
row(
    "saw {} rows for a batch of {} samples. Give every layer the samples along axis 0 (Linear takes",
    lambda: sampled(guards.InRows("time first")),
    lambda: sampled(Rows("as it is")),
    lambda: sampled(guards.InRows("positions of each sample")),
    error=RuntimeError,
)
row(
    "saw {} rows in one pass and {} in another. Pass all samples of the batch through it every time, and",
    lambda: sampled(guards.Passes(False)),
    lambda: sampled(guards.Passes(True)),
    error=RuntimeError,
)
row(
    "The privacy budget allows {} steps, and all are taken. Raise the budget, or stop the training here.",
    lambda: budgeted(3.0),
    lambda: budgeted(6.0),
    lambda: budgeted(3.0, max_epochs=1, min_epochs=1),
    error=RuntimeError,
)
row(
    "Validation logs {}, which follow from training batches and are not private. Log them with self.log in",
    lambda: fit(dpsgd(), module=LogsIn("validation")),
    lambda: fit(dpsgd(), module=LogsIn("training_step")),
)
row(
    "Data of client {} changed results of client {}, or outputs of the run: {}. Move state outside of the",
    lambda: isolated("class"),
    lambda: isolated("module"),
    lambda: isolated("callback", Remembering()),
    lambda: isolated("draws"),
    lambda: isolated("class", check=False),
)
row(
    "Only clients may iterate the training loader, since statistics of all data would bypass the mechanism.",
    lambda: fit(module=Looks("loader")),
    lambda: fit(module=Looks("public")),
    survey,
    error=RuntimeError,
)
row(
    "Federated needs an optimiser, but configure_optimizers returned none. Return an optimiser of the",
    lambda: fit(module=module_with(lambda params: [])),
    lambda: fit(module=Classifier()),
)
row(
    "The loader of client {} gave no batch. Leave the client out.",
    lambda: fit(fed(local_steps=2), data=loaders(Empty(part(20, 60), batch_size=5))),
    lambda: fit(fed(num_clients=3, local_steps=2), data=loaders()),
)
row(
    "{}, but {} can't be charged for vectors of two lengths. Freeze or unfreeze before the fit, or use",
    lambda: fit(fed(RotatedAxes(0.5, 1.0)), module=TwoLayers(), max_epochs=2),
    lambda: fit(fed(RotatedAxes(0.5, 1.0)), module=TwoLayers(change_at=9), max_epochs=2),
    lambda: fit(fed(LDPQ(0.5)), module=TwoLayers(), max_epochs=2),
)
row(
    "{} uses exact losses of training steps, which no epsilon covers. Leave it out, or use",
    lambda: fit(private(), pl.callbacks.SpikeDetection()),
    lambda: fit(private()),
    lambda: fit(private(), pl.callbacks.EarlyStopping("val_acc")),
)
row(
    "{} names its files by {}, which is computed from the clients' exact updates. Leave it out, or",
    lambda: named("{epoch}-{fed/sim_mse:.3g}"),
    lambda: named("{epoch}"),
    lambda: named("{epoch}-{fed/sim_mse:.3g}", seed=1),
)
row(
    "Training changed {}, which checkpoints contain without noise. Leave out",
    lambda: kept(Counts("saved")),
    lambda: kept(Counts("not saved")),
    lambda: kept(Counts("in validation")),
)
row("which checkpoints contain without noise. Leave", lambda: kept(Extra()), lambda: kept(Classifier()))
row("get_extra_state, and hyper", lambda: kept(KeepsHparam(True)), lambda: kept(KeepsHparam(False)))
row(
    "The privacy budget allows {} rounds of client {}, and round {} would exceed it. Raise the budget,",
    lambda: charged(200.0),
    lambda: charged(1e6),
    lambda: charged(200.0, max_epochs=1, min_epochs=1),
    error=RuntimeError,
)
row(
    "The privacy budget allows client {} {} rounds of this length, but it was charged for {}. Raise the",
    lambda: grows(200.0),
    lambda: grows(1e6),
    lambda: grows(200.0, change_at=9, rounds=4),
    lambda: grows(200.0, rounds=2),
    error=RuntimeError,
)
row(
    "WandbRounds needs a WandbLogger. Set trainer.logger to {}.loggers.WandbLogger (with offline: true it",
    lambda: fit(fed(), WandbRounds()),
    lambda: online(WandbRounds),
)
row(
    "WandbRounds sends the run folder, so it must come last. Put it behind RunFolder in trainer.callbacks.",
    lambda: online(WandbRounds, RunFolder),
    lambda: online(RunFolder, WandbRounds),
)
