"""Mechanisms at equal epsilon on one configuration, with several seeds: a cell is a run folder.

A cell is a row (a mechanism, FedAvg, or noise as Opacus calibrates it), a target and a seed. It is the
configuration with these three, written below `runs/` and trained as `fedq fit` trains it; its folder holds
score, bits and epsilon. A cell that has ended is not run again. With secret keys all cells compose for the
same clients: what they cost together is written before the first begins.
"""

from __future__ import annotations

import copy
import csv
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import yaml

from lightning_fedq._lightning import pl
from lightning_fedq.commands.configs import find
from lightning_fedq.commands.mechanism_text import parse_call
from lightning_fedq.commands.options import change_setting
from lightning_fedq.commands.plan import federated_settings, read_sizes
from lightning_fedq.commands.resolver import Resolved, resolved
from lightning_fedq.commands.together import (
    RunCost,
    composed,
    cost_of_config,
    count_charged_rounds,
    page_of_runs,
)
from lightning_fedq.comparison.baselines import NAMES, with_opacus_noise
from lightning_fedq.comparison.processes import DONE, REFUSED, quiet, train_all
from lightning_fedq.comparison.table import ABOVE, Line, Pivot, describe_calibration, read_line
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.mechanisms.registry import class_path, installed
from lightning_fedq.privacy.cohorts import DisjointOnce
from lightning_fedq.privacy.planning import KAPPA, Option, Problem, plan
from lightning_fedq.privacy.target import PrivacyTarget, adversary_named
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.runs import write_atomically
from lightning_fedq.secagg import SecAgg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPSILONS = (1.0, 2.0, 8.0)
SETTINGS, ALL_RUNS = "comparison.yaml", "all_runs.md"
Logger = Literal["wandb", "csv", "tensorboard"]
TUNING_SEED = 1000
"""Seed of the runs that find range and rate, and of no cell."""
MASKS = SecAgg(run="accounted", degree="auto", max_corrupt=0.02, max_dropout=0.02)
"""Masks of the tasks: counted, which changes no sum; the server may collude with 2% of the clients."""
RANGES = (0.5, 1.5, KAPPA)
"""Ranges of a coordinate that are tried, in units of norm / sqrt(dim)."""
_AROUND, _STARTS = 2.0, 6.0
"""Seconds of a run outside its rounds, and in which a process starts."""


class Task(NamedTuple):
    """A configuration that comes along, whose learning rate and range are chosen for every row and epsilon.

    Its clients take one step a round, so updates are clipped to the learning rate.

    Args:
        rates: Learning rates that are tried.
        seeded: Settings that are the run's seed.
        images: Setting of the folder of images; "" if it has none.
    """

    rates: tuple[float, ...]
    seeded: tuple[str, ...] = ("seeded.seed",)
    images: str = ""


_MNIST = ("seeded.seed", "MNISTDataModule.seed"), "MNISTDataModule.root"
TASKS = {
    "digits": Task((0.1, 0.25, 0.5, 1.0)),
    "mnist-linear": Task((0.1, 0.25, 0.5, 1.0), *_MNIST),
    "mnist-linear-10k": Task((0.3, 1.0), *_MNIST),
    "mnist-cnn": Task((0.3, 1.0), *_MNIST),
}


class Tuning(NamedTuple):
    """Range of a coordinate, in units of norm / sqrt(dim), and learning rate of the clients."""

    range: float
    rate: float


class Cell(NamedTuple):
    """One run: a row, a target over the run, a seed, and what is chosen for the row."""

    row: str
    epsilon: float
    seed: int
    tuning: Tuning | None = None

    @property
    def name(self) -> str:
        """Its place below the folder of all runs."""
        row = re.sub(r"[^\w.]+", "_", self.row).strip("_")
        tried = ""
        if self.seed == TUNING_SEED and self.tuning is not None:
            tried = f"_range_{self.tuning.range:g}_rate_{self.tuning.rate:g}"
        return f"{row}/epsilon_{self.epsilon:g}/seed_{self.seed}{tried}"


