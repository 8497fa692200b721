"""R planned counts the lengths that a schedule of rates gives updates, because noise stays."""

import math

import pytest
import torch
from torch.optim import lr_scheduler

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.privacy.planning import planned_noise
from lightning_fedq.training.accounts import describe_noise, find_short_rounds
from tests.digits_run import Classifier, Digits, make_trainer

ROUNDS, CLIENTS, STEPS = 6, 4, 3


class Scheduled(Classifier):
    """Plain SGD with a schedule."""

    def __init__(self, kind, interval):
        super().__init__()
        self.kind, self.interval = kind, interval

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        return [optimizer], [{"scheduler": self.kind(optimizer), "interval": self.interval}]


SCHEDULES = {
    "one cycle": (lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=ROUNDS * STEPS), "step"),
    "cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, ROUNDS), "epoch"),
    "steps": (lambda o: lr_scheduler.StepLR(o, 4, 0.5), "step"),
    "own": (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)), "epoch"),
}


def run(tmp_path, kind, interval="epoch", rounds=ROUNDS, name="run"):
    federated = fedq.Federated(fedq.GaussianNoise(0.5, 2.0), CLIENTS, seed=0, clients_per_step=1)
    folder = fedq.RunFolder(name, tmp_path, show=False)
    module = Scheduled(kind, interval)
    seen = []

    class Watch(pl.Callback):
        is_shared_by_clients = True

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.client == 0:
                seen.append((trainer.current_epoch, trainer.optimizers[0].param_groups[0]["lr"]))

    trainer = make_trainer(federated, folder, Watch(), max_epochs=rounds)
    trainer.fit(module, datamodule=Digits(CLIENTS * STEPS * 10, 10))
    return federated, folder, seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_planned_rates_are_those_of_the_clients(name, tmp_path):
    federated, folder, seen = run(tmp_path, *SCHEDULES[name])
    sums = [sum(rate for round, rate in seen if round == wanted) for wanted in range(ROUNDS)]
    assert len(seen) == ROUNDS * STEPS
    assert federated.fit.lengths == pytest.approx([total / max(sums) for total in sums])
    noise = folder.summary["noise_over_signal"]
    mechanism, dim = federated.mechanism, federated.engine.weights.numel()
    signal = sum(federated.fit.lengths) / ROUNDS
    assert noise["planned"] == pytest.approx(planned_noise(mechanism, CLIENTS, dim, ROUNDS) / signal**2)


def test_rounds_that_a_schedule_makes_short_are_named_before_they_come_and_afterwards(tmp_path, caplog):
    """A schedule that ended at 0 ended a run at .37, next to .58, and the verdict stayed "costs points"."""

    def falls(optimizer):
        return lr_scheduler.LambdaLR(optimizer, lambda round: 1.0 if round < 2 else 0.001)

    with caplog.at_level("INFO"):
        _, folder, _ = run(tmp_path, falls)
    [said] = {line for line in caplog.messages if line.startswith("The schedule makes updates of rounds")}
    assert "rounds 3, 4, 5, 6 shorter than a tenth of the longest" in said and "R is" in said
    noise = folder.summary["noise_over_signal"]
    assert noise["short_rounds"] == [3, 4, 5, 6]
    assert "Updates of rounds 3, 4, 5, 6 were shorter than a tenth" in noise["words"]
    _, constant, _ = run(tmp_path, lambda o: lr_scheduler.ConstantLR(o, 1.0), name="constant")
    assert noise["planned"] > 8 * constant.summary["noise_over_signal"]["planned"]


def test_without_a_schedule_or_with_one_that_follows_a_metric_nothing_is_known(tmp_path):
    federated = fedq.Federated(fedq.GaussianNoise(0.5, 2.0), CLIENTS, seed=0)
    make_trainer(federated, max_epochs=2).fit(Classifier(), datamodule=Digits(80))
    assert federated.fit.lengths == []


def test_short_rounds():
    assert find_short_rounds([1.0, 0.2, 0.09, math.nan, 0.0]) == [3, 5]
    assert find_short_rounds([]) == find_short_rounds([math.nan]) == []
    words = describe_noise({"planned": 0.5, "sim_seen": 0.4, "short_rounds": [3, 5]})
    assert words.endswith("costs points. Updates of rounds 3, 5 were shorter than a tenth of the longest")


def test_lengths_divide_the_signal():
    known = fedq.GaussianNoise(1.0, 1.0), 100, 50, 4
    assert planned_noise(*known, lengths=[1.0] * 4) == pytest.approx(planned_noise(*known))
    assert planned_noise(*known, lengths=[1.0, 1.0, 0.0, 0.0]) == pytest.approx(4 * planned_noise(*known))
    assert planned_noise(*known, lengths=[0.0] * 4) == math.inf
    assert planned_noise(fedq.FedAvg(), 100, 50, 4, lengths=[0.5] * 4) == 0.0
