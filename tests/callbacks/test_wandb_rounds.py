import json
import struct
import time
from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError
from pytorch_lightning.loggers import WandbLogger
from wandb.proto import wandb_internal_pb2

from lightning_fedq.callbacks import RunFolder, WandbRounds
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.privacy.target import PrivacyTarget
from tests.callbacks.runs import small_run


def finished_records_of(folder):
    """Wait until the service process has written the run's last record."""
    for _ in range(200):
        with suppress(DecodeError):  # of a record that is not whole yet
            records = records_of(folder)
            if any(record.HasField("exit") for record in records):
                return records
        time.sleep(0.1)
    raise TimeoutError("wandb did not finish its file within 20 seconds")


def records_of(folder):
    """Read an offline run's own log: LevelDB's log format, blocks of 32 KiB, after a header of 7 bytes."""
    data, found, parts = next(folder.glob("wandb/offline-run-*/*.wandb")).read_bytes(), [], []
    position = 7
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            found.append(record)
            parts = []
    return found


def config_of(records):
    return {item.key: item.value_json for r in records if r.HasField("config") for item in r.config.update}


def finals_of(records):
    """The last value of each name that was logged or is in the summary."""
    found = (item for r in records for item in (*r.history.item, *r.summary.update))
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in found}


def charts_of(records):
    """Panels that W&B will draw by itself: what stands on which axis, by name."""
    items = [item for r in records if r.HasField("config") for item in r.config.update]
    panels = {
        item.nested_key[2]: json.loads(item.value_json) for item in items if "visualize" in item.nested_key
    }
    return {name: panel["panel_config"]["fieldSettings"] for name, panel in panels.items()}


def test_an_offline_run_holds_everything(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = RunFolder("mine", str(tmp_path))
    folder.config = "data: {batch_size: 8}\n"
    logger = WandbLogger(project="tests", save_dir=str(tmp_path), offline=True)
    small_run(folder, WandbRounds(), rounds=2, logger=logger)
    logger.experiment.finish()
    records = finished_records_of(tmp_path)
    axes = {
        r.metric.name or r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")
    }
    assert axes["fed/*"] == "fed/round"
    config = config_of(records)
    assert (
        json.loads(config["federation"])["mechanism"] == "CorBin(epsilon_per_coordinate=5.0, shared_bits=5)"
    )
    assert json.loads(config["data"]) == {"batch_size": 8}
    history = {}
    for record in records:
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            history.setdefault(name, []).append(item.value_json)
    assert set(map(json.loads, history["fed/round"])) == {0.0, 1.0, 2.0}  # 0: the labels
    assert len(history["fed/val_acc"]) == 2 and "fed/sim_mse" in history
    assert history["fed/labels/_type"] == ['"image-file"'] and history["fed/clients/_type"] == [
        '"table-file"'
    ]
    assert history["fed/clients/nrows"] == ["4"]
    noise = json.loads((tmp_path / "mine" / "summary.json").read_text())["noise_over_signal"]
    final = finals_of(records)
    assert final["fed/noise_over_signal"] == pytest.approx(noise["planned"])
    assert final["fed/sim_noise_over_signal"] == pytest.approx(noise["sim_seen"])
    tags = {tag for r in records if r.HasField("run") for tag in r.run.tags}
    assert tags == {"CorBin", "no target"}
    assert set(charts_of(records)) == {"fed/val_acc against megabytes_up"}
    artifacts = [r.artifact for r in records if r.HasField("artifact")]
    files = {entry.path for a in artifacts if a.type == "run-folder" for entry in a.manifest.contents}
    assert files >= {"metrics.csv", "summary.json", "report.md", "config.yaml"}


def test_a_run_with_a_target_is_found_by_it_and_drawn_against_its_price(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(project="tests", save_dir=str(tmp_path), offline=True)
    target = PrivacyTarget(50.0, 1e-5, "server")
    settings = {"mechanism": LDPQ(epsilon_per_coordinate=4.0), "privacy": target, "seed": None}
    small_run(WandbRounds(), rounds=2, logger=logger, **settings)
    logger.experiment.finish()
    records = finished_records_of(tmp_path)
    assert {tag for r in records if r.HasField("run") for tag in r.run.tags} == {
        *("LDPQ", "server", "epsilon 50")
    }
    config = config_of(records)
    said = json.loads(config["federation"])
    assert (said["epsilon"], said["delta"], said["adversary"]) == (50.0, 1e-5, "server")
    axes = {(axis["x"], axis["y"]) for axis in charts_of(records).values()}
    assert axes == {("epsilon", "val_acc"), ("megabytes_up", "val_acc")}
    assert 0 < finals_of(records)["fed/epsilon"] <= 50.0
