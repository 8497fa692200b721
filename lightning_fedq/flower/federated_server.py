"""The server of a real federation: a Trainer whose rounds are trained by clients on other machines.

`FederatedServer` is a `Federated` callback without local training. A round has one idle step. At its end, the
engine asks the clients, decodes their answers, steps and records. So validation, checkpoints, loggers, the
run folder, budgets, the ledger with its journal and the privacy page are those of a simulation.
"""

import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.algorithms.local_algorithm import PersistentOffsets
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.undo import Undo
from lightning_fedq.clients.vector import Members, optimised_ids
from lightning_fedq.data.batches import BatchRule, LocalWork, Stack
from lightning_fedq.data.generator_turns import preserve_generators
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.data.partition import IID
from lightning_fedq.flower.cohort import Cohort, count_needed_answers, wait_for_enough
from lightning_fedq.flower.exchange import Exchange
from lightning_fedq.flower.local_round import check_counted, check_schedules
from lightning_fedq.flower.persistent_state import NEVER, Attempt
from lightning_fedq.flower.records import Fields
from lightning_fedq.flower.remote_evaluator import RemoteEvaluator
from lightning_fedq.flower.roster import Roster
from lightning_fedq.flower.secure import remote_sums
from lightning_fedq.flower.settings import (
    check_deployable,
    check_folder_release,
    check_identities,
    differences,
    fingerprint,
    given_rounds,
    is_per_client,
    only_simulated,
    server_rounds,
    time_limit,
)
from lightning_fedq.flower.store import Store
from lightning_fedq.flower.training_description import callbacks_in, training_words
from lightning_fedq.privacy.journal import name_file_in_errors, sync_folder
from lightning_fedq.rounds import Broadcast, RoundPlan, RoundRecord, RoundServer
from lightning_fedq.training.checks import check_shapes
from lightning_fedq.training.loops import Schedule, idle_stack
from lightning_fedq.training.population import PartitionedData, Population, Stacks
from lightning_fedq.training.settings import Protection

_SETTINGS = "settings"


class RemoteRoundServer(RoundServer):
    """`RoundServer` that waits for clients before it charges a round, and asks them in `finish`.

    Attributes:
        ready: Waits for enough clients. Called before a round begins.
        collect: Asks the clients and receives their answers. Called before a round is finished.
        counted: Notes the clients whose answers are in the sum. Called with the record of a finished round.
    """

    ready: Callable[[], None]
    collect: Callable[[], None]
    counted: Callable[[RoundRecord], None]

    def _refuse(self, works_on_updates: object) -> None:
        """Refuse a callback that works on updates, which only the clients of a simulation have."""
        if works_on_updates is not None:
            name = type(works_on_updates).__name__
            raise ValueError(f"{name} works on updates, which a server never receives. Leave it out.")

    transform = tampering = property(
        lambda self: None, _refuse, doc="Transform of updates, always None on a server."
    )

    def start(self) -> RoundPlan:
        """Wait for enough clients, and begin the round (see `RoundServer.start`)."""
        self.ready()
        return super().start()

    def _record(self, plan: RoundPlan) -> RoundRecord:
        """Return the record of a round, in which each client without an answer has dropped out."""
        record = super()._record(plan)
        return replace(record, num_dropped=len(plan.cohort) - int(record.num_received))

    def finish(self) -> RoundRecord:
        """Ask the clients, receive their answers, and finish the round (see `RoundServer.finish`)."""
        with (
            preserve_generators()
        ):  # clients run in other processes, so collecting must not change the draws of the server's step
            self.collect()
        record = super().finish()
        self.counted(record)
        return record


class _IdleRounds(Schedule):
    """Schedule of one idle step a round, because the server trains nothing."""

    max_batches = 1

    def _make_stacks(self, round: int, attempt: int, clients_per_step: int, most: int | None) -> list[Stack]:
        return [idle_stack(self._planner.plan(round, self._mechanism))]


