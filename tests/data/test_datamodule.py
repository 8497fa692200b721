import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import is_overridden, pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import FederatedDataModule, LabelShards
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, digits, make_trainer, weights_of


def fit(data, **settings):
    fed, module = Federated(FedAvg(), 5, seed=0, **{"clients_per_step": 1, **settings}), Classifier()
    make_trainer(fed, max_epochs=1).fit(module, datamodule=data)
    return fed, weights_of(module)


def test_wraps_a_data_module_and_passes_everything_else_through():
    calls = []

    class Prepared(Digits):
        def setup(self, stage):
            calls.append((stage, type(self.trainer).__name__))

        def on_after_batch_transfer(self, batch, dataloader_idx):
            calls.append("batch")
            return batch

    data = FederatedDataModule(Prepared(100), partition=LabelShards(2))
    fed, _ = fit(data)
    assert calls[0] == ("fit", "Trainer") and "batch" in calls
    assert max(len(digits()[1][part].unique()) for part in fed.client_indices) <= 5
    assert is_overridden("val_dataloader", data, pl.LightningDataModule)
    assert not is_overridden("predict_dataloader", data, pl.LightningDataModule)
    assert not is_overridden("transfer_batch_to_device", data, pl.LightningDataModule)


def test_batch_size_replaces_the_wrapped_one():
    loader = FederatedDataModule(Digits(100), batch_size=7).train_dataloader()
    assert loader.batch_size == 7
    assert type(loader.sampler).__name__ == "RandomSampler"


def test_wraps_datasets():
    train, val = TensorDataset(*(t[:50] for t in digits())), TensorDataset(*(t[50:60] for t in digits()))
    data = FederatedDataModule(train, batch_size=10, val=val, test=val)
    assert len(data.val_dataloader()) == len(data.test_dataloader()) == 1
    fed, weights = fit(data)
    assert [len(part) for part in fed.client_indices] == [10] * 5
    _, same = fit(FederatedDataModule.from_loader(DataLoader(train, 10, shuffle=True), DataLoader(val, 10)))
    assert torch.equal(weights, same)


def test_explicit_clients():
    train = TensorDataset(*(t[:50] for t in digits()))
    clients = [[0, 1], [2], [3, 4, 5], [7], [49]]
    fed, _ = fit(FederatedDataModule(train, batch_size=10, clients=clients, val=train), clients_per_step=2)
    assert [part.tolist() for part in fed.client_indices] == clients


def test_refusals():
    train = TensorDataset(*digits())
    with pytest.raises(ValueError, match="batch_size must be >= 1, got 0"):
        FederatedDataModule(train, batch_size=0)
    with pytest.raises(TypeError, match="must return one torch DataLoader, got list"):

        class Several(Digits):
            def train_dataloader(self):
                return [super().train_dataloader()]

        FederatedDataModule(Several(), batch_size=3).train_dataloader()
