"""LeakageMonitor: what it logs, what it costs, and that the training never notices."""

import pytest
import torch
from torch import nn

from lightning_fedq.callbacks import Federated
from lightning_fedq.leakage import Attack, Matching
from lightning_fedq.leakage.monitor import LeakageMonitor
from lightning_fedq.mechanisms import LDPQ, CorBin, FedAvg
from tests.digits_run import Classifier, Digits, make_trainer, weights_of
from tests.leakage.clock import cpu_clock
from tests.leakage.settings import Endless


class Refusing(Attack):
    def check(self, problem):
        raise ValueError("this model can't be attacked")

    def invert(self, problem, generator):
        raise NotImplementedError


class Scores(Classifier):
    def __init__(self, backbone: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        super().__init__(backbone or nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.1), nn.Linear(16, 10)))

    def forward(self, inputs):
        return self.backbone(inputs)


def fit(*callbacks, mechanism=None, module=None, **settings):
    module = module or Scores()
    federated = Federated(mechanism or FedAvg(), 4, clients_per_step=1, seed=0)
    trainer = make_trainer(federated, *callbacks, **settings)
    torch.manual_seed(1)
    trainer.fit(module, Digits(num_train=120))
    return module, trainer


def test_it_logs_and_the_training_is_the_same_bit_for_bit(monkeypatch):
    cpu_clock(monkeypatch)
    plain, _ = fit()
    monitor = LeakageMonitor(attempts=10, num_candidates=20)
    watched, trainer = fit(monitor)
    assert torch.equal(weights_of(plain), weights_of(watched))
    logged = trainer.callback_metrics
    assert logged["leak/hit_rate"] == 1.0  # FedAvg hides nothing
    assert logged["leak/leakage_low"] < logged["leak/leakage"] <= logged["leak/leakage_high"]
    assert logged["leak/attempts"] == 10
    assert [round for round, _ in monitor.results] == [0, 1]
    assert 0 < monitor.seconds < 5
    assert watched.training


def test_every_n_rounds_and_an_unprotected_mechanism_leaks_more():
    leaks = []
    for mechanism in (FedAvg(), LDPQ(epsilon_per_coordinate=0.1)):
        monitor = LeakageMonitor(every_n_rounds=2, attempts=40, num_candidates=40)
        _, trainer = fit(monitor, mechanism=mechanism, max_epochs=3)
        assert [round for round, _ in monitor.results] == [0, 2]
        leaks.append(trainer.callback_metrics["leak/leakage"])
    assert leaks[1] < leaks[0]


@pytest.mark.parametrize("attack", [Matching(), Endless()], ids=lambda attack: type(attack).__name__)
def test_time_is_bounded(attack, monkeypatch):
    """Two measurements of a second at most, of which no attempt of an endless search ever ends.

    On an idle machine they take 0.5 s each; others may use this one, hence the slack of half the limit.
    """
    cpu_clock(monkeypatch)
    monitor = LeakageMonitor(attack=attack, attempts=10**6, num_candidates=100, seconds_per_round=0.5)
    if isinstance(attack, Matching):
        _, trainer = fit(monitor, mechanism=CorBin(epsilon_per_coordinate=2.0))
        assert all(result.estimate.attempts < 10**6 for _, result in monitor.results)
        assert 4 <= trainer.callback_metrics["leak/candidates"] <= 100
    else:
        with pytest.warns(UserWarning, match="one attempt takes longer than"):
            fit(monitor)
        assert monitor.results == []
    assert monitor.seconds < 1.5


def test_candidates_whose_gradients_take_too_long(monkeypatch):
    waited = cpu_clock(monkeypatch)

    class Slow(nn.Module):
        def forward(self, inputs):
            waited.append(0.02)
            return inputs

    slow = Scores(nn.Sequential(Slow(), nn.Linear(64, 10)))
    monitor = LeakageMonitor(num_candidates=100, attempts=10, seconds_per_round=1.0)
    _, trainer = fit(monitor, module=slow, max_epochs=1)
    assert 4 <= trainer.callback_metrics["leak/candidates"] < 25
    assert monitor.seconds < 1.3
    impatient = LeakageMonitor(num_candidates=100, seconds_per_round=0.1)
    with pytest.warns(UserWarning, match="too long for 4 candidates in half of seconds_per_round = 0.1"):
        fit(impatient, module=Scores(nn.Sequential(Slow(), nn.Linear(64, 10))), max_epochs=1)


@pytest.mark.parametrize(
    "settings, module, message",
    [
        ({"attack": Refusing()}, Scores, "this model can't be attacked"),
        ({"num_candidates": 500}, Scores, "num_candidates = 500, but the training set has 120"),
        ({}, Classifier, "forward"),
    ],
)
def test_an_attack_that_cannot_work_warns_and_the_training_goes_on(settings, module, message):
    monitor = LeakageMonitor(**{"num_candidates": 20, **settings})
    with pytest.warns(UserWarning, match=message):
        _, trainer = fit(monitor, module=module())
    assert trainer.current_epoch == 2
    assert monitor.results == []


def test_refusals():
    with pytest.raises(ValueError, match="every_n_rounds must be >= 1"):
        LeakageMonitor(every_n_rounds=0)
    with pytest.raises(ValueError, match="seconds_per_round must be > 0"):
        LeakageMonitor(seconds_per_round=0.0)
    with pytest.raises(ValueError, match="num_candidates must be >= 4"):
        LeakageMonitor(num_candidates=3)
