"""`datasets.Dataset` of Hugging Face, handed over directly."""

import pytest
import torch
from torch import nn

from lightning_fedq.callbacks import Federated
from lightning_fedq.data import Dirichlet, FeatureShards, FederatedDataModule, Natural
from lightning_fedq.data.labels import has_stored_labels, read_labels
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, digits, make_trainer, weights_of

hf = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
SAMPLES = 80


def table(label="label", users=True):
    inputs, labels = digits()
    columns = {"pixels": inputs[:SAMPLES].tolist(), label: labels[:SAMPLES].tolist()}
    if users:
        columns["writer"] = [f"w{index % 4}" for index in range(SAMPLES)]
    return hf.Dataset.from_dict(columns)


class Module(Classifier):
    def training_step(self, batch, batch_idx):
        assert batch["pixels"].dim() == 2 and batch["pixels"].shape[1] == 64
        return nn.functional.cross_entropy(self.backbone(batch["pixels"]), batch["label"])

    def validation_step(self, batch, batch_idx):
        right = self.backbone(batch["pixels"]).argmax(1) == batch["label"]
        self.log("val_acc", right.float().mean(), batch_size=len(right))


def fit(data, clients=4, **settings):
    module, fed = Module(), Federated(FedAvg(), clients, seed=0, **settings)
    make_trainer(fed, max_epochs=1).fit(module, datamodule=data)
    return module, fed


@pytest.mark.parametrize(
    ("rule", "formatted"),
    [(Natural("writer"), True), (Dirichlet(1.0), False), (FeatureShards(), False), (FeatureShards(), True)],
)
def test_it_is_dealt_out_and_trained_on(rule, formatted):
    data, val = table(), table()
    if formatted:
        data.set_format("torch", columns=["pixels", "label"])
    else:
        val = val.remove_columns("writer")
    each = 4 if formatted else 1  # else names of users are in the batches, and differ within a stack
    module, fed = fit(FederatedDataModule(data, batch_size=5, partition=rule, val=val), clients_per_step=each)
    assert fed.clients_per_step_chosen == each
    assert torch.equal(torch.cat(fed.client_indices).sort().values, torch.arange(SAMPLES))
    assert (weights_of(module) - weights_of(Module())).norm() > 0.1
    if isinstance(rule, Natural):
        assert fed.client_indices[1].tolist() == list(range(1, SAMPLES, 4))


def test_it_trains_as_tensors_do():
    from torch.utils.data import TensorDataset

    inputs, labels = digits()
    tensors = TensorDataset(inputs[:SAMPLES], labels[:SAMPLES])
    module, fed = Classifier(), Federated(FedAvg(), 4, seed=0)
    data = FederatedDataModule(tensors, batch_size=5, val=tensors, partition=Dirichlet(1.0))
    make_trainer(fed, max_epochs=1).fit(module, datamodule=data)
    plain = table(users=False)
    other, _ = fit(FederatedDataModule(plain, batch_size=5, val=plain, partition=Dirichlet(1.0)))
    torch.testing.assert_close(weights_of(module), weights_of(other), atol=1e-6, rtol=1e-5)


def test_one_for_each_client():
    shares = {f"site {c}": table(users=False).select(range(c * 20, c * 20 + 20)) for c in range(4)}
    module, fed = fit(FederatedDataModule(clients=shares, batch_size=5, val=table(users=False)))
    assert [len(part) for part in fed.client_indices] == [20] * 4
    same = table(users=False)
    data = FederatedDataModule(
        same, batch_size=5, val=same, clients=[range(c * 20, c * 20 + 20) for c in range(4)]
    )
    assert torch.equal(weights_of(module), weights_of(fit(data)[0]))


def test_labels():
    assert read_labels(table()).tolist() == digits()[1][:SAMPLES].tolist()
    assert read_labels(table("fine"), "fine").tolist() == digits()[1][:SAMPLES].tolist()
    assert has_stored_labels(table()) and not has_stored_labels(table(), "fine")
    with pytest.raises(
        ValueError, match=r"no column 'label' or 'labels' among pixels, fine, writer.*labels="
    ):
        read_labels(table("fine"))
    with pytest.raises(ValueError, match=r"has no column 'coarse'. It has pixels, label, writer"):
        read_labels(table(), "coarse")
    with pytest.raises(ValueError, match=r"has no column 'user'. It has pixels, label, writer"):
        fit(FederatedDataModule(table(), batch_size=5, partition=Natural("user"), val=table()))
