"""Measuring clients: a data set that is dealt out as the training's, and clients who measure nothing."""

import json
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from lightning_fedq import ClientEvaluation
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import (
    IID,
    Dirichlet,
    FeatureShards,
    FederatedDataModule,
    LabelShards,
    Natural,
    QuantitySkew,
)
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.training.client_evaluation import EvaluatedClients, Spread
from tests.digits_run import Classifier, Digits, digits, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:Federated trains one client at a time")
CLIENTS = 5


def labelled(first, last):
    inputs, labels = digits()
    return TensorDataset(inputs[first:last], labels[first:last])


def written(first, last, writers):
    """Images by writers with numbers, of whom some have written in one part only."""
    inputs, labels = labelled(first, last).tensors
    return TensorDataset(
        inputs, labels, torch.tensor([writers[i % len(writers)] for i in range(len(labels))])
    )


class Counts(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[:2], batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch[:2], batch_idx)
        self.log("val_count", float(len(batch[1])), reduce_fx="sum")
        self.log("val_sum", batch[0].sum(), reduce_fx="sum")


class OfSet(Digits):
    def __init__(self, train, batch_size=5):
        super().__init__(100, batch_size)
        self.train = train

    def train_set(self):
        return self.train


def federated(held_out, partition, **settings):
    held = ClientEvaluation(held_out)
    return Federated(FedAvg(), CLIENTS, partition=partition, seed=1, evaluate_clients=held, **settings)


def fit(fed, module, train, rounds=1, **options):
    trainer = make_trainer(fed, *options.pop("more", ()), max_epochs=rounds, **options)
    trainer.fit(module, datamodule=OfSet(train))
    return fed


def parts(fed):
    return fed.fit.population.partitioned_data.held_out


def test_who_wrote_the_training_s_samples_is_measured_on_its_own():
    """Also where a writer lacks among the held-out ones, which moves no other."""
    train, held = written(0, 100, [3, 7, 11, 20, 40]), written(100, 160, [40, 3, 11])
    fed = fit(federated(held, Natural(2)), Counts(), train)
    assert [set(held.tensors[2][part].tolist()) for part in parts(fed)] == [{3}, set(), {11}, set(), {40}]
    counts = fed.client_evaluations[0].values["global"]["val_count"]
    assert counts[[0, 2, 4]].tolist() == [20.0] * 3 and bool(counts[[1, 3]].isnan().all())


def test_merged_writers_stay_with_their_client():
    train, held = written(0, 120, [4, 4, 5, 9, 2, 1, 1, 3]), written(120, 220, [1, 2, 3, 4, 9, 9, 9, 5])
    fed = fit(federated(held, Natural(2, merge_users=True)), Counts(), train)
    own = [set(train.tensors[2][part].tolist()) for part in fed.client_indices]
    assert [set(held.tensors[2][part].tolist()) for part in parts(fed)] == own


RULES = {
    "IID": IID(),
    "labels": LabelShards(2),
    "Dirichlet": Dirichlet(0.2, min_partition_size=3),
    "sizes": QuantitySkew(0.5, min_partition_size=3),
    "features": FeatureShards(),
}


def test_a_part_of_a_data_set_is_that_part():
    whole = labelled(0, 100)
    held = random_split(whole, [70, 30], torch.Generator().manual_seed(0))
    fed = fit(federated(held[1], LabelShards(2)), Counts(), held[0])
    found = fed.client_evaluations[0].values["global"]["val_sum"].nan_to_num()
    expected = [sum(float(held[1][i][0].sum()) for i in part.tolist()) for part in parts(fed)]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_each_rule_deals_out_what_it_deals_to_the_training(name):
    train, held = labelled(0, 200), labelled(200, 600)
    fed = fit(federated(held, RULES[name]), Counts(), train)
    given, own = fed.client_indices, parts(fed)
    assert torch.equal(torch.cat(own).sort().values, torch.arange(400))
    if name in ("labels", "Dirichlet"):
        for mine, part in zip(given, own, strict=True):
            assert set(held.tensors[1][part].tolist()) <= set(train.tensors[1][mine].tolist())
            share = torch.bincount(train.tensors[1][mine], minlength=10) / len(mine)
            found = torch.bincount(held.tensors[1][part], minlength=10) / len(part)
            assert float((share - found).abs().sum()) < 0.6
    if name == "features":
        means = [t.tensors[0].double().mean(1) for t in (train, held)]
        for mine, part in zip(given, own, strict=True):
            low, high = means[0][mine].min(), means[0][mine].max()
            inside = (means[1][part] >= low - 0.02) & (means[1][part] <= high + 0.02)
            assert float(inside.double().mean()) > 0.9
    if name in ("IID", "sizes"):
        shares = torch.tensor([len(part) for part in given]) / 200
        found = torch.tensor([len(part) for part in own]) / 400
        assert float((shares - found).abs().max()) < 0.02
    counts = fed.client_evaluations[0].values["global"]["val_count"]
    assert counts.nan_to_num().tolist() == [float(len(part)) for part in own]


