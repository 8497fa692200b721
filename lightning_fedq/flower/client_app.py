"""Flower's `ClientApp` of a client that trains a `LightningModule` on its own data."""

from collections.abc import Callable
from functools import partial
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
    """Make Flower's `ClientApp` of one client.

    Args:
        module: Function that makes the module. Its weights are overwritten with the server's.
        data: Function that makes the client's data module from Flower's context, whose `node_config` has the
            options of the SuperNode. The client trains on its `train_dataloader` only.
        federated: Settings of the federation, equal to those of the server and of the simulation.
        trainer: Arguments of the client's `Trainer`, such as `{"accelerator": "gpu"}`. Arguments that affect
            training (clipping, accumulation, limits, precision, callbacks that see batches) must equal the
            server's, and both sides compare them by name. A client leaves out callbacks of the whole fit
            (budgets, checkpoints, averages), because the server runs them. A privacy target over the run
            needs `max_epochs`, the number of rounds, as on the server. The client then answers no later
            round. Without it, the server names the number of rounds at registration.
        home: Function that returns the client's folder for Flower's context. None takes `fedq-home` of the
            node's configuration.
        identities: Function that returns the client's signing key and all clients' verification keys. The
            client then accepts keys of its peers only if they are signed, and does not trust the server to
            relay them. `SecAgg(active=True)` needs them.
        budget: Privacy budget of this client over all that it sends while it keeps its folder, or a function
            that makes it. The client encodes no message that would exceed the budget. It then tells the
            server "declined", and the server continues without this client.

    Raises:
        ValueError: If a setting is for simulations only, identities are missing, or the client can't know
            what its budget covers.
    """
    check_deployable(federated)
    check_identities(federated, identities is not None, "client_app(identities=...)")
    if isinstance(budget, PrivacyTarget):
        make_client_budget(federated, budget, identities is not None)
    check_client_callbacks(callbacks_in(trainer or {}))
    app = ClientApp()
    app.failures = failures = Failures()  # the site reports failed trainings of its process

    def reply(kind: str, message: Message, context: Context) -> Message:
        """Answer a message by a new `RemoteClient`, whose state is in the client's folder."""
        folder = context.node_config.get("fedq-home") if home is None else home(context)
        config = ClientConfig(
            federated,
            None if folder is None else Store(Path(str(folder))),
            int(context.node_config.get("partition-id", -1)),
            None if identities is None else identities(context),
            budget(context) if callable(budget) else budget,
            failures,
        )
        client = RemoteClient(config, module, lambda: data(context), trainer or {})
        return Message(to_record(client.reply(kind, from_record(message.content))), reply_to=message)

    app.train()(partial(reply, "train"))
    for kind in QUESTIONS:
        app.query(kind)(partial(reply, kind))
    return app
