"""Ten trainings in the style of public tutorials, plain and with one callback: `python benchmarks/corpus.py`.

Nothing of a training changes but the Trainer's list of callbacks. Printed are the validation loss before
training and at the end of both, the rounds, and how many clients trained side by side. Both see the same
number of epochs; in the federated run an epoch is every client's pass over its own part, and the server
averages, so that it takes fewer steps from the same start.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from typing import Any, NamedTuple

import pytorch_lightning as pl
from trainings import TRAININGS

from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Outcome(NamedTuple):
    """Validation loss at the end, epochs or rounds, clients per step (0 where plain), seconds."""

    loss: float
    epochs: int
    clients_per_step: int
    seconds: float


def run(name: str, size: int, num_clients: int) -> Outcome:
    """Train once.

    Args:
        name: Which training.
        size: 1 for seconds of work, 0 for a tiny one.
        num_clients: Clients of the federation; 0 trains plainly.
    """
    pl.seed_everything(0, verbose=False)
    module, fit, settings = TRAININGS[name](size)
    callbacks = list(settings.pop("callbacks", []))
    fed = Federated(FedAvg(), num_clients, seed=0) if num_clients else None
    trainer = pl.Trainer(**QUIET, **settings, callbacks=[*([fed] if fed else []), *callbacks])
    start = time.perf_counter()
    trainer.fit(module, **fit)
    seconds = time.perf_counter() - start
    loss = float(trainer.callback_metrics["val_loss"])
    chosen = fed.clients_per_step_chosen if fed else 0
    return Outcome(loss, len(fed.records) if fed else trainer.current_epoch, chosen, seconds)


def before(name: str, size: int) -> float:
    """Validation loss of the untrained module."""
    pl.seed_everything(0, verbose=False)
    module, fit, _ = TRAININGS[name](size)
    trainer = pl.Trainer(**QUIET)
    given = fit.get("datamodule")
    loaders = None if given else fit["val_dataloaders"]
    return float(trainer.validate(module, loaders, datamodule=given, verbose=False)[0]["val_loss"])


def main() -> None:
    """Read the command line, train, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--size", type=int, choices=(0, 1), default=1, help="0 is a step or two of each")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for package in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(package).setLevel(logging.ERROR)
    head = (
        "training",
        "untrained",
        "plain",
        "federated",
        "rounds",
        "clients per step",
        "seconds: plain, federated",
    )
    print("| " + " | ".join(head) + " |\n| --- |" + " ---: |" * (len(head) - 1), flush=True)
    for name in options.only:
        plain, ours = run(name, options.size, 0), run(name, options.size, options.clients)
        losses = f"{before(name, options.size):.4f} | {plain.loss:.4f} | {ours.loss:.4f}"
        times = f"{plain.seconds:.1f} and {ours.seconds:.1f}"
        print(f"| {name} | {losses} | {ours.epochs} | {ours.clients_per_step} | {times} |", flush=True)


if __name__ == "__main__":
    main()
