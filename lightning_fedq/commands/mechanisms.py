"""`fedq mechanisms`: what there is, measured on real messages and read from the claims."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lightning_fedq import mechanisms
from lightning_fedq.core import Adversary, Mechanism, RoundContext
from lightning_fedq.privacy.report import NO_GUARANTEE, format_epsilon, privacy_report
from lightning_fedq.randomness import ClientRandomness, SeededKeys

EXAMPLE: dict[str, Any] = {
    "epsilon": 1.0,
    "delta": 1e-5,
    "noise_multiplier": 1.0,
    "clip_norm": 1.0,
    "rounds": 1,
}
"""Values for parameters without a default, so that every mechanism can be shown at work."""
CLIENTS, DIM, DELTA = 10, 256, 1e-5


def example(kind: type[Mechanism]) -> Mechanism:
    """Build a mechanism with `EXAMPLE` values where it has no defaults.

    Raises:
        ValueError: If a parameter is not in `EXAMPLE`.
    """
    options = fields(kind)  # type: ignore[arg-type]
    needed = [field.name for field in options if field.default is MISSING]
    # noise is given by its multiplier, or else by a budget that it is calibrated to
    needed += [field.name for field in options if field.name == "noise_multiplier" and field.default is None]
    missing = [name for name in needed if name not in EXAMPLE]
    if missing:
        raise ValueError(f"{kind.__name__} needs {missing}; add an example value to EXAMPLE")
    return kind(**{name: EXAMPLE[name] for name in needed})


def paper(kind: type[Mechanism]) -> str:
    """The source named in the docstring of a mechanism, or of its module."""
    for text in (inspect.getdoc(kind), inspect.getdoc(inspect.getmodule(kind))):
        for mark in ("References:", "Source:"):
            if text and mark in text:
                rest = text.partition(mark)[2].strip()
                return " ".join(rest.split("\n\n")[0].split()).split(". Departures")[0].rstrip(".")
    return "-"


def describe(kind: type[Mechanism]) -> dict[str, str]:
    """One row of the table: bits of a message over its parameters, and epsilon by adversary."""
    mechanism = example(kind)
    sizes = mechanism.group_sizes(CLIENTS)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    groups = tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))
    one = torch.ones(1, dtype=torch.float64)
    context = RoundContext(0, groups, (DIM,), 0 * one, one)
    rand = ClientRandomness(SeededKeys(0), range(CLIENTS), 0)
    message = mechanism.encode(torch.zeros(CLIENTS, DIM), context, rand)
    report = privacy_report(mechanism, context, rounds=1, delta=DELTA, secure_aggregation=True)
    row = {
        "mechanism": repr(mechanism),
        "bits": f"{message.num_bits / (CLIENTS * DIM):.4g}",
        "homomorphic": "yes" if mechanism.homomorphic else "no",
    }
    for adversary in Adversary:
        claim = report.row(adversary)
        if claim.verdict == NO_GUARANTEE:
            row[adversary.name] = "none"
        elif claim.epsilon_coordinate is None:
            row[adversary.name] = f"{format_epsilon(claim.epsilon_round)} a round"
        else:
            row[adversary.name] = format_epsilon(claim.epsilon_coordinate)
    return {**row, "paper": paper(kind)}


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="fedq mechanisms",
        description="List all mechanisms: bits per parameter (measured), whether messages may be summed "
        "unread, pure epsilon of one coordinate in one round against each adversary, and the paper.",
    )
    parser.parse_args(argv)
    rows = [describe(getattr(mechanisms, name)) for name in mechanisms.__all__]
    table = Table(title=f"Mechanisms, {CLIENTS} clients, at example settings", show_lines=True)
    for column in rows[0]:
        table.add_column(column.lower().replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    console.print(table)
    console.print(
        "Pure epsilon of one coordinate in one round; ∞: no pure epsilon, because some message excludes an "
        f"input or the noise is Gaussian; a round: of a whole update, at delta {DELTA:g}; none: no guarantee "
        "at all. A model has many coordinates and a run many rounds: `fedq privacy CONFIG` adds them up.\n",
        highlight=False,
    )
    for adversary in Adversary:
        console.print(f"{adversary.name.lower().replace('_', ' ')}: {adversary.value}", highlight=False)
    return 0
