"""The server of a real federation: a Trainer whose rounds are carried out by clients elsewhere.

`FederatedServer` is `Federated` with nobody to train here: a round's only step is idle, and at its end the
engine asks the clients, decodes what they answer, steps and records. So validation, checkpoints, loggers,
the run folder, budgets and the ledger with its journal are those of a simulation, and so is the privacy
page.
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
    check_identities,
    count_rounds,
    differences,
    fingerprint,
    is_per_client,
    only_simulated,
    time_limit,
)
from lightning_fedq.flower.store import Store
from lightning_fedq.flower.training_description import callbacks_in, training_words
from lightning_fedq.privacy.journal import name_file_in_errors, sync_folder
from lightning_fedq.rounds import Broadcast, RoundPlan, RoundRecord, RoundServer
from lightning_fedq.training.loops import Schedule, idle_stack
from lightning_fedq.training.population import PartitionedData, Population, Stacks
from lightning_fedq.training.settings import Protection

_SETTINGS = "settings"


class RemoteRoundServer(RoundServer):
    """A `RoundServer` that waits for enough clients before it charges, and whose `finish` asks them first."""

    ready: Callable[[], None]
    collect: Callable[[], None]
    counted: Callable[[RoundRecord], None]

    def _refuse(self, works_on_updates: object) -> None:
        """Refuse what only the clients of a simulation could do."""
        if works_on_updates is not None:
            name = type(works_on_updates).__name__
            raise ValueError(f"{name} works on updates, which a server is never given; leave it out")

    transform = tampering = property(lambda self: None, _refuse, doc="What changes updates: None here.")

    def start(self) -> RoundPlan:
        """Wait for enough clients, and begin the round, see `RoundServer.start`."""
        self.ready()
        return super().start()

    def _record(self, plan: RoundPlan) -> RoundRecord:
        """Of real clients whoever has not answered has dropped out."""
        record = super()._record(plan)
        return replace(record, num_dropped=len(plan.cohort) - int(record.num_received))

    def finish(self) -> RoundRecord:
        """Ask, take what comes in time, and finish the round, see `RoundServer.finish`."""
        with (
            preserve_generators()
        ):  # as in other processes: a server's step draws what it draws in a simulation
            self.collect()
        record = super().finish()
        self.counted(record)
        return record


class _IdleRounds(Schedule):
    """One idle step a round: nobody trains here."""

    max_batches = 1

    def _make_stacks(self, round: int, attempt: int, clients_per_step: int, most: int | None) -> list[Stack]:
        return [idle_stack(self._planner.plan(round, self._mechanism))]


class _NoData(pl.LightningDataModule):
    """For a server that validates nothing."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(1, 1)))


