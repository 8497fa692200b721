"""The trial before the first round: in forks that leave nothing behind, or in the one process there is."""

import ctypes
import hashlib
import linecache
import multiprocessing
import os
import sqlite3
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.forks import ForkFailedError, in_fork
from lightning_fedq.clients.opened import _memory
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.training.files import Aside
from lightning_fedq.training.isolation import IsolationTrial, said
from tests.digits_run import make_trainer
from tests.isolation.shapes.leaving import (
    _FOLDER,
    BigTable,
    BufferOfOutliers,
    FirstInAMap,
    OfAClass,
    WrittenIfMissing,
    _InCallback,
)
from tests.isolation.shapes.outside import ClassAttribute, FileOnDisk
from tests.isolation.worlds import CLIENTS, ROUNDS, SAMPLES, Samples, Shape, federate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_a_fork_leaves_nothing_in_objects_or_in_shared_memory():
    value, held = multiprocessing.Value("i", 3), list[int]()

    def work():
        value.value += 4
        held.append(1)
        return int(value.value)

    assert in_fork(work) == 7
    assert value.value == 3 and not held


def test_errors_of_a_fork_come_back_with_their_place():
    def fails():
        raise KeyError("not there")

    with pytest.raises(KeyError, match="not there") as caught:
        in_fork(fails)
    assert "in fails" in str(caught.value.__cause__)
    with pytest.raises(ForkFailedError, match="SIGKILL"):
        in_fork(lambda: os.kill(os.getpid(), 9))


def fit(row, data=None, **settings):
    row.forget()
    fed = Federated(FedAvg(), CLIENTS, seed=1, diagnostics=False, check_isolation=True, **settings)
    module = row()
    trainer = make_trainer(*module.callbacks(), fed, max_epochs=1)
    trainer.fit(module, datamodule=data or row.data(None))
    return fed


def test_the_page_of_a_run_says_which_trial_ran(monkeypatch):
    assert fit(Shape).fit.isolation == said("forks")
    monkeypatch.setattr("lightning_fedq.training.files.why_no_forks", lambda trainer: "no memory")
    fed = fit(Shape)
    assert fed.fit.isolation == said("one process", "no memory")
    assert "can't be forked here (no memory)" in fed.lets_out(fed.fit._trainer)


def test_why_a_process_can_t_be_forked_is_told():
    """In a process of its own, in which a second device ends autograd in forks, as in all tests once."""
    program = """
import tests.elsewhere
from tests.isolation.test_trial import Shape, fit
fit(Shape)
print(fit(Shape).fit.isolation)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    assert "can't be forked here (a backward pass failed in one: " in done.stdout
    assert "autograd" in done.stdout


class TakesItsOwn(Shape):
    """Refuses samples that are none of its data set's."""

    def training_step(self, batch, batch_idx):
        if batch[0].abs().max() > 0.5 or not torch.allclose(batch[0].sum(1, keepdim=True), batch[1]):
            raise ValueError("no sample of ours")
        return super().training_step(batch, batch_idx)


class TakesSix(Shape):
    """Refuses batches of another size than its own."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) != SAMPLES:
            raise ValueError("no batch of ours")
        return super().training_step(batch, batch_idx)


class SavedLate(Shape):
    """Of two callbacks' states, one can be had after validation only, and the other one leaks."""

    def callbacks(self):
        return [_Late(), _InCallback()]


class _Late(pl.Callback):
    def on_train_end(self, *args):
        self.best = 1.0

    def state_dict(self):
        return {"best": self.best}


class NotYetSaved(Shape):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["best"] = self.best

    def on_validation_epoch_end(self):
        if self.current_epoch:
            raise KeyError("no score yet")


def test_an_error_of_a_checkpoint_hides_nothing_and_is_told():
    _InCallback.losses.clear()
    with pytest.raises(ValueError, match=r"not isolated.*checkpoint/callbacks/"):
        fit(SavedLate)
    with pytest.warns(UserWarning, match=r"could not look into a checkpoint \(AttributeError: .*best"):
        fed = fit(NotYetSaved)
    assert "It could not look into a checkpoint (AttributeError: " in fed.fit.isolation


class OneBatch(Samples):
    """One batch a client, so that another size is a smaller batch."""

    def train_dataloader(self):
        return DataLoader(self.train_set(), batch_size=SAMPLES)


