"""Tables and pictures of run folders: runs beside each other, and runs of one comparison by row and epsilon.

Score, bits and epsilon of a run are read from its folder, here and nowhere else.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.plot_style import legend, panels, series
from lightning_fedq.reports.runs import (
    Row,
    first_metric,
    metric_mode,
    metric_stage,
    plot_progress,
    read_rows,
    save_figure,
    totals,
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
"""Row without privacy, the line above the others."""
OPACUS = ", by Opacus"
"""End of the names of rows that Opacus calibrates."""
_DRAWN = 8
"""Rows in the picture, the best ones, besides Opacus's."""
COLUMNS = (
    "rounds",
    "final",
    "best",
    "epsilon",
    "delta",
    "verdict",
    "view",
    "R",
    "bits_per_parameter",
    "uplink_megabytes",
    "downlink_megabytes",
    "seconds",
)
HEADS = {"bits_per_parameter": "bits", "uplink_megabytes": "MB up"}


# ---- one run ------------------------------------------------------------------------------------------


def read_run(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Read the rows and the summary of a run folder.

    Raises:
        FileNotFoundError: If it is not the folder of a finished run.
    """
    rows, summary = read_rows(folder / "metrics.csv"), folder / "summary.json"
    if not summary.is_file():
        raise FileNotFoundError(f"no {summary}; the run has not finished")
    return rows, json.loads(summary.read_text())


def read_report(folder: Path) -> PrivacyReport | None:
    """The report of a run folder. None, with a warning, where there is none that can be read."""
    from lightning_fedq.privacy.document import from_json  # imports torch, and only needed here

    try:
        return from_json((folder / "privacy.json").read_text())
    except (OSError, ValueError) as error:
        print(f"warning: {folder}: {error}", file=sys.stderr)
        return None


def usual_metric(metrics: Mapping[str, float]) -> str:
    """Score of a run: accuracy in the test, else its first metric, else one of the validation.

    Raises:
        ValueError: If nothing of the kind was logged.
    """
    tested = [name for name in metrics if metric_stage(name) == "test"]
    found = next((name for name in tested if name in ("test_acc", "test/acc")), next(iter(tested), None))
    if found is None and (found := first_metric([metrics])) is None:
        raise ValueError(f"nothing of test or validation was logged; --monitor takes one of {list(metrics)}")
    return found


def read_line(folder: Path, monitor: str | None = None, who: str | None = None) -> Line:
    """Figures of a cell's folder.

    Args:
        monitor: Metric that is the score; None is `usual_metric`.
        who: Name of the adversary of epsilon, which is what secret keys would spend. None is without privacy.

    Raises:
        ValueError: If the run has no such metric.
    """
    (rows, summary), report = read_run(folder), read_report(folder)
    assert report is not None and report.bits is not None
    metrics, noise = summary["metrics"], summary["noise_over_signal"]
    monitor = monitor or usual_metric(metrics)
    if monitor not in metrics:
        raise ValueError(f"no run has a metric {monitor}; --monitor takes one of {', '.join(metrics)}")
    both, keys, down = summary["bits_per_parameter"], summary["protocol_bits_per_parameter"], report.bits.down
    spent = {row.name: row.epsilon for row in report.readable_rows}
    return {
        "monitor": monitor,
        "score": metrics[monitor],
        "epsilon_spent": math.inf if who is None else spent[who],
        "R": noise.get("sim_seen"),
        "bits_up": both - keys,
        "bits_keys": keys,
        "bits_down": down,
        "bits_both_ways": None if down is None else both + down,
        "setting": summary["mechanism"],
        "seconds": totals(rows)["seconds"],
    }


def log_figures(loggers: Sequence[Any], settings: Mapping[str, Any], folder: Path) -> None:
    """Give loggers the settings and the figures of a cell, by the names that the table has."""
    if not loggers:
        return
    line = read_line(
        folder, settings["monitor"], settings["adversary"].upper() if settings["epsilon"] else None
    )
    figures = {f"compare/{name}": v for name, v in line.items() if isinstance(v, float) and math.isfinite(v)}
    told = {**settings, "setting": line["setting"], "epsilon_spent": figures.get("compare/epsilon_spent")}
    for logger in loggers:
        if type(logger).__name__ == "WandbLogger":
            logger.experiment.config.update({"compare": told})
            logger.experiment.summary.update(figures)
            logger.experiment.finish()
        else:
            logger.log_hyperparams(told)
            logger.log_metrics(figures)
            logger.finalize("success")


# ---- cells of a comparison ----------------------------------------------------------------------------


def describe_calibration(row: str) -> str:
    """Words on who has set the noise of a row."""
    if row == ABOVE:
        return "no privacy"
    return "Opacus (RDP)" if row.endswith(OPACUS) else "this package (exact)"


def mean_and_deviation(lines: Sequence[Line]) -> tuple[float, float]:
    """Mean score and its deviation over seeds. With one seed the deviation is NaN."""
    scores = [line["score"] for line in lines]
    return mean(scores), stdev(scores) if len(scores) > 1 else math.nan


def _word(score: tuple[float, float]) -> str:
    value, spread = score
    text = f"{value:.3f}" if 0.001 <= value <= 10 else f"{value:.2g}"
    return text if math.isnan(spread) else f"{text} ± {spread:.1g}"


def _mean(lines: Sequence[Line], *names: str) -> float:
    values = [sum(math.nan if line[name] is None else line[name] for name in names) for line in lines]
    return mean(values)


class Pivot:
    """Cells of a comparison by row and epsilon, the rows ranked.

    Args:
        lines: Figures of the runs, with "mechanism" and "epsilon"; those of FedAvg have no finite one.
        mode: Is a larger ("max") or a smaller ("min") score better? None goes by the metric's name.
    """

    def __init__(self, lines: Sequence[Line], mode: str | None = None) -> None:
        found = [line for line in lines if "score" in line]
        self.of: dict[tuple[str, float], list[Line]] = {}
        for line in found:
            self.of.setdefault((line["mechanism"], line["epsilon"]), []).append(line)
        self.above = self.of.pop((ABOVE, math.inf), [])
        self.epsilons = sorted({epsilon for _, epsilon in self.of})
        self.monitor = found[0]["monitor"] if found else ""
        self.grows = (mode or metric_mode(self.monitor)) == "max"
        self.rows = sorted(dict.fromkeys(row for row, _ in self.of), key=self._place)

    def _place(self, row: str) -> tuple[float, float]:
        """Best at the largest epsilon first."""
        largest = max(epsilon for of, epsilon in self.of if of == row)
        score = mean_and_deviation(self.of[row, largest])[0]
        return -largest, math.inf if math.isnan(score) else -score if self.grows else score

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Heads and lines: a line a row, a cell an epsilon with the bits that go with it."""
        heads = ["mechanism", "calibrated by", "down", *(f"ε {epsilon:g}" for epsilon in self.epsilons)]
        lines = []
        if self.above:
            bits = _mean(self.above, "bits_up", "bits_keys")
            cell = f"{_word(mean_and_deviation(self.above))}\n{bits:.3g} bits"
            first = [
                f"{ABOVE}, no finite ε",
                describe_calibration(ABOVE),
                f"{_mean(self.above, 'bits_down'):.3g}",
            ]
            lines.append([*first, *[cell] * len(self.epsilons)])
        for row in self.rows:
            whole = [line for (of, _), some in self.of.items() if of == row for line in some]
            cells = [_cell(self.of.get((row, epsilon), []), epsilon) for epsilon in self.epsilons]
            lines.append([row, describe_calibration(row), f"{_mean(whole, 'bits_down'):.3g}", *cells])
        return heads, lines

    def picture(self, title: str, delta: float) -> Figure:
        """The score against epsilon, against bits up and against bits both ways. Bars are one deviation.

        FedAvg, which has no finite epsilon, is a grey line or star that says so.
        """
        names = [row for row in self.rows if not row.endswith(OPACUS)][:_DRAWN]
        names = [row for row in self.rows if row in names or row.endswith(OPACUS)]
        hidden = len(self.rows) - len(names)
        title += f"; the best {_DRAWN}, {hidden} more in the table" if hidden else ""
        figure, drawn = panels(3, title, height=4.0)
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
            for axes, x in ((by_up, up), (by_both, ways)) if not name.endswith(OPACUS) else ():
                for at, value, epsilon in zip(x, y, known, strict=True):
                    axes.annotate(
                        f"{epsilon:g}", (at, value), textcoords="offset points", xytext=(4, 3), fontsize=7
                    )
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
        by_up.set(xlabel="bits a parameter up, keys included (small numbers: ε)", ylabel=self.monitor)
        by_both.set(xlabel="bits a parameter up and down (small numbers: ε)", ylabel=self.monitor)
        for axes in drawn:
            axes.set_yscale("linear" if self.grows else "log")
            axes.margins(y=0.12)
        for axes in (by_up, by_both):
            axes.set_xlim(left=0.0)
        legend(by_epsilon)
        return figure


def _cell(lines: Sequence[Line], epsilon: float) -> str:
    if not lines:
        return "-"
    keys, spent, seen = (_mean(lines, name) for name in ("bits_keys", "epsilon_spent", "R"))
    bits = f"{_mean(lines, 'bits_up'):.3g}" + (f" + {keys:.2g}" if keys > 0.005 else "")
    shown = [_word(mean_and_deviation(lines)), f"{bits} bits", f"R {seen:.2g}"]
    if spent < 0.99 * epsilon or spent > epsilon:
        shown.append(f"ε {format_epsilon(spent)} spent")
    return "\n".join(shown)


def print_cells(heads: Sequence[str], lines: Sequence[Sequence[str]], title: str) -> None:
    """Print the table of a comparison. Figures are never cut."""
    shown = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for place, head in enumerate(heads):
        shown.add_column(head, overflow="fold", no_wrap=bool(place), justify="right" if place > 1 else "left")
    for line in lines:
        shown.add_row(*line, end_section=True)
    _print_wide(shown, 200)


def _print_wide(shown: Table, width: int) -> Console:
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
) -> list[dict[str, Any]]:
    """Write table and pictures (`table.csv`, `table.json`, `compare.png`, `compare_dark.png`) of run folders.

    The table is printed and returned.

    The curve of a run without a finite epsilon, `FedAvg`'s say, is dashed and grey: no winner.

    Args:
        runs: Run folders by name.
        monitor: The metric to compare; None is `val_acc`, or else the first `val_*` metric of the runs.
        mode: Is a larger ("max") or a smaller ("min") value better? None goes by the metric's name.
        adversary: Towards whom every run's epsilon is shown; None is whom all of them were asked about, or
            an outsider, whom every run has, where they differ.

    Raises:
        ValueError: If a run never logged `monitor`.
    """
    # import torch, and are only needed here
    from lightning_fedq.privacy.document import common_adversary
    from lightning_fedq.privacy.secret_row import adversary_title

    found = {name: read_run(folder) for name, folder in runs.items()}
    reports = {name: read_report(folder) for name, folder in runs.items()}
    known = [report for report in reports.values() if report is not None]
    who = (
        common_adversary(known)
        if adversary is None and known
        else None
        if adversary is None
        else adversary.name
    )
    monitor = monitor or first_metric([row for rows, _ in found.values() for row in rows]) or "val_acc"
    mode = mode or metric_mode(monitor)
    table, curves, plain = [], {}, set()
    for name, (rows, summary) in found.items():
        values = [row[monitor] for row in rows if monitor in row]
        if not values:
            raise ValueError(f"{runs[name]} never logged {monitor!r}; it has {sorted(rows[-1])}")
        mechanism = str(summary["mechanism"]).partition("(")[0]
        privacy, price = _privacy_columns(reports[name], summary, who)
        said = ", ".join(part for part in ("" if mechanism == name else mechanism, price) if part)
        label = f"{name} ({said})" if said else name
        curves[label] = rows
        plain |= {label} if mechanism == "FedAvg" or privacy["epsilon"] == math.inf else set()
        cost = {**totals(rows), "bits_per_parameter": summary["bits_per_parameter"], "rounds": len(rows)}
        best = max(values) if mode == "max" else min(values)
        result = {"final": values[-1], "best": best, **privacy, **cost}
        table.append({"run": name, **{column: result[column] for column in COLUMNS}})
    write_rows(out / "table.csv", table)
    write_summary(out / "table.json", {"monitor": monitor, "runs": table})
    towards = "" if who is None else f"\nε: over the run, towards {adversary_title(who)}"
    figure = plot_progress(curves, monitor, f"{monitor}{towards}", dashed=plain)
    save_figure(figure, out / "compare.png", twin=True)
    print_table(table, monitor)
    deltas = sorted({row["delta"] for row in table if row["delta"] != "-"})
    if len(deltas) > 1:
        print(
            f"warning: the runs' epsilons are at different deltas ({', '.join(f'{d:g}' for d in deltas)}) "
            "and do not compare; train them with the same one",
            file=sys.stderr,
        )
    if len({row["rounds"] for row in table}) > 1:
        counts = ", ".join(str(row["rounds"]) for row in table)
        print(
            f"warning: the runs differ in their rounds ({counts}), so their final and best values do not "
            "compare; train them as long as each other (--rounds)",
            file=sys.stderr,
        )
    Console(soft_wrap=True).print(f"{out / 'table.csv'}\n{out / 'compare.png'}", highlight=False)
    return table


