"""`fedq compare`: several runs in one table and one picture."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_fedq.commands.configs import find
from lightning_fedq.commands.settings import change_setting
from lightning_fedq.privacy.verdict import NO_GUARANTEE, format_epsilon
from lightning_fedq.reports.runs import (
    Row,
    first_metric,
    fresh_folder,
    mode_of,
    plot_progress,
    read_rows,
    save_figure,
    totals,
    write_rows,
    write_summary,
)

COLUMNS = (
    "rounds",
    "final",
    "best",
    "epsilon",
    "verdict",
    "view",
    "R",
    "bits_per_parameter",
    "uplink_megabytes",
    "downlink_megabytes",
    "seconds",
)
HEADS = {
    "bits_per_parameter": "bits",
    "uplink_megabytes": "MB up",
}


def read_run(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Read the rows and the summary of a run folder.

    Raises:
        FileNotFoundError: If it is not the folder of a finished run.
    """
    rows, summary = read_rows(folder / "metrics.csv"), folder / "summary.json"
    if not summary.is_file():
        raise FileNotFoundError(f"no {summary}; the run has not finished")
    return rows, json.loads(summary.read_text())


def compare(
    runs: Mapping[str, Path], monitor: str | None, out: Path, mode: str | None = None
) -> list[dict[str, Any]]:
    """Write `table.csv`, `table.json` and `compare.png` of several run folders, print the table, return it.

    The curve of a run without quantisation and privacy (`FedAvg`) is dashed, as what to compare with.

    Args:
        runs: Run folders by name.
        monitor: The metric to compare; None is `val_acc`, or else the first `val_*` metric of the runs.
        out: Where to write.
        mode: Is a larger ("max") or a smaller ("min") value better? None goes by the metric's name.

    Raises:
        ValueError: If a run never logged `monitor`.
    """
    found = {name: read_run(folder) for name, folder in runs.items()}
    monitor = monitor or first_metric([row for rows, _ in found.values() for row in rows]) or "val_acc"
    mode = mode or mode_of(monitor)
    table, curves, plain = [], {}, set()
    for name, (rows, summary) in found.items():
        values = [row[monitor] for row in rows if monitor in row]
        if not values:
            raise ValueError(f"{runs[name]} never logged {monitor!r}; it has {sorted(rows[-1])}")
        mechanism = str(summary["mechanism"]).partition("(")[0]
        label = f"{name} ({mechanism}{epsilon_of_label(summary)})"
        curves[label] = rows
        plain |= {label} if mechanism == "FedAvg" else set()
        cost = {**totals(rows), "bits_per_parameter": summary["bits_per_parameter"], "rounds": len(rows)}
        best = max(values) if mode == "max" else min(values)
        result = {"final": values[-1], "best": best, **privacy_of(summary), **cost}
        table.append({"run": name, **{column: result[column] for column in COLUMNS}})
    write_rows(out / "table.csv", table)
    write_summary(out / "table.json", {"monitor": monitor, "runs": table})
    save_figure(plot_progress(curves, monitor, monitor, dashed=plain), out / "compare.png")
    print_table(table, monitor)
    if len({row["rounds"] for row in table}) > 1:
        counts = ", ".join(str(row["rounds"]) for row in table)
        print(
            f"warning: the runs differ in their rounds ({counts}), so their final and best values do not "
            "compare; train them as long as each other (--rounds)",
            file=sys.stderr,
        )
    Console(soft_wrap=True).print(f"{out / 'table.csv'}\n{out / 'compare.png'}", highlight=False)
    return table


def epsilon_of_label(summary: Mapping[str, Any]) -> str:
    """Epsilon and towards whom, for a legend. "" where a folder does not say."""
    found = privacy_of(summary)
    if not isinstance(found["epsilon"], float):
        return ""
    whom = str(found["view"]).partition(",")[0].lower()
    if math.isinf(found["epsilon"]):
        return ", no finite epsilon"
    return f", \N{GREEK SMALL LETTER EPSILON} {format_epsilon(found['epsilon'])} to {whom}"


def privacy_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a run's privacy, from its `summary.json`, with "-" where an older folder does not say.

    `epsilon` and its `verdict` are towards the `view` that was asked for, or else the one with least epsilon;
    R is the noise over the signal, as seen where that is known, or else as planned.
    """
    view, noise = summary.get("view"), summary.get("noise_over_signal") or {}
    ratio = noise.get("planned") if noise.get("sim_seen") is None else noise["sim_seen"]
    ratio = "-" if ratio is None else ratio
    if view is None:
        return {"epsilon": "-", "verdict": "-", "view": "-", "R": ratio}
    epsilon = math.inf if view["epsilon"] is None else view["epsilon"]
    asked = {True: ", asked for and met", False: ", asked for and NOT met", None: ""}[view["met"]]
    if view["met"] is False and view["spent"] is not None and view["spent"] <= view["asked"] * (1.0 + 1e-9):
        asked += " (no masks ran)"
    nobody = view["met"] is None and view["verdict"] == NO_GUARANTEE
    return {
        "epsilon": epsilon,
        "verdict": view["verdict"],
        "view": "nobody" if nobody else f"{view['adversary']}{asked}",
        "R": ratio,
    }


def print_table(table: Sequence[Mapping[str, Any]], monitor: str) -> None:
    """Print rows as a table, numbers with four digits. Names are never cut."""
    shown = Table(title=monitor, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    of_runs = all("verdict" in row for row in table)  # other tables have columns of their own
    hidden = ("verdict", "view", "downlink_megabytes", "seconds") if of_runs else ()  # the files have them
    for column in [column for column in table[0] if column not in hidden]:
        shown.add_column(
            HEADS.get(column, column), no_wrap=True, justify="left" if column == "run" else "right"
        )
    for row in table:
        cells = {name: f"{v:.4g}" if isinstance(v, float) else str(v) for name, v in row.items()}
        if of_runs and isinstance(row["epsilon"], float):
            cells["epsilon"] = f"{format_epsilon(row['epsilon'])} {row['verdict']}"
        if of_runs and isinstance(row["R"], float):
            cells["R"] = f"{row['R']:.2g}" if row["R"] > 1e-6 else "0"
        shown.add_row(*(cell for name, cell in cells.items() if name not in hidden))
    console = Console()
    console.width = max(
        console.width, console.measure(shown, options=console.options.update(width=500)).maximum
    )
    console.print(shown)
    if not of_runs:
        return
    views = dict.fromkeys(str(row["view"]) for row in table)
    if len(views) == 1:
        console.print(f"epsilon: over the run, towards {next(iter(views))}", highlight=False, soft_wrap=True)
        return
    console.print("epsilon: over the run, towards", highlight=False)
    for row in table:
        console.print(f"  {row['run']}: {row['view']}", highlight=False, soft_wrap=True)


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
    parser.add_argument(
        "--monitor", help="the metric to compare (default: val_acc, or the first val_* there is)"
    )
    parser.add_argument(
        "--mode", choices=("max", "min"), help="is larger or smaller better? (default: by name)"
    )
    parser.add_argument("--rounds", type=int, help="rounds to train a configuration (default: its own)")
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

        settings = resolve([str(config)])
        if options.rounds is not None:
            change_setting(settings, "trainer.max_epochs", options.rounds)
        folders[name] = run_config(settings, name, out)
    try:
        compare(folders, options.monitor, out, options.mode)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    return 0
