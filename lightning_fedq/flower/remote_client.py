"""A real client with its own data, Trainer and keys, which sends one packed message a round.

Flower hands a `ClientApp` one message at a time, each in a separate process. So state that must outlive a
message is stored in the client's folder: its keys, the log of used streams, and the protocol state of secure
aggregation while a round is open.

The parts are its folder (`client_folder`), its trial at registration (`registration_trial`), the training of
a round (`local_round`) and secure aggregation (`masked_rounds`).
"""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.personal import State
from lightning_fedq.data.generator_turns import preserve_generators
from lightning_fedq.data.held_out import num_held_out
from lightning_fedq.data.loader import check_loader
from lightning_fedq.flower.client_folder import KEY_FIELDS, ClientFolder
from lightning_fedq.flower.failures import Failures
from lightning_fedq.flower.local_round import LocalRound
from lightning_fedq.flower.masked_rounds import MaskedRounds
from lightning_fedq.flower.persistent_state import NEVER, PersistentState
from lightning_fedq.flower.records import Fields, check_kinds
from lightning_fedq.flower.refusals import RefusedError, refuse_in_private, refused_in_private
from lightning_fedq.flower.registration_trial import try_registration
from lightning_fedq.flower.round_inputs import LaterRound, RoundInputs
from lightning_fedq.flower.settings import (
    DECLINED,
    MOST_ATTEMPTS,
    MOST_ROUNDS,
    TRAVELS,
    check_cohort,
    check_release,
    deployed_mechanism,
    differences,
    fingerprint,
    given_rounds,
    keeps_state,
    make_client_budget,
)
from lightning_fedq.flower.store import Store
from lightning_fedq.flower.training_description import callbacks_in, training_words
from lightning_fedq.keys.party_keys import Identities, registration_proof, sign_key
from lightning_fedq.mechanisms.interface import Mechanism, RoundContext
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import Broadcast, BudgetSpentError, RoundClient, RoundTask
from lightning_fedq.secagg import AuthenticationError, SecAggError, Stage, model_digest
from lightning_fedq.training.checks import check_shapes
from lightning_fedq.training.client_metrics import has_claim, sample_protectors

