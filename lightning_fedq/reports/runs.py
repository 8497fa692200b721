"""Files of a run: a table of rounds, a summary, a page to read, pictures. No Lightning in here.

A run folder holds `config.yaml`, `metrics.csv` (one row a round), `summary.json`, `report.md` and PNG
pictures. Files are written beside their place and moved there, so a reader never sees half of one; a round's
row is appended in one go.
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

from lightning_fedq.privacy.verdict import NO_GUARANTEE, NOT_RUN, format_epsilon, masks_ran
from lightning_fedq.reports.hand import darken, legend, panels, png, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

Row = dict[str, float]
BITS_PER_MEGABYTE = 8e6


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and move it there. Its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        if error.errno is not None:
            error.filename = str(path)  # a full disk does not say where
        raise


def fresh_folder(path: Path) -> Path:
    """Make the folder `path`, or `path-2`, `path-3`, ... where one is there already, and return it.

    Of two runs that ask at once each has its own: whoever makes the folder has it.

    Raises:
        OSError: If it can't be made.
    """
    with suppress(FileExistsError):  # a file is there: what follows says so
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
    """Refuse names of runs that are no folder below the folder of all runs.

    Raises:
        ValueError: If it is absolute, empty, or climbs up.
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise ValueError(
            f"the name of a run is that of a folder below root, got {name!r}; use one like 'digits', and "
            "RunFolder(root=...) for where runs are kept"
        )


# ---- rounds -------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write one CSV row per round. Columns in order of first appearance, empty where a value is missing."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    write_atomically(path, _csv([columns, *_cells(columns, rows)]))


def append_row(path: Path, rows: Sequence[Row]) -> None:
    """Add the last row to a file of `write_rows` that holds the others. New columns write it anew."""
    columns = []
    if len(rows) > 1 and path.is_file():
        with path.open(newline="") as file:
            columns = next(csv.reader(file), [])
    if not set(rows[-1]) <= set(columns):
        write_rows(path, rows)
        return
    with path.open("ab", buffering=0) as file:
        file.write(_csv(_cells(columns, rows[-1:])).encode())


def _cells(columns: Sequence[str], rows: Sequence[Row]) -> list[list[object]]:
    return [[row.get(column, "") for column in columns] for row in rows]


def _csv(lines: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


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
        "protocol_megabytes": sum(row.get("protocol_bits", 0.0) for row in rows) / BITS_PER_MEGABYTE,
        "seconds": sum(row["seconds"] for row in rows),
        "messages": sum(row["num_received"] for row in rows),
    }


# ---- summary ------------------------------------------------------------------------------------------


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write JSON. NaN and infinity, which JSON lacks, become null."""
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
        *_unmet(summary),
        ("mechanism", summary["mechanism"]),
        ("clients", f"{summary['num_clients']}, {summary['rounds']} rounds, target {summary['target']}"),
        ("keys", summary["keys"]),
    ]
    if (charged := summary.get("rounds_charged", summary["rounds"])) != summary["rounds"]:
        lines.append(("rounds charged", f"{charged}, of earlier trainings, repeated and open rounds, too"))
    if "ended" in summary:
        lines.append(("ended", summary["ended"]))
    stages: dict[str, list[str]] = {}
    for name, value in summary["metrics"].items():
        if stage := stage_of(name):
            stages.setdefault(stage, []).append(f"{name} {value:.4g}")
        else:
            stages[name] = [f"{value:.4g}"]
    lines += [(stage, ", ".join(values)) for stage, values in stages.items()]
    best = summary["best"]
    if best:
        lines.append(("best", f"{best['monitor']} = {best['value']:.4g} after round {best['round']:.0f}"))
    if noise := noise_words(summary):
        lines.append(("noise over signal", noise))
    lines += [
        ("bits per parameter", _bits(summary)),
        (
            "megabytes",
            f"{_up(summary['uplink_megabytes'])}, {_down(summary['downlink_megabytes'])} down, "
            f"{summary['setup_megabytes']:.4g} of set-up",
        ),
        ("seconds", _seconds(summary["seconds"])),
    ]
    return lines


def _unmet(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A target that was not met, before anything else."""
    view = summary.get("view") or {}
    if view.get("met") is not False:
        return []
    from lightning_fedq.privacy.secret_row import title_of  # imports torch, and only needed here

    why = f"{format_epsilon(math.inf if view['spent'] is None else view['spent'])} spent"
    if view["adversary"] == "SECAGG_SERVER" and not masks_ran(str(summary["secure_aggregation"])):
        why = "no masks ran, so the server could see every message"
    whom = title_of(view["adversary"])
    return [("target NOT met", f"epsilon {view['asked']:g} towards: {whom}; {why}")]


