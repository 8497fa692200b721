"""Page of `fedq report`: an overview, charts, privacy by adversary, and the privacy document of each run."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lightning_fedq.privacy.document import document
from lightning_fedq.privacy.report import PrivacyReport
from lightning_fedq.privacy.report_file import OtherVersionError, from_json
from lightning_fedq.privacy.report_rows import (
    PLACES,
    PrivacySummary,
    common_adversary,
    report_rows,
    summarise_privacy,
)
from lightning_fedq.privacy.row import adversary_title
from lightning_fedq.privacy.verdict import COLOURS as VERDICTS
from lightning_fedq.reports.layouts import html
from lightning_fedq.reports.plot_style import darken, legend, panels, picture_bytes, series
from lightning_fedq.reports.runs import Row, plain_log, read_rows, set_round_axis

_PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "pages"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
"""Templates of the page. They escape all values, because names of runs are arbitrary text."""
_NO_RUN = "Give the folder of a finished run with the RunFolder callback, such as runs/digits_private."
Table = tuple[Sequence[str], Sequence[tuple["str | Cell", "Sequence[str | Cell]"]]]
"""Column heads, and rows that have a name and cells."""


@dataclass(frozen=True)
class Run:
    """Contents of the folder of a finished run.

    Args:
        name: Name of the run on the page.
        rows: Rows of `metrics.csv`, one per round.
        summary: Contents of `summary.json`.
        privacy: Report of `privacy.json`. None if another version of this package wrote it.
        note: Advice if `privacy` is None, otherwise "".
        config: Resolved configuration as YAML, or "" if the folder has none.
    """

    name: str
    rows: list[Row]
    summary: Mapping[str, Any]
    privacy: PrivacyReport | None
    note: str
    config: str

    def column(self, name: str) -> list[tuple[float, float]]:
        """Return (round, value) pairs of a column, without rounds in which the value is missing or NaN."""
        return [(row["round"], row[name]) for row in self.rows if name in row and row[name] == row[name]]


def read(folder: Path, name: str) -> Run:
    """Read a run folder.

    Raises:
        ValueError: If it is not the folder of a finished run. The message has the missing file.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. {_NO_RUN}")
    for file in ("metrics.csv", "summary.json", "privacy.json"):
        if not (folder / file).is_file():
            raise ValueError(f"There is no {file} in {folder}. {_NO_RUN}")
    privacy, note = None, ""
    try:
        privacy = from_json((folder / "privacy.json").read_text())
    except OtherVersionError as error:
        note = str(error)
    config = folder / "config.yaml"
    return Run(
        name,
        read_rows(folder / "metrics.csv"),
        json.loads((folder / "summary.json").read_text()),
        privacy,
        note,
        config.read_text() if config.is_file() else "",
    )


def page(runs: Sequence[Run], monitor: str) -> str:
    """Return the whole page as self-contained HTML, for light and dark mode and narrow screens.

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
    """Return title and text of a run's privacy document, or advice if another version wrote it."""
    if run.privacy is None:
        return "Privacy", Markup("<p>{}</p>").format(run.note)
    title, parts = document(run.privacy)
    return title, html(parts, 3)


def _shown(run: Run, who: str | None = None) -> PrivacySummary:
    """Return the privacy summary of a run against an adversary, empty if its report can't be read."""
    return PrivacySummary("", None, "") if run.privacy is None else summarise_privacy(run.privacy, who)


def _common(runs: Sequence[Run]) -> str:
    """Return the name of the adversary that all runs are compared for."""
    return common_adversary([run.privacy for run in runs if run.privacy is not None])


def _overview(runs: Sequence[Run], monitor: str) -> Table:
    """Return the overview table: metric, epsilon, noise-to-signal ratio and bits of each run."""
    modes = {(run.summary.get("modes") or {}).get(monitor) for run in runs}
    mode = modes.pop() if len(modes) == 1 else None
    better = {"max": " (larger is better)", "min": " (smaller is better)"}.get(mode or "", "")
    who = _common(runs)
    epsilon = f"epsilon of the run, {adversary_title(who)}"
    heads = ("run", f"{monitor}{better}", epsilon, "noise-to-signal ratio R", "bits per parameter")
    rows: list[tuple[str | Cell, list[str | Cell]]] = []
    for run in runs:
        best, values = run.summary.get("best") or {}, run.column(monitor)
        value = f"best {number(best.get('value'))}" if best else "last round"
        bits = None if run.privacy is None else run.privacy.bits
        after = f" after round {best['round']:.0f}" if best else ""
        tests = [f"; {name} {number(v)}" for name, v in run.summary["metrics"].items() if name[:4] == "test"]
        up, down = number(run.summary["bits_per_parameter"]), "-" if bits is None else number(bits.down, 3)
        noise = ((run.summary.get("noise_over_signal") or {}).get("words") or "").rpartition(": ")
        summary, own = _shown(run, who), _shown(run)
        differs = own.asked and own.who != who
        cells: list[str | Cell] = [
            Cell(number(values[-1][1] if values else None), f"{value}{after}{''.join(tests)}", strong=True),
            privacy_cell(summary, f"{own.asked}; {adversary_title(own.who)}" if differs else ""),
            Cell(noise[2] or "-", noise[0]),
            Cell(f"uplink {up}, downlink {down}", f"{run.summary['rounds']} rounds"),
        ]
        rows.append((Cell(run.name, str(run.summary["mechanism"]).partition("(")[0]), cells))
    return heads, rows


