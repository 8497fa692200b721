"""The features of the ranks' table over Flower: the same fit in one process and by real clients."""

import torch
from torch.utils.data import DataLoader, Subset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import IID
from lightning_fedq.flower import client_app
from lightning_fedq.flower.federated_server import Deployment
from lightning_fedq.rounds import RoundPlan
from tests.flower.loop import LoopGrid
from tests.training.ranks_features import CLIENTS, Data, Feature

ROUNDS = 3
OF_THE_SERVER = ("enable_checkpointing", "logger", "log_every_n_steps")


class Own(pl.LightningDataModule):
    """What one client holds, dealt out as one process deals."""

    def __init__(self, feature: Feature, client: int) -> None:
        super().__init__()
        self.feature, self.client = feature, client

    def setup(self, stage):
        whole = self.feature.data()
        if not isinstance(whole, Data):
            loader = whole.train_dataloader()
            if isinstance(loader, DataLoader):  # of data that are opened by turn
                self.loader = DataLoader(loader.dataset.datasets[self.client], batch_size=4, shuffle=True)
                return
            given = loader.loaders[self.client]
            self.loader = given if isinstance(given, DataLoader) else DataLoader(given, batch_size=4)
            return
        samples, partition = whole._set(1, 49), self.feature.federated.get("partition", IID())
        seed = RoundPlan(0, (), frozenset(), 5).stream_seed("partition")
        labels = samples.tensors[1]
        parts = partition.split(labels, len(samples), CLIENTS, torch.Generator().manual_seed(seed))
        options = {"batch_size": 4, "shuffle": True, **whole.options}
        self.loader = DataLoader(Subset(samples, parts[self.client].tolist()), **options)

    def train_dataloader(self):
        return self.loader


def findings(server, trainer):
    """What real clients must end with as one process does."""
    engine = server.engine
    assert engine is not None
    return {
        "weights": engine.weights.tolist(),
        "ranges": [engine.ranges.center.tolist(), engine.ranges.radius.tolist()],
        "ledger": [engine.ledger.charges.tolist(), engine.ledger.rounds],
        "records": [
            [r.round, r.cohort_size, r.num_received, r.uplink_bits, r.aborted] for r in server.records
        ],
        "measured": [
            [one.round, one.plain() if server.local.client_metrics == "shared" else None]
            for one in server.client_evaluations
        ],
        "validation": {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("val_")},
    }


def settings(feature):
    """One client at a time, as real ones train: stacks have other last bits. No made up dropouts."""
    given = {"seed": 5, **feature.federated, "clients_per_step": 1}
    if "secure_aggregation" in given:
        given.pop("dropout_probability", None)
    return Federated(feature.mechanism, CLIENTS, **given)


def module(feature):
    def make():
        pl.seed_everything(7, verbose=False)
        return feature.module()

    return make


def arguments(feature, folder, rounds):
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    plain = {"max_epochs": rounds, "accelerator": "cpu", "num_sanity_val_steps": 0}
    return {**plain, **dict.fromkeys(quiet, False), **feature.trainer(folder)}


def in_one_process(feature, folder):
    resume = {}
    for part in range(1 if feature.then is None else 2):
        fed, made = settings(feature), module(feature)()
        callbacks = [*feature.before(folder), fed, *feature.callbacks(folder)]
        trainer = pl.Trainer(**arguments(feature, folder, ROUNDS + part), callbacks=callbacks)
        trainer.fit(made, datamodule=feature.data(), **resume)
        resume = {} if feature.then is None else feature.then(folder)
    return findings(fed, trainer)


def over_flower(feature, folder):
    for part in range(1 if feature.then is None else 2):
        rounds = ROUNDS + part
        apps = []
        for client in range(CLIENTS):
            own = folder / f"trainer-{client}"
            callbacks = [*feature.before(own), *feature.callbacks(own)]
            given = {k: v for k, v in arguments(feature, own, rounds).items() if k not in OF_THE_SERVER}
            apps.append(
                client_app(
                    module(feature),
                    lambda context: Own(feature, int(context.node_config["partition-id"])),
                    settings(feature),
                    trainer={**given, "callbacks": callbacks},
                )
            )
        grid = LoopGrid(apps, [folder / f"client-{client}" for client in range(CLIENTS)])
        given = arguments(feature, folder, rounds)
        given.pop("enable_checkpointing")  # its server keeps checkpoints of its own
        given["callbacks"] = [*feature.before(folder), *feature.callbacks(folder)]
        trainer, server = Deployment(
            module(feature), settings(feature), feature.data, given, folder / "server", 30.0, 2.0
        ).run(grid)
    return findings(server, trainer)
