"""The server of a real federation: a Trainer whose rounds are trained by clients on other machines.

`FederatedServer` is a `Federated` callback without local training. A round has one idle step. At its end, the
engine asks the clients, decodes their answers, steps and records. So validation, checkpoints, loggers, the
run folder, budgets, the ledger with its journal and the privacy page are those of a simulation.
"""

import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.callbacks import Federated
from lightning_fedq.data.batches import BatchRule
from lightning_fedq.data.partition import IID
from lightning_fedq.flower.batch_counters import check_counted
from lightning_fedq.flower.exchange import Exchange
from lightning_fedq.flower.remote_population import RemoteClients
from lightning_fedq.flower.roster import Roster
from lightning_fedq.flower.settings import (
    RELEASE,
    check_deployable,
    check_folder_release,
    check_identities,
    differences,
    fingerprint,
    given_rounds,
    is_per_client,
    server_rounds,
    time_limit,
)
from lightning_fedq.flower.store import Store
from lightning_fedq.flower.training_description import callbacks_in, training_words
from lightning_fedq.privacy.journal import name_file_in_errors, sync_folder
from lightning_fedq.training.checks import check_shapes
from lightning_fedq.training.settings import Protection

_SETTINGS = "settings"


class _NoData(pl.LightningDataModule):
    """Data module of a server that validates nothing."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(1, 1)))


class FederatedServer(Federated):
    """Federation of real clients, as a callback in a Trainer that does not train.

    Args:
        federated: Settings of the federation.
        exchange: Connection to the nodes.
        roster: Registry of the clients.
        max_aborted_rounds: Largest number of aborted rounds in a row.
    """

    def __init__(
        self, federated: Federated, exchange: Exchange, roster: Roster, max_aborted_rounds: int = 3
    ) -> None:
        self._max_aborted_rounds = max_aborted_rounds
        local = federated.local
        ledger = None if federated.owns_ledger else federated.ledger
        self._check_settings(
            Protection(federated.mechanism, federated.seed, ledger, federated.privacy_target),
            replace(federated.clients, dropout_probability=0.0, partition=IID(), labels=None),
            replace(
                local,
                clients_per_step=1,
                # the server receives no training metrics from clients
                client_metrics="none" if local.evaluate_clients is None else local.client_metrics,
                check_isolation=False,
            ),
            replace(federated.server, diagnostics=False),
        )
        self.planner = replace(self.planner, real_clients=True)
        self._exchange, self._roster = exchange, roster

    def _make_population(self, trainer: pl.Trainer, module: pl.LightningModule) -> RemoteClients:
        parts = (self._exchange, self._roster, self._undo, self._max_aborted_rounds)
        return RemoteClients(self, trainer, module, *parts)

    def use_batches(self, rule: BatchRule) -> None:
        """Refuse a batch rule, because clients draw their batches themselves.

        Raises:
            ValueError: Always.
        """
        name = type(rule).__name__
        raise ValueError(f"{name} draws batches, but a server has no training data. Leave it out.")


@dataclass(frozen=True)
class Deployment:
    """A server with its settings and its folder.

    Args:
        module: Function that makes the module, whose weights are the first global model.
        federated: Settings of the federation.
        data: Function that makes the data module for the server's validation. None validates nothing.
        trainer: Arguments of the server's `Trainer`. `max_epochs` is the number of rounds.
        home: Folder of the server: keys, roster, and checkpoints with the ledger's journal.
        round_timeout: Seconds in which a client has to answer, training included.
        wait: Seconds to wait for `num_clients` clients before the first round.
        directory: Verification key of each client, by number. `SecAgg(active=True)` needs it.
        max_aborted_rounds: Largest number of aborted rounds in a row before the server ends.
    """

    module: Callable[[], pl.LightningModule]
    federated: Federated
    data: Callable[[], pl.LightningDataModule] | None
    trainer: dict[str, Any]
    home: Path
    round_timeout: float
    wait: float
    directory: Mapping[int, Ed25519PublicKey] | None = None
    max_aborted_rounds: int = 3

    def run(self, grid: Grid) -> tuple[pl.Trainer, FederatedServer]:
        """Register the clients and train all rounds, or continue from the last checkpoint of a killed server.

        Args:
            grid: Flower's connection to the nodes.

        Returns:
            The trainer, and the federation's callback in it.

        Raises:
            ValueError: If the last checkpoint is damaged, or missing although rounds were charged. Also if
                another server works in the same folder, its settings differ, or `max_steps` needs
                `local_steps`.
            RefusedError: If a layer or a schedule depends on a number that no side knows over a network.
        """
        store = Store(self.home)
        with store.lock():
            check_folder_release(self.home, store.get(_SETTINGS) or {})
            _check_checkpoint(self.home)
            module, local = self.module(), self.federated.local
            check_shapes(module)
            check_counted(module, local)
            if self.trainer.get("max_steps", -1) != -1 and local.local_steps is None:
                raise ValueError(
                    "max_steps counts client steps, which the server does not know. Set local_steps=..., or "
                    "max_epochs, which counts rounds."
                )
            settings = fingerprint(self.federated, module, given_rounds(self.trainer, local.local_steps))
            words = settings | training_words(self.trainer, self.module)
            rounds = server_rounds(self.trainer, local.local_steps)
            exchange = Exchange(grid, self.round_timeout, rank_zero_warn)
            roster = Roster(self.federated, exchange, store, words, self.directory, rounds)
            # the target calibrates the mechanism to the number of rounds
            if self.federated.calibrated_target is not None:
                del settings["mechanism"]
            _check_settings(store, settings)
            roster.gather(self.wait)
            store.put(_SETTINGS, settings)
            server = FederatedServer(self.federated, exchange, roster, self.max_aborted_rounds)
            return self._fit(module, server), server

    def _fit(self, module: pl.LightningModule, server: FederatedServer) -> pl.Trainer:
        """Train all rounds in a new Trainer, from the last checkpoint if there is one, and return it."""
        checkpoint = _RoundCheckpoint(self.home / "checkpoints")
        shared = [callback for callback in callbacks_in(self.trainer) if not is_per_client(callback)]
        arguments = {"enable_progress_bar": False, "num_sanity_val_steps": 0, **self.trainer}
        trainer = pl.Trainer(**{**arguments, "callbacks": [server, *shared, checkpoint]})
        last = str(checkpoint.path) if checkpoint.path.is_file() else None
        if last is not None:
            rank_zero_info(f"Continuing from {last}")
        data = _NoData() if self.data is None else self.data()
        trainer.fit(module, datamodule=data, ckpt_path=last)
        return trainer


def _check_settings(store: Store, settings: dict[str, str]) -> None:
    """Refuse a folder with other settings, before any client is asked. Another release is accepted.

    Args:
        store: Folder of the server.
        settings: Settings of this run, as text by name.

    Raises:
        ValueError: If a setting differs from the one in the folder.
    """
    any_release = dict.fromkeys(RELEASE, "")
    current, stored = settings | any_release, (store.get(_SETTINGS) or settings) | any_release
    if difference := differences(current, {name: value for name, value in stored.items() if name in current}):
        raise ValueError(
            f"{store.folder} has a federation with other settings ({difference}). Restore them, or begin a "
            "new federation (add up both budgets) with new folders: server_app(home=...) and each client's "
            "fedq-home."
        )


def _check_checkpoint(home: Path) -> None:
    """Refuse a folder whose checkpoint is damaged, or missing although its journal has charges.

    Args:
        home: Folder of the server.

    Raises:
        ValueError: If either is the case.
    """
    last = home / "checkpoints" / "last.ckpt"
    cure = (
        "restore a copy. Without one, use new folders for the server and each client, and add up both "
        "budgets (ledger-*.jsonl)"
    )
    if not last.is_file():
        journals = sorted(home.rglob("ledger-*.jsonl"))
        charged = [path for path in journals if path.read_bytes().count(b"\n") > 1]
        if charged:
            raise ValueError(f"{charged[0]} has charges, but {last} is missing: {cure}")
        return
    try:
        with zipfile.ZipFile(last) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{last} is cut off or damaged ({last.stat().st_size} bytes): {cure}") from error
    if damaged is not None:
        raise ValueError(f"{last} is damaged in its part {damaged}: {cure}")


class _RoundCheckpoint(pl.callbacks.Checkpoint):
    """Checkpoint of the last round, which is complete at any time and exists before the first charge.

    So the ledger's journal in the same folder always has a checkpoint that names it.

    Args:
        folder: Folder of the checkpoint.
    """

    knows_clients = True

    def __init__(self, folder: Path) -> None:
        self.dirpath, self.path = folder, folder / "last.ckpt"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save before the first round, if there is no checkpoint yet."""
        if not self.path.is_file():
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save after each round."""
        self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        """Write the checkpoint to a new file, which then replaces the old one."""
        new = self.path.with_suffix(".new")
        with name_file_in_errors(self.path):
            trainer.save_checkpoint(new)
            with new.open("r+b") as file:  # synced, so that a power cut does not leave an empty checkpoint
                os.fsync(file.fileno())
            new.replace(self.path)
        sync_folder(self.dirpath)


def server_app(
    module: Callable[[], pl.LightningModule],
    federated: Federated,
    *,
    data: Callable[[], pl.LightningDataModule] | None = None,
    trainer: Callable[[Context], dict[str, Any]] | dict[str, Any] | None = None,
    home: Callable[[Context], Path] | str | Path = "fedq-server",
    round_timeout: float | None = None,
    wait: float = 600.0,
    directory: Mapping[int, Ed25519PublicKey] | None = None,
    max_aborted_rounds: int = 3,
) -> ServerApp:
    """Make Flower's `ServerApp` of the server.

    Args:
        module: Function that makes the module, whose weights are the first global model.
        federated: Settings of the federation, equal to those of the clients and of the simulation.
        data: Function that makes the data module for the server's own validation. None validates nothing.
        trainer: Arguments of the server's `Trainer`, or a function that makes them from Flower's context.
            `max_epochs` is the number of rounds. Callbacks, such as `RunFolder()`, and loggers are as in a
            simulation. Clients do the training, so they must have all arguments that affect it.
        home: Folder of the server, or a function that returns it for Flower's context. It has keys, roster,
            and checkpoints with the ledger's journal. A restarted server continues from its folder.
        round_timeout: Seconds in which a client has to answer, training included. The round then continues
            without the client. None takes the federation's deadline, or an hour.
        wait: Seconds to wait for `num_clients` clients before the first round.
        directory: Verification key of each client, by number, as the clients have it. The server refuses a
            client whose key is not signed by its identity. `SecAgg(active=True)` needs it.
        max_aborted_rounds: Largest number of aborted rounds in a row, each charged, before the server ends
            with the names of failed clients and the reasons.

    Raises:
        ValueError: If a setting is for simulations only, the directory is missing, or `max_aborted_rounds` is
            below 1.
    """
    if max_aborted_rounds < 1:
        raise ValueError(f"max_aborted_rounds must be >= 1, got {max_aborted_rounds}")
    check_deployable(federated)
    check_identities(federated, directory is not None, "server_app(directory=...)")
    timeout = time_limit(federated, round_timeout)
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        arguments = trainer(context) if callable(trainer) else trainer or {}
        folder = home(context) if callable(home) else Path(home)
        Deployment(
            module, federated, data, arguments, folder, timeout, wait, directory, max_aborted_rounds
        ).run(grid)

    return app
