"""The server of a real federation: a Trainer whose rounds are carried out by clients elsewhere.

`FederatedServer` is `Federated` with nobody to train here: a round's only step is idle, and at its end the
engine asks the clients, decodes what they answer, steps and records. So validation, checkpoints, loggers,
the run folder, budgets and the ledger with its journal are those of a simulation, and so is the privacy
page.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl, rank_zero_info, rank_zero_warn
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.vector import Rehearsed
from lightning_fedq.core import AbortedRoundError
from lightning_fedq.data.batches import BatchRule, LocalWork, Stack
from lightning_fedq.data.loader import ClientLoader
from lightning_fedq.federation.schedule import Schedule
from lightning_fedq.flower.exchange import POLL, Exchange
from lightning_fedq.flower.local_round import check_schedules
from lightning_fedq.flower.records import Fields, bytes_in, number_in
from lightning_fedq.flower.secure import RemoteSum, remote_sum, remote_sums
from lightning_fedq.flower.settings import (
    SIMULATED,
    check_deployable,
    check_identities,
    fingerprint,
    of_real_clients,
)
from lightning_fedq.flower.store import Store
from lightning_fedq.party_keys import (
    CONTRIBUTION_BYTES,
    HeldServerKeys,
    KeyVerificationError,
    ServerSecrets,
    registration_proof,
    verify_key,
)
from lightning_fedq.privacy.journal import sync_folder
from lightning_fedq.randomness import SeededKeys, ServerKeys
from lightning_fedq.rounds import RefusedMessageError, RoundRecord, RoundServer

_SECRETS, _ROSTER, _SIGNATURES, _SAMPLES = "server", "roster", "signatures", "samples"
_SIGNATURE_BYTES = 64
_WAIT_FOR_NEW = 60.0
"""Seconds that a round waits for a node that has just come, where no client is missing."""


class Roster:
    """Who is who: the clients' numbers, their public keys and the nodes that they sit at.

    Args:
        federated: The federation's settings.
        exchange: To the nodes.
        store: The server's folder.
        words: The server's fingerprint.
        directory: Everybody's verification key; with it a number is given to its identity only.

    Attributes:
        nodes: The node of each client.
        samples: How many samples each client holds, where the mean is weighted by that.
        left_out: Clients who are asked no more, because their shares opened to hardly anybody.
    """

    def __init__(
        self,
        federated: Federated,
        exchange: Exchange,
        store: Store,
        words: dict[str, str],
        directory: Mapping[int, Ed25519PublicKey] | None = None,
    ) -> None:
        self._federated, self._exchange, self._store = federated, exchange, store
        self.directory = directory
        self._words = {f"setting {name}": value for name, value in words.items()}
        self.nodes: dict[int, int] = {}
        self.samples: dict[int, int] = {}
        self.left_out: set[int] = set()
        self._strangers: set[int] = set()
        self._refusing: dict[int, str] = {}
        self._asked: dict[str, int] = {}
        self._known: dict[int, bytes] = {}
        self._signatures: dict[int, bytes] = {}
        self._secrets: ServerSecrets | None = None
        if federated.seed is None:
            self._secrets = self._own_secrets()
            kept = store.get(_ROSTER) or {}
            self._known = {int(client): key for client, key in kept.items()}
            signed = store.get(_SIGNATURES) or {}
            self._signatures = {int(client): signature for client, signature in signed.items()}
            self.samples = {int(client): number for client, number in (store.get(_SAMPLES) or {}).items()}
        self._resumed = len(self._known) >= federated.num_clients

    def _own_secrets(self) -> ServerSecrets:
        kept = self._store.get(_SECRETS)
        if kept is None:
            new = ServerSecrets.draw()
            kept = {"secret": new.secret, "federation": new.federation, "members": new.members}
            self._store.put(_SECRETS, kept)
        return ServerSecrets(**kept)

    def _greeting(self) -> Fields:
        if self._secrets is None:
            return self._words
        public = {"federation": self._secrets.federation, "server": self._secrets.public_key}
        return {**self._words, **public}

    def gather(self, wait: float) -> None:
        """Wait until every client has registered, and no longer, whoever else is silent or refuses.

        A server that is started again knows everybody's key, and after `wait` seconds goes on with whoever is
        there: the others are missed, as in mid-run, until they come back.

        Raises:
            RuntimeError: If some are missing after `wait` seconds, at a first start, or everybody is.
        """
        wanted, end = self._federated.num_clients, time.monotonic() + wait
        while True:
            self._ask_new()
            self._take_in()
            if len(self.nodes) >= wanted:
                break
            hopeless = self._nobody_agrees()
            if hopeless or time.monotonic() > end:
                if self._resumed and self.nodes:
                    rank_zero_warn(
                        f"the server goes on with {len(self.nodes)} of {wanted} clients; {self._missing()}"
                    )
                    break
                raise RuntimeError(
                    f"{wanted} clients are needed and {len(self.nodes)} have registered"
                    + ("; " if hopeless else f" within {wait:g} s; ")
                    + self._missing()
                )
            time.sleep(POLL)
        if self._secrets is not None:
            signed = {str(client): signature for client, signature in sorted(self._signatures.items())}
            self._store.put(_SIGNATURES, signed)
            self._store.put(_SAMPLES, {str(client): number for client, number in self.samples.items()})
            self._store.put(_ROSTER, {str(client): key for client, key in sorted(self._known.items())})

    def _nobody_agrees(self) -> bool:
        """Whether as many nodes as there are clients refuse and none has registered: settings differ."""
        return not self.nodes and len(self._refusing) >= self._federated.num_clients

    def _missing(self) -> str:
        """Who has not registered, and what an operator can do."""
        missing = [c for c in range(self._federated.num_clients) if c not in self.nodes]
        quiet = sorted(self._asked.values())
        found = f"missing are clients {missing[:10]}" + (", ..." if missing[10:] else "")
        if self._refusing:
            node, words = next(reversed(self._refusing.items()))
            found += f"; one refuses: {words} (node {node} of {len(self._refusing)} that refuse)"
        if quiet:
            found += f", and nodes {quiet[:10]} are connected and have not answered; look at their logs, or"
        elif not self._refusing:
            found += "; no other node is connected:"
        else:
            return found
        return f"{found} start more SuperNodes"

    def refresh(self) -> None:
        """Ask new nodes, such as a client that comes back, who they are. A silent one is waited for once.

        That is as long as for an answer where a client is missing, and else a minute at most: a client may be
        back before its old node counts as gone.
        """
        self._refusing.clear()  # asked again: what it refused for may be put right
        new, began = self._ask_new(), time.monotonic()
        self._take_in()
        while new & set(self._asked):
            limit = self._exchange.timeout if self._somebody_is_gone() else _WAIT_FOR_NEW
            if time.monotonic() - began >= min(limit, self._exchange.timeout):
                break
            time.sleep(POLL)
            self._take_in()

    def _somebody_is_gone(self) -> bool:
        online = set(self._exchange.online())
        return any(self.nodes.get(client) not in online for client in range(self._federated.num_clients))

    def _ask_new(self) -> set[str]:
        """Ask nodes that were never asked, and return the numbers of the messages."""
        known = {*self.nodes.values(), *self._strangers, *self._refusing, *self._asked.values()}
        new = sorted(set(self._exchange.online()) - known)
        if not new:
            return set()
        sent = self._exchange.push("register", {node: self._greeting() for node in new}, "register")
        self._asked |= sent
        return set(sent)

    def _take_in(self) -> None:
        """Give numbers to those who have answered by now, and name those who refuse."""
        answers = self._exchange.pull(self._asked) if self._asked else {}
        for node in sorted(answers):
            if "refused" in answers[node]:
                self._refusing[node] = str(answers[node]["refused"])
                rank_zero_warn(f"node {node} refuses: {self._refusing[node]}")
                continue
            samples = number_in(answers[node], "samples")
            if self._federated.weighting == "samples" and (samples is None or samples < 1):
                self._strangers.add(node)
                rank_zero_warn(f"node {node} does not say how many samples it holds, at least one")
                continue
            client = self._number(node, answers[node])
            if client is None:
                self._strangers.add(node)
                rank_zero_warn(f"node {node} is no client of this federation, or its number is taken")
                continue
            self.nodes[client] = node
            if len(signature := bytes_in(answers[node], "signature")) == _SIGNATURE_BYTES:
                self._signatures[client] = signature
            if samples is not None:
                self.samples[client] = samples

    def _number(self, node: int, answer: Fields) -> int | None:
        """Whose node this is: by its key, else by its own number, else the next that is free."""
        total, partition = self._federated.num_clients, number_in(answer, "partition")
        if partition is None:
            return None
        if self._secrets is None:
            free = [c for c in range(total) if c not in self.nodes]
            if partition >= 0:  # a number of its own: a client that comes back has another node
                return partition if partition < total else None
            return free[0] if free else None
        key = bytes_in(answer, "key")
        client = next((known for known, kept in self._known.items() if kept == key), -1)
        if client < 0:
            free = [client for client in range(total) if client not in self._known]
            client = partition if partition >= 0 else (free[0] if free else -1)
            if client not in free:
                return None
        try:
            self._check_key(client, key, answer)
        except ValueError as error:
            rank_zero_warn(f"node {node}: {error}")
            return None
        self._known[client] = key
        return client

    def _check_key(self, client: int, key: bytes, answer: Fields) -> None:
        """Make sure that whoever registers holds this key, and that a client's identity has signed it."""
        assert self._secrets is not None
        wanted = registration_proof(self._secrets.secret, key, self._secrets.federation, key)
        if not hmac.compare_digest(wanted, bytes_in(answer, "proof")):
            raise KeyVerificationError(
                f"whoever registers with the public key of client {client} does not hold the private key; "
                "it is left out"
            )
        if self.directory is not None:
            signature = bytes_in(answer, "signature")
            verify_key(self.directory, client, self._secrets.federation, key, signature)

    def keys(self) -> ServerKeys:
        """Keys that the server holds, once everybody has registered."""
        if self._secrets is None:
            assert self._federated.seed is not None
            return SeededKeys(self._federated.seed)
        return HeldServerKeys(self._secrets, self._known)

    def introduction(self, keys: ServerKeys, client: int, group: Sequence[int]) -> Fields:
        """Public keys and sealed ones that a client needs for one round: those of `group`, itself aside."""
        if not isinstance(keys, HeldServerKeys):
            return {}
        assert self._secrets is not None
        peers = [other for other in group if other != client]
        signed = (
            [self._signatures.get(other, bytes(_SIGNATURE_BYTES)) for other in peers]
            if self._signatures
            else []
        )
        return {
            "federation": self._secrets.federation,
            "server": self._secrets.public_key,
            "salt": keys.salt,
            "sealed": keys.sealed_members(client),
            "peers": peers,
            "peer_keys": b"".join(keys.roster[other] for other in peers),
            "signatures": b"".join(signed),
        }


