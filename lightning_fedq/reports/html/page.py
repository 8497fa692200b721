"""The page of `fedq report`: head, charts, who sees what, costs, settings, label pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup

from lightning_fedq.privacy.secret_row import title_of
from lightning_fedq.privacy.verdict import scale
from lightning_fedq.reports.html.charts import COLOURS, Line, bar_chart, label_picture, line_chart
from lightning_fedq.reports.html.folders import Run
from lightning_fedq.reports.html.tables import Table, costs, settings, who_sees_what
from lightning_fedq.reports.html.templates import render
from lightning_fedq.reports.html.values import (
    Cell,
    Verdict,
    asked_of,
    final,
    finite_or_inf,
    noise_cell,
    number,
    verdict_word,
    view_cell,
)
from lightning_fedq.reports.runs import common_view, mode_of

Legend = list[tuple[str, str]]
"""Names, and the classes of their colours."""


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
        tiles=_tiles(runs[0], monitor) if len(runs) == 1 else [],
        overview=_overview(runs, monitor),
        figures=list(_figures(runs, monitor)),
        deltas=" and ".join(sorted({f"{run.privacy['delta']:g}" for run in runs})),
        scale=scale().capitalize(),
        views=who_sees_what(runs),
        costs=costs(runs),
        pictures={run.name: label_picture(run.labels) for run in runs if run.labels},
        settings=settings(runs),
    )


class _Tile(NamedTuple):
    name: str
    value: str
    small: str
    verdict: Verdict | None = None


def _tiles(run: Run, monitor: str) -> list[_Tile]:
    epsilon, word = view_cell(run)
    learns, ratio = noise_cell(run)
    best = run.summary.get("best") or {}
    metric = f"best {number(best['value'])} after round {best['round']:.0f}" if best else ""
    tests = [f"{name} {number(v)}" for name, v in run.summary["metrics"].items() if name.startswith("test")]
    bits = number(run.summary["bits_per_parameter"])
    tiles = [
        _Tile(f"{monitor}, last round", number(final(run, monitor)), "; ".join([metric, *tests]).strip("; ")),
        _Tile("epsilon", epsilon, asked_of(run), verdict_word(word) if word else None),
        _Tile("bits a parameter, up", bits, "one client, one round; floats: 32"),
    ]
    return [*tiles, _Tile("noise over signal, R", learns, ratio)] if ratio else tiles


def _overview(runs: Sequence[Run], monitor: str) -> Table:
    better = "larger" if mode_of(monitor) == "max" else "smaller"
    metric = f"{monitor} ({better} is better)"
    heads = ("run", metric, "epsilon", "noise over signal R", "bits a parameter, up")
    rows: list[tuple[str | Cell, list[str | Cell]]] = []
    who = common_view([run.view for run in runs]) if all(run.view for run in runs) else None
    for run in runs:
        epsilon, word = view_cell(run, who)
        best = number((run.summary.get("best") or {}).get("value"))
        cells: list[str | Cell] = [
            Cell(number(final(run, monitor)), f"best {best}", strong=True),
            Cell(small=asked_of(run, who), verdict=verdict_word(word, epsilon)),
            Cell(*noise_cell(run)),
            Cell(number(run.summary["bits_per_parameter"]), f"{run.summary['rounds']} rounds"),
        ]
        rows.append((Cell(run.name, str(run.summary["mechanism"]).partition("(")[0]), cells))
    return heads, rows


# ---- charts -------------------------------------------------------------------------------------------


def _figures(runs: Sequence[Run], monitor: str) -> Iterator[tuple[str, Markup, Legend]]:
    """Titles, charts and legends of the charts by round."""
    names = [(run.name, f"s{place % COLOURS}") for place, run in enumerate(runs)]
    several = names if len(runs) > 1 else []
    metric = [Line(run.name, run.column(monitor), place) for place, run in enumerate(runs)]
    yield monitor, line_chart(metric, f"{monitor} by round"), several
    who = common_view([run.view for run in runs if run.view])
    yield (f"epsilon spent, {title_of(who)}", *_epsilons(runs, who))
    label = "bits a parameter by round"
    if several:
        lines = [Line(run.name, _whole(bits_by_round(run)), place) for place, run in enumerate(runs)]
        yield "bits a parameter, up", line_chart(lines, label, zero=True), several
    else:
        stacks = bits_by_round(runs[0])
        kinds = [(name, f"s{place}") for place, (name, _) in enumerate(stacks)]
        yield "bits a parameter, up", bar_chart(stacks, label), kinds


def _epsilons(runs: Sequence[Run], who: str) -> tuple[Markup, Legend]:
    """Curves towards one adversary, and at the end what runs have that were not asked about it."""
    lines, names = [], []
    for place, run in enumerate(runs):
        points = [(float(x), finite_or_inf(y)) for x, y in run.view.get("by_round", ())]
        colour = f"s{place % COLOURS}"
        if run.seeded or run.view.get("adversary") != who or not any(math.isfinite(y) for _, y in points):
            epsilon, word = view_cell(run, who)
            names.append((f"{run.name}: {epsilon} {word}, not drawn", colour))
            continue
        lines.append(Line(run.name, points, place))
        names.append((run.name, colour))
        if run.view["asked"] and run.view["over"] == "run":
            lines.append(Line(f"{run.name}: target", [(0.0, run.view["asked"])], place, target=True))
            names.append((f"target {run.view['asked']:g}", f"{colour} target"))
    return line_chart(lines, "epsilon spent by round", zero=True), names


def bits_by_round(run: Run) -> list[tuple[str, list[tuple[float, float]]]]:
    """Bits that a client sends for a parameter, by round: updates, keys and shares, set-up."""
    dim = run.privacy["dim"]
    masked = run.privacy["secure_aggregation"]
    layers: dict[str, list[tuple[float, float]]] = {}
    for row in run.rows:
        answers = row["num_received"]
        if not answers or math.isnan(row.get("uplink_bits", math.nan)):
            continue
        protocol = row.get("protocol_bits", 0.0)
        layers.setdefault("updates", []).append(
            (row["round"], (row["uplink_bits"] - protocol) / (answers * dim))
        )
        layers.setdefault("protocol", []).append((row["round"], protocol / (answers * dim)))
        layers.setdefault("set-up", []).append((row["round"], row["setup_bits"] / (answers * dim)))
    told_apart = any("protocol_bits" in row for row in run.rows)
    names = {
        "updates": ("masked updates" if told_apart else "masked updates, keys and shares")
        if masked
        else "updates",
        "protocol": "keys and shares of the masks",
        "set-up": "set-up of keys",
    }
    return [(names[name], points) for name, points in layers.items() if any(y > 0 for _, y in points)]


def _whole(stacks: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> list[tuple[float, float]]:
    sums: dict[float, float] = {}
    for _, points in stacks:
        for x, y in points:
            sums[x] = sums.get(x, 0.0) + y
    return sorted(sums.items())
