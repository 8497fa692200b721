"""Processes that get SIGKILL at chosen points, and what is left when their runs go on.

A fork for every kill trains until it reaches its point and is killed there. The run is resumed from the last
checkpoint that it left, or begun anew where there is none.
"""

import os
import signal
import tempfile
from typing import Any, NamedTuple

import pytest
import torch
from fsspec.implementations.local import LocalFileOpener

from lightning_fedq._lightning import pl
from lightning_fedq.clients.worker import ClientWorker
from lightning_fedq.mechanisms import CorBin
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.rounds import RoundEngine
from tests import forked
from tests.callbacks.test_federated_resume import ROUNDS, fit, latest, pytestmark  # noqa: F401
from tests.digits_run import Classifier, weights_of


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Point(NamedTuple):
    """Die at the `call`-th call of `owner.name`, before it, after it, or when half is written."""

    owner: Any
    name: str
    call: int
    when: str = "before"

    def arm(self):
        original = getattr(self.owner, self.name)
        calls, process = 0, os.getpid()

        def armed(*args, **kwargs):
            nonlocal calls
            calls += os.getpid() == process  # not in forks of the trial
            if calls == self.call and self.when == "before":
                die()
            if calls == self.call and self.when == "half":
                args[0].f.write(args[1][: len(args[1]) // 2])
                args[0].f.flush()
                die()
            result = original(*args, **kwargs)
            if calls == self.call and self.when == "after":
                die()
            return result

        setattr(self.owner, self.name, armed)


# 6 clients, one at a time, 4 rounds: 24 trainings, messages of a round are made together, 4 checkpoints
POINTS = [
    Point(Ledger, "charge", 1),
    Point(os, "fsync", 5),  # header, folder, round 0, its record, round 1, perhaps not on the disk
    Point(Ledger, "charge", 3, "after"),
    Point(RoundEngine, "start", 2, "after"),
    Point(CorBin, "encode", 1),
    Point(ClientWorker, "train", 9, "after"),
    Point(ClientWorker, "train", 18),
    Point(RoundEngine, "receive", 2, "after"),  # between the messages of round 1 and its end
    Point(CorBin, "encode", 4, "after"),
    Point(RoundEngine, "finish", 1),
    Point(RoundEngine, "finish", 3),
    Point(RoundEngine, "finish", 2, "after"),
    Point(Classifier, "validation_step", 3),  # between the round and its checkpoint; the first is a rehearsal
    Point(torch, "save", 1),
    Point(torch, "save", 3, "after"),
    Point(LocalFileOpener, "write", 2, "half"),
    Point(LocalFileOpener, "write", 3, "half"),
    Point(LocalFileOpener, "commit", 2),
    Point(LocalFileOpener, "commit", 3, "after"),
    Point(pl.callbacks.ModelCheckpoint, "on_train_epoch_end", 4, "after"),
]
STACKED = Point(CorBin, "encode", 3, "after")  # stacks of 4: two messages a round


class Kill(NamedTuple):
    """A run with so many clients side by side and this seed, ended at this point; -1 is `STACKED`."""

    clients_per_step: int
    seed: int | None
    point: int

    def folder(self, root):
        return root / f"dead-{self.clients_per_step}-{self.seed}-{self.point}"


def carry_out(root, kills, monkeypatch):
    """One fork for every kill."""

    def dies(kill):
        monkeypatch.undo()  # isolation is tried there, as anywhere
        tempfile.tempdir = str(root)
        (STACKED if kill.point < 0 else POINTS[kill.point]).arm()
        fit(kill.folder(root), kill.clients_per_step, seed=kill.seed)

    for kill in kills:
        assert forked.end(forked.begin(dies, kill)) == [-signal.SIGKILL], kill


def last_checkpoint(folder):
    return latest(folder) if any(folder.glob("*.ckpt")) else None


def journal_lines(folder):
    """Charges in the one journal of a folder."""
    (path,) = folder.glob("ledger-*.jsonl")
    return len(path.read_text().splitlines()) - 1


def check_seeded(root, kills):
    """Resume and compare with the run that was never killed; return how many kills left a checkpoint."""
    wholes = {size: fit(root / f"whole-{size}", size) for size in {kill.clients_per_step for kill in kills}}
    left = 0
    for kill in kills:
        whole, fed = wholes[kill.clients_per_step]
        folder = kill.folder(root)
        checkpoint = last_checkpoint(folder)
        torch.manual_seed(99 + kill.point)
        resumed, again = fit(folder, kill.clients_per_step, resume=checkpoint)
        assert torch.equal(weights_of(resumed), weights_of(whole)), kill
        assert [r.mse for r in again.records] == [r.mse for r in fed.records], kill
        ours, theirs = (run.engine.ledger.state_dict() for run in (again, fed))
        assert torch.equal(ours["charges"], theirs["charges"]), kill
        assert torch.equal(ours["streams"], theirs["streams"]), kill
        assert ours["rounds"] == theirs["rounds"] == ROUNDS, kill
        if checkpoint is not None:
            assert journal_lines(folder) == ROUNDS, kill
            left += 1
    return left


def check_unseeded(root, kills):
    """Resume, and find every round that was ever begun in the ledger."""
    for kill in kills:
        folder = kill.folder(root)
        checkpoint = last_checkpoint(folder)
        assert checkpoint is not None, kill
        begun, done = journal_lines(folder), int(checkpoint.stem[len("epoch=") :].split("-")[0]) + 1
        assert begun >= done
        _, again = fit(folder, kill.clients_per_step, resume=checkpoint, seed=None)
        expected = begun + ROUNDS - done
        assert again.engine is not None and again.engine.ledger.rounds == expected, kill
        assert again.engine.ledger.charges.tolist() == [expected] * 6, kill
        assert journal_lines(folder) == expected, kill


def test_killed_and_resumed_is_bit_identical(tmp_path, monkeypatch):
    """While a checkpoint is written, and between two messages of stacks; the slow test has all points."""
    seeded, unseeded = [Kill(1, 3, 16), Kill(4, 3, -1)], [Kill(1, None, 16)]
    carry_out(tmp_path, seeded + unseeded, monkeypatch)
    assert check_seeded(tmp_path, seeded) == 2
    check_unseeded(tmp_path, unseeded)


@pytest.mark.slow
def test_killed_at_twenty_points_and_resumed_is_bit_identical(tmp_path, monkeypatch):
    kills = [Kill(1, 3, point) for point in range(len(POINTS))]
    carry_out(tmp_path, kills, monkeypatch)
    assert len(kills) == 20
    assert check_seeded(tmp_path, kills) == 16  # the others died before the first checkpoint was whole


@pytest.mark.slow
def test_without_a_seed_no_kill_makes_the_ledger_forget(tmp_path, monkeypatch):
    before_the_first_checkpoint = {0, 4, 9, 13}
    kills = [Kill(1, None, point) for point in range(len(POINTS)) if point not in before_the_first_checkpoint]
    carry_out(tmp_path, kills, monkeypatch)
    check_unseeded(tmp_path, kills)
