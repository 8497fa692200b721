"""Who trains, in every hook of a client: `trainer.client`, `trainer.clients`, and the round."""

import pytest

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from tests.digits_run import Classifier, Digits, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Notes(pl.Callback):
    """Writes down who trains: one object for all clients."""

    is_shared_by_clients = True

    def __init__(self) -> None:
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append((trainer.current_epoch, trainer.client))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(trainer.clients)


class Asks(Classifier):
    """Asks in the step, and in validation."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.trainer.client)

    def validation_step(self, batch, batch_idx):
        self.log("client", float(getattr(self.trainer, "client", -1)))


class AsksLate(Classifier):
    """Asks in the third round, which nobody has tried."""

    def training_step(self, batch, batch_idx):
        weight = 1 + self.trainer.client if self.trainer.current_epoch == 2 else 1
        return super().training_step(batch, batch_idx) * weight


def fit(module, *callbacks, rounds=3, **settings):
    fed = fedq.Federated(fedq.FedAvg(), 8, **{"seed": 1, **settings})
    trainer = make_trainer(fed, *callbacks, max_epochs=rounds)
    trainer.fit(module, datamodule=Digits(80, batch_size=5))
    return fed, trainer


def test_a_callback_that_crosses_clients_hears_who_trains():
    fed, trainer = fit(Classifier(), notes := Notes(), cohort=3, clients_per_step=1)
    expected = []
    for round in range(3):
        for client in fed.planner.cohort(round):
            expected += [(round, client), (client,)] * 2
    assert notes.seen == expected
    assert not hasattr(trainer, "client")  # the user's own


def test_code_that_asks_trains_one_client_at_a_time():
    with pytest.warns(UserWarning, match="trainer.client needs a single client"):
        fed, trainer = fit(Asks())
    assert fed.fit.clients_per_step == 1
    assert trainer.callback_metrics["client"] == -1


def test_a_stack_has_all_its_numbers():
    seen = []

    class Looks(Classifier):
        def training_step(self, batch, batch_idx):
            seen.append(self.trainer.clients)
            return super().training_step(batch, batch_idx)

    fed, _ = fit(Looks(), clients_per_step=4, rounds=1)
    cohort = tuple(fed.planner.cohort(0))
    assert {one for one in seen if len(one) > 1} == {cohort[:4], cohort[4:]}


def test_code_that_asks_late_hears_in_words():
    with pytest.raises(RuntimeError, match=r"Federated\(clients_per_step=1\) trains one at a time"):
        fit(AsksLate(), clients_per_step=4)
    fit(AsksLate(), clients_per_step=1)


def test_held_out_samples_are_measured_by_number():
    measured = fedq.ClientEvaluation(0.3)
    fed, _ = fit(Asks(), evaluate_clients=measured, client_metrics="shared", rounds=1)
    found = fed.client_evaluations[0].values["global"]["client"]
    assert [float(one) for one in found] == list(range(8))
