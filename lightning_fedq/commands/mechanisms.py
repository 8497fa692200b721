"""`fedq mechanisms`: what there is, measured on real messages and read from the claims."""

from __future__ import annotations

import argparse
import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_fedq.commands.suggestions import nearest
from lightning_fedq.core import Adversary, Mechanism, RoundContext, Unit
from lightning_fedq.discovery import installed, mechanism_class
from lightning_fedq.privacy.report import privacy_report
from lightning_fedq.privacy.verdict import NO_GUARANTEE, format_epsilon
from lightning_fedq.randomness import ClientRandomness, SeededKeys

EXAMPLE: dict[str, Any] = {
    "epsilon": 1.0,
    "delta": 1e-5,
    "noise_multiplier": 1.0,
    "clip_norm": 1.0,
    "clip_value": 1.0,
    "local_sigma": 1.0,
    "granularity": 0.01,
    "rounds": 1,
    "leakage_budget": 0.3,
    "noise_std": 1.0,
    "measured_leakage": 0.3,
}
"""Values for parameters without a default, so that every mechanism can be shown at work."""
CLIENTS, DIM, DELTA = 10, 256, 1e-5
HEADS = {
    Adversary.EAVESDROPPER: "uplink",
    Adversary.SERVER: "server",
    Adversary.SERVER_AND_PARTNER: "+partner",
    Adversary.CLIENT: "client",
    Adversary.SECAGG_SERVER: "secagg",
    Adversary.OUTSIDER: "outsider",
}
"""Column heads of the adversaries; the legend under the table says who they are."""


def example(kind: type[Mechanism]) -> Mechanism:
    """The mechanism's own `Mechanism.example`, or one with `EXAMPLE` values where it has no defaults.

    Raises:
        ValueError: If a parameter is not in `EXAMPLE`.
    """
    if (own := kind.example()) is not None:
        return own
    options = fields(kind)  # type: ignore[arg-type]
    needed = [field.name for field in options if field.default is MISSING]
    # noise is given by its multiplier, or else by a budget that it is calibrated to
    needed += [field.name for field in options if field.name == "noise_multiplier" and field.default is None]
    if all(field.name != "noise_multiplier" for field in options):  # a target sets the level
        needed += [field.name for field in options if field.name == "epsilon" and field.default is None]
    missing = [name for name in needed if name not in EXAMPLE]
    if missing:
        raise ValueError(f"{kind.__name__} needs {missing}, which have no usual value; write its example()")
    return kind(**{name: EXAMPLE[name] for name in needed})


def paper(kind: type[Mechanism]) -> str:
    """The source named in the docstring of a mechanism, or of its module."""
    for text in (inspect.getdoc(kind), inspect.getdoc(inspect.getmodule(kind))):
        for mark in ("References:", "Source:"):
            if text and mark in text:
                rest = text.partition(mark)[2].strip()
                return re.split(r"\. [A-Z]", " ".join(rest.split("\n\n")[0].split()))[0].rstrip(".")
    return "-"


def describe(kind: type[Mechanism]) -> dict[str, str]:
    """One row of the table: bits of a message over its parameters, and epsilon of a unit by adversary."""
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
        "mechanism": kind.__name__,
        "bits": f"{message.num_bits / (CLIENTS * DIM):.4g}",
        "sum": "yes" if mechanism.homomorphic else "no",
        "unit": next((row.unit for row in report.rows if row.verdict != NO_GUARANTEE), "-"),
    }
    for adversary in Adversary:
        claim = report.row(adversary)
        if claim.verdict == NO_GUARANTEE:
            row[HEADS[adversary]] = "none"
        elif claim.unit == Unit.MESSAGE.value and claim.epsilon_unit == math.inf:
            row[HEADS[adversary]] = f"{format_epsilon(claim.epsilon_round)}*"
        else:
            row[HEADS[adversary]] = format_epsilon(claim.epsilon_unit)
    return {**row, "paper": paper(kind)}


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="fedq mechanisms",
        description="List all mechanisms: bits per parameter (measured), whether messages may be summed "
        "unread, pure epsilon of one unit (coordinate, block or message) in one round against each "
        "adversary, and the paper.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="MECHANISM", help="which, by name or class path (default: all installed)"
    )
    names = parser.parse_args(argv).names
    try:
        rows = [describe(mechanism_class(name)) for name in names or installed()]
    except ValueError as error:
        hints = [nearest(name, installed()) for name in names if name not in installed()]
        parser.error(f"{error}.{''.join(hints)}")
    papers = {row["mechanism"]: row.pop("paper") for row in rows}
    table = Table(
        title=f"Mechanisms, {CLIENTS} clients, at example settings",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in rows[0]:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    console.width = max(console.width, 112)  # no name is cut; a narrower terminal wraps its lines
    console.print(table)
    console.print(
        "bits: of one message, per parameter. sum: may the server be given the sum of the messages only? "
        "The other columns are the pure epsilon of one unit in one round: an epsilon of a coordinate is paid "
        "for every coordinate, that of a message once. ∞: no pure epsilon, because "
        "some message excludes an input, or the noise is Gaussian; "
        f"*: of a whole update in a round, at delta {DELTA:g}; none: no guarantee at all. "
        "A model has many coordinates and a run many rounds: `fedq privacy CONFIG` adds them up.\n",
        highlight=False,
    )
    for adversary, head in HEADS.items():
        console.print(f"  {head:10}{adversary.value}", highlight=False)
    console.print()
    for name, source in papers.items():
        console.print(f"  {name}: {source}", highlight=False)
    return 0
