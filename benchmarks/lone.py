"""Small clients, one at a time or in stacks, in turns with a bare PyTorch loop: `python benchmarks/lone.py`.

W1, a linear model and one step a client, `clients_per_step=1` unless `--setting` names another of
`rounds.py`. Between two rounds of the fit the loop of `rounds.py` trains one on the same data, in the same
process, so that other work on the machine meets both. CPU seconds; the first rounds of both are warm-up. It
asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rounds import OURS, loop_rounds, run_ours
from workloads import load, prepare, workload


class Turns:
    """A clock of the fit, which trains a round of the loop when one of the fit has ended."""

    def __init__(self, loop: Any) -> None:
        self._loop, self.marks = loop, [0.0]
        self.ours, self.loop = list[float](), list[float]()

    def mark(self) -> None:
        """Note the fit's round that ends here, and train one of the loop."""
        now = time.process_time()
        self.ours.append(now - self.marks[-1])
        next(self._loop)
        self.marks.append(time.process_time())
        self.loop.append(self.marks[-1] - now)


def main() -> None:
    """Print microseconds a client, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", choices=OURS, default="ours-alone")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--data.root", dest="root", type=Path, default=os.environ.get("FEDQ_DATA") or "data")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    job = workload("W1", given.clients)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "federation.pt")
        prepare(job, given.root, path)
        data = load(path)
    turns = Turns(loop_rounds(job, job.model(), data))
    run_ours(given.setting, job, data, given.rounds + given.warmup, turns)
    pairs = list(zip(turns.ours, turns.loop, strict=True))[given.warmup :]
    for name, of in (("quickest", min), ("median", statistics.median)):
        ours, loop = (1e6 / job.num_clients * of(column) for column in zip(*pairs, strict=True))
        print(f"us a client, {name} round: ours {ours:.0f}, loop {loop:.0f}, ratio {ours / loop:.2f}")
    print(f"median of the pairs' ratios: {statistics.median(own / bare for own, bare in pairs):.2f}")


if __name__ == "__main__":
    main()
