"""Cells of a comparison, their file, and the results that ship.

One rule for all: a mechanism is calibrated to the target, its range and learning rate are those with the best
validation score in one run each with a seed of their own, and what is reported are runs with other seeds.
A table on disk grows by a row a run, runs of the search included, so that it goes on where it was stopped.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from statistics import mean, stdev

import torch

from lightning_fedq import __version__
from lightning_fedq.comparison.bench.tasks import Result, Task, Tuning

TUNING_SEED = 1000


@dataclass(frozen=True)
class Cell:
    """One run of the table.

    Args:
        task: Name of the task.
        mechanism: Name of the mechanism's row.
        adversary: Name of the `Adversary`, in lower case.
        epsilon: Target over the run.
        seed: Seed of the run.
    """

    task: str
    mechanism: str
    adversary: str
    epsilon: float
    seed: int

    @property
    def group(self) -> tuple[str, str, str, float]:
        """Task, mechanism, adversary and epsilon."""
        return self.task, self.mechanism, self.adversary, self.epsilon


@dataclass(frozen=True)
class Row:
    """A cell and what came of it.

    Args:
        cell: The cell.
        result: Its result; None where the target can't be met.
        tuning: Range and rate that were chosen.
        reason: Reason why there is no result.
        versions: Versions of this package and of torch.
    """

    cell: Cell
    result: Result | None
    tuning: Tuning = Tuning()  # noqa: RUF009 (frozen)
    reason: str = ""
    versions: str = f"{__version__}, torch {torch.__version__.partition('+')[0]}"


_COLUMNS = (
    *(field.name for field in fields(Cell)),
    *(field.name for field in fields(Result)),
    *(field.name for field in fields(Tuning)),
    *("reason", "versions"),
)
_HEAD = ",".join(_COLUMNS) + "\n"
_NEW = {"down", "spent"}
"""Columns that tables before 0.3.0 lack, as the one that ships."""


def score_of(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Mean and standard deviation over seeds, None without a result. Of one seed the latter is NaN."""
    scores = [row.result.score for row in rows if row.result is not None]
    if not scores:
        return None
    known = len(scores) > 1 and all(map(math.isfinite, scores))
    return mean(scores), stdev(scores) if known else math.nan


WORTHLESS = "*"
"""Mark of an estimate that is worse than none."""
ABOUT_WORTHLESS = f"{WORTHLESS} worse than the estimate 0, whose error is 1"


def word_of(score: tuple[float, float] | None, about: Task | None = None) -> str:
    """A mean and its standard deviation in print, with a mark where an estimate is worse than none.

    Args:
        score: Both, as `score_of` gives them.
        about: The task, where it is known.
    """
    if score is None:
        return "-"
    value, spread = score
    text = f"{value:.3f}" if 0.001 <= value <= 10 else f"{value:.2g}"
    text = text if math.isnan(spread) else f"{text} ± {spread:.1g}"
    is_worthless = about is not None and about.better == "smaller" and value >= 1.0
    return f"{text} {WORTHLESS}" if is_worthless else text


def reference() -> list[Row]:
    """Results that ship with the package."""
    return read(Path(str(files("lightning_fedq.comparison.bench") / "reference.csv")))


def read(path: Path) -> list[Row]:
    """Rows of a table. A last line that was cut off on its way to the disk is none.

    Raises:
        ValueError: If the file is no table of a comparison.
    """
    text = path.read_text(errors="replace")
    if _HEAD.startswith(text):  # stopped before there was a row
        return []
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    try:
        if set(_COLUMNS) - _NEW <= set(reader.fieldnames or ()):
            return [_row(line) for line in reader]
    except (ValueError, TypeError):
        pass
    raise ValueError(f"{path} is no table of `fedq compare`; name another folder with --out, or delete it")


def _row(line: dict[str, str]) -> Row:
    cell = Cell(line["task"], line["mechanism"], line["adversary"], float(line["epsilon"]), int(line["seed"]))
    if line["reason"]:
        return Row(cell, None, reason=line["reason"], versions=line["versions"])
    result = Result(
        score=float(line["score"]),
        validation=float(line["validation"]),
        bits=float(line["bits"]),
        all_bits=float(line["all_bits"]),
        planned=float(line["planned"]) if line["planned"] else None,
        seen=float(line["seen"]),
        setting=line["setting"],
        seconds=float(line["seconds"]),
        down=float(line["down"]) if line.get("down") else None,
        spent=float(line["spent"]) if line.get("spent") else None,
    )
    tuning = Tuning(float(line["range"]), float(line["rate"]) if line["rate"] else None)
    return Row(cell, result, tuning, versions=line["versions"])


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a table, which is begun if need be. Where the disk is full, the table stays as it was.

    Raises:
        OSError: If a row can't be written.
        ValueError: If the file is another table, or one of an earlier version.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    there = path.read_text(errors="replace") if path.exists() else ""
    if not (there.startswith(_HEAD) or _HEAD.startswith(there)):
        raise ValueError(
            f"{path} has other columns than tables of this version; name another folder with --out"
        )
    whole = len(there[: there.rfind("\n") + 1].encode())
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    for row in rows:
        result = {} if row.result is None else asdict(row.result)
        tuning = {} if row.result is None else asdict(row.tuning)
        rest = {"reason": row.reason, "versions": row.versions}
        writer.writerow({**asdict(row.cell), **result, **tuning, **rest})
    with path.open("ab", buffering=0) as file:
        file.truncate(whole)
        try:
            file.write((text.getvalue() if whole else _HEAD + text.getvalue()).encode())
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(whole)
            error.filename = str(path)
            raise
