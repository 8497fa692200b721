"""The privacy report of a run as a file: `privacy.json`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

from lightning_fedq.functional.checks import from_plain
from lightning_fedq.mechanisms.interface import Adversary, Neighbours
from lightning_fedq.privacy.assumptions import kinds_of, with_terms
from lightning_fedq.privacy.document import caveat, headline
from lightning_fedq.privacy.report import PrivacyReport
from lightning_fedq.privacy.report_rows import report_rows
from lightning_fedq.privacy.row import Row

SCHEMA = "fedq-privacy/3"
"""First entry of the JSON. A file with another schema is refused."""


def to_json(report: PrivacyReport) -> str:
    """Return the report as JSON, with group and condition of each row.

    Infinite numbers are the string "inf".

    `rows` are the rows that hold. With keys from a seed they promise nothing, and `with_secure_keys` has the
    rows that secret keys would give.
    """
    plain = asdict(report)
    for line in report_rows(report):
        details = {"name": line.row.name, "group": line.group, "asked": line.asked, "when": line.when}
        for row in (*plain["rows"], *plain["with_secure_keys"], plain["secret"] or {}):
            if (row.get("adversary"), row.get("cohorts")) == (line.row.adversary, line.row.cohorts):
                row |= {**details, "epsilon": max(row["epsilon_run"], row["epsilon_any_two"])}
    sentences = {text for row in (*report.all_rows, *report.with_secure_keys) for text in row.assumptions}
    plain["kinds"] = {text: [kind.term for kind in kinds_of(text)] for text in sorted(sentences)}
    first = {"schema": SCHEMA, "headline": headline(report), "caveat": caveat(report)}
    return json.dumps(_plain({**first, **plain}), indent=2, ensure_ascii=False)


def _plain(value: object) -> object:
    """Return a value with tuples as lists and infinite numbers as the string "inf"."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return "inf" if value == math.inf else value


def _with_kinds(report: PrivacyReport, terms: dict[str, tuple[str, ...]]) -> PrivacyReport:
    """Return a report from a file with the kinds of its assumptions, whose terms the file has by sentence."""

    def named(row: Row) -> Row:
        return replace(row, assumptions=tuple(with_terms(text, terms[text]) for text in row.assumptions))

    secret = None if report.secret is None else named(report.secret)
    rows, secure = (tuple(map(named, rows)) for rows in (report.rows, report.with_secure_keys))
    return replace(report, rows=rows, with_secure_keys=secure, secret=secret)


class OtherVersionError(ValueError):
    """Error for a document that another version of this package wrote."""


def from_json(text: str) -> PrivacyReport:
    """Return the report of a `privacy.json`.

    The file may come from any source. Every value has its type, and every text can be printed.

    Raises:
        OtherVersionError: If the file has rows of another version.
        ValueError: If the file is not one that `to_json` writes.
    """
    try:
        fields = json.loads(text)
        if isinstance(fields, dict) and "rows" in fields and fields.get("schema") != SCHEMA:
            raise OtherVersionError(
                f"privacy.json is no {SCHEMA}, but of another version of this package. Compute it again: "
                "`fedq privacy CONFIG`, or `fedq privacy CKPT` with a checkpoint of the run"
            )
        report: PrivacyReport = from_plain(PrivacyReport, fields)
        terms = from_plain(dict[str, tuple[str, ...]], fields.get("kinds"), "kinds")
        stated = {text for row in (*report.all_rows, *report.with_secure_keys) for text in row.assumptions}
        if unknown := stated - terms.keys():
            raise ValueError(f"kinds has no entry for {unknown.pop()!r:.60}")
        report = _with_kinds(report, terms)
        names = sorted(Adversary.__members__)
        for rows in (report.rows, report.with_secure_keys or report.rows):
            if sorted(row.adversary for row in rows) != names:
                raise ValueError("there must be one row for each adversary")
        if {row.neighbours for row in report.readable_rows} - {kind.value for kind in Neighbours}:
            raise ValueError("neighbours has an unknown value")
        if report.asked is not None and report.asked.adversary not in {row.name for row in report.all_rows}:
            raise ValueError("the target is about a row that is missing")
    except OtherVersionError:
        raise
    except ValueError as error:
        raise ValueError(f"privacy.json can't be read: {error}") from None
    return report
