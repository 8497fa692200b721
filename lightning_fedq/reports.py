"""What a run leaves behind: a table of rounds, a summary, a page to read, pictures. No Lightning in here.

A run folder holds `config.yaml`, `metrics.csv` (one row a round), `summary.json`, `report.md` and PNG
pictures. Every file is written beside its place and moved there, so a reader never sees half of one.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fedq.privacy.page import format_epsilon

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_fedq.privacy.report import PrivacyReport  # imports torch, which `fedq compare` needs not

Row = dict[str, float]
BITS_PER_MEGABYTE = 8e6


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and move it there; its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(beside, path)


def fresh_folder(path: Path) -> Path:
    """Return `path`, or `path-2`, `path-3`, ... if a run is there already."""
    number, candidate = 1, path
    while candidate.exists() and any(candidate.iterdir()):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


# ---- rounds -------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write one CSV row per round; columns in order of first appearance, empty where a value is missing."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def read_rows(path: Path) -> list[Row]:
    """Read what `write_rows` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no {path}; give the folder of a run that had the RunFolder callback")
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def totals(rows: Sequence[Row]) -> dict[str, float]:
    """Add up what a run cost.

    Args:
        rows: `RoundRecord.metrics()` of every round, with `seconds`.

    Returns:
        Megabytes (10^6 bytes) up, down and for key set-up, seconds, and clients that answered.
    """
    return {
        "uplink_megabytes": sum(row["uplink_bits"] for row in rows) / BITS_PER_MEGABYTE,
        "downlink_megabytes": sum(row["downlink_bits"] for row in rows) / BITS_PER_MEGABYTE,
        "setup_megabytes": sum(row["setup_bits"] for row in rows) / BITS_PER_MEGABYTE,
        "seconds": sum(row["seconds"] for row in rows),
        "messages": sum(row["num_received"] for row in rows),
    }


# ---- summary ------------------------------------------------------------------------------------------


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write JSON; NaN and infinity, which JSON lacks, become null."""
    write_atomically(path, json.dumps(_finite(summary), indent=2) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Word a summary for a reader: pairs of a name and its value, with units."""
    lines = [
        ("mechanism", summary["mechanism"]),
        ("clients", f"{summary['num_clients']}, {summary['rounds']} rounds, target {summary['target']}"),
        ("keys", summary["keys"]),
    ]
    lines += [(name, f"{value:.4g}") for name, value in summary["metrics"].items()]
    best = summary["best"]
    if best:
        lines.append(("best", f"{best['monitor']} = {best['value']:.4g} after round {best['round']:.0f}"))
    lines += [
        ("bits per parameter", f"{summary['bits_per_parameter']:.4g} (one message up, as sent)"),
        ("megabytes up", f"{summary['uplink_megabytes']:.4g}"),
        ("megabytes down", f"{summary['downlink_megabytes']:.4g}"),
        ("megabytes of set-up", f"{summary['setup_megabytes']:.4g}"),
        ("seconds", f"{summary['seconds']:.1f}"),
    ]
    return lines


def print_summary(summary: Mapping[str, Any], folder: Path) -> None:
    """Print result, cost, privacy by adversary, and where the files are."""
    from rich.console import Console  # only needed here
    from rich.table import Table

    console = Console(soft_wrap=True)
    table = Table(title=summary["name"], show_header=False, title_justify="left")
    for name, value in summary_lines(summary):
        table.add_row(name, value)
    console.print(table)
    console.print("privacy, adversary by adversary:", highlight=False)
    for line in summary["privacy"]:
        console.print(f"  {line}", highlight=False)
    for file in sorted(folder.iterdir()):
        console.print(f"  {file}", highlight=False)


def privacy_lines(report: PrivacyReport) -> list[str]:
    """One line per adversary; with keys from a seed, a line that says so first; one on samples, if any."""
    lines = []
    if not report.secure_keys:
        lines.append(
            "keys come from a seed, so nothing is private; with secure keys (seed: null) it would be:"
        )
    for row in report.with_secure_keys or report.rows:
        if row.verdict == "no guarantee":
            line = f"{row.view}: no guarantee ({row.reason})"
        else:
            one, run = format_epsilon(row.epsilon_unit), format_epsilon(row.epsilon_run)
            per = "" if row.unit == "message" and one == "∞" else f", {one} per {row.unit} and round"
            line = f"{row.view}: {row.verdict}, epsilon {run} over the run at delta {row.delta:g}{per}"
        lines.append(f"{line}; {row.remark}" if row.remark else line)
    if report.samples is not None:
        lines.append(report.samples.line)
    return lines


def report_markdown(summary: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """Return the page `report.md`: result, cost, privacy by adversary, pictures."""
    lines = [f"# {summary['name']}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in summary_lines(summary)]
    lines += ["", "## Privacy, adversary by adversary", ""]
    lines += [f"- {line}" for line in summary["privacy"]]
    lines += ["", "## Pictures", ""] + [f"![{name}]({name})" for name in pictures]
    lines += [
        "",
        "What begins with `sim_` only a simulation knows: it compares with the exact mean of the clients' "
        "updates. It is not private and no real server could print it.",
        "",
    ]
    return "\n".join(lines)


# ---- pictures -----------------------------------------------------------------------------------------


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(5.2 * count, 3.6), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def plot_progress(runs: Mapping[str, Sequence[Row]], monitor: str) -> Figure:
    """Draw one metric of one or several runs against rounds and against megabytes sent by the clients.

    Args:
        runs: Rows of each run, by name.
        monitor: Column to draw, such as `val_acc`.
    """
    figure, (by_round, by_size) = _panels(2)
    for name, rows in runs.items():
        sent, points = 0.0, []
        for row in rows:
            sent += (row["uplink_bits"] + row["setup_bits"]) / BITS_PER_MEGABYTE
            if monitor in row:
                points.append((row["round"], sent, row[monitor]))
        rounds, megabytes, values = zip(*points, strict=True) if points else ((), (), ())
        marker = "." if len(points) < 30 else None
        by_round.plot(rounds, values, label=name, marker=marker)
        by_size.plot(megabytes, values, label=name, marker=marker)
    by_round.set(xlabel="round", ylabel=monitor)
    by_size.set(xlabel="megabytes up, all clients, set-up included")
    for axes in (by_round, by_size):
        axes.grid(alpha=0.3)
    if len(runs) > 1:
        by_size.set_xscale("log")
        by_round.legend()
    return figure


def plot_aggregate(rows: Sequence[Row]) -> Figure:
    """Draw how far the decoded mean is from the exact one, and the range, against rounds."""
    figure, (error, angle, span) = _panels(3)
    rounds = [row["round"] for row in rows]
    for axes, columns, label in (
        (error, ("sim_mse",), "squared error of the mean, per parameter"),
        (angle, ("sim_cosine", "sim_clip_rate"), "cosine with the exact mean; share clipped"),
        (span, ("radius_min", "radius_max"), "radius of the range"),
    ):
        for column in columns:
            axes.plot(rounds, [row.get(column, math.nan) for row in rows], label=column)
        axes.set(xlabel="round", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend()
    for axes, column in ((error, "sim_mse"), (span, "radius_min")):
        if any(row.get(column, math.nan) > 0 for row in rows):
            axes.set_yscale("log")
    return figure
