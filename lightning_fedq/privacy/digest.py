"""Privacy of a run as one short table: what was asked for, what else holds, what holds if something fails."""

from dataclasses import dataclass

from lightning_fedq.mechanisms.interface import Adversary, Neighbours
from lightning_fedq.privacy.report import PrivacyReport, Row
from lightning_fedq.privacy.secret_row import SECRET_COHORTS
from lightning_fedq.privacy.verdict import NO_GUARANTEE, NOT_RUN, VACUOUS, format_epsilon

ORDER = (
    Adversary.SECAGG_SERVER,
    Adversary.SERVER,
    Adversary.EAVESDROPPER,
    Adversary.SERVER_AND_PARTNER,
    Adversary.CLIENT,
    Adversary.OUTSIDER,
)
"""Adversaries in the order in which tables for readers have them."""

ASKED, ALSO, FAILING = "asked for", "as it was run", "if an assumption fails"
WITH_MASKS = "behind secure aggregation, which did not run"


@dataclass(frozen=True)
class Line:
    """Privacy of a client over the run towards one adversary.

    Args:
        group: "asked for", "as it was run", "if an assumption fails" or "behind secure aggregation, ...".
        adversary: Name of the `Adversary`.
        who: Title of the adversary.
        epsilon: Between any two updates of a client, over the run, printed; "∞" without a bound, "not run"
            for masks of which there were none.
        verdict: Word for that epsilon.
        when: Condition under which this adversary is met or this epsilon holds; may be empty.
    """

    group: str
    adversary: str
    who: str
    epsilon: str
    verdict: str
    when: str

    @property
    def useful(self) -> bool:
        """Does the bound exclude anything?"""
        return self.verdict not in (VACUOUS, NO_GUARANTEE)


def digest(
    report: PrivacyReport, asked: Adversary | None, masked: bool, asked_secret: bool = False
) -> list[Line]:
    """One line for each adversary, in the order in which a reader needs them.

    Args:
        report: Report of the run. With reproducible keys the lines say what secure ones would give.
        asked: Adversary of the privacy target; None without a target.
        masked: Whether the masks of secure aggregation really ran.
        asked_secret: Whether the target counts on secret cohorts.
    """
    lines = [_secret_line(report.secret, asked_secret)] if report.secret is not None else []
    for row in report.with_secure_keys or report.rows:
        adversary = Adversary[row.adversary]
        when = _when(adversary, report, masked)
        group = WITH_MASKS if adversary is Adversary.SECAGG_SERVER else FAILING
        if is_met(adversary, masked):
            group = ALSO
        if adversary is asked and not asked_secret:
            group = ASKED
        has_run = adversary is not Adversary.SECAGG_SERVER or report.secure_aggregation
        epsilon = format_epsilon(row.epsilon) if has_run else NOT_RUN
        lines.append(Line(group, row.adversary, row.title, epsilon, row.verdict, _joined(when, _own(row))))
    # in a group: what holds first, then in that order
    places = {adversary.name: place for place, adversary in enumerate(ORDER)}
    places[f"{Adversary.OUTSIDER.name}{SECRET_COHORTS}"] = len(places)
    groups = (ASKED, ALSO, FAILING, WITH_MASKS)
    return sorted(lines, key=lambda line: (groups.index(line.group), not line.useful, places[line.adversary]))


def _secret_line(row: Row, asked: bool) -> Line:
    when = row.reason if row.verdict == NO_GUARANTEE else "if nobody but the server learns who took part"
    epsilon = format_epsilon(row.epsilon_run)
    return Line(ASKED if asked else ALSO, row.name, row.title, epsilon, row.verdict, when)


def is_met(adversary: Adversary, masked: bool) -> bool:
    """Whether a run as it was run has this adversary, and not only where an assumption fails.

    Example:
        >>> is_met(Adversary.SECAGG_SERVER, masked=False)
        False
    """
    if adversary is Adversary.SECAGG_SERVER:
        return masked
    if adversary in (Adversary.SERVER, Adversary.EAVESDROPPER):
        return not masked
    return adversary is not Adversary.SERVER_AND_PARTNER


def least(report: PrivacyReport, masked: bool) -> Row:
    """Row of the least epsilon among the adversaries that a run as it was run has."""
    return min(
        (row for row in report.rows if is_met(Adversary[row.adversary], masked)), key=lambda row: row.epsilon
    )


def _when(adversary: Adversary, report: PrivacyReport, masked: bool) -> str:
    """Condition under which an adversary is met, in words."""
    if adversary is Adversary.SECAGG_SERVER:
        if masked:
            first = report.protocol.partition("; ")[0]  # what follows is in `privacy.md`
            return first.removeprefix("masking really ran, for a ").removesuffix(" (semi-honest)")
        return "masks were only accounted for" if report.secure_aggregation else ""
    broken = "masks are broken" if masked else ""
    if adversary is Adversary.SERVER_AND_PARTNER:
        return _joined("a partner or the shared randomness leaks", broken)
    return "" if is_met(adversary, masked) else broken


def _own(row: Row) -> str:
    if row.verdict == NO_GUARANTEE:
        return row.reason
    if row.neighbours == Neighbours.ZERO_OUT.value:
        return f"epsilon {format_epsilon(row.epsilon_run)} between an update and zero"
    return ""


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
