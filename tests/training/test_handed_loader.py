import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, make_trainer, weights_of


def federated(**settings):
    return Federated(FedAvg(), 4, seed=1, clients_per_step=1, **settings)


def with_data_module(**trainer):
    module = Classifier()
    make_trainer(federated(), **trainer).fit(module, datamodule=Digits(80))
    return weights_of(module)


class Own(Classifier):
    def train_dataloader(self):
        return Digits(40).train_dataloader()


@pytest.mark.parametrize("kind", [Classifier, Own])
def test_is_dealt_out_like_a_data_module_s(kind):
    """Whatever loader the module has of its own: the one that was handed over counts, as in Lightning."""
    loader, module = Digits(80).train_dataloader(), kind()
    fed = federated()
    trainer = make_trainer(fed)
    trainer.fit(module, loader, Digits().val_dataloader())
    assert torch.equal(weights_of(module), with_data_module())
    assert "val_acc" in trainer.callback_metrics
    assert "train_dataloader" not in vars(module)
    assert trainer.fit_loop._data_source.instance is loader


def test_everything_is_given_back_after_an_error():
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("boom")

    loader, module = Digits(80).train_dataloader(), Fails()
    trainer = make_trainer(federated(), limit_train_batches=0.5)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(module, loader, Digits().val_dataloader())
    assert "train_dataloader" not in vars(module)
    assert trainer.fit_loop._data_source.instance is loader
    assert trainer.limit_train_batches == 0.5


def test_a_lightning_without_the_private_attribute_is_refused(monkeypatch):
    """As before: a loader that can't be taken over would train centrally."""
    import lightning_fedq.training.checks as checks
    import lightning_fedq.training.population as module

    monkeypatch.setattr(module, "handed_loader", lambda trainer: None)
    monkeypatch.setattr(checks, "handed_loader", lambda trainer: None)
    message = r"not the clients' own, .*datamodule=FederatedDataModule.from_loader\(loader, val_loader\)"
    for kind in (Classifier, Own):
        with pytest.raises(ValueError, match=message):
            make_trainer(federated()).fit(kind(), Digits(80).train_dataloader(), Digits().val_dataloader())


def test_callbacks_may_look_at_the_loader():
    class Looks(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            loader = trainer.train_dataloader
            self.seen = len(loader.dataset), loader.batch_size, loader.num_workers, loader.drop_last
            self.collate = loader.collate_fn

    looks, loader = Looks(), Digits(80, drop_last=True).train_dataloader()
    make_trainer(federated(), looks, max_epochs=1).fit(Classifier(), loader, Digits().val_dataloader())
    assert looks.seen == (80, 10, 0, True)
    assert looks.collate is loader.collate_fn


def test_a_trainer_of_the_other_package_is_told_so():
    import lightning.pytorch as other
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = other.Trainer(
        max_epochs=1, callbacks=[federated()], accelerator="cpu", logger=False, enable_checkpointing=False
    )
    told = (
        r"The Trainer is from lightning.pytorch, but lightning_fedq uses pytorch_lightning, which was "
        r"imported first. Import lightning.pytorch before lightning_fedq"
    )
    with pytest.raises(ValueError, match=told):
        trainer.fit(BoringModel())


class Whole:
    """Batches of another library, which knows no DataLoader."""

    def __init__(self):
        self.batches = list(DataLoader(Digits(80).train_set(), batch_size=10))

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, number):
        return self.batches[number]


@pytest.mark.parametrize("clients_per_step", [1, 4])
def test_a_sequence_of_batches_is_dealt_out_batch_by_batch(clients_per_step):
    def trained(loader):
        module = Classifier()
        fed = Federated(FedAvg(), 4, seed=1, clients_per_step=clients_per_step)
        make_trainer(fed).fit(module, loader, Digits().val_dataloader())
        return weights_of(module)

    expected = trained(DataLoader(Whole(), batch_size=None))
    assert torch.equal(trained(Whole()), expected)
    assert not torch.equal(expected, weights_of(Classifier()))


def test_one_client_with_a_sequence_of_batches_is_the_plain_training():
    plain, ours = Classifier(), Classifier()
    make_trainer(max_epochs=1).fit(plain, Whole(), Digits().val_dataloader())
    fed = Federated(FedAvg(), 1, seed=1)
    make_trainer(fed, max_epochs=1).fit(ours, Whole(), Digits().val_dataloader())
    torch.testing.assert_close(weights_of(ours), weights_of(plain), atol=1e-6, rtol=0)
