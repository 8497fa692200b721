"""An ordinary Lightning run on scikit-learn's digits, for the tests of what federates it."""

from functools import cache
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl


@cache
def digits():
    data = load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


class Classifier(pl.LightningModule):
    """A linear classifier, or any backbone, with any optimiser."""

    def __init__(self, backbone: nn.Module | None = None, optimizer: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = backbone or nn.Linear(64, 10)
        self.optimizer = optimizer or (lambda params: torch.optim.SGD(params, lr=0.5))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.backbone(inputs), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        self.log("val_acc", (self.backbone(inputs).argmax(1) == labels).float().mean())

    test_step = validation_step

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class ManualSteps(pl.LightningModule):
    """In front of a module's class: its optimizer steps are taken by hand."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Digits(pl.LightningDataModule):
    def __init__(self, num_train: int = 400, batch_size: int = 10, **loader: Any) -> None:
        super().__init__()
        self.num_train, self.loader = num_train, {"batch_size": batch_size, "shuffle": True, **loader}

    def train_set(self):
        inputs, labels = digits()
        return TensorDataset(inputs[: self.num_train], labels[: self.num_train])

    def train_dataloader(self):
        return DataLoader(self.train_set(), **self.loader)

    def val_dataloader(self):
        inputs, labels = digits()
        return DataLoader(TensorDataset(inputs[1500:], labels[1500:]), batch_size=300)

    test_dataloader = val_dataloader


def parts_of(sizes):
    """Indices of clients that hold so many samples each, one client's behind the other's."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def make_trainer(*callbacks, **settings):
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = {"max_epochs": 2, "accelerator": "cpu", **dict.fromkeys(off, False)}
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **settings})


def fitted(module, *callbacks, data=None, ckpt_path=None, **settings):
    """The Trainer with these callbacks and settings, after its fit."""
    trainer = make_trainer(*callbacks, **settings)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def weights_of(module):
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