def test_what_could_not_be_tried_is_not_claimed():
    assert fit(TakesItsOwn).fit.isolation == said("forks", own_data=True)
    assert fit(TakesSix, OneBatch(None)).fit.isolation == said("forks", one_size=True)
    assert fit(Shape, OneBatch(None)).fit.isolation == said("forks")


def test_a_fork_that_is_killed_is_no_size_that_is_not_taken(monkeypatch):
    def killed(self, *arguments):
        os.kill(os.getpid(), 9)

    monkeypatch.setattr(IsolationTrial, "_beside_fewer", killed)
    with pytest.raises(ForkFailedError, match="SIGKILL"):
        fit(Shape)


@pytest.mark.parametrize("row", [ClassAttribute, OfAClass, BigTable, BufferOfOutliers])
def test_without_forks_updates_lengths_and_checkpoints_are_compared(row, monkeypatch):
    monkeypatch.setattr("lightning_fedq.training.files.why_no_forks", lambda trainer: "no memory")
    with pytest.raises(ValueError, match="clients are not isolated"):
        fit(row)


@pytest.mark.parametrize("row", [FirstInAMap, WrittenIfMissing, ClassAttribute])
def test_no_rehearsal_has_been_there_before(row):
    with pytest.raises(ValueError, match="clients are not isolated"):
        fit(row)


class Database(Dataset[Any]):
    """Samples in a data base that is only read, and a memory map that could be written to."""

    def __init__(self, folder: Path, data: Samples) -> None:
        self.base, self.map = folder / "samples.db", folder / "samples.npy"
        np.save(self.map, data.targets.numpy())
        with sqlite3.connect(self.base) as base:
            base.execute("create table samples (a real, b real, c real)")
            base.executemany("insert into samples values (?, ?, ?)", data.inputs.tolist())
        base.close()
        for path in (self.base, self.map):
            os.utime(path, (0, 0))

    def __len__(self):
        return 24

    def __getitem__(self, index):
        base = sqlite3.connect(self.base)
        row = base.execute("select * from samples where rowid = ?", (index + 1,)).fetchone()
        base.close()
        return torch.tensor(row), torch.from_numpy(np.load(self.map, mmap_mode="r+")[index].copy())


def test_data_that_are_read_from_files_are_no_memory(tmp_path):
    data = Samples(None)
    data.train_set = lambda: Database(tmp_path, Samples(None))
    assert fit(Shape, data).fit.isolation == said("forks")


ANOTHER = """
import itertools, os, pathlib, sys, time
for number in itertools.count():
    pathlib.Path(f"page-{number}.html").write_text(str(number))
    pathlib.Path("same.txt").write_text("always the same")
    os.utime("read.txt")
    pathlib.Path("log.txt").write_text(str(number))
    pathlib.Path("lock").write_text("")
    if not number:
        print("begun", flush=True)
    time.sleep(float(sys.argv[1]))
"""


class ReadsAFile(Shape):
    """And so do all clients, and validation; nobody of them writes it."""

    def loss(self, batch):
        assert Path("read.txt").read_text() == "1.0"
        return super().loss(batch)


@pytest.mark.parametrize("pause", ["0.005", "0.1"])
@pytest.mark.parametrize("row", [Shape, ReadsAFile])
def test_what_another_process_writes_is_nobody_s(row, pause, tmp_path, monkeypatch):
    """A build of pages, a log: files of the run's folder that none of the clients' processes write."""
    monkeypatch.chdir(tmp_path)
    Path("read.txt").write_text("1.0")
    command = [sys.executable, "-c", ANOTHER, pause]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other, open("lock", "w"):
        try:
            assert other.stdout is not None and other.stdout.readline() == b"begun\n"
            assert fit(row).fit.isolation == said("forks")
        finally:
            other.kill()


