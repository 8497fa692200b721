"""Cells of the pages' reference tables against the code: one that it no longer prints is found.

The cells are computed anew by the experiment that wrote the table, with the same seed, and compared as text.
A changed cell is no bug by itself: run the experiment again and write its table into the page.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from reproductions.corbin.theorems import corbin_theorems
from reproductions.cpa.table5 import cpa_table5
from reproductions.cpa.theorems import cpa_theorems

DOCS = Path(__file__).parents[2] / "docs"
COLUMNS = [(rate, variant) for rate in (1.0, 0.1) for variant in ("first", "stated rates", "unbiased")]
"""Columns of table V behind method, K and what is published; FedAvg and JoPEQ have one variant, the first."""


def table_v(page: str) -> dict[tuple[str, int, float, str], str]:
    """Cells of table V that hold something, by method, K, rate and variant."""
    section = page[page.index("## Table V") : page.index("Nested rows with three seeds")]
    cells = {}
    for line in re.findall(r"^\| (\w.*) \|$", section, re.M):
        method, clients, _, *rest = [cell.strip() for cell in line.split("|")]
        for (rate, variant), cell in zip(COLUMNS, rest, strict=True):
            if cell:
                cells[method, int(clients), rate, variant] = cell
    return cells


def printed(row: dict[str, Any]) -> str:
    """A row of the experiment as the page has it."""
    accuracy, snr = f"{row['acc']:.1f}", row["snr_db20"]
    return accuracy if math.isinf(snr) else f"{accuracy}/{snr:.2f}"


def stale(page: str, found: list[dict[str, Any]]) -> list[str]:
    """Cells of table V that say something else than rows of the experiment do."""
    cells, wrong = table_v(page), []
    for row in found:
        variant = row["variant"] if row["variant"] in ("stated rates", "unbiased") else "first"
        key = row["method"], row["clients"], row["lr"], variant
        if cells[key] != printed(row):
            wrong.append(f"{key}: the page says {cells[key]}, the code {printed(row)}")
    return wrong


@pytest.fixture
def mnist() -> dict[str, str]:
    root = os.environ.get("FEDQ_DATA")
    if root is None or not (Path(root) / "MNIST" / "raw").is_dir():
        pytest.skip("FEDQ_DATA names no folder with MNIST")
    return {"root": root}


def compute(mnist: dict[str, str], out: Path, **asked: Any) -> list[dict[str, Any]]:
    from reproductions.bench import ImageData

    summary = cpa_table5(out=str(out), data=ImageData(**mnist), **asked)
    rows: list[dict[str, Any]] = summary["table"]
    return rows


def test_cells_of_table_v(mnist: dict[str, str], tmp_path: Path) -> None:
    asked = {"num_clients": [10], "learning_rates": [1.0], "methods": ["nested CPA"]}
    found = compute(mnist, tmp_path / "run", **asked)
    page = (DOCS / "reproductions_cpa.md").read_text()
    assert len(found) == 3 and not stale(page, found)
    # the check can fail: one digit of one cell
    cell = printed(found[0])
    assert len(stale(page.replace(cell, "1" + cell), found)) == 1


@pytest.mark.slow
def test_every_cell_of_table_v_with_few_clients(mnist: dict[str, str], tmp_path: Path) -> None:
    found = compute(mnist, tmp_path / "run", num_clients=[10, 100])
    assert len(found) == 48 and not stale((DOCS / "reproductions_cpa.md").read_text(), found)


def test_figures_of_the_theorems(tmp_path: Path) -> None:
    """Every figure that the rows of docs/papers.md take from these experiments is one that they print."""
    page = (DOCS / "papers.md").read_text()
    rows = {int(line.split("|")[1]): line for line in re.findall(r"^\| \d+ \|.*", page, re.M)}
    said = {
        "corbin": " ".join(claim["ours"] for claim in corbin_theorems(out=str(tmp_path / "a"))["claims"]),
        "cpa": " ".join(claim["ours"] for claim in cpa_theorems(out=str(tmp_path / "b"))["claims"]),
    }
    for number, paper, figures in (
        (2, "corbin", ("0.488",)),
        (4, "corbin", ("9.365", "0.2926")),
        (7, "corbin", ("11.92", "1.93", "1.72", "2.70")),
        (9, "corbin", ("0.0049", "0.0108")),
        (10, "corbin", ("0.616", "1.027")),
        (12, "corbin", ("9.08", "67,328")),
        (13, "corbin", ("22.84", "52.43")),
        (83, "cpa", ("1,144",)),
        (85, "cpa", ("2.29", "1.55", "1.24")),
        (86, "cpa", ("0.055", "0.00056", "0.00028")),
        (88, "cpa", ("200.0", "547.5", "100.5")),
        (90, "cpa", ("29,842",)),
    ):
        for figure in figures:
            assert figure in rows[number], f"row {number} no longer says {figure}"
            assert figure in said[paper], f"row {number} says {figure}, which the experiment does not print"
