"""Before round 1 a run says how few steps it takes beside plain training."""

import pytest

import lightning_fedq as fedq
from tests.digits_run import Classifier, Digits, make_trainer


def said(caplog, *, clients, batch_size, epochs=3, local_epochs=1, samples=400, **settings):
    federated = fedq.Federated(fedq.FedAvg(), clients, local_epochs=local_epochs)
    trainer = make_trainer(federated, max_epochs=epochs, **settings)
    with caplog.at_level("INFO"):
        trainer.fit(Classifier(), datamodule=Digits(samples, batch_size=batch_size))
    return " ".join(caplog.messages)


def test_few_steps_are_named(caplog):
    """200 clients with two samples each: 3 steps, where plain training of 3 epochs takes 39."""
    words = said(caplog, clients=200, batch_size=32)
    assert "A client takes at most 1 steps in a round, and the run 3 in all" in words
    assert "Plain training of 3 epochs takes 39." in words


@pytest.mark.parametrize(
    "settings", [{"clients": 4, "batch_size": 10}, {"clients": 200, "batch_size": 32, "local_epochs": 5}]
)
def test_enough_steps_are_not(settings, caplog):
    assert "A client takes at most" not in said(caplog, **settings)


def test_a_round_that_is_shorter_than_its_accumulation(caplog):
    words = said(caplog, clients=200, batch_size=32, accumulate_grad_batches=4)
    assert "accumulate_grad_batches = 4 is larger than the 1 batches of a client in a round" in words
