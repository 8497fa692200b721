"""A federation in one process: Flower's own `ClientApp`s behind a `Grid` that calls them at once."""

from functools import cache

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch.utils.data import DataLoader, Subset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import IID
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.data.models import MLP, Classifier
from lightning_fedq.flower import client_app
from lightning_fedq.flower.federated_server import Deployment
from lightning_fedq.rounds import RoundPlan

CLIENTS, SEED = 4, 5


class Net(Classifier):
    """Momentum, and a schedule by rounds: what has to be the same on a client of its own."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def module():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Net(MLP(in_features=64, hidden=[16]), lr=0.1)


@cache
def loaded():
    return DigitsDataModule().load()


class Digits(DigitsDataModule):
    """200 samples, so that a round is short."""

    def load(self):
        return loaded()

    def setup(self, stage):
        super().setup(stage)
        if hasattr(self, "train_set"):
            self.train_set = Subset(self.train_set, range(200))


class OwnDigits(pl.LightningDataModule):
    """What one client holds, dealt out as the simulation deals."""

    def __init__(self, client: int) -> None:
        super().__init__()
        self.client = client

    def setup(self, stage):
        whole = Digits(batch_size=16)
        whole.setup("fit")
        seed = RoundPlan(0, (), frozenset(), SEED).stream_seed("partition")
        generator = torch.Generator().manual_seed(seed)
        parts = IID().split(None, len(whole.train_set), CLIENTS, generator)
        self.samples = Subset(whole.train_set, parts[self.client].tolist())

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=16, shuffle=True)


def own_digits(context):
    return OwnDigits(int(context.node_config["partition-id"]))


class LoopGrid(Grid):
    """Delivers each message at once.

    Args:
        apps: The client apps; node 100 + i is the i-th.
        homes: A folder for each, or None.
        tamper: Changes a reply on its way back: `(kind, client, reply)` to a reply, or None for silence.
    """

    def __init__(self, apps, homes, tamper=lambda kind, client, reply: reply):
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.apps, self.tamper, self.sent = apps, tamper, 0
        self.contexts = {}
        for client, home in enumerate(homes):
            config = {"partition-id": client} | ({} if home is None else {"fedq-home": str(home)})
            self.contexts[100 + client] = Context(1, 100 + client, config, RecordDict(), {})
        self.log = []
        self._replies = {}

    run = set_run = create_message = get_nodes = None  # nothing here asks for them

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            self.sent += 1
            numbers.append(f"message {self.sent}")
            message.metadata.__dict__["_message_id"] = numbers[-1]
            node = message.metadata.dst_node_id
            kind = message.metadata.message_type.removeprefix("query.")
            if kind == "train" and "fedq" in message.content:
                kind = str(message.content.config_records["fedq"].get("asked", kind))
            self.log.append((kind, node - 100))
            try:
                reply = self.apps[node - 100](message, self.contexts[node])
            except Exception as error:
                reply = Message(Error(1, str(error)), reply_to=message)
            reply = self.tamper(kind, node - 100, reply)
            if reply is not None:
                self._replies[numbers[-1]] = reply
        return numbers

    def pull_messages(self, message_ids):
        return [self._replies.pop(number) for number in list(message_ids) if number in self._replies]


TRAINER = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def federated(mechanism, **options):
    given = {"seed": SEED, "clients_per_step": 1, "num_clients": CLIENTS, **options}
    return Federated(mechanism, **given)


def simulate(fed, rounds, **options):
    callbacks = [fed, *options.pop("callbacks", [])]
    model = options.pop("module", None) or module()
    given = {**TRAINER, "max_epochs": rounds, "enable_checkpointing": False, **options}
    trainer = pl.Trainer(**given, callbacks=callbacks)
    trainer.fit(model, datamodule=Digits(batch_size=16))
    return fed


def deployment(fed, rounds, folder, **options):
    make = options.pop("module", module)
    timeout, patience = options.pop("timeout", 0.2), options.pop("patience", 2.0)
    data, directory = lambda: Digits(batch_size=16), options.pop("directory", None)
    given = {**TRAINER, "max_epochs": rounds, "callbacks": [], **options}
    return Deployment(make, fed, data, given, folder / "server", timeout, patience, directory)


def clients(make, folder, home=True, **options):
    build = options.pop("module", module)
    apps = [client_app(build, own_digits, make(), **options) for _ in range(CLIENTS)]
    return apps, [folder / f"client-{client}" if home else None for client in range(CLIENTS)]


def deploy(make, rounds, folder, *tamper, theirs=None, home=True, **ours):
    """Run a deployment whose two sides have one module. Returns its server, with its Trainer and grid."""
    apps = clients(make, folder, home, module=ours.get("module", module), trainer=theirs)
    grid = LoopGrid(*apps, *tamper)
    trainer, server = deployment(make(), rounds, folder, **ours).run(grid)
    server.trainer, server.grid = trainer, grid
    return server
