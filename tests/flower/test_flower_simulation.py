"""The app of `fedq flower init` in Flower's own simulation, in Ray's actors (`flwr[simulation]`)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.commands.flower import write_app
from lightning_fedq.datasets import DigitsDataModule
from lightning_fedq.flower import server_app
from tests.flower.loop import TRAINER
from tests.flower.machines import example

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
ROUNDS = 2


def test_the_same_app_ends_with_the_weights_of_the_simulation(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("ray", reason="comes with flwr[simulation]")
    from flwr.simulation import run_simulation

    package = write_app(tmp_path / "ray_app", clients=4, seed=5, secure_aggregation=False)
    monkeypatch.syspath_prepend(str(tmp_path / "ray_app"))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path / "ray_app"), *filter(None, sys.path)]))
    task = importlib.import_module(f"{package}.task")
    client = importlib.import_module(f"{package}.client_app").app
    given = {**TRAINER, "max_epochs": ROUNDS}
    server = server_app(task.module, task.federated, trainer=given, home=tmp_path / "server", wait=300.0)
    run_simulation(server, client, num_supernodes=4)
    trainer = pl.Trainer(**TRAINER, max_epochs=ROUNDS, callbacks=[task.federated], enable_checkpointing=False)
    trainer.fit(task.module(), datamodule=DigitsDataModule(batch_size=16))
    saved = example.checkpoint_of(tmp_path / "server")
    assert [record["num_received"] for record in saved["records"]] == [4, 4]
    assert torch.equal(saved["engine"]["weights"], task.federated.engine.weights)
