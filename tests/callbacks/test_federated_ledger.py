"""The ledger belongs to the federation: fits, failures, new weights and other engines add to one account."""

import copy
import pickle

import pytest
import pytorch_lightning as pl
import torch

from lightning_fedq.callbacks import ByzantineClients, RunFolder
from lightning_fedq.commands.privacy import report_of_checkpoint
from lightning_fedq.mechanisms import LDPQ, FedAvg
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.secagg import SecAgg
from tests.callbacks.test_privacy import Linear, budget, cost, federated, trainer
from tests.digits_run import fitted


class FailsAtClient(pl.Callback):
    """A user's own callback that fails once so many clients have sent their first messages."""

    is_shared_by_clients = True

    def __init__(self, number=6) -> None:
        self.number, self.clients = number, 0

    def on_train_epoch_end(self, trainer, pl_module):
        self.clients += 1
        if self.clients == self.number:
            raise RuntimeError("the disk is full")


def test_weights_touched_between_fits_are_no_new_account():
    fed, model, spent, limit = federated(), Linear(), [], budget(2.0)
    for _ in range(4):
        trainer(fed, limit, epochs=3).fit(model)
        spent.append(limit.epsilon_spent)
        assert limit.epsilon_spent == pytest.approx(cost(fed.ledger.max_charges))
        if fed.ledger.max_charges == limit.affordable:
            break
        with torch.no_grad():
            model.net.weight.mul_(1 + 1e-6)
    assert spent == sorted(spent) and len(set(spent)) == len(spent)
    assert cost(fed.ledger.max_charges) <= 2.0 < cost(fed.ledger.max_charges + 1)
    with pytest.raises(RuntimeError, match="is spent"):
        trainer(fed, limit, epochs=3).fit(model)


def test_after_a_fit_that_failed_the_next_has_the_budget_of_its_own_callbacks():
    fed, raised = federated(), budget(cost(5))
    with pytest.raises(RuntimeError, match="the disk is full"):
        trainer(FailsAtClient(), fed, budget(cost(1)), epochs=9).fit(Linear())
    trainer(fed, raised, epochs=9).fit(Linear())
    assert fed.ledger.charges.tolist() == [5] * 6 and raised.epsilon_spent == pytest.approx(cost(5))


def test_a_second_training_adds_up_and_says_so(caplog):
    fed = federated()
    trainer(fed, epochs=2).fit(Linear())
    first = fed.engine
    with caplog.at_level("INFO"):
        trainer(fed, epochs=3).fit(Linear())
    assert fed.engine is not first
    assert fed.ledger.charges.tolist() == [5] * 6
    assert "charged these clients for up to 2 rounds. They also count for this training" in caplog.text


def test_a_ledger_that_is_handed_on_before_anybody_has_trained_is_the_one_that_both_charge():
    first = federated()
    second = federated(ledger=first.ledger)
    limit = budget(cost(4))
    for fed, charges in ((first, 3), (second, 4)):
        trainer(fed, limit, epochs=3).fit(Linear())
        assert first.ledger is second.ledger and fed.ledger.charges.tolist() == [charges] * 6


def test_a_mechanism_that_was_changed_on_the_way_needs_a_new_ledger():
    fed = federated()
    trainer(fed, epochs=1).fit(Linear())
    fed.mechanism = LDPQ(4.0)
    with pytest.raises(ValueError, match="a new Ledger"):
        trainer(fed, epochs=1).fit(Linear())
    fed.ledger = Ledger(6, repr(fed.mechanism))
    trainer(fed, epochs=1).fit(Linear())
    assert fed.ledger.charges.tolist() == [1] * 6


def test_a_mechanism_that_was_changed_before_anybody_paid_is_no_other_federation():
    fed = federated()
    fed.mechanism = LDPQ(0.2)
    trainer(fed, epochs=1).fit(Linear())
    assert (
        fed.ledger.mechanism == "LDPQ(epsilon_per_coordinate=0.2)" and fed.ledger.charges.tolist() == [1] * 6
    )


def test_an_old_checkpoint_is_no_way_back_to_a_smaller_account(tmp_path):
    fed, fit = federated(), trainer
    first = fit(fed, epochs=2)
    first.fit(Linear())
    first.save_checkpoint(tmp_path / "two.ckpt")
    fit(fed, epochs=5).fit(Linear(), ckpt_path=tmp_path / "two.ckpt")
    assert fed.ledger.charges.tolist() == [5] * 6
    fit(fed, epochs=3).fit(Linear(), ckpt_path=tmp_path / "two.ckpt")
    assert fed.ledger.charges.tolist() == [6] * 6  # rounds 2 of both have keys of their own


def test_with_a_seed_a_checkpoint_is_taken_back_as_it_is(tmp_path):
    fed = federated(seed=0)
    fitted(Linear(), fed, max_epochs=2).save_checkpoint(tmp_path / "two.ckpt")
    for _ in range(2):
        trainer(fed, epochs=4).fit(Linear(), ckpt_path=tmp_path / "two.ckpt")
        assert fed.ledger.charges.tolist() == [4] * 6


# ---- copies ----------------------------------------------------------------------------------------------


def test_a_callback_that_has_not_run_can_be_copied_and_both_train():
    fed = federated()
    for twin in (copy.deepcopy(fed), pickle.loads(pickle.dumps(fed))):
        trainer(twin, epochs=1).fit(Linear())
        assert twin.ledger.charges.tolist() == [1] * 6
    assert fed.ledger.charges.tolist() == [0] * 6
    trainer(fed, epochs=1).fit(Linear())


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_two_engines_draw_the_same_secret_coins(duplicate):
    fed = federated()
    trainer(fed, epochs=1).fit(Linear())
    for thing in [fed.engine.keys] if duplicate is copy.copy else [fed.engine.keys, fed.engine, fed]:
        with pytest.raises(TypeError, match=r"would draw the same bits.*Make a new"):
            duplicate(thing)


