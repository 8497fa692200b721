import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.callbacks.langevin import Langevin
from lightning_fedq.mechanisms import AggregateGaussian, FedAvg, IrwinHall, LayeredGaussian
from tests.digits_run import make_trainer

CLIENTS, EACH, DIM = 4, 5, 50
STEP = 0.5 / (CLIENTS * EACH)  # the chain's memory is a half
POINTS = torch.randn(CLIENTS * EACH, DIM, generator=torch.Generator().manual_seed(0))
STATIONARY = 2 * STEP / (1 - 0.5**2)


class Location(pl.LightningModule):
    """U_i = sum_j |theta - y_ij|^2 / 2: the posterior is N(mean of y, I / 20)."""

    def __init__(self, lr: float = STEP * CLIENTS) -> None:
        super().__init__()
        self.theta, self.lr = nn.Parameter(POINTS.mean(0)), lr

    def training_step(self, batch, batch_idx):
        return 0.5 * (self.theta - batch[0]).square().sum()

    def train_dataloader(self):
        return DataLoader(TensorDataset(POINTS), batch_size=EACH)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def layered(share, clip_norm=40.0):
    """A compressor that makes this share of the noise."""
    std = math.sqrt(2 * STEP * share)
    return LayeredGaussian(clip_norm, std * CLIENTS / (2 * clip_norm), entropy_code="elias")


def sample(mechanism, rounds, burn_in=5, **settings):
    federated = Federated(mechanism, CLIENTS, **{"clients_per_step": CLIENTS, "seed": 2, **settings})
    langevin = Langevin(STEP, burn_in)
    trainer = make_trainer(federated, langevin, max_epochs=rounds)
    trainer.fit(Location())
    return langevin


@pytest.mark.parametrize("mechanism", [FedAvg(), layered(0.6)], ids=["none", "most"])
def test_samples_have_the_posterior_s_mean_and_the_chain_s_variance(mechanism):
    rounds = 205
    found = sample(mechanism, rounds)
    assert found.num_samples == 200
    # variance: 200 x 50 values with autocorrelation 1/2, so a standard error of sqrt(2 * 5/3 / 10^4) = 1.8%;
    # 4.5 of them, and 1.5% for the mean that is estimated too (3 / 200): false alarm below 1e-5
    ratio = found.variance.mean().item() / STATIONARY
    assert ratio == pytest.approx(1.0, abs=4.5 * 0.018 + 0.015)
    # |mean - posterior mean|^2 over its expected d 2g / ((1/2)^2 T) is a chi-square of 50 over 50
    error = (found.mean - POINTS.double().mean(0)).square().sum().item()
    assert 0.3 < error / (DIM * 2 * STEP / (0.25 * 200)) < 2.1


@pytest.mark.parametrize(
    "mechanism", [IrwinHall(40.0, 0.01), AggregateGaussian(40.0, 0.01, error_law="laplace")], ids=repr
)
def test_what_samples_another_law_is_refused(mechanism):
    with pytest.raises(ValueError, match=f"error of {type(mechanism).__name__} is not exactly"):
        sample(mechanism, 1)


def test_learning_rate_and_order_are_checked():
    federated = Federated(FedAvg(), CLIENTS, clients_per_step=CLIENTS, seed=2)
    trainer = make_trainer(federated, Langevin(STEP), max_epochs=1)
    with pytest.raises(ValueError, match=r"lr = step_size \* num_clients = 0.1, got SGD with \[0.3\]"):
        trainer.fit(Location(0.3))
    federated = Federated(FedAvg(), CLIENTS, clients_per_step=CLIENTS, seed=2)
    trainer = make_trainer(Langevin(STEP), federated, max_epochs=1)
    with pytest.raises(ValueError, match=r"Langevin must come behind Federated"):
        trainer.fit(Location())


def test_arguments_are_checked_and_moments_survive_a_checkpoint():
    with pytest.raises(ValueError, match=r"step_size must be > 0, got 0"):
        Langevin(0.0)
    with pytest.raises(ValueError, match=r"burn_in must be >= 0, got -1"):
        Langevin(0.1, -1)
    fresh = Langevin(STEP)
    found = sample(FedAvg(), 8)
    fresh.load_state_dict(found.state_dict())
    assert torch.equal(fresh.variance, found.variance) and fresh.num_samples == 3
