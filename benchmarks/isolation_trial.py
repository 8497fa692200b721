"""CPU seconds of the isolation trial in ten trainings: `python benchmarks/isolation_trial.py [NAME ...]`.

One round of `trainings.TRAININGS` with ten clients each, forks included, beside the whole fit. It asserts
nothing.
"""

from __future__ import annotations

import argparse
import resource
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from trainings import TRAININGS

from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import CorBin
from lightning_fedq.training.isolation import IsolationTrial


def seconds() -> float:
    """Of this process and of those that it has waited for."""
    kinds = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in kinds)


def main() -> None:
    """Print a line for each training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[])
    names = parser.parse_args().names or list(TRAININGS)
    warnings.filterwarnings("ignore")
    taken = list[float]()
    check = IsolationTrial.check

    def timed(trial: IsolationTrial, clients: Any) -> str:
        before = seconds()
        found = check(trial, clients)
        taken.append(seconds() - before)
        return found

    IsolationTrial.check = timed  # type: ignore[method-assign]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    for name in names:
        torch.manual_seed(0)
        training, before = TRAININGS[name](1), seconds()
        callbacks = [*training.trainer.get("callbacks", []), Federated(CorBin(5.0), 10)]
        settings = {**training.trainer, **quiet, "accelerator": "cpu", "enable_model_summary": False}
        pl.Trainer(**{**settings, "callbacks": callbacks}).fit(training.module, **training.fit)
        print(f"{name}: trial {sum(taken):.2f}, whole fit {seconds() - before:.2f}", flush=True)
        taken.clear()


if __name__ == "__main__":
    main()
