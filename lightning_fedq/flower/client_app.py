"""Flower's `ClientApp` of a client that trains a `LightningModule` on its own data."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from lightning_fedq._lightning import pl, rank_zero_warn
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.states import State
from lightning_fedq.data.generator_turns import own_draws
from lightning_fedq.data.held_out import num_held_out
from lightning_fedq.flower.kept import NEVER, KeptState
from lightning_fedq.flower.local_round import LocalRound, Told, check_counted, keeps_more
from lightning_fedq.flower.records import Fields, from_record, to_record
from lightning_fedq.flower.remote_client import Measured, Own, RemoteClient
from lightning_fedq.flower.settings import (
    TRAVELS,
    RefusedError,
    check_client_callbacks,
    check_deployable,
    check_identities,
    deployed_mechanism,
    fingerprint,
    keeps_state,
    of_each_client,
    own_budget,
)
from lightning_fedq.flower.store import Store
from lightning_fedq.flower.training_words import callbacks_in, training_words
from lightning_fedq.keys.party_keys import Identities
from lightning_fedq.mechanisms.interface import Mechanism, RoundContext
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import RoundTask
from lightning_fedq.training.client_metrics import protecting_samples

QUESTIONS = ("register", "evaluate", "shares", "masked", "confirm", "unmask")
"""What a client is asked beside training, each a message of Flower's type `query.NAME`."""


class DeployedClient(RemoteClient):
    """A client that trains with a `Trainer` of its own.

    Args:
        module: Makes the client's own module.
        data: Makes the client's own data.
        trainer: Arguments of its `Trainer`.
    """

    def __init__(
        self,
        own: Own,
        module: Callable[[], pl.LightningModule],
        data: Callable[[], pl.LightningDataModule],
        trainer: dict[str, Any],
    ) -> None:
        super().__init__(own)
        self._module, self._data, self._trainer = module, data, trainer
        self._told: Fields = {}

    def settings(self) -> dict[str, str]:
        words = fingerprint(self._federated, self._module(), self._trainer.get("max_epochs"))
        return {**words, **training_words(self._trainer, self._module), **self._rehearsed()}

    def _rehearsed(self) -> dict[str, str]:
        """Try the training, and count what travels, where first steps may find more than the layers say.

        A server has no data to try, and counts by the layers alone. Where the data are not to be had yet, nor
        does this client.

        Raises:
            RefusedError: If the training fails on this client's smallest batch, or a layer counts batches.
        """
        module, local, nothing = self._module(), self._federated.local, torch.zeros(0)
        check_counted(module, local)
        counts = local.buffers == "share" and keeps_more(module)
        try:
            with own_draws():
                local_round = LocalRound(self._federated, 0, 0, None, nothing)
                found = local_round.run(module, self._data(), self._trainer)
        except RefusedError:
            raise
        except Exception as error:  # of the user's data, which say nothing to the server here
            needs = ["DPSGD"] if any(map(of_each_client, callbacks_in(self._trainer))) else []
            needs += [] if local.evaluate_clients is None else ["evaluate_clients"]
            if needs:
                rank_zero_warn(str(error))
                words = f"{' and '.join(needs)} can't work here; the client's own log says why"
                raise RefusedError(words) from error
            if counts:
                rank_zero_warn(f"what travels was not tried out: {type(error).__name__}: {error}")
            return {}
        return {TRAVELS: str(sum(found.segments))} if counts else {}

    def mechanism(self) -> Mechanism:
        # it is set to the privacy target, where there is one
        if self._federated.kept_target is None:
            return self._federated.mechanism
        return deployed_mechanism(self._federated, self._module(), self._trainer.get("max_epochs"))

    def num_samples(self) -> int:
        data = self._data()
        data.prepare_data()
        data.setup("fit")
        held, evaluated = len(data.train_dataloader().dataset), self._federated.local.evaluate_clients
        fraction = None if evaluated is None else evaluated.fraction
        return held if fraction is None else held - num_held_out(fraction, held)

    def told(self, fields: Fields) -> None:
        # which of its rounds counted, and what the server steps with
        self._told = fields

    def update(self, number: int, task: RoundTask, weights: Tensor) -> Tensor:
        states, kept = self._settled(number)
        at = task.round, task.attempt
        try:
            local = self._locally(number, task, weights, kept)
        except Exception:
            if states is not None:  # a zero update may be sent in its place, and be counted
                states.keep(at, kept)
            raise
        if states is not None:
            states.keep(at, local.state)
        return local.update

    def measured(self, number: int, round: int, weights: Tensor) -> Measured:
        _, kept = self._settled(number)
        return self._locally(number, round, weights, kept).measured

    def _settled(self, number: int) -> tuple[KeptState | None, State]:
        """State that the client goes on with, and its place. None where it keeps nothing."""
        fields, seed = self._told, self._federated.seed
        if not keeps_state(self._federated.local, callbacks_in(self._trainer)):
            return None, State()
        of = f"the federation of seed {seed}" if seed is not None else fields["federation"].hex()[:16]
        if self._store is None:
            raise RefusedError(
                "this federation's clients keep something for themselves (local=, buffers='local', an "
                "algorithm with memory, DPSGD's account) in a folder of their own; start the SuperNode with "
                "--node-config 'fedq-home=\"/a/folder\"', or give client_app(home=...)"
            )
        states = KeptState(self._store, f"client {number} of {of}")
        counted = [int(one) for one in fields.get("counted", NEVER)]
        return states, states.settle((counted[0], counted[1]) if len(counted) == 2 else NEVER)

    def _locally(self, number: int, at: RoundTask | int, weights: Tensor, kept: State) -> LocalRound:
        """Train in a round, or measure after it. What is held out is the same in every round."""
        seed = held_out = self._federated.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(7), "big")
            held_out = int.from_bytes(self._own_secrets(self._told).derived("held out")[:7], "big")
        told = Told.of(self._told, kept)
        local_round = LocalRound(self._federated, number, seed, at, weights, told, held_out)
        return local_round.run(self._module(), self._data(), self._trainer)

    def _says_all(self, context: RoundContext) -> bool:
        # nor of single samples
        return super()._says_all(context) and not protecting_samples(callbacks_in(self._trainer))


