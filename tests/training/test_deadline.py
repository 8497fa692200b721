"""Rounds with a time limit: who is late is dropped, counted and charged, and no claim counts on it."""

import pytest
from scipy import stats

import lightning_fedq as fedq
from lightning_fedq.flower.federated_server import FederatedServer
from lightning_fedq.flower.settings import time_limit, with_real_clients
from lightning_fedq.rounds import RoundPlanner
from lightning_fedq.training.accounts import make_report
from tests.digits_run import Classifier, Digits, fitted

SLOW = fedq.Deadline(30.0, durations=[10.0, 10.0, 90.0, 10.0, 10.0, 10.0])


def run(federated, rounds=2):
    return fitted(Classifier(), federated, data=Digits(120), max_epochs=rounds)


def test_who_is_late_is_dropped_counted_and_charged():
    federated = fedq.Federated(fedq.LDPQ(1.0), 6, seed=1, deadline=SLOW)
    trainer = run(federated)
    assert [record.num_dropped for record in federated.records] == [1, 1]
    assert [record.num_received for record in federated.records] == [5, 5]
    assert federated.ledger.charges.tolist() == [2] * 6  # who was asked may have sent
    assert trainer.callback_metrics["fed/num_dropped"] == 1


def test_a_round_in_which_all_are_late_leaves_the_model():
    federated = fedq.Federated(fedq.FedAvg(), 6, seed=1, deadline=fedq.Deadline(1.0, 5.0))
    module = Classifier()
    before = [parameter.clone() for parameter in module.parameters()]
    fitted(module, federated, data=Digits(120), max_epochs=1)
    assert federated.records[0].num_received == 0 and federated.records[0].num_dropped == 6
    assert all((a == b).all() for a, b in zip(before, module.parameters(), strict=True))


def test_a_client_is_late_as_often_as_its_durations_say():
    deadline = fedq.Deadline(30.0, durations=[20.0, 40.0], spread=0.5)
    planner = RoundPlanner(2, 3, deadline=deadline)
    late = [planner.plan(round, fedq.FedAvg()).dropped for round in range(2000)]
    for client in (0, 1):
        found = sum(client in dropped for dropped in late)
        chance = deadline.chance(client)
        assert stats.binomtest(found, 2000, chance).pvalue > 1e-4
    assert deadline.chance(0) == pytest.approx(stats.norm.sf(0.8109302), abs=1e-6)  # ln(30 / 20) / 0.5


@pytest.mark.parametrize("masks", [None, fedq.SecAgg()])
def test_claims_are_those_of_clients_that_may_be_silent(masks):
    """Not those of a chance to drop out: who is late is not chance."""

    def epsilons(federated):
        report = make_report(federated, run(federated, 1), 1e-3)
        return {row.adversary: row.epsilon_any_two for row in report.rows}

    found = epsilons(fedq.Federated(fedq.LDPQ(1.0), 6, deadline=SLOW, secure_aggregation=masks))
    known = fedq.Federated(fedq.LDPQ(1.0), 6, secure_aggregation=masks)
    all_answer = epsilons(known)
    assert found["OUTSIDER"] > all_answer["OUTSIDER"]
    real = fedq.Federated(fedq.LDPQ(1.0), 6, secure_aggregation=masks)
    real.planner = with_real_clients(real).planner
    assert found == pytest.approx(epsilons(real), rel=1e-9)


def test_a_target_is_met_at_the_fewest_answers():
    target = fedq.PrivacyTarget(8.0, 1e-3, "secagg_server")
    settings = {"privacy": target, "secure_aggregation": fedq.SecAgg()}
    late = fedq.Federated(fedq.LDPQ(1.0), 6, deadline=SLOW, **settings)
    every = fedq.Federated(fedq.LDPQ(1.0), 6, **settings)
    found = late.calibrated(50, 3, 0)
    assert found == with_real_clients(every).calibrated(50, 3, 0) != every.calibrated(50, 3, 0)


def test_between_real_clients_it_is_the_time_to_answer():
    federated = fedq.Federated(fedq.LDPQ(1.0), 6, deadline=SLOW)
    assert time_limit(federated, None) == time_limit(federated, 30.0) == 30.0
    assert time_limit(fedq.Federated(fedq.LDPQ(1.0), 6), None) == 3600.0
    server = FederatedServer(federated, None, None)
    assert not server.planner.plan(0, fedq.LDPQ(1.0)).dropped


def test_secret_cohorts_need_an_answer_from_every_client():
    cohort = fedq.FixedSize(3, secret=True)
    with pytest.raises(ValueError, match="S3, an answer from every"):
        fedq.Federated(fedq.LDPQ(1.0), 6, deadline=SLOW, cohort=cohort, diagnostics=False)


@pytest.mark.parametrize(
    "name, value", [("seconds", 0.0), ("spread", -1.0), ("durations", []), ("durations", [0.0])]
)
def test_numbers_out_of_range(name, value):
    with pytest.raises(ValueError, match=rf"Deadline\({name}=...\) must be"):
        fedq.Deadline(**{"seconds": 1.0, "durations": 1.0, name: value})
    with pytest.raises(TypeError, match="one number, or one per client"):
        fedq.Deadline(1.0, durations=["1"])
