"""Tables and pictures of run folders: a list of runs, or one comparison by mechanism and epsilon.

Only this module reads the score, bits and epsilon of a run from its folder.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.plot_style import finish_row, legend, panels, series
from lightning_fedq.reports.runs import (
    Row,
    first_metric,
    metric_stage,
    plot_progress,
    read_rows,
    save_figure,
    totals,
    worse_ratio,
    write_rows,
    write_summary,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_fedq.mechanisms.interface import Adversary
    from lightning_fedq.privacy.report import PrivacyReport

Line = dict[str, Any]
"""Figures of one run."""
ABOVE = "FedAvg"
"""Name of the row without privacy, which is the first row of the table."""
OPACUS = ", by Opacus"
"""Suffix of the names of rows that Opacus calibrates."""
_DRAWN = 8
"""Number of best rows in the picture, not counting the rows that Opacus calibrates."""
HEADS = {"bits_per_parameter": "bits", "uplink_megabytes": "MB up"}


# ---- one run ------------------------------------------------------------------------------------------


def read_run(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Read the rows and the summary of a run folder.

    Raises:
        FileNotFoundError: If the folder is not that of a finished run.
    """
    rows, summary = read_rows(folder / "metrics.csv"), folder / "summary.json"
    if not summary.is_file():
        raise FileNotFoundError(f"There is no {summary}, so the run has not finished")
    return rows, json.loads(summary.read_text())


def read_report(folder: Path) -> PrivacyReport | None:
    """Return the privacy report of a run folder. If it can't be read, warn and return None."""
    from lightning_fedq.privacy.report_file import from_json  # imports torch, and only needed here

    try:
        return from_json((folder / "privacy.json").read_text())
    except (OSError, ValueError) as error:
        print(f"warning: {folder}: {error}", file=sys.stderr)
        return None


def usual_metric(metrics: Mapping[str, float]) -> str:
    """Return the name of the metric that is a run's score.

    It is the test accuracy, otherwise the first test metric, otherwise the first validation metric.

    Raises:
        ValueError: If the run logged no test or validation metric.
    """
    tested = [name for name in metrics if metric_stage(name) == "test"]
    metric = next((name for name in tested if name in ("test_acc", "test/acc")), next(iter(tested), None))
    if metric is None and (metric := first_metric([metrics])) is None:
        raise ValueError(f"No test or validation metric was logged. --monitor takes one of {list(metrics)}.")
    return metric


def read_line(folder: Path, monitor: str | None = None, who: str | None = None) -> Line:
    """Return the figures of a finished run of a comparison.

    Args:
        folder: Folder of the run.
        monitor: Name of the metric that is the score. None is `usual_metric`.
        who: Name of the adversary of the epsilon. The epsilon is that of a run with secret keys, also if the
            run had keys from a seed. None is a run without privacy.

    Raises:
        ValueError: If the run has no such metric.
    """
    (rows, summary), report = read_run(folder), read_report(folder)
    assert report is not None and report.bits is not None
    metrics, noise = summary["metrics"], summary["noise_over_signal"]
    monitor = monitor or usual_metric(metrics)
    if monitor not in metrics:
        raise ValueError(f"No run has a metric {monitor}. --monitor takes one of {', '.join(metrics)}.")
    both, keys, down = summary["bits_per_parameter"], summary["protocol_bits_per_parameter"], report.bits.down
    spent = {row.name: row.epsilon for row in report.readable_rows}
    return {
        "monitor": monitor,
        "mode": (summary.get("modes") or {}).get(monitor),
        "score": metrics[monitor],
        "epsilon_spent": math.inf if who is None else spent[who],
        "R": worse_ratio(noise),
        "bits_up": both - keys,
        "bits_keys": keys,
        "bits_down": down,
        "bits_both_ways": None if down is None else both + down,
        "setting": summary["mechanism"],
        "seconds": totals(rows)["seconds"],
    }


