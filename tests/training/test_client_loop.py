"""A client's steps leave out what nobody listens to, and are Lightning's bit for bit."""

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.client_loop import ClientLoop
from lightning_fedq.clients.fit import Batches, Client, ClientFit
from lightning_fedq.clients.hooks import BATCH_HOOKS
from lightning_fedq.mechanisms import QSGD, CorBin, FedAvg, GaussianNoise
from lightning_fedq.rounds import RoundEngine
from lightning_fedq.training import round as one_round
from tests.digits_run import Classifier, Digits, ManualSteps, make_trainer, weights_of

pytestmark = pytest.mark.filterwarnings("ignore")
CALLS = []
"""Hooks that have run, with the step, the learning rate and the weights that they saw."""


class Book(pl.loggers.Logger):
    """Keeps what is logged."""

    name, version = "book", 0

    def log_metrics(self, metrics, step=None):
        CALLS.append(("logged", step, sorted((k, v) for k, v in metrics.items() if "seconds" not in k)))

    def log_hyperparams(self, *args, **kwargs):
        """Nothing of a training."""


def listening(name, parent):
    """A hook that notes that it was called, and does what Lightning's does."""

    def hook(self, *args, **kwargs):
        module = self if isinstance(self, pl.LightningModule) else args[1] if len(args) > 1 else None
        if module is not None and name not in BATCH_HOOKS[:2]:
            CALLS.append((name, module.global_step, float(next(module.parameters()).double().sum())))
        else:
            CALLS.append((name,))
        return getattr(parent, name)(self, *args, **kwargs)

    return hook


def module_with(**members):
    return lambda: type("Own", (Classifier,), members)(nn.Sequential(nn.Dropout(0.2), nn.Linear(64, 10)))


def scheduled(interval):
    def configure(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}

    return configure


def noisy(self, batch, batch_idx):
    """Logs of all kinds, a dictionary, and a step that is skipped."""
    loss = nn.functional.cross_entropy(self.backbone(batch[0]), batch[1])
    self.log("each", loss, on_step=True, on_epoch=True, prog_bar=True)
    self.log("number", batch_idx + self.trainer.global_step, on_step=False, on_epoch=True)
    CALLS.append((batch_idx, self.trainer.global_step, self.trainer.is_last_batch, self._current_fx_name))
    return None if batch_idx == 1 else {"loss": loss, "more": loss.detach()}


def begins_to_listen(self, batch, batch_idx):
    """A hook that is there from the second step on, and a setting from the third."""
    if batch_idx == 1:
        self.on_after_backward = lambda: CALLS.append(("late", float(self.backbone[1].weight.grad.sum())))
    self.trainer.gradient_clip_val = 0.01 if batch_idx > 2 else None
    return nn.functional.cross_entropy(self.backbone(batch[0]), batch[1])


def without_number(self, batch):
    return nn.functional.cross_entropy(self.backbone(batch[0]), batch[1])


def twice(self):
    return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def callback_with(name):
    return type("Listens", (pl.Callback,), {name: listening(name, pl.Callback)})()


MODULE_HOOKS = [*BATCH_HOOKS, "backward", "optimizer_step", "optimizer_zero_grad"]
MODULE_HOOKS += ["configure_gradient_clipping", "on_before_batch_transfer", "transfer_batch_to_device"]
MODULE_HOOKS += ["on_after_batch_transfer"]
Row = tuple[Callable[[], Any], dict[str, Any], bool | None]
ROWS = {
    "plain": (module_with(), {}, True),
    "logs, dictionaries, skipped": (module_with(training_step=noisy), {}, True),
    "no number": (module_with(training_step=without_number), {}, True),
    "a schedule of steps": (module_with(configure_optimizers=scheduled("step")), {}, True),
    "a schedule of epochs": (module_with(configure_optimizers=scheduled("epoch")), {}, True),
    "several closures": (module_with(configure_optimizers=twice), {}, True),
    "listens later": (module_with(training_step=begins_to_listen), {}, None),
    "by hand": (lambda: type("Own", (ManualSteps, Classifier), {})(), {}, False),
    "accumulates": (module_with(), {"accumulate_grad_batches": 2}, False),
    "clips norms": (module_with(), {"gradient_clip_val": 0.05}, False),
    "clips values": (module_with(), {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}, False),
    "mixed precision": (module_with(), {"precision": "bf16-mixed"}, False),
    "a profiler": (module_with(), {"profiler": "simple"}, False),
    "a lambda": (
        module_with(),
        {
            "callbacks": [
                pl.callbacks.LambdaCallback(on_after_backward=lambda *args: CALLS.append(("lambda",)))
            ]
        },
        False,
    ),
    "a callback of other hooks": (
        module_with(),
        {"callbacks": [pl.callbacks.LambdaCallback(on_train_epoch_end=lambda *args: None)]},
        True,
    ),
}
for one in MODULE_HOOKS:
    ROWS[f"the module's {one}"] = (module_with(**{one: listening(one, pl.LightningModule)}), {}, False)
for one in BATCH_HOOKS:
    ROWS[f"a callback's {one}"] = (module_with(), {"callbacks": [callback_with(one)]}, False)