def silent(*told: object) -> None:
    """Listen to nothing."""


@dataclass(frozen=True)
class Comparison:
    """Mechanisms, epsilons and seeds on one configuration. FedAvg always runs.

    Args:
        name: Name of the task or the configuration.
        config: Every setting, as `resolve` gives them.
        task: How a task chooses rates and ranges; None for a configuration of one's own.
        sizes: What `Problem` asks for, but for target and masks.
        masks: Masks, where the target is about a server behind them.
        clip_norm: Norm to which updates are clipped, where the mechanism does.
        secret: Do keys come from the operating system, so that runs are private and add up?
        adversary: Adversary that every target is against.
        delta: Delta of the targets.
        epsilons: Targets over the run, smallest first.
        seeds: Seeds of a cell.
        names: Rows, and the setting of each for updates of norm 1.
        left_out: Names that have no row, and why not.
        monitor: Metric that is the score; None is the test's accuracy, or else the first one there is.
        mode: Is a larger ("max") or a smaller ("min") score better? None goes by the metric's name.
        tune: Are range and rate searched for also where they are known?
        refused: Rows and epsilons that have no run, and why not; found out on the way.
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
        """A comparison by names.

        Args:
            on: Name of a task, or a configuration, a file or a name.
            names: Names of rows or classes, or class paths (`commands.resolver`); none is all.
            adversary: Adversary that targets are against, or its name.
            epsilons: Targets over the run, of a client, > 0, in nats.
            seeds: Runs of a cell, 1 to 1,000.
            baselines: Do Gaussian and Laplace noise as Opacus calibrates them stand beside?
            delta: Delta of the targets, below 1 / clients.
            rounds: Rounds of a run, >= 1; None is the configuration's own.
            data: Folder of the images of a task; None is `FEDQ_DATA` in the environment.
            monitor: Metric that is the score.
            mode: Is a larger or a smaller score better?
            tune: Search for range and rate also where they are known.

        Raises:
            ValueError: If a number is out of range, there is no such task, or no name has a row.

        Example:
            >>> asked = Comparison.from_names("digits", ["GaussianNoise"], epsilons=[8.0], seeds=2)
            >>> sorted(asked.names)
            ['GaussianNoise', 'GaussianNoise, by Opacus', 'LaplaceNoise, by Opacus']
        """
        if wrong := [epsilon for epsilon in epsilons if not 0.0 < epsilon < math.inf]:
            raise ValueError(
                f"an epsilon must be > 0 and finite, got {', '.join(f'{value:g}' for value in wrong)}; "
                "FedAvg, which has no finite one, always runs"
            )
        if not (1 <= seeds <= TUNING_SEED and epsilons):
            raise ValueError(f"1 to {TUNING_SEED} seeds and an epsilon are needed, got {seeds}, {epsilons}")
        from lightning_fedq.commands.run import resolve  # imports Lightning's command line: only here

        task = TASKS.get(on)
        if task is None and tune:
            raise ValueError(f"--tune searches rates, and {on} has none to search; leave --tune out")
        path = _find_config_file(on, data)
        with quiet():
            sizes, federated, clip = read_sizes(path, "fedq compare")
            config = resolve([path])
        if task is not None and task.images:
            change_setting(config, task.images, str(data or os.environ["FEDQ_DATA"]))
        sizes |= {} if rounds is None else {"rounds": rounds}
        if "rounds" not in sizes:
            raise ValueError(f"{on} sets no number of rounds; give --rounds")
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
            mode=mode,
            tune=tune,
        )
        made.problem(made.epsilons[0])  # refuses a delta
        return made

    # ---- cells ----------------------------------------------------------------------------------------

    def problem(self, epsilon: float) -> Problem:
        """A target and the sizes that `fedq plan` asks for."""
        sizes = dict(self.sizes)
        if self.task is not None and self.adversary is Adversary.SERVER:  # once each: the best that there is
            sizes["law"] = DisjointOnce(sizes["clients"] // sizes["rounds"])
        target = PrivacyTarget(epsilon, self.delta, self.adversary)
        return Problem(**sizes, target=target, secure_aggregation=self.masks)

    def option(self, row: str, epsilon: float) -> Option:
        """Calibrate a row.

        Raises:
            ValueError: If the target can't be met.
        """
        if row == ABOVE:
            return Option(ABOVE, FedAvg())
        problem = self.problem(epsilon)
        [found] = plan(problem, {NAMES.get(row, row): self.names[row]}, once=self.task is not None)
        if found.mechanism is None:
            raise ValueError(found.reason)
        return with_opacus_noise(found, problem) if row in NAMES else found

    def configuration(self, cell: Cell, option: Option, root: Path, logger: Logger | None) -> dict[str, Any]:
        """The configuration of a cell, as `fedq fit` trains it.

        Args:
            option: Its row, calibrated.
            root: Folder of all runs.
        """
        config: dict[str, Any] = copy.deepcopy(dict(self.config))
        config["seed_everything"] = cell.seed
        config["trainer"]["default_root_dir"] = str(root / "checkpoints" / cell.name)
        clip = self.clip_norm if cell.tuning is None else cell.tuning.rate
        changed: dict[str, Any] = {"privacy": None, "secure_aggregation": None}
        if cell.row != ABOVE:
            changed |= federated_settings(option, self.problem(cell.epsilon), clip)
        assert option.mechanism is not None
        values = parse_call(repr(scaled(option.mechanism, clip)))[1]  # to the last digit
        known = {name: value for name, value in values.items() if value is not None}
        changed["mechanism"] = {"class_path": class_path(type(option.mechanism)), "init_args": known}
        if cell.row in NAMES:  # nothing calibrates it
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
        if changed["privacy"] is None:  # no target says at which delta the page is
            folder["init_args"]["delta"] = self.delta
        if logger is not None:
            config["trainer"]["logger"] = self._logger(cell, root.parent, logger)
        return config

    def _logger(self, cell: Cell, out: Path, kind: Logger) -> dict[str, Any]:
        """Logger of a cell. What a run of it has left that was stopped on its way goes."""
        name, folder = f"{cell.row}, epsilon {cell.epsilon:g}, seed {cell.seed}", out / kind
        folder.mkdir(parents=True, exist_ok=True)
        given = {"save_dir": str(folder), "name": name}
        if kind == "wandb":
            os.environ.setdefault("WANDB_MODE", "offline")
            os.environ.setdefault("WANDB_SILENT", "true")
            run = sha256(f"{(out / SETTINGS).read_text()} {out.resolve()} {cell}".encode()).hexdigest()[:12]
            for left in folder.glob(f"wandb/offline-run-*-{run}"):
                shutil.rmtree(left)
            given |= {"id": run, "project": "fedq-compare", "group": f"{self.name}, {self._adversary_name}"}
        else:
            given |= {"name": name.replace("/", "_"), "version": ""}
            shutil.rmtree(folder / given["name"], ignore_errors=True)
        kinds = {"wandb": "WandbLogger", "csv": "CSVLogger", "tensorboard": "TensorBoardLogger"}
        return {"class_path": f"{pl.__name__}.loggers.{kinds[kind]}", "init_args": given}

    @property
    def _adversary_name(self) -> str:
        return self.adversary.name.lower()

    def _tunings(self, row: str, epsilon: float, mechanism: Mechanism | None) -> list[Tuning | None]:
        """Ranges and rates to choose from: one where they are known, one range for what clips vectors."""
        if self.task is None:
            return [None]
        assert mechanism is not None
        who = Adversary.OUTSIDER.name.lower() if row == ABOVE else self._adversary_name
        key = (self.name, NAMES.get(row, row), who, epsilon)
        if not self.tune and (known := _tuned().get(key)):
            return [known]
        if row == ABOVE:  # clips nothing
            return [Tuning(KAPPA, rate) for rate in (0.01, 0.03, 0.1, 0.3)]
        ranges = (KAPPA,) if "clip_norm" in parse_call(repr(mechanism))[1] else RANGES
        return [Tuning(range, rate) for range in ranges for rate in self.task.rates]

    def _asked(self) -> list[tuple[str, float]]:
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
    ) -> list[Line]:
        """Train every cell that has not ended yet, and return a line for every one that was asked for.

        Args:
            out: Folder of the cells; one that is there goes on.
            jobs: Runs at a time, each in a process of one thread where there are several.
            logger: Logger that gets a run for every cell.
            begins: Listener that is told how many runs are to come, and how many find ranges and rates.
            told: Listener that is told how long they may take, in words, once the first has ended.
            ran: Listener that is given each cell as it ends.

        Returns:
            A line a cell, see `lines`.

        Raises:
            ValueError: If the folder holds another comparison, or nothing is left of what was asked for.
            OSError: If nothing can be written; what is there stays.
        """
        self._begin(out)
        root = out / "runs"
        options: dict[tuple[str, float], Option] = {}
        self.refused.clear()
        for key in self._asked():
            if all(_folder(root, Cell(*key, seed)) for seed in self.seeds):
                continue
            try:
                options[key] = self.option(*key)
            except REFUSED as refused:
                self.refused[key] = " ".join(str(refused).split())
        self._some()
        choices = {key: self._tunings(*key, option.mechanism) for key, option in options.items()}
        tried = [Cell(*key, TUNING_SEED, one) for key, some in choices.items() for one in some if some[1:]]
        cells = [Cell(*key, seed) for key in choices for seed in self.seeds]
        searches, missing = ([cell for cell in of if not _folder(root, cell)] for of in (tried, cells))
        left, processes = len(searches) + len(missing), 0
        begins(left, len(searches))

        def play(cells: Sequence[Cell]) -> None:
            """Train: the first run of all in this process, which tells how long the others take."""
            nonlocal left, processes
            made = {root / f"{cell.name}.yaml": cell for cell in cells}
            for file, cell in made.items():
                kind = None if cell.seed == TUNING_SEED else logger
                config = self.configuration(cell, options[cell.row, cell.epsilon], root, kind)
                write_atomically(file, yaml.safe_dump(config, sort_keys=False))
            if self.secret and made:
                self._write(out, list(made))
            waiting = {file: self._settings(cell) for file, cell in made.items()}
            while waiting:
                some = list(waiting.items())[: None if processes else 1]
                for file, reason in train_all(dict(some), processes):
                    cell, left = made[file], left - 1
                    del waiting[file]
                    if reason:
                        self.refused[cell.row, cell.epsilon] = reason
                    ran(cell)
                    if not processes:
                        seconds = math.nan if reason else _seconds(root, cell, self.monitor)
                        processes = 1 if seconds * left < 2.0 * _STARTS else max(min(jobs, left), 1)
                        told(_how_long(left, processes, seconds))

        play(searches)
        chosen = []
        for cell in missing:
            some = [cell._replace(tuning=tuning) for tuning in choices[cell.row, cell.epsilon]]
            chosen.append(max(some, key=lambda cell: self._validation(root, cell)))
        play(chosen)
        self._some()
        return self.lines(out)

    def _settings(self, cell: Cell) -> dict[str, Any]:
        """Settings of a cell for its loggers."""
        return {
            "task": self.name,
            "mechanism": cell.row,
            "adversary": self._adversary_name,
            "epsilon": None if cell.row == ABOVE else cell.epsilon,
            "seed": cell.seed,
            "delta": self.delta,
            "calibrated_by": describe_calibration(cell.row),
            "monitor": self.monitor,
        }

    def _validation(self, root: Path, cell: Cell) -> float:
        """Accuracy in the validation of the run that tries a cell's tuning."""
        folder = _folder(root, cell._replace(seed=TUNING_SEED))
        value = math.nan if folder is None else read_line(folder, "val_acc")["score"]
        return -math.inf if math.isnan(value) else value

    def _begin(self, out: Path) -> None:
        """Write what the folder compares.

        Raises:
            ValueError: If it holds another comparison.
        """
        path, trainer = out / SETTINGS, {**self.config["trainer"], "max_epochs": None}
        text = yaml.safe_dump({**self.config, "trainer": trainer}, sort_keys=False)
        asked = {"configuration": sha256(text.encode()).hexdigest()[:16], "rounds": self.sizes["rounds"]}
        asked |= {"adversary": self._adversary_name, "delta": self.delta, "tune": self.tune}
        there = asked
        if path.exists() or (out / "runs").exists():
            try:
                there = dict(yaml.safe_load(path.read_text()))
                [there[key] for key in asked]
            except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
                raise ValueError(f"{path} is damaged; name another folder with --out") from None
        if differ := [
            f"{k} {there.get(k)}, not {value}" for k, value in asked.items() if there.get(k) != value
        ]:
            raise ValueError(
                f"{out} holds another comparison ({'; '.join(differ)}); name another folder with --out"
            )
        write_atomically(path, yaml.safe_dump(asked, sort_keys=False))

    def _some(self) -> None:
        """Refuse to go on where nothing is left of what was asked for."""
        own = [name for name in self.names if name not in NAMES]
        why = {name: [self.refused.get((name, epsilon)) for epsilon in self.epsilons] for name in own}
        if own and all(map(all, why.values())):
            reasons = "; ".join(f"{name}: {reasons[-1]}" for name, reasons in why.items())
            raise ValueError(f"no mechanism is left. {reasons}")

    # ---- what came of it ------------------------------------------------------------------------------

    def lines(self, out: Path) -> list[Line]:
        """A line for every cell that was asked for: what its folder says, or why there is no run."""
        found: list[Line] = []
        for row, epsilon in self._asked():
            for seed in self.seeds:
                line = {
                    "task": self.name,
                    "mechanism": row,
                    "adversary": self._adversary_name,
                    "epsilon": epsilon,
                }
                line |= {"seed": seed, "delta": self.delta, "calibrated_by": describe_calibration(row)}
                if folder := _folder(out / "runs", Cell(row, epsilon, seed)):
                    line |= read_line(folder, self.monitor, None if row == ABOVE else self.adversary.name)
                    line["folder"] = str(folder)
                elif reason := self.refused.get((row, epsilon)):
                    line["reason"] = reason
                found.append(line)
        return found

    def without(self) -> dict[str, str]:
        """Names that have no row, and rows that lack runs, with the reason of each."""
        found, missing = dict(self.left_out), dict[tuple[str, str], list[float]]()
        for (row, epsilon), reason in self.refused.items():
            missing.setdefault((row, reason.replace(f" {epsilon:g}", " {epsilon}")), []).append(epsilon)
        for (name, _), epsilons in missing.items():
            shown = ", ".join(f"{epsilon:g}" for epsilon in epsilons)
            found[f"{name} at epsilon {shown}"] = self.refused[name, epsilons[0]]
        return found

    def table(self, lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
        """Heads and lines: a line a mechanism, a cell an epsilon with the bits that go with it."""
        return Pivot(lines, self.mode).table()

    def picture(self, lines: Sequence[Line]) -> Figure:
        """The score against epsilon, against bits up and against bits both ways."""
        title = f"{self.name}: epsilon towards {self.adversary.value}; seeds: {len(self.seeds)}"
        return Pivot(lines, self.mode).picture(title, self.delta)

    # ---- account of all runs --------------------------------------------------------------------------

    def _write(self, out: Path, coming: Sequence[Path] = ()) -> list[tuple[RunCost, int]]:
        """Renew the page of all runs: those that have begun, and those to come with all their rounds."""
        costs: dict[Path, RunCost | None] = {}
        runs: list[tuple[RunCost, int]] = []
        begun = [file.parent for file in sorted((out / "runs").glob("*/epsilon_*/seed_*/config.yaml"))]
        with quiet():
            for place in (*coming, *begun):
                if (group := place.parent) not in costs:
                    try:
                        costs[group] = cost_of_config(str(min(group.glob("seed_*.yaml"))), self.delta)
                    except ValueError:  # `Federated` will refuse it, and nothing is sent
                        costs[group] = None
                if cost := costs[group]:
                    runs.append(
                        (cost, cost.most_charges if place in coming else count_charged_rounds(place, cost))
                    )
        title = "Privacy of all runs of a comparison, for clients and the server"
        page = page_of_runs(runs, self.delta, title)
        rest = [run for run in runs if not _is_plain(run[0])]
        if 0 < len(rest) < len(runs):
            page += "\n" + page_of_runs(rest, self.delta, "Without FedAvg's, which hide nothing")
        write_atomically(out / ALL_RUNS, page)
        return runs

    def cost(self, out: Path) -> str:
        """Sentence on the cost of all runs of a folder for their clients, "" where keys come from a seed."""
        if not self.secret:
            return ""
        runs, who = self._write(out), self.adversary
        rest = [run for run in runs if not _is_plain(run[0])]
        found = composed(rest, who, self.delta)
        plain = len(runs) - len(rest)
        above = f" The {plain} runs of FedAvg hide nothing, whatever it is." if plain else ""
        page, many = out / ALL_RUNS, f"{len(rest)} runs with the same clients"
        if isinstance(found, str):
            return f"{page}: {many} do not add up towards {who.value}: {found}.{above}"
        price = f"epsilon {format_epsilon(found)} at delta {self.delta:g}"
        return f"{page}: {many} have cost them, towards {who.value}, {price} together.{above}"


def scaled(mechanism: Mechanism, norm: float) -> Mechanism:
    """The mechanism for updates of another norm. One that clips coordinates is itself."""
    name, values = parse_call(repr(mechanism))
    for key in ("clip_norm", "granularity", "local_sigma"):
        if values.get(key) is not None:
            values[key] *= norm
    return {**installed(), name: type(mechanism)}[name](**values)


def _find_config_file(on: str, data: Path | None) -> str:
    """File of a task or a configuration.

    Raises:
        ValueError: If there is neither, or a folder of images is missing or too much.
    """
    if (task := TASKS.get(on)) is not None:
        if task.images and data is None and not os.environ.get("FEDQ_DATA"):
            raise ValueError(f"{on} is a task on images, and those need --data FOLDER")
        if data is None or task.images:
            return str(files("lightning_fedq.comparison") / "tasks" / f"{on}.yaml")
    if data is not None:
        raise ValueError(f"--data is of the tasks on images, and {on} says where its data are; leave it out")
    try:
        return str(find(on))
    except ValueError as error:
        raise ValueError(f"there is no task {on}; there are {', '.join(TASKS)}; and {error}") from None


def _folder(root: Path, cell: Cell) -> Path | None:
    """Folder of a cell that has ended."""
    done = root / f"{cell.name}{DONE}"
    return done.with_name(done.read_text().rpartition("/")[2]) if done.is_file() else None


def _seconds(root: Path, cell: Cell, monitor: str | None) -> float:
    """Time of a run that has ended, what it does around its rounds included.

    Raises:
        ValueError: If it has no metric of the name.
    """
    folder = _folder(root, cell)
    assert folder is not None
    return _AROUND + float(read_line(folder, monitor)["seconds"])


def _how_long(runs: int, processes: int, seconds: float) -> str:
    """Words on the time that the other runs may take."""
    left = runs * seconds / processes + (_STARTS if processes > 1 else 0.0)
    shown = f"{left:.0f} s" if left < 90.0 else f"{left / 60.0:.0f} min"
    times = "a time that is not known beforehand" if math.isnan(seconds) else f"about {shown}"
    return f"{runs} more runs, {processes} at a time: {times}"


def _tuned() -> dict[tuple[str, str, str, float], Tuning]:
    """Ranges and rates that are known, by task, row, adversary and epsilon."""
    with (files("lightning_fedq.comparison") / "tasks" / "tuned.csv").open() as file:
        return {
            (line["task"], line["mechanism"], line["adversary"], float(line["epsilon"])): Tuning(
                float(line["range"]), float(line["rate"])
            )
            for line in csv.DictReader(file)
        }


def _is_plain(cost: RunCost) -> bool:
    """Is it a run of FedAvg?"""
    return cost.mechanism.startswith("FedAvg(")
