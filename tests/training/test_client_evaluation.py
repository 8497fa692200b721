"""Evaluation by client: what is held out, what is measured on it, and where the numbers go."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_fedq import ClientEvaluation
from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, RunFolder
from lightning_fedq.data import FederatedDataModule, LabelShards
from lightning_fedq.mechanisms import LDPQ, FedAvg
from tests.digits_run import Classifier, Digits, digits, make_trainer, weights_of

CLIENTS, BATCH, SAMPLES = 5, 5, 100


class Measured(Classifier):
    """With a loss, a hidden layer and dropout, and a metric that is worse when it is larger."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(64, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 10)]
        super().__init__(nn.Sequential(*layers))

    def validation_step(self, batch, batch_idx):
        scores = self.backbone(batch[0])
        self.log("val_acc", (scores.argmax(1) == batch[1]).float().mean(), prog_bar=True)
        self.log_dict({"val_loss": nn.functional.cross_entropy(scores, batch[1])})


def federated(mechanism=None, **settings):
    known = {"seed": 1, "partition": LabelShards(2), "evaluate_clients": ClientEvaluation(0.25)}
    return Federated(mechanism or FedAvg(), CLIENTS, **{**known, **settings})


def fit(fed, module=None, rounds=3, data=None, **trainer):
    module = module or Measured()
    more, ckpt_path = trainer.pop("more", ()), trainer.pop("ckpt_path", None)
    trainer = make_trainer(fed, *more, max_epochs=rounds, **trainer)
    trainer.fit(module, datamodule=data or Digits(SAMPLES, BATCH), ckpt_path=ckpt_path)
    return module, trainer


def parts(fed):
    return fed.fit.population.partitioned_data.held_out


def scores(module, part):
    inputs, labels = digits()
    module.eval()
    with torch.no_grad():
        found = module.backbone(inputs[part])
        loss = nn.functional.cross_entropy(found, labels[part])
    return float((found.argmax(1) == labels[part]).double().mean()), float(loss)


def test_every_client_keeps_samples_out():
    fed = federated()
    fit(fed, rounds=1)
    for left, out in zip(fed.client_indices, parts(fed), strict=True):
        assert len(out) == 5 and len(left) == 15
    everything = torch.cat([*fed.client_indices, *parts(fed)])
    assert torch.equal(everything.sort().values, torch.arange(SAMPLES))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning")
def test_they_are_not_trained_on():
    """The same clients without what they hold out, given by index, train the same model."""
    fed = federated()
    module, _ = fit(fed)
    inputs, labels = digits()
    loader = DataLoader(TensorDataset(inputs[:SAMPLES], labels[:SAMPLES]), batch_size=BATCH, shuffle=True)
    data = FederatedDataModule.from_loader(loader, None, clients=[c.tolist() for c in fed.client_indices])
    same = Federated(FedAvg(), CLIENTS, seed=1)
    expected, _ = fit(same, data=data)
    assert torch.equal(weights_of(module), weights_of(expected))


@pytest.mark.parametrize("clients_per_step", [1, 5])
@pytest.mark.parametrize("local", [(), ("backbone.3.*",)])
def test_values_are_those_of_the_models(local, clients_per_step):
    fed = federated(personal_parameters=local, clients_per_step=clients_per_step)
    module, _ = fit(fed)
    assert [measured.round for measured in fed.client_evaluations] == [0, 1, 2]
    last = fed.client_evaluations[-1]
    assert set(last.values) == ({"global", "personal"} if local else {"global"})
    own = Measured()
    for client, part in enumerate(parts(fed)):
        accuracy, loss = scores(module, part)
        assert last.values["global"]["val_acc"][client] == pytest.approx(accuracy, abs=1e-6)
        assert last.values["global"]["val_loss"][client] == pytest.approx(loss, rel=1e-5)
        if local:
            own.load_state_dict({**module.state_dict(), **fed.personal_state(client)})
            accuracy, loss = scores(own, part)
            assert last.values["personal"]["val_acc"][client] == pytest.approx(accuracy, abs=1e-6)
            assert last.values["personal"]["val_loss"][client] == pytest.approx(loss, rel=1e-5)


