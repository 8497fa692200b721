"""Tables of the page: who sees what, costs, settings. A table is its heads, and rows of a name and cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_fedq.mechanisms.interface import Adversary, Neighbours
from lightning_fedq.privacy.digest import ORDER
from lightning_fedq.privacy.secret_row import SECRET_COHORTS, title_of
from lightning_fedq.privacy.verdict import NO_GUARANTEE, NOT_RUN, VACUOUS, format_epsilon
from lightning_fedq.reports.html.folders import Run
from lightning_fedq.reports.html.values import (
    Cell,
    epsilon_of,
    finite_or_inf,
    number,
    target_words,
    verdict_word,
)

Table = tuple[Sequence[str], Sequence[tuple[str | Cell, Sequence[str | Cell]]]]


def who_sees_what(runs: Sequence[Run]) -> Table:
    """Epsilon and verdict by adversary, a column a run, of a single run with what it takes."""
    one = runs[0] if len(runs) == 1 else None
    heads = ("who", "epsilon and verdict", "what it takes") if one else ("who", *(run.name for run in runs))
    views = [{row["adversary"]: row for row in run.views} for run in runs]
    lines: list[tuple[str | Cell, list[str | Cell]]] = []
    for adversary in _order(runs):
        rows = [view.get(adversary) for view in views]
        if rows == [None] * len(rows):
            continue
        cells: list[str | Cell] = [
            "" if row is None else _privacy_cell(run, row) for run, row in zip(runs, rows, strict=True)
        ]
        if one and rows[0] is not None:
            cells.append(_condition(runs[0], rows[0]))
        lines.append((title_of(adversary), cells))
    return heads, lines


def _order(runs: Sequence[Run]) -> list[str]:
    """Views: what was asked for first, then what is useful in any run, then the rest."""
    asked = {run.view["adversary"] for run in runs if run.view and run.view["asked"]}
    useful = {
        r["adversary"] for run in runs for r in run.views if r["verdict"] not in (VACUOUS, NO_GUARANTEE)
    }
    names = [*(who.name for who in ORDER), f"{Adversary.OUTSIDER.name}{SECRET_COHORTS}"]
    return sorted(names, key=lambda who: (who not in asked, who not in useful, names.index(who)))


def _privacy_cell(run: Run, row: Mapping[str, Any]) -> Cell:
    epsilon = "" if row["verdict"] == NO_GUARANTEE else format_epsilon(epsilon_of(row))
    view = run.view
    asked = view and view["asked"] and view["adversary"] == row["adversary"]
    words = f"asked for {target_words(run)}" if asked else ""
    if row["adversary"] == Adversary.SECAGG_SERVER.name and not run.masked:
        with_masks = f"with masks: {epsilon} {row['verdict']}" if epsilon else ""
        return Cell(small=with_masks, verdict=verdict_word(NOT_RUN), asked=words)
    return Cell(verdict=verdict_word(row["verdict"], epsilon), asked=words)


def _condition(run: Run, row: Mapping[str, Any]) -> str:
    """Condition under which this view is met, or the reason why nothing holds."""
    masked = run.masked
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


def costs(runs: Sequence[Run]) -> Table:
    """Megabytes and seconds of all clients over the run."""
    named = (
        ("megabytes up", "uplink_megabytes"),
        ("of these keys and shares", "protocol_megabytes"),
        ("megabytes down", "downlink_megabytes"),
        ("megabytes of set-up", "setup_megabytes"),
        ("seconds in rounds", "seconds"),
    )
    values = [(label, [run.summary.get(key) for run in runs]) for label, key in named]
    rows = [(label, [number(value) for value in found]) for label, found in values if any(found)]
    return ("all clients", *(run.name for run in runs)), rows


def settings(runs: Sequence[Run]) -> Table:
    """Settings, a column a run."""
    rows = [(label, values) for label, values in settings_of(runs) if any(values)]
    return ("", *(run.name for run in runs)), rows


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
    # the target without the mechanism that was found for it, which has a line of its own
    yield "privacy target", [str(run.summary.get("privacy_target", "")).partition(": ")[0] for run in runs]
    yield "aborted rounds", [number(run.summary["aborted_rounds"] or None).strip("-") for run in runs]
