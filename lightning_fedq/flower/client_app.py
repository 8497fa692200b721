"""Flower's `ClientApp` of a client that trains a `LightningModule` on its own data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.flower.failures import Failures
from lightning_fedq.flower.records import from_record, to_record
from lightning_fedq.flower.remote_client import ClientConfig, RemoteClient
from lightning_fedq.flower.settings import (
    QUESTIONS,
    check_client_callbacks,
    check_deployable,
    check_identities,
    make_client_budget,
)
from lightning_fedq.flower.store import Store
from lightning_fedq.flower.training_description import callbacks_in
from lightning_fedq.keys.party_keys import Identities
from lightning_fedq.privacy.target import PrivacyTarget


class _App(ClientApp):  # type: ignore[misc]
    """A client's app, whose process can tell its site which trainings have failed."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = Failures()


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
            number of rounds, as on the server; with it no later round is answered, else none after those
            that the server has named at registration.
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
        make_client_budget(federated, budget, identities is not None)
    check_client_callbacks(callbacks_in(trainer or {}), federated)
    app = _App()
    failures, anew = app.failures, set[str]()

    def reply(kind: str, message: Message, context: Context) -> Message:
        where = context.node_config.get("fedq-home") if home is None else home(context)
        own = ClientConfig(
            federated,
            None if where is None else Store(Path(str(where))),
            int(context.node_config.get("partition-id", -1)),
            None if identities is None else identities(context),
            budget(context) if callable(budget) else budget,
            failures,
            anew,
        )
        client = RemoteClient(own, module, lambda: data(context), trainer or {})
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