def _privacy_columns(
    report: PrivacyReport | None, summary: Mapping[str, Any], who: str | None
) -> tuple[dict[str, Any], str]:
    """Columns of a run's privacy, "-" where it is not known, and what a legend says of it.

    R is the noise over the signal, as seen where that is known, or else as planned.
    """
    from lightning_fedq.privacy.document import summarise_privacy  # imports torch, and only needed here

    noise = summary.get("noise_over_signal") or {}
    ratio = noise.get("planned") if noise.get("sim_seen") is None else noise["sim_seen"]
    columns = {"R": "-" if ratio is None else ratio}
    if report is None:
        return {"epsilon": "-", "delta": "-", "verdict": "-", "view": "-", **columns}, ""
    found = summarise_privacy(report, who)
    view = f"{found.who}, {found.asked}" if found.asked else found.who
    epsilon = found.printed if found.epsilon is None else found.epsilon
    columns |= {"delta": report.delta, "verdict": found.verdict, "view": view}
    return {"epsilon": epsilon, **columns}, found.label


def print_table(table: Sequence[Mapping[str, Any]], monitor: str) -> None:
    """Print rows as a table, numbers with four digits. Names are never cut."""
    shown = Table(title=monitor, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    hidden = ("delta", "verdict", "view", "downlink_megabytes", "seconds")  # the files have them
    for column in [column for column in table[0] if column not in hidden]:
        shown.add_column(
            HEADS.get(column, column), no_wrap=True, justify="left" if column == "run" else "right"
        )
    for row in table:
        cells = {name: f"{v:.4g}" if isinstance(v, float) else str(v) for name, v in row.items()}
        if isinstance(row["epsilon"], float):
            cells["epsilon"] = f"{format_epsilon(row['epsilon'])} {row['verdict']}"
        if isinstance(row["R"], float):
            cells["R"] = f"{row['R']:.2g}" if row["R"] > 1e-6 else "0"
        shown.add_row(*(cell for name, cell in cells.items() if name not in hidden))
    console = _print_wide(shown, 500)
    from lightning_fedq.privacy.secret_row import adversary_title  # imports torch, and only needed here

    views = {row["run"]: str(row["view"]) for row in table}
    views = {run: view if view in ("", "-") else adversary_title(view) for run, view in views.items()}
    at = {row["run"]: "" if row["delta"] == "-" else f", at delta {row['delta']:g}" for row in table}
    views = {run: f"{view}{at[run]}" for run, view in views.items()}
    if len(set(views.values())) == 1:
        towards = next(iter(views.values()))
        console.print(f"epsilon: over the run, towards {towards}", highlight=False, soft_wrap=True)
        return
    console.print("epsilon: over the run, towards", highlight=False)
    for run, view in views.items():
        console.print(f"  {run}: {view}", highlight=False, soft_wrap=True)
