"""The table of an experiment, on disk after every row, so that a run that was stopped can be taken up again.

`settings.json` holds what all rows have in common and is written first; `table.csv` grows row by row, each
time whole and moved into place. A resumed experiment keeps the rows that it finds there under the same
settings and computes the rest.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fedq.commands.compare import print_table
from lightning_fedq.reports import fresh_folder, write_rows, write_summary

Row = dict[str, Any]
CURVE = "_by_round"
"""Columns with this ending hold one number a round, separated by blanks; they are not printed."""


class Rows:
    """Rows of one experiment.

    Args:
        out: Folder. Without `resume`, `out-2`, `out-3`, ... if something is there already.
        settings: What all rows have in common, in plain values.
        resume: Keep the rows that are there.

    Attributes:
        folder: Where everything is written.
        rows: The rows asked for so far, in this order.

    Raises:
        ValueError: If `resume` finds rows of other settings.
    """

    def __init__(self, out: str, settings: Mapping[str, Any], resume: bool) -> None:
        self.folder = Path(out) if resume else fresh_folder(Path(out))
        self.rows: list[Row] = []
        self._settings, self._found = dict(settings), list[Row]()
        file = self.folder / "settings.json"
        if resume and file.exists():
            _check_settings(self.folder, json.loads(file.read_text()), json.loads(json.dumps(self._settings)))
            if (self.folder / "table.csv").exists():
                self._found = _read(self.folder / "table.csv")
        write_summary(file, self._settings)

    def add(self, key: Mapping[str, Any], compute: Callable[[], Mapping[str, Any]]) -> Row:
        """Take the row of `key` from the disk, or compute and write it.

        Args:
            key: Columns that tell this row from all others.
            compute: Makes the other columns.

        Returns:
            All columns.
        """
        words = {name: str(value) for name, value in key.items()}
        row = next(
            (r for r in self._found if words.items() <= {n: str(v) for n, v in r.items()}.items()), None
        )
        if row is None:
            row = {**key, **compute()}
        else:
            self._found.remove(row)
        self.rows.append(row)
        write_rows(self.folder / "table.csv", [*self.rows, *self._found])
        shown = {n: v for n, v in row.items() if not n.endswith(CURVE) and v == v}
        print(
            ", ".join(f"{n} {v:.4g}" if isinstance(v, float) else str(v) for n, v in shown.items()),
            flush=True,
        )
        return row

    def finish(self, verdicts: Sequence[str], title: str) -> dict[str, Any]:
        """Write `summary.json`, print the table and the verdicts, return the summary."""
        summary = {"settings": self._settings, "verdicts": list(verdicts), "table": self.rows}
        write_summary(self.folder / "summary.json", summary)
        print_table([{n: v for n, v in row.items() if not n.endswith(CURVE)} for row in self.rows], title)
        for line in verdicts:
            print(line)
        print(f"{self.folder / 'table.csv'}\n{self.folder / 'summary.json'}")
        return summary


def _check_settings(folder: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    names = sorted(n for n in {*there, *here} if there.get(n) != here.get(n))
    if names:
        words = ", ".join(f"{name} = {there.get(name)} (here {here.get(name)})" for name in names)
        raise ValueError(f"{folder} holds rows of other settings: {words}; use those, or another out")


def _read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [{name: _value(name, text) for name, text in row.items()} for row in csv.DictReader(file)]


def _value(name: str, text: str) -> Any:
    """The number or the word that was written."""
    if name.endswith(CURVE):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def curve(values: Sequence[float]) -> str:
    """One number a round, as the text of a cell."""
    return " ".join(f"{value:.6g}" for value in values)


def curve_values(cell: str) -> list[float]:
    """What `curve` wrote."""
    return [float(word) for word in cell.split()]
