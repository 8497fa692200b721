"""A head of each client's own against one for all, on scikit-learn's digits with two labels a client.

    python benchmarks/personalisation.py

Prints, for three seeds, the accuracy on what clients hold out: the mean over clients, and the mean of the
tenth with the lowest values.
"""

from __future__ import annotations

import logging
import warnings

import pytorch_lightning as pl
import torch
from torch import nn

from lightning_fedq import ClientEvaluation
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import LabelShards
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.data.models import Classifier
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Mechanism

CLIENTS, ROUNDS, SEEDS = 40, 30, (0, 1, 2)


def run(mechanism: Mechanism, local: list[str], seed: int) -> tuple[float, float]:
    """Mean and lowest decile of the clients' accuracy: of their own models where they have some."""
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    fed = Federated(
        mechanism,
        CLIENTS,
        partition=LabelShards(2),
        local_epochs=5,
        personal_parameters=local,
        seed=seed,
        evaluate_clients=ClientEvaluation(0.2, every_n_rounds=ROUNDS),
    )
    trainer = pl.Trainer(
        max_epochs=ROUNDS,
        callbacks=[fed],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(backbone, lr=0.1), datamodule=DigitsDataModule(batch_size=8))
    spread = fed.client_evaluations[-1].spread("val_acc", "personal" if local else "global")
    return spread.mean, spread.lowest_decile


def main() -> None:
    """Print a line a setting."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    for local in ([], ["*.3.*"]):
        found = [run(FedAvg(), local, seed) for seed in SEEDS]
        means, lowest = (" / ".join(f"{values[n]:.3f}" for values in found) for n in (0, 1))
        print(f"local={local!s:10} mean {means}   lowest decile {lowest}", flush=True)


if __name__ == "__main__":
    main()
