"""Clients that are protected differently, or were charged differently: the worst one is the figure."""

import json
import math

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedq import FixedSize
from lightning_fedq.callbacks import Federated, RunFolder
from lightning_fedq.callbacks.privacy_budget import PrivacyBudget
from lightning_fedq.commands.privacy import report_of_checkpoint
from lightning_fedq.functional.divergences import randomized_response_epsilon
from lightning_fedq.mechanisms import CPA, LDPQ
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.report_file import to_json
from lightning_fedq.rounds import RoundPlanner
from tests.callbacks.test_federated_ledger import FailsAtClient
from tests.callbacks.test_privacy import trainer

WIDTH = 310
UNEQUAL = (0.001,) * 9 + (2.0,)


class Wide(pl.LightningModule):
    """310 parameters, so 310 bits a message."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(WIDTH, 1, bias=False)

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)

    def train_dataloader(self):
        x = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x[:, :1]), batch_size=2)


def unequal(epsilon=UNEQUAL, plan_seed=3, **settings):
    """Ten clients, two a round; which ones follows from a public seed, the keys come from the system."""
    fed = Federated(CPA(epsilon=epsilon, epsilon_scope="bit"), 10, cohort=2, clients_per_step=1, **settings)
    fed.planner = RoundPlanner(10, plan_seed, FixedSize(2))
    return fed


def spent_by(fed, client):
    """By the closed form: all bits that the client was charged for."""
    coin = fed.mechanism.coin(client, None)
    level = math.log((2**32 - coin.low) / coin.low)
    return randomized_response_epsilon(level, WIDTH * int(fed.ledger.charges[client]), 1e-5)


def report_and_folder(folder, fed, *callbacks, rounds=12):
    run = trainer(fed, *callbacks, RunFolder("run", str(folder)), epochs=rounds)
    run.fit(Wide())
    run.save_checkpoint(folder / "last.ckpt")
    return json.loads((folder / "run" / "privacy.json").read_text())


def row(saved, adversary="SERVER"):
    return next(row for row in saved["rows"] if row["adversary"] == adversary)


# ---- one epsilon a client --------------------------------------------------------------------------------


def test_the_report_is_that_of_the_least_protected_client_whatever_the_cohort(tmp_path):
    limit = PrivacyBudget(1.0, 1e-5, Adversary.SERVER, on_exhausted="warn")
    fed = unequal()
    assert 9 not in fed.planner.plan(0, fed.mechanism).cohort
    with pytest.warns(UserWarning, match="client 9"):
        saved = report_and_folder(tmp_path, fed, limit)
    charges = int(fed.ledger.charges[9])
    assert charges > 0
    assert row(saved)["epsilon_run"] == pytest.approx(spent_by(fed, 9))
    assert row(saved)["verdict"] == "vacuous"
    assert limit.epsilon_spent == pytest.approx(spent_by(fed, 9))
    assert limit.epsilon_spent > 500 * charges
    read = report_of_checkpoint(tmp_path / "last.ckpt", None, 1e-5, secagg=False)
    assert read.row(Adversary.SERVER).epsilon_run == pytest.approx(spent_by(fed, 9))
    to_come = report_of_checkpoint(tmp_path / "last.ckpt", 12, 1e-5, secagg=False)
    # twelve rounds were charged, so no round is to come
    assert to_come.row(Adversary.SERVER).epsilon_run == pytest.approx(spent_by(fed, 9))


def test_a_client_that_can_not_afford_one_round_is_named_before_the_first():
    fed = unequal()
    assert 9 not in fed.planner.plan(0, fed.mechanism).cohort
    with pytest.raises(RuntimeError, match="0 rounds of client 9 fit into it"):
        trainer(fed, PrivacyBudget(1.0, 1e-5, Adversary.SERVER), epochs=12).fit(Wide())
    assert fed.ledger.rounds == 0


def test_every_client_has_a_budget_of_its_own():
    fed = unequal((0.001,) * 9 + (0.02,))
    limit = PrivacyBudget(2.5, 1e-5, Adversary.SERVER)
    trainer(fed, limit, epochs=100).fit(Wide())
    assert limit.affordable == fed.ledger.charges[9] < fed.ledger.max_charges
    assert spent_by(fed, 9) <= 2.5 < randomized_response_epsilon(0.02, WIDTH * (limit.affordable + 1), 1e-5)
    assert limit.epsilon_spent == pytest.approx(max(spent_by(fed, client) for client in range(10)))
    assert 9 in fed.planner.plan(fed.engine.round, fed.mechanism).cohort


def test_a_client_without_any_protection_is_not_hidden(tmp_path):
    with pytest.raises(ValueError, match=r"No budget can be kept .*clients \[9\]"):
        fed = unequal((0.001,) * 9 + (math.inf,))
        trainer(fed, PrivacyBudget(1.0, 1e-5, Adversary.SERVER), epochs=1).fit(Wide())
    saved = report_and_folder(tmp_path, unequal((0.001,) * 9 + (math.inf,)), rounds=1)
    assert row(saved)["verdict"] == "no guarantee"


# ---- what was charged, client by client ------------------------------------------------------------------


def test_a_finished_run_reports_its_most_charged_client_and_a_histogram(tmp_path):
    fed = Federated(LDPQ(0.01), 10, cohort=2, clients_per_step=1)
    limit = PrivacyBudget(50.0, 1e-5, Adversary.SERVER, on_exhausted="warn")
    run = trainer(fed, limit, RunFolder("run", str(tmp_path)), epochs=15)
    run.fit(Wide())
    run.save_checkpoint(tmp_path / "last.ckpt")
    saved = json.loads((tmp_path / "run" / "privacy.json").read_text())
    epsilon = randomized_response_epsilon(0.01, WIDTH * fed.ledger.max_charges, 1e-5)
    assert row(saved)["epsilon_run"] == pytest.approx(epsilon) == pytest.approx(limit.epsilon_spent)
    assert float(run.callback_metrics["fed/epsilon"]) == pytest.approx(row(saved)["epsilon_run"], rel=1e-6)
    charges = fed.ledger.charges.tolist()
    assert {entry["charges"]: entry["clients"] for entry in saved["charged"]} == {
        count: charges.count(count) for count in charges
    }
    for entry in saved["charged"]:
        expected = randomized_response_epsilon(0.01, WIDTH * entry["charges"], 1e-5)
        assert entry["epsilons"]["SERVER"] == pytest.approx(expected)
    page = (tmp_path / "run" / "report.md").read_text()
    assert "Who was charged how often" in page and "the client that was charged most often" in page
    assert "averages over the draw" not in page
    read = report_of_checkpoint(tmp_path / "last.ckpt", None, 1e-5, secagg=False)
    assert read.row(Adversary.SERVER).epsilon_run == pytest.approx(epsilon)
    assert json.loads(to_json(read))["charged"] == saved["charged"]
    to_come = report_of_checkpoint(tmp_path / "last.ckpt", 15, 1e-5, secagg=False)
    # 15 rounds were charged, so no round is to come
    assert to_come.row(Adversary.SERVER).epsilon_run == pytest.approx(epsilon)
    assert json.loads(to_json(to_come))["charged"] == saved["charged"]


def test_repeated_attempts_of_one_cohort_are_counted_on_that_cohort(tmp_path):
    fed = Federated(LDPQ(0.01), 10, cohort=2, clients_per_step=1)
    for _ in range(6):
        with pytest.raises(RuntimeError, match="the disk is full"):
            trainer(FailsAtClient(2), fed).fit(Wide())
    saved = report_and_folder(tmp_path, fed, rounds=1)
    assert saved["rounds"] == 7
    assert row(saved)["epsilon_run"] == pytest.approx(randomized_response_epsilon(0.01, WIDTH * 7, 1e-5))
    assert [(entry["clients"], entry["charges"]) for entry in saved["charged"]] == [(2, 7), (8, 0)]