def train(make, settings, size=1):
    CALLS.clear()
    torch.manual_seed(0)
    settings = dict(settings)
    fed = Federated(FedAvg(), 4, seed=0, clients_per_step=size, client_metrics="shared", diagnostics=False)
    trainer = make_trainer(
        *settings.pop("callbacks", ()), fed, logger=Book(), log_every_n_steps=1, **settings
    )
    module = make()
    trainer.fit(module, datamodule=Digits(160))
    assert fed.fit.clients_per_step == size
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {n: t.detach().clone() for n, t in module.state_dict().items()}, list(CALLS), metrics


IN_STACKS = ["plain", "logs, dictionaries, skipped", "no number", "a schedule of steps", "clips norms"]
IN_STACKS += ["a callback of other hooks"]


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 1) for name in ROWS), *((name, 4) for name in IN_STACKS)]
)
def test_a_step_is_lightning_s(name, size, monkeypatch):
    make, settings, quiet = ROWS[name]
    found, own = [], ClientLoop.is_quiet
    monkeypatch.setattr(ClientLoop, "is_quiet", lambda self: found.append(own(self)) or found[-1])
    weights, calls, metrics = train(make, settings, size)
    assert set(found) == ({quiet} if quiet is not None else {True, False})
    monkeypatch.setattr(ClientLoop, "is_quiet", lambda self: False)
    expected, expected_calls, expected_metrics = train(make, settings, size)
    assert expected.keys() == weights.keys()
    for key, tensor in expected.items():
        assert torch.equal(weights[key], tensor), key
    assert calls == expected_calls
    assert metrics == expected_metrics
    assert "the module's" not in name or any(name.endswith(f" {call[0]}") for call in calls)


def test_what_lightning_s_classes_are_given_is_listened_to(monkeypatch):
    seen = []
    monkeypatch.setattr(pl.LightningModule, "on_after_backward", lambda self: seen.append(1))
    train(*ROWS["plain"][:2])
    assert len(seen) >= 2 * 16


def test_a_client_s_objects_are_freed_without_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    left, own = list[Any](), ClientFit.drop

    def drop(fit: ClientFit, client: Client) -> None:
        left.extend(map(weakref.ref, (client.module, client.trainer, client.trainer.fit_loop)))
        own(fit, client)

    monkeypatch.setattr(ClientFit, "drop", drop)
    gc.disable()
    try:
        train(*ROWS["plain"][:2])
        assert len(left) == 3 * (4 * 2 + 1), "one has tried before the first round"
        assert not any(one() for one in left)
    finally:
        gc.enable()


def test_a_client_that_trains_twice_begins_its_batches_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, own = list[int](), ClientFit.train

    def twice(fit: ClientFit, client: Client, batches: Batches, *args: Any) -> None:
        kept = list(batches)
        for _ in range(2):
            own(fit, client, Batches(iter(kept), len(kept), None), *args)
            seen.append(client.trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    monkeypatch.setattr(ClientFit, "train", twice)
    train(*ROWS["plain"][:2])
    assert set(seen) == {4}


@pytest.mark.parametrize("mechanism", [FedAvg(), CorBin(5.0), GaussianNoise(1.0, 0.5), QSGD()], ids=repr)
def test_updates_that_are_received_together_end_with_the_same_model(mechanism, monkeypatch):
    """Those of clients that train one at a time wait for each other where the sum has no order."""
    lengths, receive = [], RoundEngine.receive

    def counted(engine, clients, updates):
        lengths.append(len(clients))
        receive(engine, clients, updates)

    def fit():
        module = Classifier()
        federated = Federated(mechanism, 20, seed=0, clients_per_step=1)
        make_trainer(federated).fit(module, datamodule=Digits())
        return weights_of(module), [record.num_received for record in federated.records]

    monkeypatch.setattr(RoundEngine, "receive", counted)
    together, received = fit()
    assert (max(lengths) > 10) == mechanism.order_free
    lengths.clear()
    monkeypatch.setattr(one_round, "_AT_ONCE", 0)
    alone, one_by_one = fit()
    assert set(lengths) == {1}
    assert torch.equal(together, alone)
    assert received == one_by_one == [20, 20]


class AsksForItsLoops(Classifier):
    """Notes what is rarely asked of a client's Trainer."""

    seen: ClassVar[list] = []

    def training_step(self, batch, batch_idx):
        loop = self.trainer.fit_loop.epoch_loop
        if self.trainer.max_epochs and hasattr(self.trainer, "home"):
            steps = loop.manual_optimization.optim_step_progress.total.completed
            self.seen.append((steps, loop.val_loop, self.trainer.num_val_batches))
            assert loop.val_loop is loop.val_loop
            assert not hasattr(loop, "no_such_loop")
        return super().training_step(batch, batch_idx)


def test_loops_that_a_client_rarely_needs_are_made_when_it_asks():
    AsksForItsLoops.seen.clear()
    federated = Federated(FedAvg(), 4, seed=0, clients_per_step=1)
    make_trainer(federated).fit(AsksForItsLoops(), datamodule=Digits(40))
    steps, loops, batches = zip(*AsksForItsLoops.seen[-8:], strict=True)
    assert set(steps) == {0, 1}
    assert len(set(map(id, loops))) == 8
    assert all(length == [1] for length in batches)
