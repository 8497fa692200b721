"""Cures that the `fedq` command and the files of its runs name."""

import contextlib
import io
import shutil
from pathlib import Path
from unittest import mock

import yaml

from lightning_fedq.callbacks import RunFolder
from lightning_fedq.cli import main
from lightning_fedq.commands import plan as plan_command
from lightning_fedq.commands.mechanism_text import parse_mechanism
from lightning_fedq.commands.plan import candidates
from lightning_fedq.comparison import Comparison
from lightning_fedq.comparison.table import compare
from lightning_fedq.data.datasets import CIFAR10DataModule
from lightning_fedq.mechanisms import CorBin
from tests.cures.rows import fed, fit, row
from tests.test_cli import configuration

HERE = Path()


def fedq(*arguments):
    """The command, which raises what it prints when it fails."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(arguments)
        except SystemExit as leaves:
            status = leaves.code
    if status:
        raise ValueError(printed.getvalue())


def small(rounds=1, stops=False):
    """A configuration of a short run."""
    path = configuration(HERE)
    config = yaml.safe_load(path.read_text())
    config["trainer"]["max_epochs"] = rounds
    if stops:
        config["trainer"]["callbacks"] += [
            {"class_path": "pytorch_lightning.callbacks.EarlyStopping", "init_args": {"monitor": monitor}}
            for monitor in ("val_loss", "val_acc")
        ]
    path.write_text(yaml.safe_dump(config))
    return str(path)


def finished(*more):
    """The folder `run` of a run, and its checkpoint `one.ckpt`."""
    shutil.rmtree("run", ignore_errors=True)
    trainer = fit(fed(CorBin(1.0)), RunFolder("run", ".", show=False), *more)
    trainer.save_checkpoint("one.ckpt")
    return Path("run")


def without(name):
    """A finished run that has lost a file."""
    folder = finished()
    (folder / name).unlink()
    return folder


def went_on():
    """A finished run whose table has a round more than its page."""
    folder = finished()
    table = folder / "metrics.csv"
    table.write_text(table.read_text() + table.read_text().splitlines()[-1] + "\n")
    return folder


def trained():
    """The folder of a run that `fedq fit` has started."""
    shutil.rmtree("runs", ignore_errors=True)
    fedq("fit", small(), "--trainer.callbacks+=lightning_fedq.callbacks.RunFolder")
    return str(next(Path("runs").iterdir()))


def folder_with(name):
    Path(name).mkdir(exist_ok=True)
    (Path(name) / "mine").write_text("")
    return name


def compared(*arguments, settings=None):
    """One cell of a small configuration, beside a file that is there."""
    Path("out").mkdir(exist_ok=True)
    if settings is not None:
        (Path("out") / "comparison.yaml").write_text(settings)
    one = ("--mechanisms", "GaussianNoise", "--epsilon", "8", "--seeds", "1", "--bare", "--jobs", "1")
    fedq("compare", *one, "--on", small(), "--delta", "1e-2", "--out", "out", *arguments)


def planned(*arguments):
    """One mechanism for a few clients."""
    few = ("--epsilon", "8", "--clients", "60", "--params", "100", "--rounds", "5")
    fedq("plan", *few, "--mechanisms", "GaussianNoise", *arguments)


def emptied(*arguments):
    """The folder's files deleted, and the cell again."""
    shutil.rmtree("out", ignore_errors=True)
    compared(*arguments)


def plan(*arguments):
    """A plan of one mechanism."""
    few = {"GaussianNoise": candidates(100)["GaussianNoise"]}
    with mock.patch.object(plan_command, "candidates", lambda params: few):
        fedq("plan", "--epsilon", "8", "--clients", "60", *arguments)


