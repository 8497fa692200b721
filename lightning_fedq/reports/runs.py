"""Files of a run: a table of rounds, a summary, a report and pictures. The module does not use Lightning.

A run folder holds `config.yaml`, `metrics.csv` (one row per round), `summary.json`, `report.md` and PNG
pictures. Each file is written under a temporary name and then renamed, so a reader never sees a partial file.
The row of a round is appended with a single write.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_fedq.privacy.journal import name_file_in_errors
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.plot_style import (
    darken,
    finish_row,
    legend,
    panels,
    picture_bytes,
    picture_format,
    series,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_fedq.privacy.report import PrivacyReport

Row = dict[str, float]
BITS_PER_MEGABYTE = 8e6


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name and rename it. Its folder is created if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    try:
        with name_file_in_errors(path):
            beside.write_bytes(content.encode() if isinstance(content, str) else content)
            os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def fresh_folder(path: Path) -> Path:
    """Create the folder `path`, or `path-2`, `path-3`, ... if it exists already, and return it.

    Two runs that start at the same time get different folders.

    Raises:
        OSError: If the folder can't be created.
    """
    with suppress(FileExistsError):  # the parent may be a file, which `mkdir` below reports
        path.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        return candidate
    raise AssertionError("never here")


def check_run_name(name: str) -> None:
    """Check that the name of a run is a folder below the folder of all runs.

    Raises:
        ValueError: If the name is empty, absolute, or contains "..".
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise ValueError(
            f"The name of a run must be a folder below root, such as 'digits', got {name!r}. Set the parent "
            "folder with RunFolder(root=...)."
        )


# ---- rounds -------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write one CSV row per round. Columns are in order of appearance, and missing values are empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    heads = dict(zip(columns, columns, strict=True))
    write_atomically(path, _csv(columns, [heads, *rows]))


def append_row(path: Path, rows: Sequence[Row]) -> None:
    """Append the last row to a file that has all earlier rows. The file is rewritten if columns are new."""
    columns = []
    if len(rows) > 1 and path.is_file():
        with path.open(newline="") as file:
            columns = next(csv.reader(file), [])
    if not set(rows[-1]) <= set(columns):
        write_rows(path, rows)
        return
    with path.open("ab", buffering=0) as file:
        file.write(_csv(columns, rows[-1:]).encode())


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()


def read_rows(path: Path) -> list[Row]:
    """Read the rows that `write_rows` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no {path}. Give the folder of a run with the RunFolder callback.")
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def totals(rows: Sequence[Row]) -> dict[str, float]:
    """Sum the communication and time of a run over its rounds.

    Args:
        rows: `RoundRecord.metrics()` of every round, with `seconds`.

    Returns:
        Megabytes (10^6 bytes) of uplink, downlink, key set-up and protocol, seconds, and the number of
        messages that the server received.
    """
    kinds = ("uplink", "downlink", "setup", "protocol")
    sent = {kind: sum(row.get(f"{kind}_bits", 0.0) for row in rows) for kind in kinds}
    return {
        **{f"{kind}_megabytes": bits / BITS_PER_MEGABYTE for kind, bits in sent.items()},
        "seconds": sum(row["seconds"] for row in rows),
        "messages": sum(row["num_received"] for row in rows),
    }


# ---- summary ------------------------------------------------------------------------------------------


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write a summary as JSON. NaN and infinity become null, because JSON does not have them."""
    write_atomically(path, json.dumps(_finite(summary), indent=2) + "\n")


def _finite(value: Any) -> Any:
    """Return a nested value with all NaN and infinite numbers replaced by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def worse_ratio(ratios: Mapping[str, Any]) -> float | None:
    """Return the larger of the planned and the measured ratio. None without both."""
    return max((ratios[key] for key in ("planned", "sim_seen") if ratios.get(key) is not None), default=None)


def format_metric(name: str, value: float) -> str:
    """Return the value of a metric with four digits. An epsilon is rounded up, as on the privacy page."""
    return format_epsilon(value) if "epsilon" in name else f"{value:.4g}"


def summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a summary as pairs of a name and its value with units, for readers."""
    trained = f"{summary['rounds']} rounds, {summary['num_clients']} clients send {summary['target']}"
    lines = [("trained", trained)]
    if (charged := summary.get("rounds_charged", summary["rounds"])) != summary["rounds"]:
        lines.append(("rounds charged", f"{charged}, with earlier trainings, repeated and open rounds"))
    stages: dict[str, list[str]] = {}
    for name, value in summary["metrics"].items():
        if stage := metric_stage(name):
            stages.setdefault(stage, []).append(f"{name} {format_metric(name, value)}")
        else:
            stages[name] = [format_metric(name, value)]
    lines += [(stage, ", ".join(values)) for stage, values in stages.items()]
    for kind in ("best", "last"):
        if shown := summary.get(kind):
            text = f"{shown['monitor']} = {shown['value']:.4g} after round {shown['round']:.0f}"
            lines.append((kind, text))
            break
    if noise := (summary.get("noise_over_signal") or {}).get("words"):
        lines.append(("noise-to-signal ratio", noise))
    lines += [("seconds", _seconds(summary["seconds"]))]
    return lines


