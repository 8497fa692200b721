"""Mechanisms at equal epsilon on one task, with several seeds: cells, a table, a picture, a CSV file.

FedAvg is the line above, and Gaussian and Laplace noise as Opacus calibrates them stand beside. A cell is
bits, both ways, and epsilon beside its score: none of the three is printed without the others.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lightning_fedq.commands.resolver import Resolved, resolved
from lightning_fedq.comparison.baselines import NAMES, by_opacus
from lightning_fedq.comparison.bench import cells
from lightning_fedq.comparison.bench.cells import TUNING_SEED, Cell, Row, append, read, score_of, word_of
from lightning_fedq.comparison.bench.tasks import Job, Log, Task, Tuning, tasks
from lightning_fedq.comparison.processes import REFUSED, results
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.privacy.planning import Option
from lightning_fedq.privacy.target import adversary_named
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.hand import legend, panels, series
from lightning_fedq.reports.runs import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOVE = "FedAvg"
"""Row without privacy, the line above the others."""
CELLS, SETTINGS = "cells.csv", "comparison.json"
"""Files by which a comparison goes on."""
EPSILONS = (1.0, 2.0, 8.0)
Logger = Literal["wandb", "csv", "tensorboard"]
_DRAWN = 8
"""Rows in the picture, the best ones, besides Opacus's."""
_STARTS = 6.0
"""Seconds in which a process imports, and compiles what is not in its cache."""


class Group(NamedTuple):
    """Runs of one row at one epsilon: the mechanism at its target, or why there is none."""

    cells: tuple[Cell, ...]
    option: Option | None
    reason: str = ""

    @property
    def name(self) -> str:
        """Name of the row."""
        return self.cells[0].mechanism


def silent(*told: object) -> None:
    """Listen to nothing."""


