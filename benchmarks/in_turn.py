"""Noise that cancels over rounds, and who is trusted with it: `python benchmarks/in_turn.py --data DATA`.

MNIST, a linear model (7,850 parameters), 1,000 clients with five images each, cohorts of 100 that take turns,
100 rounds: each client is asked ten times. Epsilon 2 and 8 over the run at delta 1e-5. `HandedOnGaussian`
and `DistributedDiscreteGaussian` stand behind masks, 2% of every cohort collude with the server, and the
target is against it; `BandedGaussian` trusts the server, and its target is against those who see the models.

Rates are chosen by validation accuracy with a seed that no row has (`--tune`). A row is one seed; what is
there already is kept, so a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "in_turn.csv"
TUNED = {
    ("HandedOnGaussian", 2.0): 0.05,
    ("HandedOnGaussian", 8.0): 0.2,
    ("BandedGaussian", 2.0): 0.05,
    ("BandedGaussian", 8.0): 0.2,
    ("DistributedDiscreteGaussian", 2.0): 0.02,
    ("DistributedDiscreteGaussian", 8.0): 0.05,
    ("BandedGaussian, band 1", 2.0): 0.02,
    ("BandedGaussian, band 1", 8.0): 0.05,
}
"""Rate of the one local step; updates are clipped at twice the rate."""
FIELDS = ("method", "towards", "epsilon", "lr", "seed", "validation", "test", "spent", "bytes", "all_bytes")


def main() -> None:
    """Run what is missing, and print every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=os.environ.get("FEDQ_DATA") or "data", help="folder of MNIST")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=sorted({name for name, _ in TUNED}))
    parser.add_argument("--epsilons", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--tune", type=float, nargs="*", help="rates to try with seed 100; writes nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    sys.path.insert(0, str(ROOT))
    kept = [] if given.tune or not given.results.exists() else list(csv.DictReader(given.results.open()))
    done = {(row["method"], float(row["epsilon"]), int(row["seed"])) for row in kept}
    for method in given.methods:
        for epsilon in given.epsilons:
            for seed in [100] if given.tune else given.seeds:
                for lr in given.tune or [TUNED[method, epsilon]]:
                    if (method, epsilon, seed) in done:
                        continue
                    row = one(given.data, method, epsilon, lr, seed)
                    print(*(row[name] for name in FIELDS), sep="\t", flush=True)
                    if not given.tune:
                        kept.append({name: str(row[name]) for name in FIELDS})
                        write(given.results, kept)


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """The table, sorted."""
    rows.sort(key=lambda row: (float(row["epsilon"]), row["method"], int(row["seed"])))
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, FIELDS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def one(data: str, method: str, epsilon: float, lr: float, seed: int) -> dict[str, object]:
    """One training."""
    from lightning_fedq.mechanisms import BandedGaussian, DistributedDiscreteGaussian, HandedOnGaussian
    from lightning_fedq.privacy.cohorts import Cyclic
    from lightning_fedq.privacy.target import PrivacyTarget
    from reproductions.useful.training import Federation, train

    clip, bits = 2.0 * lr, 18
    mechanism = {
        "HandedOnGaussian": HandedOnGaussian(clip, 1.0, 0.01, bits, num_cohorts=10),
        "DistributedDiscreteGaussian": DistributedDiscreteGaussian(clip, 1.0, 0.01, bits),
        "BandedGaussian": BandedGaussian(clip, 1.0, band=10),
        "BandedGaussian, band 1": BandedGaussian(clip, 1.0, band=1),
    }[method]
    towards = "outsider" if method.startswith("Banded") else "secagg_server"
    federation = Federation(data, False, "linear", 1000, 5, 100)
    target = PrivacyTarget(epsilon, 1e-5, towards)
    run = train(federation, mechanism, target, Cyclic(100), lr, 1.0, seed)
    validation, test = run.accuracy
    print(f"# {run.mechanism}, {run.cpu_seconds:.0f} s", file=sys.stderr, flush=True)
    return {
        "method": method,
        "towards": towards,
        "epsilon": epsilon,
        "lr": lr,
        "seed": seed,
        "validation": round(100.0 * validation, 2),
        "test": round(100.0 * test, 2),
        "spent": round(run.epsilon, 4),
        "bytes": round(run.update_bits * federation.dim / 8),
        "all_bytes": round(run.all_bits * federation.dim / 8),
    }


if __name__ == "__main__":
    main()