row(
    "{} needs a known number of rounds, got {}. Give --rounds.",
    lambda: fedq("privacy", small(rounds=-1)),
    lambda: fedq("privacy", small(rounds=-1), "--rounds", "2"),
)
row(
    "--rounds must be >= 1, got {}",
    lambda: fedq("privacy", small(), "--rounds", "0"),
    lambda: fedq("privacy", small(), "--rounds", "1"),
)
row(
    "{} holds no privacy.json, which RunFolder writes when a run ends. Give a checkpoint of the run, or",
    lambda: fedq("privacy", str(without("privacy.json"))),
    lambda: fedq("privacy", "one.ckpt"),
    lambda: fedq("privacy", small()),
)
row(
    "The target of {} has delta {}, got --delta {}. Omit --delta",
    lambda: fedq("privacy", "digits_private", "--rounds", "1", "--delta", "1e-4"),
    lambda: fedq("privacy", "digits_private", "--rounds", "1"),
    lambda: fedq("privacy", "digits_private", "--rounds", "1", "--set", "Federated.privacy.delta=1e-4"),
)
row(
    "A finished run has its own settings. Give {}/config.yaml to change them.",
    lambda: fedq("privacy", str(finished()), "--delta", "1e-4"),
    lambda: fedq("privacy", small(), "--delta", "1e-4"),
)
row(
    "--out needs the name of one file: fedq configs NAME --out FILE",
    lambda: fedq("configs", "--out", "mine.yaml"),
    lambda: fedq("configs", "digits_corbin", "--out", "mine.yaml"),
)
row(
    "{} exists and is not overwritten. Choose another name.",
    lambda: fedq("configs", "digits_corbin", "--out", small()),
    lambda: fedq("configs", "digits_corbin", "--out", "another.yaml"),
    error=ValueError,
)
row("{} covers {} rounds,", lambda: fedq("privacy", str(went_on())), lambda: fedq("privacy", "one.ckpt"))
row("There is no run folder {}. Give the", lambda: fedq("test", "runs/none"), lambda: fedq("test", trained()))
row("holds no model.ckpt.", lambda: fedq("test", folder_with("other")), lambda: fedq("test", trained()))
row(
    "Python package name, got {}. Use",
    lambda: fedq("flower", "init", "2nd"),
    lambda: fedq("flower", "init", "second"),
)
row(
    "{} is not empty. Give a new folder.",
    lambda: fedq("flower", "init", folder_with("app")),
    lambda: fedq("flower", "init", "new"),
)
row(
    "Give {}, or name a configuration that sets them",
    lambda: plan(),
    lambda: plan("--params", "100", "--rounds", "5"),
    lambda: plan(small()),
)
row(
    "{}: {} occurs {} times. Write the whole name",
    lambda: fedq("fit", small(stops=True), "--set", "EarlyStopping.patience=1"),
    lambda: fedq("fit", small(stops=True), "--set", "trainer.callbacks.3.patience=1"),
)
row(
    "There is no {}. Give the folder of a run with the RunFolder callback.",
    lambda: fedq("compare", folder_with("other")),
    lambda: fedq("compare", str(finished())),
    lambda: compare({"one": finished()}, None, HERE),
)
row(
    "{} can't be used with finished runs or configurations. Omit it, or give",
    lambda: fedq("compare", str(finished()), "--delta", "1e-4"),
    lambda: fedq("compare", str(finished())),
    lambda: compared("--delta", "1e-4"),
)
row(
    "--data is for tasks on images, but {} sets its own data. Omit --data.",
    lambda: compared("--data", "here"),
    compared,
)
row(
    "--active and --max-colluding-fraction do not apply to a target against {}. Omit them, or",
    lambda: planned("--adversary", "server", "--max-colluding-fraction", "0.1"),
    lambda: planned("--adversary", "server"),
    lambda: planned("--adversary", "secagg_server", "--max-colluding-fraction", "0.1"),
)
row(
    "{} holds another comparison ({}). Name another folder with --out.",
    lambda: (emptied(), compared("--delta", "1e-3")),
    lambda: compared("--delta", "1e-3", "--out", "fourth"),
)
row(
    "{} is damaged. Name another folder with --out.",
    lambda: compared(settings="{}"),
    lambda: compared("--out", "other"),
)
row(
    "{} sets no number of rounds. Give --rounds.",
    lambda: Comparison.from_names(small(rounds=-1), delta=1e-2),
    lambda: Comparison.from_names(small(rounds=-1), delta=1e-2, rounds=1),
)
row(
    "--tune searches learning rates, but {} has none to search. Omit --tune.",
    lambda: emptied("--tune"),
    emptied,
)
row(
    "An epsilon must be > 0 and finite, got {}. FedAvg, which has no finite epsilon, always runs.",
    lambda: emptied("--epsilon", "inf"),
    emptied,
)
row(
    "Image folders can't be downloaded. Set only one of download and image_folder.",
    lambda: CIFAR10DataModule(download=True, image_folder=True),
    lambda: CIFAR10DataModule(download=True),
    lambda: CIFAR10DataModule(image_folder=True),
)
row(
    "Can't read the mechanism {} from the checkpoint. Give the configuration of its run.",
    lambda: parse_mechanism("LDPQ(speed=3)"),
    lambda: fedq("privacy", small()),
)
row(
    "without their privacy cost. Give one of Lightning's own checkpoints of the run",
    lambda: fedq("privacy", str(without("privacy.md") / "model.ckpt")),
    lambda: fedq("privacy", "one.ckpt"),
)
row(
    "{} is not a folder. Give the folder of a finished run",
    lambda: fedq("report", "runs/none", "--out", "page.html"),
    lambda: fedq("report", str(finished()), "--out", "page.html"),
)
row(
    "There is no {} in {}. Give the folder of a finished run",
    lambda: fedq("report", str(without("summary.json")), "--out", "page.html"),
    lambda: fedq("report", str(finished()), "--out", "page.html"),
)