class Cohort:
    """The clients of one open round: what each is asked, and what their answers come to.

    Args:
        server: In an open round.
        exchange: To the nodes.
        roster: Who is who.
    """

    def __init__(self, server: RoundServer, exchange: Exchange, roster: Roster) -> None:
        assert server.plan is not None
        self._server, self._exchange, self._roster, self._plan = server, exchange, roster, server.plan
        self.group = f"round {server.plan.round + 1}"
        self._sum = None if server.secure_sum is None else remote_sum(server)
        self._accusers: dict[int, set[int]] = {}

    def questions(self) -> dict[int, Fields]:
        """Fields for each client beside the model. Whoever is not connected is told nothing."""
        self._roster.refresh()
        asked = self._server.task()
        task, online = asked.to_bytes(), set(self._exchange.online())
        found: dict[int, Fields] = {}
        for members in self._plan.groups:
            for client in members:
                if self._roster.nodes.get(client) not in online:
                    rank_zero_warn(f"{self.group}: client {client} is not connected")
                    continue
                if client in self._roster.left_out:
                    rank_zero_warn(f"{self.group}: client {client} is left out, as its shares did not open")
                    continue
                known = (*members, *asked.neighbours(client))
                keys = self._roster.introduction(self._server.keys, client, known)
                found[client] = {"task": task, "client": client, **keys}
        found = self._with_group_keys(found)
        if self._sum is not None:
            for client, fields in found.items():
                fields["invitation"] = self._sum.invitation(client)
        return found

    def _with_group_keys(self, asked: dict[int, Fields]) -> dict[int, Fields]:
        """Relay what members of groups of three or more contribute to a key. Who lacks some is left out."""
        large = {client for group in self._plan.groups if len(group) > 2 for client in group}
        contributing = {
            client: fields for client, fields in asked.items() if client in large and "peers" in fields
        }
        if not contributing:
            return asked
        sealed: dict[tuple[int, int], bytes] = {}
        for client, answer in self.ask("contribute", contributing).items():
            parts, peers = bytes_in(answer, "contributions"), contributing[client]["peers"]
            if len(parts) == CONTRIBUTION_BYTES * len(peers):
                for place, other in enumerate(peers):
                    start = CONTRIBUTION_BYTES * place
                    sealed[client, other] = parts[start : start + CONTRIBUTION_BYTES]
        for client, fields in contributing.items():
            if missing := [other for other in fields["peers"] if (other, client) not in sealed]:
                rank_zero_warn(
                    f"{self.group}: client {client} is left out, as {missing[:10]} of its group are silent"
                )
                del asked[client]
                continue
            fields["contributions"] = b"".join(sealed[other, client] for other in fields["peers"])
        return asked

    def ask(self, kind: str, contents: dict[int, Fields]) -> dict[int, Fields]:
        """Ask clients by number, and return who has not refused."""
        nodes = self._roster.nodes
        sent = {nodes[client]: fields for client, fields in contents.items()}
        return self.by_client(self._exchange(kind, sent, self.group))

    def by_client(self, answers: Mapping[int, Fields]) -> dict[int, Fields]:
        """Answers of nodes, by client, without refusals."""
        clients = {node: client for client, node in self._roster.nodes.items()}
        for node, fields in answers.items():
            if isinstance(accused := fields.get("accused"), int):
                self._accusers.setdefault(accused, set()).add(clients[node])
        return {clients[node]: fields for node, fields in answers.items() if "refused" not in fields}

    def conclude(self, answers: dict[int, Fields]) -> None:
        """Give the server what came back, after the further exchanges of secure aggregation."""
        if self._sum is None:
            self._take(answers)
        else:
            self._secure(self._sum, answers)

    def _take(self, answers: dict[int, Fields]) -> None:
        """In the order of a simulation, so that sums of floats have the same last bits."""
        for client in self._plan.survivors:
            if client not in answers:
                continue
            try:
                self._server.take(bytes_in(answers[client], "answer"))
            except RefusedMessageError as error:
                rank_zero_warn(f"the message of client {client} is refused: {error}")

    def _secure(self, secure: RemoteSum, answers: dict[int, Fields]) -> None:
        def exchange(kind: str, messages: dict[int, bytes]) -> dict[int, bytes]:
            return _answered(self.ask(kind, {client: {"secagg": m} for client, m in messages.items()}))

        try:
            self._server.answered(secure.run(_answered(answers), exchange, rank_zero_warn))
        except AbortedRoundError as error:
            self._server.abort(str(error))
        self._leave_out(secure)

    def _leave_out(self, secure: RemoteSum) -> None:
        """Ask nobody any more whose shares most of its partners could not open.

        Fewer might be liars themselves, who would have an honest client left out.
        """
        for accused, accusers in self._accusers.items():
            partners = secure.machine.partners(accused)
            if 2 * len(partners & accusers) > len(partners):
                self._roster.left_out.add(accused)
                rank_zero_warn(
                    f"{self.group}: clients {sorted(partners & accusers)[:10]} could not open the shares of "
                    f"client {accused}, which is asked no more until the server is started again"
                )


