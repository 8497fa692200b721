"""The page of `fedq report`: an overview, charts, who learns how much, each document."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from lightning_fedq.privacy.document import (
    PLACES,
    PrivacySummary,
    common_adversary,
    document,
    report_rows,
    summarise_privacy,
)
from lightning_fedq.privacy.secret_row import adversary_title
from lightning_fedq.privacy.verdict import COLOURS as VERDICTS
from lightning_fedq.reports.html.folders import Run
from lightning_fedq.reports.html.templates import render
from lightning_fedq.reports.layouts import html
from lightning_fedq.reports.plot_style import darken, legend, panels, png, series
from lightning_fedq.reports.runs import metric_mode, plain_log, set_round_axis

Table = tuple[Sequence[str], Sequence[tuple["str | Cell", "Sequence[str | Cell]"]]]
"""Heads, and rows of a name and cells."""


def page(runs: Sequence[Run], monitor: str) -> str:
    """The whole page as HTML, in one file: light and dark, wide and narrow, without a network.

    Args:
        runs: Runs to show side by side.
        monitor: Metric to draw, such as `val_acc`.
    """
    return render(
        "report.html",
        title=" · ".join(run.name for run in runs),
        runs=runs,
        overview=_overview(runs, monitor),
        figures=list(_figures(runs, monitor)),
        views=_adversary_table(runs) if len(runs) > 1 else None,
        documents=[(run.name, *_document(run)) for run in runs],
    )


def _document(run: Run) -> tuple[str, Markup]:
    """Title and text of a run's privacy document, or what to do where another version wrote it."""
    if run.privacy is None:
        return "Privacy", Markup("<p>{}</p>").format(run.note)
    title, parts = document(run.privacy)
    return title, html(parts, 3)


def _shown(run: Run, who: str | None = None) -> PrivacySummary:
    return PrivacySummary("", None, "") if run.privacy is None else summarise_privacy(run.privacy, who)


def _common(runs: Sequence[Run]) -> str:
    return common_adversary([run.privacy for run in runs if run.privacy is not None])


def _overview(runs: Sequence[Run], monitor: str) -> Table:
    better = "larger" if metric_mode(monitor) == "max" else "smaller"
    who = _common(runs)
    epsilon = f"epsilon of the run, {adversary_title(who)}"
    heads = ("run", f"{monitor} ({better} is better)", epsilon, "noise over signal R", "bits a parameter")
    rows: list[tuple[str | Cell, list[str | Cell]]] = []
    for run in runs:
        best, values = run.summary.get("best") or {}, run.column(monitor)
        bits = None if run.privacy is None else run.privacy.bits
        after = f" after round {best['round']:.0f}" if best else ""
        tests = [f"; {name} {number(v)}" for name, v in run.summary["metrics"].items() if name[:4] == "test"]
        down = "-" if bits is None else number(bits.down, 3)
        noise = ((run.summary.get("noise_over_signal") or {}).get("words") or "").rpartition(": ")
        found = _shown(run, who)
        cells: list[str | Cell] = [
            Cell(
                number(values[-1][1] if values else None),
                f"best {number(best.get('value'))}{after}{''.join(tests)}",
                strong=True,
            ),
            privacy_cell(found, _differing_target(run, who)),
            Cell(noise[2] or "-", noise[0]),
            Cell(
                f"up {number(run.summary['bits_per_parameter'])}, down {down}",
                f"{run.summary['rounds']} rounds",
            ),
        ]
        rows.append((Cell(run.name, str(run.summary["mechanism"]).partition("(")[0]), cells))
    return heads, rows


def _differing_target(run: Run, who: str) -> str:
    """Target of a run towards somebody else than who is shown, "" without one."""
    own = _shown(run)
    return f"{own.asked}; {adversary_title(own.who)}" if own.asked and own.who != who else ""


def _adversary_table(runs: Sequence[Run]) -> Table:
    """Epsilon and verdict by adversary of several runs, a column a run."""
    groups = [
        {line.row.name: line.group for line in report_rows(run.privacy)} if run.privacy else {}
        for run in runs
    ]
    rows: list[tuple[str | Cell, list[str | Cell]]] = []
    for name in PLACES:
        if any(name in of for of in groups):
            cells: list[str | Cell] = [
                privacy_cell(_shown(run, name), of.get(name, ""))
                for run, of in zip(runs, groups, strict=True)
            ]
            rows.append((adversary_title(name), cells))
    return ("who", *(run.name for run in runs)), rows


