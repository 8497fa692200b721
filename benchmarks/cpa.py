"""CPU seconds of one CPA round in the paper's set-up: `python benchmarks/cpa.py`.

1,000 clients with 5 samples each, linear model on MNIST (7,850 parameters), one local step, 1-bit CPA at
epsilon 0.5, as in the authors' experiments. Their public code needs 6.3 CPU seconds a round for it (one
core; on another machine, give yours with `--authors`). Rounds are Lightning's, with data loading, encoding
and decoding; evaluation and the comparison with the exact mean are left out, the first round is warm-up.
Processor time of the whole process, which other load disturbs less than wall time, but it does.

A benchmark is not a test: it prints ratios and asserts nothing about seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from typing import Any

import torch

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.experiments.cpa_data import ClientImages, network
from lightning_fedq.experiments.cpa_runs import STACK, authors_cpa, unbiased_cpa
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.models import Classifier
from lightning_fedq.ranges import FixedRange

AUTHORS_SECONDS = 6.3


class Clock(pl.Callback):
    """Processor and wall time of every round."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.cpu.append(time.process_time() - self._cpu)
        self.wall.append(time.perf_counter() - self._wall)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data.root", dest="root", default=os.environ.get("FEDQ_DATA", "data"))
    parser.add_argument("--num_clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10, help="measured, after one of warm-up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--authors", type=float, default=AUTHORS_SECONDS, help="their CPU seconds a round")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    cases = [
        ("FedAvg", FedAvg(), 1.0),
        ("CPA, repaired (2 levels, dither)", *unbiased_cpa(0.5)),
        ("CPA, as the authors' code", *authors_cpa(0.5)),
        ("nested CPA, repaired", *unbiased_cpa(0.5, nested=True)),
    ]
    print(f"{options.num_clients} clients, 7,850 parameters, {options.threads} thread(s), median of rounds")
    print(f"{'':34} {'CPU s':>8} {'wall s':>8} {'faster than the authors (CPU)':>30}")
    for name, mechanism, radius in cases:
        clock = Clock()
        federated = Federated(
            mechanism,
            options.num_clients,
            clients_per_step=min(STACK, options.num_clients),
            ranges=FixedRange(radius),
            seed=0,
            diagnostics=False,
        )
        trainer = pl.Trainer(
            max_epochs=options.rounds + 1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            callbacks=[federated, clock],
        )
        data = ClientImages("mnist", options.root, False, options.num_clients, 5, 100, 0)
        trainer.fit(Classifier(network("linear", 0), 1.0), datamodule=data)
        cpu, wall = statistics.median(clock.cpu[1:]), statistics.median(clock.wall[1:])
        print(f"{name:34} {cpu:8.3f} {wall:8.3f} {options.authors / cpu:29.1f}x")


if __name__ == "__main__":
    main()
