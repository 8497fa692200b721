from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.strategies.rehearsal import elementwise
from tests.digits_run import Classifier, Digits, make_trainer, weights_of


def test_the_run_does_not_notice_the_rehearsal() -> None:
    """The chosen stack by rehearsal and the same by number: bit for bit the same run."""
    calls: list[int] = []

    class Counting(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.steps += 1
            calls.append(self.steps)
            return super().training_step(batch, batch_idx)

    runs = []
    for clients_per_step in ("auto", 6):
        fed, module = Federated(FedAvg(), 6, seed=0, clients_per_step=clients_per_step), Counting()
        make_trainer(fed, max_epochs=2).fit(module, datamodule=Digits(60))
        runs.append((fed.clients_per_step_chosen, module.steps, weights_of(module)))
    assert runs[0][0] in (1, 6)
    if runs[0][0] == 6:
        assert runs[0][1] == runs[1][1] == 2
        assert torch.equal(runs[0][2], runs[1][2])
    torch.testing.assert_close(runs[0][2], runs[1][2], atol=1e-6, rtol=1e-5)
    assert len(calls) > 4


def test_large_models_are_not_stacked_on_a_cpu() -> None:
    fed = Federated(FedAvg(), 4, seed=0)
    wide = Classifier(nn.Sequential(nn.Linear(64, 20_000), nn.Linear(20_000, 10)))
    make_trainer(fed, max_epochs=1).fit(wide, datamodule=Digits(8))
    assert fed.clients_per_step_chosen == 1


def test_elementwise() -> None:
    params = [nn.Parameter(torch.zeros(3))]
    assert elementwise(torch.optim.Adam(params))
    assert not elementwise(torch.optim.LBFGS(params))

    class Own(torch.optim.SGD):
        pass

    assert not elementwise(Own(params, lr=0.1)), "a subclass may do anything"
