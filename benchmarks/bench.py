"""Tables and a picture of a page from results of mechanisms at equal epsilon, and the reference checked.

    python benchmarks/bench.py benchmarks/results/mechanisms.md --tasks mean-unit-1024 digits mnist-linear
    python benchmarks/bench.py --check 5

The first writes the reference, and tables that are named (of `fedq compare` or `mean_estimation.py`), into
the marked part of a page, and runs nothing. The second estimates some means again: are they met bit for bit?
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mean_estimation import (
    ABOUT_WORTHLESS,
    TASKS,
    WORTHLESS,
    Cell,
    Result,
    Row,
    read,
    reference,
    rows_of,
    score_of,
    word_of,
)

from lightning_fedq.commands.resolver import candidates
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.planning import GOOD, NEARLY
from lightning_fedq.reports.plot_style import legend, panels, series
from lightning_fedq.reports.runs import save_figure, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Groups = dict[tuple[str, str, str, float], list[Row]]
"""Rows by task, mechanism, adversary and epsilon."""
BEGIN, END = "<!-- made by `benchmarks/bench.py` -->", "<!-- end of the bench's tables -->"
_DRAWN, _LISTED = 5, 10
"""Mechanisms in a panel and in a table, the best ones at the largest epsilon."""
_POINTS = 0.02
"""Accuracy that one gives for fewer bits."""
_ON_LINE: dict[str, Any] = {"ha": "left", "va": "top", "fontsize": 8, "color": "0.5"}


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


class Training(NamedTuple):
    """Sizes of a training, for the heading of its table."""

    clients: int
    dim: int
    rounds: int
    unit: str = "test accuracy"
    better: str = "larger"


KNOWN: dict[str, Any] = {
    **TASKS,
    "digits": Training(479, 4060, 20),
    "text-lora": Training(1000, 5120, 15),
    "mnist-linear": Training(1000, 7850, 30),
    "mnist-cnn": Training(1000, 9098, 10),
    "cifar10-cnn": Training(1000, 11690, 10),
    "mnist-linear-10k": Training(10_000, 7850, 5),
}


def read_table(path: Path) -> list[Row]:
    """Rows of `mean_estimation.py`, or of the `table.csv` of `fedq compare`."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    if not lines or "bits_up" not in lines[0]:
        return read(path)
    found = []
    for line in lines:
        cell = Cell(
            line["task"], line["mechanism"], line["adversary"], float(line["epsilon"]), int(line["seed"])
        )
        if not line["score"]:
            found.append(Row(cell, None, reason=line.get("reason", "")))
            continue
        score, up, keys = (float(line[name]) for name in ("score", "bits_up", "bits_keys"))
        seen, seconds = float(line["R"] or math.nan), float(line["seconds"])
        found.append(Row(cell, Result(score, score, up, up + keys, None, seen, line["setting"], seconds)))
    return found


def rerun(row: Row, task: Any) -> Result | None:
    """Estimate the mean of one cell again, with the range that it had."""
    cell, who = row.cell, Adversary[row.cell.adversary.upper()]
    plain = cell.epsilon == math.inf
    mechanism = FedAvg() if plain else candidates(task.dim)[cell.mechanism]
    [again] = rows_of(task, cell.mechanism, mechanism, who, cell.epsilon, [cell.seed], row.range)
    return again.result


def ranked(groups: Groups, task: str, adversary: str, smaller: bool) -> list[tuple[str, list[Row]]]:
    """Mechanisms that have a result, with all their rows. Best at the largest epsilon first, then those
    without a result there."""
    found: dict[str, list[Row]] = {}
    for (of, name, against, _), rows in groups.items():
        if (of, against) == (task, adversary):
            found.setdefault(name, []).extend(row for row in rows if row.result is not None)

    def place(rows: list[Row]) -> tuple[float, float]:
        largest = max(row.cell.epsilon for row in rows)
        score = score_of([row for row in rows if row.cell.epsilon == largest])
        assert score is not None
        return -largest, score[0] if smaller else -score[0]

    for rows in found.values():
        rows.sort(key=lambda row: row.cell.epsilon)  # the last one is of the largest
    return sorted(((name, rows) for name, rows in found.items() if rows), key=lambda pair: place(pair[1]))


