"""A federation over some ranks, as a program: DEVICES ROUNDS FOLDER and words.

Words are "resume", "private", "target", "die0", "die1", "elsewhere", "median", "hooks" on batches, and
"fails" in validation.
"""

import hashlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.data.models import MLP, Classifier
from tests.digits_run import make_trainer

RANK = int(os.environ.get("LOCAL_RANK", 0))


class Dies(pl.Callback):
    """One rank is killed in the middle of its third round."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if f"die{RANK}" in sys.argv and first and (trainer.current_epoch, batch_idx) == (2, 1):
            os.kill(os.getpid(), signal.SIGKILL)


class Hooked(DigitsDataModule):
    """Turns each client's pictures over by its own draws."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        inputs, labels = batch
        assert labels.dim() == 1, "one client's"
        return [inputs.flip(-1) if float(torch.rand(())) < 0.5 else inputs, labels]


class Failing(Classifier):
    """Its validation needs what clients would leave."""

    def on_validation_epoch_end(self):
        raise KeyError("outputs of training")


def accelerator():
    """The CPU, or a device that is not the CPU."""
    if "elsewhere" not in sys.argv:
        return "cpu"
    from tests.elsewhere import ElsewhereAccelerator

    return ElsewhereAccelerator()


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    devices, rounds, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.manual_seed(RANK)  # ranks begin with different weights, and rank 0's count
    targeted = "target" in sys.argv
    fed = fedq.Federated(
        fedq.LDPQ(epsilon_per_coordinate=4.0)
        if targeted
        else fedq.CorBin(epsilon_per_coordinate=4.0, shared_bits=5),
        11,
        clients_per_step=3,
        seed=None if "private" in sys.argv else 5,
        dropout_probability=0.0 if targeted else 0.2,
        partition=fedq.Dirichlet(alpha=1.0),
        aggregator=fedq.RobustAggregation("median") if "median" in sys.argv else None,
        privacy=fedq.PrivacyTarget(50.0, 1e-5, "outsider") if targeted else None,
    )
    keep = pl.callbacks.ModelCheckpoint(dirpath=folder, save_last=True)
    trainer = make_trainer(
        *(fed, keep, Dies()),
        max_epochs=rounds,
        accelerator=accelerator(),
        devices=devices,
        strategy="fedq_clients" if devices > 1 else "auto",
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    kind = Failing if "fails" in sys.argv else Classifier
    model = kind(MLP(in_features=64, hidden=[16]), lr=0.1, momentum=0.9)
    data = Hooked if "hooks" in sys.argv else DigitsDataModule
    last = "last" if "resume" in sys.argv else None
    trainer.fit(model, datamodule=data(num_train=600, batch_size=32), ckpt_path=last)
    assert fed.engine is not None
    assert fed.engine.weights.device.type == ("elsewhere" if "elsewhere" in sys.argv else "cpu")
    found = {
        "weights": hashlib.sha256(fed.engine.weights.cpu().numpy().tobytes()).hexdigest(),
        "bits": [record.uplink_bits for record in fed.records],
        "epsilon": None if fed.calibration is None else fed.calibration.epsilon,
        "received": [record.num_received for record in fed.records],
        "charges": fed.engine.ledger.charges.tolist(),
        "steps": trainer.global_step,
        "accuracy": float(trainer.callback_metrics["val_acc"]),
    }
    (folder / f"rank-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
