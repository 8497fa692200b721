"""Two federations that differ in one client's data, and what others could see of it.

`federate` trains a module through the public interface only: a Trainer, the callback, a data module. The
mechanism records the exact update of every client that it is asked to encode and sends zeros, so that the
global model stays what it was and every other client's update must be the same in all rounds. `share` trains
the same module in the way that isolates nobody, which a shape of memory must not survive: it shows that a row
of the table can fail.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data.partition import Partition
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.mechanisms.interface import Adversary, PrivacyClaim
from lightning_fedq.privacy.losses import LaplaceLoss

CLIENTS, SAMPLES, BATCH, ROUNDS = 4, 6, 2, 2
"""Three batches a client: an odd number, so that what is done on every second batch leaves something."""


@dataclass(frozen=True)
class Records(FedAvg):
    """Keeps the updates that it is asked to encode, and sends zeros: any claim about its messages holds."""

    updates: ClassVar[dict[tuple[int, int], Tensor]] = {}

    def encode(self, update, context, rand):
        for client, row in zip(rand.clients, update.reshape(len(rand.clients), -1), strict=True):
            self.updates[context.round, client] = row.detach().clone()
        return super().encode(torch.zeros_like(update), context, rand)

    def claims(self, context):
        zeros = ("every message is zero",)
        return tuple(PrivacyClaim(who, LaplaceLoss(1.0), 1, assumptions=zeros) for who in Adversary)


@dataclass(frozen=True)
class Blocks(Partition):
    """Client 0 holds the first samples, client 1 the next ones."""

    needs_labels = False

    def split(self, labels, num_samples, num_clients, generator):
        return list(torch.arange(num_samples).chunk(num_clients))


class Samples(pl.LightningDataModule):
    """A regression of four clients. Losses are below 1, and those of the one with other data are above 4."""

    def __init__(self, changed: int | None) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(3)
        inputs = torch.rand(CLIENTS * SAMPLES, 3, generator=draws) - 0.5
        targets = inputs.sum(1, keepdim=True)
        if changed is not None:
            own = slice(SAMPLES * changed, SAMPLES * (changed + 1))
            inputs[own], targets[own] = 1.3 * inputs[own] + 0.2, 4.0 - targets[own]
        self.inputs, self.targets = inputs, targets
        self.begin()

    def begin(self):
        """Where a row makes what its data module keeps."""

    def train_set(self):
        return TensorDataset(self.inputs, self.targets)

    def train_dataloader(self):
        return DataLoader(self.train_set(), batch_size=BATCH, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.eye(3), torch.ones(3, 1)), batch_size=3)


class Shape(pl.LightningModule):
    """A linear regression. A row of the table is a subclass that keeps something in its own way."""

    refused: ClassVar[str] = ""
    """What an error must say where the shape may be refused instead of isolated. "" where it may not."""
    data: ClassVar[type[Samples]] = Samples

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)
        self.begin()

    @classmethod
    def forget(cls):
        """Where a row resets what would outlive a run: classes, globals, files."""

    def begin(self):
        """Where a row makes what it keeps."""

    def callbacks(self):
        return ()

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def scaled(self, loss):
        """The loss to be minimised: where most rows use what they keep."""
        return loss

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return self.scaled(loss)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def together(rows):
    """A shape that keeps what all of these keep: each is a part of it and scales a loss of its own."""

    class Together(Shape):
        def begin(self):
            self.parts = nn.ModuleList([row() for row in rows])

        def loss(self, batch):
            parts = self.parts
            return torch.stack([part.loss(batch) for part in parts]).mean()

        def training_step(self, batch, batch_idx):
            parts = self.parts
            return torch.stack([part.scaled(part.loss(batch)) for part in parts]).sum()

    return Together


def is_plain(row):
    """Does it differ by nothing but what it keeps in itself, and how it scales its loss?"""
    kinds = row.__mro__[: row.__mro__.index(Shape)]
    own = {name for kind in kinds for name in vars(kind)} - set(vars(object)) - {"begin", "scaled", "loss"}
    known = {*dir(pl.LightningModule), "callbacks", "data", "forget"}
    return not row.refused and all(name.startswith("__") or name not in known for name in own)


class Book(pl.loggers.Logger):
    """Keeps what is logged."""

    name, version = "book", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, {name: v for name, v in metrics.items() if "seconds" not in name}))

    def log_hyperparams(self, *args, **kwargs):
        """Nothing of a training."""


class Looks(pl.Callback):
    """Notes what a callback of the outer fit sees after each round."""

    def __init__(self) -> None:
        self.seen = []

    def on_validation_end(self, trainer, pl_module):
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        state = copy.deepcopy(pl_module.state_dict())
        self.seen.append((metrics, state, trainer.global_step, trainer.should_stop))


class World(NamedTuple):
    """Exact updates by round and client, and everything that can be seen without looking at updates."""

    updates: dict[tuple[int, int], Tensor]
    visible: dict[str, Any]
    side_by_side: int = 1


def _visible(trainer, module, looks, book, folder):
    trainer.save_checkpoint(path := folder / "end.ckpt")
    return {
        "rounds": trainer.current_epoch,
        "callbacks": looks.seen,
        "logger": book.rows,
        "checkpoint": torch.load(path, weights_only=False),
        "module": dict(module.state_dict()),
        "files": {one.name: one.read_text() for one in folder.glob("*.txt")},
    }


def _trainer(folder, *callbacks, **settings):
    return pl.Trainer(
        callbacks=list(callbacks),
        accelerator="cpu",
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        **settings,
    )


def federate(row, changed, clients_per_step, folder):
    """Train a row federated, with isolation promised.

    Args:
        row: Its class.
        changed: Client whose data are others; None for nobody.
        clients_per_step: Of `Federated`.
        folder: For a checkpoint.
    """
    Records.updates.clear()
    row.forget()
    module, looks, book = row(), Looks(), Book()
    fed = Federated(
        Records(),
        CLIENTS,
        seed=1,
        partition=Blocks(),
        clients_per_step=clients_per_step,
        client_metrics="local",
        diagnostics=False,
    )
    trainer = _trainer(folder, *module.callbacks(), fed, looks, max_epochs=ROUNDS, logger=book)
    trainer.fit(module, datamodule=row.data(changed))
    seen = _visible(trainer, module, looks, book, folder)
    return World(dict(Records.updates), seen, fed.clients_per_step_chosen)


class _InTurn(Sampler[int]):
    """Epoch by epoch the samples of the next client."""

    def __init__(self) -> None:
        self.trainer = None

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        start = SAMPLES * (self.trainer.current_epoch % CLIENTS)
        return iter(range(start, start + SAMPLES))


class _NoWalls(pl.Callback):
    """Puts the global weights back into the trained parameters between clients, and nothing else."""

    def __init__(self) -> None:
        self.updates = {}

    def on_fit_start(self, trainer, pl_module):
        self.parameters = [p for p in pl_module.parameters() if p.requires_grad]
        self.start = [parameter.detach().clone() for parameter in self.parameters]

    def on_train_epoch_end(self, trainer, pl_module):
        place = divmod(trainer.current_epoch, CLIENTS)
        self.updates[place] = torch.cat([p.detach().flatten() for p in self.parameters])
        for parameter, start in zip(self.parameters, self.start, strict=True):
            parameter.data.copy_(start)


def share(row, changed, folder):
    """Train all clients of a row in one ordinary fit, one after the other, from the same weights."""
    row.forget()
    module, looks, book, walls = row(), Looks(), Book(), _NoWalls()
    rounds = CLIENTS * ROUNDS
    trainer = _trainer(
        folder,
        *module.callbacks(),
        walls,
        looks,
        max_epochs=rounds,
        logger=book,
        check_val_every_n_epoch=CLIENTS,
    )
    data, sampler = row.data(changed), _InTurn()
    sampler.trainer = trainer
    loader = data.train_dataloader()
    data.train_dataloader = lambda: DataLoader(
        loader.dataset, batch_size=BATCH, sampler=sampler, collate_fn=loader.collate_fn
    )
    trainer.fit(module, datamodule=data)
    own = {"train_loss", "val_loss"}  # what every client logs
    book.rows = [(step, {name: v for name, v in row.items() if name not in own}) for step, row in book.rows]
    looks.seen = [{name: v for name, v in seen[0].items() if name not in own} for seen in looks.seen]
    return World(walls.updates, _visible(trainer, module, looks, book, folder))


_PER_RUN = {"seconds", "id"}
"""A record's time and a ledger's name."""


def difference(one, other, path=""):
    """The first place in which two values differ, in words; "" where they are equal bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        same = same and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
        return "" if same else f"{path}: {one} and {other}"
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if list(one) != list(other):
            return f"{path}: {list(one)} and {list(other)}"
        parts = [difference(one[key], other[key], f"{path}/{key}") for key in one if key not in _PER_RUN]
        return next(filter(None, parts), "")
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{path}: {len(one)} and {len(other)} entries"
        parts = [difference(a, b, f"{path}/{n}") for n, (a, b) in enumerate(zip(one, other, strict=True))]
        return next(filter(None, parts), "")
    if hasattr(one, "__dict__") and type(one) is type(other) and not isinstance(one, type):
        return difference(vars(one), vars(other), path)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return f"{path}: {one} and {other}"
    same = one == other or (one != one and other != other)
    return "" if same else f"{path}: {one!r} and {other!r}"


def moved(one, other):
    """Clients whose exact updates differ in any round."""
    places = sorted({*one.updates, *other.updates})
    return sorted({c for r, c in places if difference(one.updates.get((r, c)), other.updates.get((r, c)))})
