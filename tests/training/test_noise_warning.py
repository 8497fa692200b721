"""A run whose noise swamps its updates is warned about before its first round, with what would do."""

import re
import warnings

import pytest

from lightning_fedq.callbacks import Federated
from lightning_fedq.mechanisms import LDPQ, FedAvg, RotatedCoins
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.records import NoiseWarning
from tests.digits_run import Classifier, Digits, make_trainer

TARGET = PrivacyTarget(8.0, 1e-5, "secagg_server")


class Stops(Classifier):
    """Whoever warns has warned before anybody trains."""

    def training_step(self, batch, batch_idx):
        raise KeyError("the first step")


def warned(mechanism, clients, target, **settings):
    federated = Federated(mechanism, clients, privacy=target, check_isolation=False, **settings)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with pytest.raises(KeyError, match="the first step"):
            make_trainer(federated, max_epochs=5).fit(Stops(), datamodule=Digits(1400, 4))
    return [str(one.message) for one in found if one.category is NoiseWarning]


def test_a_run_that_can_t_learn_says_how_many_clients_it_takes():
    [said] = warned(RotatedCoins(clip_norm=1.0), 20, TARGET, secure_aggregation=SecAgg())
    (wanted,) = re.findall(r"about ([\d,]+) clients a round", said)
    assert "epsilon 8" in said and 100 < int(wanted.replace(",", "")) < 2000


@pytest.mark.slow
def test_the_clients_that_it_names_are_not_warned_about():
    """The cure that is named, tried."""
    [said] = warned(RotatedCoins(clip_norm=1.0), 20, TARGET, secure_aggregation=SecAgg())
    wanted = int(re.findall(r"about ([\d,]+) clients", said)[0].replace(",", ""))
    assert warned(RotatedCoins(clip_norm=1.0), min(wanted, 700), TARGET, secure_aggregation=SecAgg()) == []


def test_single_messages():
    [said] = warned(LDPQ(1.0), 20, PrivacyTarget(4.0, 1e-5, "server"))
    assert "against the server that sees every message" in said


def after_a_round(mechanism, clients, **settings):
    federated = Federated(mechanism, clients, check_isolation=False, **settings)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make_trainer(federated, max_epochs=2).fit(Classifier(), datamodule=Digits(400, 4))
    return [str(one.message) for one in found if one.category is NoiseWarning]


def test_without_a_target_the_first_round_says_so():
    """One bit a coordinate of an update of a thousandth of its range, and two clients."""
    [said] = after_a_round(LDPQ(0.05), 4)
    assert "in round 1 the squared error" in said and "over 2 rounds" in said
    assert after_a_round(FedAvg(), 4) == []
    assert after_a_round(LDPQ(8.0), 100) == []
    assert after_a_round(LDPQ(0.05), 4, diagnostics=False) == []
