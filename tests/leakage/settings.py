"""Digits and small models for the tests of attacks."""

import torch
from torch import nn

from lightning_fedq.leakage import Attack, Matching, Study
from tests.digits_run import digits


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def linear():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()


def mlp(activation=None):
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        layers = (nn.Flatten(), nn.Linear(64, 32), activation or nn.Sigmoid(), nn.Linear(32, 10))
        return nn.Sequential(*layers).eval()


def candidates(count=100):
    inputs, labels = digits()
    return (2 * inputs - 1)[:count].reshape(-1, 1, 8, 8), labels[:count]


def study(**changes):
    inputs, labels = candidates()
    settings = {
        "model": linear(),
        "loss": nn.functional.cross_entropy,
        "inputs": inputs,
        "labels": labels,
        "learning_rate": 0.1,
        "attack": Matching(),
    }
    return Study(**{**settings, **changes})


class Endless(Attack):
    """A search that looks at the time and finds nothing."""

    def invert(self, problem, generator):
        while True:
            problem.check_time()
