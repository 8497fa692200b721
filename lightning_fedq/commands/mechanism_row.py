"""The row of a mechanism in tables: measured on real messages and read from the claims."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import MISSING, fields
from typing import Any

import torch

from lightning_fedq.keys.randomness import ClientRandomness, SeededKeys
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, RoundContext, Unit
from lightning_fedq.privacy.report import privacy_report
from lightning_fedq.privacy.run import ASSUMED, Run
from lightning_fedq.privacy.verdict import NO_GUARANTEE, format_epsilon

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
SETTING = {
    "clients": CLIENTS,
    "delta": DELTA,
    "adversaries": {who.name.lower(): f"{who.value}: {who.sees}" for who in Adversary},
}
"""What all rows have in common, and who the adversaries are."""


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


def describe(kind: type[Mechanism], mechanism: Mechanism | None = None, name: str = "") -> dict[str, str]:
    """One row of the table: bits of a message over its parameters, and epsilon of a unit by adversary.

    Args:
        mechanism: One of the kind; None is its example.
        name: Name of the row (default: the kind's).
    """
    mechanism = mechanism or example(kind)
    sizes = mechanism.group_sizes(CLIENTS)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    groups = tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))
    one = torch.ones(1, dtype=torch.float64)
    context = RoundContext(0, groups, (DIM,), 0 * one, one)
    rand = ClientRandomness(SeededKeys(0), range(CLIENTS), 0)
    message = mechanism.encode(torch.zeros(CLIENTS, DIM), context, rand)
    report = privacy_report(Run.ideal(mechanism, context, 1, ASSUMED), DELTA)
    lever = mechanism.lever(0, context)
    row = {
        "mechanism": name or kind.__name__,
        "bits": f"{message.num_bits / (CLIENTS * DIM):.4g}",
        "sum": "yes" if mechanism.homomorphic else "no",
        "lever": "-"
        if lever is None
        else "∞"
        if lever == math.inf
        else f"{lever:,.0f}"
        if lever >= 100
        else f"{lever:.3g}",
        "unit": next((row.unit for row in report.rows if row.verdict != NO_GUARANTEE), "-"),
    }
    for adversary in Adversary:
        claim = report.row(adversary)
        if claim.verdict == NO_GUARANTEE:
            row[adversary.name.lower()] = "none"
        elif claim.unit == Unit.MESSAGE.value and claim.epsilon_unit == math.inf:
            row[adversary.name.lower()] = f"{format_epsilon(claim.epsilon_round)}*"
        else:
            row[adversary.name.lower()] = format_epsilon(claim.epsilon_unit)
    return {**row, "paper": paper(kind)}
