"""Encoded and decoded parameters per second of every mechanism, and of the codes by themselves; one process.

    python benchmarks/encode.py --output benchmarks/results/encode.md
    python benchmarks/encode.py --only CorBin CPA --threads 1 --repeats 9

The first table is one client with a ResNet18's 11.2 million float32: `encode` with its bits counted as the
mechanism counts them (exact-error mechanisms make the whole stream), and `decode` of that one message. The
second is the same for 1,000 clients with MNIST's linear model (7,850 parameters). The third is the codes by
themselves, on messages of the layered quantiser, into and out of a bitstream. All streams are cryptographic.

Two copies of the update stand beside every mechanism, measured in turn with it: `x.clone()`, which also takes
fresh memory as an encoder's output does, and `y.copy_(x)` into memory that is already there. Medians of the
repeats; CPU seconds are the process's own, all threads together, for a machine that does other work too.
"""

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch

from lightning_fedq import mechanisms as m
from lightning_fedq.commands.mechanism_row import example
from lightning_fedq.keys.randomness import ClientRandomness, SeededKeys
from lightning_fedq.mechanisms.interface import Mechanism, RoundContext
from lightning_fedq.mechanisms.registry import mechanism_class
from lightning_fedq.wire.coding import Code, FixedLength
from lightning_fedq.wire.entropy_coding import Elias

MECHANISMS: list[Mechanism] = [
    m.FedAvg(),
    m.LDPQ(1.0),
    m.CorBin(1.0, 5),
    m.CorBin(1.0, None),
    m.AugCorBin(1.0, 5, 0.2),
    m.CorrelatedQuantization(2),
    m.CorrelatedQuantization(16),
    m.GaussianNoise(1.0, 1.0),
    m.LaplaceNoise(1.0, 1.0),
    m.PerCoordinateGaussian(1.0, 1e-5),
    m.PerCoordinateLaplace(1.0),
    m.CPA(1.0, epsilon_scope="bit"),
    m.CPA(1.0, stages=2, epsilon_scope="bit"),
    m.CPA(1.0, lattice="A2", epsilon_scope="bit"),
    m.SignRR(1.0),
    m.JoPEQ(1.0),
    m.MVU(2.0),
    m.LayeredGaussian(8.0, 0.05),
    m.LayeredGaussian(8.0, 0.05, entropy_code="elias"),
    m.LayeredGaussian(8.0, 0.05, layering="shifted"),
    m.LayeredGaussian(8.0, 0.05, entropy_code="elias", layering="shifted"),
    m.IrwinHall(8.0, 0.05),
    m.AggregateGaussian(8.0, 0.05),
    m.AggregateGaussian(8.0, 0.05, entropy_code="elias"),
    m.NearOptimalUtility(8.0, leakage_budget=0.3, noise_std=0.4, measured_leakage=0.2),
    m.DistributedDiscreteGaussian(8.0, local_sigma=0.05, granularity=0.01),
    m.RotatedCoins(8.0, 0.5),
    m.RotatedCoins(8.0, 0.5, fraction=0.125),
    m.RotatedCoins(8.0, 0.5, paired=True),
    m.SIGM(1.0, noise_multiplier=0.5, sampling_probability=0.4),
    m.CSGM(1.0, noise_multiplier=0.5, sampling_probability=0.4, bits=2),
    m.SubtractiveDither(bits=4),
    m.PairedCoins(1.0),
    m.RotatedAxes(8.0, 8.0),
    m.BandedGaussian(1.0, 1.0, band=1),
    m.QSGD(),
    m.TernGrad(),
    m.DRIVE(),
    m.EDEN(),
    m.TopK(),
    m.RandomK(),
]

Row = list[str]


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def medians(works: list[Callable[[], object]], repeats: int) -> list[tuple[float, float]]:
    """Median wall and CPU seconds of several calls, measured in turn after one warm-up."""
    for work in works:
        work()
    runs = [[timed(work) for work in works] for _ in range(repeats)]
    return [
        (statistics.median(run[i][0] for run in runs), statistics.median(run[i][1] for run in runs))
        for i in range(len(works))
    ]


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


def updates_of(num_clients: int, dim: int) -> torch.Tensor:
    return 0.05 * torch.randn(num_clients, dim, generator=torch.Generator().manual_seed(0))


def speed(count: int, seconds: tuple[float, float]) -> Row:
    """Milliseconds of wall and CPU time, and millions a second by either."""
    wall, cpu = seconds
    rates = [f"{count / 1e6 / each:.1f}" for each in seconds]
    return [f"{1e3 * wall:,.0f}", f"{1e3 * cpu:,.0f}", *rates]


SPEED = ["ms", "CPU ms", "M/s", "M/CPU s"]


