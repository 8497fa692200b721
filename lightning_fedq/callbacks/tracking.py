"""Experiment trackers: TensorBoard, MLflow, CSV and Weights & Biases, with the same names and numbers in all.

`Federated` logs `fed/*` after every round to each of the Trainer's loggers, at the step of one client's
clock, and its settings into their configuration; `PrivacyBudget` logs `fed/epsilon`. What a logger can't
know is here: the resolved configuration, validation by rounds, who holds what, noise over signal, and the
files of the run folder.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import yaml

from lightning_fedq._lightning import callbacks_of, pl
from lightning_fedq.callbacks.logged_settings import add_settings, settings_of
from lightning_fedq.callbacks.of_trainer import federated_of
from lightning_fedq.callbacks.run_folder import RunFolder
from lightning_fedq.imports import extra
from lightning_fedq.reports.runs import first_metric
from lightning_fedq.training.accounts import noise_over_signal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PRICES = ("fed/epsilon", "fed/sim_epsilon", "fed/megabytes_up")
"""What a round has cost so far."""
_COLUMNS = ("client", "samples", "rounds not finite")
"""Columns of the table of clients."""
_PAGES = ("report.md", "privacy.md")
"""Files of a run folder that TensorBoard shows as text."""


class _Left(NamedTuple):
    """Remains of a run, for its trackers.

    Args:
        noise: Noise over signal of the run, by name.
        rows: Rows of the table of clients.
        files: Files of its folder.
    """

    noise: dict[str, float]
    rows: list[list[int]]
    files: list[Path]


class _Rounds(pl.Callback):
    """Tracked rounds: what is sent to a tracker, and when. A subclass knows how.

    Only the rank that writes files sends.
    """

    knows_clients = True

    follows_clients: ClassVar[bool] = True
    """The table of clients says whose updates were not finite, and so who took part."""

    def __init__(self) -> None:
        self._non_finite: dict[int, int] = {}

    @abstractmethod
    def _loggers(self, trainer: pl.Trainer) -> list[Any]:
        """Loggers of the Trainer to send to, at least one."""

    @abstractmethod
    def _names(self, trainer: pl.Trainer) -> str:
        """The trackers, in words."""

    @abstractmethod
    def _begin(
        self, logger: Any, resolved: dict[str, Any], federation: dict[str, Any], labels: Figure | None
    ) -> None:
        """Send the resolved configuration and the picture of labels, where there are any.

        Args:
            federation: The federation's settings, which its callback sends.
        """

    @abstractmethod
    def _log(self, trainer: pl.Trainer, logger: Any, values: dict[str, float]) -> None:
        """Log values of the round that has just ended."""

    @abstractmethod
    def _end(self, trainer: pl.Trainer, logger: Any, left: _Left) -> None:
        """Send what a run has left."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Send the resolved configuration and the picture of labels."""
        if not trainer.is_global_zero:
            return
        name, loggers = type(self).__name__, self._loggers(trainer)
        folder, callbacks = _folder_of(trainer), callbacks_of(trainer)
        if folder is not None and callbacks.index(folder) > callbacks.index(self):
            raise ValueError(f"{name} sends the run folder: put it behind RunFolder in trainer.callbacks")
        federated = federated_of(trainer, name)
        try:
            labels = federated.label_figure()
        except ValueError:
            labels = None  # the data has no integer labels, so there is no such picture
        resolved = {} if folder is None or folder.config is None else yaml.safe_load(folder.config)
        for logger in loggers:
            self._begin(logger, resolved, settings_of(trainer, federated), labels)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the round, from 1, and what validation found, on the axis of rounds."""
        records = federated_of(trainer, type(self).__name__).records
        if not trainer.is_global_zero or not records:
            return
        known = {key: float(value) for key, value in trainer.callback_metrics.items()}
        found = {f"fed/{key}": value for key, value in known.items() if not key.startswith("fed/")}
        for logger in self._loggers(trainer):
            self._log(trainer, logger, {"fed/round": float(records[-1].round + 1), **found})
        for client in records[-1].non_finite_clients:
            self._non_finite[client] = self._non_finite.get(client, 0) + 1

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Send noise over signal, the table of clients and the run folder."""
        federated = federated_of(trainer, type(self).__name__)
        records, engine, folder = federated.records, federated.engine, _folder_of(trainer)
        if not trainer.is_global_zero or not records or engine is None:
            return
        ratio = noise_over_signal(engine, [record.metrics() for record in records], len(records))
        values = {"fed/noise_over_signal": ratio["planned"], "fed/sim_noise_over_signal": ratio["sim_seen"]}
        rows = [
            [client, len(part), self._non_finite.get(client, 0)]
            for client, part in enumerate(federated.client_indices)
        ]
        # what stays with the clients is in a folder of its own, which is not sent
        there = [] if folder is None or folder.path is None else sorted(folder.path.glob("*"))
        noise = {key: value for key, value in values.items() if value is not None}
        left = _Left(noise, rows, [path for path in there if path.is_file()])
        for logger in self._loggers(trainer):
            self._end(trainer, logger, left)

    def lets_out(self, trainer: pl.Trainer) -> str:
        """Notice of what trackers are told of clients."""
        return (
            f"{self._names(trainer)}: how many samples every client holds, in how many rounds its update was "
            "not finite, who holds which labels (a picture, where there are labels), and the files of this "
            "folder."
        )


