"""What every system of `rounds.py` must do, and how it is timed: data, models, the clock, the accuracy.

Nothing here knows lightning_fedq or a peer, so that the file runs in an environment with torch alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 10),
    )


@dataclass(frozen=True)
class Workload:
    """One federated job; every client trains one local epoch in each round and nobody is left out.

    Args:
        name: Short name on the command line.
        architecture: Builds the untrained model.
        num_clients: Clients, all of them in every round.
        samples_per_client: Samples of each.
        batch_size: Local batch size.
        lr: Learning rate of the clients' plain SGD.
        rounds: Timed rounds by default.
        threads: Settings of torch's threads by default; 0 is torch's own choice.
    """

    name: str
    architecture: Callable[[], nn.Module]
    num_clients: int
    samples_per_client: int
    batch_size: int
    lr: float
    rounds: int
    threads: tuple[int, ...]

    def model(self) -> nn.Module:
        """Return the model with the initial weights that all systems start from."""
        torch.manual_seed(0)
        return self.architecture()

    def describe(self) -> str:
        size = sum(p.numel() for p in self.model().parameters())
        steps = -(-self.samples_per_client // self.batch_size)
        return (
            f"MNIST, {self.architecture.__name__} ({size:,} parameters), {self.num_clients:,} clients x "
            f"{self.samples_per_client} samples, batch {self.batch_size}, {steps} local step(s)"
        )


WORKLOADS = {
    "W1": Workload("W1", linear, 1000, 5, batch_size=5, lr=0.1, rounds=3, threads=(0, 1)),
    "W2": Workload("W2", cnn, 50, 960, batch_size=64, lr=0.05, rounds=1, threads=(0,)),
}


def workload(name: str, num_clients: int | None = None) -> Workload:
    """Look a workload up, with another number of clients if one is given."""
    found = WORKLOADS[name]
    return found if num_clients is None else replace(found, num_clients=num_clients)


class Federation(NamedTuple):
    """Who holds what: `(clients, samples, 1, 28, 28)` and `(clients, samples)`, and the test set."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def prepare(job: Workload, root: Path, path: Path) -> None:
    """Write a workload's federation to `path`, from the MNIST files under `root` (downloaded if missing)."""
    from torchvision.datasets import MNIST

    sets = [MNIST(root, train=train, download=True) for train in (True, False)]
    (images, labels), (test_images, test_labels) = (
        ((s.data.float().unsqueeze(1) / 255 - 0.1307) / 0.3081, s.targets) for s in sets
    )
    shape = (job.num_clients, job.samples_per_client)
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[: shape[0] * shape[1]]
    torch.save(
        (images[chosen].view(*shape, 1, 28, 28), labels[chosen].view(shape), test_images, test_labels), path
    )


def load(path: str | Path) -> Federation:
    return Federation(*torch.load(path))


def tree_cpu_seconds() -> float:
    """CPU seconds of this process and of everything below it, running or ended."""
    import psutil

    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass
class Clock:
    """Wall and CPU time at the start of the first round and at the end of every round.

    Args:
        whole_tree: Count child processes too, in ticks of 10 ms; for a system that works in them.
    """

    whole_tree: bool = False
    marks: list[tuple[float, float]] = field(default_factory=list)

    def mark(self) -> None:
        cpu = tree_cpu_seconds() if self.whole_tree else time.process_time()
        self.marks.append((time.perf_counter(), cpu))

    def rounds(self) -> list[tuple[float, float]]:
        """Wall and CPU seconds of every round."""
        return [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.marks, self.marks[1:], strict=False)]


@torch.no_grad()
def accuracy(model: nn.Module, data: Federation) -> float:
    model.eval()
    predictions = torch.cat([model(part).argmax(1) for part in data.test_images.split(1000)])
    return (predictions == data.test_labels).double().mean().item()
