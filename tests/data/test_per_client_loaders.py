"""Data sets and loaders of each client, and several loaders at once, on real trainings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.mechanisms import FedAvg
from tests.by_hand import federated_averaging, sgd_step
from tests.digits_run import Classifier, digits, fitted, make_trainer, weights_of

SIZES = (10, 25, 12)
STARTS = (0, 10, 35)


def federated(**settings):
    return Federated(FedAvg(), len(SIZES), **{"seed": 1, "clients_per_step": 1, **settings})


def part(client):
    inputs, labels = digits()
    rows = slice(STARTS[client], STARTS[client] + SIZES[client])
    return TensorDataset(inputs[rows], labels[rows])


def rest():
    inputs, labels = digits()
    return DataLoader(TensorDataset(inputs[1500:], labels[1500:]), batch_size=300)


class Stream(IterableDataset[Any]):
    """One client's samples, in their order, without a length."""

    def __init__(self, client: int) -> None:
        self.data = part(client)

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


class Backwards(BatchSampler):
    """A batch sampler of the user's own: the last samples come first."""

    def __iter__(self):
        return reversed([list(batch) for batch in super().__iter__()])


def by_hand(batches, weights=(1.0, 1.0, 1.0), rounds=2):
    """Federated averaging on `batches(client, round)`."""
    model = Classifier().backbone

    def train(client, plan):
        for batch in batches(client, plan.round):
            sgd_step(model, tuple(batch))

    plans = [SimpleNamespace(round=round, survivors=range(len(weights))) for round in range(rounds)]
    return federated_averaging(model, plans, train, weights.__getitem__)


