"""Values of a run as cells of a page: numbers, epsilons with their word, what was asked for, R."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.planning import verdict_on
from lightning_fedq.privacy.secret_row import title_of
from lightning_fedq.privacy.verdict import NO_GUARANTEE, NOT_RUN, format_epsilon
from lightning_fedq.reports.html.folders import Run

_COLOUR_OF = {"strong": "good", "good": "good", "moderate": "fair", "weak": "fair"}


def final(run: Run, monitor: str) -> float | None:
    """Last value of a metric, None where it was never logged."""
    values = run.column(monitor)
    return values[-1][1] if values else None


def number(value: Any, digits: int = 4) -> str:
    """A number for a reader, "-" where there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.{digits}g}" if isinstance(value, float) else f"{value:,}"


def epsilon_of(row: Mapping[str, Any]) -> float:
    """Epsilon over the run between any two updates."""
    return max(finite_or_inf(row["epsilon_run"]), finite_or_inf(row["epsilon_any_two"]))


def finite_or_inf(value: Any) -> float:
    """A number of a JSON file, where infinity is null or "inf"."""
    return math.inf if value is None or value == "inf" else float(value)


class Verdict(NamedTuple):
    """An epsilon and its word, and the class of the word's colour."""

    words: str
    colour: str


@dataclass(frozen=True)
class Cell:
    """A cell of a table: a verdict or words, what was asked for, and small print."""

    words: str = ""
    small: str = ""
    verdict: Verdict | None = None
    asked: str = ""
    strong: bool = False
    is_cell: bool = True


def verdict_word(word: str, epsilon: str = "") -> Verdict:
    """An epsilon and its word, in the colour of the word."""
    return Verdict(f"{epsilon} {word}".strip(), _COLOUR_OF.get(word, "bad"))


def asked_of(run: Run, shown: str | None = None) -> str:
    """Target of a run in a line, and whether it was met.

    Args:
        shown: Name of the adversary that is shown; None is the run's own.
    """
    view = run.view
    if run.seeded:
        return "nothing is private: keys from a seed"
    if not view:
        return ""
    if shown not in (None, view["adversary"]):
        target = f"; asked: {target_words(run)}; {title_of(view['adversary'])}" if view["asked"] else ""
        return f"{title_of(str(shown))}{target}"
    who = title_of(view["adversary"])
    if not view["asked"] and view["verdict"] == NO_GUARANTEE:
        return "nothing is claimed towards anybody"
    if not view["asked"]:
        return f"smallest of all views: {who}"
    return f"asked: {target_words(run)}; {who}"


def target_words(run: Run) -> str:
    """Epsilon that was asked for and whether it is met, with its delta where the tables have another."""
    view = run.view
    over = "a round" if view["over"] == "round" else "the run"
    delta = "" if view["delta"] == run.privacy["delta"] else f" at delta {view['delta']:g}"
    why = ": no masks ran" if view["adversary"] == Adversary.SECAGG_SERVER.name and not run.masked else ""
    return f"{view['asked']:g} over {over}{delta}, {'met' if view['met'] else f'NOT met{why}'}"


def view_cell(run: Run, who: str | None = None) -> tuple[str, str]:
    """Epsilon and verdict towards the view that was asked for, or that its target is not met.

    Args:
        who: Name of another adversary to show, the one of all runs of a page; None is the run's own.
    """
    if run.seeded:
        return "∞", NO_GUARANTEE
    if not run.view:
        return "-", ""
    if who not in (None, run.view["adversary"]):
        if who == Adversary.SECAGG_SERVER.name and not run.masked:
            return NOT_RUN, NO_GUARANTEE
        row = next((row for row in run.views if row["adversary"] == who), None)
        if row is None:  # secret cohorts, which this run did not have
            return "-", ""
        return format_epsilon(epsilon_of(row)), row["verdict"]
    epsilon, verdict = format_epsilon(finite_or_inf(run.view["epsilon"])), run.view["verdict"]
    if run.view["met"] is False:
        return "NOT met", "no masks ran" if not run.masked else f"epsilon {epsilon}, {verdict}"
    return epsilon, verdict


def noise_cell(run: Run) -> tuple[str, str]:
    """R in words, as seen or else as planned, and both."""
    noise = run.summary.get("noise_over_signal") or {}
    planned, seen = noise.get("planned"), noise.get("sim_seen")
    words = [f"planned {planned:.2g}"] if planned is not None else []
    words += [f"seen {seen:.2g}"] if seen is not None else []
    judged = planned if seen is None else seen
    return ("-" if judged is None else verdict_on(judged)), ", ".join(words)
