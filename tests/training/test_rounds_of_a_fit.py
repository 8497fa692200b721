"""The number of rounds of a fit: one answer for targets, charges, evaluation, figures and reports."""

import pytest
import torch

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.clients.clock import count_rounds, round_steps
from lightning_fedq.training.accounts import stopped
from tests.digits_run import Classifier, Digits, ManualSteps, make_trainer

LIMITS = [
    ({"max_epochs": 1000, "max_steps": 20}, 3),  # rounds of 8 steps
    ({"max_epochs": 2, "max_steps": 20}, 2),
    ({"max_epochs": -1, "max_steps": 8}, 1),
    ({"max_steps": 9, "max_epochs": None}, 2),
    ({"max_epochs": 1000, "max_steps": 20, "accumulate_grad_batches": 2}, 5),
    ({"max_epochs": 1000, "max_steps": 20, "limit_train_batches": 4}, 5),
    ({"max_epochs": 4, "max_time": "00:01:00:00"}, 4),
]


def target():
    return fedq.PrivacyTarget(50.0, delta=1e-5, adversary="server")


def run(limits, *callbacks, module=None, **settings):
    """Five clients of 80 samples in batches of 10."""
    given = {"clients_per_step": 1, "check_isolation": False, **settings}
    federated = fedq.Federated(fedq.LDPQ(1.0), 5, **given)
    trainer = make_trainer(federated, *callbacks, **limits)
    trainer.fit(module or Classifier(), datamodule=Digits(400))
    return federated, trainer


@pytest.mark.parametrize(("limits", "rounds"), LIMITS)
def test_a_target_is_calibrated_for_the_rounds_that_run(limits, rounds):
    federated, trainer = run(limits, privacy=target())
    assert federated.calibration.rounds == len(federated.records) == rounds
    assert federated.count_rounds(trainer) == rounds and not stopped(federated, trainer)
    assert int(federated.ledger.max_charges) == rounds
    known, _ = run({"max_epochs": rounds}, privacy=target())
    assert repr(federated.mechanism) == repr(known.mechanism)


def test_a_schedule_of_the_accumulation_counts():
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})
    federated, _ = run({"max_epochs": 1000, "max_steps": 11}, scheduler, privacy=target())
    assert federated.calibration.rounds == len(federated.records) == 3  # 8, 2 and 2 steps
    trainer = make_trainer(scheduler)
    assert round_steps(trainer, 8) == [8, 2] and count_rounds(None, 11, [8, 2]) == 3
    assert count_rounds(-1, -1, [8]) is None and count_rounds(5, -1, []) == 5


class Manual(ManualSteps, Classifier):
    pass


def test_steps_by_hand_are_not_known():
    with pytest.raises(ValueError, match="needs a number of rounds"):
        run({"max_epochs": -1, "max_steps": 8}, privacy=target(), module=Manual())


def test_the_last_round_is_evaluated_and_priced():
    evaluated = fedq.ClientEvaluation(0.2, every_n_rounds=10)
    federated, trainer = run({"max_epochs": 1000, "max_steps": 20}, seed=1, evaluate_clients=evaluated)
    assert len(federated.records) == 3  # of seven steps, without the held-out samples
    assert [one.round for one in federated.client_evaluations] == [2]
    assert torch.isfinite(trainer.callback_metrics["fed/bits_per_parameter"])
