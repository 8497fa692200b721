"""Cells of the bench: which are wanted, which are there, and how one is filled.

One rule for all: a mechanism is calibrated to the target, its range and learning rate are those with the best
validation score in one run each with a seed of their own, and what is reported are runs with other seeds.
Tuning is not charged. A table on disk grows by a row a run, so that a bench goes on where it was stopped.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean, stdev

import torch

from lightning_fedq import __version__
from lightning_fedq.comparison.bench.tasks import Result, Task, Tuning
from lightning_fedq.mechanisms.interface import Adversary

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


Groups = dict[tuple[str, str, str, float], list[Row]]
"""Rows by task, mechanism, adversary and epsilon."""

_COLUMNS = (
    *(field.name for field in fields(Cell)),
    *(field.name for field in fields(Result)),
    *(field.name for field in fields(Tuning)),
    *("reason", "versions"),
)


def grouped(rows: Iterable[Row]) -> Groups:
    """Rows by the group of their cell, in their order, FedAvg's left out."""
    found: Groups = {}
    for row in rows:
        if row.cell.epsilon < math.inf:
            found.setdefault(row.cell.group, []).append(row)
    return found


def without_privacy(rows: Iterable[Row], task: str) -> str:
    """Words on what FedAvg reaches in a task, none where it was not run."""
    cells = [row for row in rows if row.cell.task == task and row.cell.epsilon == math.inf]
    score = score_of(cells)
    return "" if score is None else f"; {word_of(score)} without privacy, by FedAvg"


def score_of(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Mean and standard deviation over seeds, None without a result. Of one seed the latter is NaN."""
    scores = [row.result.score for row in rows if row.result is not None]
    if not scores:
        return None
    return mean(scores), stdev(scores) if len(scores) > 1 else math.nan


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


def read(path: Path) -> list[Row]:
    """Rows of a table.

    Raises:
        ValueError: If the file is no table of the bench.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != _COLUMNS:
            raise ValueError(f"{path} is no table of `fedq bench`; name another file, or delete it")
        return [_row(line) for line in reader]


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
    )
    tuning = Tuning(float(line["range"]), float(line["rate"]) if line["rate"] else None)
    return Row(cell, result, tuning, versions=line["versions"])


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a table, which is begun if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            result = {} if row.result is None else asdict(row.result)
            tuning = {} if row.result is None else asdict(row.tuning)
            rest = {"reason": row.reason, "versions": row.versions}
            writer.writerow({**asdict(row.cell), **result, **tuning, **rest})


def fill(
    task: Task,
    mechanism: str,
    adversary: Adversary,
    epsilon: float,
    seeds: Sequence[int],
    tuned: Tuning | None = None,
) -> Iterator[Row]:
    """Tune a mechanism for a task and target, unless it is tuned already, and run it with every seed."""
    cells = [Cell(task.name, mechanism, adversary.name.lower(), epsilon, seed) for seed in seeds]
    try:
        option, target = task.option(mechanism, epsilon, adversary)
    except (ValueError, TypeError) as refused:
        yield from (Row(cell, None, reason=" ".join(str(refused).split())) for cell in cells)
        return
    assert option.mechanism is not None

    def tried(tuning: Tuning) -> float:
        score = task.run(option, target, tuning, TUNING_SEED).validation
        score = -math.inf if math.isnan(score) else score
        return score if task.better == "larger" else -score

    every = task.tunings(option.mechanism) if tuned is None else [tuned]
    best = every[0] if len(every) == 1 else max(every, key=tried)
    for cell in cells:
        yield Row(cell, task.run(option, target, best, cell.seed), best)


def rerun(row: Row, task: Task) -> Row:
    """Run one cell again, with the tuning that it had."""
    cell, adversary = row.cell, Adversary[row.cell.adversary.upper()]
    option, target = task.option(cell.mechanism, cell.epsilon, adversary)
    return Row(cell, task.run(option, target, row.tuning, cell.seed), row.tuning)


def run_all(
    path: Path,
    wanted: Sequence[tuple[Task, str, Adversary, float]],
    seeds: Sequence[int],
    progress: Callable[[int, int, Sequence[Row]], None],
    tuned: Mapping[tuple[str, str, str, float], Tuning],
) -> list[Row]:
    """Fill a table, the cells that it has already left out.

    Args:
        path: The table.
        wanted: Task, mechanism, adversary and epsilon of every group of cells.
        seeds: Seeds of a group.
        progress: Called after each group with its number, how many there are, and its rows.
        tuned: Ranges and rates of groups that need no tuning.

    Returns:
        Every row of the table.
    """
    rows = read(path) if path.exists() else []
    there = {row.cell for row in rows}
    for number, (task, mechanism, adversary, epsilon) in enumerate(wanted):
        missing = [
            seed
            for seed in seeds
            if Cell(task.name, mechanism, adversary.name.lower(), epsilon, seed) not in there
        ]
        known = tuned.get((task.name, mechanism, adversary.name.lower(), epsilon))
        found = list(fill(task, mechanism, adversary, epsilon, missing, known)) if missing else []
        append(path, found)
        rows += found
        progress(number + 1, len(wanted), found)
    return rows
