"""What every experiment needs: data, one federated run through Lightning, and a table that can be resumed.

`settings.json` holds what all rows of a table have in common and is written first; `table.csv` grows row by
row, each time whole and moved into place. A resumed experiment keeps the rows that it finds there under the
same settings and computes the rest.
"""

from __future__ import annotations

import csv
import gc
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, ReloadBest
from lightning_fedq.data.datasets import CIFAR10DataModule
from lightning_fedq.data.models import Classifier
from lightning_fedq.reports.runs import fresh_folder, write_rows, write_summary


@dataclass(frozen=True)
class ImageData:
    """Where the images are.

    Args:
        root: Folder that holds `MNIST/raw`, `cifar-10-batches-py`, or CIFAR-10 as `train/<class>/*` and
            `test/<class>/*`, unpacked or as an archive.
        download: Fetch what is missing.
    """

    root: str = "data"
    download: bool = False


class CIFAR10(CIFAR10DataModule):
    """CIFAR-10 in either layout, pooled and split 80/20, read from disk once a process.

    Args:
        data: Where it is.
        batch_size: Samples per training batch.
        num_train: Training samples; None is all 38,400.
        num_val: Validation samples; None is all 9,600.
        seed: Of the split.
        side: Images are averaged down to this; it divides 32.

    Raises:
        FileNotFoundError: On set-up, if it is not there and is not to be downloaded.
    """

    def __init__(
        self,
        data: ImageData,
        batch_size: int,
        num_train: int | None,
        num_val: int | None,
        seed: int,
        side: int = 32,
    ) -> None:
        self._data, self._side = data, side
        super().__init__(
            data.root, batch_size=batch_size, pooled=True, num_train=num_train, num_val=num_val, seed=seed
        )

    def load(self) -> tuple[Tensor, Tensor, int]:
        """See `TensorDataModule.load`."""
        return load_cifar10(self._data, self._side)