def client_app(
    module: Callable[[], pl.LightningModule],
    data: Callable[[Context], pl.LightningDataModule],
    federated: Federated,
    *,
    trainer: dict[str, Any] | None = None,
    home: Callable[[Context], Path] | None = None,
    identities: Callable[[Context], Identities] | None = None,
    budget: Callable[[Context], PrivacyTarget] | PrivacyTarget | None = None,
) -> ClientApp:
    """Flower's `ClientApp` of one client.

    Args:
        module: Makes the module; its weights are overwritten with the server's.
        data: Makes the client's own data, whose `train_dataloader` is all that is trained on. Given Flower's
            context, where `node_config` says what a SuperNode was started with.
        federated: The same settings as the server's and the simulation's.
        trainer: Arguments of the client's `Trainer`, such as `{"accelerator": "gpu"}`. What acts on training
            (clipping, accumulation, limits, precision, callbacks that look at batches) must be the server's,
            too: the two are compared by name. Callbacks of the whole fit (budgets, checkpoints, averages) are
            the server's, and a client leaves them out. A privacy target over the run needs `max_epochs`, the
            number of rounds, as on the server.
        home: The client's folder; None takes `fedq-home` of the node's configuration.
        identities: The client's signing key and everybody's verification keys; with them a client accepts the
            keys of those it shares bits with if they are signed, and does not trust the server to relay them.
            `SecAgg(active=True)` needs them.
        budget: The client's own, over all that it sends while it keeps its folder, or what makes it of
            Flower's context. A message that would overspend is not encoded, whatever the server asks; the
            server is told "declined", and goes on without this client.

    Raises:
        ValueError: If a setting is for simulations only, identities are missing, or the client can't know
            what its budget is about.
    """
    check_deployable(federated)
    check_identities(federated, identities is not None, "client_app(identities=...)")
    if isinstance(budget, PrivacyTarget):
        own_budget(federated, budget, identities is not None)
    check_client_callbacks(callbacks_in(trainer or {}), federated)
    app = ClientApp()

    def reply(kind: str, message: Message, context: Context) -> Message:
        where = context.node_config.get("fedq-home") if home is None else home(context)
        own = Own(
            federated,
            None if where is None else Store(Path(str(where))),
            int(context.node_config.get("partition-id", -1)),
            None if identities is None else identities(context),
            budget(context) if callable(budget) else budget,
        )
        client = DeployedClient(own, module, lambda: data(context), trainer or {})
        return Message(to_record(client.reply(kind, from_record(message.content))), reply_to=message)

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        return reply("train", message, context)

    def asked(kind: str) -> None:
        @app.query(kind)  # type: ignore[untyped-decorator]
        def query(message: Message, context: Context) -> Message:
            return reply(kind, message, context)

    for kind in QUESTIONS:
        asked(kind)
    return app