def _adversary_table(runs: Sequence[Run]) -> Table:
    """Return a table of epsilon and verdict, with a row per adversary and a column per run."""
    reports = [report_rows(run.privacy) if run.privacy else [] for run in runs]
    groups = [{line.row.name: line.group for line in lines} for lines in reports]
    rows: list[tuple[str | Cell, list[str | Cell]]] = []
    for name in PLACES:
        if any(name in of for of in groups):
            cells: list[str | Cell] = [
                privacy_cell(_shown(run, name), of.get(name, ""))
                for run, of in zip(runs, groups, strict=True)
            ]
            rows.append((adversary_title(name), cells))
    return ("who", *(run.name for run in runs)), rows


def render(name: str, **values: object) -> Markup:
    """Render a template of `pages/`. Values are escaped, so they can't add elements or attributes.

    Args:
        name: File of the template.
        values: All variables of the template.

    Examples:
        >>> print(render("chart.html", label='"><script>', light="", dark="").splitlines()[2])
        <img alt="&#34;&gt;&lt;script&gt;" src="data:image/png;base64,">
    """
    return Markup(_PAGES.get_template(name).render(**values))


# ---- charts -------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """Series of a chart: name, (round, value) pairs, number of its colour, and whether it is a limit."""

    name: str
    points: Sequence[tuple[float, float]]
    place: int
    is_limit: bool = False


def line_chart(lines: Sequence[Line], label: str, zero: bool = False) -> Markup:
    """Draw series against rounds as a light and a dark picture that are embedded in the page.

    The axis is logarithmic if values differ by more than a factor of 50.

    Args:
        lines: Series to draw, without infinite and missing values.
        label: Alternative text of the picture. The names of several series are appended.
        zero: Whether the axis starts at 0.

    Returns:
        A `<picture>` element, or "" if there is no value.
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
    light = base64.b64encode(picture_bytes(figure, "png")).decode()
    darken(figure)
    dark = base64.b64encode(picture_bytes(figure, "png")).decode()
    return render("chart.html", label=label, light=light, dark=dark)


def _figures(runs: Sequence[Run], monitor: str) -> Iterator[tuple[str, Markup, list[str]]]:
    """Yield title, chart and notes of each chart by round."""
    metric = [Line(run.name, run.column(monitor), place) for place, run in enumerate(runs)]
    yield monitor, line_chart(metric, f"{monitor} by round"), []
    who = _common(runs)
    yield (f"epsilon spent, {adversary_title(who)}", *_epsilons(runs, who))
    bits = [Line(run.name, bits_by_round(run), place) for place, run in enumerate(runs)]
    yield "uplink bits per parameter", line_chart(bits, "bits per parameter by round", zero=True), []


def _epsilons(runs: Sequence[Run], who: str) -> tuple[Markup, list[str]]:
    """Return the chart of epsilon by round against one adversary, and notes on runs without such a curve.

    A run has a curve only against the adversary of its own target.
    """
    drawn, notes = [], []
    for place, run in enumerate(runs):
        privacy = run.privacy
        if privacy is None or privacy.about.name != who or not privacy.by_round:
            summary = _shown(run, who)
            notes.append(f"{run.name}: {summary.printed} {summary.verdict}, not drawn")
            continue
        drawn.append(Line(run.name, privacy.by_round, place))
        asked = privacy.asked
        if asked is not None and asked.over == "run":
            drawn.append(Line(f"target {asked.epsilon:g}", [(0.0, asked.epsilon)], place, is_limit=True))
    return line_chart(drawn, "epsilon spent by round", zero=True), notes


def bits_by_round(run: Run) -> list[tuple[float, float]]:
    """Return the uplink bits of a client per parameter, by round, with updates, keys, shares and set-up."""
    known = [row for row in run.rows if row["num_received"] and "uplink_bits" in row]
    bits = [(row["uplink_bits"] + row["setup_bits"]) / row["num_received"] for row in known]
    dim = run.summary["num_parameters"] + run.summary.get("num_buffers", 0)
    return [(row["round"], sent / dim) for row, sent in zip(known, bits, strict=True)]


# ---- cells --------------------------------------------------------------------------------------------


def number(value: Any, digits: int = 4) -> str:
    """Return a number as text, or "-" if it is None or NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.{digits}g}" if isinstance(value, float) else f"{value:,}"


@dataclass(frozen=True)
class Cell:
    """Cell of a table.

    Args:
        words: Text of the cell.
        small: Small print below the text.
        colour: Colour of the text, if it is a verdict.
        asked: Target that was asked for.
        strong: Whether the text is bold.
        is_cell: Always True. Templates use it to distinguish cells from plain text.
    """

    words: str = ""
    small: str = ""
    colour: str = ""
    asked: str = ""
    strong: bool = False
    is_cell: bool = True


def privacy_cell(found: PrivacySummary, small: str = "") -> Cell:
    """Return a cell with epsilon and verdict in the colour of the verdict, and the target."""
    words = f"{found.printed} {found.verdict}".strip()
    colour = "bad" if found.met is False else VERDICTS.get(found.verdict, "bad")
    return Cell(words, small, colour, found.asked)
