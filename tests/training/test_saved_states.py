"""Checkpoints of a run that claims privacy hold no state of a metric that a client's data have changed."""

import pytest
import torch
import torchmetrics

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.training.checkpoints import is_same_state
from tests.callbacks.steps import Saves
from tests.digits_run import Classifier, Digits, fitted, make_trainer


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


def saves(folder, weights_only=False):
    """In the middle of every client, after every round, and where something is refused."""
    hooks = "on_train_batch_end", "on_train_epoch_end", "on_exception"
    return Saves(folder, *hooks, weights_only=weights_only)


def test_a_persistent_metric_of_samples_is_in_no_checkpoint(tmp_path):
    trainer = make_trainer(DPSGD(20.0, 1.0, delta=1e-3), saves(tmp_path))
    with pytest.raises(ValueError, match=r"Training changed seen.mean_value, seen.weight, which checkpoints"):
        trainer.fit(Counts("saved"), datamodule=Digits(60))
    [file] = tmp_path.glob("*.ckpt")  # where the training failed
    saved = torch.load(file, weights_only=True)["state_dict"]
    assert saved["seen.weight"] == saved["seen.mean_value"] == 0


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_persistent_metric_of_clients_is_in_no_checkpoint(weights_only, tmp_path):
    saving = saves(tmp_path, weights_only)
    fitted(Counts("saved"), Federated(LDPQ(0.001), 3, clients_per_step=1), saving, data=Digits(60))
    files = list(tmp_path.glob("*.ckpt"))
    assert len(files) == saving.count > 2 * 3 * 2
    for file in files:
        saved = torch.load(file, weights_only=True)["state_dict"]
        assert saved["seen.weight"] == saved["seen.mean_value"] == 0, file


@pytest.mark.parametrize("how", ["not saved", "in validation"])
def test_other_metrics_are_nobody_s_business(how):
    for callback in (Federated(LDPQ(0.001), 3), DPSGD(20.0, 1.0, delta=1e-3)):
        trainer = fitted(Counts(how), callback, data=Digits(60))
        assert trainer.current_epoch == 2


def test_a_run_that_claims_nothing_keeps_them():
    trainer = fitted(Counts("saved"), Federated(LDPQ(0.001), 3, seed=1, clients_per_step=1), data=Digits(60))
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
    fitted(module(), fed, *callbacks(), saves(tmp_path, weights_only), data=begun)
    assert len(list(tmp_path.glob("*.ckpt"))) > 2 * 3 * 2
    for file in tmp_path.glob("*.ckpt"):
        saved = torch.load(file, weights_only=False)
        assert saved.get("hyper_parameters", {"scale": 1.0}) == {"scale": 1.0}, file
        assert str(saved.get(type(begun).__qualname__, {})) in (before, "{}"), file
        assert not any(state.get("losses") for state in saved.get("callbacks", {}).values()), file


def test_spike_detection_decides_by_exact_losses():
    trainer = make_trainer(DPSGD(20.0, 1.0, delta=1e-3), pl.callbacks.SpikeDetection())
    with pytest.raises(ValueError, match="SpikeDetection uses exact losses of training steps"):
        trainer.fit(Classifier(), datamodule=Digits(60))


def test_keys_of_a_dictionary_are_part_of_a_state():
    """A client's labels may be keys."""
    assert is_same_state({"seen": {3: True}, "n": 1}, {"seen": {3: True}, "n": 1})
    assert not is_same_state({"seen": {3: True}, "n": 1}, {"seen": {7: True}, "n": 1})
    assert not is_same_state([1, [2]], [[1], 2])
