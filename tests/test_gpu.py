"""`make gpu`: it stops where there is no GPU, and what it would run exists."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FEDQ_DATA = os.environ.get("FEDQ_DATA", "")


def gpu(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: `make gpu` runs for minutes")
def test_without_a_gpu_it_says_so_and_stops(tmp_path):
    done = gpu("--out", str(tmp_path / "out"))
    assert done.returncode == 2 and done.stderr.startswith("no GPU") and not done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(not FEDQ_DATA, reason="FEDQ_DATA is not set: no MNIST here")
def test_the_rehearsal_runs_every_step(tmp_path):
    done = gpu("--rehearse", "--data.root", FEDQ_DATA, "--out", str(tmp_path / "out"))
    rounds, experiment = (line.split(" (")[0] for line in done.stdout.splitlines()[-2:])
    assert rounds == "rounds: done"
    if experiment != "corbin-exp1: done":  # no CIFAR-10 beside MNIST
        assert "no cifar-10-batches-py" in (tmp_path / "out" / "corbin-exp1.txt").read_text()
