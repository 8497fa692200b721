"""Peak memory against the number of clients: `python benchmarks/memory.py`.

W1's model with CorBin on the same 50,000 samples of MNIST, shared by 10 and by 10,000 clients, one local
step of five samples each, every client in every round. Peak resident memory of a process of its own for
each; memory that grows with the clients rather than with the model and the stack shows as a difference.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

from rounds import MARK, OURS, run_ours
from workloads import Clock, load, prepare, workload

MIB = 2**20


def peak_bytes() -> int:
    """Peak resident memory of this process image.

    Linux's own counter is preferred: `ru_maxrss` there survives exec and can be the parent's.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def child(path: str, num_clients: int, rounds: int, setting: str) -> None:
    """Train and print the peak."""
    warnings.filterwarnings("ignore")
    job = replace(workload("W1"), num_clients=num_clients)
    run_ours(setting, job, load(path), rounds, Clock(), local_steps=1)
    print(f"{MARK}{peak_bytes()}", flush=True)


def main() -> None:
    """Read the command line, measure, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 10_000])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--setting", choices=OURS, default="ours-corbin")
    parser.add_argument(
        "--data.root", dest="root", type=Path, default=Path(os.environ.get("FEDQ_DATA") or "data")
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.clients[0], options.rounds, options.setting)
        return
    print("| clients | peak MiB | more than the first |\n| ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "federation.pt")
        prepare(workload("W1", 10_000), options.root, path)
        first = None
        for clients in options.clients:
            command = [sys.executable, __file__, "--child", str(path), "--clients", str(clients)]
            command += ["--rounds", str(options.rounds), "--setting", options.setting]
            done = subprocess.run(command, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
            if not lines:
                sys.exit(f"{clients} clients: failed with code {done.returncode}\n{done.stderr[-2000:]}")
            peak = int(lines[-1].removeprefix(MARK))
            first = first or peak
            print(f"| {clients:,} | {peak / MIB:.1f} | {(peak - first) / MIB:+.1f} |", flush=True)


if __name__ == "__main__":
    main()