@lru_cache(maxsize=1)
def load_cifar10(data: ImageData, side: int = 32) -> tuple[Tensor, Tensor, int]:
    """Images `(60000, 3, side, side)`, labels, and how many of the last are the official test set.

    Raises:
        FileNotFoundError: If CIFAR-10 is not there and is not to be downloaded; it names both layouts.
    """
    try:
        images, labels, official = CIFAR10DataModule(data.root, data.download).load()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; or to one that holds train/<class>/* and test/<class>/*, or their archive"
        ) from error
    return nn.functional.avg_pool2d(images, 32 // side), labels, official


@dataclass(frozen=True)
class Outcome:
    """What one run reached.

    Args:
        best_val: Best validation accuracy of any round.
        test: Test accuracy of the model of that round.
        val_by_round: Validation accuracy of every round.
        num_reloads: How often training went back to the best model.
        cpu_seconds: Processor time, validation and test included.
        seconds: Wall-clock time of the same.
    """

    best_val: float
    test: float
    val_by_round: tuple[float, ...]
    num_reloads: int
    cpu_seconds: float
    seconds: float

    @property
    def columns(self) -> Row:
        """Accuracies in percent, reloads and seconds, for a row of a table."""
        return {
            "best_val": 100 * self.best_val,
            "test": 100 * self.test,
            "reloads": self.num_reloads,
            "cpu_seconds": self.cpu_seconds,
            "seconds_a_round": self.seconds / len(self.val_by_round),
            "val_by_round": curve([100 * value for value in self.val_by_round]),
        }


class _Validated(pl.Callback):
    """Validation accuracy of every round, and the module's state in the best of them, buffers included."""

    def __init__(self) -> None:
        self.accuracies: list[float] = []
        self.best: dict[str, Any] = {}

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The module holds the global model."""
        self.accuracies.append(float(trainer.callback_metrics["val_acc"]))
        if self.accuracies[-1] > max(self.accuracies[:-1], default=-1.0):
            self.best = {name: value.clone() for name, value in pl_module.state_dict().items()}


def quiet_trainer(
    rounds: int, callbacks: Sequence[pl.Callback], accelerator: str = "cpu", **settings: Any
) -> pl.Trainer:
    """A Trainer that leaves nothing behind and shows nothing; `settings` are further ones of Lightning's."""
    return pl.Trainer(
        max_epochs=rounds,
        accelerator=accelerator,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **settings,
    )


def train(
    model: Classifier,
    data: pl.LightningDataModule,
    federated: Federated,
    rounds: int,
    patience: int,
    accelerator: str = "cpu",
) -> Outcome:
    """Train, reload the best model after `patience` rounds without improvement, test the best one.

    Args:
        model: The global model to start from.
        data: Ordinary data.
        federated: The federation.
        rounds: Rounds, >= 1.
        patience: See `ReloadBest`.
        accelerator: Lightning's.
    """
    clocks = time.process_time(), time.monotonic()
    reload_best, validated = ReloadBest(patience=patience), _Validated()
    trainer = quiet_trainer(rounds, [federated, reload_best, validated], accelerator)
    trainer.fit(model, datamodule=data)
    model.load_state_dict(validated.best)
    test = float(trainer.test(model, datamodule=data, verbose=False)[0]["test_acc"])
    del trainer
    gc.collect()  # a Trainer and its data are a cycle: a grid of runs would hold all their tensors
    return Outcome(
        max(validated.accuracies),
        test,
        tuple(validated.accuracies),
        reload_best.num_reloads,
        time.process_time() - clocks[0],
        time.monotonic() - clocks[1],
    )


def torchs_law(model: nn.Module, seed: int) -> nn.Module:
    """Draw weights and biases of linear and convolutional layers anew by torch's default law.

    Uniform in +- 1 / sqrt(inputs of a unit), from a generator of its own, so that no global one is touched.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                bound = 1.0 / math.sqrt(module.weight[0].numel())
                for parameter in module.parameters():
                    parameter.uniform_(-bound, bound, generator=generator)
    return model


@dataclass(frozen=True)
class Claim:
    """A claim of a paper beside our figure.

    Args:
        paper: What the paper says, in our words: never its opposite.
        ours: What we measured, in words.
        held: Does the figure bear the paper out? Computed from the numbers; None where they settle nothing.
        rows: Rows of docs/papers.md whose verdict this is, or a part of it.
        where: The setting, where an experiment has several.
    """

    paper: str
    ours: str
    held: bool | None
    rows: tuple[int, ...] = ()
    where: str = ""

    @property
    def line(self) -> str:
        """One line for a terminal."""
        word = "not settled" if self.held is None else "held" if self.held else "NOT held"
        return f"{self.where}{': ' * bool(self.where)}{word}: {self.paper}; ours: {self.ours}"

    @property
    def plain(self) -> dict[str, Any]:
        """In plain values, for a file."""
        return {**asdict(self), "held": None if self.held is None else bool(self.held)}

    def at(self, where: str) -> Claim:
        """The same claim, of one of several settings."""
        return replace(self, where=where)


def every(verdicts: Iterable[bool | None]) -> bool | None:
    """Verdict on a claim of several parts: one that fails is enough to say no, one open one not to say yes.

    Example:
        >>> every([True, None]), every([True, None, False]), every([True, True])
        (None, False, True)
    """
    found = list(verdicts)
    return False if False in found else None if None in found else True


def settle(out: str, settings: Mapping[str, Any], claims: Sequence[Claim]) -> dict[str, Any]:
    """Write and print the verdicts of an experiment that needs no table; returns the summary."""
    folder = fresh_folder(Path(out))
    summary = {"settings": dict(settings), "claims": [claim.plain for claim in claims]}
    write_summary(folder / "summary.json", summary)
    for claim in claims:
        print(claim.line)
    print(folder / "summary.json")
    return summary


# ---- the table of an experiment ------------------------------------------------------------------------

Row = dict[str, Any]
CURVE = "_by_round"
"""Columns with this ending hold one number a round, separated by blanks; they are not printed."""


class Rows:
    """Rows of one experiment.

    Args:
        out: Folder. Without `resume`, `out-2`, `out-3`, ... if something is there already.
        settings: What all rows have in common, in plain values.
        resume: Keep the rows that are there.

    Attributes:
        folder: Where everything is written.
        rows: The rows asked for so far, in this order.

    Raises:
        ValueError: If `resume` finds rows of other settings.
    """

    def __init__(self, out: str, settings: Mapping[str, Any], resume: bool) -> None:
        self.folder = Path(out) if resume else fresh_folder(Path(out))
        self.rows: list[Row] = []
        self._settings, self._found = dict(settings), list[Row]()
        file = self.folder / "settings.json"
        if resume and file.exists():
            _check_settings(self.folder, json.loads(file.read_text()), json.loads(json.dumps(self._settings)))
            if (self.folder / "table.csv").exists():
                self._found = _read(self.folder / "table.csv")
        write_summary(file, self._settings)

    def add(self, key: Mapping[str, Any], compute: Callable[[], Mapping[str, Any]]) -> Row:
        """Take the row of `key` from the disk, or compute and write it.

        Args:
            key: Columns that tell this row from all others.
            compute: Makes the other columns.

        Returns:
            All columns.
        """
        words = {name: str(value) for name, value in key.items()}
        row = next(
            (r for r in self._found if words.items() <= {n: str(v) for n, v in r.items()}.items()), None
        )
        if row is None:
            row = {**key, **compute()}
        else:
            self._found.remove(row)
        self.rows.append(row)
        write_rows(self.folder / "table.csv", [*self.rows, *self._found])
        shown = {n: v for n, v in row.items() if not n.endswith(CURVE) and v == v}
        print(
            ", ".join(f"{n} {v:.4g}" if isinstance(v, float) else str(v) for n, v in shown.items()),
            flush=True,
        )
        return row

    def finish(
        self, verdicts: Sequence[str | Claim], title: str, claims: Sequence[Claim] = ()
    ) -> dict[str, Any]:
        """Write `summary.json`, print the table, the verdicts and the claims, return the summary."""
        lines = [one.line if isinstance(one, Claim) else one for one in verdicts]
        judged = [one.plain for one in (*verdicts, *claims) if isinstance(one, Claim)]
        summary = {"settings": self._settings, "verdicts": lines, "claims": judged, "table": self.rows}
        write_summary(self.folder / "summary.json", summary)
        shown = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        names = [name for name in self.rows[0] if not name.endswith(CURVE)]
        for name in names:
            shown.add_column(name, no_wrap=True, justify="right")
        for row in self.rows:
            cells = [row.get(name, "") for name in names]
            shown.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
        console = Console()
        wide = console.measure(shown, options=console.options.update(width=500)).maximum
        console.width = max(console.width, wide)
        console.print(shown)
        for line in (*lines, *(claim.line for claim in claims)):
            print(line)
        print(f"{self.folder / 'table.csv'}\n{self.folder / 'summary.json'}")
        return summary


def _check_settings(folder: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    names = sorted(n for n in {*there, *here} if there.get(n) != here.get(n))
    if names:
        words = ", ".join(f"{name} = {there.get(name)} (here {here.get(name)})" for name in names)
        raise ValueError(f"{folder} holds rows of other settings: {words}; use those, or another out")


def _read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [{name: _value(name, text) for name, text in row.items()} for row in csv.DictReader(file)]


def _value(name: str, text: str) -> Any:
    """The number or the word that was written."""
    if name.endswith(CURVE):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def curve(values: Sequence[float]) -> str:
    """One number a round, as the text of a cell."""
    return " ".join(f"{value:.6g}" for value in values)


def curve_values(cell: str) -> list[float]:
    """What `curve` wrote."""
    return [float(word) for word in cell.split()]
