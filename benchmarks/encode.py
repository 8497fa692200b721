"""Encoded parameters per second, as a fraction of copying the same vector; one process, one thread.

    python benchmarks/encode.py [--repeats 9] [--dim 11200000] [--only CorBin CPA ...]

The first table is one client with a ResNet18's 11.2 million float32, the second 1,000 clients with MNIST's
linear model (7,850 parameters). Cryptographic streams throughout. Two copies stand beside every mechanism,
measured in turn with it: `x.clone()`, which also takes fresh memory as an encoder's output does, and
`y.copy_(x)` into memory that is already there. Medians of the repeats; CPU is the process's own.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import fields

import torch

from lightning_fedq.core import Mechanism, RoundContext
from lightning_fedq.mechanisms import (
    CPA,
    CSGM,
    LDPQ,
    MVU,
    SIGM,
    AggregateGaussian,
    AugCorBin,
    CorBin,
    CorrelatedQuantization,
    DistributedDiscreteGaussian,
    FedAvg,
    GaussianNoise,
    IrwinHall,
    JoPEQ,
    LaplaceNoise,
    LayeredGaussian,
    NearOptimalUtility,
    PerCoordinateGaussian,
    PerCoordinateLaplace,
    SignRR,
    StratifiedCorBin,
    SubtractiveDither,
)
from lightning_fedq.randomness import ClientRandomness, SeededKeys

MECHANISMS: list[Mechanism] = [
    FedAvg(),
    LDPQ(1.0),
    CorBin(1.0, 5),
    CorBin(1.0, None),
    AugCorBin(1.0, 5, 0.2),
    StratifiedCorBin(1.0, 10),
    CorrelatedQuantization(2),
    CorrelatedQuantization(16),
    GaussianNoise(1.0, 1.0),
    LaplaceNoise(1.0, 1.0),
    PerCoordinateGaussian(1.0, 1e-5),
    PerCoordinateLaplace(1.0),
    CPA(1.0),
    CPA(1.0, stages=2),
    CPA(1.0, lattice="E8"),
    SignRR(1.0),
    JoPEQ(1.0),
    MVU(2.0),
    LayeredGaussian(8.0, 0.05),
    LayeredGaussian(8.0, 0.05, layering="shifted"),
    IrwinHall(8.0, 0.05),
    AggregateGaussian(8.0, 0.05),
    NearOptimalUtility(8.0, leakage_budget=0.3, noise_std=0.4, measured_leakage=0.2),
    DistributedDiscreteGaussian(8.0, local_sigma=0.05, granularity=0.01),
    SIGM(1.0, noise_multiplier=0.5, sampling_probability=0.4),
    CSGM(1.0, noise_multiplier=0.5, sampling_probability=0.4, bits=2),
    SubtractiveDither(bits=4),
]


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def label(mechanism: Mechanism) -> str:
    """The mechanism without the arguments that have their default values."""
    values = [(f, getattr(mechanism, f.name)) for f in fields(mechanism)]  # type: ignore[arg-type]
    given = ", ".join(f"{f.name}={value!r}" for f, value in values if value != f.default)
    return f"{type(mechanism).__name__}({given})"


def context_of(
    mechanism: Mechanism, num_clients: int, segments: tuple[int, ...], cohort: int
) -> RoundContext:
    """A round whose first `num_clients` clients are encoded."""
    clients, groups = list(range(cohort)), []
    for size in mechanism.group_sizes(cohort):
        groups.append(tuple(clients[:size]))
        clients = clients[size:]
    radius = torch.full((len(segments),), 0.1, dtype=torch.float64)
    return RoundContext(0, tuple(groups), segments, torch.zeros_like(radius), radius)


def table(
    mechanisms: list[Mechanism], num_clients: int, segments: tuple[int, ...], cohort: int, repeats: int
) -> None:
    """Measure every mechanism against both copies and print one row each."""
    dim = sum(segments)
    updates = 0.05 * torch.randn(num_clients, dim, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(updates)
    keys, clients = SeededKeys(0), range(num_clients)
    print(f"\n{num_clients} x {dim:,} float32, cohort of {cohort}")
    print(f"{'mechanism':50} {'ms':>8} {'CPU ms':>8} {'M/s':>8} {'of clone':>9} {'of copy_':>9}")
    for mechanism in mechanisms:
        context = context_of(mechanism, num_clients, segments, cohort)
        works = (
            lambda m=mechanism, c=context: m.encode(updates, c, ClientRandomness(keys, clients, 0)),
            updates.clone,
            lambda: target.copy_(updates),
        )
        for work in works:
            work()
        runs = [[timed(work) for work in works] for _ in range(repeats)]
        wall, clone, copy = (statistics.median(run[i][0] for run in runs) for i in range(3))
        cpu = statistics.median(run[0][1] for run in runs)
        rate = updates.numel() / wall / 1e6
        print(
            f"{label(mechanism):50.50} {1e3 * wall:8.1f} {1e3 * cpu:8.1f} {rate:8.1f} "
            f"{clone / wall:9.1%} {copy / wall:9.1%}",
            flush=True,
        )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dim", type=int, default=11_200_000)
    names = sorted({type(mechanism).__name__ for mechanism in MECHANISMS})
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", default=names, help=", ".join(names)
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [mechanism for mechanism in MECHANISMS if type(mechanism).__name__ in arguments.only]
    table(chosen, 1, (arguments.dim,), cohort=10, repeats=arguments.repeats)
    table(chosen, 1000, (7840, 10), cohort=1000, repeats=arguments.repeats)


if __name__ == "__main__":
    main()
