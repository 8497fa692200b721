"""A real client: its own data, its own Trainer, its own keys. One packed message a round leaves it.

Flower hands a `ClientApp` one message at a time, each in a process of its own, so whatever must outlive a
message is in the client's folder: its keys, the log of the streams that it has used, and, for the minutes
of a round behind secure aggregation, the state of that protocol. The log is written before a message
exists, so a client that is killed and comes back, and a server that is set back, make no stream carry two
payloads.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    TRAVELS,
    RefusedError,
    check_deployable,
    check_release,
    deployed_mechanism,
    differences,
    fingerprint,
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
from lightning_fedq.training.checks import check_hooks
from lightning_fedq.training.client_metrics import has_claim, sample_protectors

Measured = dict[str, dict[str, float | None]]
"""By model, "global" or "personal": what validation logs, by name."""

_KEYS, _ROUND, _SYMBOLS, _PROBE = "keys", "round", "symbols", "probe"
_ROOM = 1 << 16
"""Bytes that a folder must have room for: a line of the log, keys, and the state of a round."""
_KEYS_AND_LOG = "a client's keys, and the log of its streams, without a seed"
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
    """Settings, folder, number and keys that a client has of its own.

    Args:
        federated: The federation's settings, from the client's own code.
        store: Its folder; None keeps nothing, which takes a seed and no secure aggregation.
        partition: Its number, where it has one from elsewhere; -1 takes the server's.
        identities: Keys with which it signs its own key, and checks the signed ones of its peers; None trusts
            the server to relay them.
        budget: Privacy budget of this client over all that its log knows; None leaves it to the ledger.
        failures: Count of its trainings that fail; None is a new one.
        reset_after_abort: Folders of clients whose messages have nothing in common but classes, code and
            data, as was tried at their registration in this process: what they train is not copied. None is a
            new one.
    """

    federated: Federated
    store: Store | None
    partition: int = -1
    identities: Identities | None = None
    budget: PrivacyTarget | None = None
    failures: Failures | None = None
    reset_after_abort: set[str] | None = None


class RemoteClient:
    """One client's answers, message by message, without a transport. It trains with a `Trainer` of its own.

    Args:
        module: Makes the client's own module.
        data: Makes the client's own data.
        trainer: Arguments of its `Trainer`.
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
        """Settings that the server's are compared with, by name."""
        words = fingerprint(self._federated, self._module(), self._trainer.get("max_epochs"))
        return {**words, **training_words(self._trainer, self._module), **self._run_rehearsal()}

    def _run_rehearsal(self) -> dict[str, str]:
        """Try the training, and count what travels, where first steps may find more than the layers say.

        A server has no data to try, and counts by the layers alone. Where the data are not to be had yet, nor
        does this client.

        Raises:
            RefusedError: If the training fails on this client's smallest batch, or a layer counts batches.
        """
        module, local = self._module(), self._federated.local
        check_counted(module, local)
        check_hooks(module, local.statistics)
        counts = local.buffers == "share" and has_other_state(module)
        try:
            found = self._train_trial(module, None)
        except RefusedError:
            raise
        except Exception as error:  # of the user's data, which say nothing to the server here
            needs = ["DPSGD"] if any(map(is_per_client, callbacks_in(self._trainer))) else []
            needs += [] if local.evaluate_clients is None else ["evaluate_clients"]
            if needs:
                rank_zero_warn(str(error))
                words = f"{' and '.join(needs)} can't work here; the client's own log says why"
                raise RefusedError(words) from error
            if counts:
                rank_zero_warn(f"what travels was not tried out: {type(error).__name__}: {error}")
            return {}
        self._try_a_later_message()
        return {TRAVELS: str(sum(found.segments))} if counts else {}

    def _train_trial(self, module: pl.LightningModule, task: LaterRound | None) -> LocalRound:
        tried = LocalRound(self._federated, 0, 0, task, torch.zeros(0))
        with preserve_generators():
            return tried.run(module, self._data(), self._trainer)

    def _try_a_later_message(self) -> None:
        """Run what a message of the second round runs, on two batches. Nothing of it is kept.

        Raises:
            RefusedError: If it fails, and on zeros in the place of the data, too: by the code alone.
        """
        errors: list[Exception] = []
        statistics = self._federated.local.statistics
        round = max(1, 0 if statistics is None else statistics.rounds)  # the first one trains, too
        self._reset_after_abort.discard(self._place)
        for of_zeros in (False, True):
            try:
                first, second = (
                    self._train_trial(self._module(), LaterRound(of_zeros, round)) for _ in range(2)
                )
                if not first.shared_objects(second):
                    self._reset_after_abort.add(self._place)
                break
            except RefusedError:  # in words for both sides, which the message itself will say
                return
            except Exception as error:
                errors.append(error)
        if errors:
            what = f"this client's data: {type(errors[0]).__name__}: {errors[0]}"
            rank_zero_warn(f"a message of the second round, tried on two batches, fails on {what}")
        if len(errors) > 1:
            raise RefusedError(
                "a message of the second round fails here by its code, whatever the data; the client's own "
                "log says why"
            ) from errors[0]

    def mechanism(self) -> Mechanism:
        """The mechanism, from the client's own code and never from the server."""
        # it is set to the privacy target, where there is one
        if self._federated.calibrated_target is None:
            return self._federated.mechanism
        return deployed_mechanism(self._federated, self._module(), self._trainer.get("max_epochs"))

    def answer(self, kind: str, fields: Fields) -> Fields:
        """Answer one message.

        Raises:
            RefusedError: If it is refused, in words for both sides.
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
                raise ValueError(f"there is no such question; they are {', '.join(answers)}")
            check_kinds(fields, self._required_fields(kind), _OPTIONAL)
            self._check_numbers(fields)
            return answers[kind](fields)
        except (ValueError, RuntimeError, PermissionError, SecAggError) as error:
            raise RefusedError(f"{kind}: {error}") from error
        except Exception as error:  # Flower would tell the server its words
            rank_zero_warn(f"{kind}: {type(error).__name__}: {error}")
            raise RefusedError(f"{kind}: {type(error).__name__}; the client's own log says more") from error

    def _required_fields(self, kind: str) -> dict[str, type]:
        """Kinds of the fields that a message must have, by name."""
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
        """Refuse what no server of these settings says: it would be looped over, or kept for ever.

        Raises:
            ValueError: Naming the field.
        """
        number, clients = fields.get("client"), self._federated.clients.num_clients
        signs = self._identities is not None  # which say whose number it is
        mine = signs or self._partition in (-1, number)
        if number is not None and not (0 <= number < clients and mine):
            raise ValueError(
                f"the server takes this client for number {number} of {clients}, and its partition-id is "
                f"{self._partition} (-1 is none); has this folder registered with another one?"
            )
        if "round" in fields:
            self._check_round(fields["round"], 0)

    def _check_round(self, round: int, attempt: int) -> None:
        """Refuse a round, or an attempt, that the agreed run does not have.

        A round that was answered is the last for ever: all before it are over.
        """
        said = [MOST_ROUNDS, self._trainer_rounds]
        if self._federated.seed is None and self._store is not None:
            said.append((self._store.get(_KEYS) or {}).get("rounds", MOST_ROUNDS))
        if not (0 <= round < min(said) and 0 <= attempt < MOST_ATTEMPTS):
            raise ValueError(
                f"the server asks for round {round + 1}, attempt {attempt}, and this run has {min(said)} "
                f"rounds of {MOST_ATTEMPTS} attempts at most, as agreed at registration; for more give the "
                "server, and clients that say it, a larger max_epochs, and start the server again"
            )

    @property
    def _trainer_rounds(self) -> int:
        """Rounds of the client's own Trainer, where it says them."""
        said = self._trainer.get("max_epochs") or -1
        return MOST_ROUNDS if said < 0 else int(said)

    def reply(self, kind: str, fields: Fields) -> Fields:
        """Answer one message, or say why not."""
        try:
            return self.answer(kind, fields)
        except RefusedError as error:
            rank_zero_warn(str(error))
            return refusal(error)

    # ---- before the first round ---------------------------------------------------------------------------

    def register(self, fields: Fields) -> Fields:
        """Compare settings with the server's, and tell it this client's public key, with a proof of it.

        Raises:
            ValueError: If a setting differs, or there is no folder to keep keys in.
        """
        if self._store is not None:
            self._store.remove_drafts()
        theirs = {name.removeprefix(_SETTINGS): v for name, v in fields.items() if name.startswith(_SETTINGS)}
        check_deployable(self._federated)
        own = self.settings()
        check_release(own, theirs)
        if found := differences(own, theirs):
            buffers = (
                ". Where only the numbers that travel differ, training changes a buffer that the layers do "
                "not tell the server of: use buffers='local' or 'frozen'"
            )
            raise ValueError(
                f"this client and the server differ: {found}; run the same code and settings on both"
                + (buffers if TRAVELS in found else "")
            )
        rounds = fields.get("rounds", 0)
        if not 0 <= rounds <= self._trainer_rounds:
            raise ValueError(
                f"the server's run has {rounds} rounds, this client answers {self._trainer_rounds} at "
                "most; give "
                "both sides' trainers the same max_epochs"
            )
        for name, found in ((name, fields[name]) for name in self._required_fields("register")):
            if len(found) != 32:
                raise ValueError(f"the field {name!r} must be 32 bytes, {len(found)} came")
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
                store.put(_KEYS, {**(store.get(_KEYS) or {}), "rounds": rounds})
            if self._identities is not None:
                answer["signature"] = sign_key(self._identities.own, federation, key)
        return answer

    def ready(self, fields: Fields) -> Fields:
        """Say that this client answers again, after a round in which it has failed. Trains nothing.

        Raises:
            RefusedError: If its folder takes nothing more, or has lost its keys.
        """
        if self._federated.seed is None:
            self._read_keys()
        return self._check_folder()

    def _read_keys(self) -> dict[str, Any]:
        """The keys with which this client has registered."""
        store = self._require_folder(_KEYS_AND_LOG)
        if (kept := store.get(_KEYS)) is None:
            raise RefusedError(
                f"{store.folder} holds no keys, and this client has registered: it was emptied, or is "
                "another folder; put it back, for without it nobody can be this client any more"
            )
        return kept

    def _check_folder(self) -> Fields:
        if self._store is not None:
            try:
                self._store.put_bytes(_PROBE, bytes(_ROOM))
                self._store.pop_bytes(_PROBE)
            except OSError as error:
                rank_zero_warn(f"{self._store.folder}: {error}")
                raise RefusedError("its folder can't be written; its own log says why") from error
        return {}

    def _count_samples(self) -> int:
        """Samples that are trained on. What went wrong with the data is said here and not to the server."""
        evaluated = self._federated.local.evaluate_clients
        try:
            data = self._data()
            data.prepare_data()
            data.setup("fit")
            held = len(check_loader(data.train_dataloader()).dataset)  # type: ignore[arg-type]
        except Exception as error:
            rank_zero_warn(f"{type(error).__name__}: {error}")
            raise RefusedError("the data can't be counted; the client's own log says why") from error
        fraction = None if evaluated is None else evaluated.fraction
        return held if fraction is None else held - num_held_out(fraction, held)

    def _require_folder(self, purpose: str) -> Store:
        """The client's folder, or words that `purpose` is kept in one."""
        if self._store is None:
            raise RefusedError(
                f"{purpose} are kept in a folder of the client's own; start the SuperNode with --node-config "
                "'fedq-home=\"/a/folder\"', or give client_app(home=...)"
            )
        return self._store

    def _load_secrets(self, fields: Fields, registers: bool = False) -> ClientSecrets:
        """Drawn at the first registration with a federation, and the same ever after."""
        store, federation = self._require_folder(_KEYS_AND_LOG), fields["federation"]
        kept = store.get(_KEYS) if registers else self._read_keys()
        if kept is None:
            new = ClientSecrets.draw()
            # no key of the server's that is none is kept
            registration_proof(new.secret, fields["server"], federation, new.public_key, b"")
            kept = {
                "secret": new.secret,
                "seed": new.seed,
                "federation": federation,
                "server": fields["server"],
                "folder": str(store.folder.resolve()),
            }
            store.put(_KEYS, kept)  # before the key is sent: after a crash it is still this one
        if (kept["federation"], kept["server"]) != (federation, fields["server"]):
            raise ValueError(
                f"this client's folder {store.folder} is of federation {kept['federation'].hex()[:12]}, the "
                f"server's is {federation.hex()[:12]}; take a new folder for a new federation"
            )
        self._check_place(store, kept)
        return ClientSecrets(kept["secret"], kept["seed"])

    def _check_place(self, store: Store, saved: dict[str, Any]) -> None:
        """Refuse a copy of a folder that is still there. One that was moved goes on."""
        here, there = store.folder.resolve(), Path(saved.get("folder", store.folder)).resolve()
        if str(here) == saved.get("folder"):
            return
        exists = (there / f"{_KEYS}.json").exists() and not there.samefile(here)
        if ((Store(there).get(_KEYS) or {}) if exists else {}).get("secret") == saved["secret"]:
            raise ValueError(
                f"this client's folder {here} is a copy of {there}, which is still there: each would count "
                "its own messages only, against one budget and one set of keys. Go on with that one, or move "
                "a folder in place of copying it"
            )
        store.put(_KEYS, {**saved, "folder": str(here)})

    # ---- a round ------------------------------------------------------------------------------------------

    def _keys(self, fields: Fields) -> Keys:
        seed = self._federated.seed
        return self._load_keys(fields) if seed is None else SeededKeys(seed)

    def _load_keys(self, fields: Fields) -> HeldClientKeys:
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
        if self._federated.seed is not None:  # with one, a repeated round repeats its bits
            return StreamLog(None, owner)
        store = self._require_folder(_KEYS_AND_LOG)
        kept, path = store.get(_KEYS) or {}, store.folder / "streams.jsonl"
        if kept.get("logged") and not path.exists():
            raise ValueError(
                f"{path} is missing, so what these keys have encoded is not known; put it back, or begin a "
                "new federation in another folder"
            )
        log = StreamLog(path, owner)
        path.chmod(0o600)
        if not kept.get("logged"):
            store.put(_KEYS, {**kept, "logged": True})  # from here on a missing log is a lost one
        return log

    def train(self, fields: Fields) -> Fields:
        """Train, encode, and return the packed bits, or the first answer of the secure aggregation."""
        task = RoundTask.from_bytes(fields["task"])
        self._check_round(task.round, task.attempt)
        weights = _weights(fields, task.segments, self._federated.server.broadcast_bits)

        return self._answer(fields, task, weights, lambda: self._train_update(fields, task, weights))

    def evaluate(self, fields: Fields) -> Fields:
        """Measure, and return what these settings let out: exact values, or nothing."""
        if self._federated.local.evaluate_clients is None:
            raise ValueError("these settings measure nothing; give both sides evaluate_clients, or neither")
        found = self._measure_models(fields, fields["round"], _weights(fields, (), None))
        if self._may_send_measurements():
            return {"measured": json.dumps(found)}
        if self._store is not None and found:
            self._store.append("measured", {"round": fields["round"] + 1, **found})
        return {}

    def _measure_models(self, fields: Fields, round: int, weights: Tensor) -> Measured:
        """Metrics of validation, by model. The server hears of a failure where it hears all values only."""
        try:
            return self._run_local_round(fields, round, weights, self._load_state(fields)[1]).measured
        except RefusedError:
            raise
        except Exception as error:
            rank_zero_warn(f"round {round + 1}: nothing is measured: {type(error).__name__}: {error}")
            if self._may_send_measurements():
                raise RefusedError("the measurement has failed; the client's own log says why") from error
            return Measured()

    def _may_send_measurements(self) -> bool:
        """Do exact measurements go to the server? By these settings, as in a simulation."""
        choice = self._federated.local.client_metrics
        if choice is not None:
            return choice == "shared"
        one, planner = torch.ones(1, dtype=torch.float64), self._federated.planner
        groups = planner.expected(0, self.mechanism()).groups
        return self._is_unprotected(RoundContext(0, groups, (1,), 0.0 * one, one))

    def _answer(
        self, fields: Fields, task: RoundTask, weights: Tensor, update: Callable[[], Tensor]
    ) -> Fields:
        """Encode an update, which is made once the round has been checked: packed bits, or the first answer
        of the secure aggregation."""
        federated = self._federated
        self._check_cohort(task)
        keys = self._keys(fields)
        log = self._log(f"client {fields['client']} of {keys.public().hex()}")
        target: Target = federated.server.target
        client = RoundClient(fields["client"], self.mechanism(), keys, log, target, self._budget)
        try:
            client.check(task, weights)  # before training, whose duration the server sees
            message = client.encode(task, weights, update())
        except BudgetSpentError as error:  # how much is left is nobody else's business
            rank_zero_warn(f"round {task.round + 1}, BudgetSpentError: {error}")
            raise RefusedError(DECLINED) from error
        if federated.server.secure_aggregation is None:
            return {"answer": client.pack(task, message)}
        digest = model_digest(weights)
        machine = self._machine(fields, keys, task, digest)
        reply = machine.advertise(fields["invitation"])
        names = ("task", "client", "signatures", *_KEY_FIELDS)
        kept = {name: fields[name] for name in names if name in fields}
        self._rounds().drop(_ROUND)  # killed here, an older round does not find these symbols
        self._rounds().put_bytes(_SYMBOLS, message.symbols[0].cpu().numpy().astype("<i8").tobytes())
        self._keep({**kept, "digest": digest}, machine)
        return {"secagg": reply}

    def _check_cohort(self, task: RoundTask) -> None:
        """Refuse another cohort than the settings say: noise, masks and shared bits count on its size."""
        planner, mechanism = self._federated.planner, self.mechanism()
        members = [client for group in task.groups for client in group]
        sizes, wanted = tuple(map(len, task.groups)), mechanism.group_sizes(planner.cohort_size)
        if sizes != tuple(wanted) or len(set(members)) != len(members) or max(members) >= planner.num_clients:
            raise ValueError(
                f"the server asks {len(members)} clients in groups of {sizes[:10]}, these settings say "
                f"{planner.cohort_size} of {planner.num_clients} in groups of {tuple(wanted)[:10]}"
            )
        handed = task.hand_over
        if mechanism.hands_on != (handed is not None):
            raise ValueError(
                f"{type(mechanism).__name__} {'needs' if mechanism.hands_on else 'has no use for'} a list of "
                "who takes back whose noise; run the same version on both sides"
            )
        pairs = () if handed is None else (*handed.before, *handed.after)
        if any(other >= planner.num_clients for _, other in pairs):
            raise ValueError(f"noise is handed on among {planner.num_clients} clients, the server names more")

    def _train_update(self, fields: Fields, task: RoundTask, weights: Tensor) -> Tensor:
        """The update. What went wrong with the data is said here and not to the server.

        Where something is claimed, nor is it said that anything went wrong: whether a training fails follows
        from the data and from the server's weights, so a refusal would answer any question, without noise.
        """
        self._failures.asked += 1
        try:
            return self._spread_statistics(self.update(fields, task, weights), task, weights)
        except RefusedError:
            raise
        except Exception as error:
            reason = f"round {task.round + 1}: {type(error).__name__}: {error}"
            told = self._is_unprotected(task.context())
            self._failures.add(task.round, error, told, self._store)
            if told:
                rank_zero_warn(reason)
                raise RefusedError("the training has failed; the client's own log says why") from error
            rank_zero_warn(
                f"{reason}; the training has failed, and a zero update is encoded in its place: a refusal "
                "would tell the server of the data what no noise hides. Cure it here, nobody else sees it"
            )
            return self._spread_statistics(None, task, weights)

    def _spread_statistics(self, result: Tensor | None, task: RoundTask, weights: Tensor) -> Tensor:
        """Update `(dim,)` of what a round has made, in which statistics are spread. None: of no data."""
        statistics = self._federated.local.statistics
        if statistics is None or task.round >= statistics.rounds:
            return torch.zeros_like(weights) if result is None else result.to(weights)
        vector = torch.zeros(statistics.size) if result is None else result
        parts = self.mechanism(), task.context(), weights, self._federated.server.target
        return statistics.spread(vector[None].to(weights.device), *parts)[0]

    def _is_unprotected(self, context: RoundContext) -> bool:
        """Is nothing claimed of what this client's messages hide, nor of single samples?"""
        if sample_protectors(callbacks_in(self._trainer)):
            return False
        return self._federated.seed is not None or not has_claim(self.mechanism(), context)

    def update(self, fields: Fields, task: RoundTask, weights: Tensor) -> Tensor:
        """Train, and return `(dim,)` local - global."""
        states, kept = self._load_state(fields)
        at = task.round, task.attempt
        try:
            local = self._run_local_round(fields, task, weights, kept)
        except Exception:
            if states is not None:  # a zero update may be sent in its place, and be counted
                states.keep(at, kept)
            raise
        if states is not None:
            states.keep(at, local.state)
        return local.update

    def _load_state(self, fields: Fields) -> tuple[PersistentState | None, State]:
        """State that the client goes on with, and its place. None where it keeps nothing."""
        seed = self._federated.seed
        if not keeps_state(self._federated.local, callbacks_in(self._trainer)):
            return None, State()
        of = f"the federation of seed {seed}" if seed is not None else fields["federation"].hex()[:16]
        store = self._require_folder(
            "tensors of local=, buffers='local', an algorithm's memory and DPSGD's account"
        )
        states = PersistentState(store, f"client {fields['client']} of {of}")
        counted = [int(one) for one in fields.get("counted", NEVER)]
        return states, states.settle((counted[0], counted[1]) if len(counted) == 2 else NEVER)

    def _run_local_round(
        self, fields: Fields, attempt: RoundTask | int, weights: Tensor, saved: State
    ) -> LocalRound:
        """Train in a round, or measure after it. What is held out is the same in every round."""
        seed = held_out = self._federated.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(7), "big")
            held_out = int.from_bytes(self._load_secrets(fields).derived("held out")[:7], "big")
        told = RoundInputs.from_fields(fields, saved)
        is_anew = self._place in self._reset_after_abort
        own = LocalRound(self._federated, fields["client"], seed, attempt, weights, told, held_out, is_anew)
        return own.run(self._module(), self._data(), self._trainer)

    # ---- secure aggregation: three more exchanges, or four ------------------------------------------------

    def _machine(self, fields: Fields, keys: Keys, task: RoundTask, digest: bytes) -> Client:
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
        assert identities is not None  # `check_identities` made sure
        identities.check_number(fields["client"])
        own, directory = identities.own, identities.directory
        return Client(fields["client"], terms, digest, identity=own, directory=directory)

    def _keep(self, fields: Fields, machine: Client) -> None:
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
        self._rounds().put(_ROUND, {**plain, "machine": machine.to_bytes()})

    def _rounds(self) -> Store:
        return self._require_folder("states of secure aggregation between messages")

    @contextmanager
    def _resume_machine(self, previous: bool = False) -> Iterator[Client]:
        """The open round's machine. It is in one pair of hands at a time, so nothing is answered twice.

        After an error this client is out of the round; a message out of turn changes nothing.
        """
        # off the disk until it is kept again: a crash leaves the client out
        kept = self._rounds().pop(_ROUND)
        if kept is None:
            raise ValueError("no round is open at this client, or another message of it is being answered")
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
        """Answer the roster with shares for the neighbours."""
        with self._resume_machine() as machine:
            return {"secagg": machine.share_keys(fields.get("secagg", b""))}

    def masked(self, fields: Fields) -> Fields:
        """Take the neighbours' shares, and send the masked symbols."""
        with self._resume_machine() as machine:
            machine.accept_shares(fields.get("secagg", b""))
            symbols = self._rounds().pop_bytes(_SYMBOLS)  # taken: no second message masks them
            masked = machine.masked_input(np.frombuffer(symbols, "<i8"))
            accused = {"accused": list(machine.unopened)} if machine.unopened else {}
            return {"secagg": masked, **accused}

    def confirm(self, fields: Fields) -> Fields:
        """Sign the list of survivors, where the server may lie about it."""
        with self._resume_machine() as machine:
            return {"secagg": machine.confirm(fields.get("secagg", b""))}

    def unmask(self, fields: Fields) -> Fields:
        """Open one share of every neighbour. Then nothing of the round is left here."""
        with self._resume_machine(previous=True) as machine:
            return {"secagg": machine.unmask(fields.get("secagg", b""))}


def refusal(error: RefusedError) -> Fields:
    """Why nothing is answered, in words, and whose shares did not open where that is why."""
    cause, accused = error.__cause__, None
    if isinstance(cause, AuthenticationError) and cause.stage is Stage.MASK:
        accused = cause.client
    return {"refused": str(error), **({} if accused is None else {"accused": [accused]})}


def _weights(fields: Fields, segments: tuple[int, ...], broadcast_bits: int | None) -> Tensor:
    dtype = {"float32": torch.float32, "float64": torch.float64}.get(fields["dtype"])
    if dtype is None:
        raise ValueError(f"weights are float32 or float64, got {fields['dtype'][:20]!r}")
    if broadcast_bits is not None:
        return Broadcast(broadcast_bits).unpack(fields["weights"], segments, dtype)
    return torch.frombuffer(bytearray(fields["weights"]), dtype=dtype)  # a tensor writes, bytes are read-only


def _split_bytes(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
