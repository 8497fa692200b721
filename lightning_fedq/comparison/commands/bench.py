"""`fedq bench`: every mechanism at equal epsilon on equal tasks, yours included."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lightning_fedq.commands.plan import candidates
from lightning_fedq.comparison.bench import markdown
from lightning_fedq.comparison.bench.cells import (
    ABOUT_WORTHLESS,
    WORTHLESS,
    Row,
    grouped,
    read,
    rerun,
    run_all,
    score_of,
    without_privacy,
    word_of,
)
from lightning_fedq.comparison.bench.results_page import page
from lightning_fedq.comparison.bench.tasks import DELTA, Task, tasks as every_task
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.mechanisms.registry import mechanism_class
from lightning_fedq.privacy.target import adversary_named
from lightning_fedq.reports.runs import write_atomically

ADVERSARIES = ("secagg_server", "outsider", "server")
EPSILONS = (1.0, 2.0, 4.0, 8.0)
QUICK_TASKS, QUICK_EPSILONS, QUICK_ADVERSARIES = ("mean-unit-1024", "digits"), (2.0, 8.0), ("secagg_server",)
REFERENCE = "reference.csv"


def main(
    mine: Annotated[Sequence[str], "MECHANISM"] = (),
    *,
    tasks: Annotated[Sequence[str], "TASK"] = (),
    adversaries: Annotated[Sequence[str], "ADVERSARY"] = (),
    epsilons: Annotated[Sequence[float], "EPSILON"] = (),
    seeds: int = 3,
    data: Path | None = None,
    out: Path = Path("bench"),
    quick: bool = False,
    list_: bool = False,
    tables: Annotated[Path | None, "PAGE"] = None,
    check: Annotated[int | None, "N"] = None,
) -> int:
    """Compare mechanisms at equal epsilon: calibrated by PrivacyTarget, range and learning rate
    tuned by one rule. With names or class paths only these run, and stand among the reference
    results.

    Args:
        mine: Mechanisms, by name or class path.
        tasks: Tasks (default: all).
        adversaries: Adversaries (default: secagg_server outsider server).
        epsilons: Targets (default: 1 2 4 8).
        seeds: Runs of a cell.
        data: Folder with MNIST and cifar10, for the tasks on images.
        out: Folder of table, page and JSON.
        quick: Two tasks, epsilon 2 and 8, one adversary and seed. Range and rate are not searched for where
            the reference results have them.
        list_: List tasks and mechanisms.
        tables: Markdown page into a marked part of which the reference results and those of --out
            are written, and nothing is run; --tasks, --adversaries and --epsilons choose.
        check: Cells of the reference results to run again, and to compare.
    """
    console, known, table = Console(), every_task(data), out / "bench.csv"
    if check is not None:
        return _check(check, known, console)
    if tables is not None:
        own = read(table) if table.exists() else []
        there = {row.cell.group for row in own}
        rows = [*own, *(row for row in reference() if row.cell.group not in there)]
        asked = [
            row
            for row in rows
            if (not tasks or row.cell.task in tasks)
            and (not adversaries or row.cell.adversary in adversaries)
            and (not epsilons or row.cell.epsilon in epsilons)
        ]
        console.print(tables, markdown.write(tables, asked, known), sep="\n")
        return 0
    chosen = _chosen(tasks or (QUICK_TASKS if quick else tuple(known)), known)
    for path in mine:
        mechanism_class(path)
    names = _names(mine, chosen[0].dim)
    if list_:
        console.print("tasks: " + ", ".join(known), "mechanisms: " + ", ".join(names), sep="\n")
        return 0
    against = [adversary_named(name) for name in adversaries or (QUICK_ADVERSARIES if quick else ADVERSARIES)]
    epsilons = epsilons or (QUICK_EPSILONS if quick else EPSILONS)
    wanted = [
        (task, name, adversary, float(epsilon))
        for task in chosen
        for adversary in against
        for epsilon in epsilons
        for name in names
    ]
    if not mine:
        trained = [task for task in chosen if task.rates != (None,)]
        wanted = [*((task, "FedAvg", Adversary.OUTSIDER, math.inf) for task in trained), *wanted]
    runs = range(1 if quick else seeds)
    tuned = {row.cell.group: row.tuning for row in reference() if row.result is not None} if quick else {}
    started = time.monotonic()

    def progress(number: int, count: int, rows: Sequence[Row]) -> None:
        if rows:
            left = (time.monotonic() - started) / number * (count - number)
            cell = rows[0].cell
            score = "not possible" if rows[0].result is None else f"{rows[0].result.score:.3g}"
            console.print(
                f"{number}/{count} {cell.task}, {cell.mechanism}, {cell.adversary}, "
                f"epsilon {cell.epsilon:g}: {score}; about {left / 60:.0f} min left",
                highlight=False,
            )

    rows = run_all(table, wanted, runs, progress, tuned)
    groups = {(task.name, name, adversary.name.lower(), epsilon) for task, name, adversary, epsilon in wanted}
    new = [row for row in rows if row.cell.group in groups]
    others = [row for row in reference() if row.cell.group not in groups] if mine else []
    shown, marked = [*new, *(row for row in others if _among(row, wanted))], set(names) if mine else set()
    show(console, shown, known, marked)
    write_atomically(out / "bench.json", json.dumps(as_json(shown), indent=1) + "\n")
    write_atomically(out / "bench.html", page(shown, known, marked, quick))
    console.print(*(out / name for name in ("bench.html", "bench.csv", "bench.json")), sep="\n")
    return 0


def reference() -> list[Row]:
    """Results that ship with the package."""
    with_package = files("lightning_fedq.comparison.bench") / REFERENCE
    return read(Path(str(with_package)))


def _names(mine: Sequence[str], dim: int) -> list[str]:
    """Rows to run: those of the named mechanisms, or all."""
    every = candidates(dim)
    if not mine:
        return list(every)
    kinds = {mechanism_class(path) for path in mine}
    found = [name for name, mechanism in every.items() if type(mechanism) in kinds]
    if not found:
        raise ValueError(
            f"no target can set {', '.join(mine)}; the bench compares mechanisms that say `at_level` and "
            "stand in `fedq plan` (declare an entry point, see docs/writing_a_mechanism.md)"
        )
    return found


def _chosen(names: Sequence[str], known: Mapping[str, Task]) -> list[Task]:
    if missing := [name for name in names if name not in known]:
        more = "" if "mnist-linear" in known else "; those on images need --data FOLDER"
        raise ValueError(f"there is no task {', '.join(missing)}; there are {', '.join(known)}{more}")
    return [known[name] for name in names]


def _among(row: Row, wanted: Sequence[tuple[Task, str, Adversary, float]]) -> bool:
    cell = row.cell
    return any(
        cell.task == task.name
        and ((cell.adversary, cell.epsilon) == (adversary.name.lower(), epsilon) or cell.epsilon == math.inf)
        for task, _, adversary, epsilon in wanted
    )


def show(console: Console, rows: Sequence[Row], known: Mapping[str, Task], mine: set[str]) -> None:
    """Print one table for every task and adversary."""
    groups = grouped(rows)
    for task, adversary in dict.fromkeys((key[0], key[2]) for key in groups):
        epsilons = sorted({key[3] for key in groups if (key[0], key[2]) == (task, adversary)})
        about = known.get(task)
        unit = "score" if about is None else about.unit
        title = f"{task}, against {adversary}: {unit}{without_privacy(rows, task)}"
        table = Table(title=title, title_justify="left", box=SIMPLE)
        table.add_column("mechanism", overflow="fold")
        table.add_column("bits", justify="right")
        for epsilon in epsilons:
            table.add_column(f"ε {epsilon:g}", justify="right")
        lines = []
        for name in dict.fromkeys(key[1] for key in groups if (key[0], key[2]) == (task, adversary)):
            scores = [score_of(groups.get((task, name, adversary, e), [])) for e in epsilons]
            if not any(scores):
                continue
            bits = [
                row.result.bits
                for e in epsilons
                for row in groups.get((task, name, adversary, e), [])
                if row.result is not None
            ]
            cells = [word_of(score, about) for score in scores]
            last = next(s[0] for s in reversed(scores) if s is not None)
            order = -last if about is None or about.better == "larger" else last
            title = f"[bold]{name}[/bold]" if name in mine else name
            lines.append((order, [title, f"{bits[-1]:.2g}" if bits[-1] < 10 else f"{bits[-1]:.1f}", *cells]))
        for _, line in sorted(lines, key=lambda pair: pair[0]):
            table.add_row(*line)
        console.print(table)
        if any(WORTHLESS in cell for _, line in lines for cell in line[2:]):
            console.print(ABOUT_WORTHLESS)
        for name, reason in _refused(rows, task, adversary):
            if name in mine:
                console.print(f"{name} is not in this table: {reason}", highlight=False, markup=False)


def _refused(rows: Sequence[Row], task: str, adversary: str) -> list[tuple[str, str]]:
    """Mechanisms without any result in a table, and their first reason."""
    here = [row for row in rows if (row.cell.task, row.cell.adversary) == (task, adversary)]
    there = {row.cell.mechanism for row in here if row.result is not None}
    reasons: dict[str, str] = {}
    for row in here:
        reasons.setdefault(row.cell.mechanism, row.reason)
    return [(name, reason) for name, reason in reasons.items() if name not in there]


def as_json(rows: Sequence[Row]) -> dict[str, object]:
    """Rows with what another machine needs to check them."""
    return {"delta": DELTA, "command": "fedq bench", "rows": [asdict(row) for row in rows]}


def _check(count: int, known: Mapping[str, Task], console: Console) -> int:
    """Run some reference cells again. They are met if every figure but the time is the same."""
    rows = [row for row in reference() if row.result is not None and row.cell.task in known]
    drawn = rows[:: max(1, len(rows) // count)][:count]
    wrong = 0
    for row in drawn:
        again = rerun(row, known[row.cell.task]).result
        assert again is not None and row.result is not None
        same = (again.score, again.bits) == (row.result.score, row.result.bits)
        wrong += not same
        cell = row.cell
        console.print(
            f"{cell.task}, {cell.mechanism}, {cell.adversary}, epsilon {cell.epsilon:g}, seed {cell.seed}: "
            + ("met" if same else f"{again.score!r} for {row.result.score!r} ({row.versions})"),
            highlight=False,
        )
    console.print(f"{len(drawn) - wrong} of {len(drawn)} cells are met bit for bit", highlight=False)
    return int(wrong > 0)
