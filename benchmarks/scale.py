"""What grows with the number of clients: `python benchmarks/scale.py`, one process of one thread.

CPU time, since a busy machine stretches the wall clock. Everything but the lines marked "from" is measured at
the size that is written there.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import CPA, AggregateGaussian, CorBin, SubtractiveDither
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.privacy.journal import Journal
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.rounds import RoundClient, RoundEngine, RoundPlanner, RoundServer, StreamLog
from lightning_fedq.secagg import SecAgg

SIZES = (1_000, 10_000, 100_000, 1_000_000)
CORBIN = CorBin(epsilon_per_coordinate=1.0, shared_bits=5)


@contextmanager
def stopped(seconds: list[float]) -> Iterator[None]:
    begun = time.process_time()
    yield
    seconds.append(time.process_time() - begun)


def took(call: Callable[[], object]) -> float:
    seconds: list[float] = []
    with stopped(seconds):
        call()
    return seconds[0]


def words(value: float) -> str:
    """A number of bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.3g} {unit}"
        value /= 1000
    return ""


def row(name: str, *values: object) -> None:
    print(f"| {name} | " + " | ".join(map(str, values)) + " |", flush=True)


def head(title: str, *columns: str) -> None:
    print(f"\n## {title}\n")
    row("", *columns)
    row("---", *("---:" for _ in columns))


def decode(dim: int, clients: int) -> None:
    """The server's half of a round: what each answer costs it, frame, check, unpack and add."""
    head(
        f"The server's decode: {dim:,} coordinates, from {clients} answers",
        *("ms an answer", "finish, ms", "from this, 10^5 answers: minutes", "10^6: hours"),
    )
    mechanisms: list[Mechanism] = [CORBIN, SubtractiveDither(bits=4), CPA(epsilon=1.0, epsilon_scope="bit")]
    mechanisms.append(AggregateGaussian(clip_norm=8.0, noise_multiplier=0.05))
    for mechanism in mechanisms:
        keys, weights = SeededKeys(0), torch.zeros(dim)
        server = RoundServer(mechanism, RoundPlanner(clients, 0), keys, weights, [dim], FixedRange(0.1))
        server.start()
        task = server.task()
        sides = [RoundClient(c, mechanism, keys, StreamLog(None, str(c))) for c in range(clients)]
        generator = torch.Generator().manual_seed(0)
        answers = [s.answer(task, weights, 0.01 * torch.randn(dim, generator=generator)) for s in sides]
        server.receive_message(answers[0])  # what is loaded and compiled once
        each = took(partial(list, map(server.receive_message, answers[1:]))) / (clients - 1)
        last = took(server.finish)
        row(
            type(mechanism).__name__,
            f"{1e3 * each:.2f}",
            f"{1e3 * last:.1f}",
            f"{1e5 * each / 60:.1f}",
            f"{1e6 * each / 3600:.2f}",
        )


def cohorts() -> None:
    """Plan, task, ledger and journal of one round, by the number of clients that are asked."""
    head("One round of so many clients", *(f"{size:,}" for size in SIZES))
    found: dict[str, list[str]] = {}

    def say(name: str, value: str) -> None:
        found.setdefault(name, []).append(value)

    for size in SIZES:
        planner = RoundPlanner(size, 0)
        say("plan, s", f"{took(partial(planner.plan, 0, CORBIN)):.3f}")
        ledger = Ledger(size, repr(CORBIN))
        everybody = list(range(size))
        server = RoundServer(CORBIN, planner, SeededKeys(0), torch.zeros(10), [10], FixedRange(0.1))
        say("start (plan and charge), s", f"{took(server.start):.3f}")
        say("task, to each client", words(len(server.task().to_bytes())))
        say("a client reads the task, s", f"{took(server.task().context):.3f}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "journal.jsonl"
            ledger.keep(Journal(path, ledger.mechanism, size), repeatable=False)
            bare = path.stat().st_size
            say(
                "charge, of half of them, s", f"{took(lambda e=everybody, k=ledger: k.charge(e[::2], 0)):.3f}"
            )  # type: ignore[misc]
            say("journal, a round of half of them", words(path.stat().st_size - bare))
            again = Journal(path, ledger.mechanism, size)
            say("reading that line again, s", f"{took(again.unread):.3f}")
        state = ledger.state_dict()
        tensors = sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, torch.Tensor))
        say("ledger in a checkpoint", words(tensors))
    for name, values in found.items():
        row(name, *values)


def secagg(dim: int) -> None:
    """What secure aggregation asks of one client, by its cohort: on paper, from the rules of the protocol."""
    head("Secure aggregation, 10% corrupt and 10% dropouts", *(f"{size:,}" for size in SIZES))
    settings = SecAgg(degree="auto", max_colluding_fraction=0.1, max_dropped_fraction=0.1)
    degrees = [settings.rules(size, size)[0] for size in SIZES]
    row("neighbours = key agreements and masks of a client", *degrees)
    row("in the complete graph", *(f"{size - 1:,}" for size in SIZES))
    planners = [RoundPlanner(size, 0) for size in SIZES]
    widths = []
    for planner in planners:
        server = RoundServer(CORBIN, planner, SeededKeys(0), torch.zeros(dim), [dim], FixedRange(0.1))
        context = server.context(planner.plan(0, CORBIN))
        layout = settings.layout(CORBIN, context, PublicRandomness(SeededKeys(0), 0))
        widths.append(8 * layout.num_bytes / dim)
    row("bits of a masked one-bit symbol", *(f"{width:.1f}" for width in widths))
    row("uplink of a client over that without masking", *(f"{width:.0f} x" for width in widths))


def simulation(dim: int) -> None:
    """A whole simulated round, updates given: encode, add, decode. One process."""
    sizes = [size for size in SIZES if size * dim <= 10**9]
    head(f"A simulated round without training: {dim:,} coordinates, CorBin", *(f"{size:,}" for size in sizes))
    seconds, memory = [], []
    for size in sizes:
        engine = RoundEngine(
            CORBIN,
            RoundPlanner(size, 0),
            SeededKeys(0),
            torch.zeros(dim),
            [dim],
            FixedRange(0.1),
            diagnostics=False,
        )
        update = 0.01 * torch.randn(250, dim, generator=torch.Generator().manual_seed(0))

        def round_(engine: RoundEngine = engine, update: torch.Tensor = update) -> None:
            clients = engine.start().survivors
            for first in range(0, len(clients), 250):
                engine.receive(clients[first : first + 250], update)
            engine.finish()

        seconds.append(took(round_))
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    row("s", *(f"{value:.2f}" for value in seconds))
    row("us a client", *(f"{1e6 * value / size:.0f}" for value, size in zip(seconds, sizes, strict=True)))
    row("peak memory of the process", *map(words, memory))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=50_000, help="coordinates of the server's decode")
    parser.add_argument("--answers", type=int, default=100, help="answers from which its cost is taken")
    parser.add_argument("--simulated", type=int, default=1_000, help="coordinates of the simulated round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"# Scale ({os.cpu_count()} cores, torch {torch.__version__}, one thread; CPU time)")
    decode(options.dim, options.answers)
    cohorts()
    secagg(10_000)
    simulation(options.simulated)


if __name__ == "__main__":
    main()
