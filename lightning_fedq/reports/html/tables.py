"""Tables of the page: who sees what, costs, label pictures, settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from lightning_fedq.mechanism import Neighbours
from lightning_fedq.privacy.verdict import NO_GUARANTEE, VACUOUS, format_epsilon, scale
from lightning_fedq.reports.html.charts import label_picture
from lightning_fedq.reports.html.folders import Run
from lightning_fedq.reports.html.values import (
    WHO,
    epsilon_of,
    finite_or_inf,
    number,
    target_words,
    verdict_word,
)


def table_head(names: Sequence[str]) -> str:
    """Open a table, of which a phone shows a cell a line."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in names)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>"


def table_row(heads: Sequence[str], name: str, cells: Sequence[str]) -> str:
    """A row of a table. `heads` are the table's, and name and cells are HTML."""
    tds = "".join(
        f'<td data-head="{escape(head, quote=True)}">{cell}</td>'
        for head, cell in zip(heads[1:], cells, strict=True)
    )
    return f"<tr><th>{name}</th>{tds}</tr>"


def who_sees_what(runs: Sequence[Run]) -> Iterator[str]:
    """Epsilon and verdict by adversary, a column a run, of a single run with what it takes."""
    deltas = sorted({f"{run.privacy['delta']:g}" for run in runs})
    yield "<h2>Who sees what</h2>"
    yield (
        "<p>Epsilon of the most charged client over the run, between any two of its updates, at delta "
        f"{' and '.join(deltas)}. {escape(scale().capitalize())}.</p>"
    )
    one = runs[0] if len(runs) == 1 else None
    heads = ("who", "epsilon and verdict", "what it takes") if one else ("who", *(run.name for run in runs))
    yield table_head(heads)
    table = [{row["adversary"]: row for row in run.views} for run in runs]
    for adversary in _order(runs):
        rows = [views.get(adversary) for views in table]
        if rows == [None] * len(rows):
            continue
        cells = ["" if row is None else _privacy_cell(run, row) for run, row in zip(runs, rows, strict=True)]
        if one and rows[0] is not None:
            cells.append(escape(_condition(runs[0], rows[0])))
        yield table_row(heads, WHO[adversary], cells)
    yield "</tbody></table>"
    for run in runs:
        if run.privacy.get("samples"):
            name = escape(run.name)
            yield f"<p>{name}: DP-SGD ran in the clients; privacy.md says what it gives a sample.</p>"


def _order(runs: Sequence[Run]) -> list[str]:
    """Views: what was asked for first, then what is useful in any run, then the rest."""
    asked = {run.view["adversary"] for run in runs if run.view and run.view["asked"]}
    useful = {
        r["adversary"] for run in runs for r in run.views if r["verdict"] not in (VACUOUS, NO_GUARANTEE)
    }
    return sorted(WHO, key=lambda who: (who not in asked, who not in useful, list(WHO).index(who)))


def _privacy_cell(run: Run, row: Mapping[str, Any]) -> str:
    cell = verdict_word(
        row["verdict"], "" if row["verdict"] == NO_GUARANTEE else format_epsilon(epsilon_of(row))
    )
    view = run.view
    if view and view["asked"] and view["adversary"] == row["adversary"]:
        cell += f' <span class="asked">asked for {target_words(run)}</span>'
    return cell


def _condition(run: Run, row: Mapping[str, Any]) -> str:
    """Condition under which this view is met, or the reason why nothing holds."""
    masked = str(run.privacy["protocol"]).startswith("masking really ran")
    broken = "masks are broken and " if masked else ""
    parts = {
        "SECAGG_SERVER": run.privacy["protocol"] if masked else "no masks ran",
        "SERVER": "if masks are broken" if masked else "",
        "EAVESDROPPER": "if masks are broken" if masked else "",
        "OUTSIDER, cohorts secret": "if nobody but the server learns who took part",
        "SERVER_AND_PARTNER": f"if {broken}a partner or the shared randomness leaks",
    }
    said = [parts.get(row["adversary"], "")]
    if row["verdict"] == NO_GUARANTEE:
        said.append(row["reason"])
    elif row["neighbours"] == Neighbours.ZERO_OUT.value:
        zero = format_epsilon(finite_or_inf(row["epsilon_run"]))
        said.append(f"epsilon {zero} between an update and one of zero")
    return "; ".join(part for part in said if part)


def costs(runs: Sequence[Run]) -> Iterator[str]:
    """Megabytes and seconds of all clients over the run."""
    yield "<h2>Costs of the whole run</h2>"
    heads = ("all clients", *(run.name for run in runs))
    yield table_head(heads)
    for label, key in (
        ("megabytes up", "uplink_megabytes"),
        ("of these keys and shares", "protocol_megabytes"),
        ("megabytes down", "downlink_megabytes"),
        ("megabytes of set-up", "setup_megabytes"),
        ("seconds in rounds", "seconds"),
    ):
        values = [run.summary.get(key) for run in runs]
        if any(values):
            yield table_row(heads, label, [number(value) for value in values])
    yield "</tbody></table>"


def labels(runs: Sequence[Run]) -> Iterator[str]:
    """Pictures of who holds which labels, of runs where that is known."""
    known = [run for run in runs if run.labels]
    if not known:
        return
    yield '<h2>Who holds which labels</h2>\n<div class="charts labels">'
    for run in known:
        title = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        words = "A row a label; the stronger the colour, the more samples."
        yield f"<figure>{title}{label_picture(run.labels)}<figcaption>{words}</figcaption></figure>"
    yield "</div>"


def settings(runs: Sequence[Run]) -> Iterator[str]:
    """Settings, a column a run, and the configurations folded away."""
    yield "<h2>Settings</h2>"
    heads = ("", *(run.name for run in runs))
    yield table_head(heads)
    for label, values in settings_of(runs):
        if any(values):
            yield table_row(heads, label, [escape(value) for value in values])
    yield "</tbody></table>"
    for run in runs:
        if run.config:
            name = "configuration" if len(runs) == 1 else f"configuration of {run.name}"
            yield f"<details><summary>{escape(name)}</summary><pre>{escape(run.config)}</pre></details>"


def settings_of(runs: Sequence[Run]) -> Iterator[tuple[str, list[str]]]:
    """Settings by name, a value a run."""
    yield "mechanism", [str(run.summary["mechanism"]) for run in runs]
    yield "clients", [number(run.summary["num_clients"]) for run in runs]
    yield "clients a round", [number(run.privacy["cohort_size"]) for run in runs]
    yield "rounds", [number(run.summary["rounds"]) for run in runs]
    yield "parameters", [number(run.summary["num_parameters"]) for run in runs]
    yield "what clients send", [str(run.summary["target"]) for run in runs]
    yield "keys", [str(run.summary["keys"]) for run in runs]
    yield "secure aggregation", [str(run.summary["secure_aggregation"]) for run in runs]
    yield "privacy target", [_target(run) for run in runs]
    yield "aborted rounds", [number(run.summary["aborted_rounds"] or None).strip("-") for run in runs]


def _target(run: Run) -> str:
    """The target without the mechanism that was found for it, which has a line of its own."""
    return str(run.summary.get("privacy_target", "")).partition(": ")[0]
