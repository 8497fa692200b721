"""The page of a privacy report: one table for a reader, one to check, assumptions and notes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fedq.privacy.report import PrivacyReport, Row


def format_epsilon(value: float | None) -> str:
    """Three digits, rounded up so that a claim never shrinks in print; an infinite one is "∞"."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "∞"
    if value == 0.0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit - 1e-9) * unit:.3g}"


def _tables(rows: tuple[Row, ...]) -> list[str]:
    lines = ["| Who | Verdict | epsilon over the run | What it means |", "| --- | --- | --- | --- |"]
    for row in rows:
        means = row.words + (f" Better: {row.advice}." if row.advice else "")
        lines.append(f"| {row.view} | **{row.verdict}** | {format_epsilon(row.epsilon_run)} | {means} |")
    lines += [
        "",
        "| Adversary | unit | one unit in a round (pure) | message of a round | client's run | delta "
        "| infinite mass | method |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        numbers = (row.epsilon_unit, row.epsilon_round, row.epsilon_run)
        lines.append(
            f"| {row.adversary} | {row.unit} | {' | '.join(map(format_epsilon, numbers))} | {row.delta:g} "
            f"| {row.infinite_mass:.3g} | {row.method} |"
        )
    return lines


def _figures(report: PrivacyReport) -> list[str]:
    if not report.figures:
        return []
    lines = ["", "| Figure, and no guarantee | value |", "| --- | --- |"]
    return lines + [f"| {name} | {value} |" for name, value in report.figures]


def _charged(report: PrivacyReport) -> list[str]:
    """What every client has spent: the rows above are the worst of these."""
    if not report.charged:
        return []
    names = list(report.charged[0].epsilons)
    lines = ["", "## Who was charged how often", ""]
    if not report.secure_keys:
        lines += ["With the secure keys that this run did not have:", ""]
    lines += [
        f"| clients | rounds charged, at most | {' | '.join(names)} |",
        "| --- " * (len(names) + 2) + "|",
    ]
    for line in report.charged:
        epsilons = " | ".join(format_epsilon(line.epsilons[name]) for name in names)
        lines.append(f"| {line.clients} | {line.charges} | {epsilons} |")
    return [*lines, "", f"Epsilon of one client over the run, at delta {report.delta:g}."]


def markdown(report: PrivacyReport) -> str:
    """Render a report."""
    common = set.intersection(*(set(row.assumptions) for row in report.rows))
    lines = [
        "# What was protected, and from whom",
        "",
        f"{report.mechanism}: {report.dim} parameters, {report.cohort_size} of {report.num_clients} clients "
        f"a round, {report.rounds} rounds, delta {report.delta:g}, "
        f"{'secure' if report.secure_keys else 'reproducible'} keys, "
        f"secure aggregation {f'on: {report.protocol}' if report.secure_aggregation else 'off'}.",
        "",
        *_tables(report.rows),
        *_figures(report),
        "",
        "Assumptions:",
        "",
        f"- everywhere: {'; '.join(sorted(common)) or 'none'}.",
    ]
    for row in report.rows:
        special = "; ".join(text for text in row.assumptions if text not in common)
        lines.append(f"- {row.adversary} ({row.neighbours}){': ' if special else ''}{special}.")
    lines += ["", *(f"- {note}" for note in report.notes), *_charged(report)]
    if report.with_secure_keys:
        lines += [
            "",
            "## What the same run would give with secure keys",
            "",
            *_tables(report.with_secure_keys),
        ]
    return "\n".join(lines) + "\n"
