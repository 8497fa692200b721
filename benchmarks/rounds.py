"""Seconds per federated round, wall and CPU, side by side: `python benchmarks/rounds.py`.

Systems: `loop` (a straightforward sequential PyTorch loop, below), `ours` (a Trainer with the
`Federated` callback, in several settings), `pfl` (Apple) and `flower` (its simulation). Each runs in
a process of its own, one after the other, on the same data from the same initial weights. The first
rounds of every system are warm-up and not counted; nothing is evaluated while the clock runs. The
accuracy of the resulting models stands beside the seconds, since a system that trains nothing is fast.

With `--before FOLDER`, another checkout, only `ours` runs, on the package of that folder and on this one in
turns, and the ratios are after : before.

A benchmark is not a test: it prints ratios and asserts nothing about seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from workloads import WORKLOADS, Clock, Federation, Workload, accuracy, load, prepare, workload

MARK = "fedq-benchmark-result "


def run_loop(job: Workload, data: Federation, rounds: int, clock: Clock, device: str = "cpu") -> nn.Module:
    """Federated averaging as one would write it first."""
    model = job.model().to(device)
    each = loop_rounds(job, model, Federation(*(part.to(device) for part in data)))
    clock.mark()
    for _ in range(rounds):
        next(each)
        clock.mark()
    return model


def loop_rounds(job: Workload, model: nn.Module, data: Federation) -> Iterator[None]:
    """One client after the other; yields after each round, with the global weights in the model."""
    parameters = list(model.parameters())
    state = [*parameters, *(b for b in model.buffers() if b.is_floating_point())]  # averaged, too
    current = [p.detach().clone() for p in state]
    while True:
        total = [torch.zeros_like(p) for p in current]
        for images, labels in zip(data.images, data.labels, strict=True):
            with torch.no_grad():
                for p, value in zip(state, current, strict=True):
                    p.copy_(value)
            optimizer = torch.optim.SGD(parameters, lr=job.lr)
            for x, y in zip(images.split(job.batch_size), labels.split(job.batch_size), strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                for sum_, p, value in zip(total, state, current, strict=True):
                    sum_ += p - value
        current = [value + sum_ / job.num_clients for value, sum_ in zip(current, total, strict=True)]
        with torch.no_grad():
            for p, value in zip(state, current, strict=True):
                p.copy_(value)
        yield


OURS: dict[str, dict[str, Any]] = {
    "ours-fedavg": {"mechanism": "FedAvg", "seed": 0},
    "ours-alone": {"mechanism": "FedAvg", "seed": 0, "clients_per_step": 1},
    "ours-stacked": {"mechanism": "FedAvg", "seed": 0, "clients_per_step": 10},
    "ours-corbin": {"mechanism": "CorBin", "epsilon_per_coordinate": 5.0, "seed": 0},
    "ours-corbin-secure": {"mechanism": "CorBin", "epsilon_per_coordinate": 5.0, "seed": None},
}
"""Settings of `ours`: the mechanism with its arguments, where the keys come from (None: secure ones), and how
many clients train side by side, "auto" unless said."""

PEERS = {"pfl": "pfl", "flower": "flwr"}
"""Other frameworks, measured on MNIST, and their packages."""

RADIUS = 0.05
"""Fixed range of CorBin, in units of the update; fits both workloads from the first round on."""


def run_ours(
    setting: str,
    job: Workload,
    data: Federation,
    rounds: int,
    clock: Clock,
    local_steps: int | None = None,
    device: str = "cpu",
) -> nn.Module:
    """A plain LightningModule and DataLoader, federated by the callback."""
    import pytorch_lightning as pl
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_fedq import mechanisms
    from lightning_fedq.callbacks import Federated
    from lightning_fedq.mechanisms.interface.ranges import FixedRange

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = job.model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, labels = batch
            return nn.functional.cross_entropy(self.net(images), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=job.lr)

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            samples = TensorDataset(data.images.flatten(0, 1), data.labels.flatten())
            return DataLoader(samples, batch_size=job.batch_size, shuffle=True)

    class Marks(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if not clock.marks:
                clock.mark()

        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            clock.mark()

    options = dict(OURS[setting])
    seed, mechanism = options.pop("seed"), getattr(mechanisms, options.pop("mechanism"))
    size = options.pop("clients_per_step", "auto")
    federated = Federated(
        mechanism(**options),
        job.num_clients,
        local_steps=local_steps,
        clients_per_step=size,
        ranges=FixedRange(RADIUS),
        seed=seed,
    )
    trainer = pl.Trainer(
        max_epochs=rounds,
        accelerator={"cuda": "gpu"}.get(device, device),
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[federated, Marks()],
    )
    module = Module()
    trainer.fit(module, datamodule=Data())
    return module.net


def child(system: str, job: Workload, path: str, rounds: int, threads: int, device: str) -> None:
    """Run one system in this process and print what was measured."""
    if threads:
        torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    clock, data = Clock(whole_tree=system == "flower"), load(path)
    if system == "loop":
        model = run_loop(job, data, rounds, clock, device)
    elif system == "pfl":
        import peer_pfl

        model = peer_pfl.run(job, data, rounds, clock)
    elif system == "flower":
        import peer_flower

        model = peer_flower.run(job, path, rounds, clock)
    else:
        model = run_ours(system, job, data, rounds, clock, device=device)
    print(MARK + json.dumps({"rounds": clock.rounds(), "accuracy": accuracy(model, data)}), flush=True)


def measure(
    system: str,
    job: Workload,
    path: Path,
    rounds: int,
    threads: int,
    options: argparse.Namespace,
    package: Path | None = None,
) -> Any:
    """Run one system in a process of its own; None, with the reason printed, where it is missing or fails.

    `package` is a checkout whose package to take in place of the installed one.
    """
    peer = PEERS.get(system)
    python = options.peers_python if peer else sys.executable
    if peer and subprocess.run([python, "-c", f"import {peer}"], capture_output=True).returncode:
        print(f"{system}: skipped, {python} has no {peer}; pip install -r benchmarks/peers.txt", flush=True)
        return None
    command = [python, __file__, "--child", system, "--data.root", str(path), "--rounds", str(rounds)]
    command += ["--workloads", job.name, "--clients", str(job.num_clients)]
    command += ["--threads", str(threads), "--device", options.device]
    environment = {**os.environ, **({"PYTHONPATH": str(package)} if package else {})}
    environment |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        print(f"{system}: failed with code {done.returncode}\n{done.stderr[-2000:]}", flush=True)
        return None
    return json.loads(lines[-1].removeprefix(MARK))


def table(results: dict[str, tuple[float, float, float]]) -> str:
    """Markdown: the seconds, and how many times as long each system takes as each setting of ours."""
    ours = [name for name in results if name in OURS]
    head = ["system", "wall s/round", "CPU s/round", "accuracy", *[f"{name} = 1: wall, CPU" for name in ours]]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, (wall, cpu, score) in results.items():
        ratios = [f"{wall / results[mine][0]:.1f}, {cpu / results[mine][1]:.1f}" for mine in ours]
        rows.append([name, f"{wall:.3f}", f"{cpu:.3f}", f"{score:.3f}", *ratios])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def compare(job: Workload, options: argparse.Namespace) -> str:
    """Measure all systems on one workload; return a Markdown section."""
    rounds = options.rounds or job.rounds
    text = [f"## {job.name}: {job.describe()}\n"]
    text += [f"Median of {rounds} round(s) after {options.warmup} of warm-up; accuracy after all of them.\n"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "federation.pt")
        prepare(job, options.root, path)
        for threads in options.threads or job.threads:
            results: dict[str, tuple[float, float, float]] = {}
            for system in options.systems:
                if system in PEERS and (job.images != "MNIST" or options.device != "cpu"):
                    continue
                measured = measure(system, job, path, options.warmup + rounds, threads, options)
                if measured is None:
                    continue
                timed = measured["rounds"][options.warmup :]
                wall, cpu = (statistics.median(column) for column in zip(*timed, strict=True))
                results[system] = (wall, cpu, measured["accuracy"])
                print(f"{job.name} {system}: {wall:.3f} s wall, {cpu:.3f} s CPU", flush=True)
            text += [f"torch threads: {threads or 'default'}\n", table(results), ""]
    return "\n".join(text)


def against(job: Workload, options: argparse.Namespace) -> str:
    """Measure settings of ours before and after, in turns; return a Markdown section.

    CPU seconds, the median of all timed rounds. A setting that one of the two refuses stands beside the loop.
    """
    rounds = options.rounds or job.rounds
    text = [f"## {job.name}: {job.describe()}\n"]
    text += [f"{options.turns} turns of {options.warmup} + {rounds} rounds each; median CPU s/round.\n"]
    rows = [["setting", "loop", "before", "after", "after : before", "after : loop"], ["---", *["---:"] * 5]]
    with tempfile.TemporaryDirectory() as folder:
        path, here = Path(folder, "federation.pt"), Path(__file__).parents[1]
        prepare(job, options.root, path)
        for system in (system for system in options.systems if system in OURS):
            seconds: dict[str, list[float]] = {"loop": [], "before": [], "after": []}
            for turn in range(options.turns):
                kinds = [("before", options.before), ("after", here), ("loop", None)]
                for name, package in kinds if turn % 2 else kinds[::-1]:
                    what = "loop" if name == "loop" else system
                    done = measure(
                        what, job, path, options.warmup + rounds, options.threads[0], options, package
                    )
                    if done is not None:
                        seconds[name] += [cpu for _, cpu in done["rounds"][options.warmup :]]
            found = {name: statistics.median(times) if times else None for name, times in seconds.items()}
            row = [system, *(f"{value:.4f}" if value else "refused" for value in found.values())]
            for below in ("before", "loop"):
                ratio = found["after"] / found[below] if found["after"] and found[below] else None
                row.append("" if ratio is None else f"{ratio:.2f}")
            rows.append(row)
            print("| " + " | ".join(row) + " |", flush=True)
    return "\n".join([*text, *("| " + " | ".join(row) + " |" for row in rows), ""])


def main() -> None:
    """Read the command line, measure, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    systems = ["loop", *OURS, "pfl", "flower"]
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--systems", nargs="+", choices=["ours", *systems], default=systems)
    parser.add_argument("--rounds", type=int, help="timed rounds (default: 3 for W1, 1 for W2 and W3)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before the timed ones")
    parser.add_argument("--clients", type=int, help="another number of clients, for all chosen workloads")
    parser.add_argument(
        "--w2-clients", type=int, help="another number of clients for W2, e.g. 10 on a slow machine"
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", help="torch threads, one table each; 0 is torch's choice"
    )
    parser.add_argument(
        "--data.root", dest="root", type=Path, default=Path(os.environ.get("FEDQ_DATA") or "data")
    )
    parser.add_argument(
        "--peers-python", default=sys.executable, help="interpreter that has the peers installed"
    )
    parser.add_argument("--before", type=Path, help="another checkout: ours there and here, in turns")
    parser.add_argument("--turns", type=int, default=3, help="processes of each, with --before")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of loop and ours")
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    jobs = [
        workload(name, options.clients or (options.w2_clients if name == "W2" else None))
        for name in options.workloads
    ]
    if options.child:
        child(options.child, jobs[0], str(options.root), options.rounds, options.threads[0], options.device)
        return
    if options.warmup < 1:
        parser.error(f"--warmup must be >= 1, got {options.warmup}")
    options.systems = [s for name in options.systems for s in (OURS if name == "ours" else [name])]
    machine = f"{os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"
    if options.device == "cuda":
        machine += f", {torch.cuda.get_device_name()}"
    machine += f", load {os.getloadavg()[0]:.1f} before the run"
    if options.before:
        options.threads = options.threads or [1]
    table_of = against if options.before else compare
    text = "\n".join([f"# Seconds per round ({machine})\n", *[table_of(job, options) for job in jobs]])
    print("\n" + text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
