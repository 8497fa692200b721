"""Samplers within every client, against the same drawn by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_fedq.callbacks import Federated
from lightning_fedq.data import Dirichlet
from lightning_fedq.mechanisms import FedAvg
from tests.by_hand import data_order, federated_averaging, plans_of, sgd_step
from tests.digits_run import Classifier, Digits, digits, make_trainer, weights_of

NUM, BATCH, CLIENTS = 120, 10, 4


def federated(**settings):
    return Federated(FedAvg(), CLIENTS, **{"seed": 1, "clients_per_step": 1, **settings})


def train_set():
    inputs, labels = digits()
    return TensorDataset(inputs[:NUM], labels[:NUM])


def weights():
    return torch.where(digits()[1][:NUM] == 3, 5.0, 1.0).double()


def run(fed, **loader):
    module = Classifier()
    make_trainer(fed).fit(module, DataLoader(train_set(), **loader), Digits().val_dataloader())
    return weights_of(module)


def by_hand(fed, draw):
    """Two rounds of federated averaging on what `draw(held, generator)` gives each client."""
    model = Classifier().backbone

    def train(client, plan):
        for part in draw(fed.client_indices[client], data_order(plan, client)).split(BATCH):
            sgd_step(model, part)

    return federated_averaging(model, plans_of(fed, 2), train)


def same(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_weights_hold_inside_each_client(clients_per_step):
    fed = federated(clients_per_step=clients_per_step)
    found = run(fed, batch_size=BATCH, sampler=WeightedRandomSampler(weights(), NUM))
    same(
        found,
        by_hand(fed, lambda held, g: held[torch.multinomial(weights()[held], len(held), True, generator=g)]),
    )


def test_a_sampler_that_draws_half_of_the_samples():
    fed = federated()
    found = run(fed, batch_size=BATCH, sampler=RandomSampler(train_set(), num_samples=NUM // 2))
    same(found, by_hand(fed, lambda held, g: held[torch.randperm(len(held), generator=g)[: len(held) // 2]]))
    fed = federated()
    found = run(fed, batch_size=BATCH, sampler=RandomSampler(train_set(), replacement=True))
    same(found, by_hand(fed, lambda held, g: held[torch.randint(len(held), (len(held),), generator=g)]))


class Sorted(Sampler[int]):
    """A curriculum: by label, then by index."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __iter__(self):
        return iter(torch.argsort(self.labels, stable=True).tolist())


@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_the_order_of_a_sampler_of_one_s_own_holds_inside_each_client(clients_per_step):
    labels = digits()[1][:NUM]
    fed = federated(clients_per_step=clients_per_step)
    found = run(fed, batch_size=BATCH, sampler=Sorted(labels))
    in_order = Sorted(labels)

    def draw(held, generator):
        return torch.tensor([index for index in in_order if index in set(held.tolist())])

    same(found, by_hand(fed, draw))


def test_a_sampler_with_half_of_the_samples_makes_passes_half_as_long():
    fed = federated()
    run(fed, batch_size=BATCH, sampler=list(range(0, NUM, 2)))
    assert fed.fit.population.partitioned_data.schedule.max_batches == 2  # 15 of 30 in batches of 10


class Ready(Dataset[Any]):
    """Batches that are made already."""

    def __len__(self):
        return NUM // BATCH

    def __getitem__(self, index):
        inputs, labels = digits()
        own = slice(index * BATCH, (index + 1) * BATCH)
        return inputs[own], labels[own]


@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_batches_that_are_made_already_are_dealt_out_whole(clients_per_step):
    module, fed = Classifier(), federated(clients_per_step=clients_per_step)
    make_trainer(fed).fit(module, DataLoader(Ready(), batch_size=None), Digits().val_dataloader())

    def samples(batches, generator):
        return torch.cat([torch.arange(i * BATCH, (i + 1) * BATCH) for i in batches.tolist()])

    same(weights_of(module), by_hand(fed, samples))


def test_only_the_samples_of_a_subset_are_dealt_out():
    fed = federated(partition=Dirichlet(1.0))
    found = run(fed, batch_size=BATCH, sampler=SubsetRandomSampler(range(0, NUM, 2)))
    assert sorted(torch.cat(fed.client_indices).tolist()) == list(range(0, NUM, 2))

    def shuffled(held, generator):
        return held if len(held) <= BATCH else held[torch.randperm(len(held), generator=generator)]

    same(found, by_hand(fed, shuffled))


def test_torch_s_own_batch_sampler_is_a_batch_size():
    plain = run(federated(), batch_size=7, shuffle=True, drop_last=True)
    batches = BatchSampler(RandomSampler(train_set()), 7, drop_last=True)
    assert torch.equal(run(federated(), batch_sampler=batches), plain)


def test_clients_that_cannot_draw():
    only_first = torch.zeros(NUM)
    only_first[0] = 1.0
    message = "have too few samples with positive weights .* Use another partition, fewer clients"
    with pytest.raises(ValueError, match=message):
        run(federated(), batch_size=BATCH, sampler=WeightedRandomSampler(only_first, NUM))


def test_labels_that_are_named():
    inputs, labels = digits()
    rows = TensorDataset(inputs[:NUM], labels[:NUM], torch.arange(NUM))

    class Three(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[:2], batch_idx)

    fed = federated(partition=Dirichlet(0.5), labels=1)
    loaders = DataLoader(rows, batch_size=BATCH), Digits().val_dataloader()
    make_trainer(fed, max_epochs=1).fit(Three(), *loaders)
    plain = federated(partition=Dirichlet(0.5))
    make_trainer(plain, max_epochs=1).fit(Classifier(), datamodule=Digits(NUM))
    assert all(torch.equal(a, b) for a, b in zip(fed.client_indices, plain.client_indices, strict=True))
    assert fed.label_figure().axes[0].get_ylabel() == "label"