# ---- charts -------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A series of a chart: name, rounds and values, place among the colours, and whether it is a limit."""

    name: str
    points: Sequence[tuple[float, float]]
    place: int
    is_limit: bool = False


def line_chart(lines: Sequence[Line], label: str, zero: bool = False) -> Markup:
    """Draw series against rounds, for light and for dark paper, as pictures in the page.

    A logarithmic axis where values differ by more than 50 times.

    Args:
        report_rows: What to draw; infinite and missing values are left out.
        label: What a reader who can't see the picture is told, with the names of several series.
        zero: Whether the axis begins at 0.

    Returns:
        A `<picture>` element; "" where there is no value.
    """
    finite = [(line, [(x, y) for x, y in line.points if math.isfinite(y)]) for line in lines]
    finite = [(line, points) for line, points in finite if points]
    if all(line.is_limit for line, _ in finite):
        return Markup("")
    figure, (axes,) = panels(1)
    for line, points in finite:
        name, style = line.name.replace("$", r"\$"), series(line.place)
        if line.is_limit:
            axes.axhline(points[0][1], color=style["color"], linestyle="--", label=name)
        else:
            axes.plot(*zip(*points, strict=True), label=name, markevery=max(1, len(points) // 12), **style)
    set_round_axis(axes)
    ys = [y for _, points in finite for _, y in points]
    if min(ys) > 0 and max(ys) > 50 * min(ys):
        plain_log(axes, "y")
    elif zero:
        axes.set_ylim(bottom=0.0)
    if len(finite) > 1:
        legend(axes)
        label = f"{label}: {', '.join(line.name for line, _ in finite)}"
    light = base64.b64encode(png(figure)).decode()
    darken(figure)
    return render("chart.html", label=label, light=light, dark=base64.b64encode(png(figure)).decode())


def _figures(runs: Sequence[Run], monitor: str) -> Iterator[tuple[str, Markup, list[str]]]:
    """Titles, charts and notes of the charts by round."""
    metric = [Line(run.name, run.column(monitor), place) for place, run in enumerate(runs)]
    yield monitor, line_chart(metric, f"{monitor} by round"), []
    who = _common(runs)
    yield (f"epsilon spent, {adversary_title(who)}", *_epsilons(runs, who))
    bits = [Line(run.name, bits_by_round(run), place) for place, run in enumerate(runs)]
    yield "bits a parameter, up", line_chart(bits, "bits a parameter by round", zero=True), []


def _epsilons(runs: Sequence[Run], who: str) -> tuple[Markup, list[str]]:
    """Curves towards one adversary, and what runs have at the end that were not asked about it."""
    drawn, notes = [], []
    for place, run in enumerate(runs):
        privacy = run.privacy
        if privacy is None or privacy.about.name != who or not privacy.by_round:
            found = _shown(run, who)
            notes.append(f"{run.name}: {found.printed} {found.verdict}, not drawn")
            continue
        drawn.append(Line(run.name, privacy.by_round, place))
        asked = privacy.asked
        if asked is not None and asked.over == "run":
            drawn.append(Line(f"target {asked.epsilon:g}", [(0.0, asked.epsilon)], place, is_limit=True))
    return line_chart(drawn, "epsilon spent by round", zero=True), notes


def bits_by_round(run: Run) -> list[tuple[float, float]]:
    """Bits that a client sends for a parameter, by round: updates, keys and shares, set-up."""
    known = [row for row in run.rows if row["num_received"] and "uplink_bits" in row]
    bits = [(row["uplink_bits"] + row["setup_bits"]) / row["num_received"] for row in known]
    dim = run.summary["num_parameters"] + run.summary.get("num_buffers", 0)
    return [(row["round"], sent / dim) for row, sent in zip(known, bits, strict=True)]


# ---- cells --------------------------------------------------------------------------------------------


def number(value: Any, digits: int = 4) -> str:
    """A number for a reader, "-" where there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.{digits}g}" if isinstance(value, float) else f"{value:,}"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: words, in a verdict's colour where they are one, what was asked for, small print."""

    words: str = ""
    small: str = ""
    colour: str = ""
    asked: str = ""
    strong: bool = False
    is_cell: bool = True


def privacy_cell(found: PrivacySummary, small: str = "") -> Cell:
    """Epsilon and its word in the word's colour, and what was asked for."""
    words = f"{found.printed} {found.verdict}".strip()
    colour = "bad" if found.met is False else VERDICTS.get(found.verdict, "bad")
    return Cell(words, small, colour, found.asked)
