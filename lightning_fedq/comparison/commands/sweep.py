"""`fedq sweep`: a grid of settings on this machine, and the same grid as a file for Weights & Biases."""

import copy
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from lightning_fedq._lightning import callbacks_of
from lightning_fedq.commands.configs import fragments
from lightning_fedq.commands.options import change_setting
from lightning_fedq.comparison.commands.compare import compare
from lightning_fedq.comparison.experiment import RunCost, cost_of, page_of_runs, page_of_winner
from lightning_fedq.comparison.selection import NegativeBinomialTrials
from lightning_fedq.keys.randomness import Stream
from lightning_fedq.reports.runs import fresh_folder, mode_of, read_rows, write_atomically
from lightning_fedq.training.federation import Federation


def parse_grid(arguments: Sequence[str]) -> dict[str, list[Any]]:
    """Parse `name=value,value,...` into the values of each setting. Values are YAML.

    Raises:
        ValueError: If an argument has another form.
    """
    grid: dict[str, list[Any]] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        values = yaml.safe_load(f"[{text}]") if equals else []
        if not values:
            raise ValueError(
                f"a grid is name=value,value,... such as Federated.server_lr=0.1,0.5,1.0, got {argument!r}"
            )
        grid[name] = values
    return grid


def wandb_sweep(configs: Sequence[str], grid: Mapping[str, Sequence[Any]], monitor: str, mode: str) -> str:
    """Return the grid as a Weights & Biases sweep file. Each of its runs is a `fedq sweep` of one point.

    An agent learns what a run logs to W&B alone: the shipped logger is added, and sends.
    """
    command = ["fedq", "sweep", *configs, str(fragments()["wandb"])]
    command += ["--set", "WandbLogger.offline=false", "${args_no_hyphens}"]
    return yaml.safe_dump(
        {
            "method": "grid",
            "metric": {"name": f"fed/{monitor}", "goal": "maximize" if mode == "max" else "minimize"},
            "parameters": {name: {"values": list(values)} for name, values in grid.items()},
            "command": command,
        },
        sort_keys=False,
    )


def main(
    configs: Annotated[Sequence[str], "CONFIG"],
    *,
    set_: Annotated[Sequence[str], "NAME=V,V"],
    monitor: str = "val_acc",
    mode: Literal["max", "min"] | None = None,
    out: Path = Path("runs/sweep"),
    selection: Literal["compose", "tnb"] = "compose",
    mean: float | None = None,
    eta: float = 0.0,
    delta: float = 1e-5,
    at_most: Annotated[int | None, "RUNS"] = None,
    publish_after: Annotated[float | None, "MINUTES"] = None,
) -> None:
    """Train a configuration at every point of a grid and compare the runs. No account is needed,
    and sweep.yaml holds the same grid for `wandb sweep`.

    Args:
        configs: Configurations (files or names), merged in this order.
        set_: Settings and their values; a name starts at a class (Federated.server_lr,
            CorBin.epsilon) or at a top-level key (trainer.max_epochs).
        monitor: Metric to compare.
        mode: Direction in which the metric is better (default: by name).
        out: Folder of all runs.
        selection: compose trains every point of the grid; tnb a random number of points, drawn
            anew for every run, and publishes the best one alone, which costs an outsider little.
        mean: Runs on average, with tnb.
        eta: Shape of the law with tnb, > -1 (default: 0.0).
        delta: Delta of the whole sweep's epsilon.
        at_most: Limit on the runs, with tnb; the chance that more were drawn is counted in delta.
        publish_after: Time of the winner's export after the start, with tnb, however many runs
            there were: then the duration tells nothing. Where the runs take longer, nothing is
            exported.

    Examples:
        fedq sweep digits_corbin --set Federated.server_lr=0.1,0.2,0.5,1.0
    """
    from lightning_fedq.commands.run import resolve  # imports Lightning: not for --help

    mode = mode or mode_of(monitor)
    base, grid = resolve(configs), parse_grid(set_)
    named = {}
    for values in product(*grid.values()):
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in zip(grid, values, strict=True))
        named[name] = copy.deepcopy(base)
        for key, value in zip(grid, values, strict=True):
            change_setting(named[name], key, value)
    if selection == "tnb":
        if mean is None:
            raise ValueError("--selection tnb needs --mean, the number of runs on average; 10 say")
        limits = {} if at_most is None else {"at_most": at_most}
        trials = NegativeBinomialTrials.of_mean(eta, mean, **limits)
        plan = _Selection(named, trials, delta, monitor, publish_after)
    else:
        of_tnb = {"--mean": mean, "--at-most": at_most, "--publish-after": publish_after}
        if given := [option for option, value in of_tnb.items() if value is not None]:
            raise ValueError(f"{given[0]} belongs to --selection tnb; add it, or leave {given[0]} out")
        costs = [_cost(config, delta) for config in named.values()]
    out = fresh_folder(out)
    write_atomically(out / "sweep.yaml", wandb_sweep(configs, grid, monitor, mode))
    if selection == "tnb":
        plan.run(out, monitor, mode)
    else:
        compare(_run_all(named, costs, out, delta), monitor, out, mode)


