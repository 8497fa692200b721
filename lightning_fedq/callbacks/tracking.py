"""Weights & Biases: additional logging of a federation, next to the `fed/*` metrics that every logger gets.

`WandbRounds` sends the resolved configuration, validation metrics by round, a table of the clients, the
noise-to-signal ratio and the files of the run folder.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import yaml

from lightning_fedq._lightning import get_callbacks, pl
from lightning_fedq.callbacks.logged_settings import collect_settings
from lightning_fedq.callbacks.run_folder import RunFolder
from lightning_fedq.callbacks.trainer_lookup import find_callback, find_federated
from lightning_fedq.imports import extra
from lightning_fedq.reports.runs import first_metric
from lightning_fedq.training.accounts import noise_over_signal

_PRICES = ("fed/epsilon", "fed/sim_epsilon", "fed/megabytes_up")
"""Metrics of the costs so far, against which validation is drawn."""


class WandbRounds(pl.Callback):
    """Weights & Biases logging of rounds, configuration, clients and run folder, through the `WandbLogger`.

    An offline run needs no account. Rounds are on the axis `fed/round`. The run gets tags, charts of a
    validation metric against epsilon and megabytes, and the run folder as an artifact. Only the rank that
    writes files sends data.

    Raises:
        ValueError: At the start of the training, if the Trainer has no `WandbLogger`, or if a `RunFolder`
            comes behind this callback. Its report would not be written yet when it is sent.

    Examples:
        >>> callbacks = [WandbRounds()]  # behind Federated(...), with a WandbLogger
    """

    knows_clients = True

    follows_clients: ClassVar[bool] = True
    """The table of clients shows whose updates were not finite, which reveals that they took part."""

    def __init__(self) -> None:
        self._non_finite: dict[int, int] = {}
        self._prices: list[dict[str, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Send the resolved configuration, tags and the figure of labels."""
        if not trainer.is_global_zero:
            return
        run, folder = _find_wandb_run(trainer), find_callback(trainer, RunFolder)
        callbacks = get_callbacks(trainer)
        if folder is not None and callbacks.index(folder) > callbacks.index(self):
            raise ValueError(
                "WandbRounds sends the run folder, so it must come last. Put it behind RunFolder in "
                "trainer.callbacks."
            )
        federated = find_federated(trainer, "WandbRounds")
        run.define_metric("fed/round")
        run.define_metric("fed/*", step_metric="fed/round")
        if folder is not None and folder.config is not None:
            # an offline run loses a configuration that is passed to wandb.init only
            run.config.update(yaml.safe_load(folder.config), allow_val_change=True)
        # tags by which runs can be found: the mechanism and the privacy target
        settings, target_tags = collect_settings(trainer, federated), ["no target"]
        if settings["epsilon"] is not None:
            target_tags = [settings["adversary"], f"epsilon {settings['epsilon']:g}"]
        run.tags = (*(run.tags or ()), settings["mechanism_name"], *target_tags)
        try:
            labels = federated.label_figure()
        except ValueError:
            return  # the data set has no integer labels to draw
        run.log({"fed/round": 0.0, "fed/labels": _wandb().Image(labels)})  # before the first round

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the round's number, from 1, and the metrics of validation."""
        records = find_federated(trainer, "WandbRounds").records
        if not trainer.is_global_zero or not records:
            return
        known = {key: float(value) for key, value in trainer.callback_metrics.items()}
        metrics = {f"fed/{key}": value for key, value in known.items() if not key.startswith("fed/")}
        _find_wandb_run(trainer).log({"fed/round": float(records[-1].round + 1), **metrics})
        # a point of each chart: epsilon against the target's adversary, if it is known after this round,
        # megabytes of all clients' messages, and one validation metric at the end
        metric = first_metric([known])
        if metric is not None and math.isfinite(known[metric]):
            names = [name for name in (*_PRICES, metric) if math.isfinite(known.get(name, math.nan))]
            self._prices.append({name: known[name] for name in names})
        for client in records[-1].non_finite_clients:
            self._non_finite[client] = self._non_finite.get(client, 0) + 1

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Send the noise-to-signal ratio, the table of clients, charts and the run folder."""
        federated = find_federated(trainer, "WandbRounds")
        records, engine, folder = federated.records, federated.engine, find_callback(trainer, RunFolder)
        if not trainer.is_global_zero or not records or engine is None:
            return
        wandb, run = _wandb(), _find_wandb_run(trainer)
        rows = [
            [client, len(part), self._non_finite.get(client, 0)]
            for client, part in enumerate(federated.client_indices)
        ]
        run.log({"fed/clients": wandb.Table(["client", "samples", "rounds not finite"], rows)})
        rounds = [record.metrics() for record in records]
        ratio = noise_over_signal(engine, rounds, len(rounds), federated.fit.lengths)
        noise = {"fed/noise_over_signal": ratio["planned"], "fed/sim_noise_over_signal": ratio["sim_seen"]}
        run.summary.update({key: value for key, value in noise.items() if value is not None})
        for price in _PRICES:  # one chart for each, which W&B shows by default
            known = [point for point in self._prices if price in point]
            if known:
                metric, cost = next(reversed(known[-1])), price.removeprefix("fed/")
                table = wandb.Table([cost, metric], [[point[price], point[metric]] for point in known])
                name = f"{metric} against {cost}"
                run.log({f"fed/{name}": wandb.plot.line(table, cost, metric, title=name)})
        # only files are sent: data that stay with the clients are in a subfolder
        paths = [] if folder is None or folder.path is None else sorted(folder.path.glob("*"))
        if files := [path for path in paths if path.is_file()]:
            artifact = wandb.Artifact(f"run-{run.id}", type="run-folder")
            for path in files:
                artifact.add_file(str(path))
            run.log_artifact(artifact)

    def unprotected_outputs(self, trainer: pl.Trainer) -> str:
        """Describe the data about clients that W&B gets."""
        return (
            "W&B gets each client's number of samples, its number of rounds with a non-finite update, "
            "a figure of its labels (if there are labels), and the files of this folder."
        )


def _find_wandb_run(trainer: pl.Trainer) -> Any:
    """Return the W&B run of the Trainer's `WandbLogger`.

    Raises:
        ValueError: If the Trainer has no `WandbLogger`.
    """
    for logger in trainer.loggers:
        if isinstance(logger, pl.loggers.WandbLogger):
            return logger.experiment
    raise ValueError(
        "WandbRounds needs a WandbLogger. Set trainer.logger to "
        f"{pl.__name__}.loggers.WandbLogger (with offline: true it needs no account)."
    )


def _wandb() -> Any:
    with extra("wandb", "WandbRounds"):
        import wandb
    return wandb