def same(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def fit(fed, clients, module=None, **settings):
    trainer = {name: settings.pop(name) for name in ("limit_train_batches", "max_epochs") if name in settings}
    module = module or Classifier()
    data = FederatedDataModule(clients=clients, val=rest(), **settings)
    make_trainer(fed, **trainer).fit(module, datamodule=data)
    return weights_of(module)


def shuffled(fed, client, round):
    inputs, labels = part(client).tensors
    order = torch.arange(SIZES[client])
    if SIZES[client] > 10:
        seed = fed.planner.plan(round, fed.mechanism).stream_seed("data order", client)
        order = torch.randperm(SIZES[client], generator=torch.Generator().manual_seed(seed))
    return [(inputs[rows], labels[rows]) for rows in order.split(10)]


# ---- one data set for each client


@pytest.mark.parametrize("clients_per_step", [1, 3])
def test_data_sets_by_name_and_in_order(clients_per_step):
    fed = federated(clients_per_step=clients_per_step)
    called = []

    def lazily(client):
        return lambda: called.append(f"site{client}") or part(client)

    sources = {f"site{client}": lazily(client) for client in range(3)}
    FederatedDataModule(clients=sources, batch_size=10)
    assert called == []
    found = fit(fed, sources, batch_size=10)
    assert called == ["site0", "site1", "site2"]
    same(found, by_hand(lambda client, round: shuffled(fed, client, round)))
    in_order = fit(federated(clients_per_step=clients_per_step), [part(c) for c in range(3)], batch_size=10)
    assert torch.equal(in_order, found)
    assert [len(indices) for indices in fed.client_indices] == list(SIZES)


def test_loaders_that_are_alike_train_side_by_side():
    loaders = [DataLoader(Subset(part(c), range(10)), batch_size=10, shuffle=True) for c in range(3)]
    fed = federated(clients_per_step=3)
    wanted = by_hand(lambda client, round: [tuple(tensor[:10] for tensor in part(client).tensors)])
    same(fit(fed, loaders), wanted)
    assert fed.clients_per_step_chosen == 3


def test_weighted_by_the_samples_of_each_client():
    fed = federated(weighting="samples")
    found = fit(fed, [part(c) for c in range(3)], batch_size=10)
    same(found, by_hand(lambda client, round: shuffled(fed, client, round), SIZES))


# ---- loaders of their own


def test_streams_begin_anew_in_every_round_and_start_over_where_they_end():
    def batches(client, round):
        inputs, labels = part(client).tensors
        one_pass = list(zip(inputs.split(10), labels.split(10), strict=True))
        return (one_pass * 4)[:4]

    fed = federated(local_steps=4, clients_per_step="auto")
    same(fit(fed, [Stream(c) for c in range(3)], batch_size=10), by_hand(batches))
    assert fed.clients_per_step_chosen == 1
    lazily = {str(c): (lambda c=c: Stream(c)) for c in range(3)}
    found = fit(federated(), lazily, batch_size=10, limit_train_batches=1)
    same(found, by_hand(lambda client, round: batches(client, round)[:1]))


def test_loaders_with_batch_samplers_of_their_own(caplog):
    loaders = [
        DataLoader(part(c), batch_sampler=Backwards(SequentialSampler(part(c)), 10, False)) for c in range(3)
    ]

    def batches(client, round):
        inputs, labels = part(client).tensors
        return list(zip(inputs.split(10), labels.split(10), strict=True))[::-1] * 2

    with caplog.at_level("INFO"):
        same(fit(federated(local_epochs=2), loaders), by_hand(batches))
    assert "one client at a time, because every client has its own training loaders" in caplog.text
    weighted = fit(federated(local_epochs=2, weighting="samples"), loaders)
    same(weighted, by_hand(batches, SIZES))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_resumes_with_loaders_of_their_own(tmp_path):
    """Their generators, too, start each round of each client as in the run that was not interrupted."""

    def data():
        loaders = [
            DataLoader(part(0), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)),
            DataLoader(part(1), batch_size=10, shuffle=True),
            DataLoader(Stream(2), batch_size=10),
        ]
        return FederatedDataModule(clients=loaders, val=rest())

    keep = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    whole, again = Classifier(), Classifier()
    fitted(whole, federated(local_steps=3), keep, data=data(), enable_checkpointing=True)
    make_trainer(federated(local_steps=3)).fit(again, datamodule=data(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert torch.equal(weights_of(again), weights_of(whole))


# ---- several loaders at once


class Pairs(Classifier):
    """Learns from two loaders; the second gives None where it is over."""

    def training_step(self, batch, batch_idx):
        given = [pair for pair in (batch["a"], batch["b"]) if pair is not None]
        return sum(nn.functional.cross_entropy(self.backbone(inputs), labels) for inputs, labels in given)


@pytest.mark.parametrize("mode", ["dict", "max_size", "min_size"])
def test_several_loaders_are_dealt_out_each(mode):
    inputs, labels = digits()
    a, b = TensorDataset(inputs[:90], labels[:90]), TensorDataset(inputs[90:120], labels[90:120])
    loaders = {"a": DataLoader(a, batch_size=10), "b": DataLoader(b, batch_size=5)}
    if mode != "dict":
        loaders = pl.utilities.CombinedLoader(loaders, mode)
    fed, module = federated(), Pairs()
    make_trainer(fed).fit(module, loaders, rest())
    held = [(own[own < 90], own[own >= 90]) for own in fed.client_indices]
    assert all((len(x), len(y)) == (30, 10) for x, y in held)
    assert sorted(torch.cat(fed.client_indices).tolist()) == list(range(120))
    model = Classifier().backbone

    def train(client, plan):
        ours, others = (list(own.split(size)) for own, size in zip(held[client], (10, 5), strict=True))
        others += {"dict": others[:1], "max_size": [None], "min_size": []}[mode]
        for pair in zip(ours, others, strict=mode != "min_size"):
            batches = [batch for batch in pair if batch is not None]
            sgd_step(model, *batches, rate=0.5 * len(batches))  # the loss is a sum

    plans = [SimpleNamespace(survivors=range(3))] * 2
    same(weights_of(module), federated_averaging(model, plans, train))


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "clients", "message"),
    [
        ({"local_steps": 2}, [Stream(0)] * 2, "loaders of 2 clients, but num_clients is 3"),
        ({"local_steps": 2, "clients_per_step": 3}, [Stream(0)] * 3, "can't train side by side, got client"),
        ({}, [part(0), part(1), lambda: 3], "client 2 must be a Dataset, a DataLoader or a function"),
    ],
)
def test_clients_that_do_not_fit(settings, clients, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fit(federated(**settings), clients, batch_size=10)


def test_arguments_that_do_not_go_together():
    with pytest.raises(TypeError, match="needs data, or the data sets of its clients"):
        FederatedDataModule()
    with pytest.raises(ValueError, match=r"clients must have one data set .* got none"):
        FederatedDataModule(clients=[], batch_size=10)
    with pytest.raises(
        TypeError, match=r"got tuple_iterator. .*DataLoader\(iterable_dataset, batch_size=None\)"
    ):
        make_trainer(federated()).fit(Classifier(), iter(()), rest())
