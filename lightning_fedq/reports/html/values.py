"""Values of a run as cells of a page: numbers, epsilons with their word, R."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_fedq.privacy.document import Shown
from lightning_fedq.privacy.planning import verdict_on
from lightning_fedq.privacy.verdict import COLOURS
from lightning_fedq.reports.html.folders import Run


def number(value: Any, digits: int = 4) -> str:
    """A number for a reader, "-" where there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.{digits}g}" if isinstance(value, float) else f"{value:,}"


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


def privacy_cell(found: Shown, small: str = "") -> Cell:
    """Epsilon and its word in the word's colour, and what was asked for."""
    words = f"{found.printed} {found.verdict}".strip()
    colour = "bad" if found.met is False else COLOURS.get(found.verdict, "bad")
    return Cell(verdict=Verdict(words, colour), asked=found.asked, small=small)


def noise_cell(run: Run) -> tuple[str, str]:
    """R in words, as seen or else as planned, and both."""
    noise = run.summary.get("noise_over_signal") or {}
    planned, seen = noise.get("planned"), noise.get("sim_seen")
    words = [f"planned {planned:.2g}"] if planned is not None else []
    words += [f"seen {seen:.2g}"] if seen is not None else []
    judged = planned if seen is None else seen
    return ("-" if judged is None else verdict_on(judged)), ", ".join(words)
