"""W&B of a deployed server, offline: the rounds of a simulation, without what only a simulation knows."""

import json

import pytest

from lightning_fedq.callbacks import RunFolder, WandbRounds
from lightning_fedq.mechanisms import CorBin
from lightning_fedq.rounds.record import SIMULATED, metric_name
from tests.callbacks.test_wandb_rounds import finished_records_of
from tests.flower.loop import LoopGrid, clients, deployment, federated, simulate

wandb_logger = pytest.importorskip("pytorch_lightning.loggers").WandbLogger
ROUNDS = 2
OF_SIMULATIONS = {f"fed/{metric_name(name)}" for name in SIMULATED} | {"fed/train_loss", "fed/train_acc"}
"""What takes the updates themselves, or is logged where clients train."""
PICTURE = {"width", "height", "size"}
"""Of who holds which labels."""


def make():
    return federated(CorBin(epsilon_per_coordinate=4.0, shared_bits=5))


def recorded(folder, run):
    """What an offline run holds: numbers under `fed/`, round by round, and files of its run folder."""
    logger = wandb_logger(project="tests", save_dir=str(folder), offline=True)
    run(logger, [RunFolder("mine", str(folder)), WandbRounds()])
    logger.experiment.finish()
    history = {}
    records = finished_records_of(folder)
    for record in records:
        for item in record.history.item:
            name, value = item.key or "/".join(item.nested_key), json.loads(item.value_json)
            if name.startswith("fed/") and isinstance(value, (int, float)) and "seconds" not in name:
                history.setdefault(name, []).append(float(value))
    artifacts = [record.artifact for record in records if record.HasField("artifact")]
    return history, {entry.path for artifact in artifacts for entry in artifact.manifest.contents}


def test_a_server_logs_what_a_simulation_logs(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    apps = clients(make, tmp_path)

    def deploy(logger, callbacks):
        deployment(make(), ROUNDS, tmp_path, logger=logger, callbacks=callbacks).run(LoopGrid(*apps))

    def play(logger, callbacks):
        simulate(make(), ROUNDS, logger=logger, callbacks=callbacks)

    (tmp_path / "real").mkdir()
    (tmp_path / "played").mkdir()
    real, files = recorded(tmp_path / "real", deploy)
    played, _ = recorded(tmp_path / "played", play)
    assert set(played) - set(real) == OF_SIMULATIONS | {f"fed/labels/{part}" for part in PICTURE}
    assert set(real.pop("fed/round")) == {1.0, 2.0}
    assert set(played.pop("fed/round")) == {0.0, 1.0, 2.0}  # 0: the picture
    for name, values in real.items():
        if not name.startswith("fed/clients/"):  # a table of the samples that each holds
            assert values == played[name], name
    rounds = {"fed/cohort_size", "fed/num_received", "fed/uplink_bits", "fed/downlink_bits"}
    assert set(real) >= rounds | {"fed/update_norm", "fed/radius_max", "fed/val_acc", "fed/val_loss"}
    assert len(real["fed/uplink_bits"]) == len(real["fed/val_acc"]) == ROUNDS
    assert files >= {"metrics.csv", "summary.json", "report.md"}
    page = (tmp_path / "real" / "mine" / "report.md").read_text()
    assert "Figures computed from the clients' exact updates" not in page
