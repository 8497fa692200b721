"""Local algorithms on clients whose labels differ: `python benchmarks/algorithms.py --data DATA`.

MNIST dealt to 10 clients by Dirichlet(0.1), a small CNN, 20 steps of 32 images each a round, 20 rounds, plain
SGD with one rate for all. Test accuracy of the last global model, by the seed of split, weights and batches.
"""

from __future__ import annotations

import argparse
import csv
import logging
import sys
import warnings

import pytorch_lightning as pl

from lightning_fedq.algorithms import SCAFFOLD, FedDyn, FedProx, LocalAlgorithm
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import Dirichlet
from lightning_fedq.datasets import MNISTDataModule
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.models import CNN2, Classifier

ALGORITHMS: dict[str, LocalAlgorithm | None] = {
    "FedAvg": None,
    "FedProx(0.1)": FedProx(0.1),
    "SCAFFOLD": SCAFFOLD(),
    "FedDyn(0.1)": FedDyn(0.1),
}


def accuracy(algorithm: LocalAlgorithm | None, seed: int, data: str, lr: float) -> float:
    """Test accuracy of one run."""
    pl.seed_everything(seed, verbose=False)
    federated = Federated(
        FedAvg(), 10, algorithm=algorithm, partition=Dirichlet(0.1), local_steps=20, seed=seed
    )
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
    module = Classifier(CNN2(), lr=lr, momentum=0.0)
    source = MNISTDataModule(data, batch_size=32)
    trainer.fit(module, datamodule=source)
    [found] = trainer.test(module, datamodule=source, verbose=False)
    return found["test/acc"] if "test/acc" in found else found["test_acc"]


def main() -> None:
    """Print a row for every run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of MNIST")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=0.05, help="rate of the clients' SGD")
    parser.add_argument("--only", nargs="*", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    out = csv.writer(sys.stdout)
    out.writerow(("algorithm", *(f"seed {seed}" for seed in options.seeds)))
    for name in options.only:
        algorithm = ALGORITHMS[name]
        row = [f"{accuracy(algorithm, seed, options.data, options.lr):.4f}" for seed in options.seeds]
        out.writerow((name, *row))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
