"""One federated run of an experiment, through Lightning, ending with the test accuracy of its best model."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, ReloadBest, RunFolder
from lightning_fedq.datasets import CIFAR10DataModule
from lightning_fedq.models import Classifier


@dataclass(frozen=True)
class ImageData:
    """Where the images are.

    Args:
        root: Folder that holds `MNIST/raw`, `cifar-10-batches-py`, or CIFAR-10 as `train/<class>/*` and
            `test/<class>/*`.
        download: Fetch what is missing.
    """

    root: str = "data"
    download: bool = False


class CIFAR10(CIFAR10DataModule):
    """CIFAR-10 in either layout, pooled and split 80/20, read from disk once a process.

    Args:
        data: Where it is.
        batch_size: Samples per training batch.
        num_train: Training samples; None is all 38,400.
        num_val: Validation samples; None is all 9,600.
        seed: Of the split.
        side: Images are averaged down to this; it divides 32.

    Raises:
        FileNotFoundError: On set-up, if it is not there and is not to be downloaded.
    """

    def __init__(
        self,
        data: ImageData,
        batch_size: int,
        num_train: int | None,
        num_val: int | None,
        seed: int,
        side: int = 32,
    ) -> None:
        self._data, self._side = data, side
        super().__init__(
            data.root, batch_size=batch_size, pooled=True, num_train=num_train, num_val=num_val, seed=seed
        )

    def load(self) -> tuple[Tensor, Tensor, int]:
        """See `TensorDataModule.load`."""
        return load_cifar10(self._data, self._side)


@lru_cache(maxsize=1)
def load_cifar10(data: ImageData, side: int = 32) -> tuple[Tensor, Tensor, int]:
    """Images `(60000, 3, side, side)`, labels, and how many of the last are the official test set.

    Raises:
        FileNotFoundError: If CIFAR-10 is not there and is not to be downloaded; it names both layouts.
    """
    folders = (Path(data.root) / "train").is_dir()
    try:
        images, labels, official = CIFAR10DataModule(data.root, data.download and not folders, folders).load()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; or to one that holds train/<class>/* and test/<class>/*"
        ) from error
    return nn.functional.avg_pool2d(images, 32 // side), labels, official


@dataclass(frozen=True)
class Outcome:
    """What one run reached.

    Args:
        best_val: Best validation accuracy of any round.
        test: Test accuracy of the model of that round.
        val_by_round: Validation accuracy of every round.
        num_reloads: How often training went back to the best model.
        cpu_seconds: Processor time, validation and test included.
        seconds: Wall-clock time of the same.
    """

    best_val: float
    test: float
    val_by_round: tuple[float, ...]
    num_reloads: int
    cpu_seconds: float
    seconds: float


class _Validated(pl.Callback):
    """Validation accuracy of every round, and the module's state in the best of them, buffers included."""

    def __init__(self) -> None:
        self.accuracies: list[float] = []
        self.best: dict[str, Any] = {}

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The module holds the global model."""
        self.accuracies.append(float(trainer.callback_metrics["val_acc"]))
        if self.accuracies[-1] > max(self.accuracies[:-1], default=-1.0):
            self.best = {name: value.clone() for name, value in pl_module.state_dict().items()}


def train(
    model: Classifier,
    data: pl.LightningDataModule,
    federated: Federated,
    rounds: int,
    patience: int,
    folder: Path | None = None,
    accelerator: str = "cpu",
) -> Outcome:
    """Train, reload the best model after `patience` rounds without improvement, test the best one.

    Args:
        model: The global model to start from.
        data: Ordinary data.
        federated: The federation.
        rounds: Rounds, >= 1.
        patience: See `ReloadBest`.
        folder: Run folder, which must not exist yet; None leaves none.
        accelerator: Lightning's.
    """
    clocks = time.process_time(), time.monotonic()
    reload_best, validated = ReloadBest(patience=patience), _Validated()
    callbacks: list[pl.Callback] = [federated, reload_best, validated]
    if folder is not None:
        callbacks.append(RunFolder(folder.name, str(folder.parent)))
    trainer = pl.Trainer(
        max_epochs=rounds,
        accelerator=accelerator,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=callbacks,
    )
    trainer.fit(model, datamodule=data)
    model.load_state_dict(validated.best)
    test = float(trainer.test(model, datamodule=data, verbose=False)[0]["test_acc"])
    del trainer
    gc.collect()  # a Trainer and its data are a cycle: a grid of runs would hold all their tensors
    return Outcome(
        max(validated.accuracies),
        test,
        tuple(validated.accuracies),
        reload_best.num_reloads,
        time.process_time() - clocks[0],
        time.monotonic() - clocks[1],
    )
