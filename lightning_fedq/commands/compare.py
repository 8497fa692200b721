"""`fedq compare`: several runs in one table and one picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_fedq.commands.configs import find
from lightning_fedq.reports import (
    Row,
    fresh_folder,
    plot_progress,
    read_rows,
    save_figure,
    totals,
    write_rows,
    write_summary,
)

COLUMNS = ("final", "best", "bits_per_parameter", "uplink_megabytes", "downlink_megabytes", "seconds")


def read_run(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Read the rows and the summary of a run folder.

    Raises:
        FileNotFoundError: If it is not the folder of a finished run.
    """
    rows, summary = read_rows(folder / "metrics.csv"), folder / "summary.json"
    if not summary.is_file():
        raise FileNotFoundError(f"no {summary}; the run has not finished")
    return rows, json.loads(summary.read_text())


def compare(runs: Mapping[str, Path], monitor: str, out: Path, mode: str = "max") -> list[dict[str, Any]]:
    """Write `table.csv`, `table.json` and `compare.png` of several run folders, print the table, return it.

    Args:
        runs: Run folders by name.
        monitor: The metric to compare.
        out: Where to write.
        mode: Is a larger ("max") or a smaller ("min") value better?

    Raises:
        ValueError: If a run never logged `monitor`.
    """
    table, curves = [], {}
    for name, folder in runs.items():
        rows, summary = read_run(folder)
        values = [row[monitor] for row in rows if monitor in row]
        if not values:
            raise ValueError(f"{folder} never logged {monitor!r}; it has {sorted(rows[-1])}")
        curves[name] = rows
        cost = {**totals(rows), "bits_per_parameter": summary["bits_per_parameter"]}
        result = {"final": values[-1], "best": max(values) if mode == "max" else min(values), **cost}
        table.append({"run": name, **{column: result[column] for column in COLUMNS}})
    write_rows(out / "table.csv", table)
    write_summary(out / "table.json", {"monitor": monitor, "runs": table})
    save_figure(plot_progress(curves, monitor), out / "compare.png")
    print_table(table, monitor)
    Console(soft_wrap=True).print(f"{out / 'table.csv'}\n{out / 'compare.png'}", highlight=False)
    return table


def print_table(table: Sequence[Mapping[str, Any]], monitor: str) -> None:
    """Print rows as a table, numbers with four digits."""
    shown = Table(title=monitor, title_justify="left")
    for column in table[0]:
        shown.add_column(column.replace("_", " "), overflow="fold")
    for row in table:
        shown.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(shown)


def main(argv: Sequence[str]) -> int:
    """Run or read the runs and compare them."""
    parser = argparse.ArgumentParser(
        prog="fedq compare",
        description="Train the given configurations (or read the given run folders) and put them into one "
        "table and one picture: a metric against rounds, and against megabytes.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a configuration (a file or a name) or the folder of a run"
    )
    parser.add_argument("--monitor", default="val_acc", help="the metric to compare (default: %(default)s)")
    parser.add_argument("--mode", choices=("max", "min"), default="max", help="is larger or smaller better?")
    parser.add_argument(
        "--out", default="runs/compare", help="folder of table and picture (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    out = fresh_folder(Path(options.out))
    folders: dict[str, Path] = {}
    for run in options.runs:
        path = Path(run)
        name = path.stem if path.stem not in folders else f"{path.stem}-{len(folders) + 1}"
        if path.is_dir():
            folders[name] = path
            continue
        try:
            config = find(run)
        except ValueError as error:
            parser.error(f"{run} is not the folder of a run; {error}")
        from lightning_fedq.commands.run import resolve, run_config  # imports Lightning, and only needed here

        folders[name] = run_config(resolve([str(config)]), name, out)
    try:
        compare(folders, options.monitor, out, options.mode)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    return 0
