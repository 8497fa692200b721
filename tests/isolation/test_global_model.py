"""The user's module is the global model from the first to the last line of a fit, for whoever looks.

`Eye` holds the module that the user made, by a weak reference that no client's world takes along. It looks
at it wherever user's code runs: in hooks of a client's training, in the optimiser, the data set, the
mechanism, the logger and the callbacks of the outer fit.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import make_trainer
from tests.isolation.shapes.objects import Meter
from tests.isolation.worlds import Book
from tests.tried import without_forks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CLIENTS, ROUNDS, BATCHES = 3, 3, 2


@pytest.fixture(autouse=True)
def _isolation_is_tried_elsewhere(monkeypatch):
    without_forks(monkeypatch)


State = dict[str, Tensor]

OF_CLIENTS = [
    "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end",
]  # fmt: skip
OUTER = ["on_fit_start", "on_validation_start", "on_validation_epoch_end", "on_validation_end", "on_fit_end"]


class Eye:
    """Looks at the user's module."""

    module: ClassVar[Any] = None
    seen: ClassVar[list[tuple[str, State]]] = []
    gradients: ClassVar[list[str]] = []

    @classmethod
    def open(cls, module):
        cls.module, cls.seen, cls.gradients = weakref.ref(module), [], []

    @classmethod
    def state(cls):
        """Parameters and buffers as they lie in the module, past its `state_dict`."""
        tensors = [*cls.module().named_parameters(), *cls.module().named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in tensors}

    @classmethod
    def look(cls, place):
        cls.seen.append((place, cls.state()))
        if any(parameter.grad is not None for parameter in cls.module().parameters()):
            cls.gradients.append(place)

    @classmethod
    def models(cls):
        """The models that were seen, each once as long as it stayed."""
        found = []
        for _, state in cls.seen:
            if not found or not same(found[-1], state):
                found.append(state)
        return found


def same(one, other):
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


@dataclass(frozen=True)
class Watched(FedAvg):
    """Looks when a client sends."""

    def encode(self, update, context, rand):
        Eye.look("encode")
        return super().encode(update, context, rand)


class WatchedSGD(torch.optim.SGD):
    def step(self, closure=None):
        Eye.look("optimizer")
        return super().step(closure)


class WatchedBook(Book):
    def log_metrics(self, metrics, step=None):
        Eye.look("logger")
        super().log_metrics(metrics, step)


class WatchedSet(Dataset[Any]):
    def __len__(self):
        return 2 * BATCHES * CLIENTS

    def __getitem__(self, index):
        Eye.look("dataset")
        return torch.eye(3)[index % 3] + 0.1 * index, torch.tensor([float(index % 5)])