def _at(rows: Sequence[Row], epsilon: float) -> tuple[float, float] | None:
    return score_of([row for row in rows if row.cell.epsilon == epsilon])


def _panels(rows: Sequence[Row], known: Mapping[str, Any]) -> list[tuple[str, str, list[float]]]:
    """Task, adversary and epsilons of every table. Tasks that are not known are left out."""
    groups = [key for key in grouped(rows) if key[0] in known]
    pairs = dict.fromkeys((key[0], key[2]) for key in groups)
    return [(*pair, sorted({key[3] for key in groups if (key[0], key[2]) == pair})) for pair in pairs]


def tables(rows: Sequence[Row], known: Mapping[str, Any]) -> str:
    """One Markdown table for every task and adversary.

    Args:
        rows: Rows of the bench.
        known: Tasks by name.
    """
    lines: list[str] = []
    for task, adversary, epsilons in _panels(rows, known):
        about = known[task]
        found = ranked(grouped(rows), task, adversary, about.better == "smaller")
        if not found:
            continue
        seeds = len({row.cell.seed for _, of in found for row in of})
        lines += [
            f"### {task}, against {Adversary[adversary.upper()].value}",
            "",
            f"{about.clients:,} clients, {about.dim:,} parameters, rounds: {about.rounds}, seeds: {seeds}; "
            f"{about.unit}, {about.better} is better{without_privacy(rows, task)}.",
            "",
            f"| mechanism | bits a parameter at ε {epsilons[-1]:g} | "
            + " | ".join(f"ε {e:g}" for e in epsilons)
            + " |",
            "| --- | ---: |" + " ---: |" * len(epsilons),
        ]
        for name, of in found[:_LISTED]:
            bits = [row.result.bits for row in of if row.cell.epsilon == epsilons[-1] and row.result]
            cells = [word_of(_at(of, epsilon), about) for epsilon in epsilons]
            lines.append(f"| {name} | {f'{bits[-1]:.2g}' if bits else '-'} | " + " | ".join(cells) + " |")
        lines.append("")
        if any(WORTHLESS in line for line in lines[-len(found[:_LISTED]) - 1 :]):
            lines += [ABOUT_WORTHLESS.replace(WORTHLESS, f"\\{WORTHLESS}") + ".", ""]
        if rest := [name for name, _ in found[_LISTED:]]:
            lines += [f"Behind these: {', '.join(rest)}.", ""]
    return "\n".join(lines)


def _drawn(found: Sequence[tuple[str, list[Row]]], smaller: bool) -> list[tuple[str, list[Row]]]:
    """The best, and with them the fewest bits among those about as good, which `fedq plan` advises."""

    def last(of: Sequence[Row]) -> float:
        score = _at(of, max(row.cell.epsilon for row in found[0][1]))
        return (math.inf if smaller else -math.inf) if score is None else score[0]

    best = last(found[0][1])
    good = [
        each
        for each in found
        if (last(each[1]) <= max(GOOD, NEARLY * best) if smaller else last(each[1]) >= best - _POINTS)
    ]
    cheap = min(good, key=lambda each: [row.result.bits for row in each[1] if row.result is not None][-1])
    return [*found[:_DRAWN]] if cheap in found[:_DRAWN] else [*found[: _DRAWN - 1], cheap]


