"""What every system of `rounds.py` must do, and how it is timed: data, models, the clock, the accuracy.

Nothing here knows lightning_fedq or a peer, so that the file runs in an environment with torch alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

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


def cnn_channels_last() -> nn.Module:
    """The same network in the memory format that torch's convolutions like best."""
    return cnn().to(memory_format=torch.channels_last)


class Block(nn.Module):
    """Two normalised convolutions, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))
        return torch.relu(inner + self.around(x))


def resnet8() -> nn.Module:
    """For images of 32 x 32, with BatchNorm."""
    stem = (nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    blocks = (Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


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
        images: Of MNIST, or random ones shaped as CIFAR-10's.
    """

    name: str
    architecture: Callable[[], nn.Module]
    num_clients: int
    samples_per_client: int
    batch_size: int
    lr: float
    rounds: int
    threads: tuple[int, ...]
    images: Literal["MNIST", "CIFAR-shaped"] = "MNIST"

    def model(self) -> nn.Module:
        """Return the model with the initial weights that all systems start from."""
        torch.manual_seed(0)
        return self.architecture()

    def describe(self) -> str:
        size = sum(p.numel() for p in self.model().parameters())
        steps = -(-self.samples_per_client // self.batch_size)
        return (
            f"{self.images}, {self.architecture.__name__} ({size:,} parameters), {self.num_clients:,} "
            f"clients x {self.samples_per_client} samples, batch {self.batch_size}, {steps} local step(s)"
        )


WORKLOADS = {
    "W1": Workload("W1", linear, 1000, 5, batch_size=5, lr=0.1, rounds=3, threads=(0, 1)),
    "W2": Workload("W2", cnn, 50, 960, batch_size=64, lr=0.05, rounds=1, threads=(0,)),
    "W2L": Workload("W2L", cnn_channels_last, 50, 960, batch_size=64, lr=0.05, rounds=1, threads=(0,)),
    "W3": Workload("W3", resnet8, 50, 20, 10, lr=0.05, rounds=1, threads=(1,), images="CIFAR-shaped"),
}


def workload(name: str, num_clients: int | None = None) -> Workload:
    """Look a workload up, with another number of clients if one is given."""
    found = WORKLOADS[name]
    return found if num_clients is None else replace(found, num_clients=num_clients)


class Federation(NamedTuple):
    """Who holds what: `(clients, samples, *image)` and `(clients, samples)`, and the test set."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def synthetic(job: Workload) -> Federation:
    """Ten random pictures and much noise, shaped as CIFAR-10."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(10, 3, 32, 32, generator=generator)
    shape = (job.num_clients, job.samples_per_client)
    parts: list[Tensor] = []
    for size in (shape, (1000,)):
        labels = torch.randint(10, size, generator=generator)
        parts += [0.3 * means[labels] + torch.randn(*size, 3, 32, 32, generator=generator), labels]
    return Federation(*parts)


def prepare(job: Workload, root: Path, path: Path) -> None:
    """Write a workload's federation to `path`, MNIST's from files under `root` (downloaded if missing)."""
    if job.images == "CIFAR-shaped":
        torch.save(tuple(synthetic(job)), path)
        return
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
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # work that was only handed to the GPU is not done
        cpu = tree_cpu_seconds() if self.whole_tree else time.process_time()
        self.marks.append((time.perf_counter(), cpu))

    def rounds(self) -> list[tuple[float, float]]:
        """Wall and CPU seconds of every round."""
        return [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.marks, self.marks[1:], strict=False)]


@torch.no_grad()
def accuracy(model: nn.Module, data: Federation) -> float:
    model.eval()
    device = next(model.parameters()).device
    parts = data.test_images.split(1000)
    predictions = torch.cat([model(part.to(device)).argmax(1).cpu() for part in parts])
    return (predictions == data.test_labels).double().mean().item()
