"""CPU time of a client's message, beside Flower's FedAvg in plain torch.

    PYTHONPATH=. python benchmarks/messages.py          # 50 and 200 sites, minutes

Sites in one process, in rounds that take turns, so that other work on the machine meets both: the app of
`fedq flower init` (an MLP of 2,410 parameters on the digits, two local epochs of batches of 16) with LDPQ and
secret keys, and the same steps in plain torch. "Messages" is the CPU time of a site's thread from the
question for a task to its end, as in `fedq flower client`; "answers" that of the app in it. `--secagg` puts
the complete graph before it, whose four exchanges count as one message. The first rounds are warm-up.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import threading
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.data.models import MLP, Classifier
from lightning_fedq.flower import client_app
from lightning_fedq.flower.federated_server import Deployment
from lightning_fedq.flower.runtime import Queue, SuperNode
from lightning_fedq.flower.site import Site, respond
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.secagg import SecAgg
from tests.flower.fake_runtime import FakeRuntime, Job
from tests.flower.loop import TRAINER, LoopGrid

EPOCHS, BATCH, LR = 2, 16, 0.1


@cache
def digits() -> Any:
    """Training samples, read once: neither side's messages pay for it."""
    whole = DigitsDataModule()
    whole.setup("fit")
    return whole.train_set


class Own(pl.LightningDataModule):
    """One client's samples."""

    def __init__(self, client: int, clients: int) -> None:
        super().__init__()
        self.client, self.clients = client, clients

    def setup(self, stage: str) -> None:
        self.samples = Subset(digits(), range(self.client, len(digits()), self.clients))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=BATCH, shuffle=True)


def module() -> pl.LightningModule:
    """An app's."""
    return Classifier(MLP(in_features=64, hidden=[32]), lr=LR, momentum=0.9)


class Turns(pl.Callback):
    """One side's rounds, each when the other has had its own, and the time that messages take."""

    def __init__(self, mine: threading.Semaphore, theirs: threading.Semaphore) -> None:
        self._mine, self._theirs = mine, theirs
        self.answers, self.messages = list[float](), list[float]()

    def begin(self, *_: Any) -> None:
        """Wait for the turn."""
        self._mine.acquire()
        self.answers.append(0.0)
        self.messages.append(0.0)

    def end(self, *_: Any) -> None:
        """Hand it on."""
        self._theirs.release()

    on_train_epoch_start = begin
    on_train_epoch_end = end


class SiteGrid(LoopGrid):
    """Sites in one process: each message is pulled, answered and pushed as by `fedq flower client`.

    Args:
        turns: Is told the CPU time of the thread that answers: with the transport, and the app alone.
    """

    def __init__(self, app: ClientApp, homes: list[Path | None], turns: Turns) -> None:
        self._turns, self._reply = turns, None
        super().__init__([self._through_a_site] * len(homes), homes)  # type: ignore[list-item]
        self._app, self._runtime = app, FakeRuntime()
        self._queue = Queue(SuperNode(self._runtime.address, b"secret"))

    def _through_a_site(self, message: Message, context: Context) -> Message:
        self._runtime.jobs.append(Job(message.metadata.message_type, message.content))
        site = Site(self._timed, None, dict(context.node_config))  # type: ignore[arg-type]
        began = time.thread_time()
        delivery = self._queue.next()
        assert delivery is not None
        with delivery.keep_alive():
            respond(site, delivery)
        if self._turns.messages:
            self._turns.messages[-1] += time.thread_time() - began
        return Message(self._reply, reply_to=message)

    def _timed(self, message: Message, context: Context) -> Message:
        began = time.thread_time()
        reply = self._app(message, context)
        if self._turns.answers:
            self._turns.answers[-1] += time.thread_time() - began
        self._reply = reply.content
        return reply


def ours(clients: int, rounds: int, turns: Turns, secagg: bool, folder: Path) -> None:
    """Train by `client_app` and the server of `server_app`."""

    def federated() -> Federated:
        masked = SecAgg() if secagg else None
        return Federated(
            LDPQ(epsilon_per_coordinate=4.0),
            num_clients=clients,
            local_epochs=EPOCHS,
            secure_aggregation=masked,
        )

    app = client_app(module, lambda c: Own(int(c.node_config["partition-id"]), clients), federated())
    homes = [folder / f"client-{client}" for client in range(clients)]
    trainer = {**TRAINER, "max_epochs": rounds, "callbacks": [turns]}
    deployment = Deployment(module, federated(), None, trainer, folder / "server", 600.0, 600.0)
    deployment.run(SiteGrid(app, homes, turns))


def flower(clients: int, rounds: int, turns: Turns) -> None:
    """Train by Flower's FedAvg and plain torch."""
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        own = Own(int(context.node_config["partition-id"]), clients)
        own.setup("fit")
        model = MLP(in_features=64, hidden=[32])
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        for _ in range(EPOCHS):
            for x, y in own.train_dataloader():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        sizes = MetricRecord({"num-examples": len(own.samples)})
        return Message(
            RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": sizes}), reply_to=message
        )

    def evaluated(server_round: int, arrays: ArrayRecord) -> None:
        if server_round:
            turns.end()
        if server_round < rounds:
            turns.begin()

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    start = ArrayRecord(MLP(in_features=64, hidden=[32]).state_dict())
    grid = SiteGrid(app, [None] * clients, turns)
    strategy.start(grid, start, num_rounds=rounds, evaluate_fn=evaluated)


def main() -> None:
    """Print milliseconds a message, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--secagg", action="store_true", help="behind the complete graph")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("flwr", "pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rounds = given.rounds + given.warmup
    for clients in given.clients:
        first, second = threading.Semaphore(1), threading.Semaphore(0)
        here, there = Turns(first, second), Turns(second, first)
        with tempfile.TemporaryDirectory() as folder:
            other = threading.Thread(target=flower, args=(clients, rounds, there))
            other.start()
            ours(clients, rounds, here, given.secagg, Path(folder))
            other.join()
        for what in ("messages", "answers"):
            pairs = list(zip(getattr(here, what), getattr(there, what), strict=True))[given.warmup :]
            mine, flowers = (1e3 / clients * statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(one / two for one, two in pairs)
            shown = f"ours {mine:.2f} ms, Flower {flowers:.2f} ms, ratio {ratio:.2f}"
            print(f"{clients} sites, {what}: {shown}", flush=True)


if __name__ == "__main__":
    main()
