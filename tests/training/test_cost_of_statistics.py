"""BatchNorm behind noise says what it costs before anybody has trained."""

import pytest
import torch
from torch import nn

from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import LDPQ, FedAvg
from tests.digits_run import Classifier, Digits, make_trainer

WORDS = "Running statistics travel with noise: backbone.1.running_mean, backbone.1.running_var, 16 of 642"


def run(mechanism, caplog, norm=nn.BatchNorm1d, **settings):
    torch.manual_seed(0)
    module = Classifier(nn.Sequential(nn.Linear(64, 8), norm(8), nn.Linear(8, 10)))
    caplog.clear()
    with caplog.at_level("INFO"):
        fed = Federated(mechanism, 4, seed=1, **settings)
        make_trainer(fed, max_epochs=1).fit(module, datamodule=Digits(80, 10))
    return str(caplog.text)


@pytest.mark.filterwarnings("ignore:.*run can hardly learn")
def test_is_said_where_there_is_noise(caplog):
    said = run(LDPQ(2.0), caplog)
    assert WORDS in said and "Use GroupNorm" in said
    assert "travel with noise" not in run(FedAvg(), caplog)
    assert "travel with noise" not in run(LDPQ(2.0), caplog, buffers="local")
    assert "travel with noise" not in run(LDPQ(2.0), caplog, norm=nn.LayerNorm)
