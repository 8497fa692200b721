"""Checkpoints of a run that claims privacy hold no state of a metric that a client's data have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD, Federated
from lightning_fedq.federation.saved_states import same
from lightning_fedq.mechanisms import LDPQ
from tests.digits_run import Classifier, Digits, make_trainer


class Counts(Classifier):
    """Keeps an exact mean of what it trains on, in one of three ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seen = how, torchmetrics.MeanMetric()
        self.seen.persistent(how != "not saved")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.how != "in validation":
            self.seen.update(batch[0].mean())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.how == "in validation":
            self.seen.update(batch[0].mean())
        return super().validation_step(batch, batch_idx)


class Saves(pl.Callback):
    """In the middle of the first client, and where that is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / "middle.ckpt")

    def on_exception(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / "failed.ckpt")


@pytest.mark.parametrize("private", [lambda: Federated(LDPQ(0.001), 3, clients_per_step=1), None])
def test_a_persistent_metric_is_in_no_checkpoint(private: Any, tmp_path: Path) -> None:
    module = Counts("saved")
    callback = private() if private else DPSGD(20.0, 1.0, delta=1e-3)
    trainer = make_trainer(callback, Saves(tmp_path))
    with pytest.raises(ValueError, match=r"training changed seen.mean_value, seen.weight, which checkpoints"):
        trainer.fit(module, datamodule=Digits(60))
    assert not (tmp_path / "middle.ckpt").exists()
    saved = torch.load(tmp_path / "failed.ckpt", weights_only=True)["state_dict"]
    assert saved["seen.weight"] == saved["seen.mean_value"] == 0


def test_a_file_of_the_weights_alone_holds_none_either(tmp_path: Path) -> None:
    keep = pl.callbacks.ModelCheckpoint(
        tmp_path,
        filename="{step}",
        save_top_k=-1,
        every_n_train_steps=1,
        save_weights_only=True,
    )
    federated = Federated(LDPQ(0.001), 3, clients_per_step=1)
    trainer = make_trainer(federated, keep, enable_checkpointing=True)
    with pytest.raises(ValueError, match=r"training changed seen.mean_value, seen.weight, which checkpoints"):
        trainer.fit(Counts("saved"), datamodule=Digits(60))
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.parametrize("how", ["not saved", "in validation"])
def test_other_metrics_are_nobody_s_business(how: str) -> None:
    for callback in (Federated(LDPQ(0.001), 3), DPSGD(20.0, 1.0, delta=1e-3)):
        trainer = make_trainer(callback)
        trainer.fit(Counts(how), datamodule=Digits(60))
        assert trainer.current_epoch == 2


def test_a_run_that_claims_nothing_keeps_them() -> None:
    trainer = make_trainer(Federated(LDPQ(0.001), 3, seed=1, clients_per_step=1))
    trainer.fit(Counts("saved"), datamodule=Digits(60))
    assert trainer.current_epoch == 2


class SavesAtTheEnd(pl.Callback):
    """Of a fit that has failed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / "failed.ckpt")


class History(pl.Callback):
    """Keeps the loss of every batch, in its state."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}


class Normalised(Digits):
    """Keeps an average of what it hands out, in its state."""

    def __init__(self) -> None:
        super().__init__(60)
        self.mean = torch.zeros(64)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer is not None and self.trainer.training:
            self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}


class Scaled(Classifier):
    """Writes the mean input into its hyperparameters."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.hparams["scale"] = float(batch[0].mean())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize(
    ("module", "data", "callbacks", "what"),
    [
        (Classifier, lambda: Digits(60), lambda: [History()], "History.losses"),
        (Classifier, Normalised, list, "Normalised.mean"),
        (Scaled, lambda: Digits(60), list, "hparams.scale"),
    ],
)
def test_states_of_callbacks_and_data_modules_are_in_no_checkpoint(
    module: Any, data: Any, callbacks: Any, what: str, weights_only: bool, tmp_path: Path
) -> None:
    keep = pl.callbacks.ModelCheckpoint(
        tmp_path,
        filename="{step}",
        save_top_k=-1,
        every_n_train_steps=1,
        save_weights_only=weights_only,
    )
    fed, begun = Federated(LDPQ(0.001), 3, clients_per_step=1), data()
    before = str(begun.state_dict())
    trainer = make_trainer(fed, *callbacks(), keep, SavesAtTheEnd(tmp_path), enable_checkpointing=True)
    with pytest.raises(ValueError, match=f"training changed {what}, which checkpoints hold beside"):
        trainer.fit(module(), datamodule=begun)
    assert (tmp_path / "failed.ckpt").exists()
    for file in tmp_path.glob("*.ckpt"):
        saved = torch.load(file, weights_only=False)
        assert saved.get("hyper_parameters", {"scale": 1.0}) == {"scale": 1.0}, file
        assert str(saved.get(type(begun).__qualname__, {})) in (before, "{}"), file
        assert not any(state.get("losses") for state in saved.get("callbacks", {}).values()), file


class Counting(pl.Callback):
    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}


@pytest.mark.parametrize("first", [False, True])
def test_a_count_of_batches_is_nobody_s_data(first: bool) -> None:
    """Clients hold 20 and 21 samples, which are two and three batches of ten."""
    counting, fed = Counting(), Federated(LDPQ(0.001), 3, clients_per_step=1)
    order = (counting, fed) if first else (fed, counting)
    make_trainer(*order).fit(Classifier(), datamodule=Digits(61))
    assert counting.batches == 2 * 7


@pytest.mark.parametrize("private", [lambda: Federated(LDPQ(0.001), 3, clients_per_step=1), None])
def test_spike_detection_decides_by_exact_losses(private: Any) -> None:
    callback = private() if private else DPSGD(20.0, 1.0, delta=1e-3)
    trainer = make_trainer(callback, pl.callbacks.SpikeDetection())
    with pytest.raises(ValueError, match="SpikeDetection ends the run by the exact losses of training steps"):
        trainer.fit(Classifier(), datamodule=Digits(60))


def test_keys_of_a_dictionary_are_part_of_a_state() -> None:
    """A client's labels may be keys."""
    assert same({"seen": {3: True}, "n": 1}, {"seen": {3: True}, "n": 1})
    assert not same({"seen": {3: True}, "n": 1}, {"seen": {7: True}, "n": 1})
    assert not same([1, [2]], [[1], 2])
