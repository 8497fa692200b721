"""`fedq report`: one HTML page about one or several run folders, to read, print and send."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_fedq.reports.html.folders import Run, read
from lightning_fedq.reports.html.page import page
from lightning_fedq.reports.runs import first_metric, write_atomically


def write_report(folders: Sequence[Path], out: Path, monitor: str | None = None) -> None:
    """Write the page of some run folders.

    Args:
        folders: Folders of finished runs.
        out: File to write.
        monitor: Metric to draw; None is `val_acc`, or else the first `val_*` metric of the runs.

    Raises:
        ValueError: If a folder is no run, or no run logged `monitor`.
    """
    runs: list[Run] = []
    for folder in folders:
        name, taken = folder.resolve().name, [run.name for run in runs]
        runs.append(read(folder, name if name not in taken else f"{name} ({len(taken) + 1})"))
    rows = [row for run in runs for row in run.rows]
    logged = sorted({key for row in rows for key in row})
    if monitor is not None and monitor not in logged:
        raise ValueError(f"no run logged {monitor!r}; they have {', '.join(logged)}")
    write_atomically(out, page(runs, monitor or first_metric(rows) or "val_acc"))


def main(argv: Sequence[str]) -> int:
    """Write the page and say where."""
    parser = argparse.ArgumentParser(
        prog="fedq report",
        description="Write one HTML page about finished runs: a metric, epsilon and bits by round, who sees "
        "what, costs, settings. It needs no network, and prints.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a finished run")
    parser.add_argument(
        "--monitor", help="the metric to draw (default: val_acc, or the first val_* there is)"
    )
    parser.add_argument("--out", help="the page (default: report.html in the folder; of several runs: here)")
    options = parser.parse_args(argv)
    folders = [Path(run) for run in options.runs]
    out = Path(options.out or (folders[0] / "report.html" if len(folders) == 1 else "report.html"))
    try:
        write_report(folders, out, options.monitor)
    except ValueError as error:
        parser.error(str(error))
    print(out)
    return 0
