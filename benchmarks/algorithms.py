"""Local algorithms on clients whose labels differ: `python benchmarks/algorithms.py --data DATA`.

MNIST dealt to 10 clients by Dirichlet(0.1), a small CNN, 20 steps of 32 images each a round, 20 rounds, plain
SGD with one rate for all. Test accuracy of the last global model, by the seed of split, weights and batches.

With `--private` 1,000 clients of two labels each train a
linear model of 7,850 parameters, 5 steps of 16 images a round, 20 rounds, behind `RotatedCoins` at epsilon 8
against the server behind secure aggregation (accounted, not run: masks change no number), delta 1e-5.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import sys
import warnings
from functools import partial

import pytorch_lightning as pl

from lightning_fedq.algorithms import SCAFFOLD, FedDyn, FedProx, LocalAlgorithm
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import Dirichlet, LabelShards
from lightning_fedq.data.datasets import CIFAR10DataModule, MNISTDataModule
from lightning_fedq.data.models import CNN2, MLP, Classifier
from lightning_fedq.mechanisms import FedAvg, RotatedCoins
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg

ALGORITHMS: dict[str, LocalAlgorithm | None] = {
    "FedAvg": None,
    "FedProx(0.1)": FedProx(0.1),
    "SCAFFOLD": SCAFFOLD(),
    "FedDyn(0.1)": FedDyn(0.1),
}


def trained(federated: Federated, module: pl.LightningModule, source: pl.LightningDataModule) -> float:
    """Test accuracy after 20 rounds."""
    trainer = pl.Trainer(
        max_epochs=20,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[federated],
    )
    trainer.fit(module, datamodule=source)
    [found] = trainer.test(module, datamodule=source, verbose=False)
    return found["test/acc"] if "test/acc" in found else found["test_acc"]


def accuracy(
    algorithm: LocalAlgorithm | None, seed: int, data: str, lr: float, is_cifar: bool = False
) -> float:
    """Test accuracy of one run."""
    pl.seed_everything(seed, verbose=False)
    federated = Federated(
        FedAvg(), 10, algorithm=algorithm, partition=Dirichlet(0.1), local_steps=20, seed=seed
    )
    source = MNISTDataModule(data, batch_size=32)
    module = Classifier(CNN2(), lr=lr, momentum=0.0)
    if is_cifar:
        source = CIFAR10DataModule(data, image_folder=True, batch_size=32)
        module = Classifier(CNN2(3, 32), lr=lr, momentum=0.0)
    return trained(federated, module, source)


def private_accuracy(algorithm: LocalAlgorithm | None, seed: int, data: str, lr: float) -> float:
    """Test accuracy of one private run."""
    pl.seed_everything(seed, verbose=False)
    federated = Federated(
        RotatedCoins(clip_norm=1.0),
        1000,
        algorithm=algorithm,
        partition=LabelShards(2),
        local_steps=5,
        privacy=PrivacyTarget(8.0, delta=1e-5, adversary="secagg_server"),
        secure_aggregation=SecAgg(simulation="counted", max_colluding_fraction=0.02),
    )
    module = Classifier(MLP(784, hidden=[]), lr=lr, momentum=0.0)
    source = MNISTDataModule(data, batch_size=16)
    return trained(federated, module, source)


def main() -> None:
    """Print a row for every run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=os.environ.get("FEDQ_DATA") or "data", help="folder of MNIST")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=0.05, help="rate of the clients' SGD")
    parser.add_argument("--only", nargs="*", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--cifar", action="store_true", help="CIFAR-10 from a folder of images")
    parser.add_argument("--private", action="store_true", help="behind RotatedCoins at epsilon 8")
    options = parser.parse_args()
    measure = private_accuracy if options.private else partial(accuracy, is_cifar=options.cifar)
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    out = csv.writer(sys.stdout)
    out.writerow(("algorithm", *(f"seed {seed}" for seed in options.seeds)))
    for name in options.only:
        algorithm = ALGORITHMS[name]
        row = [f"{measure(algorithm, seed, options.data, options.lr):.4f}" for seed in options.seeds]
        out.writerow((name, *row))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
