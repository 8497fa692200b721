"""The Lightning layer under either package; the tests of this process run under one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lightning_fedq._lightning import pl

PROGRAM = """
import lightning.pytorch as pl
from lightning_fedq._lightning import pl as bound
from lightning_fedq.callbacks import Federated
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.mechanisms import CorBin
from tests.digits_run import Classifier, Digits
import sys
assert bound is pl, bound
assert "pytorch_lightning" not in sys.modules
for clients_per_step in (1, 5):
    fed = Federated(CorBin(epsilon=5.0), 10, seed=0, clients_per_step=clients_per_step)
    trainer = pl.Trainer(max_epochs=3, callbacks=[fed], accelerator="cpu", logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Classifier(), datamodule=FederatedDataModule(Digits(300)))
    assert len(fed.records) == 3
    print("accuracy", float(trainer.callback_metrics["val_acc"]))
import pytest
file = "tests/federation/test_around_a_fit.py"
options = ["--assert=plain", "-p", "no:cacheprovider", "-k", "not compiled"]  # torch's own, and slow
sys.exit(pytest.main(["-q", *options, file]))
"""


def test_federates_under_the_other_package() -> None:
    """All other tests run under `pytorch_lightning`. That nothing then imports `lightning`: `test_wheel`."""
    assert pl.__name__ == "pytorch_lightning"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    accuracies = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("accuracy")]
    assert accuracies[0] == accuracies[1]
