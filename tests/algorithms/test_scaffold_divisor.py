"""SCAFFOLD divides by what everybody knows, whatever a client does with its own data."""

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from lightning_fedq.algorithms import SCAFFOLD
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, make_trainer

CLIENTS, STEPS, RATE = 4, 3, 0.1


class Steady(Classifier):
    """Plain SGD, with a rate that falls with every step."""

    schedule = True

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(64, 10))

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=RATE)
        if not self.schedule:
            return optimizer
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}]


class LeavesOut(Steady):
    """The last client leaves out a batch of its own."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class SetsItsRate(Steady):
    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] *= 1.0 + float(batch[0].mean())


def fit(module):
    fed = Federated(FedAvg(), CLIENTS, seed=1, algorithm=SCAFFOLD(), local_steps=STEPS, clients_per_step=1)
    make_trainer(fed, max_epochs=2).fit(module, datamodule=Digits(100, 5))
    return fed.fit


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("kind", [Steady, LeavesOut, SetsItsRate])
def test_the_divisor_is_the_schedule_s(kind):
    second = sum(RATE * 0.5**step for step in range(STEPS, 2 * STEPS))
    assert fit(kind()).side.clock.learning_rate_sum == pytest.approx(second)


def test_without_a_schedule_it_is_rate_times_steps_and_everybody_opens_a_variate():
    class NoSchedule(LeavesOut):
        schedule = False

    fitted = fit(NoSchedule())
    found = fitted.correction
    assert fitted.side.clock.learning_rate_sum == pytest.approx(RATE * STEPS)
    assert sorted(found.committed) == list(range(CLIENTS)), (
        "whether a client has moved does not show in the share"
    )
    mean = torch.stack([found.committed[client] for client in range(CLIENTS)]).mean(0)
    assert torch.allclose(found.server, mean, atol=1e-6), "with everybody, the server's is the mean"