class TrackedRounds(_Rounds):
    """Logging of rounds, settings, clients and run folder by TensorBoard, MLflow and CSV loggers.

    Everything stays on this machine unless a logger sends it: MLflow writes to the `tracking_uri` that it is
    given, `sqlite:///mlflow.db` say, without a server.

    Raises:
        ValueError: At the start of the training, if the Trainer has none of these loggers, or if a
            `RunFolder` stands behind this callback: its report would not be written yet when it is sent.

    Example:
        >>> callbacks = [TrackedRounds()]  # behind Federated(...), with a TensorBoardLogger
    """

    def _loggers(self, trainer: pl.Trainer) -> list[Any]:
        kinds = pl.loggers.TensorBoardLogger, pl.loggers.MLFlowLogger, pl.loggers.CSVLogger
        found = [logger for logger in trainer.loggers if isinstance(logger, kinds)]
        if not found:
            raise ValueError(
                "TrackedRounds needs a TensorBoardLogger, an MLFlowLogger or a CSVLogger; set trainer.logger "
                f'to {pl.__name__}.loggers.MLFlowLogger(tracking_uri="sqlite:///mlflow.db"), say; for '
                "Weights & Biases there is WandbRounds"
            )
        return found

    def _names(self, trainer: pl.Trainer) -> str:
        return ", ".join(type(logger).__name__ for logger in self._loggers(trainer))

    def _begin(
        self, logger: Any, resolved: dict[str, Any], federation: dict[str, Any], labels: Figure | None
    ) -> None:
        add_settings(logger, resolved)
        if labels is None:
            return
        if isinstance(logger, pl.loggers.MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, labels, "fed/labels.png")
        elif isinstance(logger, pl.loggers.TensorBoardLogger):
            logger.experiment.add_figure("fed/labels", labels, 0)
        else:
            labels.savefig(_folder(logger) / "labels.png")

    def _log(self, trainer: pl.Trainer, logger: Any, values: dict[str, float]) -> None:
        logger.log_metrics(values, step=trainer.global_step - 1)

    def _end(self, trainer: pl.Trainer, logger: Any, left: _Left) -> None:
        self._log(trainer, logger, left.noise)
        table = [[str(cell) for cell in row] for row in (_COLUMNS, *left.rows)]
        text = "".join(",".join(row) + "\n" for row in table)
        if isinstance(logger, pl.loggers.MLFlowLogger):
            logger.experiment.log_text(logger.run_id, text, "fed/clients.csv")
            for path in left.files:
                logger.experiment.log_artifact(logger.run_id, str(path), "run-folder")
        elif isinstance(logger, pl.loggers.TensorBoardLogger):
            table.insert(1, ["---"] * len(_COLUMNS))
            lines = [f"| {' | '.join(row)} |" for row in table]
            logger.experiment.add_text("fed/clients", "\n".join(lines), 0)
            for path in left.files:
                if path.name in _PAGES:
                    logger.experiment.add_text(f"fed/{path.stem}", path.read_text(), 0)
        else:
            (_folder(logger) / "clients.csv").write_text(text)
        logger.save()


