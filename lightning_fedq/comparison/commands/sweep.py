"""`fedq sweep`: what all runs of a search cost together, and the best of a random number of runs."""

import copy
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from lightning_fedq.comparison.experiment import (
    RunCost,
    charged_by,
    cost_of_config,
    cost_of_folder,
    page_of_runs,
    page_of_winner,
)
from lightning_fedq.comparison.selection import NegativeBinomialTrials
from lightning_fedq.keys.randomness import Stream
from lightning_fedq.reports.runs import fresh_folder, mode_of, read_rows, write_atomically


def cost(
    runs: Annotated[Sequence[Path], "RUN"], *, delta: float = 1e-5, out: Path = Path("runs/sweep.md")
) -> None:
    """Say what runs with the same clients cost them together, adversary by adversary. Whatever
    searched (a loop over `fedq fit --set`, Optuna, agents of Weights & Biases), name every run.

    Args:
        runs: Folder of a run that `fedq fit` began. One that has not ended counts with all its rounds.
        delta: Delta of all runs together.
        out: Page to write.

    Examples:
        fedq sweep cost runs/mine runs/mine-2 runs/mine-3
    """
    costs = [cost_of_folder(folder, delta) for folder in runs]
    charges = [charged_by(folder, cost) for folder, cost in zip(runs, costs, strict=True)]
    page = page_of_runs(costs, charges, delta, True, "Privacy of all runs of a search")
    write_atomically(out, page)
    print(f"{page}\n{out}")


def select(
    configs: Annotated[Sequence[str], "CONFIG"],
    *,
    mean: float,
    eta: float = 0.0,
    monitor: str = "val_acc",
    mode: Literal["max", "min"] | None = None,
    delta: float = 1e-5,
    at_most: Annotated[int | None, "RUNS"] = None,
    publish_after: Annotated[float | None, "MINUTES"] = None,
    out: Path = Path("runs/sweep"),
) -> None:
    """Train a random number of configurations, each drawn anew from those given, and export the
    best one alone: that costs an outsider little. Clients and the server pay for all.

    Args:
        configs: Candidate, a file or a name.
        mean: Runs on average.
        eta: Shape of the law of their number, > -1 (default: 0.0).
        monitor: Score, a metric of the validation.
        mode: Direction in which the metric is better (default: by name).
        delta: Delta of the whole sweep's epsilon.
        at_most: Limit on the runs; the chance that more were drawn is counted in delta.
        publish_after: Time of the winner's export after the start, however many runs there were:
            then the duration tells nothing. Where the runs take longer, nothing is exported.
        out: Folder of all runs.

    Examples:
        fedq sweep select slow.yaml fast.yaml --mean 10
    """
    from lightning_fedq.commands.run import resolve  # imports Lightning: not for --help

    limits = {} if at_most is None else {"at_most": at_most}
    trials = NegativeBinomialTrials.of_mean(eta, mean, **limits)
    candidates = {config: resolve([config]) for config in configs}
    plan = _Selection(candidates, trials, delta, monitor, publish_after)
    plan.run(fresh_folder(out), monitor, mode or mode_of(monitor))


main = {"cost": cost, "select": select}


class _Costs:
    """The page of what all runs cost together, written before a run begins and again when it has ended.

    A run that has begun counts with all the rounds that it may have until it has ended: one that fails is
    not forgotten.

    Args:
        delta: Chance with which the whole sweep's epsilon may fail.
    """

    def __init__(self, path: Path, delta: float) -> None:
        self._path, self._delta = path, delta
        self.costs: list[RunCost] = []
        self._charges: list[int] = []

    def begin(self, cost: RunCost) -> None:
        """Count a run that begins now."""
        self.costs.append(cost)
        self._charges.append(cost.most_charges)
        self._write()

    def end(self, folder: Path) -> None:
        """Count the run that has ended with the rounds that it has had."""
        self._charges[-1] = charged_by(folder, self.costs[-1])
        self._write()

    def _write(self) -> None:
        title = "Privacy of all runs, for clients and the server. Not to be handed on"
        write_atomically(self._path, page_of_runs(self.costs, self._charges, self._delta, False, title))


