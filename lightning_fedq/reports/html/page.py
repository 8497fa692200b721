"""The page of `fedq report`: head, charts, who sees what, costs, settings, label pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from lightning_fedq.reports.html.charts import COLOURS, Line, bar_chart, line_chart
from lightning_fedq.reports.html.folders import Run
from lightning_fedq.reports.html.style import STYLE
from lightning_fedq.reports.html.tables import costs, labels, settings, table_head, table_row, who_sees_what
from lightning_fedq.reports.html.values import (
    WHO,
    asked_of,
    final,
    finite_or_inf,
    noise_cell,
    number,
    verdict_word,
    view_cell,
)
from lightning_fedq.reports.runs import mode_of


def page(runs: Sequence[Run], monitor: str) -> str:
    """The whole page as HTML.

    Args:
        runs: Runs to show side by side.
        monitor: Metric to draw, such as `val_acc`.
    """
    title = " · ".join(run.name for run in runs)
    body = [
        f"<h1>{escape(title)}</h1>",
        *_warnings(runs),
        *(_tiles(runs[0], monitor) if len(runs) == 1 else _overview(runs, monitor)),
        *_charts(runs, monitor),
        *who_sees_what(runs),
        *costs(runs),
        *labels(runs),
        *settings(runs),
        "<footer><p>Numbers that begin with <code>sim_</code>, R as seen and who holds which labels are "
        "known to a simulation only: they are not private, and no real server could print them. "
        "Made by <code>fedq report</code>.</p></footer>",
    ]
    return document(title, body)


def document(title: str, body: Sequence[str]) -> str:
    """A whole page in one file: light and dark, wide and narrow, without a network."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


# ---- head ---------------------------------------------------------------------------------------------


def _warnings(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.seeded:
            yield (
                f'<p class="warn"><b>{escape(run.name)}: nothing is private</b>, because its keys come from '
                "a seed. The tables say what secret keys (seed: null) would give.</p>"
            )
        if "ended" in run.summary:
            yield f'<p class="warn">{escape(run.name)} ended {escape(run.summary["ended"])}.</p>'


def _tiles(run: Run, monitor: str) -> Iterator[str]:
    epsilon, word = view_cell(run)
    learns, ratio = noise_cell(run)
    best = run.summary.get("best") or {}
    metric = f"best {number(best['value'])} after round {best['round']:.0f}" if best else ""
    tests = [f"{name} {number(v)}" for name, v in run.summary["metrics"].items() if name.startswith("test")]
    tiles = [
        (f"{monitor}, last round", number(final(run, monitor)), "; ".join([metric, *tests]).strip("; ")),
        ("epsilon", f"{epsilon} {verdict_word(word)}" if word else epsilon, escape(asked_of(run))),
        (
            "bits a parameter, up",
            number(run.summary["bits_per_parameter"]),
            "one client, one round; floats: 32",
        ),
    ]
    if ratio:
        tiles.append(("noise over signal, R", learns, ratio))
    yield '<div class="tiles">'
    for name, value, more in tiles:
        yield f'<div class="tile">{escape(name)}<b>{value}</b><small>{more}</small></div>'
    yield "</div>"


def _overview(runs: Sequence[Run], monitor: str) -> Iterator[str]:
    better = "larger" if mode_of(monitor) == "max" else "smaller"
    heads = (
        "run",
        f"{monitor} ({better} is better)",
        "epsilon",
        "noise over signal R",
        "bits a parameter, up",
    )
    yield table_head(heads)
    for run in runs:
        epsilon, word = view_cell(run)
        learns, ratio = noise_cell(run)
        mechanism = str(run.summary["mechanism"]).partition("(")[0]
        best = number((run.summary.get("best") or {}).get("value"))
        cells = [
            f"<b>{number(final(run, monitor))}</b><small>best {best}</small>",
            f"{verdict_word(word, epsilon)}<small>{escape(asked_of(run))}</small>",
            f"{escape(learns)}<small>{escape(ratio)}</small>",
            f"{number(run.summary['bits_per_parameter'])}<small>{run.summary['rounds']} rounds</small>",
        ]
        name = f"{escape(run.name)}<small>{escape(mechanism)}</small>"
        yield table_row(heads, name, cells)
    yield "</tbody></table>"


# ---- charts -------------------------------------------------------------------------------------------


def _charts(runs: Sequence[Run], monitor: str) -> Iterator[str]:
    metric = [Line(run.name, run.column(monitor), place) for place, run in enumerate(runs)]
    figures = [(monitor, line_chart(metric, f"{monitor} by round"), _legend(runs) if len(runs) > 1 else "")]
    figures.append(("epsilon spent", *_epsilons(runs)))
    if len(runs) == 1:
        stacks = bits_by_round(runs[0])
        names = [(name, f"s{place}") for place, (name, _) in enumerate(stacks)]
        figures.append(("bits a parameter, up", bar_chart(stacks, "bits a parameter by round"), chips(names)))
    else:
        lines = [Line(run.name, _whole(bits_by_round(run)), place) for place, run in enumerate(runs)]
        figures.append(
            ("bits a parameter, up", line_chart(lines, "bits a parameter by round", zero=True), _legend(runs))
        )
    yield '<h2>By round</h2>\n<div class="charts">'
    for title, svg, legend in figures:
        if svg:
            yield f"<figure><h3>{escape(title)}</h3>{svg}{legend}</figure>"
    yield "</div>"


def _epsilons(runs: Sequence[Run]) -> tuple[str, str]:
    lines, names = [], []
    for place, run in enumerate(runs):
        points = [(float(x), finite_or_inf(y)) for x, y in run.view.get("by_round", ())]
        if run.seeded or not any(math.isfinite(y) for _, y in points):
            continue
        colour = f"s{place % COLOURS}"
        lines.append(Line(run.name, points, place))
        names.append((f"{run.name}: {WHO[run.view['adversary']]}", colour))
        if run.view["asked"] and run.view["over"] == "run":
            lines.append(Line(f"{run.name}: target", [(0.0, run.view["asked"])], place, target=True))
            names.append((f"target {run.view['asked']:g}", f"{colour} target"))
    return line_chart(lines, "epsilon spent by round", zero=True), chips(names)


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


def _legend(runs: Sequence[Run]) -> str:
    return chips([(run.name, f"s{place % COLOURS}") for place, run in enumerate(runs)])


def chips(names: Sequence[tuple[str, str]]) -> str:
    """A legend of names and classes of colour."""
    items = "".join(f'<li><i class="{kind}"></i>{escape(name)}</li>' for name, kind in names)
    return f'<ul class="legend">{items}</ul>' if items else ""