def _answered(found: dict[int, Fields]) -> dict[int, bytes]:
    return {client: bytes_in(fields, "secagg") for client, fields in found.items()}


class ClientsElsewhere(RoundServer):
    """A `RoundServer` whose `finish` asks the clients first."""

    collect: Callable[[], None]

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse what only the clients of a simulation could do."""
        if name in ("transform", "tampering") and value is not None:
            name = type(value).__name__
            raise ValueError(f"{name} works on updates, which a server is never given; leave it out")
        super().__setattr__(name, value)

    def finish(self) -> RoundRecord:
        """Ask, take what comes in time, and finish the round, see `RoundServer.finish`."""
        self.collect()
        return super().finish()


class _IdleRounds(Schedule):
    """One idle step a round: nobody trains here."""

    longest = 1

    def _new(self, round: int, attempt: int, clients_per_step: int, most: int | None) -> list[Stack]:
        return [Stack((), (1,), self._planner.plan(round, self._mechanism).stream_seed("training"), ())]


class _NoData(pl.LightningDataModule):
    """For a server that validates nothing."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(1, 1)))


class FederatedServer(Federated):
    """The federation of real clients, in a Trainer that trains nobody.

    Args:
        federated: The settings, which are the simulation's.
        exchange: To the nodes.
        roster: Who is who.
    """

    def __init__(self, federated: Federated, exchange: Exchange, roster: Roster) -> None:
        super().__init__(
            federated.mechanism,
            federated.num_clients,
            clients_per_round=federated.planner.clients_per_round,
            participation=federated.planner.participation,
            local_epochs=federated.local_epochs,
            local_steps=federated.local_steps,
            clients_per_step=1,
            target=federated.target,
            ranges=federated.ranges,
            smoothing=federated.smoothing,
            server_optimizer=federated.server_optimizer,
            weighting=federated.weighting,
            aggregator=federated.aggregator,
            secure_aggregation=federated.secure_aggregation,
            buffers=federated.buffers,
            seed=federated.seed,
            diagnostics=False,
            ledger=None if federated.ledger is federated._own_ledger else federated.ledger,
            client_metrics="none",
            check_isolation=False,
            privacy=None if federated._target is None else federated._target.target,
        )
        self.planner = of_real_clients(self).planner
        self._exchange, self._roster = exchange, roster

    def use_batches(self, rule: BatchRule) -> None:
        """Refuse: batches are drawn where the data are.

        Raises:
            ValueError: Always.
        """
        name = type(rule).__name__
        raise ValueError(f"{name} draws the batches of clients, and the server has none; leave it out")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what belongs to clients or to simulations, see `Federated.setup`."""
        if stage == "fit":
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, SIMULATED):
                    raise ValueError(
                        f"{type(callback).__name__} works on clients that are simulated here, and the server "
                        "has none; leave it out"
                    )
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse schedules that clients can't follow, before anybody is charged. See `Federated`."""
        check_schedules(trainer)
        super().on_fit_start(trainer, pl_module)

    def _deal_out(self, trainer: Any) -> None:
        if self._loaded is not None and self.seed is None:
            self.planner = type(self.planner)(**{**vars(self.planner), "seed": self._loaded["plan_seed"]})
        loader = DataLoader(TensorDataset(torch.zeros(1, 1)))
        one = torch.zeros(1, dtype=torch.int64)  # only how many is known here, and a client may say anything
        self.client_indices = [one.expand(n) for _, n in sorted(self._roster.samples.items())]
        work = LocalWork((torch.zeros(1, dtype=torch.int64),), 1, False, False, 1, None)
        self._own_loaders, self._renew = False, lambda again: again
        self._schedule = _IdleRounds(self.planner, self.mechanism, work, None, 0)
        self._dealt = ClientLoader(loader, work, self._coming_stacks, lambda: 1)

    def _rehearse(self, trainer: pl.Trainer) -> tuple[Rehearsed, dict[str, None]]:
        """Without data, what layers that are known to keep statistics change."""
        module = trainer.lightning_module
        return (Rehearsed() if self.buffers == "frozen" else Rehearsed.by_layers(module)), {}

    def _new_engine(self, weights: Tensor, segments: Sequence[int]) -> Any:
        secagg = self.secure_aggregation
        server = ClientsElsewhere(
            self.mechanism,
            self.planner,
            self._roster.keys(),
            weights,
            segments,
            self.ranges,
            secure_sums=None if secagg is None else remote_sums(secagg, self._roster.directory),
            **self._server_settings(segments),
        )
        server.collect = lambda: self._collect(server)
        return server

    def _collect(self, server: ClientsElsewhere) -> None:
        """Ask the cohort, and give the server what comes back. Whoever is silent has dropped out."""
        weights = server.weights.detach().cpu().contiguous()
        model = {"weights": weights.numpy().tobytes(), "dtype": str(weights.dtype).partition(".")[2]}
        cohort = Cohort(server, self._exchange, self._roster)
        contents = {client: {**model, **fields} for client, fields in cohort.questions().items()}
        cohort.conclude(cohort.ask("train", contents))


