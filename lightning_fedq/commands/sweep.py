"""`fedq sweep`: a grid of settings on this machine, and the same grid as a file for Weights & Biases."""

from __future__ import annotations

import argparse
import copy
import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from lightning_fedq._lightning import callbacks_of
from lightning_fedq.callbacks.federated import Federated
from lightning_fedq.commands.compare import compare
from lightning_fedq.commands.experiment import RunCost, cost_of, page_of_runs, page_of_winner
from lightning_fedq.commands.settings import change_setting
from lightning_fedq.keys.randomness import Stream
from lightning_fedq.privacy.selection import NegativeBinomialTrials
from lightning_fedq.reports.runs import fresh_folder, mode_of, read_rows, write_atomically


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
    """Return the grid as a Weights & Biases sweep file. Each of its runs is a `fedq sweep` of one point."""
    command = ["fedq", "sweep", *configs, "--set", "${args_no_hyphens}"]
    return yaml.safe_dump(
        {
            "method": "grid",
            "metric": {"name": f"fed/{monitor}", "goal": "maximize" if mode == "max" else "minimize"},
            "parameters": {name: {"values": list(values)} for name, values in grid.items()},
            "command": command,
        },
        sort_keys=False,
    )


def main(argv: Sequence[str]) -> int:
    """Run every point of the grid, then compare."""
    parser = argparse.ArgumentParser(
        prog="fedq sweep",
        description="Train a configuration at every point of a grid and compare the runs. "
        "No account is needed; sweep.yaml holds the same grid for `wandb sweep`.",
        epilog="example: fedq sweep digits_corbin --set Federated.server_lr=0.1,0.2,0.5,1.0",
    )
    parser.add_argument(
        "configs", nargs="+", metavar="CONFIG", help="configurations (files or names), merged in this order"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        required=True,
        metavar="NAME=V,V",
        dest="grid",
        help="settings and their values; a name starts at a class (Federated.server_lr, CorBin.epsilon) "
        "or at a top-level key (trainer.max_epochs)",
    )
    parser.add_argument("--monitor", default="val_acc", help="the metric to compare (default: %(default)s)")
    parser.add_argument(
        "--mode", choices=("max", "min"), help="is larger or smaller better? (default: by name)"
    )
    parser.add_argument("--out", default="runs/sweep", help="folder of all runs (default: %(default)s)")
    parser.add_argument(
        "--selection",
        choices=("compose", "tnb"),
        default="compose",
        help="compose trains every point of the grid; tnb a random number of points, drawn anew for every "
        "run, and publishes the best one alone, which costs an outsider little (default: %(default)s)",
    )
    parser.add_argument("--mean", type=float, help="runs on average, with tnb")
    parser.add_argument(
        "--eta", type=float, default=0.0, help="shape of the law with tnb, > -1 (default: %(default)s)"
    )
    parser.add_argument(
        "--delta", type=float, default=1e-5, help="of the whole sweep's epsilon (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    from lightning_fedq.commands.run import resolve  # imports Lightning: not for --help

    out, mode = fresh_folder(Path(options.out)), options.mode or mode_of(options.monitor)
    try:
        base = resolve(options.configs)
        grid = parse_grid(options.grid)
        points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
        configs = [copy.deepcopy(base) for _ in points]
        for config, point in zip(configs, points, strict=True):
            for name, value in point.items():
                change_setting(config, name, value)
        names = [
            ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in point.items()) for point in points
        ]
        named = dict(zip(names, configs, strict=True))
        if options.selection == "tnb":
            if options.mean is None:
                raise ValueError("--selection tnb needs --mean, the number of runs on average; 10 say")
            trials = NegativeBinomialTrials.of_mean(options.eta, options.mean)
            plan = _Selection(named, trials, options.delta, options.monitor)
        elif options.mean is not None:
            raise ValueError("--mean belongs to --selection tnb; add it, or leave --mean out")
        else:
            costs = [_cost(config, options.delta) for config in configs]
    except ValueError as error:
        parser.error(str(error))
    write_atomically(out / "sweep.yaml", wandb_sweep(options.configs, grid, options.monitor, mode))
    if options.selection == "tnb":
        plan.run(out, options.monitor, mode)
        return 0
    folders = _run_all(named, costs, out, options.delta)
    compare(folders, options.monitor, out, mode)
    return 0


def _run_all(
    configs: Mapping[str, dict[str, Any]], costs: Sequence[RunCost | None], out: Path, delta: float
) -> dict[str, Path]:
    """Train every configuration, and write what all of them cost together."""
    from lightning_fedq.commands.run import run_config

    folders = {name: run_config(config, name, out) for name, config in configs.items()}
    known = [cost for cost in costs if cost is not None]
    if len(known) == len(costs):
        title = "Privacy of all runs of this sweep"
        page = page_of_runs(known, [_charged(folder) for folder in folders.values()], delta, True, title)
        write_atomically(out / "sweep.md", page)
        print(f"{out / 'sweep.md'}: what all runs cost together")
    return folders


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
    federated = next((c for c in callbacks_of(cli.trainer) if isinstance(c, Federated)), None)
    if federated is None or delta >= 1.0 / federated.clients.num_clients:
        return None
    return cost_of(federated, cli.trainer, cli.model, delta)


class _Selection:
    """A random number of runs, of which the best one is published.

    Args:
        configs: Candidates, by name.
        trials: Law of the number of runs.
        delta: Chance with which the epsilon of the whole sweep may fail.
        monitor: Score, a metric of the validation.

    Raises:
        ValueError: If nothing could be said of the winner.
    """

    def __init__(
        self,
        configs: Mapping[str, dict[str, Any]],
        trials: NegativeBinomialTrials,
        delta: float,
        monitor: str,
    ) -> None:
        self._configs, self._trials, self._delta = configs, trials, delta
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
        self._page = page_of_winner(list(self._costs.values()), trials, delta, list(configs))

    def run(self, out: Path, monitor: str, mode: str) -> None:
        """Train, keep everything in `private/`, and export the winner.

        Raises:
            ValueError: If a run has logged no such metric.
        """
        from lightning_fedq.commands.run import run_config

        private, winner = out / "private", out / "winner"
        made: list[tuple[str, Path, float]] = []
        secret, names = Stream(os.urandom(32)), list(self._configs)
        for _ in range(self._trials.draw(secret)):
            name = names[int(secret.uniform_below(len(names), 1)[0])]
            config = copy.deepcopy(self._configs[name])
            config["trainer"]["default_root_dir"] = str(private)
            folder = run_config(config, "run", private)
            last = read_rows(folder / "metrics.csv")[-1]
            if monitor not in last:
                raise ValueError(f"a run has logged no {monitor}; --monitor takes one of the validation")
            made.append((name, folder, last[monitor]))
        page = page_of_runs(
            [self._costs[name] for name, _, _ in made],
            [_charged(folder) for _, folder, _ in made],
            self._delta,
            False,
            "Privacy of all runs, for clients and the server. Not to be handed on",
        )
        write_atomically(private / "all_runs.md", page)
        name, folder, score = (max if mode == "max" else min)(made, key=lambda run: run[2])
        winner.mkdir(parents=True)
        shutil.copyfile(folder / "model.ckpt", winner / "model.ckpt")
        write_atomically(winner / "settings.yaml", yaml.safe_dump({"settings": name, monitor: score}))
        write_atomically(winner / "privacy.md", self._page)
        print(f"{winner}: the winner, {name} with {monitor} {score:.4g}; this folder alone may be published")
        print(f"{private / 'all_runs.md'}: what clients and the server pay")
