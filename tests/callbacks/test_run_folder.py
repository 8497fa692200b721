import json
from pathlib import Path

import pytest
import pytorch_lightning as pl

from lightning_fedq.callbacks import DPSGD, RunFolder
from lightning_fedq.reports import read_rows
from tests.callbacks.runs import small_data, small_model, small_run

DIM = 650


def test_everything_is_written(tmp_path: Path) -> None:
    folder = RunFolder("mine", str(tmp_path))
    folder.config = "seed: 1\n"
    trainer = small_run(folder, rounds=3)
    path = tmp_path / "mine"
    names = {"accuracy.png", "aggregate.png", "config.yaml", "metrics.csv", "privacy.json", "privacy.md"}
    assert {file.name for file in path.iterdir()} == names | {"report.md", "summary.json"}
    rows, summary = read_rows(path / "metrics.csv"), json.loads((path / "summary.json").read_text())
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert rows[-1]["val_acc"] == pytest.approx(float(trainer.callback_metrics["val_acc"]))
    assert summary["rounds"] == 3 and summary["num_parameters"] == DIM
    assert summary["bits_per_parameter"] == 1.0
    assert summary["uplink_megabytes"] == pytest.approx(3 * 4 * DIM / 8e6)
    assert len(summary["privacy"]) == 7 and "nothing is private" in summary["privacy"][0]
    assert summary["best"]["value"] == max(row["val_acc"] for row in rows)
    report = (path / "report.md").read_text()
    assert "CorBin(epsilon=5.0, shared_bits=5)" in report and "![accuracy.png](accuracy.png)" in report
    trainer.test(small_model(), datamodule=small_data(), verbose=False)
    assert "test_acc" in json.loads((path / "summary.json").read_text())["metrics"]


def test_an_old_run_is_left_alone(tmp_path: Path) -> None:
    small_run(RunFolder("mine", str(tmp_path)), rounds=1)
    small_run(RunFolder("mine", str(tmp_path)), rounds=2)
    assert len(read_rows(tmp_path / "mine" / "metrics.csv")) == 1
    assert len(read_rows(tmp_path / "mine-2" / "metrics.csv")) == 2


def test_a_resumed_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    first = small_run(RunFolder("mine", str(tmp_path)), rounds=2)
    first.save_checkpoint(tmp_path / "two.ckpt")
    trainer = small_run(RunFolder("other", str(tmp_path)), rounds=3, fit=False)
    trainer.fit(small_model(), datamodule=small_data(), ckpt_path=tmp_path / "two.ckpt")
    assert [row["round"] for row in read_rows(tmp_path / "mine" / "metrics.csv")] == [0, 1, 2]
    assert not (tmp_path / "other").exists()


class StopInRound(pl.Callback):
    """Ask to stop after the second batch of the second round."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        trainer.should_stop = trainer.current_epoch == 1 and batch_idx == 1


def test_a_round_that_was_stopped_adds_no_row(tmp_path: Path) -> None:
    folder = RunFolder("mine", str(tmp_path))
    trainer = small_run(folder, StopInRound(), rounds=3)
    assert trainer.current_epoch < 3
    assert [row["round"] for row in folder.rows] == [0]


def test_secure_keys_show_the_claims_themselves(tmp_path: Path) -> None:
    folder = RunFolder("mine", str(tmp_path))
    small_run(folder, rounds=1, seed=None)
    assert folder.summary["keys"] == "from the operating system"
    assert len(folder.summary["privacy"]) == 6 and "epsilon" in folder.summary["privacy"][0]


def test_samples_have_a_section_of_their_own(tmp_path: Path) -> None:
    private = DPSGD(1.0, 1.0, delta=1e-3)
    small_run(private, RunFolder("dp", str(tmp_path)), rounds=2)
    spent = private.epsilon(1e-3)
    saved = json.loads((tmp_path / "dp" / "privacy.json").read_text())["samples"]
    assert saved["epsilon"] == pytest.approx(spent) and saved["data_sets"] == 4 and saved["secure"]
    assert saved["steps"] == max(account.steps for account in private.accounts.values()) > 0
    assert (
        "against everybody who sees messages or models: usable"
        in (tmp_path / "dp" / "privacy.md").read_text()
    )
    assert "One sample (DP-SGD)" not in (tmp_path / "dp" / "report.md").read_text()
    assert "one sample (DP-SGD)" in (tmp_path / "dp" / "report.md").read_text()


def test_seeded_samples_have_no_guarantee(tmp_path: Path) -> None:
    small_run(DPSGD(1.0, 1.0, delta=1e-3, seed=0), RunFolder("seeded", str(tmp_path)), rounds=1)
    page = (tmp_path / "seeded" / "privacy.md").read_text()
    assert "no guarantee, batches and noise come from a seed" in page


def test_without_a_federation_it_is_refused(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RunFolder("mine", str(tmp_path))],
    )
    with pytest.raises(
        ValueError, match=r"RunFolder reports on a federation.*add lightning_fedq.callbacks.Federated"
    ):
        trainer.fit(small_model(), datamodule=small_data())


def test_mode_is_checked() -> None:
    with pytest.raises(ValueError, match=r"mode must be 'max' or 'min', got 'best'"):
        RunFolder(mode="best")
