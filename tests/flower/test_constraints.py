"""Buffers of one's own over Flower: the server, which has no data to try, is told what travels."""

import pytest
import torch
from torch import nn

from lightning_fedq.flower import client_app
from lightning_fedq.mechanisms import LDPQ
from tests.flower.loop import CLIENTS, LoopGrid, Net, deployment, federated, own_digits
from tests.training.test_constraints import Normaliser


def net():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Net(nn.Sequential(nn.Flatten(), Normaliser(), nn.Linear(64, 10)), lr=0.1)


def make(**options):
    return federated(LDPQ(2.0), **options)


@pytest.mark.filterwarnings("ignore")
def test_variances_of_one_s_own_stay_positive(tmp_path):
    told = {"extra_buffers": ["*.var", "*.middle"], "constraints": {"*.var": "positive"}}
    apps = [client_app(net, own_digits, make(**told)) for _ in range(CLIENTS)]
    grid = LoopGrid(apps, [tmp_path / str(client) for client in range(CLIENTS)])
    trainer, server = deployment(make(**told), 2, tmp_path, module=net).run(grid)
    (variances,) = (b for name, b in trainer.lightning_module.named_buffers() if name.endswith(".var"))
    assert len(server.records) == 2 and not torch.equal(variances, torch.ones(64))
    assert float(variances.min()) > 0