def test_a_rule_s_data_module_and_a_loader_of_its_own_batches():
    train, held = labelled(0, 100), labelled(100, 200)
    data = FederatedDataModule(OfSet(train), partition=LabelShards(2))
    seen = []

    class Sizes(Counts):
        def validation_step(self, batch, batch_idx):
            seen.append(len(batch[1]))
            super().validation_step(batch, batch_idx)

    loader = DataLoader(held, batch_size=7)
    fed = Federated(FedAvg(), CLIENTS, seed=1, evaluate_clients=ClientEvaluation(loader))
    make_trainer(fed, max_epochs=1, limit_val_batches=0).fit(Sizes(), datamodule=data)
    assert sum(seen) == 100 and max(seen) == 7


def test_nothing_to_measure_on_is_refused_before_round_1():
    empty = federated([labelled(100, 100)] * CLIENTS, IID())
    with pytest.raises(ValueError, match="no client has a held-out sample"):
        fit(empty, Counts(), labelled(0, 100))
    assert not empty.ledger.rounds


def test_measuring_draws_nothing_of_the_training():
    found = []
    for held in (None, ClientEvaluation(DataLoader(labelled(100, 160), batch_size=7))):
        torch.manual_seed(3)
        fed = Federated(FedAvg(), CLIENTS, seed=1, evaluate_clients=held)
        fit(fed, Counts(), labelled(0, 100), rounds=2)
        found.append(torch.get_rng_state())
    assert torch.equal(*found)


# ---- who measures nothing ----------------------------------------------------------------------------------


def test_an_empty_set_is_not_measured_and_said_before_round_1(caplog):
    caplog.set_level("INFO")
    own = [labelled(100 + 10 * c, 100 + 10 * c + (0 if c in (1, 3) else 10)) for c in range(CLIENTS)]
    fed = fit(federated(own, IID()), Counts(), labelled(0, 100), rounds=2)
    assert caplog.text.count("Clients 1, 3 have no held-out samples, so they are not measured") == 1
    for one in fed.client_evaluations:
        found = one.values["global"]["val_acc"]
        assert found.isnan().tolist() == [False, True, False, True, False]
        spread = one.spread("val_acc")
        assert spread.mean == pytest.approx(float(found[[0, 2, 4]].mean())) and spread.not_measured == 2
        assert one.metrics()["clients/val_acc_not_measured"] == 2.0


class Scores(Classifier):
    """An area under a curve, which clients of one class have not, beside an accuracy."""

    def __init__(self, how="object") -> None:
        super().__init__(nn.Linear(64, 10))
        self.how, self.area = how, BinaryAUROC()
        self.accuracy = MulticlassAccuracy(2, average="micro")

    def validation_step(self, batch, batch_idx):
        labels = (batch[1] > 4).long()
        self.area.update(labels.float() * 0.8 + 0.1, labels)
        if self.how == "object":
            self.log("val_auc", self.area)
        elif self.how == "left out" and 0 < int(labels.sum()) < len(labels):
            self.log("val_auc", 1.0)
        elif self.how == "NaN":
            self.log("val_auc", float("nan") if len(labels.unique()) < 2 else 1.0)
        self.accuracy(labels, labels)
        self.log("val_acc", self.accuracy)

    def on_validation_epoch_end(self):
        if self.how == "hook":
            self.log("val_auc", self.area.compute())


@pytest.mark.parametrize("how", ["object", "hook", "left out", "NaN"])
def test_an_area_that_one_class_has_not_is_not_measured(how):
    own = [labelled(100 + 20 * c, 120 + 20 * c) for c in range(CLIENTS)]
    inputs, labels = digits()
    for client in (1, 2):
        chosen = torch.nonzero(labels[100:] > 4).flatten()[20 * client : 20 * client + 20] + 100
        own[client] = TensorDataset(inputs[chosen], labels[chosen])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fed = federated(own, IID(), client_metrics="shared")
        trainer = make_trainer(fed, max_epochs=1, limit_val_batches=0)
        warnings.filterwarnings("ignore")
        trainer.fit(Scores(how), datamodule=OfSet(labelled(0, 100)))
    one = fed.client_evaluations[0]
    assert one.values["global"]["val_auc"].isnan().tolist() == [False, True, True, False, False]
    assert one.spread("val_auc") == Spread(1.0, 1.0, 1.0, 0.0, 2)
    assert one.spread("val_acc") == Spread(1.0, 1.0, 1.0, 0.0)


def test_a_spread_leaves_out_what_is_not_measured():
    values = torch.cat([torch.arange(20.0), torch.full((5,), math.nan)])
    assert Spread.summarise(values) == Spread(
        9.5, 0.5, 18.5, float(values[:20].double().std(correction=0)), 5
    )
    assert Spread.summarise(values, "min").worst_decile == 18.5
    nobody = Spread.summarise(torch.full((3,), math.nan), "max")
    assert nobody.not_measured == 3
    assert all(math.isnan(value) for value in (nobody.mean, nobody.worst_decile, nobody.std))


def test_files_hold_no_number_that_is_none(tmp_path):
    values = {"global": {"val_acc": torch.tensor([0.5, math.nan], dtype=torch.float64)}}
    plain = EvaluatedClients(0, values).plain()
    assert plain["by_client"]["clients/val_acc"] == [0.5, None] and plain["clients/val_acc_not_measured"] == 1
    json.dumps(plain, allow_nan=False)
    values = {"global": {"val_acc": torch.tensor([math.nan], dtype=torch.float64)}}
    json.dumps(EvaluatedClients(0, values).plain(), allow_nan=False)