def log_figures(loggers: Sequence[Any], settings: Mapping[str, Any], folder: Path) -> None:
    """Log the settings and the figures of a comparison's run, with the names of the table's columns."""
    if not loggers:
        return
    who = settings["adversary"].upper() if settings["epsilon"] else None
    line = read_line(folder, settings["monitor"], who)
    figures = {f"compare/{name}": v for name, v in line.items() if isinstance(v, float) and math.isfinite(v)}
    logged = {**settings, "setting": line["setting"], "epsilon_spent": figures.get("compare/epsilon_spent")}
    for logger in loggers:
        if type(logger).__name__ == "WandbLogger":
            logger.experiment.config.update({"compare": logged})
            logger.experiment.summary.update(figures)
            logger.experiment.finish()
        else:
            logger.log_hyperparams(logged)
            logger.log_metrics(figures)
            logger.finalize("success")


# ---- cells of a comparison ----------------------------------------------------------------------------


def describe_calibration(row: str) -> str:
    """Return the library that calibrated the noise of a row, as text of the table."""
    if row == ABOVE:
        return "no privacy"
    return "Opacus (RDP)" if row.endswith(OPACUS) else "this package (exact)"


def _common_mode(modes: Iterable[str | None]) -> str | None:
    """Return the direction that all runs know. None if one of them knows none, or two contradict."""
    found = set(modes)
    return found.pop() if len(found) == 1 else None


def mean_and_deviation(lines: Sequence[Line]) -> tuple[float, float]:
    """Return mean and standard deviation of the score over seeds. The deviation of one seed is NaN."""
    scores = [line["score"] for line in lines]
    return mean(scores), stdev(scores) if len(scores) > 1 else math.nan


def _word(score: tuple[float, float]) -> str:
    """Return a score as text, with its standard deviation unless that is NaN."""
    value, spread = score
    text = f"{value:.3f}" if 0.001 <= value <= 10 else f"{value:.2g}"
    return text if math.isnan(spread) else f"{text} ± {spread:.1g}"


def _mean(lines: Sequence[Line], *names: str) -> float:
    """Return the mean over runs of the sum of some figures. It is NaN if a figure is unknown."""
    values = [sum(math.nan if line[name] is None else line[name] for name in names) for line in lines]
    return mean(values)


