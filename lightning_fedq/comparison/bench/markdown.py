"""Results of the bench as Markdown tables and one picture, written into a marked part of a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fedq.comparison.bench.cells import (
    ABOUT_WORTHLESS,
    WORTHLESS,
    Groups,
    Row,
    grouped,
    score_of,
    without_privacy,
    word_of,
)
from lightning_fedq.comparison.bench.tasks import Task
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.planning import GOOD, NEARLY
from lightning_fedq.reports.hand import legend, panels, series
from lightning_fedq.reports.runs import save_figure, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEGIN, END = "<!-- made by `fedq bench --tables` -->", "<!-- end of the bench's tables -->"
_DRAWN, _LISTED = 5, 10
"""Mechanisms in a panel and in a table, the best ones at the largest epsilon."""
_POINTS = 0.02
"""Accuracy that one gives for fewer bits."""
_ON_LINE: dict[str, Any] = {"ha": "left", "va": "top", "fontsize": 8, "color": "0.5"}


def ranked(groups: Groups, task: str, adversary: str, smaller: bool) -> list[tuple[str, list[Row]]]:
    """Mechanisms that have a result, with all their rows. Best at the largest epsilon first, then those
    without a result there."""
    found: dict[str, list[Row]] = {}
    for (of, name, against, _), rows in groups.items():
        if (of, against) == (task, adversary):
            found.setdefault(name, []).extend(row for row in rows if row.result is not None)

    def place(rows: list[Row]) -> tuple[float, float]:
        largest = max(row.cell.epsilon for row in rows)
        score = score_of([row for row in rows if row.cell.epsilon == largest])
        assert score is not None
        return -largest, score[0] if smaller else -score[0]

    return sorted(((name, rows) for name, rows in found.items() if rows), key=lambda pair: place(pair[1]))


def _at(rows: Sequence[Row], epsilon: float) -> tuple[float, float] | None:
    return score_of([row for row in rows if row.cell.epsilon == epsilon])


def _panels(rows: Sequence[Row], known: Mapping[str, Task]) -> list[tuple[str, str, list[float]]]:
    """Task, adversary and epsilons of every table. Tasks that are not known are left out."""
    groups = [key for key in grouped(rows) if key[0] in known]
    pairs = dict.fromkeys((key[0], key[2]) for key in groups)
    return [(*pair, sorted({key[3] for key in groups if (key[0], key[2]) == pair})) for pair in pairs]


def tables(rows: Sequence[Row], known: Mapping[str, Task]) -> str:
    """One Markdown table for every task and adversary.

    Args:
        rows: Rows of the bench.
        known: Tasks by name.
    """
    lines: list[str] = []
    for task, adversary, epsilons in _panels(rows, known):
        about = known[task]
        found = ranked(grouped(rows), task, adversary, about.better == "smaller")
        if not found:
            continue
        seeds = len({row.cell.seed for _, of in found for row in of})
        lines += [
            f"### {task}, towards {Adversary[adversary.upper()].value}",
            "",
            f"{about.clients:,} clients, {about.dim:,} parameters, rounds: {about.rounds}, seeds: {seeds}; "
            f"{about.unit}, {about.better} is better{without_privacy(rows, task)}.",
            "",
            "| mechanism | bits a parameter | " + " | ".join(f"ε {e:g}" for e in epsilons) + " |",
            "| --- | ---: |" + " ---: |" * len(epsilons),
        ]
        for name, of in found[:_LISTED]:
            bits = [row.result.bits for row in of if row.result is not None][-1]
            cells = [word_of(_at(of, epsilon), about) for epsilon in epsilons]
            lines.append(f"| {name} | {bits:.2g} | " + " | ".join(cells) + " |")
        lines.append("")
        if any(WORTHLESS in line for line in lines[-len(found[:_LISTED]) - 1 :]):
            lines += [ABOUT_WORTHLESS.replace(WORTHLESS, f"\\{WORTHLESS}") + ".", ""]
        if rest := [name for name, _ in found[_LISTED:]]:
            lines += [f"Behind these: {', '.join(rest)}.", ""]
    return "\n".join(lines)


def _drawn(found: Sequence[tuple[str, list[Row]]], smaller: bool) -> list[tuple[str, list[Row]]]:
    """The best, and with them the fewest bits among those about as good, which `fedq plan` advises."""

    def last(of: Sequence[Row]) -> float:
        score = _at(of, max(row.cell.epsilon for row in found[0][1]))
        return (math.inf if smaller else -math.inf) if score is None else score[0]

    best = last(found[0][1])
    good = [
        each
        for each in found
        if (last(each[1]) <= max(GOOD, NEARLY * best) if smaller else last(each[1]) >= best - _POINTS)
    ]
    cheap = min(good, key=lambda each: [row.result.bits for row in each[1] if row.result is not None][-1])
    return [*found[:_DRAWN]] if cheap in found[:_DRAWN] else [*found[: _DRAWN - 1], cheap]


def picture(rows: Sequence[Row], known: Mapping[str, Task]) -> Figure:
    """One panel for every task and adversary: the score by epsilon of the best mechanisms."""
    groups = grouped(rows)
    shown = [
        (task, adversary, _drawn(found, known[task].better == "smaller"))
        for task, adversary, _ in _panels(rows, known)
        if (found := ranked(groups, task, adversary, known[task].better == "smaller"))
    ]
    figure, axes = panels(len(shown), height=4.0)
    for axis, (task, adversary, found) in zip(axes, shown, strict=True):
        for place, (name, of) in enumerate(found):
            epsilons = sorted({row.cell.epsilon for row in of})
            scores = [score[0] for e in epsilons if (score := _at(of, e)) is not None]
            bits = [row.result.bits for row in of if row.result is not None][-1]
            axis.plot(epsilons, scores, label=f"{name}, {bits:.2g} bits", **series(place))
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        if known[task].better == "smaller":
            axis.set_yscale("log")
            axis.axhline(1.0, color="0.5", lw=0.9, ls=":")
            axis.text(0.01, 1.0, "the estimate 0", transform=axis.get_yaxis_transform(), **_ON_LINE)
        axis.set(xlabel="epsilon of a client", ylabel=known[task].unit)
        legend(axis, f"{task},\ntowards {Adversary[adversary.upper()].value}")
    return figure


def write(path: Path, rows: Sequence[Row], known: Mapping[str, Task]) -> Path:
    """Renew the marked part of a page, or begin one, and draw the picture beside it.

    Args:
        path: The page; the picture is `NAME_bench.png` in the same folder.
        rows: Rows of the bench.
        known: Tasks by name.

    Returns:
        Where the picture is.

    Raises:
        ValueError: If the page has no marked part, or no task of the rows has a result.
    """
    text = tables(rows, known)
    if not text:
        raise ValueError("there is no result to write; run `fedq bench`, or name --data for tasks on images")
    old = path.read_text() if path.exists() else f"# Mechanisms at equal epsilon\n\n{BEGIN}\n{END}\n"
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no part to renew; put the lines {BEGIN} and {END} where it should be")
    target = path.with_name(f"{path.stem}_bench.png")
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{target.stem}_dark.png">'
    about = "Score by epsilon of the best mechanisms, task by task"
    shown = f'<picture>\n  {dark}\n  <img src="{target.name}" width="560" alt="{about}">\n</picture>'
    write_atomically(path, f"{before}{BEGIN}\n\n{shown}\n\n{text}\n{END}{after}")
    save_figure(picture(rows, known), target, twin=True)
    return target
