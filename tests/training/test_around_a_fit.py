"""Before, between and after fits, as tutorials do it: files, resuming, `test`, `predict`, compiled modules.

`tests/test_lightning_binding.py` runs this file under the other import name.
"""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import FedAvg
from tests.digits_run import Classifier, Digits, digits, make_trainer, weights_of

CLIENTS = 8


class Normed(pl.LightningModule):
    """Hyperparameters, BatchNorm, dropout, Adam and a schedule: a tutorial's classifier."""

    def __init__(self, hidden: int = 16, lr: float = 0.05, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(dropout)]
        self.net = nn.Sequential(*layers, nn.Linear(hidden, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def test_step(self, batch, batch_idx):
        self.log("test_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def train():
    inputs, labels = digits()
    return DataLoader(TensorDataset(inputs[:256], labels[:256]), batch_size=8, shuffle=True)


def val():
    inputs, labels = digits()
    return DataLoader(TensorDataset(inputs[256:512], labels[256:512]), batch_size=64)


def federated(mechanism=None, **settings):
    return Federated(mechanism or FedAvg(), CLIENTS, **{"seed": 0, "clients_per_step": 4, **settings})


def made(**settings):
    torch.manual_seed(0)
    return Normed(**settings)


def saving(folder, **settings):
    return pl.callbacks.ModelCheckpoint(dirpath=folder, **settings)


def same_state(one, other):
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("buffers", ["share", "local"])
def test_the_best_file_loads_and_goes_on_federated_or_centrally(tmp_path, buffers):
    module, keep = made(hidden=12), saving(tmp_path, monitor="val_acc", mode="max")
    trainer = make_trainer(federated(buffers=buffers), keep, max_epochs=3, enable_checkpointing=True)
    trainer.fit(module, train(), val())
    best = Normed.load_from_checkpoint(keep.best_model_path)
    assert best.hparams["hidden"] == 12
    found = make_trainer().validate(best, val(), verbose=False)[0]["val_acc"]
    assert found == pytest.approx(float(keep.best_model_score))
    again = Normed.load_from_checkpoint(keep.best_model_path, lr=0.01)
    assert again.hparams["lr"] == 0.01
    make_trainer(federated(), max_epochs=1).fit(again, train(), val())
    make_trainer(max_epochs=1).fit(best, train(), val())


def test_the_saved_model_is_the_module(tmp_path):
    module, trainer = made(), make_trainer(federated())
    trainer.fit(module, train(), val())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    same_state(module, Normed.load_from_checkpoint(tmp_path / "end.ckpt"))
    torch.load(tmp_path / "end.ckpt", weights_only=True)


class Middle(pl.Callback):
    """Saves in the middle of a client."""

    is_shared_by_clients = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, *args):
        if trainer.current_epoch == 1 and args[-1] == 1:
            trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("file", ["last", "end of a round", "middle of a round"])
def test_resumes_from_the_user_s_own_model_checkpoint(tmp_path, file):
    whole, cut = made(), made()
    make_trainer(federated(clients_per_step=1), max_epochs=4).fit(whole, train(), val())
    keep = saving(tmp_path, save_last=True, every_n_epochs=1, filename="{epoch}")
    if file == "middle of a round":
        keep = Middle(tmp_path / "middle.ckpt")
    first = make_trainer(federated(clients_per_step=1), keep, max_epochs=2, enable_checkpointing=True)
    first.fit(cut, train(), val())
    files = {"last": "last", "end of a round": tmp_path / "epoch=1.ckpt"}
    path = files.get(file, tmp_path / "middle.ckpt")
    settings = {"max_epochs": 4, "enable_checkpointing": True}
    resumed, module = make_trainer(federated(clients_per_step=1), saving(tmp_path), **settings), made(lr=9.0)
    resumed.fit(module, train(), val(), ckpt_path=path)
    assert resumed.current_epoch == 4
    same_state(module, whole)


def test_the_same_trainer_validates_tests_and_predicts_the_global_model(tmp_path):
    keep = saving(tmp_path, monitor="val_acc", mode="max")
    module, trainer = made(), make_trainer(federated(), keep, enable_checkpointing=True)
    trainer.validate(module, val(), verbose=False)
    trainer.fit(module, train(), val())
    weights = weights_of(module)
    shown = trainer.validate(module, val(), verbose=False)[0]["val_acc"]
    tested = trainer.test(module, val(), verbose=False)[0]["test_acc"]
    predicted = torch.cat(trainer.predict(module, val()))
    accuracy = (predicted == digits()[1][256:512]).float().mean().item()
    assert shown == pytest.approx(tested) == pytest.approx(accuracy)
    assert torch.equal(weights_of(module), weights)
    best = trainer.test(dataloaders=val(), ckpt_path="best", verbose=False)[0]["test_acc"]
    assert best == pytest.approx(float(keep.best_model_score))


def test_a_compiled_module_trains_as_it_does_uncompiled(tmp_path):
    plain, whole, part = made(dropout=0.0), made(dropout=0.0), made(dropout=0.0)
    make_trainer(federated(clients_per_step=1)).fit(plain, train(), val())
    compiled = torch.compile(whole, backend="eager")
    trainer = make_trainer(federated(clients_per_step="auto"))
    with pytest.warns(UserWarning, match=r"one client at a time.*torch.compile\(module\)"):
        trainer.fit(compiled, train(), val())
    part.net = torch.compile(part.net, backend="eager")
    make_trainer(federated(clients_per_step="auto")).fit(part, train(), val())
    torch.testing.assert_close(weights_of(whole), weights_of(plain), atol=1e-5, rtol=1e-4)
    trainer.test(compiled, val(), verbose=False)
    trainer.save_checkpoint(tmp_path / "compiled.ckpt")
    same_state(whole, Normed.load_from_checkpoint(tmp_path / "compiled.ckpt"))


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided")
def test_files_of_central_trainings_and_of_federated_ones_are_each_other_s(tmp_path):
    for order in ((False, True), (True, False)):
        first, second = ([federated()] if is_federated else [] for is_federated in order)
        trainer = make_trainer(*first, max_epochs=1)
        trainer.fit(made(), train(), val())
        trainer.save_checkpoint(tmp_path / "first.ckpt")
        other = make_trainer(*second, max_epochs=2)
        other.fit(made(), train(), val(), ckpt_path=tmp_path / "first.ckpt")
        assert other.current_epoch == 2


HOME = ("setup", "on_fit_start", "on_train_start", "on_validation_epoch_end", "on_fit_end")


@pytest.mark.parametrize(
    ("whose", "hook"),
    [(whose, hook) for whose in ("module", "callback") for hook in HOME]
    + [("callback", "on_train_epoch_end")],
)
def test_nothing_but_a_client_s_training_draws_batches(whose, hook):
    """Where the global model's hooks run, the loader holds all clients' data, and hands none of it out."""

    class Weighted(Classifier if whose == "module" else pl.Callback):
        seen = 0

    def look(self, *args, **kwargs):
        trainer = self.trainer if whose == "module" else args[0]
        if not hasattr(trainer, "home"):
            loader = trainer.train_dataloader
            for batch in trainer.datamodule.train_dataloader() if loader is None else loader:
                Weighted.seen += len(batch[0])

    setattr(Weighted, hook, look)
    friends = [Weighted()] if whose == "callback" else []
    trainer = make_trainer(
        Federated(FedAvg(), 3, clients_per_step=1), *friends, max_epochs=1, num_sanity_val_steps=0
    )
    with pytest.raises(RuntimeError, match="Only clients may iterate the training loader"):
        trainer.fit(Weighted() if whose == "module" else Classifier(), datamodule=Digits(60))
    assert Weighted.seen == 0
