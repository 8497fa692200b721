import re
from dataclasses import fields
from inspect import signature
from typing import Annotated, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fedq._lightning import pl
from lightning_fedq.callbacks import Federated
from lightning_fedq.data.batches import LocalWork, pass_sizes
from lightning_fedq.mechanisms import LDPQ, FedAvg
from lightning_fedq.training.checks import check_limit, least_fraction
from lightning_fedq.training.settings import Clients, Local, Protection, Server
from tests.digits_run import Classifier, Digits, make_trainer


def federated(**settings):
    return Federated(
        **{"mechanism": FedAvg(), "num_clients": 4, "seed": 1, "clients_per_step": 1, **settings}
    )


class Two(Classifier):
    def configure_optimizers(self):
        return [torch.optim.SGD([p], lr=0.1) for p in self.parameters()]


def test_several_optimisers_need_manual_optimisation():
    """Lightning's own rule, in Lightning's own words."""
    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
        make_trainer(federated()).fit(Two(), datamodule=Digits(80))


def test_a_limit_that_leaves_a_client_without_a_batch():
    """Lightning's own rule for a loader, for every client, and the cure that is named is one."""
    held = [torch.arange(size) for size in (30, 9, 4, 31)]
    work = LocalWork(held, 10, False, True, 1, None, 0.4)
    message = (
        "limit_train_batches = 0.4 leaves clients 1, 2 without a batch: their data have as few as "
        "1. Use at least 1.0, an int >= 1, or fewer clients"
    )
    with pytest.raises(ValueError, match=message):
        check_limit(work)
    with pytest.raises(ValueError, match=r"= 0 leaves clients 0, 1, 2, .*, 9 and 1 more without a batch"):
        check_limit(LocalWork([torch.arange(40)] * 11, 10, False, True, 1, None, 0))
    check_limit(LocalWork(held, 10, False, True, 1, None, 1))
    check_limit(LocalWork(held, 10, False, True, 1, None, 1.0))
    for batches in range(1, 1001):
        assert len(pass_sizes(batches, 1, False, least_fraction(batches))) >= 1, batches
        assert least_fraction(batches) <= 1.0


def test_a_refused_tuner_leaves_a_trainer_that_trains():
    trainer, data, module = make_trainer(federated(), max_epochs=1), Digits(80), Classifier()
    module.lr = module.batch_size = 10
    tuner = pl.tuner.Tuner(trainer)
    with pytest.raises(ValueError, match=r"LearningRateFinder would train on the raw .* set the rate found"):
        tuner.lr_find(module, datamodule=data)
    with pytest.raises(ValueError, match=r"BatchSizeFinder would train .* give the loader the batch size"):
        tuner.scale_batch_size(module, datamodule=data)
    trainer.fit(module, datamodule=data)
    assert trainer.callback_metrics["fed/round"] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mechanism": LDPQ}, "such as LDPQ.epsilon_per_coordinate=1.0., got the class LDPQ itself"),
        ({"mechanism": "LDPQ"}, "got 'LDPQ'"),
        ({"num_clients": 20.0}, "num_clients must be an integer, got 20.0"),
        ({"num_clients": None}, "num_clients must be an integer, got None"),
        ({"clients_per_step": "all"}, "clients_per_step must be an integer or 'auto', got 'all'"),
        ({"diagnostics": "yes"}, "diagnostics must be True or False, got 'yes'"),
        ({"seed": "0"}, "seed must be an integer, or None for a private run, got '0'"),
        ({"partition": "dirichlet"}, r"Dirichlet\(0.5\), got 'dirichlet'"),
    ],
)
def test_settings_of_another_kind_are_refused_at_once(settings, message):
    with pytest.raises(TypeError, match=message):
        Federated(**{"mechanism": LDPQ(1.0), "num_clients": 4, **settings})


KINDS = [
    (field.name, get_args(get_type_hints(kind, include_extras=True)[field.name])[1])
    for kind in (Protection, Clients, Local, Server)
    for field in fields(kind)
    if get_origin(get_type_hints(kind, include_extras=True)[field.name]) is Annotated
]


@pytest.mark.parametrize(("name", "words"), KINDS, ids=[name for name, _ in KINDS])
def test_every_kind_is_asked_for_in_its_own_words(name, words):
    with pytest.raises(TypeError, match=re.escape(f"{name} must be {words}, got ")):
        Federated(**{"mechanism": LDPQ(1.0), "num_clients": 4, name: object()})


def test_every_argument_has_one_place_and_a_kind():
    """Numpy's integers are integers."""
    arguments = set(signature(Federated.__init__).parameters) - {"self"}
    places = [one.name for kind in (Protection, Clients, Local, Server) for one in fields(kind)]
    assert sorted(places) == sorted(arguments)
    words = {"labels", "buffers", "personal_parameters", "client_metrics", "extra_buffers"}
    words |= {"constraints", "sends", "weighting", "diagnostics"}  # words, and what has a check of its own
    assert {name for name, _ in KINDS} == set(places) - words
    Federated(LDPQ(1.0), np.int64(4), dropout_probability=np.float64(0.1), seed=np.int32(1))


class Loose(Classifier):
    """A scale in a plain list, which no module knows, or the module's own."""

    def __init__(self, owned: str) -> None:
        super().__init__()
        scales = [nn.Parameter(torch.ones(10))]
        self.scales = nn.ParameterList(scales) if owned == "attribute" else scales
        if owned == "registered":
            self.register_parameter("scale", scales[0])

    def own(self):
        return self.scale if hasattr(self, "scale") else self.scales[0]

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.own() * self.backbone(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([*self.backbone.parameters(), self.own()], lr=0.1)


@pytest.mark.parametrize("owned", ["attribute", "registered"])
def test_parameters_that_the_module_does_not_own_are_refused_with_a_cure_that_helps(owned):
    fed = Federated(FedAvg(), 3, seed=0)
    with pytest.raises(ValueError, match=r"1 parameters in the optimiser are not .* \(shapes \(10,"):
        make_trainer(fed).fit(Loose(""), datamodule=Digits(60))
    assert fed.ledger.max_charges == 0
    module = Loose(owned)
    make_trainer(Federated(FedAvg(), 3, seed=0)).fit(module, datamodule=Digits(60))
    assert not torch.equal(module.own().detach(), torch.ones(10))
