"""The rehearsal before the first charge: validation, checkpoints, hooks of the start, loggers, algorithms."""

import copy
import os
import re
import time
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.algorithms import Correction, LocalAlgorithm
from lightning_fedq.callbacks import Federated
from lightning_fedq.clients.forks import run_in_fork
from lightning_fedq.mechanisms import FedAvg, GaussianNoise
from lightning_fedq.training.dry_round import silence
from tests.digits_run import Classifier, Digits, make_trainer, weights_of

pytestmark = [pytest.mark.tried, pytest.mark.filterwarnings("ignore::UserWarning")]


def fit(module, *callbacks, mechanism=None, trainer=None, **settings):
    given = {"clients_per_step": 1, **settings}
    federated = Federated(mechanism or FedAvg(), 4, **given)
    made = make_trainer(
        *callbacks[:0],
        federated,
        *callbacks,
        **{"max_epochs": 2, "num_sanity_val_steps": 0, **(trainer or {})},
    )
    return federated, made, module


def refused(kind, words, module, *callbacks, **settings):
    federated, trainer, module = fit(module, *callbacks, **settings)
    with pytest.raises(kind, match=words) as caught:
        trainer.fit(module, datamodule=Digits(80))
    assert isinstance(caught.value, ValueError) and not federated.ledger.rounds
    return caught.value


