"""Seconds a round by one process of one thread, one of two, and two ranks: `python benchmarks/ranks.py`.

The three run one after the other, and all of that several times, so that a machine that others use shows up
as spread and not as a result. Speed-ups are ratios of medians. Beside the clock on the wall stands CPU time:
that of one process over that of the busier rank is the speed-up of a machine with nothing else to do, if
waiting costs nothing. Ranks measure what an exchange takes once everybody is there, how much of that is CPU
time, all threads together, and how long they wait. The quickest round is one that nobody else's work delayed.

A benchmark is not a test: it prints ratios and asserts nothing about seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

MODES = {"1 process, 1 thread": (1, 1), "1 process, 2 threads": (1, 2), "2 ranks, 1 thread each": (2, 1)}
STACKS = {"W1": 250, "W2": 1, "W3": 5}
CLIENTS = {"W1": 1000, "W2": 6, "W3": 50}


def one(job_name: str, data: str, ranks: int, threads: int, rounds: int, output: str) -> None:
    """Train in this process and write what was measured."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    import pytorch_lightning as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from workloads import Clock, load, workload

    from lightning_fedq.callbacks import Federated
    from lightning_fedq.data.models import Classifier
    from lightning_fedq.mechanisms import CorBin
    from lightning_fedq.mechanisms.interface.ranges import FixedRange
    from lightning_fedq.training.rank_group import RankGroup

    torch.set_num_threads(threads)
    job, clock = workload(job_name, CLIENTS[job_name]), Clock()
    held = load(data)
    spent: dict[str, list[float]] = {"exchange": [0.0], "exchange CPU": [0.0], "waiting": [0.0]}

    def timed(name: str) -> None:
        inner = getattr(RankGroup, name)

        def outer(group: Any, *arguments: Any) -> Any:
            begun = time.perf_counter()
            ones = [torch.zeros(1) for _ in range(group.size)]
            group._objects.allgather([ones], [torch.zeros(1)]).wait()  # until everybody is there
            there, cpu = time.perf_counter(), time.process_time()
            found = inner(group, *arguments)
            spent["waiting"][-1] += there - begun
            spent["exchange"][-1] += time.perf_counter() - there
            spent["exchange CPU"][-1] += time.process_time() - cpu
            return found

        setattr(RankGroup, name, outer)

    timed("_gather")
    timed("add")
    timed("allgather")

    class Marks(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if not clock.marks:
                clock.mark()

        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            clock.mark()
            for times in spent.values():
                times.append(0.0)

    samples = TensorDataset(held.images.flatten(0, 1), held.labels.flatten())
    federated = Federated(
        CorBin(epsilon_per_coordinate=5.0),
        job.num_clients,
        clients_per_step=STACKS[job_name],
        ranges=FixedRange(0.05),
        seed=0,
        diagnostics=False,
    )
    trainer = pl.Trainer(
        max_epochs=rounds + 1,
        accelerator="cpu",
        devices=ranks,
        strategy="fedq_clients" if ranks > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[federated, Marks()],
    )
    loader = DataLoader(samples, batch_size=job.batch_size, shuffle=True)
    trainer.fit(Classifier(job.model(), lr=job.lr), train_dataloaders=loader)
    assert federated.engine is not None
    found = {
        "rounds": clock.rounds()[1:],
        **{name: times[1:-1] for name, times in spent.items()},
        "weights": float(federated.engine.weights.double().sum()).hex(),
    }
    Path(f"{output}-{trainer.strategy.global_rank}.json").write_text(json.dumps(found))


def measure(job: str, data: Path, mode: str, rounds: int) -> list[dict[str, Any]]:
    """Run one way of training in processes of its own, and return what each rank found."""
    ranks, threads = MODES[mode]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found"
        own = [job, str(data), str(ranks), str(threads), str(rounds), str(output)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run([sys.executable, __file__, "--one", *own], env=environment, check=True)
        return [json.loads(Path(f"{output}-{rank}.json").read_text()) for rank in range(ranks)]


def spread(values: list[float], digits: int = 3) -> str:
    """Median, and from where to where."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(job: str, data: Path, rounds: int, times: int) -> str:
    """Run everything and return the table."""
    found: dict[str, list[list[dict[str, Any]]]] = {mode: [] for mode in MODES}
    begun = os.getloadavg()[0]
    for _ in range(times):
        for mode, runs in found.items():
            runs.append(measure(job, data, mode, rounds))
    wall = {
        m: [statistics.median(r[0] for r in run[0]["rounds"]) for run in runs] for m, runs in found.items()
    }
    cpu = {
        mode: [max(statistics.median(r[1] for r in rank["rounds"]) for rank in run) for run in runs]
        for mode, runs in found.items()
    }
    lines = [
        f"## {job}: {CLIENTS[job]:,} clients, {STACKS[job]} a step; {times} times {rounds} round(s) after "
        f"one of warm-up; load {begun:.1f} before, {os.getloadavg()[0]:.1f} after",
        "",
        "| | wall s/round | CPU s/round of the busier rank | speed-up, wall | speed-up, CPU |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    first = next(iter(MODES))
    for mode in MODES:
        pairs = zip(wall[first], wall[mode], strict=True), zip(cpu[first], cpu[mode], strict=True)
        ratios = [spread([a / b for a, b in pair], 2) for pair in pairs]
        lines.append(f"| {mode} | {spread(wall[mode])} | {spread(cpu[mode])} | {ratios[0]} | {ratios[1]} |")
    ranked = [rank for run in found[list(MODES)[-1]] for rank in run]
    exchange, cpu_of_it, waiting = (
        [1e3 * statistics.median(rank[name]) for rank in ranked]
        for name in ("exchange", "exchange CPU", "waiting")
    )
    quickest = [1e3 * min(rank["exchange"]) for rank in ranked]
    share, least = (0.1 * statistics.median(v) / statistics.median(wall[first]) for v in (exchange, quickest))
    compared = [rank["weights"] for mode in (first, list(MODES)[-1]) for run in found[mode] for rank in run]
    verdict = "the same" if len(set(compared)) == 1 else "DIFFERENT"
    return "\n".join(
        [
            *lines,
            "",
            f"Exchange: {spread(exchange, 1)} ms a round once everybody is there, {share:.1f}% of a round of "
            f"one process; in the quickest round of each run {spread(quickest, 1)} ms, {least:.1f}%; its CPU "
            f"time {spread(cpu_of_it, 1)} ms. Waiting for the other rank: {spread(waiting, 1)} ms. Ranks and "
            f"the process of one thread end with {verdict} weights.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, default=3, help="how often everything is run")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FEDQ_DATA", "data")))
    parser.add_argument("--output", type=Path, help="write the tables here, too")
    options = parser.parse_args()
    if options.one:
        job, data, *numbers, output = options.one
        one(job, data, *map(int, numbers), output)
        return
    import torch
    from workloads import prepare, workload

    with tempfile.TemporaryDirectory() as folder:
        tables = []
        for name in options.workloads:
            path = Path(folder) / f"{name}.pt"
            prepare(workload(name, CLIENTS[name]), options.data, path)
            tables.append(table(name, path, options.rounds, options.times))
            print(tables[-1], end="\n\n", flush=True)
    head = f"# Seconds a round over ranks ({os.cpu_count()} cores, torch {torch.__version__})"
    if options.output:
        options.output.write_text("\n\n".join([head, *tables]) + "\n")


if __name__ == "__main__":
    main()
