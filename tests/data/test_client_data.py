"""Data sets of clients that are opened in their client's turn, and closed after it."""

from typing import ClassVar

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import lightning_fedq as fedq
from lightning_fedq.clients.snapshot import Snapshot
from lightning_fedq.data import ClientData, FederatedDataModule
from tests.digits_run import Classifier, digits, fitted, weights_of

VAL = TensorDataset(*(part[-10:] for part in digits()))
CLIENTS, SIZES = 9, [8, 12, 5, 8, 8, 20, 8, 3, 8]


class Shard(Dataset):
    """A file of a client: it counts how many are open."""

    open_now: ClassVar[set[int]] = set()
    most: ClassVar[int] = 0
    opened: ClassVar[list[int]] = []

    def __init__(self, client):
        inputs, labels = digits()
        begin = sum(SIZES[:client])
        rows = slice(begin, begin + SIZES[client])
        self.client, self.rows = client, (inputs[rows], labels[rows])
        type(self).open_now = self.open_now | {client}
        type(self).most = max(self.most, len(self.open_now))
        self.opened.append(client)

    def __len__(self):
        return SIZES[self.client]

    def __getitem__(self, index):
        return tuple(part[index] for part in self.rows)

    def close(self):
        type(self).open_now = self.open_now - {self.client}


def turns():
    return [ClientData(lambda client=client: Shard(client), SIZES[client]) for client in range(CLIENTS)]


def train(clients, num_workers=0, **settings):
    Shard.open_now, Shard.most, Shard.opened = set(), 0, []
    federated = fedq.Federated(fedq.CorBin(4.0), CLIENTS, seed=0, **settings)
    data = FederatedDataModule(clients=clients, val=VAL, batch_size=4, num_workers=num_workers)
    return weights_of(fitted(Classifier(), federated, data=data).lightning_module)


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_they_train_as_data_sets_that_are_always_open(stack, workers):
    settings = {"clients_per_step": stack, "cohort": 6}
    always = train([Shard(client) for client in range(CLIENTS)], workers, **settings)
    assert torch.equal(train(turns(), workers, **settings), always)


def test_no_more_are_open_than_train_side_by_side():
    train(turns(), clients_per_step=3)
    assert 3 <= Shard.most <= 4, "a stack, and what was tried before the first round"
    train(turns(), clients_per_step=1, cohort=4)
    assert 1 <= Shard.most <= 2 and Shard.opened
    data = FederatedDataModule(clients=turns(), batch_size=4)
    Shard.opened.clear()
    assert [len(part) for part in data.sources.split] == SIZES and not Shard.opened, "sizes are known"


def test_a_client_s_world_does_not_grow_with_the_number_of_clients():
    few, many = (
        FederatedDataModule(clients=[ClientData(lambda: Shard(0), 8)] * count, batch_size=4)
        for count in (2, 2_000)
    )
    sizes = [len(Snapshot([module])._bytes) for module in (few, many)]
    assert sizes[1] - sizes[0] < 200
    assert Snapshot([many]).load()[1][0].sources is many.sources


def test_a_federation_names_the_size_that_is_wrong():
    data = TensorDataset(torch.zeros(4, 64), torch.zeros(4, dtype=torch.int64))
    clients = [ClientData(lambda: data, 4), ClientData(lambda: data, 5)]
    federated = fedq.Federated(fedq.FedAvg(), 2, seed=0)
    with pytest.raises(ValueError, match=r"4 samples, but ClientData\(size=5\)"):
        fitted(Classifier(), federated, data=FederatedDataModule(clients=clients, val=VAL, batch_size=2))
