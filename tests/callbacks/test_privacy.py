"""The budget stops a federation in time, whatever the loop does, and survives a checkpoint."""

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedq as fedq
from lightning_fedq import FixedSize
from lightning_fedq.functional.divergences import gaussian_epsilon
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.accounting import spent
from lightning_fedq.rounds import RoundPlanner
from tests.digits_run import fitted, make_trainer


class Linear(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(24, 4, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def trainer(*callbacks, epochs=30, **settings):
    return make_trainer(*callbacks, max_epochs=epochs, **settings)


def federated(mechanism=None, seed=None, **settings):
    return fedq.Federated(mechanism or fedq.LDPQ(0.1), 6, clients_per_step=1, seed=seed, **settings)


def budget(epsilon=2.0, adversary=Adversary.SERVER, **settings):
    return fedq.PrivacyBudget(epsilon, 1e-5, adversary, **settings)


def cost(rounds):
    claim = next(c for c in fedq.LDPQ(0.1).claims(context()) if c.adversary is Adversary.SERVER)
    return spent(claim.loss, 1e-5, compositions=5, rounds=rounds).epsilon


def context():
    fed = federated(seed=0)  # another run with secret keys would count in a test that has saved
    fitted(Linear(), fed, max_epochs=1)
    return fed.engine.context(fed.planner.plan(0, fed.mechanism))


def test_a_budget_is_about_any_two_updates_where_the_claim_is_about_zero():
    """A client's five coordinates may be at either end of their range, two steps apart."""
    fed, limit = federated(fedq.SIGM(1.0, 20.0)), budget(adversary=Adversary.OUTSIDER)
    trainer(limit, fed).fit(Linear())
    rounds = len(fed.records)
    assert 0 < rounds == limit.affordable < 30
    assert gaussian_epsilon(2.0 * (5 * rounds) ** 0.5 / 20.0, 1e-5) <= limit.epsilon_spent <= 2.0


@pytest.mark.parametrize("first", [True, False])
def test_the_run_stops_after_the_last_round_that_fits(first):
    fed, limit = federated(), budget()
    run = trainer(*((limit, fed) if first else (fed, limit)))
    run.fit(Linear())
    rounds = len(fed.records)
    assert 0 < rounds < 30
    assert cost(rounds) <= 2.0 < cost(rounds + 1)
    assert limit.epsilon_spent == pytest.approx(cost(rounds))
    assert float(run.callback_metrics["fed/epsilon"]) == pytest.approx(cost(rounds), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "limit", "words"),
    [
        ({"min_epochs": 30}, {}, "The privacy budget allows"),
        ({}, {"on_exhausted": "raise"}, "Raise the budget, or stop the training here"),
    ],
)
def test_a_run_that_must_go_on_fails_before_the_round_that_does_not_fit(settings, limit, words):
    fed = federated()
    with pytest.raises(RuntimeError, match=words):
        trainer(fed, budget(**limit), **settings).fit(Linear())
    assert cost(len(fed.records)) <= 2.0 < cost(len(fed.records) + 1)


def test_warn_goes_on():
    fed = federated()
    with pytest.warns(
        UserWarning,
        match=r"The budget of epsilon 2 is spent: 5 rounds fit into it, and 5 are done. The training goes on",
    ):
        trainer(fed, budget(on_exhausted="warn")).fit(Linear())
    assert len(fed.records) == 30


def test_a_cohort_spends_for_its_members_only():
    fed, limit = federated(cohort=2), budget(1.2)
    fed.planner = RoundPlanner(
        6, 2, FixedSize(2)
    )  # else, with chance 0.2, one client is in three rounds running
    trainer(fed, limit).fit(Linear())
    assert int(fed.engine.ledger.charges.max()) == limit.affordable
    assert len(fed.records) > limit.affordable


def test_a_resumed_run_goes_on_with_what_was_spent(tmp_path):
    fed = federated()
    fitted(Linear(), fed, budget(), max_epochs=3).save_checkpoint(tmp_path / "three.ckpt")
    again, limit = federated(), budget()
    trainer(again, limit).fit(Linear(), ckpt_path=tmp_path / "three.ckpt")
    assert cost(len(again.records)) <= 2.0 < cost(len(again.records) + 1)


def test_a_budget_spent_before_resuming_is_refused(tmp_path):
    fed = federated()
    fitted(Linear(), fed, max_epochs=20).save_checkpoint(tmp_path / "twenty.ckpt")
    with pytest.raises(RuntimeError, match=r"is spent: .* rounds fit into it, and 20 are done"):
        trainer(federated(), budget()).fit(Linear(), ckpt_path=tmp_path / "twenty.ckpt")


MASKED = "the server behind secure aggregation: secure aggregation is off"


@pytest.mark.parametrize(
    ("mechanism", "adversary", "reason"),
    [
        (fedq.FedAvg(), Adversary.SERVER, "the server that sees every message: updates are sent as they are"),
        (fedq.LDPQ(0.1), Adversary.SECAGG_SERVER, MASKED),
        (fedq.LDPQ(0.1), "SecAgg_Server", f"{MASKED}: see the row of the server that sees every"),
    ],
)
def test_no_budget_where_there_is_no_guarantee(mechanism, adversary, reason):
    with pytest.raises(ValueError, match=f"No budget can be kept against {reason}"):
        trainer(federated(mechanism), budget(adversary=adversary)).fit(Linear())


def test_infinite_losses_afford_no_round():
    with pytest.raises(RuntimeError, match="0 rounds fit into it"):
        trainer(federated(fedq.CorBin(0.1, 5)), budget()).fit(Linear())


def test_reproducible_keys_are_said_to_protect_nothing():
    with pytest.warns(UserWarning, match="nothing is private"):
        trainer(federated(seed=3), budget(), epochs=1).fit(Linear())


def test_dropouts_take_their_share_of_delta():
    sure, unsure = budget(3.0, Adversary.OUTSIDER), budget(3.0, Adversary.OUTSIDER)
    trainer(federated(), sure).fit(Linear())
    trainer(federated(dropout_probability=0.2), unsure).fit(Linear())
    assert unsure.affordable < sure.affordable


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1e-5, Adversary.SERVER), "epsilon must be > 0"),
        ((1.0, 0.0, Adversary.SERVER), "delta must be > 0"),
        ((1.0, 1e-5, Adversary.SERVER, "shrug"), "on_exhausted must be"),
        ((1.0, 1e-5, "nobody"), "adversary must be one of eavesdropper, server,"),
    ],
)
def test_settings_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        fedq.PrivacyBudget(*arguments)


