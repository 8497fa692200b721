"""`fedq sweep`: a grid of settings on this machine, and the same grid as a file for Weights & Biases."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from lightning_fedq.commands.compare import compare
from lightning_fedq.commands.settings import change_setting
from lightning_fedq.reports import fresh_folder, mode_of, write_atomically


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
    options = parser.parse_args(argv)
    from lightning_fedq.commands.run import resolve, run_config  # imports Lightning: not for --help

    out, mode = fresh_folder(Path(options.out)), options.mode or mode_of(options.monitor)
    try:
        base = resolve(options.configs)
        grid = parse_grid(options.grid)
        points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
        configs = [copy.deepcopy(base) for _ in points]
        for config, point in zip(configs, points, strict=True):
            for name, value in point.items():
                change_setting(config, name, value)
    except ValueError as error:
        parser.error(str(error))
    write_atomically(out / "sweep.yaml", wandb_sweep(options.configs, grid, options.monitor, mode))
    folders = {}
    for config, point in zip(configs, points, strict=True):
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in point.items())
        folders[name] = run_config(config, name, out)
    compare(folders, options.monitor, out, mode)
    return 0