def picture(rows: Sequence[Row], known: Mapping[str, Any]) -> Figure:
    """One panel for every task and adversary: the score by epsilon of the best mechanisms."""
    groups = grouped(rows)
    shown = [
        (task, adversary, _drawn(found, known[task].better == "smaller"))
        for task, adversary, _ in _panels(rows, known)
        if (found := ranked(groups, task, adversary, known[task].better == "smaller"))
    ]
    figure, axes = panels(len(shown), height=4.0)
    for axis, (task, adversary, found) in zip(axes, shown, strict=True):
        for place, (name, of) in enumerate(found):
            epsilons = sorted({row.cell.epsilon for row in of})
            scores = [score[0] for e in epsilons if (score := _at(of, e)) is not None]
            bits = [row.result.bits for row in of if row.result is not None][-1]
            axis.plot(epsilons, scores, label=f"{name}, {bits:.2g} bits", **series(place))
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        if known[task].better == "smaller":
            axis.set_yscale("log")
            axis.axhline(1.0, color="0.5", lw=0.9, ls=":")
            axis.text(0.01, 1.0, "the estimate 0", transform=axis.get_yaxis_transform(), **_ON_LINE)
        axis.set(xlabel="epsilon of a client", ylabel=known[task].unit)
        legend(axis, f"{task},\nagainst {Adversary[adversary.upper()].value}")
    return figure


def write(path: Path, rows: Sequence[Row], known: Mapping[str, Any]) -> Path:
    """Renew the marked part of a page, or begin one, and draw the picture beside it.

    Args:
        path: The page; the picture is `NAME_bench.png` in the same folder.
        rows: Rows of the bench.
        known: Tasks by name.

    Returns:
        Where the picture is.

    Raises:
        ValueError: If the page has no marked part, or no task of the rows has a result.
    """
    text = tables(rows, known)
    if not text:
        raise ValueError("there is no result to write; name --cells TABLE")
    old = path.read_text() if path.exists() else f"# Mechanisms at equal epsilon\n\n{BEGIN}\n{END}\n"
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no part to renew; put the lines {BEGIN} and {END} where it should be")
    target = path.with_name(f"{path.stem}_bench.png")
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{target.stem}_dark.png">'
    about = "Score by epsilon of the best mechanisms, task by task"
    shown = f'<picture>\n  {dark}\n  <img src="{target.name}" width="560" alt="{about}">\n</picture>'
    write_atomically(path, f"{before}{BEGIN}\n\n{shown}\n\n{text}\n{END}{after}")
    save_figure(picture(rows, known), target, twin=True)
    return target


def check(count: int, known: Mapping[str, Any]) -> int:
    """Estimate some means of the reference again. They are met if every figure but the time is the same."""
    rows = [
        row for row in reference() if row.result is not None and hasattr(known.get(row.cell.task), "kind")
    ]
    drawn = rows[:: max(1, len(rows) // count)][:count]
    wrong = 0
    for row in drawn:
        again, cell = rerun(row, known[row.cell.task]), row.cell
        assert again is not None and row.result is not None
        same = (again.score, again.bits) == (row.result.score, row.result.bits)
        wrong += not same
        name = f"{cell.task}, {cell.mechanism}, {cell.adversary}, epsilon {cell.epsilon:g}, seed {cell.seed}"
        print(f"{name}: {'met' if same else f'{again.score!r} for {row.result.score!r} ({row.versions})'}")
    print(f"{len(drawn) - wrong} of {len(drawn)} cells are met bit for bit")
    return int(wrong > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Write tables, or check the reference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", nargs="?", type=Path, help="page with a marked part")
    parser.add_argument(
        "--cells", nargs="*", type=Path, default=[], help="tables to take before the reference"
    )
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--adversaries", nargs="*", default=[])
    parser.add_argument("--epsilons", nargs="*", type=float, default=[])
    parser.add_argument("--check", type=int, metavar="N")
    asked = parser.parse_args(argv)
    if asked.check is not None or asked.page is None:
        return check(asked.check or 5, KNOWN)
    own = [row for path in asked.cells for row in read_table(path)]
    there = {row.cell.group for row in own}
    rows = [
        row
        for row in (*own, *(row for row in reference() if row.cell.group not in there))
        if (not asked.tasks or row.cell.task in asked.tasks)
        and (not asked.adversaries or row.cell.adversary in asked.adversaries)
        and (not asked.epsilons or row.cell.epsilon in asked.epsilons)
    ]
    print(asked.page, write(asked.page, rows, KNOWN), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