def test_delta_is_checked_against_the_number_of_clients():
    with pytest.raises(ValueError, match="delta must be > 0 and below"):
        trainer(federated(), fedq.PrivacyBudget(1.0, 0.2, Adversary.SERVER)).fit(Linear())


def test_behind_secure_aggregation_the_sum_has_a_budget_of_its_own():
    """A sum of six clients' bits costs less than the bits; the name will do for the adversary."""
    spent_by = {}
    for adversary in ("server", "secagg_server"):
        fed, limit = federated(secure_aggregation=fedq.SecAgg()), budget(1e3, adversary)
        trainer(fed, limit, epochs=2).fit(Linear())
        spent_by[adversary] = limit.epsilon_spent
    assert 0.0 < spent_by["secagg_server"] < spent_by["server"] == pytest.approx(cost(2))


def test_a_robust_rule_is_no_sum():
    """Claims about the sum do not hold for a median: the outsider's budget is that of all messages."""
    spent_by = []
    for aggregator in (None, fedq.RobustAggregation("median")):
        limit = budget(1e3, Adversary.OUTSIDER)
        trainer(federated(aggregator=aggregator, ranges=fedq.FixedRange(1.0)), limit, epochs=1).fit(Linear())
        spent_by.append(limit.epsilon_spent)
    assert spent_by[0] < spent_by[1] == pytest.approx(cost(1))


def test_aborted_rounds_are_paid_for():
    fed, limit = federated(secure_aggregation=fedq.SecAgg(threshold=6), dropout_probability=0.9), budget(1e3)
    with pytest.warns(UserWarning, match="was aborted"):
        trainer(fed, limit, epochs=2).fit(Linear())
    assert all(record.aborted for record in fed.records)
    assert fed.engine.ledger.charges.tolist() == [2] * 6
    assert limit.epsilon_spent == pytest.approx(cost(2))
