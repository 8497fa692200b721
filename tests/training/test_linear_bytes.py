"""Bytes that a run writes grow with its rounds, and not with their square."""

from pathlib import Path

import pytest
import torch

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated, RunFolder
from lightning_fedq.mechanisms import CorBin
from lightning_fedq.rounds import RoundRecord
from lightning_fedq.training.checkpoints import RecordFile
from lightning_fedq.training.user_messages import warn_round_failures
from tests.callbacks.test_federated_resume import fit, latest
from tests.callbacks.test_federated_resume_killed import pytestmark  # noqa: F401
from tests.digits_run import Digits, make_trainer
from tests.training.test_unfreezing import TwoLayers


class Counts(pl.Callback):
    """Bytes of every checkpoint that is written."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.written = folder, 0

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / "each.ckpt")
        self.written += (self.folder / "each.ckpt").stat().st_size


def bytes_of(folder, rounds, **settings):
    """Bytes that a private run writes: its checkpoints, and what files hold that are appended to."""
    fed = Federated(CorBin(1.0, 5), 3, local_steps=1, **settings)
    keep = pl.callbacks.ModelCheckpoint(folder / "kept", save_top_k=1)
    counts = Counts(folder)
    run = RunFolder("run", str(folder), show=False)
    trainer = make_trainer(fed, counts, keep, run, max_epochs=rounds, enable_checkpointing=True)
    trainer.fit(TwoLayers(change_at=10**9), datamodule=Digits(12))
    assert len(fed.records) == rounds == len(run.rows)
    others = [*folder.rglob("*.jsonl"), *folder.rglob("*.csv")]
    assert len([path for path in others if path.name.startswith("records-")]) == 1
    return counts.written + sum(path.stat().st_size for path in others)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("rounds", [30, *(pytest.param(n, marks=pytest.mark.slow) for n in (100, 1000))])
def test_bytes_are_as_many_times_more_as_rounds(tmp_path, rounds, seed):
    few, many = (bytes_of(tmp_path / str(n), n, seed=seed) for n in (10, rounds))
    assert many / few == pytest.approx(rounds / 10, rel=0.03)


# ---- what the file beside can meet --------------------------------------------------------------------


def lost_records(folder):
    """A run of three rounds, and the records of its last checkpoint."""
    fit(folder, 4, seed=3)
    return latest(folder), next(folder.glob("records-*.jsonl"))


def test_records_are_those_of_the_run(tmp_path):
    _, whole = fit(tmp_path / "whole", 4, seed=3)
    first = sorted((tmp_path / "whole").glob("*.ckpt"))[0]
    _, again = fit(tmp_path / "again", 4, resume=first, seed=3)
    assert repr(again.records) == repr(whole.records)
    # the first run's file is left to its later checkpoints
    for checkpoint in sorted((tmp_path / "whole").glob("*.ckpt")):
        saved = torch.load(checkpoint, weights_only=True)
        state = next(state for state in saved["callbacks"].values() if "records" in state)
        assert len(RecordFile().records(state["records"], checkpoint)) == state["engine"]["round"]


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "another run's"])
def test_records_that_are_not_the_checkpoint_s_are_named(tmp_path, damage):
    checkpoint, records = lost_records(tmp_path)
    data = records.read_bytes()
    assert records.stat().st_mode & 0o777 == 0o600
    if damage == "missing":
        records.unlink()
    else:
        other = {"cut": data[:-9], "changed": data.replace(b"4", b"3", 1), "another run's": b"{}\n" * 3}
        records.write_bytes(other[damage])
    kind = FileNotFoundError if damage == "missing" else ValueError
    with pytest.raises(kind, match="next to the checkpoint"):
        fit(tmp_path / "again", 4, resume=checkpoint, seed=3)
    records.write_bytes(data)
    fit(tmp_path / "again", 4, resume=checkpoint, seed=3)


def test_whoever_writes_there_too_is_left_alone(tmp_path):
    beside, kept = RecordFile(), [{"round": number} for number in range(4)]
    assert beside.describe(0) is None
    beside.add(tmp_path, lambda first: kept[first:2])
    first = beside.describe(2)
    assert first is not None and beside.describe(1) is None and beside.describe(3) is None
    with Path(first["file"]).open("a") as file:
        file.write("another\n")
    beside.add(tmp_path, lambda first: kept[first:])
    second = beside.describe(4)
    assert second is not None and second["file"] != first["file"]
    assert RecordFile().load(second, None) == kept
    assert RecordFile().load(first, None) == kept[:2]


@pytest.mark.tried
def test_a_trial_of_isolation_writes_no_records(tmp_path):
    """In it checkpoints are saved, too, of clients whose data are changed."""
    keep = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1)
    fed = Federated(CorBin(1.0, 5), 3, local_steps=1, check_isolation=True)
    trainer = make_trainer(fed, keep, max_epochs=2, enable_checkpointing=True)
    trainer.fit(TwoLayers(change_at=10**9), datamodule=Digits(12))
    [path] = tmp_path.glob("records-*.jsonl")
    assert len(path.read_text().splitlines()) == 2


# ---- records -------------------------------------------------------------------------------------------
def record(clients):
    return RoundRecord(3, 50, 50, 0, 0, 0, 0, 0.0, 1.0, 1.0, 0.0, non_finite_clients=tuple(clients))


def test_a_warning_names_ten_clients_and_counts_the_others():
    with pytest.warns(UserWarning, match=r"Round 4: the updates of clients \[7, 8\] contain a NaN"):
        warn_round_failures(record([7, 8]))
    with pytest.warns(
        UserWarning, match=r"clients \[0, 1, 2, 3, 4, 5, 6, 7, 8, 9\] and 30 more contain a NaN"
    ):
        warn_round_failures(record(range(40)))