class Net(pl.LightningModule):
    """A regression with BatchNorm, so that there are buffers to see."""

    alone = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        Eye.look("training_step")
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        Eye.look("validation_step")
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def train_dataloader(self):
        return DataLoader(WatchedSet(), batch_size=2)

    def val_dataloader(self):
        return DataLoader([(torch.ones(3), torch.ones(1))] * 4, batch_size=4)

    def configure_optimizers(self):
        kind = WatchedSGD if self.alone else torch.optim.SGD  # a stack takes none but known ones
        optimizer = kind(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _module_hook(name):
    def hook(self, *args):
        Eye.look(f"module.{name}")

    return hook


class Beside(Net):
    """For stacks."""

    alone = False


class HookedNet(Net):
    """With every hook of a client's training."""

    locals().update({name: _module_hook(name) for name in OF_CLIENTS})


class ByHand(HookedNet):
    """Optimises by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        Eye.look("after step")


def _hook(name):
    def hook(self, trainer, *args):
        Eye.look(f"callback.{name}")

    return hook


class Client(pl.Callback):
    """Looks from within a client's training."""

    locals().update({name: _hook(name) for name in OF_CLIENTS})


class Outer(pl.Callback):
    """Looks from the outer fit."""

    locals().update({name: _hook(name) for name in OUTER})


def train(module, *callbacks, **settings):
    """A fit that is watched; returns its trainer."""
    fed = Federated(
        Watched(), CLIENTS, **{"seed": 1, "clients_per_step": 1, "diagnostics": False, **settings}
    )
    trainer = make_trainer(
        *callbacks,
        fed,
        Outer(),
        max_epochs=ROUNDS,
        logger=WatchedBook(),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
    )
    Eye.open(module)
    trainer.fit(module)
    return trainer


@pytest.mark.parametrize(
    ("make", "callbacks", "clients_per_step", "buffers", "client_metrics"),
    [
        (Net, (), 1, "share", "shared"),
        (Beside, (), 3, "share", "local"),
        (Beside, (), 3, "local", "shared"),
        (HookedNet, (Client,), 1, "local", "local"),
        (ByHand, (Client,), 1, "share", "shared"),
    ],
)
def test_whoever_looks_sees_the_global_model(make, callbacks, clients_per_step, buffers, client_metrics):
    module = make()
    start = copy.deepcopy(dict(module.state_dict()))
    settings = {"buffers": buffers, "client_metrics": client_metrics, "clients_per_step": clients_per_step}
    train(module, *(callback() for callback in callbacks), **settings)
    places = {place for place, _ in Eye.seen}
    assert {"training_step", "validation_step", "encode", "dataset", "logger"} <= places
    if callbacks:
        wanted = {f"{who}.{name}" for who in ("module", "callback") for name in OF_CLIENTS}
        by_hand = {f"{who}.on_before_zero_grad" for who in ("module", "callback")}  # Lightning's own call
        assert (wanted if module.automatic_optimization else wanted - by_hand) <= places
    models = Eye.models()
    assert len(models) == 1 + ROUNDS, "the start, and one new model a round"
    assert same(models[0], start) and same(models[-1], dict(module.state_dict()))
    assert Eye.gradients == [], "a client's gradients"


def test_a_new_model_comes_after_the_last_client_and_before_validation():
    train(HookedNet(), Client())
    for (before, old), (after, new) in zip(Eye.seen, Eye.seen[1:], strict=False):
        if not same(old, new):
            assert before in ("encode", "module.on_train_epoch_end", "callback.on_train_epoch_end")
            assert after in ("logger", "validation_step") or after.startswith("callback.on_validation")


class Keeps(Net):
    """Keeps what it can of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.last = None
        self.losses = []
        self.meter, self.counts = Meter(), {"steps": 0}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.last = batch[0].detach().clone()
        self.losses.append(loss.item())
        self.meter.update(loss.item())
        self.counts["steps"] += 1
        self.net[0].note = loss.item()
        return loss


@pytest.mark.parametrize("client_metrics", ["local", "shared"])
def test_nothing_of_a_client_stays_in_what_the_user_holds(client_metrics, tmp_path):
    """After one fit, and in the module that is saved whole; a second fit begins as the first one did."""
    module = Keeps()
    for _ in range(2):
        train(module, client_metrics=client_metrics)
        torch.save(module, tmp_path / "module.pt")
        saved = torch.load(tmp_path / "module.pt", weights_only=False)
        for held in (module, saved):
            assert held.last is None and held.losses == [] and held.counts == {"steps": 0}
            assert vars(held.meter) == vars(Meter())
            assert not hasattr(held.net[0], "note")


TEACHER = nn.Linear(3, 3).requires_grad_(False)


class Taught(Net):
    """Holds a frozen module that its code names by a global, too, so that clients share it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = TEACHER

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(TEACHER(batch[0])), batch[1])


@pytest.mark.parametrize("client_metrics", ["local", "shared"])
def test_what_clients_share_is_not_freed_with_the_first(client_metrics):
    train(Taught(), client_metrics=client_metrics)
    assert TEACHER.weight.shape == (3, 3)
