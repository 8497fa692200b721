"""Checkpoints of a run that claims privacy hold no state of a metric that a client's data have changed."""

from pathlib import Path

import pytest
import torch
import torchmetrics

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.training.checkpoints import is_same_state
from tests.digits_run import Classifier, Digits, make_trainer


class Counts(Classifier):
    """Keeps an exact mean of what it trains on, in one of three ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seen = how, torchmetrics.MeanMetric()
        self.seen.persistent(how != "not saved")

    def training_step(self, batch, batch_idx):
        if self.how != "in validation":
            self.seen.update(batch[0].mean())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.how == "in validation":
            self.seen.update(batch[0].mean())
        return super().validation_step(batch, batch_idx)


class Saves(pl.Callback):
    """In the middle of every client, after every round, and where something is refused."""

    is_shared_by_clients = True

    def __init__(self, folder: Path, weights_only: bool = False) -> None:
        self.folder, self.weights_only, self.count = folder, weights_only, 0

    def on_train_batch_end(self, trainer, *_):
        self.on_train_epoch_end(trainer)

    def on_train_epoch_end(self, trainer, *_):
        self.count += 1
        trainer.save_checkpoint(self.folder / f"{self.count}.ckpt", weights_only=self.weights_only)

    def on_exception(self, trainer, *_):
        trainer.save_checkpoint(self.folder / "failed.ckpt")


def test_a_persistent_metric_of_samples_is_in_no_checkpoint(tmp_path):
    trainer = make_trainer(DPSGD(20.0, 1.0, delta=1e-3), Saves(tmp_path))
    with pytest.raises(ValueError, match=r"Training changed seen.mean_value, seen.weight, which checkpoints"):
        trainer.fit(Counts("saved"), datamodule=Digits(60))
    assert [file.name for file in tmp_path.glob("*.ckpt")] == ["failed.ckpt"]
    saved = torch.load(tmp_path / "failed.ckpt", weights_only=True)["state_dict"]
    assert saved["seen.weight"] == saved["seen.mean_value"] == 0


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_persistent_metric_of_clients_is_in_no_checkpoint(weights_only, tmp_path):
    saves = Saves(tmp_path, weights_only)
    trainer = make_trainer(Federated(LDPQ(0.001), 3, clients_per_step=1), saves)
    trainer.fit(Counts("saved"), datamodule=Digits(60))
    files = list(tmp_path.glob("*.ckpt"))
    assert len(files) == saves.count > 2 * 3 * 2
    for file in files:
        saved = torch.load(file, weights_only=True)["state_dict"]
        assert saved["seen.weight"] == saved["seen.mean_value"] == 0, file


@pytest.mark.parametrize("how", ["not saved", "in validation"])
def test_other_metrics_are_nobody_s_business(how):
    for callback in (Federated(LDPQ(0.001), 3), DPSGD(20.0, 1.0, delta=1e-3)):
        trainer = make_trainer(callback)
        trainer.fit(Counts(how), datamodule=Digits(60))
        assert trainer.current_epoch == 2


def test_a_run_that_claims_nothing_keeps_them():
    trainer = make_trainer(Federated(LDPQ(0.001), 3, seed=1, clients_per_step=1))
    trainer.fit(Counts("saved"), datamodule=Digits(60))
    assert trainer.current_epoch == 2


class History(pl.Callback):
    """Keeps the loss of every batch, in its state."""

    def __init__(self) -> None:
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        self.losses.append(float(outputs["loss"]))

    def state_dict(self):
        return {"losses": self.losses}


class Normalised(Digits):
    """Keeps an average of what it hands out, in its state."""

    def __init__(self) -> None:
        super().__init__(60)
        self.mean = torch.zeros(64)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.trainer is not None and self.trainer.training:
            self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)
        return batch

    def state_dict(self):
        return {"mean": self.mean}


class Scaled(Classifier):
    """Writes the mean input into its hyperparameters."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        self.hparams["scale"] = float(batch[0].mean())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize(
    ("module", "data", "callbacks"),
    [
        (Classifier, lambda: Digits(60), lambda: [History()]),
        (Classifier, Normalised, list),
        (Scaled, lambda: Digits(60), list),
    ],
)
def test_states_of_callbacks_and_data_modules_are_in_no_checkpoint(
    module, data, callbacks, weights_only, tmp_path
):
    fed, begun = Federated(LDPQ(0.001), 3, clients_per_step=1), data()
    before = str(begun.state_dict())
    trainer = make_trainer(fed, *callbacks(), Saves(tmp_path, weights_only))
    trainer.fit(module(), datamodule=begun)
    assert len(list(tmp_path.glob("*.ckpt"))) > 2 * 3 * 2
    for file in tmp_path.glob("*.ckpt"):
        saved = torch.load(file, weights_only=False)
        assert saved.get("hyper_parameters", {"scale": 1.0}) == {"scale": 1.0}, file
        assert str(saved.get(type(begun).__qualname__, {})) in (before, "{}"), file
        assert not any(state.get("losses") for state in saved.get("callbacks", {}).values()), file


@pytest.mark.parametrize("private", [lambda: Federated(LDPQ(0.001), 3, clients_per_step=1), None])
def test_spike_detection_decides_by_exact_losses(private):
    callback = private() if private else DPSGD(20.0, 1.0, delta=1e-3)
    trainer = make_trainer(callback, pl.callbacks.SpikeDetection())
    with pytest.raises(ValueError, match="SpikeDetection uses exact losses of training steps"):
        trainer.fit(Classifier(), datamodule=Digits(60))


def test_keys_of_a_dictionary_are_part_of_a_state():
    """A client's labels may be keys."""
    assert is_same_state({"seen": {3: True}, "n": 1}, {"seen": {3: True}, "n": 1})
    assert not is_same_state({"seen": {3: True}, "n": 1}, {"seen": {7: True}, "n": 1})
    assert not is_same_state([1, [2]], [[1], 2])