@dataclass(frozen=True)
class Comparison:
    """Mechanisms, epsilons and seeds on one task. FedAvg always runs.

    Args:
        task: The task.
        adversary: Adversary that every target is against.
        epsilons: Targets over the run, smallest first.
        seeds: Seeds of a cell.
        names: Rows, and the setting of each for updates of norm 1.
        left_out: Names that have no row, and why not.
    """

    task: Task
    adversary: Adversary
    epsilons: tuple[float, ...]
    seeds: tuple[int, ...]
    names: Mapping[str, Mechanism]
    left_out: Mapping[str, str]

    @classmethod
    def of(
        cls,
        task: Task | str = "digits",
        names: Sequence[str] = (),
        adversary: Adversary | str = Adversary.SECAGG_SERVER,
        epsilons: Sequence[float] = EPSILONS,
        seeds: int = 3,
        baselines: bool = True,
    ) -> Comparison:
        """A comparison by names.

        Args:
            task: A task, or the name of one that needs no folder of images.
            names: Names of rows or classes, or class paths (`commands.resolver`); none is all.
            adversary: Adversary that targets are against, or its name.
            epsilons: Targets over the run, of a client, > 0, in nats.
            seeds: Runs of a cell, 1 to 1,000.
            baselines: Do Gaussian and Laplace noise as Opacus calibrates them stand beside?

        Raises:
            ValueError: If a number is out of range, there is no such task, or no name has a row.

        Example:
            >>> import tempfile
            >>> asked = Comparison.of("mean-unit-1024", ["GaussianNoise"], epsilons=[8.0], seeds=2)
            >>> sorted(asked.names)
            ['GaussianNoise', 'GaussianNoise, by Opacus', 'LaplaceNoise, by Opacus']
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     rows = asked.run(Path(folder))  # a row a run; FedAvg's first
            >>> print(rows[0].cell.mechanism, rows[0].result.bits, round(rows[0].result.down), len(rows))
            FedAvg 32.0 32 8
        """
        if isinstance(task, str):
            known = tasks(None)
            if task not in known:
                raise ValueError(f"there is no task {task}; there are {', '.join(known)}")
            task = known[task]
        if wrong := [epsilon for epsilon in epsilons if not 0.0 < epsilon < math.inf]:
            raise ValueError(
                f"an epsilon must be > 0 and finite, got {', '.join(f'{value:g}' for value in wrong)}; "
                "FedAvg, which has no finite one, always runs"
            )
        if not (1 <= seeds <= TUNING_SEED and epsilons):
            raise ValueError(f"1 to {TUNING_SEED} seeds and an epsilon are needed, got {seeds}, {epsilons}")
        against = adversary_named(adversary) if isinstance(adversary, str) else adversary
        asked = [name for name in names if name not in (ABOVE, *NAMES)]
        found = resolved(asked, task.dim) if asked or not names else Resolved({}, {})
        if asked and not set(names) - set(asked):
            found.some()
        beside = {name: of for name, of in NAMES.items() if baselines or name in names}
        usual = resolved(list(beside.values()), task.dim).rows if beside else {}
        rows = {**found.rows, **{name: usual[of] for name, of in beside.items()}}
        chosen = tuple(sorted(set(map(float, epsilons))))
        return cls(task, against, chosen, tuple(range(seeds)), rows, found.left_out)

    # ---- runs -----------------------------------------------------------------------------------------

    def run(
        self,
        out: Path,
        *,
        processes: int = 1,
        logger: Logger | None = None,
        tune: bool = False,
        begins: Callable[[str, int], None] = silent,
        ran: Callable[[Row], None] = silent,
    ) -> list[Row]:
        """Run every cell that the folder does not hold yet, and return all that were asked for.

        Args:
            out: Folder of the cells; one that is there goes on.
            processes: Runs at a time, each in a process of one thread where there are several (a program
                that asks for several stands behind `if __name__ == "__main__"`).
            logger: Logger that gets a run for every cell.
            tune: Search for range and rate also where the results that ship have them.
            begins: Listener that is told how long it may take, in words, and how many runs are to come.
            ran: Listener that is given the row of each run as it ends.

        Returns:
            A row a cell; one without a result says why.

        Raises:
            ValueError: If the folder holds another comparison, or nothing is trained that could be logged.
            OSError: If nothing can be written; what is there stays.
        """
        if logger is not None and not self.task.trains:
            raise ValueError(f"{self.task.name} trains nothing that could be logged; leave --logger out")
        facts, table = self._facts(out, tune), out / CELLS
        rows = read(table)
        there = {row.cell: row for row in rows if row.cell.seed != TUNING_SEED}
        tried = {(row.cell.group, row.tuning): row for row in rows if row.cell.seed == TUNING_SEED}
        groups = [self._group(name, epsilon, there) for name, epsilon in self._asked()]
        able = {group.name for group in groups if not group.reason}
        self._some({group.name: group.reason for group in groups if group.name not in able})
        open_ = [group for group in groups if group.option and not there.keys() >= set(group.cells)]
        choices = {group.cells: self._tunings(group, tune) for group in open_}
        searches = [
            self._job(group, tuning, TUNING_SEED)
            for group in open_
            for tuning in choices[group.cells]
            if len(choices[group.cells]) > 1 and (group.cells[0].group, tuning) not in tried
        ]
        missing = [(group, cell) for group in open_ for cell in group.cells if cell not in there]
        coming = [self._job(group, choices[group.cells][0], cell.seed)[1] for group, cell in missing]
        self.task.begin(out, coming, facts)
        write_atomically(out / SETTINGS, json.dumps(facts, indent=1) + "\n")
        names = [*(cell.mechanism for cell, _ in searches), *(cell.mechanism for _, cell in missing)]
        seconds = self._seconds(names, facts)
        processes = 1 if seconds < 2.0 * _STARTS else max(min(processes, len(names)), 1)
        begins(_how_long(len(names), len(searches), processes, seconds), len(names))

        def play(jobs: Sequence[tuple[Cell, Job]]) -> Iterator[Row]:
            for place, found in results(self.task, [job for _, job in jobs], processes):
                cell, job = jobs[place]
                row = Row(cell, None, job.tuning, found) if isinstance(found, str) else None
                if row is None:
                    assert not isinstance(found, str)
                    spent = job.option.epsilon if found.spent is None else found.spent
                    row = Row(cell, replace(found, spent=spent), job.tuning)
                    append(table, [row])
                ran(row)
                yield row

        tried |= {(row.cell.group, row.tuning): row for row in play(searches)}
        jobs = []
        for group, cell in missing:
            best = self._best(group, choices[group.cells], tried)
            jobs.append(self._job(group, best, cell.seed, self._log(out, logger, cell, facts["id"])))
        there |= {row.cell: row for row in play(jobs)}
        every = ((cell, group.reason) for group in groups for cell in group.cells)
        found = [there.get(cell) or Row(cell, None, reason=reason) for cell, reason in every]
        able = {row.cell.mechanism for row in found if row.result is not None}
        self._some({row.cell.mechanism: row.reason for row in found if row.cell.mechanism not in able})
        return found

    def _some(self, refused: Mapping[str, str]) -> None:
        """Refuse to go on where nothing is left of what was asked for."""
        own = [name for name in self.names if name not in NAMES]
        if own and refused.keys() >= set(own):
            reasons = "; ".join(f"{name}: {refused[name]}" for name in own)
            raise ValueError(f"no mechanism is left. {reasons}")

    def _asked(self) -> list[tuple[str, float]]:
        return [(ABOVE, math.inf), *((name, epsilon) for name in self.names for epsilon in self.epsilons)]

    def _group(self, name: str, epsilon: float, there: Mapping[Cell, Row]) -> Group:
        """Calibrate a row, unless all of its cells are there."""
        against = Adversary.OUTSIDER if name == ABOVE else self.adversary
        made = tuple(Cell(self.task.name, name, against.name.lower(), epsilon, seed) for seed in self.seeds)
        if name == ABOVE:
            return Group(made, Option(ABOVE, FedAvg()))
        if there.keys() >= set(made):
            return Group(made, None)
        try:
            option = self.task.option(NAMES.get(name, name), self.names[name], epsilon, self.adversary)
            if name in NAMES:
                option = by_opacus(option, self.task.problem(epsilon, self.adversary))
        except REFUSED as refused:
            return Group(made, None, " ".join(str(refused).split()))
        return Group(made, option)

    def _tunings(self, group: Group, tune: bool) -> list[Tuning]:
        """Ranges and rates to choose from, a single one where the results that ship have it."""
        assert group.option is not None and group.option.mechanism is not None
        task, name, adversary, epsilon = group.cells[0].group
        known = None if tune else _shipped().get((task, NAMES.get(name, name), adversary, epsilon))
        return [known] if known else self.task.tunings(group.option.mechanism)

    def _best(
        self,
        group: Group,
        choices: Sequence[Tuning],
        tried: Mapping[tuple[tuple[str, str, str, float], Tuning], Row],
    ) -> Tuning:
        def score(tuning: Tuning) -> float:
            result = tried[group.cells[0].group, tuning].result
            if result is None or math.isnan(result.validation):
                return -math.inf
            return result.validation if self.task.better == "larger" else -result.validation

        return choices[0] if len(choices) == 1 else max(choices, key=score)

    def _job(self, group: Group, tuning: Tuning, seed: int, log: Log | None = None) -> tuple[Cell, Job]:
        assert group.option is not None
        cell, plain = replace(group.cells[0], seed=seed), group.name == ABOVE
        target = None if plain else self.task.problem(cell.epsilon, self.adversary).target
        settings = {
            **asdict(cell),
            "epsilon": None if plain else cell.epsilon,
            "delta": self.task.delta,
            "calibrated_by": _by(group.name),
            "setting": repr(group.option.mechanism),
            "epsilon_spent": None if plain else group.option.epsilon,
        }
        return cell, Job(group.option, target, tuning, seed, group.name in NAMES, log, settings)

    def _log(self, out: Path, kind: Logger | None, cell: Cell, token: str) -> Log | None:
        """Logger of a cell. What a run of it has left that was stopped on its way goes."""
        if kind is None:
            return None
        name, folder = f"{cell.mechanism}, epsilon {cell.epsilon:g}, seed {cell.seed}", out / kind
        folder.mkdir(parents=True, exist_ok=True)
        if kind != "wandb":
            shutil.rmtree(folder / name, ignore_errors=True)
            kinds = {"csv": "CSVLogger", "tensorboard": "TensorBoardLogger"}
            return Log(kinds[kind], {"save_dir": str(folder), "name": name.replace("/", "_"), "version": ""})
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_SILENT", "true")
        run = sha256(f"{token} {cell}".encode()).hexdigest()[:12]
        for left in folder.glob(f"wandb/offline-run-*-{run}"):
            shutil.rmtree(left)
        group = f"{cell.task}, {self.adversary.name.lower()}"
        arguments = {"name": name, "id": run, "project": "fedq-compare", "save_dir": str(folder)}
        return Log("WandbLogger", {**arguments, "group": group})

    def _facts(self, out: Path, tune: bool) -> dict[str, Any]:
        """Facts on the comparison of a folder, read from it or new.

        Raises:
            ValueError: If it is of another comparison.
        """
        asked = {
            "task": self.task.name,
            **{name: getattr(self.task, name) for name in ("clients", "rounds", "dim", "delta")},
            **self.task.identity,
            "adversary": self.adversary.name.lower(),
            "tune": tune,
        }
        path = out / SETTINGS
        if not path.exists():
            if (out / CELLS).exists() and read(out / CELLS):
                raise ValueError(f"{out} holds runs of no known settings; name another folder with --out")
            append(out / CELLS, [])  # refuses a disk that is full
            return {**asked, "id": os.urandom(6).hex()}
        try:
            there = dict(json.loads(path.read_text()))
            differ = [
                f"{key} {there[key]}, not {value}" for key, value in asked.items() if there[key] != value
            ]
            there["id"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path} is damaged; name another folder with --out") from None
        if differ:
            raise ValueError(
                f"{out} holds another comparison ({'; '.join(differ)}); name another folder with --out"
            )
        append(out / CELLS, [])
        return there

    def _seconds(self, names: Sequence[str], facts: Mapping[str, Any]) -> float:
        """Time of runs of these rows one after the other, NaN where it is not known."""
        known = {"": facts["seconds"]} if "seconds" in facts else _shipped_seconds(self.task.name)
        return sum(known.get(NAMES.get(name, name), known.get("", math.nan)) for name in names)

    # ---- table, file, picture -------------------------------------------------------------------------

    def table(self, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
        """Heads and lines: a line a mechanism, a cell an epsilon with the bits that go with it."""
        of = _grouped(rows)
        old = _grouped([row for row in cells.reference() if self._is_like(row)])
        heads = ["mechanism", "calibrated by", "down", *(f"ε {epsilon:g}" for epsilon in self.epsilons)]
        lines = []
        if above := of.get((ABOVE, math.inf)):
            cell = f"{word_of(score_of(above), self.task)}\n{_mean(above, 'all_bits'):.3g} bits"
            lines.append(
                [
                    f"{ABOVE}, no finite ε",
                    _by(ABOVE),
                    f"{_mean(above, 'down'):.3g}",
                    *[cell] * len(self.epsilons),
                ]
            )
        for name in self._ranked(of):
            found = [self._cell(of.get((name, e), []), e, old.get((name, e), [])) for e in self.epsilons]
            down = _mean(
                [row for (of_name, _), some in of.items() if of_name == name for row in some], "down"
            )
            lines.append([name, _by(name), f"{down:.3g}", *found])
        return heads, lines

    def _cell(self, rows: Sequence[Row], epsilon: float, shipped: Sequence[Row]) -> str:
        if not rows:
            return "-"
        keys, spent = _mean(rows, "all_bits") - _mean(rows, "bits"), _mean(rows, "spent")
        bits = f"{_mean(rows, 'bits'):.3g}" + (f" + {keys:.2g}" if keys > 0.005 else "")
        lines = [word_of(score_of(rows), self.task), f"{bits} bits", f"R {_mean(rows, 'seen'):.2g}"]
        if spent < 0.99 * epsilon or spent > epsilon:
            lines.append(f"ε {format_epsilon(spent)} spent")
        if shipped:
            lines.append(f"(shipped {word_of(score_of(shipped))})")
        return "\n".join(lines)

    def _is_like(self, row: Row) -> bool:
        """Is a row that ships one of this task, as it ships, and of this adversary?"""
        like = tasks(Path()).get(self.task.name)
        same = like is not None and (like.rounds, like.delta) == (self.task.rounds, self.task.delta)
        return same and (row.cell.task, row.cell.adversary) == (self.task.name, self.adversary.name.lower())

    def _ranked(self, of: Mapping[tuple[str, float], Sequence[Row]]) -> list[str]:
        """Rows that have a result, best at the largest epsilon first."""

        def place(name: str) -> tuple[float, float]:
            largest = max(epsilon for epsilon in self.epsilons if (name, epsilon) in of)
            score = (score_of(of[name, largest]) or (math.nan, 0.0))[0]
            return -largest, math.inf if math.isnan(score) else -score if self._grows else score

        there = [name for name in self.names if any((name, epsilon) in of for epsilon in self.epsilons)]
        return sorted(there, key=place)

    @property
    def _grows(self) -> bool:
        return self.task.better == "larger"

    def refused(self, rows: Sequence[Row]) -> dict[str, str]:
        """Names that have no row, and rows that lack runs, with the reason of each."""
        found, missing = dict(self.left_out), dict[tuple[str, str], list[float]]()
        for row in rows:
            if row.result is None:
                missing.setdefault((row.cell.mechanism, row.reason), []).append(row.cell.epsilon)
        for (name, reason), epsilons in missing.items():
            shown = ", ".join(f"{epsilon:g}" for epsilon in dict.fromkeys(epsilons))
            key = f"{name} at epsilon {shown}"
            found[key] = f"{found[key]}; {reason}" if key in found else reason
        return found

    def lines(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """One line a run for a CSV file, empty where something is not known."""
        found = []
        for row in rows:
            of, cell = row.result, row.cell
            line = {**asdict(cell), "delta": self.task.delta, "calibrated_by": _by(cell.mechanism)}
            if of is not None:
                line |= {"score": of.score, "epsilon_spent": of.spent, "R": of.seen, "bits_up": of.bits}
                line |= {"bits_keys": of.all_bits - of.bits, "bits_down": of.down}
                line |= {"bits_both_ways": None if of.down is None else of.all_bits + of.down}
                line |= {"rate": row.tuning.rate, "range": row.tuning.range, "setting": of.setting}
                line |= {"seconds": of.seconds}
            line |= {"reason": row.reason, "versions": row.versions}
            found.append({name: "" if value is None else value for name, value in line.items()})
        return found

    def picture(self, rows: Sequence[Row]) -> Figure:
        """The score against epsilon, against bits up and against bits both ways. Bars are one deviation.

        FedAvg, which has no finite epsilon, is a grey line or star that says so.
        """
        of, unit = _grouped(rows), self.task.unit
        ranked = self._ranked(of)
        best = [name for name in ranked if name not in NAMES][:_DRAWN]
        names = [name for name in ranked if name in best or name in NAMES]
        hidden = len(ranked) - len(names)
        title = f"{self.task.name}: epsilon towards {self.adversary.value}; seeds: {len(self.seeds)}"
        title += f"; the best {_DRAWN}, {hidden} more in the table" if hidden else ""
        figure, drawn = panels(3, title, height=4.0)
        by_epsilon, by_up, by_both = drawn
        for place, name in enumerate(names):
            known = [epsilon for epsilon in self.epsilons if (name, epsilon) in of]
            some = [of[name, epsilon] for epsilon in known]
            scores = [score_of(each) or (math.nan, math.nan) for each in some]
            y, bars = [score for score, _ in scores], [0.0 if math.isnan(sd) else sd for _, sd in scores]
            up = [_mean(each, "all_bits") for each in some]
            both = [bits + _mean(each, "down") for bits, each in zip(up, some, strict=True)]
            for axes, x in zip(drawn, (known, up, both), strict=True):
                style = {**series(place), "linestyle": "-" if axes is by_epsilon else ":"}
                axes.errorbar(x, y, yerr=bars, label=name, capsize=2, **style)
            for axes, x in ((by_up, up), (by_both, both)) if name not in NAMES else ():
                for at, value, epsilon in zip(x, y, known, strict=True):
                    axes.annotate(
                        f"{epsilon:g}", (at, value), textcoords="offset points", xytext=(4, 3), fontsize=7
                    )
        if above := of.get((ABOVE, math.inf)):
            score, bits = (score_of(above) or (math.nan, 0.0))[0], _mean(above, "all_bits")
            label = f"{ABOVE}: no privacy, no finite ε"
            by_epsilon.axhline(score, color="0.5", linestyle="--", label=label)
            for axes, at in ((by_up, bits), (by_both, bits + _mean(above, "down"))):
                axes.plot([at], [score], color="0.5", marker="*", markersize=9, linestyle="")
                shift: dict[str, Any] = {"textcoords": "offset points", "xytext": (3, 7), "ha": "right"}
                axes.annotate("FedAvg, no finite ε", (at, score), color="0.5", fontsize=8, **shift)
        by_epsilon.set_xscale("log", base=2)
        by_epsilon.set_xticks(self.epsilons, [f"{epsilon:g}" for epsilon in self.epsilons])
        by_epsilon.set(xlabel=f"ε of a client over the run, delta {self.task.delta:g}", ylabel=unit)
        by_up.set(xlabel="bits a parameter up, keys included (small numbers: ε)", ylabel=unit)
        by_both.set(xlabel="bits a parameter up and down (small numbers: ε)", ylabel=unit)
        for axes in drawn:
            axes.set_yscale("linear" if self._grows else "log")
            axes.margins(y=0.12)
        for axes in (by_up, by_both):
            axes.set_xlim(left=0.0)
        legend(by_epsilon)
        return figure


def _how_long(runs: int, searches: int, processes: int, seconds: float) -> str:
    """Words on the number of runs to come, and the time that they may take."""
    if not runs:
        return "every run is there"
    left = seconds / processes + _STARTS
    search = f", {searches} of them to find ranges and rates" if searches else ""
    shown = f"{left:.0f} s" if left < 90.0 else f"{left / 60.0:.0f} min"
    times = "a time that is not known beforehand" if math.isnan(seconds) else f"about {shown}"
    return f"{runs} runs{search}, {processes} at a time: {times}"


def _shipped_seconds(task: str) -> dict[str, float]:
    """Time of a run of the results that ship, by row, and "" for any other."""
    found: dict[str, list[float]] = {}
    for row in cells.reference():
        if row.cell.task == task and row.result is not None:
            for name in (row.cell.mechanism, ""):
                found.setdefault(name, []).append(row.result.seconds)
    return {name: mean(times) for name, times in found.items()}


@lru_cache(maxsize=1)
def _shipped() -> dict[tuple[str, str, str, float], Tuning]:
    """Ranges and rates of the results that ship."""
    return {row.cell.group: row.tuning for row in cells.reference() if row.result is not None}


def _by(name: str) -> str:
    if name == ABOVE:
        return "no privacy"
    return "Opacus (RDP)" if name in NAMES else "this package (exact)"


def _grouped(rows: Sequence[Row]) -> dict[tuple[str, float], list[Row]]:
    """Rows with a result, by mechanism and epsilon."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        if row.result is not None:
            found.setdefault((row.cell.mechanism, row.cell.epsilon), []).append(row)
    return found


def _mean(rows: Sequence[Row], name: str) -> float:
    values = [getattr(row.result, name) for row in rows]
    return math.nan if None in values else mean(values)
