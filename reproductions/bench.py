"""One federated run of an experiment, through Lightning, ending with the test accuracy of its best model."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, ReloadBest, RunFolder
from lightning_fedq.functional.flatten import copy_into
from lightning_fedq.models import Classifier


@dataclass(frozen=True)
class ImageData:
    """Where the images are.

    Args:
        root: Folder that holds `MNIST/raw` or `cifar-10-batches-py`.
        download: Fetch what is missing.
    """

    root: str = "data"
    download: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one run reached.

    Args:
        best_val: Best validation accuracy of any round.
        test: Test accuracy of the model of that round.
        folder: The run folder.
    """

    best_val: float
    test: float
    folder: Path


def train(
    model: Classifier,
    data: pl.LightningDataModule,
    federated: Federated,
    rounds: int,
    patience: int,
    folder: Path,
) -> Outcome:
    """Train, reload the best model after `patience` rounds without improvement, test the best one.

    Args:
        model: The global model to start from.
        data: Ordinary data.
        federated: The federation.
        rounds: Rounds, >= 1.
        patience: See `ReloadBest`.
        folder: Run folder; it must not exist yet.
    """
    reload_best = ReloadBest(patience=patience)
    run_folder = RunFolder(folder.name, str(folder.parent))
    trainer = pl.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[federated, reload_best, run_folder],
    )
    trainer.fit(model, datamodule=data)
    assert reload_best.best_weights is not None and reload_best.best_value is not None
    copy_into(reload_best.best_weights, list(model.parameters()))
    test = trainer.test(model, datamodule=data, verbose=False)[0]["test_acc"]
    del trainer
    gc.collect()  # a Trainer and its data are a cycle: a grid of runs would hold all their tensors
    return Outcome(reload_best.best_value, float(test), folder)
