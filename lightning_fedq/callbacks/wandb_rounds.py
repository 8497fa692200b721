"""Weights & Biases for federated runs, on top of Lightning's `WandbLogger`. Offline needs no account.

`Federated` logs `fed/*` through Lightning, so the logger has them already. This callback puts them on
the axis `fed/round`, and adds what a logger can't know: configuration, tags, who holds which labels, a table
of clients, charts of what validation found against epsilon and megabytes, and the run folder as an artifact.
"""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks.of_trainer import federated_of
from lightning_fedq.callbacks.tracking import (
    COLUMNS,
    PRICES,
    check_order,
    files_of,
    folder_of,
    noise_values,
    price_of_round,
    rows_of_clients,
    settings_of,
    values_of_round,
)
from lightning_fedq.imports import extra


class WandbRounds(pl.Callback):
    """Weights & Biases logging of rounds, configuration, clients and run folder, by the `WandbLogger`.

    Raises:
        ValueError: At the start of the training, if the Trainer has no `WandbLogger`, or if a `RunFolder`
            stands behind this callback: its report would not be written yet when it is sent.

    Example:
        >>> callbacks = [WandbRounds()]  # behind Federated(...), with a WandbLogger
    """

    knows_clients = True

    follows_clients: ClassVar[bool] = True
    """The table of clients says whose updates were not finite, and so who took part."""

    def __init__(self) -> None:
        self._non_finite: dict[int, int] = {}
        self._prices: list[dict[str, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Define the axis, and send configuration and label picture."""
        if not trainer.is_global_zero:
            return
        run, federated = self._run(trainer), federated_of(trainer, "WandbRounds")
        run.define_metric("fed/round")
        run.define_metric("fed/*", step_metric="fed/round")
        check_order(trainer, self)
        # offline runs lose a config that is only given to wandb.init
        settings = settings_of(trainer, federated, "WandbRounds")
        run.config.update(settings, allow_val_change=True)
        run.tags = (*(run.tags or ()), *_tags(settings["federation"]))
        self._log_labels(run, federated)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put what validation logged on the axis of rounds, too."""
        records = federated_of(trainer, "WandbRounds").records
        if not trainer.is_global_zero or not records:
            return
        record = records[-1]
        self._run(trainer).log(values_of_round(trainer, record))
        if price := price_of_round(trainer):
            self._prices.append(price)
        for client in record.non_finite_clients:
            self._non_finite[client] = self._non_finite.get(client, 0) + 1

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Send the table of clients, the charts and the run folder."""
        if not trainer.is_global_zero:
            return
        with extra("wandb", "WandbRounds"):
            import wandb

        run, federated = self._run(trainer), federated_of(trainer, "WandbRounds")
        rows = rows_of_clients(federated, self._non_finite)
        run.log({"fed/clients": wandb.Table(list(COLUMNS), rows)})
        run.summary.update(noise_values(federated))
        self._log_charts(run)
        if files := files_of(folder_of(trainer)):
            artifact = wandb.Artifact(f"run-{run.id}", type="run-folder")
            for path in files:
                artifact.add_file(str(path))
            run.log_artifact(artifact)

    def lets_out(self, trainer: pl.Trainer) -> str:
        """Notice of what W&B is told of clients."""
        return (
            "W&B: how many samples every client holds, in how many rounds its update was not finite, who "
            "holds which labels (a picture, where there are labels), and the files of this folder."
        )

    @staticmethod
    def _run(trainer: pl.Trainer) -> Any:
        for logger in trainer.loggers:
            if isinstance(logger, pl.loggers.WandbLogger):
                return logger.experiment
        raise ValueError(
            "WandbRounds needs a WandbLogger; set trainer.logger to "
            f"{pl.__name__}.loggers.WandbLogger (with offline: true it needs no account)"
        )

    def _log_charts(self, run: Any) -> None:
        """One chart for each price: W&B shows them without being asked."""
        with extra("wandb", "WandbRounds"):
            import wandb

        for price in PRICES:
            known = [point for point in self._prices if price in point]
            if known:
                metric, cost = next(reversed(known[-1])), price.removeprefix("fed/")
                points = [[point[price], point[metric]] for point in known]
                table = wandb.Table([cost, metric], points)
                name = f"{metric} against {cost}"
                run.log({f"fed/{name}": wandb.plot.line(table, cost, metric, title=name)})

    @staticmethod
    def _log_labels(run: Any, federated: Any) -> None:
        with extra("wandb", "WandbRounds"):
            import wandb

        try:
            figure = federated.label_figure()
        except ValueError:
            return  # the data has no integer labels, so there is no such picture
        run.log({"fed/round": 0.0, "fed/labels": wandb.Image(figure)})  # before the first round


def _tags(federation: dict[str, Any]) -> tuple[str, ...]:
    """Tags by which runs are found: the mechanism, and what the run was held to."""
    if federation["epsilon"] is None:
        return (federation["mechanism_name"], "no target")
    return (federation["mechanism_name"], federation["adversary"], f"epsilon {federation['epsilon']:g}")