def test_the_place_in_an_open_file_that_another_process_moves_is_nobody_s(tmp_path, monkeypatch):
    """Both were started with one file for what they print, by a shell, say."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", "import sys; sys.stdin.read(1); print('other')"]
    with open("both", "w") as both, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=both) as other:
        both.write("before")
        both.flush()

        def work(files):
            with files.of(0):
                other.communicate(b".")  # which waits for its own children only
                while "other" not in Path("both").read_text():
                    time.sleep(0.01)
            theirs = files.digests()
            with files.of(0):
                both.write("own")
                both.flush()
            return {**theirs, **{f"then {name}": value for name, value in files.digests().items()}}

        found = Aside(make_trainer()).watched(work)
    own = hashlib.sha256(b"own").hexdigest()
    assert set(found) == {"then file both", "then file both, at its end"}
    assert found["then file both, at its end"] == own


class _Heard(Shape):
    """A memory that no comparison sees: a library's."""

    @classmethod
    def forget(cls):
        _FOLDER.mkdir(exist_ok=True)
        (_FOLDER / "of-a-shell").unlink(missing_ok=True)
        linecache.cache.pop("heard", None)

    def heard(self):
        return linecache.cache.setdefault("heard", [])

    def scaled(self, loss):
        self.heard().append(loss.item())
        return loss


class OfAShell(_Heard):
    """Another program writes the file, outside of the run's folder."""

    def scaled(self, loss):
        subprocess.run(f"echo {loss.item()} >> {_FOLDER}/of-a-shell", shell=True, check=True)
        return loss + 0 * len((_FOLDER / "of-a-shell").read_text())


class NamedByTheHour(_Heard):
    """What validation saves by torch's own C++, under a name that no run has twice."""

    def on_validation_end(self):
        torch.save(sum(self.heard()), f"sum-{time.time_ns()}.pt")


class ByALaterCall(_Heard):
    """By openat2, which Go and containers take."""

    def on_validation_end(self):
        how = struct.pack("QQQ", os.O_WRONLY | os.O_CREAT, 0o644, 0)
        file = ctypes.CDLL(None).syscall(437, -100, f"sum-{time.time_ns()}.pt".encode(), how, len(how))
        os.write(file, str(sum(self.heard())).encode())
        os.close(file)


class ToTheLog(_Heard):
    def on_validation_end(self):
        with open("book.txt", "a") as book:
            book.write(f"{sum(self.heard())}")


class Appended(_Heard):
    """A file that was open before there was a fork."""

    def on_fit_start(self):
        type(self).book = open("book.txt", "w")  # noqa: SIM115

    def on_validation_end(self):
        type(self).book.write(f"{sum(self.heard())}")
        type(self).book.flush()


class WithACopy(Appended):
    """And another number of the same open file, as loggers and notebooks take."""

    def on_fit_start(self):
        super().on_fit_start()
        type(self).copy = os.dup(type(self).book.fileno())


def test_memory_that_ends_in_what_is_read_is_no_answer():
    """Flags at the end of a page, or a process that has ended: an error at once, and nobody waits."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    pages = libc.mmap(None, 2 * 4096, 3, 0x22, -1, 0)  # to read and write, private, of no file
    assert libc.munmap(ctypes.c_void_p(pages + 4096), 4096) == 0
    assert _memory(os.getpid(), pages + 4088, 8) == bytes(8)
    with pytest.raises(OSError, match="has no 8 bytes"):
        _memory(os.getpid(), pages + 4092, 8)


@pytest.mark.parametrize("row", [OfAShell, NamedByTheHour, ByALaterCall, ToTheLog, Appended, WithACopy])
def test_whatever_writes_a_file_it_is_its_client_s(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(linecache.cache, "heard", [])  # so that it is gone afterwards
    with pytest.raises(ValueError, match=r"not isolated.* were: file (of-a-shell|sum-\d+.pt|book.txt)"):
        fit(row)


def test_where_linux_filters_no_calls_it_is_said(monkeypatch):
    monkeypatch.setattr("lightning_fedq.clients.opened._filter", lambda theirs: "not here")
    with pytest.raises(ValueError, match=r"not isolated.*file losses-\d+.txt, which two clients use"):
        fit(FileOnDisk)
    with pytest.warns(
        UserWarning, match=r"could not look into files that others than Python open \(not here"
    ):
        assert "files that others than Python open (not here)" in fit(Shape).fit.isolation


class Detached(Shape):
    """Its loss follows from no parameter."""

    def scaled(self, loss):
        return loss.detach().requires_grad_()


class Scripted(Shape):
    def begin(self):
        self.net = torch.jit.script(nn.Linear(3, 1))


def test_where_nothing_trains_it_is_said(tmp_path):
    with pytest.warns(UserWarning, match="nothing trains: .* no parameter of Detached"):
        federate(Detached, None, 1, tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # of TorchScript
        warnings.filterwarnings("error", message="nothing trains")
        assert len(federate(Scripted, None, 1, tmp_path).updates) == CLIENTS * ROUNDS