def test_measuring_changes_nothing_in_the_training():
    """Dropout draws random numbers; they are the same with and without a measurement in between."""
    often, seldom = (federated(evaluate_clients=ClientEvaluation(0.25, every_n_rounds=n)) for n in (1, 2))
    one, other = fit(often)[0], fit(seldom)[0]
    assert torch.equal(weights_of(one), weights_of(other))
    assert [measured.round for measured in seldom.client_evaluations] == [1, 2], "and the last round"


def test_without_a_claim_it_is_logged(tmp_path):
    logger = pl.loggers.CSVLogger(tmp_path)
    fed = federated()
    _, trainer = fit(fed, logger=logger, more=[RunFolder("run", str(tmp_path), show=False)])
    wanted = fed.client_evaluations[-1].metrics()
    assert set(wanted) == {
        f"clients/{name}_{kind}"
        for name in ("val_acc", "val_loss")
        for kind in ("mean", "lowest_decile", "highest_decile", "std")
    }
    for name, value in wanted.items():
        assert float(trainer.callback_metrics[name]) == pytest.approx(value, rel=1e-6)
    table = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert "clients/val_acc_lowest_decile" in table[0]
    assert "clients/val_acc_mean" in (Path(logger.log_dir) / "metrics.csv").read_text()
    line = "Metrics of models on clients' held-out samples, without noise: `clients/val_acc_mean`"
    assert line in page(tmp_path)


def page(folder):
    return " ".join((folder / "run" / "privacy.md").read_text().split())


