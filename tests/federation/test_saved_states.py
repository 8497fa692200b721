"""Checkpoints of a run that claims privacy hold no state of a metric that a client's data have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD, Federated
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
