"""Page of the bench: a picture and a table for every task and adversary, and the rule that all obeyed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import mean

from lightning_fedq.comparison.bench.cells import (
    ABOUT_WORTHLESS,
    TUNING_SEED,
    Row,
    grouped,
    score_of,
    without_privacy,
    word_of,
)
from lightning_fedq.comparison.bench.tasks import DELTA, RANGES, Task
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.reports.html.charts import COLOURS, Line, line_chart
from lightning_fedq.reports.html.page import Cell
from lightning_fedq.reports.html.templates import render

_NOT_SEARCHED = ", as the reference results have them: this quick run searched only for those that they lack"
_DRAWN = 6
"""Mechanisms in a picture, the best ones; yours always."""


def page(rows: Sequence[Row], known: Mapping[str, Task], mine: Collection[str], quick: bool) -> str:
    """The whole page as HTML.

    Args:
        rows: Rows of the table.
        known: Tasks by name.
        mine: Mechanisms to point out.
        quick: Were tunings those of the reference results?
    """
    groups = grouped(rows)
    shown = dict.fromkeys((key[0], key[2]) for key in groups)
    sections = [_section(task, adversary, rows, known.get(task), mine) for task, adversary in shown]
    return render("bench.html", title="fedq bench", rule=_rule(rows, quick), sections=sections)


def _rule(rows: Sequence[Row], quick: bool) -> str:
    seeds = len({row.cell.seed for row in rows})
    versions = ", ".join(sorted({row.versions for row in rows}))
    ranges = ", ".join(f"{value:g}" for value in RANGES)
    plural = "s" if seeds != 1 else ""
    return (
        f"Every mechanism is calibrated to epsilon at delta {DELTA:g} over the run, between any two "
        "updates of a client, towards the adversary of its section. The learning rate, and the range of "
        f"mechanisms that clip coordinates ({ranges} times norm / √dim), are those with the best validation "
        f"score in one run each with seed {TUNING_SEED}{_NOT_SEARCHED if quick else ''}; tuning is not "
        f"charged. Scores are means over "
        f"{seeds} other seed{plural}. R is noise over signal of the run. Bits are those of a client's "
        "message per parameter, masks included, keys and shares not. Keys come from the seeds, so that "
        "cells can be repeated; the claims are those of the same runs with secret keys. "
        f"{versions}."
    )


def _section(
    task: str, adversary: str, rows: Sequence[Row], about: Task | None, mine: Collection[str]
) -> dict[str, object]:
    groups = grouped(rows)
    names = [key[1] for key in groups if (key[0], key[2]) == (task, adversary)]
    names = list(dict.fromkeys(names))
    epsilons = sorted({key[3] for key in groups if (key[0], key[2]) == (task, adversary)})
    smaller = about is not None and about.better == "smaller"

    def scores(name: str) -> list[tuple[float, float]]:
        found = ((e, score_of(groups.get((task, name, adversary, e), []))) for e in epsilons)
        return [(e, score[0]) for e, score in found if score is not None]

    possible = [name for name in names if scores(name)]
    possible.sort(key=lambda name: scores(name)[-1][1] * (1 if smaller else -1))
    drawn = [name for place, name in enumerate(possible) if place < _DRAWN or name in mine]
    unit = "score" if about is None else about.unit
    found: dict[str, object] = {
        "title": f"{task}, towards {Adversary[adversary.upper()].value}",
        "about": about
        and f"{about.clients:,} clients, {about.dim:,} parameters, rounds: {about.rounds}; "
        f"{unit}{without_privacy(rows, task)}.",
        "unit": unit,
        "heads": ["mechanism", "bits", *(f"ε {e:g}" for e in epsilons), "R at the largest ε", "CPU s"],
        "rows": [],
    }
    if not possible:
        return found
    lines = [Line(name, scores(name), place) for place, name in enumerate(drawn)]
    table = []
    for name in possible:
        cells = [groups.get((task, name, adversary, e), []) for e in epsilons]
        results = [row.result for cell in cells for row in cell if row.result is not None]
        last = results[-1]
        planned = "-" if last.planned is None else f"{last.planned:.2g}"
        shown = [
            f"{last.bits:.2g}" if last.bits < 10 else f"{last.bits:.1f}",
            *(word_of(score_of(cell), about) for cell in cells),
            Cell(f"{last.seen:.2g}", f"{planned} planned"),
            f"{mean(result.seconds for result in results):.1f}",
        ]
        table.append((Cell(name, strong=name in mine), shown))
    worse = smaller and any(score >= 1.0 for name in possible for _, score in scores(name))
    return found | {
        "drawn": line_chart(lines, f"{unit} by epsilon", x_label="epsilon"),
        "legend": [(name, f"s{place % COLOURS}") for place, name in enumerate(drawn)],
        "rows": table,
        "worthless": ABOUT_WORTHLESS if worse else "",
        "left_out": ", ".join(name for name in names if name not in possible),
    }
