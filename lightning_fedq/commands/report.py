"""`fedq report`: write one self-contained HTML page about one or several run folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from lightning_fedq.reports.html.page import Run, page, read
from lightning_fedq.reports.runs import first_metric, write_atomically


def write_report(folders: Sequence[Path], out: Path, monitor: str | None = None) -> None:
    """Write the HTML page about some runs.

    Args:
        folders: Folders of finished runs.
        out: File to write.
        monitor: Metric to draw. None is `val_acc`, or the first `val_*` metric of the runs.

    Raises:
        ValueError: If a folder is not that of a finished run, or no run logged `monitor`.
    """
    runs: list[Run] = []
    for folder in folders:
        name, taken = folder.resolve().name, [run.name for run in runs]
        runs.append(read(folder, name if name not in taken else f"{name} ({len(taken) + 1})"))
    rows = [row for run in runs for row in run.rows]
    logged = sorted({key for row in rows for key in row})
    if monitor is not None and monitor not in logged:
        raise ValueError(f"No run logged {monitor!r}. The runs logged {', '.join(logged)}.")
    write_atomically(out, page(runs, monitor or first_metric(rows) or "val_acc"))


def main(
    runs: Annotated[Sequence[Path], "RUN"], *, monitor: str | None = None, out: Path | None = None
) -> None:
    """Write one HTML page about finished runs: a metric, epsilon and bits by round, privacy against
    each adversary, costs and settings. The page needs no network and can be printed.

    Args:
        runs: Folder of a finished run.
        monitor: Metric to draw (default: val_acc, or the first val_* metric).
        out: Page to write (default: report.html in the run's folder, or here for several runs).
    """
    out = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    write_report(runs, out, monitor)
    print(out)