def test_a_shallow_copy_of_an_engine_pays_into_the_same_ledger():
    fed = federated()
    trainer(fed, epochs=1).fit(Linear())
    twin = copy.copy(fed.engine)
    fed.engine.start()
    with pytest.raises(RuntimeError, match="was already charged for clients"):
        twin.start()


def test_a_reproducible_run_can_be_copied():
    fed = federated(seed=3)
    trainer(fed, epochs=1).fit(Linear())
    assert copy.deepcopy(fed.engine).ledger.charges.tolist() == [1] * 6


# ---- terms -----------------------------------------------------------------------------------------------

LIES = {"fraction": 0.5, "attack": "ones"}


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ({"cohort": 2}, {}, r"clients_per_round = 2 \(here 6\)"),
        ({}, {"secure_aggregation": SecAgg()}, r"secure_aggregation = None \(here SecAgg\("),
        (
            {"secure_aggregation": SecAgg()},
            {"secure_aggregation": SecAgg(max_colluding_fraction=0.3)},
            r"secure_aggregation = SecAgg\(.*max_colluding_fraction=0.3",
        ),
        ({"weighting": "samples"}, {}, r"mean = weighted or robust \(here plain\)"),
        ({"dropout_probability": 0.2}, {}, r"dropout_probability = 0.2 \(here 0.0\)"),
        ({"seed": 1}, {}, r"keys = from a seed \(here secure\)"),
    ],
)
def test_rounds_are_not_priced_by_the_terms_of_later_ones(first, then, words):
    """A charge has no price of its own, so a ledger is for rounds of one price."""
    fed = federated(**first)
    trainer(fed, epochs=2).fit(Linear())
    cure = "Go on with the settings and the version of the charged"
    with pytest.raises(ValueError, match=f"charged with {words}.*{cure}"):
        trainer(federated(ledger=fed.ledger, **then), epochs=1).fit(Linear())
    assert fed.ledger.rounds == 2
    trainer(fed, epochs=1).fit(Linear())
    assert fed.ledger.rounds == 3


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_liars_of_past_rounds_still_hide_nobody(tmp_path):
    """Neither in the next fit of the same object, nor after a checkpoint that is resumed without them."""
    fed, model = federated(), Linear()
    fitted(model, fed, ByzantineClients(**LIES), max_epochs=2).save_checkpoint(tmp_path / "lies.ckpt")
    for honest, start in ((fed, None), (federated(), tmp_path / "lies.ckpt")):
        with pytest.raises(ValueError, match=r"charged with num_byzantine = 3 \(here 0\)"):
            trainer(honest, epochs=3).fit(model, ckpt_path=start)
    again = federated()
    fitted(model, again, ByzantineClients(**LIES), ckpt_path=tmp_path / "lies.ckpt", max_epochs=3)
    assert again.ledger.charges.tolist() == [3] * 6


def test_what_does_not_change_the_price_may_change():
    fed = federated()
    trainer(fed, epochs=1).fit(Linear())
    settings = {"local_epochs": 2, "sends": "weights", "server_lr": 0.5}
    settings["server_optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.5)
    trainer(federated(ledger=fed.ledger, **settings), epochs=4).fit(Linear())
    assert fed.ledger.charges.tolist() == [5] * 6


def test_a_mechanism_without_a_claim_has_no_price():
    fed = federated(FedAvg())
    trainer(fed, ByzantineClients(0.5, "sign_flip"), epochs=1).fit(Linear())
    trainer(fed, epochs=1).fit(Linear())
    trainer(federated(FedAvg(), ledger=fed.ledger, cohort=2, seed=1), epochs=1).fit(Linear())
    assert fed.ledger.rounds == 3


def test_rounds_of_unknown_terms_are_priced_like_the_present_ones_with_a_warning():
    ledger = Ledger(6, "LDPQ(epsilon_per_coordinate=0.1)")
    ledger.charge(range(6), 0)
    with pytest.warns(UserWarning, match="Rounds were charged without terms"):
        trainer(federated(ledger=ledger), epochs=1).fit(Linear())
    assert ledger.charges.tolist() == [2] * 6


class Evaluated(Linear):
    def test_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    test_dataloader = Linear.train_dataloader


def test_the_liars_of_a_fit_count_in_reports_that_another_trainer_writes(tmp_path):
    """A Trainer that only tests, and a checkpoint that it saves, know of no ByzantineClients."""
    fed, model = federated(), Evaluated()
    folder = RunFolder(root=str(tmp_path / "runs"), show=False)
    trainer(fed, ByzantineClients(**LIES), folder, epochs=2).fit(model)
    before = (folder.path / "privacy.md").read_text()
    assert "3 clients lie" in (folder.path / "report.md").read_text()
    testing = trainer(fed, folder)
    testing.test(model, verbose=False)
    assert (folder.path / "privacy.md").read_text() == before
    testing.save_checkpoint(tmp_path / "tested.ckpt")
    for rounds in (None, 2):
        report = report_of_checkpoint(tmp_path / "tested.ckpt", rounds, 1e-5, secagg=False)
        assert "3 clients lie" in " ".join(report.row(Adversary.OUTSIDER).assumptions)
