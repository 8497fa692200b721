"""The page of a privacy report: one table for a reader, one to check, assumptions and notes."""

import math

from lightning_fedq.mechanisms.interface import Adversary, Neighbours
from lightning_fedq.privacy.report import PrivacyReport, Row
from lightning_fedq.privacy.secret_row import title_of
from lightning_fedq.privacy.verdict import NOT_RUN, format_epsilon

_COMPARED = {
    Neighbours.SUBSTITUTION.value: "the client's update, any other",
    Neighbours.ZERO_OUT.value: "the client's update, zero",
}
_LEGEND = (
    "Compared: the two worlds that the adversary tries to tell apart, all else being equal. Unit: what the "
    "mechanism protects one by one. Pure: at delta 0, infinite (∞) where no bound holds for every outcome, "
    "as with Gaussian noise. Infinite mass: the chance, over the run, of an outcome that only one of the two "
    "worlds can produce, which proves in which one we are; above delta there is no guarantee at "
    "all. -: nothing is claimed. Who sees what: "
    + "; ".join(f"{who.title}: {who.sees}" for who in Adversary)
    + "."
)


def epsilon_of(row: Row, masks: bool = True) -> str:
    """Epsilon over the run. One about an update and zero never stands alone.

    Args:
        masks: Was there secure aggregation? Without it the row of sums has no epsilon.
    """
    if not masks and row.adversary == Adversary.SECAGG_SERVER.name:
        return NOT_RUN
    epsilon = format_epsilon(row.epsilon_run)
    if row.neighbours != Neighbours.ZERO_OUT.value or not math.isfinite(row.epsilon_run):
        return epsilon
    return f"{epsilon} from zero, {format_epsilon(row.epsilon_any_two)} between any two"


def _tables(rows: tuple[Row, ...], masks: bool) -> list[str]:
    lines = [
        "| Who | Verdict | epsilon over the run | compared | What it means |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        means = row.words + (f" Better: {row.advice}." if row.advice else "")
        lines.append(
            f"| {row.view} | **{row.verdict}** | {epsilon_of(row, masks)} | {_COMPARED[row.neighbours]} "
            f"| {means} |"
        )
    lines += [
        "",
        "| Adversary | compared | unit | one unit in a round (pure) | message of a round | client's run | "
        "delta | infinite mass | method |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        numbers = (row.epsilon_unit, row.epsilon_round)
        lines.append(
            f"| {row.title} | {_COMPARED[row.neighbours]} | {row.unit} "
            f"| {' | '.join(map(format_epsilon, numbers))} | {epsilon_of(row, masks)} | {row.delta:g} "
            f"| {row.infinite_mass:.3g} | {row.method} |"
        )
    return [*lines, "", _LEGEND]


def _figures(report: PrivacyReport) -> list[str]:
    if not report.figures:
        return []
    lines = ["", "| Figure, and no guarantee | value |", "| --- | --- |"]
    return lines + [f"| {name} | {value} |" for name, value in report.figures]


def _charged(report: PrivacyReport) -> list[str]:
    """Spending of every client: the rows above are the worst of these."""
    if not report.charged:
        return []
    names = list(report.charged[0].epsilons)
    lines = ["", "## Who was charged how often", ""]
    if not report.secure_keys:
        lines += ["With the secure keys that this run did not have:", ""]
    lines += [
        f"| clients | rounds charged, at most | {' | '.join(map(title_of, names))} |",
        "| --- " * (len(names) + 2) + "|",
    ]
    for line in report.charged:
        epsilons = " | ".join(format_epsilon(line.epsilons[name]) for name in names)
        lines.append(f"| {line.clients} | {line.charges} | {epsilons} |")
    return [
        *lines,
        "",
        f"Epsilon of one client over the run, between any two updates, at delta {report.delta:g}.",
    ]


def markdown(report: PrivacyReport) -> str:
    """Two tables, one to read and one to check. Then what has to hold, and samples where DP-SGD ran."""
    common = set.intersection(*(set(row.assumptions) for row in report.rows))
    # settings of other libraries are priced for vectors of any length, as one number
    length = f"{report.dim} parameters, " if report.dim > 1 else ""
    lines = [
        "# What was protected, and from whom",
        "",
        f"{report.mechanism}: {length}{report.cohort_size} of {report.num_clients} clients "
        f"a round, {report.rounds} rounds, delta {report.delta:g}, "
        f"{'secure' if report.secure_keys else 'reproducible'} keys, "
        f"secure aggregation {f'on: {report.protocol}' if report.secure_aggregation else 'off'}.",
        "",
        *_tables(report.all_rows, report.secure_aggregation),
        *_figures(report),
        "",
        "## What has to hold",
        "",
        f"- everywhere: {'; '.join(sorted(common)) or 'none'}.",
    ]
    for row in report.all_rows:
        special = "; ".join(text for text in row.assumptions if text not in common)
        if special:
            lines.append(f"- {row.title}: {special}.")
    lines += ["", "## How to read the numbers", ""]
    lines += [*(f"- {note}" for note in report.notes), *_charged(report)]
    if report.leaves:
        lines += ["", "## What also leaves, without noise", "", *(f"- {line}" for line in report.leaves)]
    if report.with_secure_keys:
        lines += [
            "",
            "## What the same run would give with secure keys",
            "",
            *_tables(report.with_secure_keys, report.secure_aggregation),
        ]
    return "\n".join(lines) + "\n" + ("" if report.samples is None else report.samples.to_markdown())
