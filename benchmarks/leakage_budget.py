"""What `LeakageBudget` costs: its seconds beside those of the rounds that it serves, in one run.

    python benchmarks/leakage_budget.py --rounds 40

Digits, an MLP of 64 units, 20 clients with two local epochs, as in configs/digits_near_optimal_utility.yaml.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_fedq.callbacks import Federated
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.data.models import MLP, Classifier
from lightning_fedq.leakage import LeakageBudget
from lightning_fedq.mechanisms import NearOptimalUtility


class Clock(pl.Callback):
    """Seconds of every round, decisions included."""

    def __init__(self, budget: LeakageBudget) -> None:
        self.budget, self.rounds, self.decisions = budget, [], []

    def on_train_start(self, *_: Any) -> None:
        self.last, self.spent = time.perf_counter(), 0.0

    def on_train_epoch_end(self, *_: Any) -> None:
        now = time.perf_counter()
        self.rounds.append(now - self.last)
        self.decisions.append(self.budget.seconds - self.spent)
        self.last, self.spent = now, self.budget.seconds


def main() -> None:
    """Run, and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--every", type=int, default=20, help="every_n_rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mechanism = NearOptimalUtility(0.503, 0.6, noise_std=0.0996, measured_leakage=0.592)
    federated = Federated(mechanism, num_clients=20, local_epochs=2, seed=0)
    budget = LeakageBudget(every_n_rounds=options.every)
    clock = Clock(budget)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_epochs=options.rounds,
        accelerator="cpu",
        enable_model_summary=False,
        callbacks=[federated, budget, clock],
        **quiet,
    )
    model = Classifier(MLP(in_features=64, hidden=[64]), lr=0.1, momentum=0.9)
    trainer.fit(model, datamodule=DigitsDataModule(batch_size=16))
    later, deciding = sum(clock.rounds[1:]), sum(clock.decisions[1:])
    print(f"round {sum(clock.rounds) / len(clock.rounds):.3f} s, first decision {clock.decisions[0]:.3f} s")
    share, rest = budget.seconds / sum(clock.rounds), deciding / later
    print(f"share of all rounds {share:.1%}, without the first {rest:.1%}")


if __name__ == "__main__":
    main()
