"""Refusals of what a client would send: the same by a simulation, by a rank and by a client over Flower."""

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import DPSGD
from lightning_fedq.flower.remote_client import ClientConfig, RemoteClient
from lightning_fedq.flower.settings import RefusedError
from lightning_fedq.flower.store import Store
from lightning_fedq.rounds import RoundTask, Statistics
from lightning_fedq.training import checks
from tests.cures.rows import fed, fit
from tests.cures.rows_ranks import among
from tests.digits_run import Classifier, Digits, ManualSteps
from tests.flower import loop

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Surveys(Classifier):
    def client_statistics(self, batches):
        return torch.zeros(3)

    def on_statistics(self, mean):
        pass


class Manual(ManualSteps, Classifier):
    pass


class Outside(Classifier):
    """Its optimiser trains a parameter that is not the module's."""

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(2))], lr=0.1)


class Untrained(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD([parameter.requires_grad_(False) for parameter in self.parameters()], lr=0.1)


class Complex(Classifier):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class Claims(pl.Callback):
    """A user's own record-level mechanism."""

    protects_samples = knows_clients = is_per_client = True


class OwnBatches(pl.Callback):
    """A user's own rule that draws batches."""

    knows_clients = is_per_client = True
    protects_samples = False

    def setup(self, trainer, pl_module, stage):
        next(callback for callback in trainer.callbacks if hasattr(callback, "use_batches")).use_batches(self)


def dpsgd():
    return DPSGD(1.0, 1.0, delta=1e-4, seed=1)


def lazy():
    return Classifier(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 10)))


def normed():
    return Classifier(nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)))


SURVEY = {"statistics": Statistics(3, 1.0)}


@dataclass(frozen=True)
class Refusal:
    """One setting that no engine accepts, with the check that refuses it.

    Ranks refuse `DPSGD` anyway. A client over Flower leaves some callbacks out, which its server refuses.
    """

    check: Any
    words: str
    settings: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Any, ...] = ()
    module: Any = Classifier
    trainer: dict[str, Any] = field(default_factory=dict)
    ranks: bool = True
    at_client: bool = True


def next_to_dpsgd(check, words, **settings):
    return Refusal(check, words, settings, (dpsgd,), ranks=False)


REFUSALS = {
    "DPSGD next to statistics": Refusal(
        checks.check_client, "not for statistics of a client's data", SURVEY, (dpsgd,), Surveys, ranks=False
    ),
    "a record-level claim of the user next to statistics": Refusal(
        checks.check_client, "not for statistics of a client's data", SURVEY, (Claims,), Surveys
    ),
    "no hook of statistics": Refusal(checks.check_hooks, "Statistics need the hook", SURVEY),
    "hooks without statistics": Refusal(checks.check_hooks, "which is never called", module=Surveys),
    "two rules": Refusal(
        checks.check_batch_rule, "both choose the local batches", callbacks=(OwnBatches, dpsgd), ranks=False
    ),
    "a rule and personalised parameters": next_to_dpsgd(
        checks.check_batch_rule, "needs all trained parameters", personal_parameters=["*bias"]
    ),
    "a rule and stacks": next_to_dpsgd(
        checks.check_single_clients, "can't train side by side", clients_per_step=2
    ),
    "a rule and an algorithm": next_to_dpsgd(
        checks.check_algorithm, "bounds gradients that FedProx would change", algorithm=fedq.FedProx(0.1)
    ),
    "manual steps and SCAFFOLD": Refusal(
        checks.check_algorithm,
        "needs as many steps as batches",
        {"algorithm": fedq.SCAFFOLD(), "local_steps": 2},
        module=Manual,
    ),
    "memory that is not sent": Refusal(
        checks.check_memory,
        "sends only",
        {"mechanism": fedq.TopK(0.1), "algorithm": fedq.ErrorFeedback(0.1)},
        module=normed,
    ),
    "a search": Refusal(
        checks.check_setup,
        "raw data of all clients",
        callbacks=(pl.callbacks.LearningRateFinder,),
        at_client=False,
    ),
    "validation in a round": Refusal(
        checks.check_setup,
        "would validate during a round",
        trainer={"val_check_interval": "00:00:00:01", "check_val_every_n_epoch": 1},
    ),
    "no batch": Refusal(checks.check_limit, "without a batch", trainer={"limit_train_batches": 0.01}),
    "a lazy layer": Refusal(checks.check_shapes, "have no shape before", module=lazy),
    "complex parameters": Refusal(checks.check_shapes, "are complex", module=Complex),
    "a parameter outside": Refusal(checks.check_optimizers, "are not the module's", module=Outside),
    "nothing to train": Refusal(checks.check_optimizers, "has nothing to train", module=Untrained),
}
SERVER_ONLY = {
    "check_cohorts_last": "rounds and cohorts are the server's",
    "check_rounds_left": "the number of rounds is the server's",
    "check_resumable": "a client of Flower keeps no checkpoint",
    "check_averaging": "averages of weights are made at the server",
    "check_per_client_loaders": "a real client has one loader, and its own check of streams",
    "check_loader_is_ours": "tests/training/test_handed_loader.py and tests/flower/test_same_training.py",
}
"""Checks that concern no message of a client, and why."""


