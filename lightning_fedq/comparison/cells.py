"""Folder and cells of a comparison.

An interrupted comparison continues in its folder only with the same settings. A cell is one run of a row, an
epsilon and a seed, which is tuned and logged.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from lightning_fedq._lightning import pl
from lightning_fedq.commands.configs import find
from lightning_fedq.commands.mechanism_text import parse_call
from lightning_fedq.comparison.processes import DONE
from lightning_fedq.mechanisms.interface import Mechanism
from lightning_fedq.mechanisms.registry import installed
from lightning_fedq.privacy.planning import KAPPA
from lightning_fedq.reports.runs import write_atomically

SETTINGS = "comparison.yaml"
_NAMED = 5
"""Number of different settings that an error names."""
Logger = Literal["wandb", "csv", "tensorboard"]
TUNING_SEED = 1000
"""Seed of the runs that find range and learning rate. No cell has it."""
RANGES = (0.5, 1.5, KAPPA)
"""Candidate ranges of a coordinate, in units of norm / sqrt(dim)."""


class Task(NamedTuple):
    """Configuration of this package, with a search for learning rate and range per row and epsilon.

    Clients take one step per round, so updates are clipped to the learning rate.

    Args:
        rates: Candidate learning rates.
        seeded: Names of the settings that get the run's seed.
        images: Name of the setting for the folder of images, or "" if the task has no images.
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
    """Range of a coordinate, in units of norm / sqrt(dim), and the clients' learning rate."""

    range: float
    rate: float


class Cell(NamedTuple):
    """One run of a comparison: a row, a target epsilon over the run, a seed and the tuning of the row."""

    row: str
    epsilon: float
    seed: int
    tuning: Tuning | None = None

    @property
    def name(self) -> str:
        """Path of the run folder, relative to the folder of all runs."""
        row = re.sub(r"[^\w.]+", "_", self.row).strip("_")
        tried = ""
        if self.seed == TUNING_SEED and self.tuning is not None:
            tried = f"_range_{self.tuning.range:g}_rate_{self.tuning.rate:g}"
        return f"{row}/epsilon_{self.epsilon:g}/seed_{self.seed}{tried}"


def find_config_file(on: str, data: Path | None) -> str:
    """Return the file of a task or a configuration.

    Raises:
        ValueError: If there is neither, a task on images has no folder of images, or another task or
            configuration was given one.
    """
    if (task := TASKS.get(on)) is not None:
        if task.images and data is None and not os.environ.get("FEDQ_DATA"):
            raise ValueError(f"{on} is a task on images and needs --data FOLDER")
        if data is None or task.images:
            return str(files("lightning_fedq.comparison") / "tasks" / f"{on}.yaml")
    if data is not None:
        raise ValueError(f"--data is for tasks on images, but {on} sets its own data. Omit --data.")
    try:
        return str(find(on))
    except ValueError as error:
        raise ValueError(f"There is no task {on}, only {', '.join(TASKS)}. {error}") from None


def check_folder(out: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a comparison into its folder, or compare them with those that are there.

    Args:
        out: Folder of the comparison.
        settings: All settings, with the configuration. Every comparison has the same keys.

    Raises:
        ValueError: If the folder holds another comparison, or settings that can't be read.
    """
    path = out / SETTINGS
    if path.exists() or (out / "runs").exists():
        try:
            there = dict(yaml.safe_load(path.read_text()))
            known = {key: there[key] for key in settings}
        except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
            raise ValueError(f"{path} is damaged. Name another folder with --out.") from None
        old, new = dict(_flatten("", known)), dict(_flatten("", settings))
        changed = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
        if names := [f"{name} {old.get(name)}, not {new.get(name)}" for name in changed]:
            more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise ValueError(
                f"{out} holds another comparison ({', '.join(names[:_NAMED])}{more}). Name another folder "
                "with --out."
            )
    write_atomically(path, yaml.safe_dump(dict(settings), sort_keys=False))


def _flatten(name: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values. A class has its own name, as in `--set Federated.num_clients=7`."""
    if isinstance(node, Mapping) and "class_path" in node:
        kind = str(node["class_path"])
        yield name, kind
        yield from _flatten(kind.rpartition(".")[2], node.get("init_args") or {})
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _flatten(f"{name}.{key}".removeprefix(".").removeprefix("configuration."), value)
    elif isinstance(node, list) and any(isinstance(item, Mapping) for item in node):
        for place, item in enumerate(node):
            yield from _flatten(f"{name}.{place}", item)
    else:
        yield name, node


def find_run_folder(root: Path, cell: Cell) -> Path | None:
    """Return the run folder of a finished cell, or None if the cell has not finished."""
    done = root / f"{cell.name}{DONE}"
    return done.with_name(done.read_text().rpartition("/")[2]) if done.is_file() else None


def delete_checkpoints(root: Path, cell: Cell) -> None:
    """Delete the checkpoints of a finished run, which take most of its space. Its figures and pages stay."""
    folder = find_run_folder(root, cell)
    assert folder is not None
    for path in (*folder.rglob("*.ckpt"), *(root / "checkpoints" / cell.name).rglob("*.ckpt")):
        path.unlink()


@cache
def known_tunings() -> dict[tuple[str, str, str, float], Tuning]:
    """Return known ranges and learning rates by task, mechanism, adversary and epsilon."""
    with (files("lightning_fedq.comparison") / "tasks" / "tuned.csv").open() as file:
        known = {}
        for line in csv.DictReader(file):
            key = line["task"], line["mechanism"], line["adversary"], float(line["epsilon"])
            known[key] = Tuning(float(line["range"]), float(line["rate"]))
    return known


def scaled(mechanism: Mechanism, norm: float) -> Mechanism:
    """Return a mechanism for updates of norm `norm` from one for updates of norm 1.

    A mechanism that clips coordinates has no norm and is returned unchanged.
    """
    name, values = parse_call(repr(mechanism))
    for key in ("clip_norm", "granularity", "local_sigma"):
        if values.get(key) is not None:
            values[key] *= norm
    return {**installed(), name: type(mechanism)}[name](**values)


def logger_settings(cell: Cell, out: Path, kind: Logger, group: str, salt: str) -> dict[str, Any]:
    """Return the logger settings of a cell. Logs of an earlier, interrupted run of it are deleted.

    Args:
        cell: Cell to log.
        out: Folder of the comparison.
        kind: Logger.
        group: Group of the runs in Weights & Biases.
        salt: Text that differs between comparisons, for the id of the run in Weights & Biases.
    """
    name, folder = f"{cell.row}, epsilon {cell.epsilon:g}, seed {cell.seed}", out / kind
    folder.mkdir(parents=True, exist_ok=True)
    given = {"save_dir": str(folder), "name": name}
    if kind == "wandb":
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_SILENT", "true")
        run = sha256(f"{salt} {out.resolve()} {cell}".encode()).hexdigest()[:12]
        for left in folder.glob(f"wandb/offline-run-*-{run}"):
            shutil.rmtree(left)
        given |= {"id": run, "project": "fedq-compare", "group": group}
    else:
        given |= {"name": name.replace("/", "_"), "version": ""}
        shutil.rmtree(folder / given["name"], ignore_errors=True)
    kinds = {"wandb": "WandbLogger", "csv": "CSVLogger", "tensorboard": "TensorBoardLogger"}
    return {"class_path": f"{pl.__name__}.loggers.{kinds[kind]}", "init_args": given}
