"""The app of `fedq flower init` in Flower's own simulation, in Ray's actors (`flwr[simulation]`)."""

import importlib
import os
import sys
from pathlib import Path

import psutil
import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.commands.flower import write_app
from lightning_fedq.data.datasets import DigitsDataModule
from lightning_fedq.flower import server_app
from tests.changed import changed
from tests.flower.loop import TRAINER
from tests.flower.machines import example
from tests.flower.steps import printed

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
ROUNDS = 2


def test_the_same_app_ends_with_the_weights_of_the_simulation(tmp_path, monkeypatch):
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


def stop_superlink(home):
    """End the SuperLink that `flwr run` has left, and what it has started."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLWR_HOME") == str(home):
                process.kill()
        except psutil.Error:
            continue


def test_the_recipe_of_the_page_twice(tmp_path):
    """Node ids are new with every SuperLink: by them each client had a new folder, and was a new client."""
    pytest.importorskip("ray", reason="comes with flwr[simulation]")
    app, homes, flower = tmp_path / "my_app", tmp_path / "homes", tmp_path / "flwr"
    package = write_app(app, clients=4, secure_aggregation=False)
    client = app / package / "client_app.py"
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    recipe = next(
        line for line in page.splitlines() if line.startswith("app = client_app(") and "home=" in line
    )
    recipe = changed(recipe, ("/a/folder", str(homes)), ("federated,", "federated, trainer=TRAINING,"))
    lines = [line for line in client.read_text().splitlines() if not line.startswith("app = ")]
    client.write_text("\n".join(["from pathlib import Path", *lines, recipe, ""]))
    environment = {**os.environ, "FLWR_HOME": str(flower), "FLWR_TELEMETRY_ENABLED": "0"}
    environment |= {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment["PATH"] = f"{Path(example.tool('flwr')).parent}{os.pathsep}{os.environ['PATH']}"
    command = [example.tool("flwr"), "run", str(app), "--stream", "--federation-config", "num-supernodes=4"]
    home = tmp_path / "server"
    for rounds in (1, 2):
        try:
            config = f'home="{home}" rounds={rounds}'
            said = printed([*command, "--run-config", config], env=environment, cwd=tmp_path, timeout=900)
        finally:
            stop_superlink(flower)
        assert (home / "checkpoints" / "last.ckpt").exists(), said[-5000:]
        records = example.checkpoint_of(home)["records"]
        assert [record["num_received"] for record in records] == [4] * rounds, said[-5000:]
        assert sorted(path.name for path in homes.iterdir()) == ["0", "1", "2", "3"]
