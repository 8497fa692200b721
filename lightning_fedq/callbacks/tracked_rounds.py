"""TensorBoard, MLflow and CSV for federated runs, with what `WandbRounds` gives Weights & Biases.

Metrics have the same names in all of them. `Federated` and `PrivacyBudget` log `fed/*` through Lightning, at
the step of one client's clock; this callback adds `fed/round` and the metrics of validation by rounds, the
settings, who holds which labels, a table of clients, and the files of the run folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks.of_trainer import federated_of
from lightning_fedq.callbacks.tracking import (
    COLUMNS,
    check_order,
    files_of,
    folder_of,
    noise_values,
    rows_of_clients,
    settings_of,
    values_of_round,
)

if TYPE_CHECKING:
    from lightning_fedq.callbacks.federated import Federated

_PAGES = ("report.md", "privacy.md")
"""Files of a run folder that are shown as text."""


class TrackedRounds(pl.Callback):
    """Logging of rounds, settings, clients and run folder by TensorBoard, MLflow and CSV loggers.

    Everything stays on this machine unless a logger sends it: MLflow writes to the `tracking_uri` that it is
    given, `sqlite:///mlflow.db` say, without a server.

    Raises:
        ValueError: At the start of the training, if the Trainer has none of these loggers, or if a
            `RunFolder` stands behind this callback: its report would not be written yet when it is sent.

    Example:
        >>> callbacks = [TrackedRounds()]  # behind Federated(...), with a TensorBoardLogger
    """

    knows_clients = True

    follows_clients: ClassVar[bool] = True
    """The table of clients says whose updates were not finite, and so who took part."""

    def __init__(self) -> None:
        self._non_finite: dict[int, int] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Send the settings and the picture of labels."""
        if not trainer.is_global_zero:
            return
        loggers = _loggers(trainer)
        check_order(trainer, self)
        federated = federated_of(trainer, "TrackedRounds")
        settings = settings_of(trainer, federated, "TrackedRounds")
        for logger in loggers:
            _log_settings(logger, settings)
            _log_labels(logger, federated)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the round and what validation found."""
        records = federated_of(trainer, "TrackedRounds").records
        if not trainer.is_global_zero or not records:
            return
        values = values_of_round(trainer, records[-1])
        for logger in _loggers(trainer):
            logger.log_metrics(values, step=trainer.global_step - 1)
        for client in records[-1].non_finite_clients:
            self._non_finite[client] = self._non_finite.get(client, 0) + 1

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Send noise over signal, the table of clients and the run folder."""
        if not trainer.is_global_zero:
            return
        federated = federated_of(trainer, "TrackedRounds")
        if not federated.records:
            return
        rows, files = rows_of_clients(federated, self._non_finite), files_of(folder_of(trainer))
        for logger in _loggers(trainer):
            logger.log_metrics(noise_values(federated), step=trainer.global_step - 1)
            _log_clients(logger, rows)
            # send MLflow all files of the run folder, TensorBoard its pages, and CSV none
            for path in files:
                if _is_mlflow(logger):
                    logger.experiment.log_artifact(logger.run_id, str(path), "run-folder")
                elif isinstance(logger, pl.loggers.TensorBoardLogger) and path.name in _PAGES:
                    logger.experiment.add_text(f"fed/{path.stem}", path.read_text(), 0)
            logger.save()

    def lets_out(self, trainer: pl.Trainer) -> str:
        """Notice of what loggers are told of clients."""
        names = ", ".join(type(logger).__name__ for logger in _loggers(trainer))
        return (
            f"{names}: how many samples every client holds, in how many rounds its update was not finite, "
            "who holds which labels (a picture, where there are labels), and the files of this folder."
        )


def _loggers(trainer: pl.Trainer) -> list[Any]:
    kinds = pl.loggers.TensorBoardLogger, pl.loggers.MLFlowLogger, pl.loggers.CSVLogger
    found = [logger for logger in trainer.loggers if isinstance(logger, kinds)]
    if not found:
        raise ValueError(
            "TrackedRounds needs a TensorBoardLogger, an MLFlowLogger or a CSVLogger; set trainer.logger to "
            f'{pl.__name__}.loggers.MLFlowLogger(tracking_uri="sqlite:///mlflow.db"), say; for Weights & '
            "Biases there is WandbRounds"
        )
    return found


def _is_mlflow(logger: Any) -> bool:
    return isinstance(logger, pl.loggers.MLFlowLogger)


def _log_settings(logger: Any, settings: dict[str, Any]) -> None:
    if _is_mlflow(logger):  # a parameter is written once: a second fit of the same run keeps the first's
        there = logger.experiment.get_run(logger.run_id).data.params
        flat = {key: value for key, value in _flat(settings).items() if key not in there}
        logger.log_hyperparams(flat)
        return
    logger.log_hyperparams(settings)


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        inner = isinstance(value, dict) and value
        found |= _flat(value, f"{prefix}{key}/") if inner else {f"{prefix}{key}": value}
    return found


def _log_labels(logger: Any, federated: Federated) -> None:
    try:
        figure = federated.label_figure()
    except ValueError:
        return  # the data has no integer labels, so there is no such picture
    if _is_mlflow(logger):
        logger.experiment.log_figure(logger.run_id, figure, "fed/labels.png")
    elif isinstance(logger, pl.loggers.TensorBoardLogger):
        logger.experiment.add_figure("fed/labels", figure, 0)
    else:
        figure.savefig(_folder(logger) / "labels.png")


def _folder(logger: Any) -> Path:
    folder = Path(logger.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _log_clients(logger: Any, rows: list[list[int]]) -> None:
    lines = [",".join(COLUMNS), *(",".join(map(str, row)) for row in rows)]
    if _is_mlflow(logger):
        logger.experiment.log_text(logger.run_id, "\n".join(lines) + "\n", "fed/clients.csv")
    elif isinstance(logger, pl.loggers.TensorBoardLogger):
        head = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
        table = [*head, *(" | ".join(map(str, row)) for row in rows)]
        logger.experiment.add_text("fed/clients", "\n".join(f"| {line} |" for line in table), 0)
    else:
        (_folder(logger) / "clients.csv").write_text("\n".join(lines) + "\n")
