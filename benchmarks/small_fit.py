"""CPU seconds of a fit of two rounds of 20 clients on digits: `PYTHONPATH=. python benchmarks/small_fit.py`.

`bare` is Lightning's own fit of as many steps as one client takes. Forks count. It asserts nothing.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import warnings

from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import CorBin, FedAvg, GaussianNoise
from tests.digits_run import Classifier, Digits, make_trainer

CASES = {
    "bare": lambda: None,
    "FedAvg": lambda: Federated(FedAvg(), 20, seed=0),
    "CorBin": lambda: Federated(CorBin(5.0), 20, seed=0),
    "FedAvg, one client at a time": lambda: Federated(FedAvg(), 20, seed=0, clients_per_step=1),
    "GaussianNoise, private": lambda: Federated(GaussianNoise(1.0, 0.5), 20),
}


def seconds() -> float:
    """Of this process and of those that it has waited for."""
    kinds = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in kinds)


def fit(name: str) -> float:
    """One fit's CPU seconds."""
    made, before = CASES[name](), seconds()
    trainer = make_trainer(*([made] if made else []), limit_train_batches=None if made else 2)
    trainer.fit(Classifier(), datamodule=Digits())
    return seconds() - before


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    warnings.filterwarnings("ignore")
    for name in CASES:
        found = [fit(name) for _ in range(repeats + 1)][1:]
        print(f"{name}: {statistics.median(found):.3f}", flush=True)


if __name__ == "__main__":
    main()
