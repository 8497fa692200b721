"""Seconds to count a journal of many lines and clients: `python benchmarks/journal.py`.

One run charges half of the clients in every round. A second run in its folder looks at the journal for the
first time, looks again and charges a round. A resumed run reads a journal whose lines it knows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lightning_fedq.privacy.journal import Journal
from lightning_fedq.privacy.ledger import Ledger


@contextmanager
def print_seconds(what: str) -> Iterator[None]:
    """Print the wall-clock seconds of the context."""
    begin = time.perf_counter()
    yield
    print(f"{what:40} {time.perf_counter() - begin:8.4f} s")


def main() -> None:
    """Print seconds of each look and charge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--lines", type=int, default=1000)
    given = parser.parse_args()
    folder, stream = Path(tempfile.mkdtemp()), torch.Generator().manual_seed(0)

    def begin(number: int) -> Ledger:
        ledger = Ledger(given.clients, "m")
        journal = Journal(folder / f"ledger-{number}.jsonl", "m", given.clients)
        ledger.folders = frozenset([folder])
        ledger.keep(journal, repeatable=False)
        return ledger

    def cohort() -> list[int]:
        return torch.randperm(given.clients, generator=stream)[: given.clients // 2].tolist()

    cohorts, first = [cohort() for _ in range(10)], begin(1)
    with print_seconds(f"{given.lines} charges of {given.clients // 2} clients"):
        for round in range(given.lines):
            first.charge(cohorts[round % 10], round)
    second = begin(2)
    with print_seconds("first look at another run's journal"):
        second.scan_journals()
    with print_seconds("later look"):
        second.scan_journals()
    with print_seconds("look and charge of a round"):
        second.charge(cohorts[0], 0, second.free_attempt(0, 0, ""))
    resumed = Ledger(given.clients, "m")
    resumed.load_state_dict(second.state_dict())
    with print_seconds("resume with all lines known"):
        resumed.keep(Journal(folder / "ledger-1.jsonl", "m", given.clients), repeatable=False)
    assert torch.equal(resumed.charges, second.charges)


if __name__ == "__main__":
    main()
