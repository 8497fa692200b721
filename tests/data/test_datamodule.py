import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import is_overridden, pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import IID, FederatedDataModule, LabelShards
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


class Described(pl.LightningDataModule):
    """What people's data modules usually have."""

    dims = (1, 8, 8)

    def __init__(self, num_classes=10, batch_size=20):
        super().__init__()
        self.save_hyperparameters()
        self.num_classes, self.batch_size, self.num_workers = num_classes, batch_size, 0
        self.data, self.split, self.sources, self.stage_of_setup = "a name", 0.8, ["web"], None

    @property
    def labels(self):
        return [str(number) for number in range(self.num_classes)]

    def decode(self, label):
        return self.labels[label]

    def setup(self, stage):
        inputs, labels = digits()
        self.train_set = TensorDataset(inputs[:80], labels[:80])
        self.stage_of_setup = stage

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size)

    val_dataloader = train_dataloader


USUAL = ("num_classes", "batch_size", "num_workers", "data", "split", "sources", "dims", "labels", "hparams")


class Reads(Classifier):
    """Reads its Trainer's data module in hooks, in the fit and in the clients' copies."""

    def on_fit_start(self):
        module = self.trainer.datamodule
        self.read = {name: getattr(module, name) for name in (*USUAL, "train_set", "stage_of_setup")}
        assert module.decode(3) == "3"

    def training_step(self, batch, batch_idx):
        assert self.trainer.datamodule.num_classes == 10
        return super().training_step(batch, batch_idx)


def test_the_user_s_names_are_read_through_it(tmp_path):
    own = Described()
    wrapped = FederatedDataModule(own, partition=IID())
    for name in USUAL:
        assert getattr(wrapped, name) == getattr(own, name), name
    assert wrapped.hparams == {"num_classes": 10, "batch_size": 20} == wrapped.hparams_initial
    with pytest.raises(AttributeError, match="'Described' object has no attribute 'num_clases'"):
        wrapped.num_clases  # noqa: B018
    assert not hasattr(FederatedDataModule(digits()[0], batch_size=5), "num_classes")
    module, logger = Reads(), pl.loggers.CSVLogger(tmp_path)
    fed = Federated(FedAvg(), 4, seed=1, clients_per_step=1)
    trainer = make_trainer(fed, max_epochs=1, logger=logger)
    trainer.fit(module, datamodule=wrapped)
    assert module.read["train_set"] is own.train_set and module.read["stage_of_setup"] == "fit"
    assert module.read["hparams"] == own.hparams
    assert "num_classes: 10" in (Path(logger.log_dir) / "hparams.yaml").read_text()


def test_the_user_s_names_are_set_through_it():
    """As a callback does that grows the images: the user's own hooks read what was set."""
    wrapped = FederatedDataModule(own := Described(), partition=IID())
    wrapped.num_classes = 3
    assert own.num_classes == 3 and wrapped.labels == ["0", "1", "2"]
    wrapped.of_nobody = 1
    assert not hasattr(own, "of_nobody") and wrapped.of_nobody == 1
    copied = pickle.loads(pickle.dumps(wrapped))
    copied.num_classes = 5
    assert (copied.decode(4), own.num_classes) == ("4", 3)
    assert FederatedDataModule(own, batch_size=7).batch_size == 7 and own.batch_size == 20
