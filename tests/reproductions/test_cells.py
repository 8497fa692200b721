"""Cells of the pages' reference tables against the code: one that it no longer prints is found.

The cells are computed anew by the experiment that wrote the table, with the same seed, and compared as text.
A changed cell is no bug by itself: run the experiment again and write its table into the page.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reproductions.cpa.fig6 import cpa_fig6
from reproductions.cpa.fig7 import cpa_fig7
from reproductions.cpa.table2 import cpa_table2, cpa_table3
from reproductions.cpa.table5 import cpa_table5

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "reproductions_cpa.md"
Row = dict[str, Any]
Printed = tuple[tuple[str, ...], str, str]
"""Where a cell stands, by the first cells of its row and its column's head, and what the code prints."""


def cell(page, heading, labels, column):
    """A cell of the first table behind `heading` that has such a column and such a row.

    A label that is empty is the one above it; heads that come more than once are counted: "stated#2".
    """
    for table in re.findall(r"(?:^\|.*\n)+", page[page.index(heading) :], re.M):
        head, _, *rows = [[part.strip() for part in line[1:-1].split("|")] for line in table.splitlines()]
        heads = [f"{name}#{head[:k].count(name) + 1}" for k, name in enumerate(head)]
        wanted, above = column if "#" in column else f"{column}#1", [""] * len(labels)
        for row in rows if wanted in heads else ():
            above = [part or last for part, last in zip(row, above, strict=False)]
            if above == list(labels):
                return row[heads.index(wanted)]
    raise AssertionError(f"{heading}: no cell in row {labels}, column {column!r}")


def of_table_v(rows):
    for row in rows:
        variant, rate = row["variant"], row["lr"]
        known = variant in ("stated rates", "unbiased")
        column = variant.partition(" ")[0] if known else f"rate {rate:g}, authors"
        printed = f"{row['acc']:.1f}" + ("" if math.isinf(row["snr_db20"]) else f"/{row['snr_db20']:.2f}")
        clipped = ", clipped" if variant == "clipped" else ""
        labels = row["method"] + clipped, str(row["clients"])
        yield labels, column + ("#2" if known and rate == 0.1 else ""), printed


def of_table_ii(rows):
    for row in rows:
        errors = "" if row["method"] == "FedAvg" else f"/{row['distance_from_fedavg']:.2g}/{row['mse']:.2g}"
        yield (str(row["clients"]), row["method"]), "5 samples a user", f"{row['acc']:.1f}{errors}"


def of_table_iii(rows):
    authors = [row for row in rows if row["method"] == "CPA, authors"]
    for row, (labels, column, printed) in zip(authors, of_table_ii(authors), strict=True):
        yield (f"{row['epsilon']:g}", labels[1]), column, printed


def of_figure_6(rows):
    found = {(row["method"], row["epsilon"], row["variant"]): row for row in rows}
    for (method, epsilon, variant), row in found.items():
        if variant == "authors":
            other = found[method, epsilon, "repaired"]
            values = row["published_snr_db20"], row["snr_db20"], other["snr_db20"]
            labels = str(row["clients"]), method
            yield labels, f"epsilon {epsilon:g}", "/".join(f"{value:.1f}" for value in values)


def of_figure_7(rows):
    for row in rows:
        labels = f"K = {row['clients']}", f"{row['epsilon']:g}"
        yield labels, row["method"], f"{row['acc_best_val']:.1f}±{row['acc_std_over_seeds']:.1f}"


class Part(NamedTuple):
    """A part of a reference table that can be computed anew."""

    heading: str
    experiment: Callable[..., dict[str, Any]]
    asked: dict[str, Any]
    cells: Callable[[Iterable[Row]], Iterable[Printed]]
    count: int


ONE_RATE = {"learning_rates": [1.0]}
PARTS = {
    "table V, one method": Part(
        "## Table V", cpa_table5, {"num_clients": [10], "methods": ["nested CPA"], **ONE_RATE}, of_table_v, 3
    ),
    "table V, few clients": Part("## Table V", cpa_table5, {"num_clients": [10, 100]}, of_table_v, 52),
    "table II": Part("## Tables II and III", cpa_table2, {"num_clients": [50]}, of_table_ii, 3),
    "table III": Part("Table III, K = 100", cpa_table3, {"epsilons": [0.2]}, of_table_iii, 1),
    "figure 6": Part("## Figure 6", cpa_fig6, {"num_clients": [100], "epsilons": [0.5]}, of_figure_6, 3),
    "figure 7": Part("## Figure 7", cpa_fig7, {"num_clients": [10], "epsilons": [0.5]}, of_figure_7, 5),
}
SLOW = [name for name in PARTS if name != "table V, one method"]


def stale(page, heading, found):
    """Cells of the page that say something else than the code prints."""
    said = [(printed, cell(page, heading, labels, column), labels) for labels, column, printed in found]
    return [f"{labels}: the page says {there}, the code {now}" for now, there, labels in said if now != there]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in PARTS]
)
def test_cells_of_the_pages(name, tmp_path):
    root = os.environ.get("FEDQ_DATA")
    if root is None or not (Path(root) / "MNIST" / "raw").is_dir():
        pytest.skip("FEDQ_DATA names no folder with MNIST")
    from reproductions.bench import ImageData

    part, page = PARTS[name], (DOCS / PAGE).read_text()
    summary = part.experiment(out=str(tmp_path / "run"), data=ImageData(root=root), **part.asked)
    found = list(part.cells(summary["table"]))
    assert len(found) == part.count and not stale(page, part.heading, found)
    # the check can fail: one digit of one cell
    labels, column, printed = found[0]
    assert len(stale(page, part.heading, [(labels, column, "1" + printed)])) == 1