def mechanism_rows(
    chosen: list[Mechanism], num_clients: int, segments: tuple[int, ...], cohort: int, repeats: int
) -> list[Row]:
    """Encode, decode and both copies, one row a mechanism."""
    updates = updates_of(num_clients, sum(segments))
    target, keys, clients, rows = torch.empty_like(updates), SeededKeys(0), range(num_clients), []
    for mechanism in chosen:
        context = context_of(mechanism, num_clients, segments, cohort)
        rand = ClientRandomness(keys, clients, 0)
        message = mechanism.encode(updates, context, rand)
        bits = message.num_bits / updates.numel()

        def encode(mechanism: Mechanism = mechanism, context: RoundContext = context) -> object:
            return mechanism.encode(updates, context, ClientRandomness(keys, clients, 0))

        def decode(
            mechanism: Mechanism = mechanism, context: RoundContext = context, symbols=message.symbols
        ) -> object:
            return mechanism.decode(symbols, clients, context, ClientRandomness(keys, clients, 0))

        found = medians([encode, decode, updates.clone, lambda: target.copy_(updates)], repeats)
        copies = [f"{found[i][0] / found[0][0]:.1%}" for i in (2, 3)]
        count = updates.numel()
        rows.append(
            [label(mechanism), f"{bits:.3f}", *speed(count, found[0]), *copies, *speed(count, found[1])]
        )
        print(" | ".join(rows[-1]), flush=True)
    return rows


def code_rows(dim: int, repeats: int) -> list[Row]:
    """The codes on messages of the layered quantiser, from mostly zeros to four bits a symbol."""
    updates, rand, rows = updates_of(1, dim), ClientRandomness(SeededKeys(0), (0,), 0), []
    for noise in (10.0, 1.0, 0.1):
        # about `noise` standard deviations of the update in one coordinate
        norm = 0.05 * dim**0.5
        mechanism = m.LayeredGaussian(norm, noise * (10**0.5) / 2.0 / dim**0.5)
        context = context_of(mechanism, 1, (dim,), 10)
        symbols = mechanism.encode(updates, context, rand).symbols.reshape(-1)
        width = int(symbols.abs().max()).bit_length() + 1
        codes: list[tuple[str, Code]] = [
            ("range coding, conditional model", mechanism.message_code(0, context, rand)),
            ("Elias gamma", replace(mechanism, entropy_code="elias").message_code(0, context, rand)),
            ("Elias delta", Elias(delta=True)),
            ("fixed length", FixedLength(width, signed=True)),
        ]
        for name, code in codes:
            stream = code.pack(symbols)
            found = medians(
                [
                    lambda code=code, symbols=symbols: code.pack(symbols),
                    lambda code=code, stream=stream: code.unpack(stream, dim),
                ],
                repeats,
            )
            row = [name, f"{noise:g}", f"{8 * len(stream) / dim:.3f}"]
            rows.append([*row, *speed(dim, found[0]), *speed(dim, found[1])])
            print(" | ".join(rows[-1]), flush=True)
    return rows


def markdown(title: str, head: Row, rows: list[Row]) -> str:
    """A titled table."""
    lines = [f"## {title}", "", "| " + " | ".join(head) + " |"]
    lines.append("| --- |" + " ---: |" * (len(head) - 1))
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])


def main() -> None:
    """Print the tables, and write them where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dim", type=int, default=11_200_000)
    parser.add_argument("--threads", type=int, default=2)
    names = sorted({type(mechanism).__name__ for mechanism in MECHANISMS})
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        default=names,
        help=f"{', '.join(names)}, or a mechanism of another package by name or class path",
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    chosen = [mechanism for mechanism in MECHANISMS if type(mechanism).__name__ in arguments.only]
    try:
        chosen += [example(mechanism_class(name)) for name in arguments.only if name not in names]
    except ValueError as error:
        parser.error(str(error))
    repeats, dim, before = arguments.repeats, arguments.dim, os.getloadavg()[0]
    head = ["bits", *(f"encode {s}" for s in SPEED), "of clone", "of copy_", *(f"decode {s}" for s in SPEED)]
    codes = ["bits", *(f"pack {s}" for s in SPEED), *(f"unpack {s}" for s in SPEED)]
    tables = [
        markdown(
            f"1 client x {dim:,} float32, cohort of 10",
            ["mechanism", *head],
            mechanism_rows(chosen, 1, (dim,), 10, repeats),
        ),
        markdown(
            "1,000 clients x 7,850 float32, cohort of 1,000",
            ["mechanism", *head],
            mechanism_rows(chosen, 1000, (7840, 10), 1000, repeats),
        ),
    ]
    title = f"Codes alone, {dim:,} symbols of the direct layered quantiser"
    tables.append(markdown(title, ["code", "noise / update", *codes], code_rows(dim, repeats)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    top = (
        f"# Encoding and decoding ({os.cpu_count()} cores, {arguments.threads} torch threads, torch "
        f"{torch.__version__}, load {before:.1f} before and {os.getloadavg()[0]:.1f} after)\n\n"
        f"Medians of {repeats} runs; bits are those of the counted bitstreams. Peak memory of the whole run "
        f"{peak:,.0f} MiB.\n\n"
    )
    text = top + "\n".join(tables)
    print("\n" + text)
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
