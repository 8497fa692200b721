"""Cures that ranks name, as rank 0 of a group of one sees them."""

from unittest import mock

import torchmetrics

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD, ByzantineClients
from lightning_fedq.training.ranks import check_same_on_all_ranks
from tests.cures.rows import fed, fit, row
from tests.cures.rows_data import Stream, of
from tests.digits_run import Classifier
from tests.training.test_distributed_clients import Meeting, on, start


class Alone(Meeting):
    """A group of one rank."""

    is_lost = False

    def __init__(self) -> None:
        super().__init__(0)
        self.size = 1

    def gather(self, obj, place):
        return [obj]

    def add(self, tensor):
        pass

    def share(self, tensor):
        pass


def among(*callbacks, **settings):
    """A fit as rank 0 of a group."""

    def joined(trainer):
        trainer.strategy.group = Alone()
        return trainer.strategy

    with mock.patch("lightning_fedq.training.population.get_rank_strategy", joined):
        return one(*callbacks, **settings)


def one(*callbacks, **settings):
    """The same fit in one process."""
    return fit(*callbacks, strategy="fedq_clients", devices=1, **settings)


class Counts(Classifier):
    """Logs a metric object or its values, in training or in validation."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.accuracy = how, torchmetrics.Accuracy("multiclass", num_classes=10)

    def training_step(self, batch, batch_idx):
        if self.how != "validation":
            value = self.accuracy(self.backbone(batch[0]), batch[1])
            self.log("train_acc", self.accuracy if self.how == "object" else value)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.how == "validation":
            self.accuracy(self.backbone(batch[0]), batch[1])
            self.log("accuracy", self.accuracy)


def streams():
    return of(*map(Stream, range(4)), batch_size=5)


def compared(theirs):
    """Rank 1, of a group whose rank 0 has this mechanism."""
    group = Meeting(1)
    group.broadcast = lambda facts, place: {"mechanism": theirs}
    check_same_on_all_ranks(group, {"mechanism": "LDPQ"})


row(
    "keeps the accounts of all clients in one process. Use devices=1, or leave it out with",
    lambda: among(fed(), DPSGD(1.0, 1.0, delta=1e-4, seed=1)),
    lambda: one(fed(), DPSGD(1.0, 1.0, delta=1e-4, seed=1)),
    lambda: among(fed()),
)
row(
    "The data of clients {} are streams, which every rank would read separately. Use devices=1, or",
    lambda: among(fed(local_steps=2), data=streams()),
    lambda: one(fed(local_steps=2), data=streams()),
    lambda: among(fed(local_steps=2)),
)
row(
    "Callbacks that change updates, and Byzantine clients, need all clients in one process. Leave them",
    lambda: among(fed(), ByzantineClients(0.25, "sign_flip")),
    lambda: among(fed()),
    lambda: one(fed(), ByzantineClients(0.25, "sign_flip")),
)
row(
    "{} is a metric object that clients update in training, but each rank has its own copy. Log the",
    lambda: among(fed(), module=Counts("object")),
    lambda: among(fed(), module=Counts("value")),
    lambda: among(fed(), module=Counts("validation")),
    lambda: one(fed(), module=Counts("object")),
)
row(
    "samples of client {}, but rank 0 has {}. Start all ranks with the same data",
    lambda: start([4, 5], [4, 6]),
    lambda: start([4, 6], [4, 6]),
)
row(". Start all ranks with the same program,", lambda: compared("CorBin"), lambda: compared("LDPQ"))
row(
    "has no device, because the Trainer has devices={}. Set devices to the number",
    lambda: on("cuda", local_rank=2).root_device,
    lambda: on("cuda", local_rank=1).root_device,
    lambda: pl.Trainer(strategy="fedq_clients", devices="auto", logger=False).strategy.root_device,
)
