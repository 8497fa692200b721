"""Cures that measured leakage names: `LeakageMonitor`, `LeakageBudget`."""

import time
import warnings

from torch import nn
from torch.utils.data import TensorDataset

from lightning_fedq.leakage import Attack, LeakageBudget, LeakageMonitor, Matching
from lightning_fedq.mechanisms import FedAvg, NearOptimalUtility
from lightning_fedq.mechanisms.interface import Adversary
from tests.cures.rows import fed, fit, module_with, row, sgd
from tests.cures.rows_data import Loads, loader
from tests.digits_run import digits
from tests.leakage.settings import generator, mlp, study
from tests.leakage.test_monitor import Scores

INPUTS, LABELS = digits()


class Pixels(Scores):
    """Takes whole numbers, and more columns than two."""

    def forward(self, inputs):
        return super().forward(inputs.float() / 16.0)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def columns(*held):
    """A data module of these columns."""
    return Loads(loader(TensorDataset(*held)))


class Slow(nn.Module):
    def forward(self, inputs):
        time.sleep(0.01)
        return inputs


def watched(data=None, module=None, **settings):
    """A fit with a monitor, whose complaint is raised."""
    monitor = LeakageMonitor(**{"attempts": 4, "num_candidates": 8, "seconds_per_round": 60.0, **settings})
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        fit(fed(), monitor, data=data, module=module or Scores())
    for warning in heard:
        if "LeakageMonitor stops measuring" in str(warning.message):
            raise ValueError(str(warning.message))
    assert monitor.results


def slow():
    return Scores(nn.Sequential(Slow(), nn.Linear(64, 10)))


class Searching(Attack):
    """Looks at the time for a tenth of a second."""

    def invert(self, problem, generator):
        end = time.perf_counter() + 0.1
        while time.perf_counter() < end:
            problem.check_time()
        return problem.candidates[:1]


def hurried(attack, seconds):
    study(model=mlp(), attack=attack).run(FedAvg(), Adversary.EAVESDROPPER, 1, generator(), seconds=seconds)


def bounded(lr=0.1, budget=0.5, rounds=1, **probe):
    """A fit under a budget of leakage."""
    fit(
        fed(NearOptimalUtility(1.0, leakage_budget=budget, noise_std=0.1, measured_leakage=0.1)),
        LeakageBudget(**{"probe_size": 4, "attempts": 60, "every_n_rounds": 1, **probe}),
        module=module_with(sgd(lr=lr)),
        max_epochs=rounds,
    )


row("num_candidates = {}, but the", lambda: watched(num_candidates=500), lambda: watched(num_candidates=50))
row(
    "LeakageMonitor needs samples that are pairs of an input and a class. Leave the monitor out",
    lambda: watched(columns(INPUTS[:80], LABELS[:80], LABELS[:80]), Pixels()),
    lambda: fit(data=columns(INPUTS[:80], LABELS[:80], LABELS[:80]), module=Pixels()),
)
row(
    "LeakageMonitor needs inputs of floats, got {}. Leave the monitor out",
    lambda: watched(columns((16 * INPUTS[:80]).byte(), LABELS[:80]), Pixels()),
    lambda: fit(data=columns((16 * INPUTS[:80]).byte(), LABELS[:80]), module=Pixels()),
)
row(
    "the gradient of one sample takes {} s, too long for {} candidates in half of",
    lambda: watched(module=slow(), seconds_per_round=0.05),
    lambda: watched(module=slow(), seconds_per_round=60.0),
    lambda: fit(module=slow()),
)
row(
    "one attempt takes longer than {} s. Allow more time, or use Matching",
    lambda: hurried(Searching(), 0.01),
    lambda: hurried(Searching(), 60.0),
    lambda: hurried(Matching(), 0.01),
)
row("the gradients of the probe must be finite.", lambda: bounded(lr=1e39), lambda: bounded(lr=0.1))
row(
    "No noise brings the leakage among {} candidates below {}. Use a",
    lambda: bounded(budget=0.2, rounds=2),
    lambda: bounded(budget=0.5, rounds=2),
    lambda: bounded(budget=0.2, rounds=2, probe_size=16),
    lambda: bounded(budget=0.2, rounds=2, attempts=2000),
)
