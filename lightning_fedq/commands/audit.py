"""`fedq audit`: try to refute what the mechanisms claim, by enumeration and by simulation."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_fedq import mechanisms
from lightning_fedq.commands.mechanisms import example
from lightning_fedq.privacy.audit import audit
from lightning_fedq.privacy.enumeration import enumerate_coin, enumerate_pair
from lightning_fedq.privacy.report import format_epsilon


def enumeration() -> list[str]:
    """Everything in which short coins and pairs differ from the specification."""
    differs = [text for epsilon in (0.1, 1.0, 3.0) for text in enumerate_coin(epsilon)]
    return differs + [text for shared_bits in range(7) for text in enumerate_pair(1.0, shared_bits)]


def main(argv: Sequence[str]) -> int:
    """Print one line per mechanism and view; the exit status is 1 if anything contradicts a claim."""
    parser = argparse.ArgumentParser(
        prog="fedq audit",
        description="Try to refute the privacy claims of mechanisms: every word of short coins is counted, "
        "and the shipped encoders are run on worst neighbours. A clean mechanism raises an alarm with "
        "probability 0.1%.",
    )
    parser.add_argument("names", nargs="*", metavar="MECHANISM", help="which (default: all)")
    parser.add_argument("--draws", type=float, default=1e7, help="draws per neighbour (default: 1e7)")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in mechanisms.__all__]
    if unknown:
        parser.error(f"there is no mechanism {', '.join(unknown)}; fedq mechanisms lists them")
    console, alarms = Console(), enumeration()
    console.print(f"enumeration of short words: {alarms or 'equal to the specification'}", highlight=False)
    table = Table("mechanism", "view", "claim", "lower bound", "draws", "verdict", box=SIMPLE)
    for name in options.names or mechanisms.__all__:
        start = time.perf_counter()
        mechanism = example(getattr(mechanisms, name))
        try:
            findings = audit(mechanism, int(options.draws))
        except ValueError as error:
            parser.error(f"{name}: {error}")
        if not findings:
            table.add_row(name, "", "", "", "", "not simulated: no claim on one message")
        for finding in findings:
            alarms += [finding.alarm] * bool(finding.alarm)
            numbers = (format_epsilon(finding.claim), f"{finding.lower_bound:.4f}", f"{finding.draws:.2g}")
            table.add_row(name, finding.view, *numbers, finding.alarm or "holds")
        console.print(f"{name}: {time.perf_counter() - start:.0f} s", highlight=False)
    console.print(table)
    return int(bool(alarms))
