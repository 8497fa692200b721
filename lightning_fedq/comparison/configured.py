"""A comparison on a configuration of one's own: its module, its data, its `Federated`, its keys.

A cell is the configuration with another mechanism, target and seed, trained as `fedq fit` trains it. Its
folder below `runs/` holds the configuration, so that `fedq fit` of that is the same run. With secret keys all
cells compose for the same clients: what they cost together is written before the first begins.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from lightning_fedq._lightning import pl
from lightning_fedq.commands.configs import find
from lightning_fedq.commands.mechanism_text import parse_call
from lightning_fedq.commands.options import change_setting
from lightning_fedq.commands.plan import federated_settings, sizes_of
from lightning_fedq.commands.together import RunCost, charged_by, composed, cost_of_config, page_of_runs
from lightning_fedq.comparison.bench.tasks import Job, Result, Task, Tuning, quiet, scaled, tasks, told
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Adversary, Mechanism
from lightning_fedq.mechanisms.registry import class_path
from lightning_fedq.privacy.planning import Option, Problem
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.privacy.verdict import format_epsilon
from lightning_fedq.reports.runs import first_metric, mode_of, stage_of, write_atomically
from lightning_fedq.secagg import SecAgg

ALL_RUNS = "all_runs.md"


def task_of(
    on: str,
    data: Path | None = None,
    rounds: int | None = None,
    delta: float = 1e-5,
    monitor: str | None = None,
    mode: Literal["max", "min"] | None = None,
) -> Task:
    """A task that comes along, or that of a configuration.

    Args:
        on: Name of the task; a configuration, a file or a name.
        data: Folder of the images; None is `FEDQ_DATA` in the environment.
        rounds: Rounds of a run, >= 1; None is the task's own.
        delta: Delta of the targets, below 1 / clients.
        monitor: Metric of a configuration's runs that is the score; None is the test's accuracy, or whatever
            the test or else the validation has first.
        mode: Is a larger or a smaller score better? None goes by the metric's name.

    Raises:
        ValueError: If there is neither, or nothing is federated.
    """
    given = data
    data = data or (Path(os.environ["FEDQ_DATA"]) if os.environ.get("FEDQ_DATA") else None)
    known = tasks(data)
    if on in known:
        if monitor is not None or mode is not None:
            raise ValueError(
                f"--monitor and --mode are of a configuration, and {on} has its score; leave them out"
            )
        return replace(known[on], rounds=rounds or known[on].rounds, delta=delta)
    if on in tasks(Path()):
        raise ValueError(f"{on} is a task on images, and those need --data FOLDER")
    try:
        path = str(find(on))
    except ValueError as error:
        raise ValueError(f"there is no task {on}; there are {', '.join(known)}; and {error}") from None
    if given is not None:
        raise ValueError(f"--data is of the tasks on images, and {on} says where its data are; leave it out")
    from lightning_fedq.commands.run import resolve  # imports Lightning's command line: only here

    with quiet():
        sizes, federated, clip = sizes_of(path, "fedq compare")
    sizes |= {} if rounds is None else {"rounds": rounds}
    if "rounds" not in sizes:
        raise ValueError(f"{on} sets no number of rounds; give --rounds")
    with quiet():
        config = resolve([path])
    config["trainer"]["max_epochs"] = sizes["rounds"]
    task = Configured(
        Path(path).stem,
        sizes["clients"],
        sizes["rounds"],
        sizes=sizes,
        config=config,
        masks=federated.server.secure_aggregation or SecAgg(),
        clip_norm=clip,
        participation=federated.planner.participation,
        secret=federated.seed is None,
        delta=delta,
        mode=mode,
    )
    task.scored_by(monitor)
    return task


@dataclass(frozen=True)
class Configured(Task):
    """A configuration, trained with any mechanism at any target.

    Args:
        sizes: What `Problem` asks for, but for target and masks.
        config: Every setting, as `resolve` gives them.
        masks: Masks, where the target is about a server behind them.
        clip_norm: Norm to which updates are clipped, where the mechanism does.
        participation: How clients take part.
        secret: Do keys come from the operating system, so that runs are private and add up?
        mode: Is a larger or a smaller score better? None goes by the metric's name.
        known: What is found out on the way: the metric, the folder of runs, costs by row and epsilon.
    """

    sizes: Mapping[str, Any] = field(kw_only=True)
    config: Mapping[str, Any] = field(kw_only=True, repr=False)
    masks: SecAgg = field(kw_only=True)
    clip_norm: float = field(kw_only=True)
    participation: str = field(kw_only=True)
    secret: bool = field(kw_only=True)
    mode: str | None = field(kw_only=True, default=None)
    known: dict[str, Any] = field(kw_only=True, default_factory=dict, compare=False, repr=False)

    _once = False

    @property
    def dim(self) -> int:
        return int(self.sizes["params"])

    @property
    def identity(self) -> dict[str, str]:
        text = json.dumps(self.config, sort_keys=True, default=str)
        return {"configuration": sha256(text.encode()).hexdigest()[:16]}

    @property
    def note(self) -> str:  # type: ignore[override]
        if not self.secret:
            return Task.note
        return f"Keys are secret, and all runs add up for the same clients: {ALL_RUNS}."

    def scored_by(self, monitor: str | None) -> None:
        """Choose the score, a metric of the runs."""
        self.known["monitor"] = monitor
        better = "larger" if (self.mode or mode_of(monitor or "accuracy")) == "max" else "smaller"
        object.__setattr__(self, "unit", monitor or "metric of the test")
        object.__setattr__(self, "better", better)

    def problem(self, epsilon: float, adversary: Adversary) -> Problem:
        target = PrivacyTarget(epsilon, self.delta, adversary)
        return Problem(**self.sizes, target=target, secure_aggregation=self.masks)

    def tunings(self, mechanism: Mechanism) -> list[Tuning]:
        return [Tuning()]

    def begin(self, out: Path, jobs: Sequence[Job], facts: dict[str, Any]) -> None:
        """Write what all runs will cost, and time a round of FedAvg, which also says what is measured."""
        self.known["root"], self.known["costs"] = out / "runs", {}
        if "monitor" in facts:
            if self.known["monitor"] not in (None, facts["monitor"]):
                raise ValueError(
                    f"{out} compares {facts['monitor']}, not {self.known['monitor']}; name another folder "
                    "with --out"
                )
            self.scored_by(facts["monitor"])
        if self.secret and jobs:
            costs = [cost for job in jobs if (cost := self._cost(job)) is not None]
            self._write(out, costs)
        if not jobs or "seconds" in facts:
            return
        start, first = time.monotonic(), next((job for job in jobs if job.target is None), jobs[0])
        trial = self.settings(first._replace(option=Option("FedAvg", FedAvg()), target=None))
        trial["trainer"].update(max_epochs=1, logger=False)
        cli, seconds = self._train(trial, "trial/epsilon_inf/seed_0"), time.monotonic() - start
        rounds = cli.run_folder.rows[0]["seconds"]
        facts["seconds"] = seconds + (self.rounds - 1) * (0.0 if math.isnan(rounds) else rounds)
        metrics = cli.run_folder.summary["metrics"]
        self.scored_by(self.known["monitor"] or _usual(metrics))
        if self.known["monitor"] not in metrics:
            raise ValueError(f"no run has a metric {self.unit}; --monitor takes one of {', '.join(metrics)}")
        facts["monitor"] = self.known["monitor"]

    def settings(self, job: Job) -> dict[str, Any]:
        """The configuration of a cell."""
        config: dict[str, Any] = copy.deepcopy(dict(self.config))
        config["seed_everything"] = job.seed
        config["trainer"]["default_root_dir"] = str(self.known["root"] / "checkpoints" / _name(job))
        changed: dict[str, Any] = {"privacy": None, "secure_aggregation": None}
        if job.target is None:
            changed["mechanism"] = {"class_path": class_path(FedAvg)}
        else:
            problem = self.problem(job.target.epsilon, job.target.against)
            changed |= federated_settings(job.option, problem, self.clip_norm, self.participation)
        if job.as_is and job.option.mechanism is not None:  # to the last digit, as nothing calibrates it
            exact = parse_call(repr(scaled(job.option.mechanism, self.clip_norm)))[1]
            known = {name: value for name, value in exact.items() if value is not None}
            changed |= {"privacy": None, "mechanism": {**changed["mechanism"], "init_args": known}}
        if not self.secret:
            changed["seed"] = job.seed
        for name, value in changed.items():
            change_setting(config, f"Federated.{name}", value)
        callbacks = config["trainer"]["callbacks"]
        names = [each["class_path"].rpartition(".")[2] for each in callbacks]
        wanted = ["RunFolder", *(["WandbRounds"] if job.log and job.log.kind == "WandbLogger" else [])]
        callbacks += [{"class_path": f"lightning_fedq.callbacks.{n}"} for n in wanted if n not in names]
        if changed["privacy"] is None:  # no target says at which delta the page is
            (folder,) = (each for each in callbacks if each["class_path"].endswith(".RunFolder"))
            folder.setdefault("init_args", {})["delta"] = self.delta
        if job.log is not None:
            kind = f"{pl.__name__}.loggers.{job.log.kind}"
            config["trainer"]["logger"] = {"class_path": kind, "init_args": job.log.arguments}
        return config

    def run(self, job: Job) -> Result:
        start = time.process_time()
        cli = self._train(self.settings(job), _name(job))
        folder = cli.run_folder
        summary, privacy, monitor = folder.summary, folder.privacy, self.known["monitor"]
        up, keys = summary["bits_per_parameter"], summary["protocol_bits_per_parameter"]
        seen = summary["noise_over_signal"].get("sim_seen")
        rows = {} if job.target is None else {row.name: row.epsilon for row in privacy.readable_rows}
        result = Result(
            score=summary["metrics"][monitor],
            validation=summary["metrics"][monitor],
            bits=up - keys,
            all_bits=up,
            planned=job.option.ratio,
            seen=math.nan if seen is None else seen,
            setting=summary["mechanism"],
            seconds=time.process_time() - start,
            down=privacy.bits.down,
            spent=rows.get(job.target.against.name) if job.target else math.inf,
        )
        told(cli.trainer.loggers, job, result)
        return result

    def _train(self, config: dict[str, Any], name: str) -> Any:
        """The command line of a run that has ended. What it prints goes to a file beside its folder.

        Raises:
            ValueError: If the configuration is refused.
        """
        from lightning_fedq.commands.run import train_config

        log = self.known["root"] / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file, quiet(), redirect_stdout(file), redirect_stderr(file):
            try:
                return train_config(config, name, self.known["root"])
            except SystemExit as leaves:
                if leaves.code != 2:
                    raise
        raise ValueError(f"its configuration is refused: {log.read_text().strip().splitlines()[-2:]}")

    # ---- account --------------------------------------------------------------------------------------

    def _cost(self, job: Job) -> RunCost | None:
        """Cost of a run that has not begun, None where `Federated` will refuse it and nothing is sent."""
        from lightning_fedq.commands.run import configuration_file

        group = Path(_name(job)).parent
        if group not in self.known["costs"]:
            with configuration_file(self.settings(job)) as path, quiet():
                try:
                    self.known["costs"][group] = cost_of_config(path, self.delta)
                except ValueError:
                    self.known["costs"][group] = None
        found: RunCost | None = self.known["costs"][group]
        return found

    def _begun(self) -> Iterator[tuple[RunCost, int]]:
        """Cost of every run that has begun, and the rounds of its most charged client."""
        root, costs = self.known["root"], self.known["costs"]
        for file in sorted(root.glob("*/epsilon_*/seed_*/config.yaml")):
            group = file.parents[1].relative_to(root)
            if costs.get(group) is None:
                costs[group] = cost_of_config(str(file), self.delta)
            yield costs[group], charged_by(file.parent, costs[group])

    def _write(self, out: Path, coming: Sequence[RunCost] = ()) -> list[tuple[RunCost, int]]:
        """Renew the page of all runs: those that have begun, and those to come with all their rounds."""
        runs = [*self._begun(), *((cost, cost.most_charges) for cost in coming)]
        title = "Privacy of all runs of a comparison, for clients and the server"
        page = page_of_runs(runs, self.delta, title)
        rest = [run for run in runs if not _is_plain(run[0])]
        if 0 < len(rest) < len(runs):
            page += "\n" + page_of_runs(rest, self.delta, "Without FedAvg's, which hide nothing")
        write_atomically(out / ALL_RUNS, page)
        return runs

    def cost(self, out: Path, who: Adversary) -> str:
        if not self.secret:
            return ""
        with quiet():
            runs = self._write(out)
        rest = [run for run in runs if not _is_plain(run[0])]
        found = composed(rest, who, self.delta)
        plain = len(runs) - len(rest)
        above = f" The {plain} runs of FedAvg hide nothing, whatever it is." if plain else ""
        page, many = out / ALL_RUNS, f"{len(rest)} runs with the same clients"
        if isinstance(found, str):
            return f"{page}: {many} do not add up towards {who.value}: {found}.{above}"
        price = f"epsilon {format_epsilon(found)} at delta {self.delta:g}"
        return f"{page}: {many} have cost them, towards {who.value}, {price} together.{above}"


def _is_plain(cost: RunCost) -> bool:
    """Is it a run of FedAvg?"""
    return cost.mechanism.startswith("FedAvg(")


def _name(job: Job) -> str:
    """Folder of a cell, below that of all runs."""
    row = re.sub(r"[^\w.]+", "_", str(job.settings["mechanism"])).strip("_")
    epsilon = "inf" if job.target is None else f"{job.target.epsilon:g}"
    return f"{row}/epsilon_{epsilon}/seed_{job.seed}"


def _usual(metrics: Mapping[str, float]) -> str:
    """Score of a run: accuracy in the test, else its first metric, else one of the validation.

    Raises:
        ValueError: If nothing of the kind was logged.
    """
    tested = [name for name in metrics if stage_of(name) == "test"]
    found = next((name for name in tested if name in ("test_acc", "test/acc")), next(iter(tested), None))
    if found is None and (found := first_metric([metrics])) is None:
        raise ValueError(f"nothing of test or validation was logged; --monitor takes one of {list(metrics)}")
    return found
