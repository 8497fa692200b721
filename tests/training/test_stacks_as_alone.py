"""A step in a stack is compared once with the same clients alone: their gradients, and numbers of Python."""

import pytest
import torch
from torch import nn

from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, make_trainer, weights_of


class Counts(Classifier):
    """Warms up by a counter of its own, beside dropout, whose first step in a stack runs twice."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 10)))
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx) * min(1.0, self.steps / 3)


class Alternates(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.phase = {"odd": False}

    def training_step(self, batch, batch_idx):
        self.phase["odd"] = not self.phase["odd"]
        return super().training_step(batch, batch_idx) * (2.0 if self.phase["odd"] else 0.5)


class OwnNoise(Classifier):
    """Draws from a generator of its own, which a stack would share."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(0)

    def training_step(self, batch, batch_idx):
        noise = torch.rand(batch[0].shape[-1], generator=self.draws)
        return super().training_step([batch[0] * noise, batch[1]], batch_idx)


class Dropout(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 10)))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Counts, r"changes numbers of Python \(steps\)"),
        (Alternates, r"changes numbers of Python \(phase\['odd'\]\)"),
        (OwnNoise, "one client at a time"),
    ],
)
def test_what_a_stack_can_not_do_trains_alone(kind, why):
    fed, plain = (Federated(FedAvg(), 6, seed=0, clients_per_step=size) for size in (6, 1))
    one, other = kind(), kind()
    other.load_state_dict(one.state_dict())
    with pytest.warns(UserWarning, match=why):
        make_trainer(fed, max_epochs=1).fit(one, datamodule=Digits(60))
    make_trainer(plain, max_epochs=1).fit(other, datamodule=Digits(60))
    assert fed.clients_per_step_chosen == 1
    assert torch.equal(weights_of(one), weights_of(other))


def test_draws_of_torch_are_a_client_s_own_in_a_stack():
    fed = Federated(FedAvg(), 6, seed=0, clients_per_step=6)
    make_trainer(fed, max_epochs=1).fit(Dropout(), datamodule=Digits(60))
    assert fed.clients_per_step_chosen == 6
