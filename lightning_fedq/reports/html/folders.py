"""Reader of run folders for the page of `fedq report`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fedq.privacy.report import PrivacyReport
from lightning_fedq.privacy.report_file import OtherVersionError, from_json
from lightning_fedq.reports.runs import Row, read_rows

_NO_RUN = "Give the folder of a finished run with the RunFolder callback, such as runs/digits_private."


@dataclass(frozen=True)
class Run:
    """Contents of the folder of a finished run.

    Args:
        name: Name of the run on the page.
        rows: Rows of `metrics.csv`, one per round.
        summary: Contents of `summary.json`.
        privacy: Report of `privacy.json`. None if another version of this package wrote it.
        note: Advice if `privacy` is None, otherwise "".
        config: Resolved configuration as YAML, or "" if the folder has none.
    """

    name: str
    rows: list[Row]
    summary: Mapping[str, Any]
    privacy: PrivacyReport | None
    note: str
    config: str

    def column(self, name: str) -> list[tuple[float, float]]:
        """Return (round, value) pairs of a column, without rounds in which the value is missing or NaN."""
        return [(row["round"], row[name]) for row in self.rows if name in row and row[name] == row[name]]


def read(folder: Path, name: str) -> Run:
    """Read a run folder.

    Raises:
        ValueError: If it is not the folder of a finished run. The message has the missing file.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. {_NO_RUN}")
    for file in ("metrics.csv", "summary.json", "privacy.json"):
        if not (folder / file).is_file():
            raise ValueError(f"There is no {file} in {folder}. {_NO_RUN}")
    privacy, note = None, ""
    try:
        privacy = from_json((folder / "privacy.json").read_text())
    except OtherVersionError as error:
        note = str(error)
    config = folder / "config.yaml"
    return Run(
        name,
        read_rows(folder / "metrics.csv"),
        json.loads((folder / "summary.json").read_text()),
        privacy,
        note,
        config.read_text() if config.is_file() else "",
    )
