"""Everything that wants a GPU, by one command and in at most ten minutes: `make gpu`.

In turn, each in a process of its own with a limit of time: seconds per round of the workloads, and two rounds
of every method of `corbin-exp1 --preset paper` (ResNet18, 38,400 images; it needs CIFAR-10 under
`--data.root`). What each prints goes to the terminal and to `--out`. Without a GPU it says so and stops with
status 2.

`--rehearse` runs the same steps in miniature on the CPU, to see that they run; its times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]


class Step(NamedTuple):
    """One command, and how many seconds it may take."""

    name: str
    command: list[str]
    seconds: int


def steps(device: str, root: str, out: Path) -> list[Step]:
    """The steps, in miniature where the device is the CPU."""
    python, here, small = sys.executable, str(ROOT / "benchmarks"), device == "cpu"
    rounds = ["--rounds", "1", "--workloads", "W1", "--clients", "4"] if small else ["--rounds", "2"]
    preset = ["--preset", "small", "--rounds", "1"] if small else ["--preset", "paper", "--rounds", "2"]
    reproduce = [python, "-m", "reproductions", "corbin-exp1", "--data.root", root, *preset]
    chosen = ["--seeds", "[0]", "--smoothing", "[1.0]", "--norms", "[group]"]
    systems = ["--threads", "0", "--systems", "loop", "ours-fedavg", "ours-corbin"]
    return [
        Step(
            "rounds",
            [python, f"{here}/rounds.py", "--device", device, "--data.root", root, *rounds, *systems],
            160,
        ),
        Step("corbin-exp1", [*reproduce, *chosen, "--out", str(out / "corbin-exp1")], 240),
    ]


def run(step: Step, out: Path, patience: int) -> str:
    """Run one step within so many times its seconds, show and keep what it prints, say how it ended."""
    print(f"== {step.name}: {' '.join(step.command)}", flush=True)
    start, text, end = time.monotonic(), "", "done"
    try:
        done = subprocess.run(
            step.command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=patience * step.seconds,
            check=False,
        )
        text = done.stdout + done.stderr
        if done.returncode:
            end = f"FAILED with status {done.returncode}"
    except subprocess.TimeoutExpired as late:
        text = "".join(
            part.decode() if isinstance(part, bytes) else part or "" for part in (late.stdout, late.stderr)
        )
        end = f"STOPPED after its {patience * step.seconds} seconds"
    (out / f"{step.name}.txt").write_text(text)
    print(text)
    return f"{step.name}: {end} ({time.monotonic() - start:.0f} s)"


def main() -> int:
    """Run all steps; 0 if each ended well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data.root", dest="root", default=os.environ.get("FEDQ_DATA") or "data")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--rehearse", action="store_true", help="in miniature on the CPU")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        print("no GPU: torch sees none, so there is nothing to measure here", file=sys.stderr)
        return 2
    device = "cpu" if options.rehearse else "cuda"
    name = "CPU, a rehearsal" if options.rehearse else torch.cuda.get_device_name()
    print(f"device: {name}, torch {torch.__version__}")
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    patience = 10 if options.rehearse else 1
    ended = [run(step, out, patience) for step in steps(device, str(Path(options.root).resolve()), out)]
    print("\n".join(ended))
    return int(any("FAILED" in line or "STOPPED" in line for line in ended))


if __name__ == "__main__":
    sys.exit(main())