def _seconds(seconds: float | None) -> str:
    if seconds is None or math.isnan(seconds):
        return "unknown, because cohorts are secret or the folder of earlier rounds is missing"
    return f"{seconds:.1f} in rounds, without set-up and writing of files"


_NO_LENGTHS = (
    "not known (the checkpoint that this folder began with has no lengths of messages, or nobody learns "
    "how many clients took part)"
)


def describe_bits(report: PrivacyReport) -> str:
    """Return a sentence with the bits of uplink and downlink and their saving. "" if nothing is known."""
    bits = report.bits
    if bits is None:
        return ""
    if bits.update is None:
        return f"Bits a parameter: {_NO_LENGTHS}."
    about = "" if bits.measured else "about "
    hidden = report.masks in ("ran", "asked", "counted")
    rest = hidden and bits.keys is None
    word = "unmasked"
    if hidden:
        word = "masked" if bits.unmasked is None else f"masked ({bits.unmasked:.3g} unmasked)"
    text, total_up = f"up {about}{bits.update:.3g} {word}", bits.update
    if bits.keys:
        total_up += bits.keys
        text += f" + {bits.keys:.3g} keys and shares = {total_up:.3g}"
    text += ", keys and shares on top" if rest else ""
    if bits.down is not None:
        both = total_up + bits.down
        saved = 100.0 * (1.0 - both / 64.0)
        what = f"{saved:.0f}% less" if saved >= 0.0 else f"{-saved:.0f}% more"
        before = ", before keys and shares" if rest else ""
        text += f"; down {about}{bits.down:.3g}; both ways {both:.3g}, {what} than 32 each way{before}"
    if bits.megabytes_up is not None:
        rounds = report.rounds if bits.rounds is None else bits.rounds
        text += f". All clients, {rounds:,} rounds: {bits.megabytes_up:.4g} MB up"
        text += "" if bits.megabytes_down is None else f", {bits.megabytes_down:.4g} MB down"
    elif bits.measured:
        text += f". All clients: {_NO_LENGTHS}"
    return f"Bits a parameter, one client in a round: {text}."


def print_summary(summary: Mapping[str, Any], privacy: PrivacyReport, folder: Path) -> None:
    """Print the metrics, the first part of the privacy document, and the paths of files, in 25 lines."""
    from rich.console import Console  # needed only here

    from lightning_fedq.privacy.document import AT_THE_END, document
    from lightning_fedq.reports.layouts import terminal

    metrics = [pair for pair in summary["metrics"].items() if metric_stage(pair[0]) in ("val", "test")]
    result = ", ".join(f"{name} {format_metric(name, value)}" for name, value in metrics[-_METRICS:])
    console = Console()
    console.width = max(console.width, 80)
    console.print(f"{summary['name']}: {result or 'no val or test metric'}", highlight=False, markup=False)
    terminal(console, *document(privacy, AT_THE_END))
    if sent := describe_bits(privacy):
        console.print(sent, highlight=False, markup=False)
    files = f"{folder}/: report.md, privacy.md, model.ckpt"
    console.print(files, highlight=False, markup=False, soft_wrap=True)


_METRICS = 4
"""Number of metrics that are printed at the end of `fedq fit`. The last ones are printed."""