def test_every_check_has_a_row():
    names = {
        name for name, value in inspect.getmembers(checks, inspect.isfunction) if name.startswith("check_")
    }
    mine = {name for name in names if getattr(checks, name).__module__ == checks.__name__}
    assert mine == {row.check.__name__ for row in REFUSALS.values()} | set(SERVER_ONLY)


def federated(row):
    return fed(**row.settings)


@pytest.mark.parametrize("name", REFUSALS)
def test_a_simulation_refuses(name):
    row = REFUSALS[name]
    federation = federated(row)
    with pytest.raises(ValueError, match=row.words):
        fit(federation, *(make() for make in row.callbacks), module=row.module(), **row.trainer)
    assert not federation.ledger.rounds


@pytest.mark.parametrize("name", [name for name, row in REFUSALS.items() if row.ranks])
def test_a_rank_refuses(name):
    row = REFUSALS[name]
    with pytest.raises(ValueError, match=row.words):
        among(federated(row), *(make() for make in row.callbacks), module=row.module(), **row.trainer)


def client(row, store=None):
    quiet = {"accelerator": "cpu", "logger": False, "callbacks": [make() for make in row.callbacks]}
    config = ClientConfig(federated(row), store, 0)
    return RemoteClient(config, row.module, lambda: Digits(20), {**quiet, **row.trainer})


@pytest.mark.parametrize("name", [name for name, row in REFUSALS.items() if not row.at_client])
def test_a_server_over_flower_refuses(name, tmp_path):
    row = REFUSALS[name]
    settings = lambda: loop.federated(fedq.FedAvg(), **row.settings)  # noqa: E731
    grid = loop.LoopGrid(*loop.clients(settings, tmp_path))
    server = loop.deployment(settings(), 1, tmp_path, callbacks=[make() for make in row.callbacks])
    with pytest.raises(ValueError, match=row.words):
        server.run(grid)
    assert "train" not in {kind for kind, _ in grid.log}


@pytest.mark.parametrize("name", [name for name, row in REFUSALS.items() if row.at_client])
def test_a_client_over_flower_refuses_to_register(name):
    with pytest.raises(RefusedError, match=REFUSALS[name].words):
        client(REFUSALS[name]).answer("register", {})


def test_a_limit_that_is_large_enough_registers():
    row = replace(REFUSALS["no batch"], trainer={"limit_train_batches": 1})
    assert client(row).settings()["limit_train_batches"] == "1"


@pytest.mark.parametrize("name", ["DPSGD next to statistics", "a rule and an algorithm"])
def test_a_client_that_was_never_registered_sends_nothing(name, tmp_path):
    """A server that asks at once gets a refusal, and no zero update of a training that failed."""
    row, one = REFUSALS[name], torch.ones(1, dtype=torch.float64)
    dim = sum(parameter.numel() for parameter in row.module().parameters())
    task = RoundTask(0, 0, tuple((number,) for number in range(4)), (dim,), 0.0 * one, one)
    fields = {"client": 0, "task": task.to_bytes(), "weights": bytes(4 * dim), "dtype": "float32"}
    asked = client(row, Store(tmp_path))
    with pytest.raises(RefusedError, match=row.words):
        asked.answer("train", fields)
    assert asked.reply("train", fields).keys() == {"refused"}


def test_checkpoints_by_steps_need_to_know_the_steps(tmp_path):
    def run(folder, keep, **settings):
        make = lambda: loop.federated(fedq.FedAvg(), **settings)  # noqa: E731
        grid = loop.LoopGrid(*loop.clients(make, tmp_path / folder, trainer={"callbacks": []}))
        loop.deployment(make(), 3, tmp_path / folder, callbacks=[keep]).run(grid)
        return sorted(path.name for path in (tmp_path / folder / "kept").glob("*.ckpt"))

    def keep(folder, **every):
        return pl.callbacks.ModelCheckpoint(tmp_path / folder / "kept", save_top_k=-1, **every)

    with pytest.raises(RefusedError, match=r"every_n_train_steps=\.\.\.\) counts steps"):
        run("unknown", keep("unknown", every_n_train_steps=3))
    assert run("rounds", keep("rounds", every_n_epochs=2)) == ["epoch=1-step=2.ckpt"]
    steps = run("known", keep("known", every_n_train_steps=3), local_steps=2)
    assert steps == ["epoch=1-step=4.ckpt", "epoch=2-step=6.ckpt"]
