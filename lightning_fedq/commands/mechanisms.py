"""`fedq mechanisms`: all mechanisms, their bits and their epsilon by adversary.

The rows of this package's own stand in `mechanisms.json`, which `make tables` writes and a test compares with
what the classes do: the table costs no torch. Rows of other mechanisms are made when they are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_fedq.mechanisms.registry import declared

SHIPPED = Path(__file__).with_suffix(".json")


def collect_rows(
    names: Sequence[str], shipped: Sequence[dict[str, str]]
) -> tuple[list[dict[str, str]], Sequence[str]]:
    """Rows of these mechanisms, all installed ones without any, and a sentence for each name without one.

    Raises:
        ValueError: If no name has a row.
    """
    own = {row["mechanism"]: row for row in shipped}
    asked = list(dict.fromkeys(names)) or [*own, *declared()]
    if set(asked) <= set(own):
        return [dict(own[name]) for name in asked], ()
    from lightning_fedq.commands.mechanism_row import DIM, describe  # both import torch: only needed here
    from lightning_fedq.commands.resolver import resolved

    found = resolved(asked, DIM, target=False).some()
    rows = [dict(own.get(name) or describe(type(one), one, name)) for name, one in found.rows.items()]
    return rows, found.words


def main(mechanisms: Annotated[Sequence[str], "MECHANISM"] = ()) -> int:
    """List all mechanisms: bits per parameter (measured), whether messages may be summed unread,
    pure epsilon of one unit (coordinate, block or message) in one round against each adversary,
    and the paper.

    Args:
        mechanisms: Mechanisms by row, class or class path (default: all installed).
    """
    shown = json.loads(SHIPPED.read_text(encoding="utf-8"))
    rows, left_out = collect_rows(mechanisms, shown["mechanisms"])
    papers = {row["mechanism"]: row.pop("paper") for row in rows}
    table = Table(
        title=f"Mechanisms, {shown['clients']} clients, at example settings",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in rows[0]:
        table.add_column(column.replace("_", "_\n"), no_wrap=True)  # names of adversaries are long
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    console.width = max(console.width, 124)  # no name is cut; a narrower terminal wraps its lines
    console.print(table)
    console.print(
        "bits: of one message, per parameter. sum: may the server be given the sum of the messages only? "
        "lever: what one lying client's message moves at most, in largest honest updates. "
        "The other columns are the pure epsilon of one unit in one round: an epsilon of a coordinate is paid "
        "for every coordinate, that of a message once. ∞: no pure epsilon, because "
        "some message excludes an input, or the noise is Gaussian; "
        f"*: of a whole update in a round, at delta {shown['delta']:g}; none: no guarantee at all. "
        "A model has many coordinates and a run many rounds: `fedq privacy CONFIG` adds them up.\n",
        highlight=False,
    )
    for head, adversary in shown["adversaries"].items():
        console.print(f"  {head:20}{adversary}", highlight=False)
    console.print()
    for name, source in papers.items():
        console.print(f"  {name}: {source}", highlight=False)
    for words in left_out:
        console.print(words, highlight=False, markup=False)
    return int(bool(left_out))