class ReadsSteps(Classifier):
    """The commonest pattern since Lightning 2.0: step outputs in a list, used at the end of validation."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss

    def on_validation_epoch_end(self):
        self.log("mean", torch.stack(self.outputs).mean())


class ReadsMetrics(Classifier):
    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.backbone(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def on_validation_epoch_end(self):
        self.log("gap", self.trainer.callback_metrics["train_loss"])


class OfOther(Classifier):
    """An error of its own kind in its validation."""

    def validation_step(self, batch, batch_idx):
        raise NotImplementedError("no metric yet")


@pytest.mark.parametrize("settings", [{"seed": 1}, {"mechanism": GaussianNoise(1.0, 1.0)}])
def test_a_validation_that_fails_after_a_round_is_the_user_s_own_error(settings):
    words = r"Validation fails after a round \(RuntimeError: stack expects.*\), because clients' changes"
    refused(RuntimeError, words, ReadsSteps(), **settings)
    refused(NotImplementedError, r"\(NotImplementedError: no metric yet\)", OfOther(), **settings)


def test_metrics_of_training_are_there_if_clients_share_them():
    refused(KeyError, "KeyError: 'train_loss'", ReadsMetrics(), mechanism=GaussianNoise(1.0, 1.0))
    for settings in ({"seed": 1}, {"mechanism": GaussianNoise(1.0, 1.0), "client_metrics": "shared"}):
        federated, trainer, module = fit(ReadsMetrics(), **settings)
        trainer.fit(module, datamodule=Digits(80))
        assert len(federated.records) == 2


def test_without_a_client_to_try_validation_is_tried_alone():
    """Under `DPSGD`, whose rule can draw its batches only once."""
    private = fedq.DPSGD(1.0, 1.0, delta=1e-4)
    refused(NotImplementedError, "Validation fails after a round", OfOther(), private)


class Late(pl.Callback):
    """Its state is there after the end only."""

    def on_train_end(self, *args):
        self.best = 1.0

    def state_dict(self):
        return {"best": self.best}


class SavesLate(Classifier):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["best"] = self.best


@pytest.mark.parametrize(("module", "callbacks"), [(Classifier, (Late,)), (SavesLate, ())])
def test_a_checkpoint_that_fails_is_refused_where_one_will_be_written(module, callbacks, tmp_path):
    keep = pl.callbacks.ModelCheckpoint(tmp_path / "kept")
    words = r"A checkpoint fails after the first round \(AttributeError: .*best"
    friends = [one() for one in callbacks]
    refused(AttributeError, words, module(), keep, *friends, trainer={"enable_checkpointing": True}, seed=1)
    assert not (tmp_path / "kept").exists()
    federated, trainer, made = fit(module(), *[one() for one in callbacks], seed=1)
    trainer.fit(made, datamodule=Digits(80))
    assert len(federated.records) == 2


class Crossing(pl.Callback):
    """One object for all clients."""

    is_shared_by_clients = True

    def on_train_batch_end(self, *args):
        pass


@pytest.mark.parametrize(
    ("why", "callbacks"), [("PyTorch can't train in the fork", ()), ("Crossing crosses clients", (Crossing,))]
)
def test_an_end_that_is_not_rehearsed_is_named_before_the_first_round(why, callbacks, monkeypatch, tmp_path):
    """Without forks, or beside a callback that clients share, a failing validation comes after a charge."""
    monkeypatch.chdir(tmp_path)
    if not callbacks:
        monkeypatch.setattr("lightning_fedq.training.fit.find_fork_obstacle", lambda trainer: why)
    told = []
    monkeypatch.setattr("lightning_fedq.training.rehearsal.rank_zero_info", told.append)
    federated, trainer, module = fit(
        OfOther(), *[one() for one in callbacks], seed=1, trainer={"enable_checkpointing": True}
    )
    with pytest.raises(NotImplementedError, match=r"^no metric yet"):
        trainer.fit(module, datamodule=Digits(80))
    assert federated.ledger.rounds == 1
    [words] = [one for one in told if "Not rehearsed" in one]
    assert words.startswith(f"Not rehearsed before round 1: validation and checkpoints ({why}")


def test_a_validation_that_comes_later_is_rehearsed_too():
    refused(
        NotImplementedError, "Validation fails", OfOther(), seed=1, trainer={"check_val_every_n_epoch": 2}
    )
    federated, trainer, module = fit(OfOther(), seed=1, trainer={"check_val_every_n_epoch": 3})
    trainer.fit(module, datamodule=Digits(80))
    assert len(federated.records) == 2, "no validation in two rounds"


class Plateau(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_ac"}}


def stops(monitor):
    return pl.callbacks.EarlyStopping(monitor, mode="max", strict=False)


@pytest.mark.parametrize("private", ["federated", "inside", "alone"])
@pytest.mark.parametrize(
    ("module", "callbacks", "watches"),
    [
        (Classifier, ["val_ac"], "EarlyStopping watches 'val_ac', but .* has logged .*val_acc"),
        (Plateau, [], "ReduceLROnPlateau watches 'val_ac'"),
        (Classifier, ["val_acc", "train_loss"], None),
    ],
)
def test_a_metric_that_is_never_logged_is_named_before_the_first_charge(module, callbacks, watches, private):
    made, own = module(), [*map(stops, callbacks)]
    dpsgd = [fedq.DPSGD(1.0, 1.0, delta=1e-4, seed=1)] if private != "federated" else []
    fed = [Federated(FedAvg(), 4, seed=1, clients_per_step=1)] if private != "alone" else []
    trainer = make_trainer(*fed, *dpsgd, *own, max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(Exception):  # Lightning ends a fit whose schedule finds no metric
            trainer.fit(made, datamodule=Digits(80))
    found = [str(one.message) for one in caught if "watches" in str(one.message)]
    assert [bool(re.match(watches, one)) for one in found] == [True] if watches else not found


class Teacher(Classifier):
    """A frozen copy of the weights that training updates, of which no layer tells."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.backbone).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for mine, own in zip(self.teacher.parameters(), self.backbone.parameters(), strict=True):
                mine.mul_(0.9).add_(own, alpha=0.1)
        return super().training_step(batch, batch_idx)


class Probe(pl.Callback):
    """An online probe with its own optimiser, made in `on_fit_start`."""

    def __init__(self, fails=False):
        self.fails = fails

    def on_fit_start(self, trainer, pl_module):
        if self.fails:
            raise KeyError("no probe today")
        with torch.random.fork_rng([]):
            torch.manual_seed(1)
            self.head = nn.Linear(10, 10)
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=0.1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.head(pl_module.backbone(batch[0]).detach()), batch[1])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


@pytest.mark.parametrize("forks", ["", "no forks here"])
def test_a_callback_is_the_same_before_and_behind_federated(forks, monkeypatch):
    """All hooks of the start have run when a client tries, in a fork and in this process."""
    monkeypatch.setattr("lightning_fedq.training.fit.find_fork_obstacle", lambda trainer: forks)
    found = []
    for is_before in (False, True):
        federated = Federated(FedAvg(), 4, seed=1, clients_per_step=1)
        order = [Probe(), federated] if is_before else [federated, Probe()]
        module = Teacher()
        make_trainer(*order, max_epochs=2).fit(module, datamodule=Digits(80))
        found.append(weights_of(module))
        assert federated.fit.side.findings.failure == "" and len(federated.records) == 2
        assert federated.fit.vector.shared == ("teacher.weight", "teacher.bias")
    assert torch.equal(*found)