@dataclass(frozen=True)
class Deployment:
    """A server and what it needs to know about its surroundings.

    Args:
        module: Makes the module, whose weights are the first global model.
        federated: The settings, which are the simulation's.
        data: Makes the data module with the server's validation data; None validates nothing.
        trainer: Arguments of the server's `Trainer`: `max_epochs` is the number of rounds.
        home: The server's folder: keys, roster, checkpoints with the ledger's journal.
        round_timeout: Seconds in which a client has to answer, training included.
        wait: Seconds to wait for `num_clients` clients before the first round.
        directory: Everybody's verification key; `SecAgg(active=True)` needs it.
    """

    module: Callable[[], pl.LightningModule]
    federated: Federated
    data: Callable[[], pl.LightningDataModule] | None
    trainer: dict[str, Any]
    home: Path
    round_timeout: float
    wait: float
    directory: Mapping[int, Ed25519PublicKey] | None = None

    def run(self, grid: Grid) -> tuple[pl.Trainer, FederatedServer]:
        """Register the clients, and train until the rounds are over, or go on where a killed server was."""
        module, store = self.module(), Store(self.home)
        exchange = Exchange(grid, self.round_timeout, rank_zero_warn)
        words = fingerprint(self.federated, module, self.trainer.get("max_epochs"))
        roster = Roster(self.federated, exchange, store, words, self.directory)
        roster.gather(self.wait)
        server = FederatedServer(self.federated, exchange, roster)
        kept, given = _EveryRound(self.home / "checkpoints"), dict(self.trainer)
        callbacks = [server, *given.pop("callbacks", []), kept]
        trainer = pl.Trainer(
            **{"enable_progress_bar": False, "num_sanity_val_steps": 0, **given}, callbacks=callbacks
        )
        last = kept.path
        if last.is_file():
            rank_zero_info(f"going on from {last}")
        data = _NoData() if self.data is None else self.data()
        trainer.fit(module, datamodule=data, ckpt_path=str(last) if last.is_file() else None)
        return trainer, server


