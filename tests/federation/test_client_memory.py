"""What is kept from batch to batch does not come into the next client's update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.rounds import RoundEngine
from tests.callbacks.silent import Silent
from tests.digits_run import Classifier, Digits, digits, make_trainer


class Some(Digits):
    """Thirty samples, of which some are others."""

    def __init__(self, others: Any = ()) -> None:
        super().__init__(30)
        self.others = list(others)

    def train_dataloader(self) -> Any:
        inputs, labels = digits()[0][:30].clone(), digits()[1][:30].clone()
        inputs[self.others], labels[self.others] = inputs[self.others].flip(1) + 1, 9 - labels[self.others]
        return DataLoader(TensorDataset(inputs, labels), batch_size=5, shuffle=True)


class Standardised(Some):
    """Takes a running mean off."""

    mean: Any = 0.0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer is not None and self.trainer.training:
            self.mean = 0.5 * self.mean + 0.5 * batch[0].mean(0)
        return [batch[0] - self.mean, batch[1]]


class Keeps(Classifier):
    """Divides its loss by what it keeps of the losses before."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.mean, self.losses, self.steps = how, 1.0, [], 0
        self.seen: list[Any] = []
        self.metric = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.steps += 1
        self.losses.append(loss.detach())
        if self.how == "number":
            self.mean = 0.9 * self.mean + 0.1 * loss.item()
            return loss / self.mean
        if self.how == "metric":
            self.metric.update(loss.detach())
            return loss / self.metric.compute()
        return loss / sum(self.losses) if self.how == "list" else loss

    def on_train_epoch_end(self) -> None:
        self.seen = [*self.seen, (self.steps, len(self.losses))]
        if self.how == "cleared":
            self.losses.clear()


class AutoClip(pl.Callback):
    """Clips to the smallest norm so far."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(float(pl_module.backbone.weight.grad.norm()))
        nn.utils.clip_grad_norm_(pl_module.parameters(), min(self.norms))


class MixBatches(pl.Callback):
    """Mixes the batch before into each batch."""

    last: Tensor | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        now = batch[0].clone()
        if self.last is not None:
            batch[0].mul_(0.5).add_(self.last, alpha=0.5)
        self.last = now


class Collects(pl.Callback):
    """Looks on."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(float(pl_module.backbone.weight.grad.norm()))


def updates_of(monkeypatch: Any, module: Any, data: Any, *callbacks: Any, first: bool = False) -> Any:
    """Updates by round and client, and who holds what."""
    found: dict[tuple[int, int], Tensor] = {}
    receive = RoundEngine.receive

    def receives(engine: Any, clients: Any, updates: Tensor) -> None:
        found.update(((engine.round, c), u.clone()) for c, u in zip(clients, updates, strict=True))
        receive(engine, clients, updates)

    fed = Federated(Silent(), 3, seed=1, clients_per_step=1, client_metrics="local")
    order = (*callbacks, fed) if first else (fed, *callbacks)
    with monkeypatch.context() as patch:
        patch.setattr(RoundEngine, "receive", receives)
        make_trainer(*order).fit(module, datamodule=data)
    return found, fed.client_indices


@pytest.mark.parametrize(
    ("module", "data", "callback", "first"),
    [
        (lambda: Keeps("number"), Some, None, False),
        (lambda: Keeps("list"), Some, None, False),
        (lambda: Keeps("metric"), Some, None, False),
        (Classifier, Standardised, None, False),
        *(
            (Classifier, Some, callback, first)
            for callback in (AutoClip, MixBatches)
            for first in (False, True)
        ),
    ],
)
def test_no_client_s_data_come_into_another_s_update(
    module: Any, data: Any, callback: Any, first: bool, monkeypatch: Any
) -> None:
    def callbacks() -> list[pl.Callback]:
        return [] if callback is None else [callback()]

    before, held = updates_of(monkeypatch, module(), data(), *callbacks(), first=first)
    for client in range(3):
        after, _ = updates_of(monkeypatch, module(), data(held[client].tolist()), *callbacks(), first=first)
        moved = {
            who for (_, who) in before if any(not torch.equal(before[r, who], after[r, who]) for r in (0, 1))
        }
        assert moved == {client}


@pytest.mark.parametrize("how", ["", "cleared"])
def test_hooks_of_an_epoch_s_end_see_what_the_last_client_left(how: str, monkeypatch: Any) -> None:
    """Ten samples a client: two batches. Steps go on as one client counts them."""
    module = Keeps(how)
    updates_of(monkeypatch, module, Some())
    assert module.seen == [(2, 2), (4, 2)]


def test_a_callback_that_looks_on_keeps_everything(monkeypatch: Any) -> None:
    collects = Collects()
    updates_of(monkeypatch, Classifier(), Some(), collects)
    assert len(collects.norms) == 2 * 3 * 2


def test_a_run_that_claims_nothing_keeps_its_own_record() -> None:
    module = Keeps()
    make_trainer(Federated(Silent(), 3, seed=1, clients_per_step=1)).fit(module, datamodule=Some())
    assert module.seen == [(6, 6), (12, 12)]
