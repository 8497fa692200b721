"""Rows of a privacy report as readers see them: their order, their groups, and one row in a few words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.row import SECRET_COHORTS, Row, is_met
from lightning_fedq.privacy.verdict import NO_GUARANTEE, NOT_RUN, VACUOUS, format_epsilon

if TYPE_CHECKING:
    from lightning_fedq.privacy.report import PrivacyReport, State

ORDER = (
    Adversary.SECAGG_SERVER,
    Adversary.SERVER,
    Adversary.EAVESDROPPER,
    Adversary.SERVER_AND_PARTNER,
    Adversary.CLIENT,
    Adversary.OUTSIDER,
)
"""Adversaries in the order in which tables for readers have them."""
PLACES = (*(who.name for who in ORDER), f"{Adversary.OUTSIDER.name}{SECRET_COHORTS}")
"""Names of rows in the same order, followed by the row for secret cohorts."""
FAILING = "if an assumption fails"
AS_RUN: dict[State, str] = {
    "planned": "as it will run",
    "running": "as it has run so far",
    "ended": "as it was run",
}
"""Name of the group of rows that hold without a failure, by state of the run."""


@dataclass(frozen=True)
class ReportRow:
    """A row as readers see it.

    Args:
        row: Row with its figures.
        group: Group of the row: "as it was run" in the tense of the state, "if an assumption fails", or
            "behind masks, ...".
        asked: Whether the target is about this row.
        epsilon: Printed epsilon over the run, under replace-one adjacency. "∞" without a bound, "not run" for
            masks that did not run.
        when: Condition under which the run has this adversary. It may be empty.
    """

    row: Row
    group: str
    asked: bool
    epsilon: str
    when: str

    @property
    def useful(self) -> bool:
        """Whether the bound excludes anything."""
        return self.row.verdict not in (VACUOUS, NO_GUARANTEE)


def report_rows(report: PrivacyReport) -> list[ReportRow]:
    """Return the rows as readers see them: first the group of the target's row, with that row at its top.

    With reproducible keys, the rows are those that secret keys would give.
    """
    as_run, report_lines = AS_RUN[report.state], list[ReportRow]()
    masks_state = {"counted": "only counted", "assumed": "only assumed"}.get(report.masks, "not there")
    was = "was" if report.state == "ended" else "is"
    behind_masks = f"behind secure aggregation, which {was} {masks_state}"
    for row in report.readable_rows:
        asked = report.asked is not None and report.asked.adversary == row.name
        hypothetical = needs_masks(row) and not report.masked
        group = as_run if is_met(row, report.masked) else behind_masks if hypothetical else FAILING
        epsilon = NOT_RUN if hypothetical and report.masks == "none" else format_epsilon(row.epsilon)
        report_lines.append(ReportRow(row, group, asked, epsilon, _row_condition(row, report.masked)))
    groups = (as_run, FAILING, behind_masks)
    first = next((line.group for line in report_lines if line.asked), as_run)
    return sorted(
        report_lines,
        key=lambda line: (
            line.group != first,
            groups.index(line.group),
            not line.asked,
            not line.useful,
            PLACES.index(line.row.name),
        ),
    )


def needs_masks(row: Row) -> bool:
    """Return whether a row is about the server behind secure aggregation."""
    return row.adversary == Adversary.SECAGG_SERVER.name


def _row_condition(row: Row, masked: bool) -> str:
    """Return the condition under which the run has the row's adversary, or ""."""
    if row.cohorts == "secret":
        return "nobody learns who took part"
    if masked and not is_met(row, True):
        return "masks are broken"
    if row.adversary == Adversary.SERVER_AND_PARTNER.name:
        return "a partner leaks"
    colluders, alone = row.colluders, row.adversary == Adversary.CLIENT.name
    if row.verdict == NO_GUARANTEE or not colluders or colluders == math.inf:
        return ""
    return "alone" if alone and colluders == 1 else f"with {colluders:g} colluders"


# ---- one row ------------------------------------------------------------------------------------------


class PrivacySummary(NamedTuple):
    """Privacy of a run in one cell of a table, or one entry of a legend.

    Args:
        who: Name of the row. "" where the run has no row of that name.
        epsilon: Epsilon over the run, under replace-one adjacency. None for masks that do not run.
        verdict: Verdict on epsilon.
        asked: Target of this row and whether it is met, in words. "" where the target is about another row.
        met: Whether the target is met. None where the target is about another row.
    """

    who: str
    epsilon: float | None
    verdict: str
    asked: str = ""
    met: bool | None = None

    @property
    def printed(self) -> str:
        """Printed epsilon, "not run", or "-" where there is no row."""
        return format_epsilon(self.epsilon) if self.epsilon is not None else NOT_RUN if self.who else "-"

    @property
    def label(self) -> str:
        """Entry of a legend."""
        if self.met is False:
            return "target NOT met"
        words = {NOT_RUN: "masks not run", "∞": "no finite ε", "-": ""}
        return words.get(self.printed, f"ε {self.printed}")


def summarise_privacy(report: PrivacyReport, adversary: str | None = None) -> PrivacySummary:
    """Return the privacy against one adversary. With reproducible keys there is none.

    Args:
        report: Report of the run.
        adversary: Name of a row. None is `PrivacyReport.about`.
    """
    row: Row | None = report.about
    if adversary is not None:
        row = next((row for row in report.all_rows if row.name == adversary), None)
    if row is None:
        return PrivacySummary("", None, "")
    summary = PrivacySummary(row.name, row.epsilon, row.verdict)
    if needs_masks(row) and not report.masked:
        summary = PrivacySummary(row.name, None, NO_GUARANTEE)
    asked = report.asked
    if asked is None or asked.adversary != row.name:
        return summary
    wanted = f"asked for {asked.epsilon:g} over {'a round' if asked.over == 'round' else 'the run'}"
    return summary._replace(asked=f"{wanted}: {describe_target(report)}", met=asked.met)


def common_adversary(reports: Sequence[PrivacyReport]) -> str:
    """Return the name of the row in which several runs are compared.

    Returns:
        Row of all targets, or of all `about` rows without targets, if they agree. Otherwise the outsider's
        row, which every run has.
    """
    asked = {report.asked.adversary for report in reports if report.asked is not None}
    candidates = asked or {report.about.name for report in reports}
    return candidates.pop() if len(candidates) == 1 else Adversary.OUTSIDER.name


def describe_target(report: PrivacyReport) -> str:
    """Return whether the target of a run is met, in words."""
    assert report.asked is not None
    if report.state == "planned":
        return "to be met" if report.asked.met else "will NOT be met"
    so_far = " so far" if report.state == "running" else ""
    return f"{'met' if report.asked.met else 'NOT met'}{so_far}"
