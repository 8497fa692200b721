"""Weights & Biases for federated runs, on top of Lightning's `WandbLogger`. Offline needs no account.

`Federated` logs `fed/*` through Lightning, so the logger has them already. This callback puts them on
the axis `fed/round`, and adds what a logger can't know: configuration, who holds which labels, a table
of clients, and the run folder as an artifact.
"""

from __future__ import annotations

from typing import Any

import yaml

from lightning_fedq._lightning import callbacks_of, pl
from lightning_fedq.callbacks.federated import engine_of, federated_of
from lightning_fedq.callbacks.run_folder import RunFolder
from lightning_fedq.extras import extra
from lightning_fedq.federation.spending import noise_over_signal


class WandbRounds(pl.Callback):
    """Weights & Biases logging of rounds, configuration, clients and run folder, by the `WandbLogger`.

    Raises:
        ValueError: At the start of the training, if the Trainer has no `WandbLogger`, or if a `RunFolder`
            stands behind this callback: its report would not be written yet when it is sent.
    """

    def __init__(self) -> None:
        self._non_finite: dict[int, int] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Define the axis, and send configuration and label picture."""
        if not trainer.is_global_zero:
            return
        run, federated = self._run(trainer), federated_of(trainer, "WandbRounds")
        engine = engine_of(trainer, "WandbRounds")
        run.define_metric("fed/round")
        run.define_metric("fed/*", step_metric="fed/round")
        federation = {
            "mechanism": repr(engine.mechanism),
            "num_clients": federated.num_clients,
            "clients_per_round": engine.planner.cohort_size,
            "target": engine.target,
            "server_lr": engine.server_lr,
            "num_parameters": engine.weights.numel(),
            "reproducible": federated.seed is not None,
        }
        folder = self._folder(trainer)
        callbacks = callbacks_of(trainer)
        if folder is not None and callbacks.index(folder) > callbacks.index(self):
            raise ValueError("WandbRounds sends the run folder: put it behind RunFolder in trainer.callbacks")
        resolved = {} if folder is None or folder.config is None else yaml.safe_load(folder.config)
        # offline runs lose a config that is only given to wandb.init
        run.config.update({**resolved, "federation": federation}, allow_val_change=True)
        self._log_labels(run, federated)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put what validation logged on the axis of rounds, too."""
        records = federated_of(trainer, "WandbRounds").records
        if not trainer.is_global_zero or not records:
            return
        record = records[-1]
        values = {
            f"fed/{key}": float(value)
            for key, value in trainer.callback_metrics.items()
            if not key.startswith("fed/")
        }
        self._run(trainer).log({"fed/round": float(record.round + 1), **values})
        for client in record.non_finite_clients:
            self._non_finite[client] = self._non_finite.get(client, 0) + 1

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Send the table of clients and the run folder."""
        if not trainer.is_global_zero:
            return
        with extra("wandb", "WandbRounds"):
            import wandb

        run, federated = self._run(trainer), federated_of(trainer, "WandbRounds")
        rows = [[c, len(part), self._non_finite.get(c, 0)] for c, part in enumerate(federated.client_indices)]
        run.log({"fed/clients": wandb.Table(["client", "samples", "rounds not finite"], rows)})
        run.summary.update(self._noise(federated))
        folder = self._folder(trainer)
        if folder is not None and folder.path is not None and folder.path.is_dir():
            artifact = wandb.Artifact(f"run-{run.id}", type="run-folder")
            for path in sorted(folder.path.iterdir()):
                if path.is_file():  # what stays with the clients is in a folder of its own
                    artifact.add_file(str(path))
            run.log_artifact(artifact)

    def lets_out(self, trainer: pl.Trainer) -> str:
        """See `LetsOut`."""
        return (
            "W&B: how many samples every client holds, in how many rounds its update was not finite, who "
            "holds which labels (a picture, where there are labels), and the files of this folder."
        )

    @staticmethod
    def _noise(federated: Any) -> dict[str, float]:
        """Noise over signal of the run, planned and as seen, and whether it could learn."""
        records = federated.records
        known = noise_over_signal(federated.engine, [record.metrics() for record in records], len(records))
        values = {"noise_over_signal": known["planned"], "sim_noise_over_signal": known["sim_seen"]}
        return {f"fed/{name}": value for name, value in values.items() if value is not None}

    @staticmethod
    def _run(trainer: pl.Trainer) -> Any:
        for logger in trainer.loggers:
            if isinstance(logger, pl.loggers.WandbLogger):
                return logger.experiment
        raise ValueError(
            "WandbRounds needs a WandbLogger; set trainer.logger to "
            f"{pl.__name__}.loggers.WandbLogger (with offline: true it needs no account)"
        )

    @staticmethod
    def _folder(trainer: pl.Trainer) -> RunFolder | None:
        return next((c for c in callbacks_of(trainer) if isinstance(c, RunFolder)), None)

    @staticmethod
    def _log_labels(run: Any, federated: Any) -> None:
        with extra("wandb", "WandbRounds"):
            import wandb

        try:
            figure = federated.label_figure()
        except ValueError:
            return  # the data has no integer labels, so there is no such picture
        run.log({"fed/round": 0.0, "fed/labels": wandb.Image(figure)})  # before the first round
