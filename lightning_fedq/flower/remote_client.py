"""A real client with its own data, Trainer and keys, which sends one packed message a round.

Flower hands a `ClientApp` one message at a time, each in a separate process. So state that must outlive a
message is stored in the client's folder: its keys, the log of used streams, and the protocol state of secure
aggregation while a round is open.

The client writes the log before a message exists. So no stream ever carries two payloads, even if a client is
killed and restarts, or a server is reset to an earlier state.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.personal import State
from lightning_fedq.data.generator_turns import preserve_generators
from lightning_fedq.data.held_out import num_held_out
from lightning_fedq.data.loader import check_loader
from lightning_fedq.flower.failures import Failures
from lightning_fedq.flower.local_round import (
    LaterRound,
    LocalRound,
    RoundInputs,
    check_counted,
    has_other_state,
)
from lightning_fedq.flower.persistent_state import NEVER, PersistentState
from lightning_fedq.flower.records import Fields, check_kinds
from lightning_fedq.flower.secure import session_id
from lightning_fedq.flower.settings import (
    DECLINED,
    MOST_ATTEMPTS,
    MOST_ROUNDS,
    RELEASE,
    TRAVELS,
    RefusedError,
    check_deployable,
    check_folder_release,
    check_release,
    deployed_mechanism,
    differences,
    fingerprint,
    given_rounds,
    is_per_client,
    keeps_state,
    make_client_budget,
)
from lightning_fedq.flower.store import Store
from lightning_fedq.flower.training_description import callbacks_in, training_words
from lightning_fedq.keys.party_keys import (
    ClientSecrets,
    HeldClientKeys,
    Identities,
    registration_proof,
    sign_key,
    verify_key,
)
from lightning_fedq.keys.randomness import Keys, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms.interface import Mechanism, RoundContext
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import Broadcast, BudgetSpentError, RoundClient, RoundTask, StreamLog
from lightning_fedq.rounds.client import Target
from lightning_fedq.secagg import (
    AuthenticationError,
    Client,
    SecAgg,
    SecAggError,
    Stage,
    StageError,
    model_digest,
)
from lightning_fedq.training.checks import check_hooks, check_shapes
from lightning_fedq.training.client_metrics import has_claim, sample_protectors

Measured = dict[str, dict[str, float | None]]
"""Validation metrics by name, for each model ("global" or "personal")."""

_KEYS, _ROUND, _SYMBOLS, _PROBE = "keys", "round", "symbols", "probe"
_ROOM = 1 << 16
"""Bytes that must be free in a folder for a line of the log, keys, and the state of a round."""
_KEYS_AND_LOG = "Without a seed, the keys and the stream log"
_SETTINGS = "setting "
_KEY_FIELDS: dict[str, type] = {
    **dict.fromkeys(("federation", "server", "salt", "sealed", "peer_keys"), bytes),
    "peers": list,
}
_OPTIONAL: dict[str, type] = {
    "rounds": int,
    "signatures": bytes,
    "counted": list,
    "algorithm": bytes,
    "groups": str,
    "trained": str,
    "statistic": bytes,
}


class ClientConfig(NamedTuple):
    """Settings, folder, number and keys of one client.

    Args:
        federated: Settings of the federation, from the client's own code.
        store: Folder of the client. None keeps nothing, which needs a seed and no secure aggregation.
        partition: Number of the client, if the site sets one. -1 takes the number that the server assigns.
        identities: Signing key of this client and verification keys of its peers. None trusts the server to
            relay their keys.
        budget: Privacy budget of this client over all messages in its log. None leaves the budget to the
            server's ledger.
        failures: Counter of this client's failed trainings. None makes a new one.
        reset_after_abort: Folders of clients whose messages share only classes, code and data, as a trial at
            registration showed in this process. Their training objects need no copy. None makes an empty set.
    """

    federated: Federated
    store: Store | None
    partition: int = -1
    identities: Identities | None = None
    budget: PrivacyTarget | None = None
    failures: Failures | None = None
    reset_after_abort: set[str] | None = None


class RemoteClient:
    """Client that answers one message at a time, without a transport, and trains with its own `Trainer`.

    Args:
        config: Settings, folder, number and keys of the client.
        module: Function that makes the client's module.
        data: Function that makes the client's data module.
        trainer: Arguments of the client's `Trainer`.
    """

    def __init__(
        self,
        config: ClientConfig,
        module: Callable[[], pl.LightningModule],
        data: Callable[[], pl.LightningDataModule],
        trainer: dict[str, Any],
    ) -> None:
        self._federated, self._store, self._partition, self._identities, budget, failures, anew = config
        self._reset_after_abort = set() if anew is None else anew
        self._place = f"client {self._partition}" if self._store is None else str(self._store.folder)
        self._failures = failures or Failures()
        self._budget = make_client_budget(config.federated, budget, config.identities is not None)
        self._module, self._data, self._trainer = module, data, trainer

    def settings(self) -> dict[str, str]:
        """Return the settings that must equal the server's, as text by name."""
        check_shapes(module := self._module())  # before their numbers are counted
        words = fingerprint(self._federated, module, self._given_rounds)
        return {**words, **training_words(self._trainer, self._module), **self._run_rehearsal()}

    def _run_rehearsal(self) -> dict[str, str]:
        """Try the training on the smallest batch, and return the count of numbers that travel.

        A server has no data and counts by the layers alone, but a first step may reveal more state that
        travels. If the data are not available yet, the client counts nothing either.

        Raises:
            RefusedError: If training fails on this client's smallest batch, or a layer counts batches that no
                side knows.
        """
        module, local = self._module(), self._federated.local
        check_counted(module, local)
        check_hooks(module, local.statistics)
        counts = local.buffers == "share" and has_other_state(module)
        try:
            trial = self._train_trial(module, None)
        except RefusedError:
            raise
        except Exception as error:  # the user's data failed, and the server learns nothing about the error
            needs = ["DPSGD"] if any(map(is_per_client, callbacks_in(self._trainer))) else []
            needs += [] if local.evaluate_clients is None else ["evaluate_clients"]
            if needs:
                rank_zero_warn(str(error))
                words = f"{' and '.join(needs)} can't work here. The client's log has the reason."
                raise RefusedError(words) from error
            if counts:
                rank_zero_warn(f"Could not try which buffers travel: {type(error).__name__}: {error}")
            return {}
        self._try_a_later_message()
        return {TRAVELS: str(sum(trial.segments))} if counts else {}

    def _train_trial(self, module: pl.LightningModule, task: LaterRound | None) -> LocalRound:
        """Run one trial of the training on this client's data, and return it."""
        trial = LocalRound(self._federated, 0, 0, task, torch.zeros(0))
        with preserve_generators():
            return trial.run(module, self._data(), self._trainer)

    def _try_a_later_message(self) -> None:
        """Try a message of the second round on two batches, and keep no result.

        The trial runs twice, to find objects that messages share (`ClientConfig.reset_after_abort`). If it
        fails, the client tries again with zeros in place of the data, to learn whether the code alone fails.

        Raises:
            RefusedError: If the trial also fails on zeros.
        """
        errors: list[Exception] = []
        statistics = self._federated.local.statistics
        round = max(1, 0 if statistics is None else statistics.rounds)  # the first round that trains
        self._reset_after_abort.discard(self._place)
        for has_zeros in (False, True):
            try:
                first, second = (
                    self._train_trial(self._module(), LaterRound(has_zeros, round)) for _ in range(2)
                )
                if not first.shared_objects(second):
                    self._reset_after_abort.add(self._place)
                break
            except RefusedError:  # the later message itself will raise this, with text for both sides
                return
            except Exception as error:
                errors.append(error)
        if errors:
            what = f"this client's data: {type(errors[0]).__name__}: {errors[0]}"
            rank_zero_warn(f"A trial of a second-round message on two batches fails on {what}")
        if len(errors) > 1:
            raise RefusedError(
                "A second-round message fails here, whatever the data are. The client's log has the reason."
            ) from errors[0]

    def mechanism(self) -> Mechanism:
        """Return the mechanism of the client's own code. The server can't set it."""
        # a privacy target calibrates the mechanism
        if self._federated.calibrated_target is None:
            return self._federated.mechanism
        return deployed_mechanism(self._federated, self._module(), self._given_rounds)

    def answer(self, kind: str, fields: Fields) -> Fields:
        """Answer one message.

        Args:
            kind: Type of the message, such as "train" or "register".
            fields: Fields of the message by name.

        Raises:
            RefusedError: If the client refuses, with text that both sides may read.
        """
        answers = {
            "register": self.register,
            "ready": self.ready,
            "train": self.train,
            "evaluate": self.evaluate,
            "shares": self.shares,
            "masked": self.masked,
            "confirm": self.confirm,
            "unmask": self.unmask,
        }
        try:
            if kind not in answers:
                raise ValueError(f"Unknown kind of message, expected one of {', '.join(answers)}")
            check_kinds(fields, self._required_fields(kind), _OPTIONAL)
            self._check_numbers(fields)
            with nullcontext() if self._store is None else self._store.lock_message():
                return answers[kind](fields)
        except (ValueError, RuntimeError, PermissionError, SecAggError) as error:
            raise RefusedError(f"{kind}: {error}") from error
        except Exception as error:  # Flower would send the error's text to the server
            rank_zero_warn(f"{kind}: {type(error).__name__}: {error}")
            raise RefusedError(f"{kind}: {type(error).__name__}. The client's log has the reason.") from error

    def _required_fields(self, kind: str) -> dict[str, type]:
        """Return the type of each field that a message of this kind must have, by name."""
        keyed, secagg = self._federated.seed is None, self._federated.server.secure_aggregation
        if kind == "register":
            return {"federation": bytes, "server": bytes, "nonce": bytes} if keyed else {}
        if kind == "ready":
            return {}
        if kind not in ("train", "evaluate"):
            return {"secagg": bytes}
        sends = kind == "train"
        model = {"weights": bytes, "dtype": str}
        first = {"invitation": bytes} if sends and secagg is not None else {}
        task = {"task": bytes} if sends else {}
        after = {"round": int} if kind == "evaluate" else {}
        return {"client": int, **task, **after, **model, **first, **(_KEY_FIELDS if keyed else {})}

    def _check_numbers(self, fields: Fields) -> None:
        """Refuse client and round numbers that no server with these settings sends.

        The client would loop over such numbers or keep them for ever.

        Raises:
            ValueError: If a number is out of range, or is another client's.
        """
        number, clients = fields.get("client"), self._federated.clients.num_clients
        signs = self._identities is not None  # identities prove which number is this client's
        mine = signs or self._partition in (-1, number)
        if number is not None and not (0 <= number < clients and mine):
            raise ValueError(
                f"The server calls this client number {number} of {clients}, but its partition-id is "
                f"{self._partition} (-1 is none). Check whether this folder has registered with another one."
            )
        if "round" in fields:
            self._check_round(fields["round"], 0)

    def _check_round(self, round: int, attempt: int) -> None:
        """Refuse a round or an attempt that the agreed run does not have.

        Once a client has answered a round, it never answers an earlier one. So one answer to a very late
        round would end its part in the run.

        Raises:
            ValueError: If the round or the attempt is out of range.
        """
        limits = [MOST_ROUNDS, self._trainer_rounds]
        if self._federated.seed is None and self._store is not None:
            limits.append((self._store.get(_KEYS) or {}).get("rounds", MOST_ROUNDS))
        if not (0 <= round < min(limits) and 0 <= attempt < MOST_ATTEMPTS):
            raise ValueError(
                f"The server asks for round {round + 1}, attempt {attempt}, but the agreed run has "
                f"{min(limits)} rounds of {MOST_ATTEMPTS} attempts. For more rounds, raise max_epochs on the "
                "server and on clients that set it, and restart the server."
            )

    @property
    def _trainer_rounds(self) -> int:
        """Number of rounds that the client's own Trainer allows, or `MOST_ROUNDS` if it sets none."""
        return self._given_rounds or MOST_ROUNDS

    @property
    def _given_rounds(self) -> int | None:
        return given_rounds(self._trainer, self._federated.local.local_steps)

    def reply(self, kind: str, fields: Fields) -> Fields:
        """Answer one message, or return a refusal with its reason."""
        try:
            return self.answer(kind, fields)
        except RefusedError as error:
            rank_zero_warn(str(error))
            return refusal(error)

    # ---- before the first round ---------------------------------------------------------------------------

    def register(self, fields: Fields) -> Fields:
        """Compare settings with the server's, and return this client's public key with a proof.

        Raises:
            RefusedError: If the protocol differs, or there is no folder to keep keys in.
            ValueError: If a setting or the number of rounds differs, or a field has another length.
        """
        server_settings = {
            name.removeprefix(_SETTINGS): v for name, v in fields.items() if name.startswith(_SETTINGS)
        }
        check_deployable(self._federated)
        own_settings = self.settings()
        check_release(own_settings, server_settings)
        if found := differences(own_settings, server_settings):
            buffers = (
                ". If only the numbers that travel differ, training changes an undeclared buffer: use "
                "buffers='local' or 'frozen'"
            )
            raise ValueError(
                f"This client and the server differ: {found}. Run the same code and settings on both"
                + (buffers if TRAVELS in found else "")
            )
        rounds = fields.get("rounds", 0)
        if not 0 <= rounds <= self._trainer_rounds:
            raise ValueError(
                f"The server's run has {rounds} rounds, but this client answers at most "
                f"{self._trainer_rounds}. Give both sides' trainers the same max_epochs."
            )
        for name, found in ((name, fields[name]) for name in self._required_fields("register")):
            if len(found) != 32:
                raise ValueError(f"Field {name!r} must have 32 bytes, got {len(found)}")
        answer: Fields = {**self._check_folder(), "partition": self._partition}
        if self._federated.server.weighting == "samples":
            answer["samples"] = self._count_samples()
        if self._federated.seed is None:
            secrets, federation = self._load_secrets(fields, registers=True), fields["federation"]
            key = answer["key"] = secrets.public_key
            nonce = fields["nonce"]
            answer["proof"] = registration_proof(secrets.secret, fields["server"], federation, key, nonce)
            if rounds:
                store = self._require_folder(_KEYS_AND_LOG)
                store.put(_KEYS, {**(store.get(_KEYS) or {}), **RELEASE, "rounds": rounds})
            if self._identities is not None:
                answer["signature"] = sign_key(self._identities.own, federation, key)
        return answer

    def ready(self, fields: Fields) -> Fields:
        """Report that this client can answer again after a failed round, without training.

        Raises:
            RefusedError: If its folder can't be written, or its keys are missing.
        """
        if self._federated.seed is None:
            self._read_keys()
        return self._check_folder()

    def _read_keys(self) -> dict[str, Any]:
        """Return the keys with which this client has registered.

        Raises:
            RefusedError: If its folder has no keys.
        """
        store = self._require_folder(_KEYS_AND_LOG)
        if (kept := self._stored_keys(store)) is None:
            raise RefusedError(
                f"{store.folder} has no keys, but this client has registered: the folder was emptied or "
                "replaced. Restore the original folder, because no other can act as this client."
            )
        return kept

    @staticmethod
    def _stored_keys(store: Store) -> dict[str, Any] | None:
        """Return the keys in the client's folder, or None if there are none."""
        kept = store.get(_KEYS)
        check_folder_release(store.folder, kept or {})
        return kept

    def _check_folder(self) -> Fields:
        """Refuse if the folder has no room for a round (`_ROOM`). Returns no fields."""
        if self._store is not None:
            try:
                self._store.put_bytes(_PROBE, bytes(_ROOM))
                self._store.pop_bytes(_PROBE)
            except OSError as error:
                rank_zero_warn(f"{self._store.folder}: {error}")
                raise RefusedError(
                    "The client's folder can't be written. The client's log has the reason."
                ) from error
        return {}

    def _count_samples(self) -> int:
        """Return the number of training samples, without held-out ones.

        Raises:
            RefusedError: If the data can't be counted. The reason is logged here and not sent to the server.
        """
        evaluated = self._federated.local.evaluate_clients
        try:
            data = self._data()
            data.prepare_data()
            data.setup("fit")
            total = len(check_loader(data.train_dataloader()).dataset)  # type: ignore[arg-type]
        except Exception as error:
            rank_zero_warn(f"{type(error).__name__}: {error}")
            raise RefusedError(
                "The training samples can't be counted. The client's log has the reason."
            ) from error
        fraction = None if evaluated is None else evaluated.fraction
        return total if fraction is None else total - num_held_out(fraction, total)

    def _require_folder(self, purpose: str) -> Store:
        """Return the client's folder.

        Args:
            purpose: Data that need the folder, as a plural noun for the message.

        Raises:
            RefusedError: If the client has none.
        """
        if self._store is None:
            raise RefusedError(
                f"{purpose} need a client folder. Start the SuperNode with --node-config "
                "'fedq-home=\"/a/folder\"', or give client_app(home=...)"
            )
        return self._store

    def _load_secrets(self, fields: Fields, registers: bool = False) -> ClientSecrets:
        """Return the client's secrets, which it draws at its first registration with a federation.

        Args:
            fields: Fields of the message, with the federation and the server's public key.
            registers: Whether this message registers the client, so that missing secrets may be drawn.

        Raises:
            ValueError: If the folder is of another federation, or a copy of another client's folder.
        """
        store, federation = self._require_folder(_KEYS_AND_LOG), fields["federation"]
        kept = self._stored_keys(store) if registers else self._read_keys()
        if kept is None:
            new = ClientSecrets.draw()
            # raises before an invalid server key is stored
            registration_proof(new.secret, fields["server"], federation, new.public_key, b"")
            kept = {
                "secret": new.secret,
                "seed": new.seed,
                "federation": federation,
                "server": fields["server"],
                "folder": str(store.folder.resolve()),
                **RELEASE,
            }
            store.put(_KEYS, kept)  # stored before the key is sent, so that a crash does not change the key
        if (kept["federation"], kept["server"]) != (federation, fields["server"]):
            raise ValueError(
                f"Client folder {store.folder} is of federation {kept['federation'].hex()[:12]}, but the "
                f"server's is {federation.hex()[:12]}. Use a new folder for a new federation."
            )
        self._check_place(store, kept)
        return ClientSecrets(kept["secret"], kept["seed"])

    def _check_place(self, store: Store, saved: dict[str, Any]) -> None:
        """Refuse a copy of a folder whose original still exists. A moved folder is accepted.

        Each copy would count only its own messages against the same budget and keys.

        Raises:
            ValueError: If the original is still there.
        """
        here, there = store.folder.resolve(), Path(saved.get("folder", store.folder)).resolve()
        if str(here) == saved.get("folder"):
            return
        exists = (there / f"{_KEYS}.json").exists() and not there.samefile(here)
        if ((Store(there).get(_KEYS) or {}) if exists else {}).get("secret") == saved["secret"]:
            raise ValueError(
                f"Client folder {here} is a copy of {there}, which still exists and shares its keys and "
                "budget. Use that folder, or move a folder instead of copying it."
            )
        store.put(_KEYS, {**saved, "folder": str(here)})

    # ---- a round ------------------------------------------------------------------------------------------

    def _keys(self, fields: Fields) -> Keys:
        """Return the client's keys for one round, from its folder or from the seed."""
        seed = self._federated.seed
        return self._load_keys(fields) if seed is None else SeededKeys(seed)

    def _load_keys(self, fields: Fields) -> HeldClientKeys:
        """Return the client's keys for one round, with the public keys of its peers.

        Raises:
            KeyVerificationError: If identities are given and a peer's key is not signed by its identity.
        """
        secrets = self._load_secrets(fields)
        peers = dict(zip(fields["peers"], _split_bytes(fields["peer_keys"], 32), strict=True))
        if self._identities is not None:
            self._identities.check_number(fields["client"])
            signed = dict(zip(fields["peers"], _split_bytes(fields.get("signatures", b""), 64), strict=False))
            for peer, key in peers.items():
                directory, federation = self._identities.directory, fields["federation"]
                verify_key(directory, peer, federation, key, signed.get(peer, b""))
        return HeldClientKeys(
            fields["client"],
            secrets,
            fields["federation"],
            fields["server"],
            fields["salt"],
            fields["sealed"],
            peers,
        )

    def _log(self, owner: str) -> StreamLog:
        """Return the log of streams that this client has used.

        Args:
            owner: Client and federation, as text.

        Raises:
            ValueError: If the log is missing although these keys have used it.
        """
        if self._federated.seed is not None:  # with a seed, a repeated round repeats its bits
            return StreamLog(None, owner)
        store = self._require_folder(_KEYS_AND_LOG)
        kept, path = store.get(_KEYS) or {}, store.folder / "streams.jsonl"
        if kept.get("logged") and not path.exists():
            raise ValueError(
                f"{path} is missing, so the messages under these keys are unknown. Restore the file, or "
                "begin a new federation in another folder."
            )
        log = StreamLog(path, owner)
        path.chmod(0o600)
        if not kept.get("logged"):
            store.put(_KEYS, {**kept, "logged": True})  # from here on, a missing log is an error
        return log

    def train(self, fields: Fields) -> Fields:
        """Train, encode, and return the packed bits, or the first message of secure aggregation."""
        task = RoundTask.from_bytes(fields["task"])
        self._check_round(task.round, task.attempt)
        weights = _weights(fields, task.segments, self._federated.server.broadcast_bits)

        return self._answer(fields, task, weights, lambda: self._train_update(fields, task, weights))

    def evaluate(self, fields: Fields) -> Fields:
        """Measure the models, and return exact metrics if the settings allow it, otherwise nothing.

        Raises:
            ValueError: If the settings have no `evaluate_clients`.
        """
        if self._federated.local.evaluate_clients is None:
            raise ValueError(
                "This client has no evaluate_clients, but the server asks to measure. Set evaluate_clients "
                "on both sides, or on neither."
            )
        metrics = self._measure_models(fields, fields["round"], _weights(fields, (), None))
        if self._may_send_measurements():
            return {"measured": json.dumps(metrics)}
        if self._store is not None and metrics:
            self._store.append("measured", {"round": fields["round"] + 1, **metrics})
        return {}

    def _measure_models(self, fields: Fields, round: int, weights: Tensor) -> Measured:
        """Return validation metrics by model, or nothing if the measurement fails.

        Raises:
            RefusedError: If it fails and the server may see exact metrics. Otherwise the failure stays here.
        """
        try:
            return self._run_local_round(fields, round, weights, self._load_state(fields)[1]).measured
        except RefusedError:
            raise
        except Exception as error:
            rank_zero_warn(f"Round {round + 1}: nothing is measured: {type(error).__name__}: {error}")
            if self._may_send_measurements():
                raise RefusedError("The measurement failed. The client's log has the reason.") from error
            return Measured()

    def _may_send_measurements(self) -> bool:
        """Return whether the settings let exact metrics go to the server, as in a simulation."""
        choice = self._federated.local.client_metrics
        if choice is not None:
            return choice == "shared"
        one, planner = torch.ones(1, dtype=torch.float64), self._federated.planner
        groups = planner.expected(0, self.mechanism()).groups
        return self._is_unprotected(RoundContext(0, groups, (1,), 0.0 * one, one))

    def _answer(
        self, fields: Fields, task: RoundTask, weights: Tensor, update: Callable[[], Tensor]
    ) -> Fields:
        """Check the round, make and encode the update, and return the client's answer.

        Args:
            fields: Fields of the message by name.
            task: Task of the round.
            weights: `(dim,)` global model.
            update: Function that trains and returns the `(dim,)` update. It is called after the checks.

        Returns:
            The packed bits, or the first message of secure aggregation.

        Raises:
            RefusedError: If the client's budget is spent, with the text `DECLINED` only.
        """
        federated = self._federated
        self._check_cohort(task)
        keys = self._keys(fields)
        log = self._log(f"client {fields['client']} of {keys.public().hex()}")
        target: Target = federated.server.sends
        client = RoundClient(fields["client"], self.mechanism(), keys, log, target, self._budget)
        try:
            # checked before training, because the server sees how long training takes
            client.check(task, weights)
            message = client.encode(task, weights, update())
        except BudgetSpentError as error:  # the remaining budget stays private
            rank_zero_warn(f"round {task.round + 1}, BudgetSpentError: {error}")
            raise RefusedError(DECLINED) from error
        if federated.server.secure_aggregation is None:
            return {"answer": client.pack(task, message)}
        digest = model_digest(weights)
        machine = self._machine(fields, keys, task, digest)
        reply = machine.advertise(fields["invitation"])
        names = ("task", "client", "signatures", *_KEY_FIELDS)
        kept = {name: fields[name] for name in names if name in fields}
        self._rounds().drop(_ROUND)  # if killed after this, an older round does not find these symbols
        self._rounds().put_bytes(_SYMBOLS, message.symbols[0].cpu().numpy().astype("<i8").tobytes())
        self._keep({**kept, "digest": digest}, machine)
        return {"secagg": reply}

    def _check_cohort(self, task: RoundTask) -> None:
        """Refuse a cohort other than the settings say, since noise and masks depend on its size.

        Raises:
            ValueError: If the cohort, its groups, or the list of handed-on noise differ.
        """
        planner, mechanism = self._federated.planner, self.mechanism()
        members = [client for group in task.groups for client in group]
        sizes, wanted = tuple(map(len, task.groups)), mechanism.group_sizes(planner.cohort_size)
        if sizes != tuple(wanted) or len(set(members)) != len(members) or max(members) >= planner.num_clients:
            raise ValueError(
                f"The server asks {len(members)} clients in groups of {sizes[:10]}. Expected "
                f"{planner.cohort_size} of {planner.num_clients} in groups of {tuple(wanted)[:10]}"
            )
        hand_over = task.hand_over
        if mechanism.reuses_noise != (hand_over is not None):
            raise ValueError(
                f"{type(mechanism).__name__} {'needs' if mechanism.reuses_noise else 'does not use'} a "
                "list of "
                "clients that take back noise. Run the same version on both sides."
            )
        pairs = () if hand_over is None else (*hand_over.before, *hand_over.after)
        if any(other >= planner.num_clients for _, other in pairs):
            raise ValueError(
                f"Noise is handed on among {planner.num_clients} clients, but the server names others"
            )

    def _train_update(self, fields: Fields, task: RoundTask, weights: Tensor) -> Tensor:
        """Train and return the `(dim,)` update, or a zero update where a failure must stay private.

        Whether training fails depends on the data and on the server's weights. If the mechanism makes a
        privacy claim, a refusal would answer the server's questions about the data without noise. So the
        client then sends a zero update and logs the reason.

        Raises:
            RefusedError: If training fails and the messages are unprotected.
        """
        self._failures.asked += 1
        try:
            return self._spread_statistics(self.update(fields, task, weights), task, weights)
        except RefusedError:
            raise
        except Exception as error:
            reason = f"round {task.round + 1}: {type(error).__name__}: {error}"
            is_unprotected = self._is_unprotected(task.context())
            self._failures.add(task.round, error, is_unprotected, self._store)
            if is_unprotected:
                rank_zero_warn(reason)
                raise RefusedError("Training failed. The client's log has the reason.") from error
            rank_zero_warn(
                f"{reason}. Training failed, so a zero update is sent, because a refusal would reveal data. "
                "Fix the cause on this site, since nobody else sees it."
            )
            return self._spread_statistics(None, task, weights)

    def _spread_statistics(self, result: Tensor | None, task: RoundTask, weights: Tensor) -> Tensor:
        """Return the `(dim,)` vector to encode: the update, or in some rounds the statistics.

        Args:
            result: `(dim,)` update or `(size,)` vector of statistics. None stands for zeros, after a failed
                training.
            task: Task of the round.
            weights: `(dim,)` global model.
        """
        statistics = self._federated.local.statistics
        if statistics is None or task.round >= statistics.rounds:
            return torch.zeros_like(weights) if result is None else result.to(weights)
        vector = torch.zeros(statistics.size) if result is None else result
        parts = self.mechanism(), task.context(), weights, self._federated.server.sends
        return statistics.spread(vector[None].to(weights.device), *parts)[0]

    def _is_unprotected(self, context: RoundContext) -> bool:
        """Return whether no privacy claim covers this client's messages or single samples."""
        if sample_protectors(callbacks_in(self._trainer)):
            return False
        return self._federated.seed is not None or not has_claim(self.mechanism(), context)

    def update(self, fields: Fields, task: RoundTask, weights: Tensor) -> Tensor:
        """Train, store the client's new state, and return the `(dim,)` update, local - global."""
        states, kept = self._load_state(fields)
        at = task.round, task.attempt
        try:
            local = self._run_local_round(fields, task, weights, kept)
        except Exception:
            if states is not None:  # a zero update may replace this one and be counted
                states.keep(at, kept)
            raise
        if states is not None:
            states.keep(at, local.state)
        return local.update

    def _load_state(self, fields: Fields) -> tuple[PersistentState | None, State]:
        """Return the store of the client's state and the current state, or None and an empty state."""
        seed = self._federated.seed
        if not keeps_state(self._federated.local, callbacks_in(self._trainer)):
            return None, State()
        of = f"the federation of seed {seed}" if seed is not None else fields["federation"].hex()[:16]
        store = self._require_folder(
            "Local tensors (personal_parameters=, buffers='local'), an algorithm's memory and DPSGD's account"
        )
        states = PersistentState(store, f"client {fields['client']} of {of}")
        counted = [int(one) for one in fields.get("counted", NEVER)]
        return states, states.settle((counted[0], counted[1]) if len(counted) == 2 else NEVER)

    def _run_local_round(
        self, fields: Fields, attempt: RoundTask | int, weights: Tensor, saved: State
    ) -> LocalRound:
        """Train for a round, or measure after it, with the same held-out samples in every round.

        Args:
            fields: Fields of the message by name.
            attempt: Task of the round, or the index of the round to measure after.
            weights: `(dim,)` global model.
            saved: State that the client has kept.
        """
        seed = held_out = self._federated.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(7), "big")
            held_out = int.from_bytes(self._load_secrets(fields).derived("held out")[:7], "big")
        inputs = RoundInputs.from_fields(fields, saved)
        is_reset = self._place in self._reset_after_abort
        local_round = LocalRound(
            self._federated, fields["client"], seed, attempt, weights, inputs, held_out, is_reset
        )
        return local_round.run(self._module(), self._data(), self._trainer)

    # ---- secure aggregation: three or four more exchanges -------------------------------------------------

    def _machine(self, fields: Fields, keys: Keys, task: RoundTask, digest: bytes) -> Client:
        """Return this client's protocol machine of secure aggregation for a round."""
        secagg, context = self._federated.server.secure_aggregation, task.context()
        assert isinstance(secagg, SecAgg)
        public = PublicRandomness(keys, task.round, task.attempt)
        layout, session = secagg.layout(self.mechanism(), context, public), session_id(keys.public(), task)
        silent = self.mechanism().tolerated_dropouts(context)
        clients = self._federated.clients.num_clients
        terms = secagg.terms(session, task.round, task.attempt, context.cohort, layout, clients, silent)
        if not secagg.active:
            return Client(fields["client"], terms, digest)
        identities = self._identities
        assert identities is not None  # `check_identities` has refused None
        identities.check_number(fields["client"])
        own, directory = identities.own, identities.directory
        return Client(fields["client"], terms, digest, identity=own, directory=directory)

    def _keep(self, fields: Fields, machine: Client) -> None:
        """Store the state of the open round between messages."""
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
        self._rounds().put(_ROUND, {**plain, "machine": machine.to_bytes()})

    def _rounds(self) -> Store:
        """Return the folder that stores open rounds."""
        return self._require_folder("States of secure aggregation between messages")

    @contextmanager
    def _resume_machine(self, previous: bool = False) -> Iterator[Client]:
        """Restore the protocol machine of the open round, for one message at a time.

        No message is answered twice. After an error this client is out of the round. A message out of turn
        leaves the state unchanged.

        Args:
            previous: Whether this is the last exchange, after which nothing is stored.

        Raises:
            ValueError: If no round is open, or another message has the machine.
        """
        # removed from disk until it is stored again, so a crash leaves the client out of the round
        kept = self._rounds().pop(_ROUND)
        if kept is None:
            raise ValueError("No round is open at this client, or another message is being answered")
        task = RoundTask.from_bytes(kept["task"])
        machine = self._machine(kept, self._keys(kept), task, kept["digest"])
        machine.resume(kept["machine"])
        try:
            yield machine
        except StageError:
            self._keep(kept, machine)
            raise
        if not previous:
            self._keep(kept, machine)

    def shares(self, fields: Fields) -> Fields:
        """Answer the roster with key shares for the neighbours."""
        with self._resume_machine() as machine:
            return {"secagg": machine.share_keys(fields.get("secagg", b""))}

    def masked(self, fields: Fields) -> Fields:
        """Accept the neighbours' shares, and return the masked symbols."""
        with self._resume_machine() as machine:
            machine.accept_shares(fields.get("secagg", b""))
            symbols = self._rounds().pop_bytes(_SYMBOLS)  # removed, so that no second message masks them
            masked = machine.masked_input(np.frombuffer(symbols, "<i8"))
            accused = {"accused": list(machine.unopened)} if machine.unopened else {}
            return {"secagg": masked, **accused}

    def confirm(self, fields: Fields) -> Fields:
        """Sign the list of survivors, where the server may lie about it."""
        with self._resume_machine() as machine:
            return {"secagg": machine.confirm(fields.get("secagg", b""))}

    def unmask(self, fields: Fields) -> Fields:
        """Return one share of each neighbour, after which the client keeps nothing of the round."""
        with self._resume_machine(previous=True) as machine:
            return {"secagg": machine.unmask(fields.get("secagg", b""))}


def refusal(error: RefusedError) -> Fields:
    """Return the fields of a refusal: its text, and the client whose shares did not open."""
    cause, accused = error.__cause__, None
    if isinstance(cause, AuthenticationError) and cause.stage is Stage.MASK:
        accused = cause.client
    return {"refused": str(error), **({} if accused is None else {"accused": [accused]})}


def _weights(fields: Fields, segments: tuple[int, ...], broadcast_bits: int | None) -> Tensor:
    """Return the `(dim,)` global weights of a message.

    Raises:
        ValueError: If their type is neither float32 nor float64.
    """
    dtype = {"float32": torch.float32, "float64": torch.float64}.get(fields["dtype"])
    if dtype is None:
        raise ValueError(f"Weights must be float32 or float64, got {fields['dtype'][:20]!r}")
    if broadcast_bits is not None:
        return Broadcast(broadcast_bits).unpack(fields["weights"], segments, dtype)
    # a copy, because a tensor needs writable memory and bytes are read-only
    return torch.frombuffer(bytearray(fields["weights"]), dtype=dtype)


def _split_bytes(data: bytes, size: int) -> list[bytes]:
    """Split bytes into pieces of equal size."""
    return [data[start : start + size] for start in range(0, len(data), size)]