class _Selection:
    """A random number of runs, of which the best one is published.

    Args:
        configs: Candidates, by name.
        delta: Chance with which the epsilon of the whole sweep may fail.
        monitor: Score, a metric of the validation.
        minutes: When the winner is exported, in minutes after the start; None for as soon as it is known.

    Raises:
        ValueError: If nothing could be said of the winner.
    """

    def __init__(
        self,
        configs: Mapping[str, dict[str, Any]],
        trials: NegativeBinomialTrials,
        delta: float,
        monitor: str,
        minutes: float | None = None,
    ) -> None:
        from lightning_fedq.commands.run import configuration_file

        self._configs, self._trials, self._delta, self._minutes = configs, trials, delta, minutes
        if minutes is not None and not 0.0 < minutes < math.inf:
            raise ValueError(f"--publish-after takes minutes above 0, got {minutes:g}")
        if not monitor.startswith("val"):
            raise ValueError(
                f"the winner's score is published, and only validation data count as public, got "
                f"{monitor!r}; --monitor takes a metric of the validation, whose name begins with val"
            )
        for name, config in configs.items():
            if isinstance(config["trainer"].get("logger"), dict | list):
                raise ValueError(
                    f"{name} has a logger of its own, which would tell how many runs there were; set "
                    "trainer.logger to false"
                )
            config["trainer"]["logger"] = False
        self._costs = {}
        for name, config in configs.items():
            with configuration_file(config) as path:
                self._costs[name] = cost_of_config(path, delta)
        # refuses what nothing is known of, before anything is trained
        self._page = page_of_winner(list(self._costs.values()), trials, delta, list(configs), minutes)

    def run(self, out: Path, monitor: str, mode: str) -> None:
        """Train, keep everything in `private/`, and export the winner.

        A score that is no number is the worst one. A run that fails ends the sweep, nothing is exported, and
        what the runs have cost by then stays written down.

        Raises:
            ValueError: If a run has logged no such metric.
            TimeoutError: If the runs took longer than the winner was to wait for.
        """
        from lightning_fedq.commands.run import run_config

        begun, start = time.time(), time.monotonic()
        private, names = out / "private", list(self._configs)
        page = _Costs(private / "all_runs.md", self._delta)
        made: list[tuple[str, Path, float]] = []
        secret = Stream(os.urandom(32))
        for _ in range(self._trials.draw(secret)):
            name = names[int(secret.uniform_below(len(names), 1)[0])]
            config = copy.deepcopy(self._configs[name])
            config["trainer"]["default_root_dir"] = str(private)
            private.mkdir(parents=True, exist_ok=True)
            page.begin(self._costs[name])
            folder = run_config(config, "run", private)
            page.end(folder)
            last = read_rows(folder / "metrics.csv")[-1]
            if monitor not in last:
                raise ValueError(f"a run has logged no {monitor}; --monitor takes one of the validation")
            worst = -math.inf if mode == "max" else math.inf
            made.append((name, folder, worst if math.isnan(last[monitor]) else last[monitor]))
        name, folder, score = (max if mode == "max" else min)(made, key=lambda run: run[2])
        if self._minutes is not None:
            _wait_until(start + 60.0 * self._minutes, private)
        _export(out, folder, {"settings": name, monitor: score}, self._page, begun)
        print(f"{out / 'winner'}: the winner, {name} with {monitor} {score:.4g}")
        print(f"{private / 'all_runs.md'}: what clients and the server pay; not to be handed on")


def _export(out: Path, folder: Path, settings: dict[str, Any], page: str, begun: float) -> None:
    """Write the winner's folder. Its files carry the time at which the sweep began."""
    winner = out / "winner"
    winner.mkdir(parents=True)
    shutil.copyfile(folder / "model.ckpt", winner / "model.ckpt")
    write_atomically(winner / "settings.yaml", yaml.safe_dump(settings))
    write_atomically(winner / "privacy.md", page)
    for path in [*winner.iterdir(), winner]:
        os.utime(path, (begun, begun))


def _wait_until(due: float, private: Path) -> None:
    """Sleep until the monotonic clock says `due`.

    Raises:
        TimeoutError: If that is over.
    """
    left = due - time.monotonic()
    if left < 0.0:
        raise TimeoutError(
            f"the runs took {-left / 60.0:.3g} minutes longer than --publish-after, so when the winner came "
            f"out would tell of their number, and nothing is exported; {private} has the runs, which count "
            "for clients and the server. Give more minutes, or fewer runs with --at-most"
        )
    print(f"the winner is exported in {left / 60.0:.3g} minutes", flush=True)
    time.sleep(left)