def report_markdown(summary: Mapping[str, Any], privacy: PrivacyReport, pictures: Sequence[str]) -> str:
    """Return the page `report.md` with results, costs, privacy and pictures."""
    from lightning_fedq.privacy.document import document  # imports torch, needed only here
    from lightning_fedq.reports.layouts import markdown

    lines = [f"# {summary['name']}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in summary_lines(summary)]
    if sent := describe_bits(privacy):
        lines += ["", sent]
    lines += ["", markdown(*document(privacy), 2)]
    if pictures:
        lines += ["", "## Pictures", ""] + [f"![{name}]({name})" for name in pictures]
    lines += [
        "",
        "Values that begin with `sim_` exist only in a simulation. They compare with the exact mean of the "
        "clients' updates. They are not private, and a real server can't compute them.",
        "",
    ]
    return "\n".join(lines)


# ---- pictures -----------------------------------------------------------------------------------------


def save_figure(figure: Figure, path: Path, twin: bool = False) -> None:
    """Write a figure, atomically.

    Args:
        figure: Figure for white paper.
        path: File of the picture, which ends with .pdf, .svg or .png.
        twin: Whether to write also `NAME_dark.png`. The figure object is dark afterwards.

    Raises:
        ValueError: If the file has another ending.
    """
    kind = picture_format(path)
    write_atomically(path, picture_bytes(figure, kind))
    if twin:
        darken(figure)
        write_atomically(path.with_name(f"{path.stem}_dark{path.suffix}"), picture_bytes(figure, kind))


def set_round_axis(axes: Axes) -> None:
    """Set the x axis to whole rounds."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")


def plain_log(axes: Axes, which: Literal["x", "y"]) -> None:
    """Set a logarithmic axis with plain numbers at 1, 2 and 5 times powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def first_metric(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return `val_acc` or `val/acc` if it was logged, otherwise the first validation metric, or None."""
    logged = dict.fromkeys(key for row in rows for key in row if metric_stage(key) == "val")
    return next((key for key in logged if key in ("val_acc", "val/acc")), next(iter(logged), None))


def metric_stage(metric: str) -> str:
    """Return the stage of a metric by its prefix: "train", "val" or "test", or "" without a known prefix."""
    match = _STAGE.match(metric)
    return "" if match is None else {"validation": "val", "valid": "val"}.get(match[1], match[1])


_STAGE = re.compile(r"(train|validation|valid|val|test)[_/]")


def plot_progress(
    runs: Mapping[str, Sequence[Row]],
    monitor: str,
    title: str = "",
    baseline: float | None = None,
    dashed: Collection[str] = (),
    row: bool = False,
) -> Figure:
    """Draw one metric of one or several runs against rounds and against megabytes sent by the clients.

    Args:
        runs: Rows of each run, by name.
        monitor: Column to draw, such as `val_acc`. The picture names runs that did not log it.
        title: Title of the picture.
        baseline: Value of the metric that is drawn as a line.
        dashed: Names of runs that are drawn dashed and grey, such as runs without privacy.
        row: Whether to draw the panels in a row, for a paper.
    """
    figure, (by_round, by_size) = panels(2, title, row=row)
    longest: list[float] = []
    for place, (name, rows) in enumerate(runs.items()):
        sent, points = 0.0, []
        for done in rows:
            sent += (done["uplink_bits"] + done["setup_bits"]) / BITS_PER_MEGABYTE
            if monitor in done:
                points.append((done["round"], sent, done[monitor]))
        rounds, megabytes, values = zip(*points, strict=True) if points else ((), (), ())
        longest.append(sent)
        style = {**series(place), "linestyle": "-", "markevery": max(1, len(points) // 12)}
        style |= {"color": "0.5", "linestyle": "--", "marker": ""} if name in dashed else {}
        by_round.plot(rounds, values, label=name, **style)
        by_size.plot(megabytes, values, label=name, **style)
        if not points:
            keys = {key for done in rows for key in done}
            there = ", ".join(sorted(key for key in keys if "_" in key and key[:3] != "num"))
            text = f"{name} never logged {monitor}. It logged:\n{there}"
            by_round.text(0.5, 0.5, text, transform=by_round.transAxes, ha="center", wrap=True, fontsize=7)
    if baseline is not None:
        for axes in (by_round, by_size):
            axes.axhline(baseline, color="0.5", linestyle=":", label=f"baseline {baseline:g}")
    set_round_axis(by_round)
    by_round.set_ylabel(monitor)
    by_size.set_xlabel("uplink megabytes of all clients, with set-up")
    by_size.set_ylabel(monitor)
    if min(longest) > 0 and max(longest) >= 10 * min(longest):
        plain_log(by_size, "x")
    if row:
        finish_row(figure, title)
    elif len(runs) > 1 or baseline is not None:
        legend(by_round)
    return figure
