"""CPU seconds of one CPA round in the paper's set-up, beside the authors' public code.

    python benchmarks/cpa.py [--authors CHECKOUT] [--data.root FOLDER] [--rounds 10]

1,000 clients with 5 samples each, linear model on MNIST (7,850 parameters), one local step, 1-bit CPA at
epsilon 0.5. Rounds are Lightning's, with data loading, local training, encoding and decoding; the comparison
with the exact mean is left out, the first round is warm-up. Two figures a round: without any evaluation, and
whole, with as many images as the authors' code evaluates after every round (10,000 for validation and 10,000
for the test; ours as ready-made batches of 5,000). Processor time of the whole process, which other load
disturbs less than wall time, but it does: what counts is the ratio of two runs next to each other.

With `--authors` their `main.py` runs as it is (`peer_cpa_authors.py`), in a process of its own and before
ours; `--authors-python` names the interpreter that can run it. Without, the ratio is to the 6.3 CPU seconds
of a whole round that were once measured with it on another machine.

A benchmark is not a test: it prints ratios and asserts nothing about seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from workloads import load, prepare, workload

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data.models import Classifier, Linear
from lightning_fedq.mechanisms import CPA, FedAvg
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.interface.ranges import FixedRange

RECORDED_SECONDS = 6.3
MARK = "fedq-benchmark-result "
GAMMA = 0.05
AUTHORS_OPTIONS: dict[str, Any] = {
    "levels": 3,
    "words": "near_balanced",
    "dither": "none",
    "decoder": "authors_code",
    "epsilon_scope": "bit",
}
"""CPA as their code computes it."""

CASES: list[tuple[str, Mechanism, float]] = [
    ("FedAvg", FedAvg(), 1.0),
    ("CPA (2 levels, subtracted dither)", CPA(0.5, epsilon_scope="bit"), GAMMA / 2),
    ("CPA as the authors' code", CPA(0.5, **AUTHORS_OPTIONS), GAMMA * 2 / 3),
    ("nested CPA (2 x 2 levels)", CPA(0.5, stages=2, epsilon_scope="bit"), GAMMA / 2),
    ("CPA, epsilon 8 a message", CPA(8.0, epsilon_scope="round"), GAMMA / 2),
]


class Clock(pl.Callback):
    """Processor time of every round, whole and without its validation."""

    def __init__(self) -> None:
        self.whole: list[float] = []
        self.bare: list[float] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._start = time.process_time()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._validation = time.process_time()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._validation = time.process_time() - self._validation

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.whole.append(time.process_time() - self._start)
        self.bare.append(self.whole[-1] - self._validation)


class Images(pl.LightningDataModule):
    """An ordinary data module: 5 samples a batch to train on, ready-made batches to evaluate on."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        held = load(path)
        self.train = TensorDataset(held.images.flatten(0, 1), held.labels.flatten())
        # as many images as the authors evaluate; which ones does not matter to the clock
        batches = zip(held.test_images.split(5_000), held.test_labels.split(5_000), strict=True)
        self.evaluated = 2 * list(batches)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=5, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.evaluated, batch_size=None)  # type: ignore[arg-type]


def run_ours(mechanism: Mechanism, radius: float, data: Images, clients: int, rounds: int) -> list[float]:
    """Median CPU seconds of a round, without evaluation and whole."""
    clock = Clock()
    federated = Federated(
        mechanism,
        clients,
        clients_per_step=min(250, clients),
        ranges=FixedRange(radius),
        seed=0,
        diagnostics=False,
    )
    trainer = pl.Trainer(
        max_epochs=rounds + 1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[federated, clock],
    )
    trainer.fit(Classifier(Linear(), 1.0), datamodule=data)
    return [statistics.median(clock.bare[1:]), statistics.median(clock.whole[1:])]


def run_authors(options: argparse.Namespace, compression: str) -> list[float] | None:
    """The same two figures of their code; None if it does not run here, and why goes to stderr."""
    peer = Path(__file__).with_name("peer_cpa_authors.py")
    command = [options.authors_python, str(peer), str(options.authors), "--data.root", options.root]
    command += ["--num_clients", str(options.num_clients), "--threads", str(options.threads)]
    done = subprocess.run([*command, "--compression", compression], capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not found:
        print(f"the authors' code did not run:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    rounds = json.loads(found[-1].removeprefix(MARK))
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data.root", dest="root", default=os.environ.get("FEDQ_DATA", "data"))
    parser.add_argument("--num_clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10, help="measured, after one of warm-up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--authors", type=Path, metavar="CHECKOUT", help="of the authors' public code")
    parser.add_argument("--authors-python", default=sys.executable, help="interpreter that can run it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    theirs: list[float] | None = None
    print(f"{options.num_clients} clients, 7,850 parameters, {options.threads} thread(s), medians of rounds")
    print(
        f"{'CPU seconds a round':38} {'no evaluation':>14} {'whole':>8} {'times faster than the authors':>32}"
    )
    if options.authors is not None:
        for name, compression in (("authors, CPA", "scalarQ"), ("authors, nested CPA", "nested")):
            found = run_authors(options, compression)
            if found is not None:
                print(f"{name:38} {found[0]:14.3f} {found[1]:8.3f}", flush=True)
                theirs = theirs or found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.pt"
        prepare(workload("W1", options.num_clients), Path(options.root), path)
        data = Images(path)
    for name, mechanism, radius in CASES:
        bare, whole = run_ours(mechanism, radius, data, options.num_clients, options.rounds)
        if theirs is not None:
            times = f"{theirs[0] / bare:.1f} bare, {theirs[1] / whole:.1f} whole"
        else:
            times = f"{RECORDED_SECONDS / whole:.1f} whole (recorded)"
        print(f"{name:38} {bare:14.3f} {whole:8.3f} {times:>32}", flush=True)


if __name__ == "__main__":
    main()