def common_view(views: Sequence[Mapping[str, Any]]) -> str:
    """Name of the one adversary that several runs are shown towards.

    Args:
        views: `view` of each `summary.json`.

    Returns:
        Whom all that had a target were asked about, or all have; else the outsider, whom every run has.

    Example:
        >>> asked, other = {"adversary": "SECAGG_SERVER", "asked": 8.0}, {"adversary": "SERVER"}
        >>> common_view([asked, other])
        'SECAGG_SERVER'
    """
    asked = {str(view["adversary"]) for view in views if view.get("asked")}
    known = asked or {str(view.get("adversary")) for view in views}
    return known.pop() if len(known) == 1 else "OUTSIDER"


def epsilon_of_label(found: Mapping[str, Any], whom: bool) -> str:
    """Epsilon for a legend, and whether its target is met. "" where a folder does not say.

    Args:
        found: Columns of `privacy_of`.
        whom: Whether to say towards whom, which a title may do for all.
    """
    if found["epsilon"] == NOT_RUN:
        return "masks not run"
    if not isinstance(found["epsilon"], float):
        return ""
    from lightning_fedq.privacy.secret_row import title_of  # imports torch, and only needed here

    name, _, asked = str(found["view"]).partition(", asked for and ")
    towards = f", {title_of(name)}" if whom and name != "nobody" else ""
    if "NOT met" in asked:
        return f"target NOT met{towards}"
    if math.isinf(found["epsilon"]):
        return f"no finite \N{GREEK SMALL LETTER EPSILON}{towards}"
    return f"\N{GREEK SMALL LETTER EPSILON} {format_epsilon(found['epsilon'])}{towards}"


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
    masks = str(summary.get("secure_aggregation", ""))
    if view["met"] is False and view["adversary"] == "SECAGG_SERVER" and not masks_ran(masks):
        asked += " (no masks ran)"
    nobody = view["met"] is None and view["verdict"] == NO_GUARANTEE
    return {
        "epsilon": epsilon,
        "verdict": view["verdict"],
        "view": "nobody" if nobody else f"{view['adversary']}{asked}",
        "R": ratio,
    }


def _seconds(seconds: float | None) -> str:
    if seconds is None or math.isnan(seconds):
        return "not known: cohorts are secret, or the folder of the rounds before is not here"
    return f"{seconds:.1f} in rounds, set-up and files not counted"


def _bits(summary: Mapping[str, Any]) -> str:
    whole, protocol = summary["bits_per_parameter"], summary.get("protocol_bits_per_parameter", 0.0)
    if whole is None or math.isnan(whole):
        return "not known: nobody learns how many clients took part"
    if not protocol:
        return f"{whole:.4g} up, one client in one round"
    return (
        f"{whole:.4g} up, one client in one round: {whole - protocol:.4g} masked update, "
        f"{protocol:.4g} keys and shares"
    )


def noise_words(summary: Mapping[str, Any]) -> str:
    """R of a run and what it means for the model: as seen after the run, else as planned. "" without one.

    Where updates were far shorter than the clip, the clip that would do.
    """
    from lightning_fedq.privacy.planning import (
        GOOD,
        HOMOGENEITY,
        SWAMPED,
        verdict_on,
    )  # imports torch: only here

    known: Mapping[str, Any] = summary.get("noise_over_signal") or {}
    seen: Any = known.get("sim_seen")
    planned: Any = known.get("planned")
    words = []
    if seen is not None:
        words.append(f"{seen:.2g} as seen, with what clipping cuts off")
    if planned is not None:
        words.append(f"{planned:.2g} planned, with {HOMOGENEITY:g} of the updates' energy common to all")
    if not words:
        return ""
    value = planned if seen is None else seen
    means = "this run could hardly learn" if value > SWAMPED else verdict_on(value)
    if (clip := known.get("clip")) and seen is not None and seen > GOOD:
        means += (
            f"; updates were {clip['sim_update_norm']:.2g} long: clip_norm {clip['enough']:.2g} would do for "
            f"{clip['clip_norm']:.2g}, and R be about {clip['less']:.2g} of what was seen (read off data, "
            "which no epsilon counts; AdaptiveClip counts it)"
        )
    return f"R = {'; '.join(words)}: {means}"


