"""The trial before the first round: in forks that leave nothing behind, or in the one process there is."""

import multiprocessing
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.forks import ForkFailedError, run_in_fork
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.training.isolation import IsolationTrial, describe_trial
from tests.digits_run import make_trainer
from tests.isolation.shapes.leaving import BigTable, BufferOfOutliers, FirstInAMap, OfAClass, _InCallback
from tests.isolation.shapes.outside import ClassAttribute
from tests.isolation.worlds import CLIENTS, ROUNDS, SAMPLES, Samples, Shape, federate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_a_fork_leaves_nothing_in_objects_or_in_shared_memory():
    value, held = multiprocessing.Value("i", 3), list[int]()

    def work():
        value.value += 4
        held.append(1)
        return int(value.value)

    assert run_in_fork(work) == 7
    assert value.value == 3 and not held


def test_errors_of_a_fork_come_back_with_their_place():
    def fails():
        raise KeyError("not there")

    with pytest.raises(KeyError, match="not there") as caught:
        run_in_fork(fails)
    assert "in fails" in str(caught.value.__cause__)
    with pytest.raises(ForkFailedError, match="SIGKILL"):
        run_in_fork(lambda: os.kill(os.getpid(), 9))


def fit(row, data=None, **settings):
    row.forget()
    fed = Federated(FedAvg(), CLIENTS, seed=1, diagnostics=False, check_isolation=True, **settings)
    module = row()
    trainer = make_trainer(*module.callbacks(), fed, max_epochs=1)
    trainer.fit(module, datamodule=data or row.data(None))
    return fed


def test_the_page_of_a_run_says_which_trial_ran(monkeypatch):
    assert fit(Shape).fit.isolation == describe_trial("forks")
    monkeypatch.setattr("lightning_fedq.training.fit.find_fork_obstacle", lambda trainer: "no memory")
    fed = fit(Shape)
    assert fed.fit.isolation == describe_trial("one process", "no memory")
    assert "can't be forked here (no memory)" in fed.unprotected_outputs(fed.fit._trainer)


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
    with pytest.raises(ValueError, match=r"Data of client \d+ changed results.*checkpoint/callbacks/"):
        fit(SavedLate)
    with pytest.warns(UserWarning, match=r"could not look into a checkpoint \(AttributeError: .*best"):
        fed = fit(NotYetSaved)
    unseen = (
        "a checkpoint (AttributeError: 'NotYetSaved' object has no attribute 'best') or "
        "a validation (KeyError: 'no score yet')"
    )
    assert fed.fit.isolation == describe_trial("forks", unseen=unseen)


class ReadsMetrics(Shape):
    """Its validation uses what training steps have logged."""

    def on_validation_epoch_end(self):
        self.log("gap", self.trainer.callback_metrics["train_loss"])


def test_a_validation_finds_metrics_that_clients_share():
    fed = Federated(FedAvg(), CLIENTS, seed=1, check_isolation=True, client_metrics="shared")
    with pytest.warns(UserWarning, match=r"could not look into a validation \(KeyError"):
        row = ReadsMetrics()
        make_trainer(fed, max_epochs=1, num_sanity_val_steps=0).fit(row, datamodule=row.data(None))
    assert len(fed.records) == 1


class OneBatch(Samples):
    """One batch a client, so that another size is a smaller batch."""

    def train_dataloader(self):
        return DataLoader(self.train_set(), batch_size=SAMPLES)


def test_what_could_not_be_tried_is_not_claimed():
    assert fit(TakesItsOwn).fit.isolation == describe_trial("forks", is_data_unchanged=True)
    assert fit(TakesSix, OneBatch(None)).fit.isolation == describe_trial("forks", is_size_unchanged=True)
    assert fit(Shape, OneBatch(None)).fit.isolation == describe_trial("forks")


def test_a_fork_that_is_killed_is_no_size_that_is_not_taken(monkeypatch):
    def killed(self, *arguments):
        os.kill(os.getpid(), 9)

    monkeypatch.setattr(IsolationTrial, "_beside_fewer", killed)
    with pytest.raises(ForkFailedError, match="SIGKILL"):
        fit(Shape)


@pytest.mark.parametrize("row", [ClassAttribute, OfAClass, BigTable, BufferOfOutliers])
def test_without_forks_updates_lengths_and_checkpoints_are_compared(row, monkeypatch):
    monkeypatch.setattr("lightning_fedq.training.fit.find_fork_obstacle", lambda trainer: "no memory")
    with pytest.raises(ValueError, match=r"Data of client \d+ changed results"):
        fit(row)


@pytest.mark.parametrize("row", [FirstInAMap, ClassAttribute])
def test_no_rehearsal_has_been_there_before(row):
    with pytest.raises(ValueError, match=r"Data of client \d+ changed results"):
        fit(row)


class Detached(Shape):
    """Its loss follows from no parameter."""

    def scaled(self, loss):
        return loss.detach().requires_grad_()


class Scripted(Shape):
    def begin(self):
        self.net = torch.jit.script(nn.Linear(3, 1))


def test_where_nothing_trains_it_is_said(tmp_path):
    with pytest.warns(UserWarning, match="Nothing trains: .* no parameter of Detached"):
        federate(Detached, None, 1, tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # of TorchScript
        warnings.filterwarnings("error", message="Nothing trains")
        assert len(federate(Scripted, None, 1, tmp_path).updates) == CLIENTS * ROUNDS
