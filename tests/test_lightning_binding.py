"""The Lightning layer under either package; the tests of this process run under one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lightning_fedq._lightning import pl

PROGRAM = """
import lightning.pytorch as pl
from lightning_fedq._lightning import pl as bound
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.mechanisms import CorBin
from tests.digits_run import Classifier, Digits
import sys
assert bound is pl, bound
assert "pytorch_lightning" not in sys.modules
for clients_per_step in (1, 5):
    fed = Federated(CorBin(epsilon=5.0), 10, seed=0, clients_per_step=clients_per_step)
    trainer = pl.Trainer(max_epochs=3, callbacks=[fed], accelerator="cpu", logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Classifier(), datamodule=FederatedDataModule(Digits(300)))
    assert len(fed.records) == 3
    print("accuracy", float(trainer.callback_metrics["val_acc"]))
import pytest
file = "tests/training/test_around_a_fit.py"
options = ["--assert=plain", "-p", "no:cacheprovider", "-k", "not compiled"]  # torch's own, and slow
sys.exit(pytest.main(["-q", *options, file]))
"""


def test_federates_under_the_other_package() -> None:
    """All other tests run under `pytorch_lightning`. That nothing then imports `lightning`: `test_wheel`."""
    assert pl.__name__ == "pytorch_lightning"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    accuracies = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("accuracy")]
    assert accuracies[0] == accuracies[1]


MODULE = """
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

class Own(pl.LightningModule):
    def __init__(self, width: int = 2):
        super().__init__()
        self.net = torch.nn.Linear(width, 2)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(40, 2)), batch_size=2)
"""
CONFIG = """
model: {class_path: own_training.Own}
data: {class_path: own_training.Data}
trainer: {max_epochs: 1, accelerator: cpu, logger: false, enable_checkpointing: false}
"""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightning_fedq.cli", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_works_with_the_package_of_the_classes_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "own_training.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    done = command(tmp_path, "fit", "mine.yaml", "--with", "corbin")
    assert done.returncode == 0 and "runs/corbin/privacy.md" in done.stdout, done.stderr[-3000:]
    done = command(tmp_path, "privacy", "runs/corbin/config.yaml")
    assert done.returncode == 0 and "CorBin(epsilon=1.0" in done.stdout, done.stderr[-3000:]
    mixed = CONFIG.replace("logger: false", "logger: {class_path: pytorch_lightning.loggers.CSVLogger}")
    (tmp_path / "mixed.yaml").write_text(mixed)
    done = command(tmp_path, "fit", "mixed.yaml")
    assert done.returncode == 2 and (
        "CSVLogger is a class of pytorch_lightning, and this run is one of lightning.pytorch" in done.stderr
    ), done.stderr[-3000:]