def _up(megabytes: float) -> str:
    if math.isnan(megabytes):
        why = "the checkpoint that this folder began with keeps no lengths of messages"
        return f"not known up ({why}, or nobody learns how many clients took part)"
    return f"{megabytes:.4g} up"


def _down(megabytes: float) -> str:
    return "not known" if math.isnan(megabytes) else f"{megabytes:.4g}"


def print_summary(summary: Mapping[str, Any], folder: Path) -> None:
    """Print result, cost, privacy by adversary, and where the files are."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console  # only needed here
    from rich.table import Table

    console = Console(soft_wrap=True)
    table = Table(title=summary["name"], show_header=False, title_justify="left", box=SIMPLE_HEAD)
    for name, value in summary_lines(summary):
        table.add_row(name, value)
    console.print(table)
    print_privacy(Console(width=80), summary)
    pages = [folder / name for name in ("report.md", "privacy.md", "model.ckpt")]
    others = [path.name for path in sorted(folder.iterdir()) if path not in pages]
    console.print(*pages, f"{folder}/: {', '.join(others)}", sep="\n", highlight=False)


def print_privacy(console: Console, summary: Mapping[str, Any]) -> None:
    """Print who learns how much: what was asked for, what else holds, what holds if something fails."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from lightning_fedq.privacy.verdict import scale

    console.print(f"privacy of one client {summary['privacy_of']}", highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    for name, width in (("who", 35), ("epsilon", 9), ("verdict", 12), ("condition", 19)):
        table.add_column(name, width=width)
    group = ""
    for line in summary["privacy"]:
        if line["group"] != group:
            group = line["group"]
            table.add_row(f"[italic]{group}")
        table.add_row(f"  {line['who']}", line["epsilon"], line["verdict"], line["when"])
    console.print(table)
    for line in (*summary["privacy_notes"], scale()):
        console.print(line, highlight=False)


def _privacy_markdown(summary: Mapping[str, Any]) -> list[str]:
    """The same table as lines of a page."""
    lines = [f"One client, {summary['privacy_of']}.", ""]
    lines += ["| who | epsilon | verdict | condition |", "| --- | ---: | --- | --- |"]
    group = ""
    for line in summary["privacy"]:
        if line["group"] != group:
            group = line["group"]
            lines.append(f"| *{group}* | | | |")
        lines.append(f"| {line['who']} | {line['epsilon']} | {line['verdict']} | {line['when']} |")
    return [*lines, "", *(f"{note}." for note in summary["privacy_notes"])]


def report_markdown(summary: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """Return the page `report.md`: result, cost, privacy by adversary, pictures."""
    from lightning_fedq.privacy.verdict import scale

    lines = [f"# {summary['name']}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in summary_lines(summary)]
    lines += ["", "## Privacy, adversary by adversary", "", *_privacy_markdown(summary)]
    lines += ["", f"{scale().capitalize()}."]
    if pictures:
        lines += ["", "## Pictures", ""] + [f"![{name}]({name})" for name in pictures]
    lines += [
        "",
        "What begins with `sim_` only a simulation knows: it compares with the exact mean of the clients' "
        "updates. It is not private and no real server could print it.",
        "",
    ]
    return "\n".join(lines)


# ---- pictures -----------------------------------------------------------------------------------------


def save_figure(figure: Figure, path: Path, twin: bool = False) -> None:
    """Write a figure as PNG, atomically.

    Args:
        figure: Drawn for white paper.
        twin: Write `NAME_dark.png` beside it, too; the figure is dark afterwards.
    """
    write_atomically(path, png(figure))
    if twin:
        darken(figure)
        write_atomically(path.with_name(f"{path.stem}_dark{path.suffix}"), png(figure))


def _of_rounds(axes: Axes) -> None:
    """Whole rounds on the x axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")


def plain_log(axes: Axes, which: Literal["x", "y"]) -> None:
    """A logarithmic axis with plain numbers at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def first_metric(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """`val_acc` or `val/acc` if it was logged, or else the first `val_*` or `val/*` metric there is."""
    logged = dict.fromkeys(key for row in rows for key in row if stage_of(key) == "val")
    return next((key for key in logged if key in ("val_acc", "val/acc")), next(iter(logged), None))


def stage_of(metric: str) -> str:
    """Stage that a metric is of, by the usual prefixes: "train", "val" or "test".

    "" where it has none of them.
    """
    found = _STAGE.match(metric)
    return "" if found is None else {"validation": "val", "valid": "val"}.get(found[1], found[1])


_STAGE = re.compile(r"(train|validation|valid|val|test)[_/]")


def mode_of(metric: str) -> Literal["max", "min"]:
    """Is a larger or a smaller value better? Losses, errors and perplexities are better small."""
    small = ("loss", "err", "mse", "mae", "nll", "perplexity", "ppl")
    return "min" if any(word in metric.lower() for word in small) else "max"


def plot_progress(
    runs: Mapping[str, Sequence[Row]],
    monitor: str,
    title: str = "",
    baseline: float | None = None,
    dashed: Collection[str] = (),
) -> Figure:
    """Draw one metric of one or several runs against rounds and against megabytes sent by the clients.

    Args:
        runs: Rows of each run, by name.
        monitor: Column to draw, such as `val_acc`; where no run has it, the picture says so.
        title: Title of the picture.
        baseline: A value of the metric to draw as a line.
        dashed: Runs to draw dashed and grey: those to compare with.
    """
    figure, (by_round, by_size) = panels(2, title)
    longest: list[float] = []
    for place, (name, rows) in enumerate(runs.items()):
        sent, points = 0.0, []
        for row in rows:
            sent += (row["uplink_bits"] + row["setup_bits"]) / BITS_PER_MEGABYTE
            if monitor in row:
                points.append((row["round"], sent, row[monitor]))
        rounds, megabytes, values = zip(*points, strict=True) if points else ((), (), ())
        longest.append(sent)
        style = {**series(place), "linestyle": "-", "markevery": max(1, len(points) // 12)}
        style |= {"color": "0.5", "linestyle": "--", "marker": ""} if name in dashed else {}
        by_round.plot(rounds, values, label=name, **style)
        by_size.plot(megabytes, values, label=name, **style)
        if not points:
            there = ", ".join(sorted({key for row in rows for key in row if "_" in key and key[:3] != "num"}))
            text = f"{name} never logged {monitor}; it has:\n{there}"
            by_round.text(0.5, 0.5, text, transform=by_round.transAxes, ha="center", wrap=True, fontsize=7)
    if baseline is not None:
        for axes in (by_round, by_size):
            axes.axhline(baseline, color="0.5", linestyle=":", label=f"baseline {baseline:g}")
    _of_rounds(by_round)
    by_round.set_ylabel(monitor)
    by_size.set_xlabel("megabytes up, all clients, set-up included")
    by_size.set_ylabel(monitor)
    if min(longest) > 0 and max(longest) >= 10 * min(longest):
        plain_log(by_size, "x")
    if len(runs) > 1 or baseline is not None:
        legend(by_round)
    return figure


_WORDS = {
    "sim_cosine": "cosine of the mean with the exact one",
    "sim_clip_rate": "share of clipped updates",
    "radius_min": "smallest range",
    "radius_max": "largest range",
}
"""Columns in the words of a legend."""


def plot_aggregate(rows: Sequence[Row], title: str = "") -> Figure:
    """Draw how far the decoded mean is from the exact one, and the range, against rounds.

    A panel for what the rows have: a real server knows no exact mean.
    """
    rounds = [row["round"] for row in rows]
    values = {
        name: [row.get(name, math.nan) for row in rows]
        for name in ("sim_mse", "sim_cosine", "sim_clip_rate", "radius_min", "radius_max")
    }
    known = {name for name, column in values.items() if any(math.isfinite(value) for value in column)}
    if values["radius_min"] == values["radius_max"]:
        known.discard("radius_max")  # one range for all: the lines would lie on each other
    wanted = [
        (("sim_mse",), "squared error of the mean"),
        (("sim_cosine", "sim_clip_rate"), "between 0 and 1"),
        (("radius_min", "radius_max"), "radius of the range"),
    ]
    shown_panels = [panel for panel in wanted if known.intersection(panel[0])] or wanted[-1:]
    figure, drawn = panels(len(shown_panels), title)
    for axes, (columns, label) in zip(drawn, shown_panels, strict=True):
        shown = [column for column in columns if column in known]
        for place, column in enumerate(shown):
            style = {**series(place), "markevery": max(1, len(rows) // 12)}
            axes.plot(rounds, values[column], label=_WORDS.get(column, column), **style)
        _of_rounds(axes)
        axes.set_ylabel(label)
        if len(shown) > 1:
            legend(axes)
        positive = any(value > 0 for column in shown for value in values[column])
        if positive and columns[0] in ("sim_mse", "radius_min"):
            plain_log(axes, "y")
    return figure