_SETTINGS = "setting "
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
    """

    federated: Federated
    store: Store | None
    partition: int = -1
    identities: Identities | None = None
    budget: PrivacyTarget | None = None
    failures: Failures | None = None


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
        self._federated, self._store, self._partition, self._identities, budget, failures = config
        self._failures = failures or Failures()
        self._budget = make_client_budget(config.federated, budget, config.identities is not None)
        self._module, self._data, self._trainer = module, data, trainer
        self._folder = ClientFolder(self._store, self._federated.seed, self._identities)
        self._masked_rounds = MaskedRounds(self._federated, self.mechanism, self._folder, self._identities)

    def settings(self) -> dict[str, str]:
        """Return the settings that must equal the server's, as text by name."""
        check_shapes(module := self._module())  # before their numbers are counted
        words = fingerprint(self._federated, module, self._given_rounds)
        words |= training_words(self._trainer, self._module)
        return words | try_registration(self._federated, self._module, self._trainer, self._train_trial)

    def _train_trial(self, module: pl.LightningModule, task: LaterRound | None) -> LocalRound:
        """Run one trial of the training on this client's data, and return it."""
        with preserve_generators():
            trial = LocalRound(self._federated, 0, 0, task, torch.zeros(0))
            return trial.run(module, self._data(), self._trainer)

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
            "shares": self._masked_rounds.shares,
            "masked": self._masked_rounds.masked,
            "confirm": self._masked_rounds.confirm,
            "unmask": self._masked_rounds.unmask,
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
            raise refuse_in_private(f"{kind}: {type(error).__name__}", error, f"{kind}: ") from error

    def _required_fields(self, kind: str) -> dict[str, type]:
        """Return the type of each field that a message of this kind must have, by name."""
        keyed, secagg = self._federated.seed is None, self._federated.server.secure_aggregation
        if kind == "register":
            return {"federation": bytes, "server": bytes, "nonce": bytes} if keyed else {}
        if kind == "ready":
            return {}
        if kind not in ("train", "evaluate"):
            return {"secagg": bytes}
        model = {"client": int, "weights": bytes, "dtype": str, **(KEY_FIELDS if keyed else {})}
        if kind == "evaluate":
            return {"round": int, **model}
        return {"task": bytes, **model, **({} if secagg is None else {"invitation": bytes})}

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
        limit = min(MOST_ROUNDS, self._trainer_rounds, self._folder.agreed_rounds)
        if not (0 <= round < limit and 0 <= attempt < MOST_ATTEMPTS):
            raise ValueError(
                f"The server asks for round {round + 1}, attempt {attempt}, but the agreed run has "
                f"{limit} rounds of {MOST_ATTEMPTS} attempts. For more rounds, raise max_epochs on the "
                "server and on clients that set it, and restart the server."
            )

    @property
    def _trainer_rounds(self) -> int:
        """Largest number of rounds that this client answers."""
        return self._given_rounds or MOST_ROUNDS

    @property
    def _given_rounds(self) -> int | None:
        """Number of rounds that the client's own Trainer allows. None if it sets none."""
        return given_rounds(self._trainer, self._federated.local.local_steps)

    def reply(self, kind: str, fields: Fields) -> Fields:
        """Answer one message, or return a refusal with its reason."""
        try:
            return self.answer(kind, fields)
        except RefusedError as error:
            rank_zero_warn(str(error))
            return refusal(error)

    def register(self, fields: Fields) -> Fields:
        """Compare settings with the server's, and return this client's public key with a proof.

        Raises:
            RefusedError: If the protocol differs, or there is no folder to keep keys in.
            ValueError: If a setting or the number of rounds differs, or a field has another length.
        """
        theirs = {name.removeprefix(_SETTINGS): v for name, v in fields.items() if name.startswith(_SETTINGS)}
        own_settings = self.settings()
        check_release(own_settings, theirs)
        if found := differences(own_settings, theirs):
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
        self._folder.check_writable()
        answer: Fields = {"partition": self._partition}
        if self._federated.server.weighting == "samples":
            answer["samples"] = self._count_samples()
        if self._federated.seed is None:
            federation, nonce = fields["federation"], fields["nonce"]
            secrets = self._folder.secrets(fields, is_registering=True)
            key = answer["key"] = secrets.public_key
            answer["proof"] = registration_proof(secrets.secret, fields["server"], federation, key, nonce)
            if rounds:
                self._folder.agree_to(rounds)
            if self._identities is not None:
                answer["signature"] = sign_key(self._identities.own, federation, key)
        return answer

    def ready(self, fields: Fields) -> Fields:
        """Report that this client can answer again after a failed round, without training.

        Raises:
            RefusedError: If its folder can't be written, or its keys are missing.
        """
        self._folder.check_keys()
        self._folder.check_writable()
        return {}

    def _count_samples(self) -> int:
        """Return the number of training samples, without held-out ones.

        Raises:
            RefusedError: If the data can't be counted. The reason is logged here and not sent to the server.
        """
        evaluated = self._federated.local.evaluate_clients
        with refused_in_private("The training samples can't be counted"):
            data = self._data()
            data.prepare_data()
            data.setup("fit")
            total = len(check_loader(data.train_dataloader()).dataset)  # type: ignore[arg-type]
        fraction = None if evaluated is None else evaluated.fraction
        return total if fraction is None else total - num_held_out(fraction, total)

    def train(self, fields: Fields) -> Fields:
        """Train, encode, and return the packed bits, or the first message of secure aggregation.

        Raises:
            RefusedError: If the client's budget is spent, with the text `DECLINED` only.
        """
        server, task = self._federated.server, RoundTask.from_bytes(fields["task"])
        self._check_round(task.round, task.attempt)
        weights = _weights(fields, task.segments, server.broadcast_bits)
        check_cohort(self._federated.planner, self.mechanism(), task)
        keys = self._folder.keys(fields)
        log = self._folder.log(f"client {fields['client']} of {keys.public().hex()}")
        client = RoundClient(fields["client"], self.mechanism(), keys, log, server.sends, self._budget)
        try:
            # checked before training, because the server sees how long training takes
            client.check(task, weights)
            message = client.encode(task, weights, self._train_update(fields, task, weights))
        except BudgetSpentError as error:  # the remaining budget stays private
            rank_zero_warn(f"round {task.round + 1}, BudgetSpentError: {error}")
            raise RefusedError(DECLINED) from error
        if server.secure_aggregation is None:
            return {"answer": client.pack(task, message)}
        digest = model_digest(weights)
        return {"secagg": self._masked_rounds.open(fields, keys, task, digest, message.symbols[0])}

    def evaluate(self, fields: Fields) -> Fields:
        """Measure the models, and return exact metrics if the settings allow it, otherwise nothing.

        Raises:
            ValueError: If the settings have no `evaluate_clients`.
            RefusedError: If it fails and the server may see exact metrics. Otherwise the failure stays here.
        """
        if self._federated.local.evaluate_clients is None:
            raise ValueError(
                "This client has no evaluate_clients, but the server asks to measure. Set evaluate_clients "
                "on both sides, or on neither."
            )
        round, weights = fields["round"], _weights(fields, (), None)
        try:
            state = self._load_state(fields)[1]
            measured = self._run_local_round(fields, round, weights, state).measured
        except RefusedError:
            raise
        except Exception as error:
            place = f"Round {round + 1}: nothing is measured: "
            refused = refuse_in_private("The measurement failed", error, place)
            if self._may_send_measurements():
                raise refused from error
            measured = {}
        if self._may_send_measurements():
            return {"measured": json.dumps(measured)}
        if self._store is not None and measured:
            self._store.append("measured", {"round": round + 1, **measured})
        return {}

    def _may_send_measurements(self) -> bool:
        """Return whether the settings let exact metrics go to the server, as in a simulation."""
        choice = self._federated.local.client_metrics
        if choice is not None:
            return choice == "shared"
        return self._is_unprotected(self._federated.planner.expected_context(self.mechanism(), 1))

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
            place, is_unprotected = f"round {task.round + 1}: ", self._is_unprotected(task.context())
            self._failures.add(task.round, error, is_unprotected, self._store)
            if is_unprotected:
                raise refuse_in_private("Training failed", error, place) from error
            rank_zero_warn(
                f"{place}{type(error).__name__}: {error}. Training failed, so a zero update is sent, because "
                "a refusal would reveal data. Fix the cause on this site, since nobody else sees it."
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
        store = self._folder.require(
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
            held_out = int.from_bytes(self._folder.secrets(fields).derived("held out")[:7], "big")
        inputs = RoundInputs.from_fields(fields, saved)
        local_round = LocalRound(self._federated, fields["client"], seed, attempt, weights, inputs, held_out)
        return local_round.run(self._module(), self._data(), self._trainer)


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