class RemoteClients(Population):
    """Clients on other machines, of which the server knows how many samples they say that they hold.

    Args:
        undo: Gives the user's objects their own back.
        most_aborted: Rounds in a row that may come to nothing.

    Raises:
        ValueError: If a callback works on clients that are simulated.
    """

    def __init__(
        self,
        federation: Federated,
        trainer: Any,
        module: pl.LightningModule,
        exchange: Exchange,
        roster: Roster,
        undo: Undo,
        most_aborted: int,
    ) -> None:
        super().__init__(federation)
        self._federated = federation
        self._most_aborted, self._in_vain = most_aborted, list[str]()
        for callback in trainer.callbacks:
            if only_simulated(callback):
                raise ValueError(
                    f"{type(callback).__name__} works on clients that are simulated here, and the server "
                    "has none; leave it out"
                )
        self._exchange, self._roster, self._trainer = exchange, roster, trainer
        self._counted: dict[int, Attempt] = {}
        self._open_attempt = NEVER
        self._reported_names = set[str]()
        undo.replace(trainer, "limit_train_batches", 1.0)  # of clients' passes, not of the idle step
        undo.replace(trainer.datamodule or module, "train_dataloader", lambda: self.loader())

    def check_start(self, trainer: pl.Trainer) -> None:
        """Refuse schedules that clients can't follow, before anybody is charged."""
        check_schedules(trainer, self._federation.local.local_steps)
        self._held, self._values = optimised_ids(trainer.optimizers), plain_values(trainer.lightning_module)

    def check_change(self, before: Members, now: Members) -> None:
        """Refuse to freeze what has been trained, and to train what clients' optimisers do not hold.

        The first would no longer travel, and clients keep no model.

        Raises:
            ValueError: With the cure.
        """
        trained, module = (*now.parameters, *now.local), self._trainer.lightning_module
        if late := [name for name in trained if id(module.get_parameter(name)) not in self._held]:
            raise ValueError(
                f"this round trains {', '.join(late[:3])}, which a callback or hook has given to optimisers "
                "here, and real clients have theirs from configure_optimizers; give configure_optimizers "
                "every parameter that is ever trained, and unfreeze by requires_grad"
            )
        if frozen := [name for name in (*before.parameters, *before.local) if name not in trained]:
            raise ValueError(
                f"this round freezes {', '.join(frozen[:3])}, which has been trained, and real clients keep "
                "no model from round to round: what is frozen does not travel, so they would train with "
                "other values; freeze in module() from the start, or keep it trained"
            )

    def trial_stacks(self) -> None:
        """Nobody: there are no data here."""

    def server(
        self, weights: Tensor, segments: Sequence[int], settings: dict[str, Any], all: Stacks
    ) -> RemoteRoundServer:
        """A server that asks the clients over the network, see `Population.server`."""
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
        """Let nobody pay for a round that can't come to anything, as far as it is known.

        Raises:
            RuntimeError: If rounds have come to nothing too often in a row, or too few clients are there.
        """
        if len(self._in_vain) >= self._most_aborted:
            raise RuntimeError(
                f"{len(self._in_vain)} rounds in a row came to nothing and were charged, the last because "
                f"{self._in_vain[-1]}; {self._roster.describe_failures() or 'no client has failed'}. The "
                "next is "
                "not begun: cure that first, then start this run again with the same home; "
                "server_app(most_aborted=...) says how many are borne"
            )
        wait_for_enough(server, self._roster, self._federation.server.secure_aggregation)

    def _record_counted(self, server: RemoteRoundServer, record: RoundRecord) -> None:
        """Remember whose answers are in the sum. Each client is told with its next task.

        Counters of batches advance as in a simulation, where every client takes as many.
        """
        if (batches := self._federation.local.local_steps) is not None:
            left = self._federated.fit.side.clock.max_batches
            self._federated.fit.vector.max_counted.fill_(batches if left is None else min(batches, left))
        if record.aborted or not record.num_received:
            self._in_vain.append(record.aborted or "nobody has answered")
        else:
            self._in_vain.clear()
            self._roster.failures = {
                c: why for c, why in self._roster.failures.items() if self._roster.absence_reason(c)
            }
        self._counted |= dict.fromkeys(sorted(server.last_summed_clients), self._open_attempt)

    def state_dict(self) -> dict[str, Any]:
        # the last round and attempt of each client that counted
        return {"counted": {client: list(at) for client, at in self._counted.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counted = {int(client): (at[0], at[1]) for client, at in state["counted"].items()}

    def _round_inputs(self) -> dict[str, Any]:
        """Return all that clients need beside task and weights: the algorithm's vector, optimisers' numbers.

        Callbacks and schedules of this fit may have changed these, learning rates say, and what is trained.
        """
        algorithm, term = self._federation.local.algorithm, self._federated.fit.correction
        fields = dict[str, Any]()
        engine = self._federation.engine
        if engine is not None and engine.statistic is not None:  # released, so it says nothing new
            fields["statistic"] = engine.statistic.float().numpy().astype("<f4").tobytes()
        if algorithm is not None and algorithm.sends and isinstance(term, PersistentOffsets):
            fields["algorithm"] = term.server.float().cpu().numpy().tobytes()
        groups = [
            [{k: v for k, v in group.items() if type(v) in (bool, int, float)} for group in one.param_groups]
            for one in self._trainer.optimizers
        ]
        held, named = (
            optimised_ids(self._trainer.optimizers),
            self._trainer.lightning_module.named_parameters(),
        )
        fields["trained"] = json.dumps([n for n, p in named if p.requires_grad and id(p) in held])
        return {**fields, "groups": json.dumps(groups)}

    def _report_changed_values(self) -> None:
        """Name, once each, what the fit has changed on its module that real clients do not hear of."""
        now = plain_values(self._trainer.lightning_module)
        changed = [name for name, value in now.items() if self._values.get(name) != value]
        self._values = now
        if news := [name for name in changed if name not in self._reported_names]:
            self._reported_names.update(news)
            rank_zero_warn(
                f"this fit has changed {', '.join(news[:3])} of its module, and real clients begin each "
                "round with the module as it is made: weights, what is trained and optimisers' numbers reach "
                "them. What hooks compute from self.current_epoch, which is the round, clients compute, too; "
                "what builds on the round before is lost"
            )

    def _partition_data(self) -> PartitionedData:
        one = torch.zeros(1, dtype=torch.int64)  # only how many is known here, and a client may say anything
        held = [one.expand(n) for _, n in sorted(self._roster.samples.items())]
        work = LocalWork((one,), 1, False, False, 1, None)
        schedule = _IdleRounds(self._federation.planner, self._federation.mechanism, work, None, 0)
        schedule.max_batches = self._federation.local.local_steps or 1
        idle = DataLoader(TensorDataset(torch.zeros(1, 1)))
        loader = ClientLoader(idle, work, lambda: self.coming(), schedule.max_batches)
        return PartitionedData(held, schedule, loader, False, [])

    def _collect(self, server: RemoteRoundServer) -> None:
        """Ask the cohort, and give the server what comes back. Whoever is silent has dropped out."""
        self._report_changed_values()
        cohort, plan = Cohort(server, self._exchange, self._roster), server.plan
        assert plan is not None
        self._open_attempt = plan.round, server.attempt
        of = self._model(server, server.broadcast)
        questions = cohort.client_requests()
        needed = count_needed_answers(server, plan, self._federation.server.secure_aggregation)
        if len(questions) < needed:  # they left while it began: nobody else is to send for nothing
            server.abort(f"{needed} clients are needed, {len(questions)} are there")
            return
        contents = {client: {**of(client), **fields} for client, fields in questions.items()}
        cohort.conclude(cohort.ask("train", contents))

    def _model(self, server: RoundServer, broadcast: Broadcast | None) -> Callable[[int], Fields]:
        """Give each client the model, in few bits or as it is, and all that belongs to it."""
        weights = server.weights.detach().cpu().contiguous()
        sent = weights.numpy().tobytes() if broadcast is None else broadcast.pack(weights, server.segments)
        model = {"weights": sent, "dtype": str(weights.dtype).partition(".")[2], **self._round_inputs()}
        return lambda client: {**model, "counted": list(self._counted.get(client, NEVER))}

    def evaluator(self, trainer: pl.Trainer, engine: RemoteRoundServer) -> RemoteEvaluator:
        """Asks clients to measure, see `Population.evaluator`."""
        model = lambda: self._model(engine, None)  # noqa: E731 (as it is: a simulation measures that)
        return RemoteEvaluator(self._federation, trainer, self._exchange, self._roster, model)


def plain_values(module: pl.LightningModule) -> dict[str, Any]:
    """Numbers, flags and words that a module and its parts hold as public attributes, by name.

    Modes are left out: validation changes them.
    """
    return {
        f"{part}.{name}".lstrip("."): value
        for part, one in module.named_modules()
        for name, value in vars(one).items()
        if type(value) in (bool, int, float, str) and not name.startswith("_") and name != "training"
    }


class FederatedServer(Federated):
    """The federation of real clients, in a Trainer that trains nobody."""

    def __init__(
        self, federated: Federated, exchange: Exchange, roster: Roster, most_aborted: int = 3
    ) -> None:
        self._most_aborted = most_aborted
        local = federated.local
        ledger = None if federated.owns_ledger else federated.ledger
        self._check_settings(
            Protection(federated.mechanism, federated.seed, ledger, federated.privacy_target),
            replace(federated.clients, dropout_probability=0.0, partition=IID(), labels=None),
            replace(
                local,
                clients_per_step=1,
                # of what clients log in training nothing comes here
                client_metrics="none" if local.evaluate_clients is None else local.client_metrics,
                check_isolation=False,
            ),
            replace(federated.server, diagnostics=False),
        )
        self.planner = replace(self.planner, real_clients=True)
        self._exchange, self._roster = exchange, roster

    def _make_population(self, trainer: pl.Trainer, module: pl.LightningModule) -> RemoteClients:
        parts = (self._exchange, self._roster, self._undo, self._most_aborted)
        return RemoteClients(self, trainer, module, *parts)

    def use_batches(self, rule: BatchRule) -> None:
        """Refuse: batches are drawn where the data are.

        Raises:
            ValueError: Always.
        """
        name = type(rule).__name__
        raise ValueError(f"{name} draws the batches of clients, and the server has none; leave it out")


@dataclass(frozen=True)
class Deployment:
    """A server and what it needs to know about its surroundings.

    Args:
        module: Makes the module, whose weights are the first global model.
        data: Makes the data module with the server's validation data; None validates nothing.
        trainer: Arguments of the server's `Trainer`: `max_epochs` is the number of rounds.
        home: The server's folder: keys, roster, checkpoints with the ledger's journal.
        round_timeout: Seconds in which a client has to answer, training included.
        wait: Seconds to wait for `num_clients` clients before the first round.
        directory: Everybody's verification key; `SecAgg(active=True)` needs it.
        most_aborted: Rounds in a row that may come to nothing before the server ends.
    """

    module: Callable[[], pl.LightningModule]
    federated: Federated
    data: Callable[[], pl.LightningDataModule] | None
    trainer: dict[str, Any]
    home: Path
    round_timeout: float
    wait: float
    directory: Mapping[int, Ed25519PublicKey] | None = None
    most_aborted: int = 3

    def run(self, grid: Grid) -> tuple[pl.Trainer, FederatedServer]:
        """Register the clients, and train until the rounds are over, or go on where a killed server was.

        Raises:
            ValueError: If the last checkpoint is damaged, or lost although rounds were charged, or another
                server works in the same folder.
            RefusedError: If a layer or a schedule goes by a number that nobody knows over a network.
        """
        store = Store(self.home)
        with store.lock():
            _check_checkpoint(self.home)
            module = self.module()
            check_counted(module, self.federated.local)
            exchange = Exchange(grid, self.round_timeout, rank_zero_warn)
            settings = fingerprint(self.federated, module, self.trainer.get("max_epochs"))
            words = settings | training_words(self.trainer, self.module)
            if self.trainer.get("max_steps", -1) != -1 and self.federated.local.local_steps is None:
                raise ValueError(
                    "max_steps counts steps of clients, and a server that does not see what they hold does "
                    "not know how many they take; say local_steps=..., or max_epochs, which counts rounds"
                )
            rounds = count_rounds(self.trainer)
            roster = Roster(self.federated, exchange, store, words, self.directory, rounds)
            if self.federated.calibrated_target is not None:  # which sets it for so many rounds
                del settings["mechanism"]
            _check_settings(store, settings)
            roster.gather(self.wait)
            store.put(_SETTINGS, settings)
            server = FederatedServer(self.federated, exchange, roster, self.most_aborted)
            kept, given = _RoundCheckpoint(self.home / "checkpoints"), dict(self.trainer)
            given_callbacks = callbacks_in(given)
            callbacks = [server, *(one for one in given_callbacks if not is_per_client(one)), kept]
            trainer = pl.Trainer(
                **{"enable_progress_bar": False, "num_sanity_val_steps": 0, **given, "callbacks": callbacks}
            )
            last = kept.path
            if last.is_file():
                rank_zero_info(f"going on from {last}")
            data = _NoData() if self.data is None else self.data()
            trainer.fit(module, datamodule=data, ckpt_path=str(last) if last.is_file() else None)
            return trainer, server


def _check_settings(store: Store, settings: dict[str, str]) -> None:
    """Refuse a folder of other settings, before anybody is asked. Another release is none."""
    own, kept = (
        {**found, "lightning_fedq": "", "protocol": ""}
        for found in (settings, store.get(_SETTINGS) or settings)
    )
    if found := differences(own, {name: value for name, value in kept.items() if name in own}):
        raise ValueError(
            f"{store.folder} is the folder of a federation with other settings ({found}); put these back, "
            "or begin a new federation: another home for the server (server_app(home=...)) and another "
            "fedq-home for each client; what both spend adds up"
        )


def _check_checkpoint(home: Path) -> None:
    """Refuse a folder whose checkpoint is damaged, or gone while its journal has charges."""
    last = home / "checkpoints" / "last.ckpt"
    cure = (
        "put a whole copy of it back. Without one, begin a new federation, with new folders for the server "
        "and for every client, and add up what both spend; what this one has charged stands in its journal, "
        "ledger-*.jsonl"
    )
    if not last.is_file():
        charged = [
            path for path in sorted(home.rglob("ledger-*.jsonl")) if path.read_bytes().count(b"\n") > 1
        ]
        if charged:
            raise ValueError(f"{charged[0]} has charges and {last} is missing: {cure}")
        return
    try:
        with zipfile.ZipFile(last) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{last} is cut off or damaged ({last.stat().st_size} bytes): {cure}") from error
    if damaged is not None:
        raise ValueError(f"{last} is damaged in its part {damaged}: {cure}")


class _RoundCheckpoint(pl.callbacks.Checkpoint):
    """Keeps one checkpoint, whole at any time: of the last round, and before the first one has been charged.

    So the ledger's journal, which lies beside it, is never without a checkpoint that names it.
    """

    knows_clients = True

    def __init__(self, folder: Path) -> None:
        self.dirpath, self.path = folder, folder / "last.ckpt"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Before the first round."""
        if not self.path.is_file():
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After each round."""
        self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        new = self.path.with_suffix(".new")
        with name_file_in_errors(self.path):
            trainer.save_checkpoint(new)
            with new.open("r+b") as file:  # a power cut must not leave an empty file in the old one's place
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
    most_aborted: int = 3,
) -> ServerApp:
    """Flower's `ServerApp` of the server.

    Args:
        module: Makes the module, whose weights are the first global model.
        federated: The same settings as the clients' and the simulation's.
        data: Makes the data module with the server's own validation data; None validates nothing.
        trainer: Arguments of the server's `Trainer`, or what makes them of Flower's context: `max_epochs` is
            the number of rounds; callbacks, such as `RunFolder()`, and loggers as in a simulation. What acts
            on training is done by the clients, who have to have it, too.
        home: The server's folder, or what names it by Flower's context: keys, roster, checkpoints with the
            ledger's journal. A server that is started again with it goes on where it was.
        round_timeout: Seconds in which a client has to answer, training included; then the round goes on
            without it. None is the federation's deadline, or an hour.
        wait: Seconds to wait for `num_clients` clients before the first round.
        directory: Everybody's verification key, by number, as the clients have it: a client whose key its
            identity has not signed is turned away. `SecAgg(active=True)` needs it.
        most_aborted: Rounds in a row that may come to nothing, each charged, before the server ends and names
            who has failed and why.

    Raises:
        ValueError: If a setting is for simulations only, or the directory is missing.
    """
    if most_aborted < 1:
        raise ValueError(f"most_aborted must be >= 1, got {most_aborted}")
    check_deployable(federated)
    check_identities(federated, directory is not None, "server_app(directory=...)")
    timeout = time_limit(federated, round_timeout)
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        given = trainer(context) if callable(trainer) else trainer or {}
        folder = home(context) if callable(home) else Path(home)
        Deployment(module, federated, data, given, folder, timeout, wait, directory, most_aborted).run(grid)

    return app