class Pivot:
    """Runs of a comparison by mechanism (row) and epsilon (column), with ranked rows.

    Args:
        lines: Figures of the runs, with "mechanism" and "epsilon". The epsilon of FedAvg is infinite.
        mode: "max" if a larger score is better, "min" if a smaller one is. None takes the direction that the
            runs know. If they know none, rows are not ranked.
    """

    def __init__(self, lines: Sequence[Line], mode: str | None = None) -> None:
        scored = [line for line in lines if "score" in line]
        self.of: dict[tuple[str, float], list[Line]] = {}
        for line in scored:
            self.of.setdefault((line["mechanism"], line["epsilon"]), []).append(line)
        self.above = self.of.pop((ABOVE, math.inf), [])
        self.epsilons = sorted({epsilon for _, epsilon in self.of})
        self.monitor = scored[0]["monitor"] if scored else ""
        self.mode = mode or _common_mode(line.get("mode") for line in scored)
        self.rows = sorted(dict.fromkeys(row for row, _ in self.of), key=self._place)

    def _place(self, row: str) -> tuple[float, float]:
        """Return the sort key of a row: the best score at the largest epsilon comes first."""
        largest = max(epsilon for of, epsilon in self.of if of == row)
        score = mean_and_deviation(self.of[row, largest])[0]
        sign = {"max": -1.0, "min": 1.0, None: 0.0}[self.mode]
        return -largest, math.inf if math.isnan(score) else sign * score

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return column heads and lines: a line per mechanism, a cell per epsilon with score and bits."""
        heads = ["mechanism", "calibrated by", "down", *(f"ε {epsilon:g}" for epsilon in self.epsilons)]
        lines = []
        if self.above:
            bits = _mean(self.above, "bits_up", "bits_keys")
            down = f"{_mean(self.above, 'bits_down'):.3g}"
            cell = f"{_word(mean_and_deviation(self.above))}\n{bits:.3g} bits"
            cells = [cell] * len(self.epsilons)
            lines.append([f"{ABOVE}, no finite ε", describe_calibration(ABOVE), down, *cells])
        for row in self.rows:
            whole = [line for (of, _), some in self.of.items() if of == row for line in some]
            cells = [_cell(self.of.get((row, epsilon), []), epsilon) for epsilon in self.epsilons]
            lines.append([row, describe_calibration(row), f"{_mean(whole, 'bits_down'):.3g}", *cells])
        return heads, lines

    def picture(self, title: str, delta: float, row: bool = False) -> Figure:
        """Draw the score against epsilon, uplink bits, and the sum of uplink and downlink bits.

        Error bars are one standard deviation over seeds. FedAvg has no finite epsilon and is a labelled grey
        line or star.

        Args:
            title: Title of the picture.
            delta: Delta of the epsilons.
            row: Whether to draw the panels in a row, for a paper.
        """
        names = [row for row in self.rows if not row.endswith(OPACUS)][:_DRAWN]
        names = [row for row in self.rows if row in names or row.endswith(OPACUS)]
        hidden = len(self.rows) - len(names)
        first = "first" if self.mode is None else "best"
        title += f" ({first} {_DRAWN} rows, {hidden} more in the table)" if hidden else ""
        figure, drawn = panels(3, title, height=3.3 if row else 4.0, row=row)
        by_epsilon, by_up, by_both = drawn
        for place, name in enumerate(names):
            known = [epsilon for epsilon in self.epsilons if (name, epsilon) in self.of]
            some = [self.of[name, epsilon] for epsilon in known]
            scores = [mean_and_deviation(lines) for lines in some]
            y, bars = [score for score, _ in scores], [0.0 if math.isnan(sd) else sd for _, sd in scores]
            up = [_mean(lines, "bits_up", "bits_keys") for lines in some]
            ways = [_mean(lines, "bits_up", "bits_keys", "bits_down") for lines in some]
            for axes, x in zip(drawn, (known, up, ways), strict=True):
                style = {**series(place), "linestyle": "-" if axes is by_epsilon else ":"}
                axes.errorbar(x, y, yerr=bars, label=name, capsize=2, **style)
            beside: dict[str, Any] = {"textcoords": "offset points", "xytext": (4, 3), "fontsize": 7}
            for axes, x in ((by_up, up), (by_both, ways)) if not name.endswith(OPACUS) else ():
                for at, value, epsilon in zip(x, y, known, strict=True):
                    axes.annotate(f"{epsilon:g}", (at, value), **beside)
        if self.above:
            score, bits = mean_and_deviation(self.above)[0], _mean(self.above, "bits_up", "bits_keys")
            label = f"{ABOVE}: no privacy, no finite ε"
            by_epsilon.axhline(score, color="0.5", linestyle="--", label=label)
            for axes, at in ((by_up, bits), (by_both, bits + _mean(self.above, "bits_down"))):
                axes.plot([at], [score], color="0.5", marker="*", markersize=9, linestyle="")
                shift: dict[str, Any] = {"textcoords": "offset points", "xytext": (3, 7), "ha": "right"}
                axes.annotate("FedAvg, no finite ε", (at, score), color="0.5", fontsize=8, **shift)
        by_epsilon.set_xscale("log", base=2)
        by_epsilon.set_xticks(self.epsilons, [f"{epsilon:g}" for epsilon in self.epsilons])
        by_epsilon.set(xlabel=f"ε of a client over the run, delta {delta:g}", ylabel=self.monitor)
        wrap = "\n" if row else " "
        by_up.set(xlabel=f"uplink bits per parameter,{wrap}with keys (small numbers: ε)", ylabel=self.monitor)
        both = f"uplink and downlink bits{wrap}per parameter (small numbers: ε)"
        by_both.set(xlabel=both, ylabel=self.monitor)
        for axes in drawn:
            axes.set_yscale("log" if self.mode == "min" else "linear")
            axes.margins(y=0.12)
        for axes in (by_up, by_both):
            axes.margins(x=0.08)
            axes.set_xlim(left=0.0)
        if row:
            finish_row(figure, title)
        else:
            legend(by_epsilon)
        return figure


def _cell(lines: Sequence[Line], epsilon: float) -> str:
    """Return the text of a cell: score, bits, noise-to-signal ratio R, and epsilon if it differs."""
    if not lines:
        return "-"
    keys, spent, seen = (_mean(lines, name) for name in ("bits_keys", "epsilon_spent", "R"))
    bits = f"{_mean(lines, 'bits_up'):.3g}" + (f" + {keys:.2g}" if keys > 0.005 else "")
    shown = [_word(mean_and_deviation(lines)), f"{bits} bits", f"R {seen:.2g}"]
    if spent < 0.99 * epsilon or spent > epsilon:
        shown.append(f"ε {format_epsilon(spent)} spent")
    return "\n".join(shown)


def print_cells(heads: Sequence[str], lines: Sequence[Sequence[str]], title: str) -> None:
    """Print the table of a comparison. It is at least as wide as its figures, so none is cut."""
    shown = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for place, head in enumerate(heads):
        shown.add_column(head, overflow="fold", no_wrap=bool(place), justify="right" if place > 1 else "left")
    for line in lines:
        shown.add_row(*line, end_section=True)
    _print_wide(shown, 200)


def _print_wide(shown: Table, width: int) -> Console:
    """Print a table on a console that is wide enough for it, up to `width` columns."""
    console = Console()
    needed = console.measure(shown, options=console.options.update(width=width)).maximum
    console.width = max(console.width, needed)
    console.print(shown)
    return console


# ---- finished runs ------------------------------------------------------------------------------------


def compare(
    runs: Mapping[str, Path],
    monitor: str | None,
    out: Path,
    mode: str | None = None,
    adversary: Adversary | None = None,
    picture: Path | None = None,
) -> list[dict[str, Any]]:
    """Compare finished runs: write a table and a picture, print the table and return its rows.

    The files are `table.csv`, `table.json`, `compare.png` and `compare_dark.png`. The curve of a run without
    a finite epsilon, such as `FedAvg`, is dashed and grey because it does not compete with private runs.

    Args:
        runs: Run folders by name.
        monitor: Metric to compare. None is `val_acc`, or the first `val_*` metric of the runs.
        out: Folder of the files.
        mode: "max" if a larger value is better, "min" if a smaller one is. None takes the direction that all
            runs know from their callbacks. Without one, no value is called the best.
        adversary: Adversary of every run's epsilon. None is the adversary of the runs' targets. If these
            differ, it is the outsider, for which every run has an epsilon.
        picture: File of a picture for a paper, whose panels are in one row.

    Raises:
        ValueError: If a run never logged `monitor`.
    """
    # these modules import torch, which the rest of this module does not need
    from lightning_fedq.privacy.report_rows import common_adversary
    from lightning_fedq.privacy.row import adversary_title

    finished = {name: read_run(folder) for name, folder in runs.items()}
    reports = {name: read_report(folder) for name, folder in runs.items()}
    known = [report for report in reports.values() if report is not None]
    who = None if adversary is None else adversary.name
    if who is None and known:
        who = common_adversary(known)
    monitor = monitor or first_metric([row for rows, _ in finished.values() for row in rows]) or "val_acc"
    mode = mode or _common_mode((summary.get("modes") or {}).get(monitor) for _, summary in finished.values())
    table, curves, plain = [], {}, set()
    for name, (rows, summary) in finished.items():
        values = [row[monitor] for row in rows if monitor in row]
        if not values:
            raise ValueError(f"{runs[name]} never logged {monitor!r}. It logged {sorted(rows[-1])}.")
        mechanism = str(summary["mechanism"]).partition("(")[0]
        privacy, price = _privacy_columns(reports[name], summary, who)
        details = ", ".join(part for part in ("" if mechanism == name else mechanism, price) if part)
        label = f"{name} ({details})" if details else name
        curves[label] = rows
        plain |= {label} if mechanism == "FedAvg" or privacy["epsilon"] == math.inf else set()
        best = "-" if mode is None else max(values) if mode == "max" else min(values)
        first = {"run": name, "rounds": len(rows), "final": values[-1], "best": best}
        sums, bits = totals(rows), summary["bits_per_parameter"]
        costs = {column: sums[column] for column in ("uplink_megabytes", "downlink_megabytes", "seconds")}
        table.append({**first, **privacy, "bits_per_parameter": bits, **costs})
    write_rows(out / "table.csv", table)
    write_summary(out / "table.json", {"monitor": monitor, "runs": table})
    against = "" if who is None else f"\nε: over the run, against {adversary_title(who)}"
    title = f"{monitor}{against}"
    save_figure(plot_progress(curves, monitor, title, dashed=plain), out / "compare.png", twin=True)
    if picture is not None:
        save_figure(plot_progress(curves, monitor, title, dashed=plain, row=True), picture)
    print_table(table, monitor)
    deltas = sorted({row["delta"] for row in table if row["delta"] != "-"})
    if len(deltas) > 1:
        print(
            "warning: The epsilons of the runs are not comparable because their deltas differ "
            f"({', '.join(f'{d:g}' for d in deltas)}). Train all runs with the same delta.",
            file=sys.stderr,
        )
    if len({row["rounds"] for row in table}) > 1:
        counts = ", ".join(str(row["rounds"]) for row in table)
        print(
            "warning: The final and best values are not comparable because the numbers of rounds differ "
            f"({counts}). Train all runs for the same number of rounds (--rounds).",
            file=sys.stderr,
        )
    files = [out / "table.csv", out / "compare.png", *([picture] if picture else ())]
    Console(soft_wrap=True).print(*files, sep="\n", highlight=False)
    return table


def _privacy_columns(
    report: PrivacyReport | None, summary: Mapping[str, Any], who: str | None
) -> tuple[dict[str, Any], str]:
    """Return the privacy columns of a run, "-" for unknown values, and the text for its legend.

    R is the larger of the planned and the measured noise-to-signal ratio.
    """
    from lightning_fedq.privacy.report_rows import summarise_privacy  # imports torch, and only needed here

    noise = summary.get("noise_over_signal") or {}
    ratio = worse_ratio(noise)
    last = {"R": "-" if ratio is None else ratio}
    if report is None:
        return {"epsilon": "-", "delta": "-", "verdict": "-", "view": "-", **last}, ""
    privacy = summarise_privacy(report, who)
    view = f"{privacy.who}, {privacy.asked}" if privacy.asked else privacy.who
    epsilon = privacy.printed if privacy.epsilon is None else privacy.epsilon
    columns = {"epsilon": epsilon, "delta": report.delta, "verdict": privacy.verdict, "view": view, **last}
    return columns, privacy.label


def print_table(table: Sequence[Mapping[str, Any]], monitor: str) -> None:
    """Print rows as a table with four digits per number. Names are never cut."""
    shown = Table(title=monitor, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    hidden = ("delta", "verdict", "view", "downlink_megabytes", "seconds")  # the files have them
    for column in [column for column in table[0] if column not in hidden]:
        side: Literal["left", "right"] = "left" if column == "run" else "right"
        shown.add_column(HEADS.get(column, column), no_wrap=True, justify=side)
    for row in table:
        cells = {name: f"{v:.4g}" if isinstance(v, float) else str(v) for name, v in row.items()}
        if isinstance(row["epsilon"], float):
            cells["epsilon"] = f"{format_epsilon(row['epsilon'])} {row['verdict']}"
        if isinstance(row["R"], float):
            cells["R"] = f"{row['R']:.2g}" if row["R"] > 1e-6 else "0"
        shown.add_row(*(cell for name, cell in cells.items() if name not in hidden))
    console = _print_wide(shown, 500)
    from lightning_fedq.privacy.row import adversary_title

    views = {row["run"]: str(row["view"]) for row in table}
    views = {run: view if view in ("", "-") else adversary_title(view) for run, view in views.items()}
    at = {row["run"]: "" if row["delta"] == "-" else f", at delta {row['delta']:g}" for row in table}
    views = {run: f"{view}{at[run]}" for run, view in views.items()}
    if len(set(views.values())) == 1:
        adversary = next(iter(views.values()))
        console.print(f"epsilon: over the run, against {adversary}", highlight=False, soft_wrap=True)
        return
    console.print("epsilon: over the run, against", highlight=False)
    for run, view in views.items():
        console.print(f"  {run}: {view}", highlight=False, soft_wrap=True)