class _NoData(pl.LightningDataModule):
    """Data module of a server that validates nothing."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(1, 1)))


class RemoteClients(Population):
    """Population of clients on other machines. The server only knows their reported sample counts.

    Args:
        federation: Settings of this fit.
        trainer: Trainer of the server.
        module: Module of the server.
        exchange: Connection to the nodes.
        roster: Registry of the clients.
        undo: Restores the user's objects after the fit.
        max_aborted_rounds: Largest number of aborted rounds in a row.

    Raises:
        ValueError: If a callback works on simulated clients.
    """

    def __init__(
        self,
        federation: Federated,
        trainer: Any,
        module: pl.LightningModule,
        exchange: Exchange,
        roster: Roster,
        undo: Undo,
        max_aborted_rounds: int,
    ) -> None:
        super().__init__(federation)
        self._federated = federation
        self._max_aborted_rounds, self._in_vain = max_aborted_rounds, list[str]()
        for callback in trainer.callbacks:
            if only_simulated(callback):
                raise ValueError(
                    f"{type(callback).__name__} works on simulated clients, but a server has none. Leave it "
                    "out."
                )
        self._exchange, self._roster, self._trainer = exchange, roster, trainer
        self._counted: dict[int, Attempt] = {}
        self._open_attempt = NEVER
        self._reported_names = set[str]()
        # the limit is for the clients' passes, not for the idle step
        undo.replace(trainer, "limit_train_batches", 1.0)
        undo.replace(trainer.datamodule or module, "train_dataloader", lambda: self.loader())

    def check_start(self, trainer: pl.Trainer) -> None:
        """Refuse schedules that clients can't follow, before anybody is charged."""
        check_schedules(trainer, self._federation.local.local_steps)
        self._held, self._values = optimised_ids(trainer.optimizers), plain_values(trainer.lightning_module)

    def check_change(self, before: Members, now: Members) -> None:
        """Refuse to freeze parameters that were trained, and to train parameters outside clients' optimisers.

        Frozen parameters do not travel, and clients keep no model between rounds. So a parameter that is
        frozen after training would have its initial value at the clients.

        Args:
            before: Parameters of the previous round.
            now: Parameters of this round.

        Raises:
            ValueError: If this round does either.
        """
        trained, module = (*now.parameters, *now.local), self._trainer.lightning_module
        if late := [name for name in trained if id(module.get_parameter(name)) not in self._held]:
            raise ValueError(
                f"This round trains {', '.join(late[:3])}, which clients' optimisers do not have. Give "
                "configure_optimizers all parameters that are ever trained, and unfreeze them by "
                "requires_grad."
            )
        if frozen := [name for name in (*before.parameters, *before.local) if name not in trained]:
            raise ValueError(
                f"This round freezes {', '.join(frozen[:3])}, which was trained and then no longer travels. "
                "Freeze it in module() from the start, or keep it trained."
            )

    def trial_stacks(self) -> None:
        """Return nothing to try, because the server has no data."""

    def server(
        self, weights: Tensor, segments: Sequence[int], settings: dict[str, Any], all: Stacks
    ) -> RemoteRoundServer:
        """Return a round server that asks clients over the network (see `Population.server`)."""
        federation = self._federation
        secagg = federation.server.secure_aggregation
        server = RemoteRoundServer(
            federation.mechanism,
            federation.planner,
            self._roster.keys(),
            weights,
            segments,
            federation.server.range_rule,
            secure_sums=None if secagg is None else remote_sums(secagg, self._roster.directory),
            **settings,
        )
        server.ready = lambda: self._check_ready(server)
        server.collect = lambda: self._collect(server)
        server.counted = lambda record: self._record_counted(server, record)
        return server

    def _check_ready(self, server: RemoteRoundServer) -> None:
        """Refuse to begin a round that is known to fail, before anybody is charged.

        Args:
            server: Server between two rounds.

        Raises:
            RuntimeError: If too many rounds in a row were aborted, or too few clients are connected.
        """
        if len(self._in_vain) >= self._max_aborted_rounds:
            raise RuntimeError(
                f"{len(self._in_vain)} rounds in a row were charged and aborted, the last because "
                f"{self._in_vain[-1]} ({self._roster.describe_failures() or 'no client has failed'}). Cure "
                "the cause and start this run again with the same home, or raise "
                "server_app(max_aborted_rounds=...)."
            )
        wait_for_enough(server, self._roster, self._federation.server.secure_aggregation)

    def _record_counted(self, server: RemoteRoundServer, record: RoundRecord) -> None:
        """Note the clients whose answers are in the sum, so that the next task can tell them.

        Counters of batches advance as in a simulation where every client takes `local_steps`.

        Args:
            server: Server that has finished the round.
            record: Record of the round.
        """
        if (batches := self._federation.local.local_steps) is not None:
            max_batches = self._federated.fit.side.clock.max_batches
            self._federated.fit.vector.max_counted.fill_(
                batches if max_batches is None else min(batches, max_batches)
            )
        if record.aborted or not record.num_received:
            self._in_vain.append(record.aborted or "no client answered")
        else:
            self._in_vain.clear()
            self._roster.failures = {
                c: why for c, why in self._roster.failures.items() if self._roster.absence_reason(c)
            }
        self._counted |= dict.fromkeys(sorted(server.last_summed_clients), self._open_attempt)

    def state_dict(self) -> dict[str, Any]:
        # last round and attempt of each client whose answer was in a sum
        return {"counted": {client: list(at) for client, at in self._counted.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counted = {int(client): (at[0], at[1]) for client, at in state["counted"].items()}

    def _round_inputs(self) -> dict[str, Any]:
        """Return the fields that clients need besides task and weights.

        These are the mean of the statistics, the vector of the local algorithm, the options of the optimisers
        and the names of trained parameters. Callbacks and schedules of this fit may change them, such as
        learning rates.
        """
        algorithm, term = self._federation.local.algorithm, self._federated.fit.correction
        fields = dict[str, Any]()
        engine = self._federation.engine
        if engine is not None and engine.statistic is not None:  # it was released, so it reveals nothing new
            fields["statistic"] = engine.statistic.float().numpy().astype("<f4").tobytes()
        if algorithm is not None and algorithm.sends and isinstance(term, PersistentOffsets):
            fields["algorithm"] = term.server.float().cpu().numpy().tobytes()
        groups = [
            [
                {k: v for k, v in group.items() if type(v) in (bool, int, float)}
                for group in optimizer.param_groups
            ]
            for optimizer in self._trainer.optimizers
        ]
        optimised, parameters = (
            optimised_ids(self._trainer.optimizers),
            self._trainer.lightning_module.named_parameters(),
        )
        fields["trained"] = json.dumps([n for n, p in parameters if p.requires_grad and id(p) in optimised])
        return {**fields, "groups": json.dumps(groups)}

    def _report_changed_values(self) -> None:
        """Warn once of each module attribute that the fit has changed and that clients do not receive.

        Values that hooks compute from `self.current_epoch`, the index of the round, are the same at the
        clients. Values that build on the previous round are lost.
        """
        now = plain_values(self._trainer.lightning_module)
        changed = [name for name, value in now.items() if self._values.get(name) != value]
        self._values = now
        if new_names := [name for name in changed if name not in self._reported_names]:
            self._reported_names.update(new_names)
            rank_zero_warn(
                f"This fit has changed {', '.join(new_names[:3])} of its module, but clients begin each "
                "round with a new module. Compute it from self.current_epoch (the round), because values of "
                "the previous round are lost."
            )

    def _partition_data(self) -> PartitionedData:
        """Return placeholder data with the reported number of samples of each client, and idle rounds."""
        index = torch.zeros(1, dtype=torch.int64)  # expanded, so that a huge reported number takes no memory
        client_indices = [index.expand(n) for _, n in sorted(self._roster.samples.items())]
        work = LocalWork((index,), 1, False, False, 1, None)
        schedule = _IdleRounds(self._federation.planner, self._federation.mechanism, work, None, 0)
        schedule.max_batches = self._federation.local.local_steps or 1
        idle = DataLoader(TensorDataset(torch.zeros(1, 1)))
        loader = ClientLoader(idle, work, lambda: self.coming(), schedule.max_batches)
        return PartitionedData(client_indices, schedule, loader, False, [])

    def _collect(self, server: RemoteRoundServer) -> None:
        """Ask the cohort, and pass the answers to the server. Clients without an answer have dropped out.

        Args:
            server: Server with an open round.
        """
        self._report_changed_values()
        cohort, plan = Cohort(server, self._exchange, self._roster), server.plan
        assert plan is not None
        self._open_attempt = plan.round, server.attempt
        model_fields = self._model(server, server.broadcast)
        questions = cohort.client_requests()
        needed = count_needed_answers(server, plan, self._federation.server.secure_aggregation)
        if len(questions) < needed:  # clients left after the round began, so the others need not send
            server.abort(f"{needed} clients are needed, {len(questions)} are there")
            return
        contents = {client: {**model_fields(client), **fields} for client, fields in questions.items()}
        cohort.conclude(cohort.ask("train", contents))

    def _model(self, server: RoundServer, broadcast: Broadcast | None) -> Callable[[int], Fields]:
        """Return a function that gives the model fields for a client.

        Args:
            server: Server with the global weights.
            broadcast: Quantiser of the downlink, or None to send the weights as they are.
        """
        weights = server.weights.detach().cpu().contiguous()
        sent = weights.numpy().tobytes() if broadcast is None else broadcast.pack(weights, server.segments)
        model = {"weights": sent, "dtype": str(weights.dtype).partition(".")[2], **self._round_inputs()}
        return lambda client: {**model, "counted": list(self._counted.get(client, NEVER))}

    def evaluator(self, trainer: pl.Trainer, engine: RemoteRoundServer) -> RemoteEvaluator:
        """Return an evaluator that asks clients to measure (see `Population.evaluator`)."""
        model = lambda: self._model(engine, None)  # noqa: E731 (unquantised, as a simulation measures)
        return RemoteEvaluator(self._federation, trainer, self._exchange, self._roster, model)


def plain_values(module: pl.LightningModule) -> dict[str, Any]:
    """Return numbers, flags and text in public attributes of a module and its parts, by dotted name.

    `training` is left out, because validation changes it.
    """
    return {
        f"{part}.{name}".lstrip("."): value
        for part, submodule in module.named_modules()
        for name, value in vars(submodule).items()
        if type(value) in (bool, int, float, str) and not name.startswith("_") and name != "training"
    }


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
            module = self.module()
            check_shapes(module)
            check_counted(module, self.federated.local)
            exchange = Exchange(grid, self.round_timeout, rank_zero_warn)
            local_steps = self.federated.local.local_steps
            settings = fingerprint(self.federated, module, given_rounds(self.trainer, local_steps))
            words = settings | training_words(self.trainer, self.module)
            if self.trainer.get("max_steps", -1) != -1 and local_steps is None:
                raise ValueError(
                    "max_steps counts client steps, which the server does not know. Set local_steps=..., or "
                    "max_epochs, which counts rounds."
                )
            rounds = server_rounds(self.trainer, local_steps)
            roster = Roster(self.federated, exchange, store, words, self.directory, rounds)
            # the target calibrates the mechanism to the number of rounds
            if self.federated.calibrated_target is not None:
                del settings["mechanism"]
            _check_settings(store, settings)
            roster.gather(self.wait)
            store.put(_SETTINGS, settings)
            server = FederatedServer(self.federated, exchange, roster, self.max_aborted_rounds)
            checkpoint, arguments = _RoundCheckpoint(self.home / "checkpoints"), dict(self.trainer)
            user_callbacks = callbacks_in(arguments)
            callbacks = [
                server,
                *(callback for callback in user_callbacks if not is_per_client(callback)),
                checkpoint,
            ]
            trainer = pl.Trainer(
                **{
                    "enable_progress_bar": False,
                    "num_sanity_val_steps": 0,
                    **arguments,
                    "callbacks": callbacks,
                }
            )
            last = checkpoint.path
            if last.is_file():
                rank_zero_info(f"Continuing from {last}")
            data = _NoData() if self.data is None else self.data()
            trainer.fit(module, datamodule=data, ckpt_path=str(last) if last.is_file() else None)
            return trainer, server


def _check_settings(store: Store, settings: dict[str, str]) -> None:
    """Refuse a folder with other settings, before any client is asked. Another release is accepted.

    Args:
        store: Folder of the server.
        settings: Settings of this run, as text by name.

    Raises:
        ValueError: If a setting differs from the one in the folder.
    """
    current, stored = (
        {**difference, "lightning_fedq": "", "protocol": ""}
        for difference in (settings, store.get(_SETTINGS) or settings)
    )
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
        charged = [
            path for path in sorted(home.rglob("ledger-*.jsonl")) if path.read_bytes().count(b"\n") > 1
        ]
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
