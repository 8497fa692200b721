"""Normalisation by released statistics: `python benchmarks/normalised.py`, with `FEDQ_DATA` set.

MNIST and CIFAR-10 at half its width with linear models (7,850 and 7,690 parameters), 1,000 clients of 8 and
20 images, one step a round on all of them, `RotatedCoins` behind counted masks at epsilon 8 over the whole
run, delta 1e-5. Images are in [0, 1]: left as they are, normalised by the constants that everybody knows, or
by the mean and standard deviation of each channel that round 1 of 31 releases. Test accuracy of the last
model for three learning rates, which clip at twice the rate. Keys are secret: figures differ from run to run.

Before that, the error of these statistics by clients, epsilon and bound: root mean square of 20 keys.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

import lightning_fedq as fedq
from lightning_fedq.data.datasets import CIFAR10DataModule, MNISTDataModule
from lightning_fedq.data.datasets.tensors import TensorDataModule
from lightning_fedq.keys.randomness import RootKeys
from lightning_fedq.mechanisms.interface.ranges import AdaptiveRange
from lightning_fedq.rounds import RoundEngine, RoundPlanner, Statistics

Name = Literal["MNIST", "CIFAR-10"]
CONSTANTS = {"MNIST": ([0.1307], [0.3081]), "CIFAR-10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])}
EACH = {"MNIST": 8, "CIFAR-10": 20}
ROUNDS, CLIENTS, RATES, KEYS = 30, 1000, (0.05, 0.2, 0.8), 20
FLOOR = 0.1
"""Smallest standard deviation that anybody divides by: noise may say less."""


def hard_bound(channels: int) -> float:
    """Largest norm of `centred` of images in [0, 1]: 1/2 for each mean, 1/8 for each mean square."""
    return math.sqrt(channels * (0.25 + 1.0 / 64.0))


def centred(images: Tensor) -> Tensor:
    """Mean and mean square of each channel of images in [0, 1], both less the middle of their range."""
    values = images - 0.5
    return torch.cat([values.mean((0, 2, 3)), values.square().mean((0, 2, 3)) - 0.125])


def mean_and_std(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """What `centred` says of all images."""
    mean, square = statistics.chunk(2)
    return mean + 0.5, (square + 0.125 - mean.square()).clamp(min=FLOOR**2).sqrt()


class Images(TensorDataModule):
    """Images in [0, 1]."""

    def __init__(self, name: Name) -> None:
        kind: Any = MNISTDataModule if name == "MNIST" else CIFAR10DataModule
        self.name, self.inner = name, kind()
        self.kept: tuple[Tensor, Tensor, int] | None = None
        super().__init__(EACH[name], False, EACH[name] * CLIENTS, None, 0)

    def load(self) -> tuple[Tensor, Tensor, int]:
        if self.kept is None:
            images, labels, tests = self.inner.load()
            mean, std = (torch.tensor(part).view(-1, 1, 1) for part in CONSTANTS[self.name])
            self.kept = images.mul_(std).add_(mean), labels, tests
        return self.kept


class Net(pl.LightningModule):
    """A classifier that normalises its images by two buffers."""

    def __init__(self, name: Name, rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rate, channels = rate, len(CONSTANTS[name][0])
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        if name == "CIFAR-10":
            self.net = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(768, 10))

    def client_statistics(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        return centred(torch.cat([images for images, _ in batches]))

    def on_statistics(self, mean: Tensor) -> None:
        for buffer, found in zip((self.mean, self.std), mean_and_std(mean), strict=True):
            buffer.copy_(found)

    def forward(self, images: Tensor) -> Tensor:
        return self.net((images - self.mean[:, None, None]) / self.std[:, None, None])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Plain(Net):
    """Without hooks: as images are, or by constants."""

    client_statistics = on_statistics = None  # type: ignore[assignment]


def federated(clients: int, clip: float, epsilon: float, statistics: Statistics | None) -> fedq.Federated:
    """Coins behind counted masks, at an epsilon over the whole run."""
    return fedq.Federated(
        fedq.RotatedCoins(clip_norm=clip),
        num_clients=clients,
        privacy=fedq.PrivacyTarget(epsilon, 1e-5, "secagg_server"),
        secure_aggregation=fedq.SecAgg(simulation="counted"),
        check_isolation=False,
        statistics=statistics,
    )


def accuracy(data: Images, how: str, rate: float) -> float:
    """Test accuracy of one run."""
    released = how == "released"
    channels = len(CONSTANTS[data.name][0])
    statistics = Statistics(2 * channels, hard_bound(channels)) if released else None
    module = (Net if released else Plain)(data.name, rate)
    if how == "constants":
        for buffer, values in zip((module.mean, module.std), CONSTANTS[data.name], strict=True):
            buffer.copy_(torch.tensor(values))
    trainer = pl.Trainer(
        max_epochs=ROUNDS + released,
        accelerator="cpu",
        callbacks=[federated(CLIENTS, 2.0 * rate, 8.0, statistics)],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    return trainer.test(module, datamodule=data, verbose=False)[0]["accuracy"]


def errors(data: Images, clients: int, epsilon: float, bound: float) -> tuple[float, float]:
    """Root mean square error of the means and of the standard deviations, of equal shares of all images."""
    images = data.load()[0]
    dim, channels = 7850, images.shape[1]
    shares = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))].chunk(clients)
    vectors, (mean, std) = torch.stack(list(map(centred, shares))), mean_and_std(centred(images))
    statistics = Statistics(2 * channels, bound)
    mechanism = federated(clients, 1.0, epsilon, statistics).calibrated(dim, ROUNDS + 1, 0)
    found = []
    for key in range(KEYS):
        args = mechanism, RoundPlanner(clients, key), RootKeys(), torch.zeros(dim), [dim], AdaptiveRange()
        engine = RoundEngine(*args, statistics=statistics, diagnostics=False)
        engine.receive_statistics(engine.start().survivors, vectors)
        engine.finish()
        assert engine.statistic is not None
        means, stds = mean_and_std(engine.statistic)
        found.append(torch.stack([means - mean, stds - std]))
    of_mean, of_std = torch.stack(found).square().mean((0, 2)).sqrt().tolist()
    return of_mean, of_std


def main(names: list[Any]) -> None:
    """Print both tables."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    for name in names or list(CONSTANTS):
        data = Images(name)
        bounds = {"hard": hard_bound(len(CONSTANTS[name][0])), "guess": 0.25}
        for clients in (100, CLIENTS):
            for kind, bound in bounds.items():
                row = [errors(data, clients, epsilon, bound) for epsilon in (1.0, 2.0, 8.0)]
                cells = " | ".join(f"{mean:.3f}, {std:.3f}" for mean, std in row)
                print(f"| {name}, {clients} | {kind} {bound:.3g} | {cells} |", flush=True)
        for how in ("as they are", "constants", "released"):
            row = [accuracy(data, how, rate) for rate in RATES]
            print(f"| {name} | {how} | {' / '.join(f'{value:.3f}' for value in row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