class FailsToStep(Teacher):
    def training_step(self, batch, batch_idx):
        raise KeyError("no step today")


@pytest.mark.parametrize("forks", ["", "no forks here"])
def test_a_rehearsal_that_failed_refuses_tensors_of_which_no_layer_tells(forks, monkeypatch):
    """The hook that failed first is the cause that is named."""
    monkeypatch.setattr("lightning_fedq.training.fit.find_fork_obstacle", lambda trainer: forks)
    words = r"The first steps of a client fail in Probe.on_fit_start \(KeyError: 'no probe today'\)"
    refused(KeyError, words, Teacher(), Probe(fails=True), seed=1)
    refused(KeyError, "no step today", FailsToStep(), seed=1)


class Doubling(Correction):
    """Notes each client that has trained with it, and doubles its update."""

    def __init__(self, folder):
        super().__init__(0.1)
        self.folder = folder

    def sent(self, clients, updates):
        (self.folder / f"{os.getpid()} {clients[0]}").touch()
        return 2 * updates


@dataclass(frozen=True)
class Doubled(LocalAlgorithm):
    folder: Path

    def begin(self, dim):
        return Doubling(self.folder)


def test_the_first_steps_train_with_the_local_algorithm(tmp_path):
    _, trainer, module = fit(Classifier(), algorithm=Doubled(tmp_path), seed=1, trainer={"max_epochs": 1})
    trainer.fit(module, datamodule=Digits(80))
    processes = {path.name.split()[0] for path in tmp_path.iterdir()}
    assert len(processes) > 1 and str(os.getpid()) in processes, "in a fork of the trial, and in the round"


def sizes(folder):
    return {str(path): path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", [pl.loggers.CSVLogger, pl.loggers.TensorBoardLogger])
def test_a_fork_writes_to_no_logger_wherever_it_is_held(kind, tmp_path):
    if kind is pl.loggers.TensorBoardLogger:
        pytest.importorskip("tensorboard")
    logger, held = kind(str(tmp_path / "run")), kind(str(tmp_path / "held"))
    for one in (logger, held):
        one.log_metrics({"a": 1.0}, 0)
        one.save()
    writer, before, trainer = logger.experiment, sizes(tmp_path), make_trainer(logger=logger)

    def work():
        silence(trainer)
        for one in (*trainer.loggers, held):
            one.log_metrics({"b": 2.0}, 1)
            one.log_hyperparams({"c": 3})
            one.save()
            one.finalize("success")
        if hasattr(writer, "add_scalar"):
            writer.add_scalar("d", 4.0)
            writer.flush()
        return type(logger).__name__, logger.log_dir

    assert run_in_fork(work) == ("Silent", logger.log_dir)
    assert sizes(tmp_path) == before and type(logger) is kind


def test_a_fork_opens_no_connection_of_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = pl.loggers.WandbLogger(save_dir=str(tmp_path), project="trial")
    logger.experiment.log({"a": 1.0})
    trainer = make_trainer(logger=logger)

    def work():
        run = wandb.run
        silence(trainer)
        logger.log_metrics({"b": 1.0}, 1)
        logger.experiment.log({"b": 1.0})
        wandb.log({"b": 1.0})
        run.log({"b": 1.0})
        run.finish()
        return os.getpid()

    began = time.monotonic()
    assert run_in_fork(work) != os.getpid()
    assert time.monotonic() - began < 20
    logger.experiment.log({"a": 2.0})
    assert "b" not in dict(wandb.run.summary)
    wandb.finish()


def test_a_proxy_of_an_object_that_is_gone_stops_no_trial():
    """Whoever looks at all objects meets it, and it has no class: the fit ended with a ReferenceError."""
    gone = Classifier()
    proxy = weakref.proxy(gone)
    del gone
    trainer = make_trainer(Federated(FedAvg(), 4, seed=0))
    trainer.fit(Classifier(), datamodule=Digits(80))
    with pytest.raises(ReferenceError):
        _ = proxy.training
