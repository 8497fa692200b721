"""Where a round of many small clients goes, two versions of the package in turns.

    python benchmarks/streams.py --before CHECKOUT --data.root FOLDER

W1 (linear model, 1,000 clients x 5 samples, one step), one thread, CPU ms a round: the whole, encoding with
its streams, the streams alone (opened once more by themselves: one for each client and, for CorBin, one
for each pair), training, and the rest. Every run is a process of its own; the first two rounds are warm-up.
Without `--before` this version runs alone. Printed are medians, and after : before.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK, ROUNDS, WARM = "fedq-streams ", 14, 2
PARTS = ("whole", "encode", "streams", "training", "rest")


def timed(kind: type, name: str, spent: list[float]) -> None:
    """Add the CPU seconds of every call of a method to a list."""
    work: Callable[..., Any] = getattr(kind, name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return work(*args, **kwargs)
        finally:
            spent.append(time.process_time() - start)

    setattr(kind, name, measured)


def streams(round: int, paired: bool) -> float:
    """CPU seconds to open one round's streams."""
    from lightning_fedq.keys.randomness import ClientRandomness, SeededKeys

    keys = SeededKeys(0)
    for each in (round, round + 1):  # the first makes the keys that clients keep
        start = time.process_time()
        rand = ClientRandomness(keys, range(1000), each)
        opened = [rand.private(client, "coins") for client in range(1000)]
        opened += [rand.peer((first, first + 1), "coins") for first in range(0, 1000, 2) if paired]
        spent = time.process_time() - start
    return spent


def child(setting: str, path: str) -> None:
    """Run one version of the package and print its parts."""
    import torch
    from rounds import OURS, run_ours
    from workloads import Clock, load, workload

    from lightning_fedq import mechanisms
    from lightning_fedq.clients.fit import ClientFit

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    OURS["ours-gaussian"] = {
        "mechanism": "GaussianNoise",
        "clip_norm": 1.0,
        "noise_multiplier": 0.01,
        "seed": 0,
    }
    encoding: list[float] = []
    training: list[float] = []
    timed(getattr(mechanisms, OURS[setting]["mechanism"]), "encode", encoding)
    timed(ClientFit, "train", training)
    clock = Clock(whole_tree=False)
    run_ours(setting, workload("W1"), load(path), ROUNDS, clock)
    whole = statistics.median(cpu for _, cpu in clock.rounds()[WARM:])
    per_round = [len(spent) // ROUNDS for spent in (encoding, training)]
    encode, train = (
        statistics.median(sum(spent[i : i + n]) for i in range(WARM * n, ROUNDS * n, n))
        for spent, n in zip((encoding, training[-ROUNDS * per_round[1] :]), per_round, strict=True)
    )
    alone = statistics.median(streams(2 * i, "corbin" in setting) for i in range(9))
    parts = dict(zip(PARTS, (whole, encode, alone, train, whole - encode - train), strict=True))
    print(MARK + json.dumps(parts), flush=True)


def measure(setting: str, path: Path, package: Path | None) -> dict[str, float]:
    """One run in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": str(package)} if package else {})}
    command = [sys.executable, __file__, "--child", setting, "--data.root", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise SystemExit(f"{setting} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(lines[0].removeprefix(MARK))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout of this repository")
    parser.add_argument("--data.root", dest="root", default=os.environ.get("FEDQ_DATA", "data"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child, options.root)
    from workloads import prepare, workload

    versions = [("before", options.before.resolve())] if options.before else []
    versions.append(("after", Path(__file__).parents[1]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w1.pt"
        prepare(workload("W1"), Path(options.root), path)
        print("| CPU ms of a W1 round | " + " | ".join(PARTS) + " |\n| --- |" + " ---: |" * len(PARTS))
        for setting in ("ours-corbin", "ours-gaussian"):
            runs = [
                {name: measure(setting, path, at) for name, at in versions} for _ in range(options.repeats)
            ]
            found = {n: {p: statistics.median(r[n][p] for r in runs) for p in PARTS} for n, _ in versions}
            for name, parts in found.items():
                print(f"| {setting}, {name} | " + " | ".join(f"{1e3 * parts[p]:.1f}" for p in PARTS) + " |")
            if options.before:
                ratios = [found["after"][p] / found["before"][p] for p in PARTS]
                print(
                    f"| {setting}, after : before | " + " | ".join(f"{r:.2f}" for r in ratios) + " |",
                    flush=True,
                )
    return None


if __name__ == "__main__":
    main()
