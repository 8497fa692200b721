"""One direction with more than half of the updates' energy is said once, with the cure, of a simulation."""

import warnings

import pytest
import torch
from torch import nn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import FedAvg, GaussianNoise
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from tests.digits_run import make_trainer

TARGET = PrivacyTarget(8.0, 1e-3, "outsider")


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 2)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(shift, **settings):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 16, generator=generator) + shift
    # most labels are the same: with shifted inputs all gradients point along the mean input
    labels = (torch.rand(40, generator=generator) < 0.2).long()
    data = torch.utils.data.TensorDataset(inputs, labels)
    fed = Federated(GaussianNoise(1.0, 1.0), 20, **{"privacy": TARGET, "clients_per_step": 1, **settings})
    trainer = make_trainer(fed, max_epochs=3)
    module = Line()
    nn.init.zeros_(module.layer.weight)
    nn.init.zeros_(module.layer.bias)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
    return fed


def test_inputs_that_are_not_centred_are_warned_of_once():
    with pytest.warns(UserWarning, match=r"one direction .*sim_homogeneity.* Standardise") as seen:
        fed = fit(5.0)
    assert sum("one direction" in str(warning.message) for warning in seen) == 1
    assert sum(record.homogeneity > 0.5 for record in fed.records) > 0


@pytest.mark.parametrize("settings", [{"shift": 0.0}, {"shift": 5.0, "diagnostics": False}])
def test_centred_inputs_and_runs_without_a_simulation_s_eye_say_nothing(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fed = fit(**settings)
    assert all(not record.homogeneity > 0.5 for record in fed.records)


def test_homogeneity_is_the_mean_s_share_of_the_energy_and_is_not_released():
    engine = RoundEngine(
        FedAvg(), RoundPlanner(4, 0), SeededKeys(0), torch.zeros(3), [3], FixedRange(1.0), diagnostics=True
    )
    updates = torch.tensor([[1.0, 0, 0], [1, 1, 0], [1, 0, 1], [1, -1, -1]])
    engine.receive(engine.start().survivors, updates.clone())
    record = engine.finish()
    assert record.homogeneity == pytest.approx(1.0 / ((1 + 2 + 2 + 3) / 4))
    assert record.released().homogeneity != record.released().homogeneity
    assert "sim_homogeneity" in record.metrics()
