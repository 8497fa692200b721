"""An ordinary LightningCLI script that knows nothing of federated learning.

    python examples/train.py fit --config examples/plain.yaml
    python examples/train.py fit --config examples/plain.yaml --config callbacks/corbin.yaml

The first line trains centrally; the second adds one callback, and the same training is federated.
"""

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class DigitClassifier(pl.LightningModule):
    def __init__(self, hidden: int = 64, lr: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        self.log("val_acc", (self.net(inputs).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.5)


class DigitsData(pl.LightningDataModule):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        digits = load_digits()
        inputs, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.train_set = TensorDataset(inputs[order[360:]], labels[order[360:]])
        self.val_set = TensorDataset(inputs[order[:360]], labels[order[:360]])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=360)


if __name__ == "__main__":
    LightningCLI(DigitClassifier, DigitsData)
