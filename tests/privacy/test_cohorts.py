"""The cohort that is priced is the cohort that is drawn: one law, from the planner to the report."""

import numpy as np
import pytest

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.commands.plan import sizes_for
from lightning_fedq.data.models import MLP, Classifier
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.planning import Problem, plan
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.accounts import planned_run

CLIENTS, ROUNDS = 60, 6
ADDER = fedq.BandedGaussian(1.0, 1.0, band=1)
TARGET = fedq.PrivacyTarget(8.0, 1e-5, "outsider")


def at_home(round):
    return range(20 * (round % 2), 20 * (round % 2) + 20)


LAWS = [
    fedq.Everybody(),
    fedq.FixedSize(10),
    fedq.FixedSize(10, secret=True),
    fedq.DisjointOnce(10),
    fedq.Cyclic(20),
    fedq.Poisson(10),
    fedq.Available(at_home, 10),
]


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_planner_run_and_plan_hold_one_object_and_price_what_it_draws(law):
    federated = fedq.Federated(ADDER, CLIENTS, cohort=law, diagnostics=False, privacy=TARGET)
    trainer = pl.Trainer(max_epochs=ROUNDS, callbacks=[federated], logger=False, enable_checkpointing=False)
    sizes = sizes_for(trainer, federated, Classifier(MLP(8, [4], 3)))
    problem = Problem(**sizes, target=TARGET)
    planned = problem.run(ADDER)
    coming = planned_run(federated, ADDER, sizes["params"], ROUNDS, 0)
    assert law is federated.planner.law is problem.law is planned.sampling.law is coming.sampling.law
    found = federated.calibrated(sizes["params"], ROUNDS, 0)
    option = plan(problem, {"it": ADDER})[0]
    assert option.law is law
    assert option.mechanism.noise_multiplier == pytest.approx(found.noise_multiplier, rel=2e-3)
    cohorts = [federated.planner.cohort(round) for round in range(ROUNDS)]
    assert law.own_draws or {len(cohort) for cohort in cohorts} == {law.cohort_size(CLIENTS)}
    charges = np.bincount([client for cohort in cohorts for client in cohort], minlength=CLIENTS)
    assert charges.max() <= law.lottery(ROUNDS, CLIENTS)[0]
    one, other = (Account(run, 1e-5) for run in (planned, coming))
    outsider = Adversary.OUTSIDER, 3
    assert one.epsilon(*outsider, secret=law.secret) == other.epsilon(*outsider, secret=law.secret)


@pytest.mark.parametrize("law", [law for law in LAWS if not law.secret], ids=repr)
def test_a_known_law_has_no_price_of_a_secret_draw(law):
    """`fedq plan` once priced a draw from a rule's clients as one from all: noise 1.383 for a true 4.164."""
    run = Problem(CLIENTS, 100, ROUNDS, TARGET, law=law).run(ADDER)
    with pytest.raises(ValueError, match="has no secret draw"):
        Account(run, 1e-5).epsilon(Adversary.OUTSIDER, 3, secret=True)
    if not isinstance(law, fedq.FixedSize):
        with pytest.raises(ValueError, match="secret cohorts need S1"):
            law.with_secret()


def test_a_round_that_its_law_does_not_draw_is_no_run():
    run = Problem(CLIENTS, 100, ROUNDS, TARGET, law=fedq.FixedSize(10)).run(ADDER)
    other = Problem(CLIENTS, 100, ROUNDS, TARGET, law=fedq.FixedSize(20)).run(ADDER)
    with pytest.raises(ValueError, match="a round of 20 clients does not fit FixedSize"):
        type(run)(**{**vars(run), "context": other.context})


def test_colluders_among_those_whom_a_rule_names_are_refused_in_a_plan_too():
    target = fedq.PrivacyTarget(8.0, 1e-5, "secagg_server")
    masks, law = SecAgg(max_colluding_fraction=0.1, max_dropped_fraction=0.0), fedq.Available(at_home, 10)
    problem = Problem(CLIENTS, 100, ROUNDS, target, masks, law=law)
    [option] = plan(problem, {"it": fedq.RotatedCoins(1.0, 1.0)})
    assert option.mechanism is None and "may all collude" in option.reason
