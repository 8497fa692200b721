"""Nothing that a batch leaves behind moves a later step of DP-SGD, or is logged by validation."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.mechanisms import FedAvg
from tests.callbacks.test_dpsgd import Classifier, dpsgd, samples
from tests.callbacks.test_dpsgd_clients import parts
from tests.digits_run import Classifier as ClientClassifier, Digits, fitted, make_trainer


class Remembers(Classifier):
    """Keeps a value between steps, in one of several ways, and divides its loss by it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.ema, self.losses = how, 1.0, []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss / float(self.ema)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        value = {
            "loss": lambda: float(outputs["loss"]),
            "mean of the batch": lambda: float(batch[0].mean()) + 2.0,
            "size of the batch": lambda: float(len(batch[0]) + 1),
        }
        if self.how in value:
            self.ema = 0.9 * self.ema + 0.1 * value[self.how]()

    def on_before_optimizer_step(self, optimizer):
        if self.how == "gradients":
            self.ema = 1.0 + float(self.layer_of_all().grad.norm())

    def on_after_backward(self):
        if self.how == "epoch":
            self.losses.append(float(self.layer_of_all().grad.norm()))

    def on_train_epoch_end(self):
        if self.losses:
            self.ema = 1.0 + sum(self.losses) / len(self.losses)

    def layer_of_all(self):
        return next(self.parameters())


class Listens(pl.Callback):
    """A callback that keeps the value."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.ema = 0.9 * pl_module.ema + 0.1 * float(outputs["loss"])


WAYS = ["loss", "mean of the batch", "size of the batch", "gradients", "epoch"]


def fit(module, *callbacks, epochs=2):
    return fitted(module, *callbacks, max_epochs=epochs)


@pytest.mark.parametrize(("how", "callbacks"), [*((how, ()) for how in WAYS), ("not at all", (Listens(),))])
def test_what_follows_from_earlier_batches_is_refused(how, callbacks):
    with pytest.raises(ValueError, match="Gradients depend on state that earlier batches changed"):
        fit(Remembers(how), *callbacks, dpsgd())


class Averages(Remembers):
    """What follows from weights and counts of steps is private, or public."""

    def __init__(self) -> None:
        super().__init__("not at all")
        self.teacher = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.ema = 1.0 + 0.1 * self.trainer.global_step
        for mean, weight in zip(self.teacher, self.parameters(), strict=True):
            mean.lerp_(weight.detach(), 0.1)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1.0 + self.teacher[0].square().mean())


def test_averages_of_weights_and_counts_of_steps_train():
    private = dpsgd()
    fit(Averages(), private)
    assert private.accounts[0].steps > 2


class Validates(Classifier):
    def val_dataloader(self):
        return DataLoader(samples(), batch_size=50)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


class Stacks(Validates):
    """Its hook needs a batch of validation."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        self.outputs.append(self.net(batch[0]).square().mean())

    def on_validation_epoch_end(self):
        self.log("mean_score", torch.stack(self.outputs).mean())
        self.outputs.clear()


@pytest.mark.parametrize("sanity", [0, 2])
def test_ordinary_validation_trains(sanity):
    private, module = dpsgd(), Stacks()
    run = fitted(module, private, num_sanity_val_steps=sanity)
    assert private.accounts[0].steps == 20
    assert "mean_score" in run.callback_metrics


def test_inside_clients_too():
    data = FederatedDataModule(Digits(120), clients=parts())
    run = make_trainer(Federated(FedAvg(), 3, seed=0), DPSGD(1.0, 1.0, delta=1e-3, seed=1))
    with pytest.raises(ValueError, match="Gradients depend on state that earlier batches changed"):
        run.fit(ClientRemembers(), datamodule=data)


class ClientRemembers(ClientClassifier):
    ema = 1.0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / self.ema

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ema = 0.9 * self.ema + 0.1 * float(outputs["loss"])