class WandbRounds(_Rounds):
    """Weights & Biases logging of rounds, configuration, clients and run folder, by the `WandbLogger`.

    Offline needs no account. Rounds are put on the axis `fed/round`; there are tags, charts of what
    validation found against epsilon and megabytes, and the run folder is an artifact.

    Raises:
        ValueError: At the start of the training, if the Trainer has no `WandbLogger`, or if a `RunFolder`
            stands behind this callback: its report would not be written yet when it is sent.

    Example:
        >>> callbacks = [WandbRounds()]  # behind Federated(...), with a WandbLogger
    """

    def __init__(self) -> None:
        super().__init__()
        self._prices: list[dict[str, float]] = []

    def _loggers(self, trainer: pl.Trainer) -> list[Any]:
        for logger in trainer.loggers:
            if isinstance(logger, pl.loggers.WandbLogger):
                return [logger.experiment]
        raise ValueError(
            "WandbRounds needs a WandbLogger; set trainer.logger to "
            f"{pl.__name__}.loggers.WandbLogger (with offline: true it needs no account)"
        )

    def _names(self, trainer: pl.Trainer) -> str:
        return "W&B"

    def _begin(
        self, logger: Any, resolved: dict[str, Any], federation: dict[str, Any], labels: Figure | None
    ) -> None:
        logger.define_metric("fed/round")
        logger.define_metric("fed/*", step_metric="fed/round")
        # offline runs lose a config that is only given to wandb.init
        logger.config.update(resolved, allow_val_change=True)
        # tags by which runs are found: the mechanism, and what the run was held to
        held_to = ["no target"]
        if federation["epsilon"] is not None:
            held_to = [federation["adversary"], f"epsilon {federation['epsilon']:g}"]
        logger.tags = (*(logger.tags or ()), federation["mechanism_name"], *held_to)
        if labels is not None:  # before the first round
            logger.log({"fed/round": 0.0, "fed/labels": _wandb().Image(labels)})

    def _log(self, trainer: pl.Trainer, logger: Any, values: dict[str, float]) -> None:
        logger.log(values)
        # a point of each chart: epsilon towards the target's adversary, where it is known after this round,
        # megabytes of all clients' messages, and last one metric of validation
        known = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metric = first_metric([known])
        if metric is not None and math.isfinite(known[metric]):
            names = [name for name in (*_PRICES, metric) if math.isfinite(known.get(name, math.nan))]
            self._prices.append({name: known[name] for name in names})

    def _end(self, trainer: pl.Trainer, logger: Any, left: _Left) -> None:
        wandb = _wandb()
        logger.log({"fed/clients": wandb.Table(list(_COLUMNS), left.rows)})
        logger.summary.update(left.noise)
        for price in _PRICES:  # one chart for each: W&B shows them without being asked
            known = [point for point in self._prices if price in point]
            if known:
                metric, cost = next(reversed(known[-1])), price.removeprefix("fed/")
                table = wandb.Table([cost, metric], [[point[price], point[metric]] for point in known])
                name = f"{metric} against {cost}"
                logger.log({f"fed/{name}": wandb.plot.line(table, cost, metric, title=name)})
        if left.files:
            artifact = wandb.Artifact(f"run-{logger.id}", type="run-folder")
            for path in left.files:
                artifact.add_file(str(path))
            logger.log_artifact(artifact)


def _wandb() -> Any:
    with extra("wandb", "WandbRounds"):
        import wandb
    return wandb


def _folder_of(trainer: pl.Trainer) -> RunFolder | None:
    """The trainer's run folder. None without one."""
    return next((c for c in callbacks_of(trainer) if isinstance(c, RunFolder)), None)


def _folder(logger: Any) -> Path:
    folder = Path(logger.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