def _run_all(
    configs: Mapping[str, dict[str, Any]], costs: Sequence[RunCost | None], out: Path, delta: float
) -> dict[str, Path]:
    """Train every configuration, and write what all of them cost together."""
    from lightning_fedq.commands.run import run_config

    known, folders = [cost for cost in costs if cost is not None], {}
    page = _Costs(out / "sweep.md", delta, True, "Privacy of all runs of this sweep")
    for (name, config), cost in zip(configs.items(), costs, strict=True):
        if len(known) == len(costs) and cost is not None:
            page.begin(cost)
        folders[name] = run_config(config, name, out)
        page.end(folders[name])
    if page.costs:
        print(f"{out / 'sweep.md'}: what all runs cost together")
    return folders


class _Costs:
    """The page of what all runs cost together, written before a run begins and again when it has ended.

    A run that has begun counts with all the rounds that it may have until it has ended: one that fails is
    not forgotten.

    Args:
        delta: Chance with which the whole sweep's epsilon may fail.
        fixed: Was the number of runs fixed beforehand?
    """

    def __init__(self, path: Path, delta: float, fixed: bool, title: str) -> None:
        self._path, self._delta, self._fixed, self._title = path, delta, fixed, title
        self.costs: list[RunCost] = []
        self._charges: list[int] = []

    def begin(self, cost: RunCost) -> None:
        """Count a run that begins now."""
        self.costs.append(cost)
        self._charges.append(cost.most_charges)
        self._write()

    def end(self, folder: Path) -> None:
        """Count the run that has ended with the rounds that it has had."""
        if self.costs:
            self._charges[-1] = _charged(folder)
            self._write()

    def _write(self) -> None:
        page = page_of_runs(self.costs, self._charges, self._delta, self._fixed, self._title)
        write_atomically(self._path, page)


def _charged(folder: Path) -> int:
    """Rounds of the most charged client of a finished run."""
    last = read_rows(folder / "metrics.csv")[-1]
    return int(last.get("charged", last["round"]))


def _cost(config: dict[str, Any], delta: float) -> RunCost | None:
    """Cost of a configuration that has not run. None where nothing is federated, or delta does not fit.

    Raises:
        ValueError: If its target can't be met.
    """
    from lightning_fedq.commands.run import FedqCLI, configuration_file

    with configuration_file(config) as path:
        cli = FedqCLI(["--config", path], run=False)
    federated = next((c for c in callbacks_of(cli.trainer) if isinstance(c, Federation)), None)
    if federated is None or delta >= 1.0 / federated.clients.num_clients:
        return None
    return cost_of(federated, cli.trainer, cli.model, delta)


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
        costs = {name: _cost(config, delta) for name, config in configs.items()}
        if missing := [name for name, cost in costs.items() if cost is None]:
            raise ValueError(
                f"{missing[0]} has no Federated callback, or delta {delta:g} is not below 1 / clients; "
                "--selection tnb is about federated runs"
            )
        self._costs = {name: cost for name, cost in costs.items() if cost is not None}
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
        page = _Costs(
            private / "all_runs.md",
            self._delta,
            False,
            "Privacy of all runs, for clients and the server. Not to be handed on",
        )
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
