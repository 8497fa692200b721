"""From whom cohorts are drawn, by a rule of the round's number: what it may be, and what follows from it."""

import itertools
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.target import planned_charges
from lightning_fedq.rounds import RoundPlanner
from lightning_fedq.training.accounts import make_report, planned_run
from tests.digits_run import Classifier, Digits, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CALLS = itertools.count()
COINS = fedq.CorBin(epsilon_per_coordinate=0.1)


def halves(round):
    return range(10) if round % 2 else range(10, 20)


def made(rule=halves, mechanism=COINS, size=5, **settings):
    law = size if rule is None else fedq.Available(rule, size)
    return fedq.Federated(mechanism, 20, cohort=law, **{"check_isolation": False, **settings})


def fit(federated, *callbacks, rounds=4, ckpt_path=None):
    keeps = bool(callbacks)
    trainer = make_trainer(federated, *callbacks, max_epochs=rounds, enable_checkpointing=keeps)
    trainer.fit(Classifier(), datamodule=Digits(200), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(
    "kind", [tuple, set, list, np.array, torch.tensor, lambda named: iter(sorted(named, reverse=True))]
)
def test_cohorts_are_drawn_from_those_that_are_named(kind):
    planner = RoundPlanner(20, 3, fedq.Available(lambda round: kind(list(halves(round))), 5))
    for round in range(6):
        assert set(planner.cohort(round)) <= set(halves(round))
    plain = RoundPlanner(20, 3, fedq.Available(lambda round: range(20), 5))
    assert [plain.cohort(r) for r in range(9)] == [
        RoundPlanner(20, 3, fedq.FixedSize(5)).cohort(r) for r in range(9)
    ]


def test_of_those_everybody_is_drawn_as_often_as_the_others():
    """500 rounds of 5 of 10, both halves in turns: counts are binomial, std 11.2; a false alarm beyond 60 has
    chance 2e-6 for all 20 clients."""
    planner = RoundPlanner(20, 7, fedq.Available(halves, 5))
    counts = np.bincount([client for round in range(1000) for client in planner.cohort(round)], minlength=20)
    assert abs(counts - 250).max() < 60


def test_a_run_is_charged_and_reported_for_those_who_were_there():
    trainer = fit(federated := made(), rounds=6)
    assert (
        federated.ledger.charges.tolist()
        == np.bincount(
            [client for round in range(6) for client in federated.planner.cohort(round)], minlength=20
        ).tolist()
    )
    report = make_report(federated, trainer, 1e-5)
    [note] = [note for note in report.notes if "a user-defined rule names" in note]
    assert "A client is named in 3 rounds at most. The rule is assumed to follow from public facts" in note


def test_a_run_to_come_counts_what_the_rule_says():
    """Nothing is averaged over the draw, and a target pays for 99% of what each may be drawn."""

    def run(rule, rounds=30):
        return planned_run(made(rule), COINS, 650, rounds, 0)

    for rule, most in ((halves, 15), (lambda round: range(5), 30), (lambda round: range(20), 30)):
        assert (run(rule).horizon, run(rule).participation) == (most, 1.0)
    assert planned_charges(run(lambda round: range(5)), False) == 30
    everybody = planned_charges(run(None), False)
    assert planned_charges(run(lambda round: range(20)), False) == everybody
    assert planned_charges(run(halves), False) < 15
    once = run(lambda round: range(5 * (round % 4), 5 * (round % 4) + 5), rounds=4)
    assert planned_charges(once, False) == 1


def test_a_target_is_met_with_a_rule():
    target = fedq.PrivacyTarget(4.0, 1e-5, Adversary.SERVER)
    gaussian = fedq.GaussianNoise(clip_norm=1.0, noise_multiplier=1.0)
    levels = {}
    for name, rule in (("few", lambda round: range(5)), ("all", None), ("halves", halves)):
        fit(federated := made(rule, gaussian, privacy=target), rounds=10)
        levels[name] = federated.mechanism.noise_multiplier
        assert make_report(federated, federated.fit._trainer, 1e-5).rows
    assert levels["halves"] <= levels["all"] < levels["few"]


@pytest.mark.parametrize(
    ("rule", "error", "words"),
    [
        (lambda round: range(4), ValueError, "must name at least 5 of the clients 0 to 19"),
        (lambda round: range(16, 21), ValueError, "Use a smaller cohort"),
        (lambda round: range(-1, 5), ValueError, "Use a smaller cohort"),
        (lambda round: [0, 0, 1, 2, 3, 4], ValueError, "each once, got 6 for round 0"),
        (lambda round: range(5 + next(CALLS)), ValueError, "in two calls"),
        (lambda round: None, TypeError, "must return integers in round"),
        (lambda round: [0.5, 1, 2, 3, 4], TypeError, "integer"),
        (lambda round: range(5 if round < 3 else 4), ValueError, "got 4 for round 3"),
    ],
)
def test_a_rule_that_names_no_cohort_is_refused_before_anybody_is_charged(rule, error, words):
    ledger = Ledger(20, repr(COINS))
    with pytest.raises(error, match=words):
        fit(made(rule, ledger=ledger))
    assert ledger.rounds == 0


def test_colluders_count_as_many_as_there_are_or_it_is_refused():
    coins = fedq.RotatedCoins(clip_norm=1.0, epsilon_per_bit=1.0)
    few = {"max_colluding_fraction": 0.1, "max_dropped_fraction": 0.0}
    with pytest.raises(ValueError, match="may all collude"):
        made(mechanism=coins, secure_aggregation=fedq.SecAgg(**few))
    made(mechanism=coins, secure_aggregation=fedq.SecAgg())
    federated = made(mechanism=coins, secure_aggregation=fedq.SecAgg(**few, active=True))
    run = planned_run(federated, coins, 650, 4, 0)
    assert (
        not run.colluders.drawn and run.colluders.max_in_cohort(1e-12) == run.colluders.num_in_federation == 2
    )


def checkpoint(rule):
    """Go on with another rule of the same name after three rounds."""
    with TemporaryDirectory() as folder:
        fit(made(seed=1), pl.callbacks.ModelCheckpoint(folder, save_last=True), rounds=3)
        rule.__qualname__ = halves.__qualname__
        fit(made(rule, seed=1), ckpt_path=f"{folder}/last.ckpt")
