"""Buffers of one's own over Flower: the server, which has no data to try, is told what travels."""

import pytest
import torch
from torch import nn

from lightning_fedq.mechanisms import LDPQ
from tests.flower.loop import Net, deploy, federated
from tests.training.test_constraints import Normaliser


def net():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Net(nn.Sequential(nn.Flatten(), Normaliser(), nn.Linear(64, 10)), lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_variances_of_one_s_own_stay_positive(tmp_path):
    told = {"extra_buffers": ["*.var", "*.middle"], "constraints": {"*.var": "positive"}}
    server = deploy(lambda: federated(LDPQ(2.0), **told), 2, tmp_path, module=net)
    (variances,) = (b for name, b in server.trainer.lightning_module.named_buffers() if name.endswith(".var"))
    assert len(server.records) == 2 and not torch.equal(variances, torch.ones(64))
    assert float(variances.min()) > 0
