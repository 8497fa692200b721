"""The batch's number, and whether it is the last: one client's, in the training and the optimiser step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, digits, make_trainer, weights_of

CLIENTS, BATCH, BATCHES = 4, 5, 3


def loader() -> DataLoader[Any]:
    inputs, labels = digits()
    return DataLoader(TensorDataset(inputs[:60], labels[:60]), batch_size=BATCH)


def federated(clients_per_step: Any = 1) -> Federated:
    return Federated(FedAvg(), CLIENTS, seed=0, clients_per_step=clients_per_step)


class Told(Classifier):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, bool, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.told.append((batch_idx, self.trainer.is_last_batch, self.trainer.num_training_batches))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("clients_per_step", [1, 2])
def test_the_training_step_is_told_its_clients_batch(clients_per_step: int) -> None:
    module = Told()
    trainer = make_trainer(federated(clients_per_step), max_epochs=2)
    trainer.fit(module, loader(), Digits().val_dataloader())
    once = [(number, number == BATCHES - 1, BATCHES) for number in range(BATCHES)]
    wanted = once * (CLIENTS // clients_per_step) * 2
    assert module.told[-len(wanted) :] == wanted  # behind the rehearsal's
    assert trainer.num_training_batches == BATCHES * CLIENTS // clients_per_step


class ByHand(Classifier):
    """Steps at every second batch and at the last, its schedule at the last, as Lightning's docs have it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(nn.functional.cross_entropy(self.backbone(batch[0]), batch[1]) / 2)
        if (batch_idx + 1) % 2 == 0 or self.trainer.is_last_batch:
            optimizer.step()
            optimizer.zero_grad()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def by_hand(model: nn.Module, parts: list[list[int]]) -> Tensor:
    inputs, labels = digits()
    for epoch in range(2):
        trained = []
        for part in parts:
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.5 * 0.5**epoch)
            for number in range(BATCHES):
                own = part[number * BATCH : (number + 1) * BATCH]
                (nn.functional.cross_entropy(local(inputs[own]), labels[own]) / 2).backward()  # type: ignore[no-untyped-call]
                if number % 2 == 1 or number == BATCHES - 1:
                    optimizer.step()
                    optimizer.zero_grad()
            trained.append(weights_of(local))
        torch.nn.utils.vector_to_parameters(torch.stack(trained).mean(0), model.parameters())
    return weights_of(model)


def test_accumulation_and_schedules_by_hand_are_one_clients() -> None:
    module, fed = ByHand(), federated()
    expected = copy.deepcopy(module.backbone)
    trainer = make_trainer(fed, max_epochs=2)
    trainer.fit(module, loader(), Digits().val_dataloader())
    wanted = by_hand(expected, [part.tolist() for part in fed.client_indices])
    torch.testing.assert_close(weights_of(module.backbone), wanted, atol=1e-6, rtol=1e-5)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.125


class OptimizerStep(Classifier):
    """Writes down what its optimiser step is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []

    def optimizer_step(self, epoch: int, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        self.told.append(batch_idx)
        super().optimizer_step(epoch, batch_idx, *args, **kwargs)


def test_the_optimizer_step_is_told_its_clients_batch() -> None:
    module = OptimizerStep()
    make_trainer(federated(), max_epochs=1).fit(module, loader(), Digits().val_dataloader())
    assert module.told == list(range(BATCHES)) * CLIENTS
    assert "optimizer_step" not in vars(module)


def test_a_step_that_fails_leaves_the_trainer_its_own_numbers() -> None:
    class Fails(Told):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.told:
                raise RuntimeError("out of memory")
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(federated(), max_epochs=1)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.fit(Fails(), loader(), Digits().val_dataloader())
    assert trainer.num_training_batches == BATCHES * CLIENTS
