"""`fedq mechanisms`: list all mechanisms with their bits and their epsilon by adversary.

The rows of this package's mechanisms are stored in `mechanisms.json`, so that the table is printed without
the import of torch. `make tables` writes the file, and a test compares it with the classes. Rows of other
mechanisms are computed when they are asked for.
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
    """Return the rows of mechanisms, and a line with the reason for each name that has no row.

    Args:
        names: Names of rows or classes, or class paths. Empty means all installed mechanisms.
        shipped: Stored rows.

    Raises:
        ValueError: If no name has a row.
    """
    own = {row["mechanism"]: row for row in shipped}
    asked = list(dict.fromkeys(names)) or [*own, *declared()]
    if set(asked) <= set(own):
        return [dict(own[name]) for name in asked], ()
    from lightning_fedq.commands.mechanism_row import DIM, describe  # both import torch, needed only here
    from lightning_fedq.commands.resolver import resolved

    result = resolved(asked, DIM, target=False).some()
    found = result.rows.items()
    rows = [dict(own.get(name) or describe(type(kind), kind, name)) for name, kind in found]
    return rows, result.words


def main(mechanisms: Annotated[Sequence[str], "MECHANISM"] = ()) -> int:
    """List all mechanisms: measured bits per parameter, whether secure aggregation may sum messages,
    the pure epsilon of one unit (coordinate, block or message) in one round against each
    adversary, and the paper.

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
        table.add_column(column.replace("_", "_\n"), no_wrap=True)  # breaks the long names of adversaries
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    console.width = max(console.width, 124)  # wide enough for all names; a narrow terminal wraps the lines
    console.print(table)
    console.print(
        "bits: bits of one message per parameter. sum: whether the server may receive the sum of messages "
        "only. influence: maximum influence of one Byzantine client, in units of the largest honest update. "
        "The other columns are the pure epsilon of one unit in one round. An epsilon of a coordinate counts "
        "for every coordinate, and an epsilon of a message counts once. ∞: no pure epsilon, because "
        "some message excludes an input, or the noise is Gaussian. "
        f"*: epsilon of a whole update in a round, at delta {shown['delta']:g}. none: no guarantee. "
        "A model has many coordinates and a run has many rounds. `fedq privacy CONFIG` composes them.\n",
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