def test_where_something_is_claimed_it_stays_with_the_clients(tmp_path):
    logger = pl.loggers.CSVLogger(tmp_path)
    fed = federated(LDPQ(epsilon_per_coordinate=0.5), seed=None, personal_parameters=("backbone.3.*",))
    _, trainer = fit(fed, logger=logger, more=[RunFolder("run", str(tmp_path), show=False)])
    assert len(fed.client_evaluations) == 3
    assert not [name for name in trainer.callback_metrics if name.startswith(("clients/", "personal/"))]
    assert "clients/val" not in (Path(logger.log_dir) / "metrics.csv").read_text()
    run = tmp_path / "run"
    for path in run.iterdir():
        if path.is_file() and path.suffix in (".csv", ".json", ".md"):
            assert "_decile" not in path.read_text(), path
    lines = [json.loads(line) for line in (run / "clients" / "evaluation.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert len(lines[-1]["by_client"]["personal/val_acc"]) == CLIENTS
    assert "Not released: `val_acc`, `val_loss` on clients' held-out samples" in page(tmp_path)


def test_whoever_decides_by_it_in_a_private_run_finds_no_such_metric():
    stop = pl.callbacks.EarlyStopping("clients/val_acc_mean", mode="max")
    with pytest.raises(RuntimeError, match="clients/val_acc_mean"):
        fit(federated(LDPQ(epsilon_per_coordinate=0.5), seed=None), more=[stop])
    fit(federated(), more=[stop])


class WithObjects(Classifier):
    """Logs a metric object, one that an epoch's end computes, and keeps outputs of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(10, average="micro")
        self.later = MulticlassAccuracy(10, average="micro")
        self.seen = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        scores = self.backbone(batch[0])
        self.accuracy(scores, batch[1])
        self.later.update(scores, batch[1])
        self.seen.append(len(batch[1]))
        self.log("val_acc", self.accuracy)
        self.log("val_most", float(len(batch[1])), reduce_fx="max")

    def on_validation_epoch_end(self):
        self.log("val_later", self.later.compute())
        self.log("val_seen", float(sum(self.seen)))
        self.later.reset()
        self.seen.clear()


def test_metric_objects_and_hooks():
    fed = federated(evaluate_clients=ClientEvaluation(0.6))  # 12 samples, in batches of 5, 5 and 2
    module, _ = fit(fed, WithObjects())
    found = fed.client_evaluations[-1].values["global"]
    expected = torch.tensor([scores(module, part)[0] for part in parts(fed)], dtype=torch.float64)
    torch.testing.assert_close(found["val_acc"], expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(found["val_later"], expected, atol=1e-6, rtol=0)
    assert found["val_seen"].tolist() == [12.0] * CLIENTS
    assert found["val_most"].tolist() == [5.0] * CLIENTS


def test_data_sets_of_each_client():
    inputs, labels = digits()
    own = [TensorDataset(inputs[c * 20 : c * 20 + 12], labels[c * 20 : c * 20 + 12]) for c in range(CLIENTS)]
    fed = federated(evaluate_clients=ClientEvaluation(own))
    module, _ = fit(fed)
    assert sum(map(len, fed.client_indices)) == SAMPLES, "all are trained on"
    found = fed.client_evaluations[-1].values["global"]["val_acc"]
    for client in range(CLIENTS):
        part = torch.arange(client * 20, client * 20 + 12)
        assert found[client] == pytest.approx(scores(module, part)[0], abs=1e-6)
    with pytest.raises(ValueError, match="held_out has 4 data sets, expected num_clients = 5"):
        fit(federated(evaluate_clients=ClientEvaluation(own[:4])))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_a_resumed_run_holds_out_the_same(tmp_path):
    first = federated(LDPQ(epsilon_per_coordinate=4.0), seed=None)
    _, trainer = fit(first, rounds=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = federated(LDPQ(epsilon_per_coordinate=4.0), seed=None)
    fit(again, rounds=2, ckpt_path=tmp_path / "one.ckpt")
    for one, other in zip(parts(first), parts(again), strict=True):
        assert torch.equal(one, other)
    less = federated(LDPQ(epsilon_per_coordinate=4.0), seed=None, evaluate_clients=ClientEvaluation(0.1))
    with pytest.raises(ValueError, match=r"another federation: held_out = 0\.25 \(here 0\.1\)"):
        fit(less, rounds=2, ckpt_path=tmp_path / "one.ckpt")


def test_numbers_out_of_range():
    for wrong in (0.0, 1.0, -0.2, 3):
        with pytest.raises(ValueError, match=r"held_out must be a fraction in \(0, 1\)"):
            ClientEvaluation(wrong)
    with pytest.raises(ValueError, match="every_n_rounds must be >= 1, got 0"):
        ClientEvaluation(every_n_rounds=0)
    with pytest.raises(TypeError, match="evaluate_clients must be ClientEvaluation"):
        federated(evaluate_clients=0.2)


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`:UserWarning")
def test_without_a_validation_step():
    class Without(Classifier):
        validation_step = pl.LightningModule.validation_step

    with pytest.raises(ValueError, match=r"Without has none\. Write one"):
        fit(federated(), Without(), limit_val_batches=0)


def test_clients_with_loaders_of_their_own():
    inputs, labels = digits()
    own = [DataLoader(TensorDataset(inputs[:10], labels[:10]), batch_size=2 + c) for c in range(CLIENTS)]
    val = DataLoader(TensorDataset(inputs[:10], labels[:10]), batch_size=10)
    data = FederatedDataModule(clients=own, val=val)
    fed = Federated(FedAvg(), CLIENTS, seed=1, evaluate_clients=ClientEvaluation(0.25))
    with pytest.raises(ValueError, match=r"ClientEvaluation\(held_out=\[loader, \.\.\.\]\)"):
        fit(fed, data=data)
    loaders = [DataLoader(TensorDataset(inputs[:10], labels[:10]), batch_size=1 + c) for c in range(CLIENTS)]
    given = Federated(FedAvg(), CLIENTS, seed=1, evaluate_clients=ClientEvaluation(loaders))
    module, _ = fit(given, data=FederatedDataModule(clients=own, val=val))
    expected = scores(module, torch.arange(10))[0]
    found = given.client_evaluations[-1].values["global"]["val_acc"]
    assert found.tolist() == pytest.approx([expected] * CLIENTS, abs=1e-6), "batches of any size"


def test_an_unknown_metric_is_answered_with_those_there_are():
    fed = federated()
    fit(fed, rounds=1)
    with pytest.raises(KeyError, match="val_acc of the global model"):
        fed.client_evaluations[0].spread("acc")