class _EveryRound(pl.callbacks.Checkpoint):
    """Keeps one checkpoint, whole at any time: of the last round, and before the first one has been charged.

    So the ledger's journal, which lies beside it, is never without a checkpoint that names it.
    """

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
    round_timeout: float = 3600.0,
    wait: float = 600.0,
    directory: Mapping[int, Ed25519PublicKey] | None = None,
) -> ServerApp:
    """Flower's `ServerApp` of the server.

    Args:
        module: Makes the module, whose weights are the first global model.
        federated: The same settings as the clients' and the simulation's.
        data: Makes the data module with the server's own validation data; None validates nothing.
        trainer: Arguments of the server's `Trainer`, or what makes them of Flower's context: `max_epochs` is
            the number of rounds; callbacks, such as `RunFolder()`, and loggers as in a simulation.
        home: The server's folder, or what names it by Flower's context: keys, roster, checkpoints with the
            ledger's journal. A server that is started again with it goes on where it was.
        round_timeout: Seconds in which a client has to answer, training included; then the round goes on
            without it.
        wait: Seconds to wait for `num_clients` clients before the first round.
        directory: Everybody's verification key, by number, as the clients have it: a client whose key its
            identity has not signed is turned away. `SecAgg(active=True)` needs it.

    Raises:
        ValueError: If a setting is for simulations only, or the directory is missing.
    """
    check_deployable(federated)
    check_identities(federated, directory is not None, "server_app(directory=...)")
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        given = trainer(context) if callable(trainer) else trainer or {}
        folder = home(context) if callable(home) else Path(home)
        Deployment(module, federated, data, given, folder, round_timeout, wait, directory).run(grid)

    return app
