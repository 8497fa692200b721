"""Comparison of mechanisms at equal epsilon on one configuration, with several seeds.

A row is a mechanism, FedAvg, or noise that Opacus calibrates. A cell is one run with a row, a target epsilon
and a seed. The comparison writes the configuration of each cell below `runs/` and trains it as `fedq fit`
does. The run folder of a cell holds its score, bits and epsilon. A finished cell is not run again.

With secret keys, all cells compose for the same clients. The joint privacy cost is written before the first
run starts.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from lightning_fedq.commands.mechanism_text import parse_call
from lightning_fedq.commands.options import change_setting
from lightning_fedq.commands.plan import read_sizes
from lightning_fedq.commands.plan_settings import federated_settings
from lightning_fedq.commands.resolver import Resolved, resolved
from lightning_fedq.comparison.baselines import NAMES, with_opacus_noise
from lightning_fedq.comparison.cells import (
    RANGES,
    SETTINGS,
    TASKS,
    TUNING_SEED,
    Cell,
    Logger,
    Task,
    Tuning,
    check_folder,
    delete_checkpoints,
    find_config_file,
    find_run_folder,
    known_tunings,
    logger_settings,
    scaled,
)
from lightning_fedq.comparison.joint_cost import describe_joint_cost, write_joint_cost
from lightning_fedq.comparison.processes import REFUSED, STARTS, describe_duration, quiet, train_all
from lightning_fedq.comparison.table import ABOVE, Line, Pivot, describe_calibration, read_line
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.mechanisms.registry import class_path
from lightning_fedq.privacy.accounting import check_delta
from lightning_fedq.privacy.cohorts import DisjointOnce
from lightning_fedq.privacy.planning import KAPPA, Option, Problem, plan
from lightning_fedq.privacy.target import PrivacyTarget, adversary_named
from lightning_fedq.reports.runs import write_atomically
from lightning_fedq.secagg import SecAgg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPSILONS = (1.0, 2.0, 8.0)
MASKS = SecAgg(simulation="counted", degree="auto", max_colluding_fraction=0.02, max_dropped_fraction=0.02)
"""Secure aggregation of the tasks. Its bits are counted and its masks are not applied, which leaves sums
equal. The server may collude with 2% of the clients."""
_AROUND = 2.0
"""Seconds of a run outside its rounds."""


def silent(*told: object) -> None:
    """Ignore an event. It is the default of all listeners."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of mechanisms over epsilons and seeds on one configuration. FedAvg always runs.

    Args:
        name: Name of the task or the configuration.
        config: All settings, as `resolve` returns them.
        task: Search for learning rates and ranges. None for a user's own configuration.
        sizes: Arguments of `Problem`, except target and secure aggregation.
        masks: Secure aggregation of the runs.
        clip_norm: Norm to which updates are clipped, if the mechanism clips.
        secret: Whether keys come from the operating system. Runs are then private and compose.
        adversary: Adversary that every target is against.
        delta: Delta of the targets.
        epsilons: Target epsilons over the run, in ascending order.
        seeds: Seeds of every row and epsilon.
        names: Mechanism of each row for updates of norm 1, by the row's name.
        left_out: Reasons for names that have no row.
        monitor: Metric that is the score. None is the `usual_metric` of the runs.
        mode: Better direction of the score, "max" or "min". None is the direction that the runs know.
        tune: Whether range and learning rate are searched for even if they are known.
        refused: Reasons for rows and epsilons that have no run. `run` fills it.
    """

    name: str
    config: Mapping[str, Any] = field(repr=False)
    task: Task | None
    sizes: Mapping[str, Any]
    masks: SecAgg
    clip_norm: float
    secret: bool
    adversary: Adversary
    delta: float
    epsilons: tuple[float, ...]
    seeds: tuple[int, ...]
    names: Mapping[str, Mechanism]
    left_out: Mapping[str, str]
    monitor: str | None = None
    mode: str | None = None
    tune: bool = False
    refused: dict[tuple[str, float], str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_names(
        cls,
        on: str = "digits",
        names: Sequence[str] = (),
        adversary: Adversary | str = Adversary.SECAGG_SERVER,
        epsilons: Sequence[float] = EPSILONS,
        seeds: int = 3,
        *,
        baselines: bool = True,
        delta: float = 1e-5,
        rounds: int | None = None,
        data: Path | None = None,
        monitor: str | None = None,
        mode: Literal["max", "min"] | None = None,
        tune: bool = False,
    ) -> Comparison:
        """Make a comparison from the name of a task or configuration and names of mechanisms.

        Args:
            on: Name of a task, or name or file of a configuration.
            names: Names of rows or classes, or class paths (`commands.resolver`). Empty is all mechanisms.
            adversary: Adversary that targets are against, or its name.
            epsilons: Target epsilons of a client over the run, > 0, in nats.
            seeds: Number of runs per row and epsilon, 1 to 1,000.
            baselines: Whether Gaussian and Laplace noise that Opacus calibrates are added as rows.
            delta: Delta of the targets, below 1 / clients.
            rounds: Number of rounds of a run, >= 1. None is the configuration's number.
            data: Folder of the images of a task. None is `FEDQ_DATA` in the environment.
            monitor: Metric that is the score. None is the test accuracy, or the first test metric, or the
                first validation metric.
            mode: "max" if a larger score is better, "min" if a smaller one is. None is "max" for the
                accuracy of a task, and else the direction that the runs know. Without one, rows are not
                ranked.
            tune: Whether range and learning rate are searched for even if they are known.

        Raises:
            ValueError: If a number is out of range, there is no such task, or no name has a row.

        Examples:
            >>> asked = Comparison.from_names("digits", ["GaussianNoise"], epsilons=[8.0], seeds=2)
            >>> sorted(asked.names)
            ['GaussianNoise', 'GaussianNoise, by Opacus', 'LaplaceNoise, by Opacus']
        """
        if wrong := [epsilon for epsilon in epsilons if not 0.0 < epsilon < math.inf]:
            raise ValueError(
                f"An epsilon must be > 0 and finite, got {', '.join(f'{value:g}' for value in wrong)}. "
                "FedAvg, which has no finite epsilon, always runs."
            )
        if not (1 <= seeds <= TUNING_SEED and epsilons):
            raise ValueError(f"1 to {TUNING_SEED} seeds and an epsilon are needed, got {seeds}, {epsilons}")
        check_delta(delta)
        from lightning_fedq.commands.run import resolve  # imports Lightning's command line, needed only here

        task = TASKS.get(on)
        if task is None and tune:
            raise ValueError(f"--tune searches learning rates, but {on} has none to search. Omit --tune.")
        path = find_config_file(on, data)
        with quiet():
            sizes, federated, clip = read_sizes(path, "fedq compare")
            config = resolve([path])
        if task is not None and task.images:
            change_setting(config, task.images, str(data or os.environ["FEDQ_DATA"]))
        sizes |= {} if rounds is None else {"rounds": rounds}
        if "rounds" not in sizes:
            raise ValueError(f"{on} sets no number of rounds. Give --rounds.")
        config["trainer"]["max_epochs"] = sizes["rounds"]
        asked = [name for name in names if name not in (ABOVE, *NAMES)]
        found = resolved(asked, sizes["params"]) if asked or not names else Resolved({}, {})
        if asked and not set(names) - set(asked):
            found.some()
        beside = {name: of for name, of in NAMES.items() if baselines or name in names}
        usual = resolved(list(beside.values()), sizes["params"]).rows if beside else {}
        made = cls(
            Path(path).stem,
            config,
            task,
            sizes,
            masks=MASKS if task else federated.server.secure_aggregation or SecAgg(),
            clip_norm=clip,
            secret=federated.seed is None,
            adversary=adversary_named(adversary) if isinstance(adversary, str) else adversary,
            delta=delta,
            epsilons=tuple(sorted(set(map(float, epsilons)))),
            seeds=tuple(range(seeds)),
            names={**found.rows, **{name: usual[of] for name, of in beside.items()}},
            left_out=found.left_out,
            monitor=monitor,
            mode=mode or ("max" if task is not None and monitor in (None, "test_acc", "val_acc") else None),
            tune=tune,
        )
        made.problem(made.epsilons[0])  # raises early if delta is too large
        return made

    # ---- cells ----------------------------------------------------------------------------------------

    def problem(self, epsilon: float) -> Problem:
        """Return the planning problem with a target epsilon, as `fedq plan` has it."""
        sizes = dict(self.sizes)
        # against the server, each client taking part only once gives the smallest error
        if self.task is not None and self.adversary is Adversary.SERVER:
            sizes["law"] = DisjointOnce(sizes["clients"] // sizes["rounds"])
        target = PrivacyTarget(epsilon, self.delta, self.adversary)
        return Problem(**sizes, target=target, secure_aggregation=self.masks)

    def option(self, row: str, epsilon: float) -> Option:
        """Calibrate the mechanism of a row to a target epsilon.

        Raises:
            ValueError: If the mechanism can't meet the target.
        """
        if row == ABOVE:
            return Option(ABOVE, FedAvg())
        problem = self.problem(epsilon)
        [option] = plan(problem, {NAMES.get(row, row): self.names[row]}, once=self.task is not None)
        if option.mechanism is None:
            raise ValueError(option.reason)
        return with_opacus_noise(option, problem) if row in NAMES else option

    def configuration(self, cell: Cell, option: Option, root: Path, logger: Logger | None) -> dict[str, Any]:
        """Return the configuration of a cell, as `fedq fit` trains it.

        Args:
            cell: Row, target epsilon, seed and tuning.
            option: Calibrated mechanism of the row.
            root: Folder of all runs.
            logger: Logger of the run, or None.
        """
        config: dict[str, Any] = copy.deepcopy(dict(self.config))
        config["seed_everything"] = cell.seed
        config["trainer"]["default_root_dir"] = str(root / "checkpoints" / cell.name)
        clip = self.clip_norm if cell.tuning is None else cell.tuning.rate
        changed: dict[str, Any] = {"privacy": None, "secure_aggregation": None}
        if cell.row != ABOVE:
            changed |= federated_settings(option, self.problem(cell.epsilon), clip)
        assert option.mechanism is not None
        # `federated_settings` rounds the noise, so the mechanism is written again with all digits
        values = parse_call(repr(scaled(option.mechanism, clip)))[1]
        known = {name: value for name, value in values.items() if value is not None}
        changed["mechanism"] = {"class_path": class_path(type(option.mechanism)), "init_args": known}
        if cell.row in NAMES:  # the noise is Opacus's, so `Federated` must not calibrate it again
            changed["privacy"] = None
        if not self.secret:
            changed["seed"] = cell.seed
        settings: dict[str, Any] = {}
        if self.task is not None and cell.tuning is not None:
            radius = cell.tuning.range * clip / math.sqrt(self.sizes["params"])
            fixed = "lightning_fedq.mechanisms.interface.ranges.FixedRange"
            changed["ranges"] = {"class_path": fixed, "init_args": {"radius": radius}}
            settings = {"Classifier.lr": clip, **dict.fromkeys(self.task.seeded, cell.seed)}
        settings |= {f"Federated.{name}": value for name, value in changed.items()}
        for name, value in settings.items():
            change_setting(config, name, value)
        callbacks = config["trainer"]["callbacks"]
        names = [each["class_path"].rpartition(".")[2] for each in callbacks]
        wanted = ["RunFolder", *(["WandbRounds"] if logger == "wandb" else [])]
        callbacks += [{"class_path": f"lightning_fedq.callbacks.{n}"} for n in wanted if n not in names]
        [folder] = [each for each in callbacks if each["class_path"].endswith(".RunFolder")]
        folder.setdefault("init_args", {}).update(name=cell.name, root=str(root))
        if changed["privacy"] is None:  # there is no target, which has a delta
            reported = "lightning_fedq.comparison.reported_delta.ReportedDelta"
            told = {"class_path": reported, "init_args": {"delta": self.delta}}
            callbacks.insert(callbacks.index(folder), told)
        if logger is not None:
            group, salt = f"{self.name}, {self._adversary_name}", (root.parent / SETTINGS).read_text()
            config["trainer"]["logger"] = logger_settings(cell, root.parent, logger, group, salt)
        return config

    def _tunings(self, row: str, epsilon: float, mechanism: Mechanism | None) -> list[Tuning | None]:
        """Return the candidate ranges and learning rates of a row.

        There is one candidate if the tuning is known. A mechanism that clips the norm of vectors has one
        range, and FedAvg also has one because it does not clip.
        """
        if self.task is None:
            return [None]
        assert mechanism is not None
        who = Adversary.OUTSIDER.name.lower() if row == ABOVE else self._adversary_name
        key = (self.name, NAMES.get(row, row), who, epsilon)
        if not self.tune and (known := known_tunings().get(key)):
            return [known]
        if row == ABOVE:  # FedAvg does not clip, so the range has no effect
            return [Tuning(KAPPA, rate) for rate in (0.01, 0.03, 0.1, 0.3)]
        ranges = (KAPPA,) if "clip_norm" in parse_call(repr(mechanism))[1] else RANGES
        return [Tuning(range, rate) for range in ranges for rate in self.task.rates]

    @property
    def _adversary_name(self) -> str:
        return self.adversary.name.lower()

    def _asked(self) -> list[tuple[str, float]]:
        """Return all rows and epsilons of the comparison, FedAvg first."""
        return [(ABOVE, math.inf), *((name, epsilon) for name in self.names for epsilon in self.epsilons)]

    # ---- runs -----------------------------------------------------------------------------------------

    def run(
        self,
        out: Path,
        *,
        jobs: int = 1,
        logger: Logger | None = None,
        begins: Callable[[int, int], None] = silent,
        told: Callable[[str], None] = silent,
        ran: Callable[[Cell], None] = silent,
        drop_checkpoints: bool = False,
    ) -> list[Line]:
        """Train every cell that has not finished, and return the figures of all cells.

        First, runs with seed `TUNING_SEED` search for range and learning rate. Then the cells run with the
        tuning that has the best validation accuracy.

        Args:
            out: Folder of the comparison. A comparison that was interrupted there is continued.
            jobs: Number of runs at a time. Several runs use one process with one thread each.
            logger: Logger that records every cell as a run.
            begins: Listener that gets the number of runs and the number of tuning runs among them. Refused
                rows are known by then (`without`).
            told: Listener that gets the expected duration as text, after the first run.
            ran: Listener that gets each cell when its run ends.
            drop_checkpoints: Whether to delete the checkpoints of each run when it has ended.

        Returns:
            Figures of every cell, see `lines`.

        Raises:
            ValueError: If the folder holds another comparison, or every mechanism is refused.
            OSError: If files can't be written. Existing files are kept.
        """
        # all runs in a folder share these settings, and `--rounds` may set the rounds
        config = {**self.config, "trainer": {**self.config["trainer"], "max_epochs": None}}
        asked = {"configuration": config, "rounds": self.sizes["rounds"], "adversary": self._adversary_name}
        check_folder(out, {**asked, "delta": self.delta, "tune": self.tune})
        root = out / "runs"
        options: dict[tuple[str, float], Option] = {}
        self.refused.clear()
        for key in self._asked():
            if all(find_run_folder(root, Cell(*key, seed)) for seed in self.seeds):
                continue
            try:
                options[key] = self.option(*key)
            except REFUSED as refused:
                self.refused[key] = " ".join(str(refused).split())
        self._some()
        choices = {key: self._tunings(*key, option.mechanism) for key, option in options.items()}
        searched = [(key, tuning) for key, some in choices.items() for tuning in some if some[1:]]
        tried = [Cell(*key, TUNING_SEED, tuning) for key, tuning in searched]
        cells = [Cell(*key, seed) for key in choices for seed in self.seeds]
        searches = [cell for cell in tried if not find_run_folder(root, cell)]
        missing = [cell for cell in cells if not find_run_folder(root, cell)]
        left, processes = len(searches) + len(missing), 0
        begins(left, len(searches))

        def play(cells: Sequence[Cell]) -> None:
            """Train cells. The very first run is in this process and measures how long the others take."""
            nonlocal left, processes
            made = {root / f"{cell.name}.yaml": cell for cell in cells}
            for file, cell in made.items():
                kind = None if cell.seed == TUNING_SEED else logger
                config = self.configuration(cell, options[cell.row, cell.epsilon], root, kind)
                write_atomically(file, yaml.safe_dump(config, sort_keys=False))
            if self.secret and made:
                write_joint_cost(out, self.delta, list(made))
            waiting = {file: self._settings(cell) for file, cell in made.items()}
            while waiting:
                some = list(waiting.items())[: None if processes else 1]
                for file, reason in train_all(dict(some), processes):
                    cell, left = made[file], left - 1
                    del waiting[file]
                    if reason:
                        self.refused[cell.row, cell.epsilon] = reason
                    elif drop_checkpoints:
                        delete_checkpoints(root, cell)
                    ran(cell)
                    if not processes:
                        seconds = math.nan if reason else _seconds(root, cell, self.monitor)
                        processes = 1 if seconds * left < 2.0 * STARTS else max(min(jobs, left), 1)
                        told(describe_duration(left, processes, seconds))

        play(searches)
        chosen = []
        for cell in missing:
            some = [cell._replace(tuning=tuning) for tuning in choices[cell.row, cell.epsilon]]
            chosen.append(max(some, key=lambda cell: self._validation(root, cell)))
        play(chosen)
        self._some()
        return self.lines(out)

    def _labels(self, cell: Cell) -> dict[str, Any]:
        """Return the first columns of a cell's line."""
        labels: dict[str, Any] = {"task": self.name, "mechanism": cell.row, "adversary": self._adversary_name}
        labels |= {"epsilon": cell.epsilon, "seed": cell.seed, "delta": self.delta}
        return {**labels, "calibrated_by": describe_calibration(cell.row)}

    def _settings(self, cell: Cell) -> dict[str, Any]:
        """Return the settings that the loggers of a cell record."""
        epsilon = None if cell.row == ABOVE else cell.epsilon
        return {**self._labels(cell), "epsilon": epsilon, "monitor": self.monitor}

    def _validation(self, root: Path, cell: Cell) -> float:
        """Return the validation accuracy of the run with a cell's tuning, or -inf if there is none."""
        folder = find_run_folder(root, cell._replace(seed=TUNING_SEED))
        value = math.nan if folder is None else read_line(folder, "val_acc")["score"]
        return -math.inf if math.isnan(value) else value

    def _some(self) -> None:
        """Raise a ValueError if every mechanism is refused at every epsilon, baselines not counted."""
        own = [name for name in self.names if name not in NAMES]
        why = {name: [self.refused.get((name, epsilon)) for epsilon in self.epsilons] for name in own}
        if own and all(map(all, why.values())):
            reasons = "; ".join(f"{name}: {reasons[-1]}" for name, reasons in why.items())
            raise ValueError(f"No mechanism is left. {reasons}")

    # ---- results --------------------------------------------------------------------------------------

    def lines(self, out: Path) -> list[Line]:
        """Return a line for every cell: the figures of its folder, or the reason why there is no run."""
        lines: list[Line] = []
        for row, epsilon in self._asked():
            for seed in self.seeds:
                cell = Cell(row, epsilon, seed)
                line = self._labels(cell)
                if folder := find_run_folder(out / "runs", cell):
                    line |= read_line(folder, self.monitor, None if row == ABOVE else self.adversary.name)
                    line["folder"] = str(folder)
                elif reason := self.refused.get((row, epsilon)):
                    line["reason"] = reason
                lines.append(line)
        return lines

    def without(self) -> dict[str, str]:
        """Return the reason for each name that has no row, and for each row that has no run at an epsilon.

        Epsilons that a row lacks for the same reason are one entry.
        """
        reasons, missing = dict(self.left_out), dict[tuple[str, str], list[float]]()
        for (row, epsilon), reason in self.refused.items():
            missing.setdefault((row, reason.replace(f" {epsilon:g}", " {epsilon}")), []).append(epsilon)
        for (name, _), epsilons in missing.items():
            shown = ", ".join(f"{epsilon:g}" for epsilon in epsilons)
            reasons[f"{name} at epsilon {shown}"] = self.refused[name, epsilons[0]]
        return reasons

    def table(self, lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
        """Return column heads and lines: a line per mechanism, a cell per epsilon with score and bits."""
        return Pivot(lines, self.mode).table()

    def picture(self, lines: Sequence[Line], row: bool = False) -> Figure:
        """Draw the score against epsilon, uplink bits, and the sum of uplink and downlink bits.

        Args:
            lines: Figures of every cell.
            row: Whether to draw the panels in a row, for a paper.
        """
        title = f"{self.name}: epsilon against {self.adversary.value}, seeds: {len(self.seeds)}"
        return Pivot(lines, self.mode).picture(title, self.delta, row)

    def cost(self, out: Path) -> str:
        """Return a text on the joint privacy cost of all runs in a folder, or "" if keys are from a seed."""
        return describe_joint_cost(out, self.delta, self.adversary) if self.secret else ""


def _seconds(root: Path, cell: Cell, monitor: str | None) -> float:
    """Return the seconds of a finished run, including the time outside its rounds.

    Raises:
        ValueError: If the run has no such metric.
    """
    folder = find_run_folder(root, cell)
    assert folder is not None
    return _AROUND + float(read_line(folder, monitor)["seconds"])
