"""Row of a mechanism in tables: bits measured on real messages, and epsilons from its claims."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import MISSING, fields
from typing import Any

import torch

from lightning_fedq.keys.randomness import ClientRandomness, SeededKeys
from lightning_fedq.mechanisms.interface import Adversary, Mechanism, RoundContext, Unit, group_clients
from lightning_fedq.privacy.report import privacy_report
from lightning_fedq.privacy.run import ASSUMED, Run
from lightning_fedq.privacy.verdict import NO_GUARANTEE, format_epsilon

EXAMPLE: dict[str, Any] = {
    "epsilon": 1.0,
    "epsilon_scope": "bit",
    "epsilon_per_bit": 1.0,
    "epsilon_per_coordinate": 1.0,
    "epsilon_per_message": 1.0,
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
"""Example values for parameters without a default, so that every mechanism can be built."""
CLIENTS, DIM, DELTA = 10, 256, 1e-5
SETTING = {
    "clients": CLIENTS,
    "delta": DELTA,
    "adversaries": {who.name.lower(): f"{who.value}: {who.sees}" for who in Adversary},
}
"""Setting that all rows have in common, and descriptions of the adversaries."""


def example(kind: type[Mechanism]) -> Mechanism:
    """Return an example of a mechanism: its `Mechanism.example`, or one with values of `EXAMPLE`.

    Raises:
        ValueError: If a parameter is not in `EXAMPLE`.
    """
    if (own := kind.example()) is not None:
        return own
    options = fields(kind)  # type: ignore[arg-type]
    needed = [field.name for field in options if field.default is MISSING]
    needed += [field.name for field in options if "epsilon" in field.name and field.default is None]
    missing = [name for name in needed if name not in EXAMPLE]
    if missing:
        raise ValueError(f"{kind.__name__} needs {missing}, which have no usual value. Write its example().")
    return kind(**{name: EXAMPLE[name] for name in needed})


def paper(kind: type[Mechanism]) -> str:
    """Return the first reference in the docstring of a mechanism or its module, or "-"."""
    for text in (inspect.getdoc(kind), inspect.getdoc(inspect.getmodule(kind))):
        for mark in ("References:", "Source:"):
            if text and mark in text:
                rest = text.partition(mark)[2].strip()
                return re.split(r"\. [A-Z]", " ".join(rest.split("\n\n")[0].split()))[0].rstrip(".")
    return "-"


def describe(kind: type[Mechanism], mechanism: Mechanism | None = None, name: str = "") -> dict[str, str]:
    """Return the row of a mechanism: bits of a message per parameter, and epsilon per adversary.

    Args:
        kind: Class of the mechanism.
        mechanism: Mechanism of this class. None is the example of the class.
        name: Name of the row (default: name of the class).
    """
    mechanism = mechanism or example(kind)
    groups = group_clients(mechanism, range(CLIENTS))
    one = torch.ones(1, dtype=torch.float64)
    context = RoundContext(0, groups, (DIM,), 0 * one, one)
    rand = ClientRandomness(SeededKeys(0), range(CLIENTS), 0)
    message = mechanism.encode(torch.zeros(CLIENTS, DIM), context, rand)
    report = privacy_report(Run.ideal(mechanism, context, 1, ASSUMED), DELTA)
    row = {
        "mechanism": name or kind.__name__,
        "bits": f"{message.num_bits / (CLIENTS * DIM):.4g}",
        "sum": "yes" if mechanism.homomorphic else "no",
        "influence": _format_influence(mechanism.influence(0, context)),
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


def _format_influence(influence: float | None) -> str:
    """Return the maximum influence of a client as text, "-" where it is not known."""
    if influence is None:
        return "-"
    if influence == math.inf:
        return "∞"
    return f"{influence:,.0f}" if influence >= 100 else f"{influence:.3g}"
