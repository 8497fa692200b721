"""A real client whose last batch is too small for the training refuses itself before the first round."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_fedq.flower import client_app
from lightning_fedq.mechanisms import LDPQ
from tests.flower.loop import CLIENTS, LoopGrid, Net, OwnDigits, deployment, federated, own_digits

SAMPLES, SIZE = 17, 16


class Odd(OwnDigits):
    """One sample is left over."""

    def train_dataloader(self):
        return DataLoader(Subset(self.samples, range(SAMPLES)), batch_size=SIZE, shuffle=True)


def odd_digits(context):
    return Odd(int(context.node_config["partition-id"]))


def net():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Net(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)), lr=0.1)


def make():
    return federated(LDPQ(2.0))


@pytest.mark.filterwarnings("ignore:node |.*BatchNorm|.*registration|register:UserWarning")
def test_it_is_refused_by_itself_and_its_log_has_the_cure(tmp_path: Path) -> None:
    data = [odd_digits, *[own_digits] * (CLIENTS - 1)]
    apps = [client_app(net, one, make()) for one in data]
    grid = LoopGrid(apps, [tmp_path / str(client) for client in range(CLIENTS)])
    with (
        pytest.warns(
            UserWarning, match=f"has 1 of {SIZE} samples, and training on it fails .*drop_last=True"
        ),
        pytest.raises(RuntimeError, match=r"fails on this client's data\. The client's log has") as told,
    ):
        deployment(make(), 1, tmp_path, module=net).run(grid)
    assert "samples" not in str(told.value), "nothing of the data is told"
    assert {kind for kind, _ in grid.log} == {"register"}
