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
from lightning_fedq.data.partition import Dirichlet
from lightning_fedq.mechanisms import LDPQ, FedAvg
from lightning_fedq.training.checks import check_limit, check_optimizers, check_setup, least_fraction
from lightning_fedq.training.settings import Clients, Local, Protection, Server
from tests.digits_run import Classifier, Digits, make_trainer


def federated(**settings):
    return Federated(
        **{"mechanism": FedAvg(), "num_clients": 4, "seed": 1, "clients_per_step": 1, **settings}
    )


def refused(message, module=None, data=None, fed=None, **trainer):
    module, data = module or Classifier(), data or Digits(80)
    runner = make_trainer(fed or federated(), **trainer)
    with pytest.raises((ValueError, TypeError), match=message):
        runner.fit(module, datamodule=data)
    assert "train_dataloader" not in vars(data)
    assert not {"training_step", "backward"} & set(vars(runner.strategy))


class Two(Classifier):
    def configure_optimizers(self):
        return [torch.optim.SGD([p], lr=0.1) for p in self.parameters()]


def test_several_devices():
    trainer = make_trainer(strategy="ddp", devices=2)
    with pytest.raises(
        ValueError, match="all clients on one device, got DDPStrategy on 2 devices; use Trainer"
    ):
        check_setup(trainer, Classifier())


def test_several_optimisers_need_manual_optimisation():
    """Lightning's own rule, in Lightning's own words."""
    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
        make_trainer(federated()).fit(Two(), datamodule=Digits(80))


def test_no_optimiser():
    trainer = make_trainer()
    trainer.strategy.optimizers = []
    with pytest.raises(ValueError, match="needs an optimiser, configure_optimizers returned none"):
        check_optimizers(trainer)


def test_a_limit_that_leaves_a_client_without_a_batch():
    """Lightning's own rule for a loader, for every client, and the cure that is named is one."""
    held = [torch.arange(size) for size in (30, 9, 4, 31)]
    work = LocalWork(held, 10, False, True, 1, None, 0.4)
    message = (
        "limit_train_batches = 0.4 leaves clients 1, 2 without a batch, as a pass over their data may be "
        "of 1 only; use at least 1.0, an int >= 1, or fewer clients"
    )
    with pytest.raises(ValueError, match=message):
        check_limit(work)
    with pytest.raises(ValueError, match=r"= 0 leaves clients 0, 1, 2, .*, 9, \.\.\. without a batch"):
        check_limit(LocalWork([torch.arange(40)] * 11, 10, False, True, 1, None, 0))
    check_limit(LocalWork(held, 10, False, True, 1, None, 1))
    check_limit(LocalWork(held, 10, False, True, 1, None, 1.0))
    for batches in range(1, 1001):
        assert len(pass_sizes(batches, 1, False, least_fraction(batches))) >= 1, batches
        assert least_fraction(batches) <= 1.0


def test_data_that_cannot_be_dealt_out():
    refused("100 clients can't share 80 samples; use num_clients <= 80", fed=federated(num_clients=100))

    class Nothing(Digits):
        def train_dataloader(self):
            return [1, 2]

    refused("must return torch DataLoaders to federate, got list; return one, or a dict", data=Nothing(80))


def test_a_loader_that_slips_in_would_train_centrally():
    class Swaps(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            trainer.datamodule.train_dataloader = Digits(80).train_dataloader

    message = r"not the clients' own, .*datamodule=FederatedDataModule.from_loader\(loader, val_loader\)"
    with pytest.raises(ValueError, match=message):
        make_trainer(federated(), Swaps()).fit(Classifier(), datamodule=Digits(80))


@pytest.mark.parametrize(
    ("finder", "cure"),
    [
        (pl.callbacks.LearningRateFinder, "set the rate found there"),
        (pl.callbacks.BatchSizeFinder, "give the loader the batch size found there"),
    ],
)
def test_searches_that_would_train_on_everybody_s_data(finder, cure):
    data = Digits(80)
    data.batch_size = 10
    trainer = make_trainer(federated(), finder())
    with pytest.raises(ValueError, match=f"{finder.__name__} would train on the raw data of all .* {cure}"):
        trainer.fit(Classifier(), datamodule=data)


def test_a_refused_tuner_leaves_a_trainer_that_trains():
    trainer, data, module = make_trainer(federated(), max_epochs=1), Digits(80), Classifier()
    module.lr = module.batch_size = 10
    tuner = pl.tuner.Tuner(trainer)
    with pytest.raises(ValueError, match="LearningRateFinder would train on the raw data"):
        tuner.lr_find(module, datamodule=data)
    with pytest.raises(ValueError, match="BatchSizeFinder would train on the raw data"):
        tuner.scale_batch_size(module, datamodule=data)
    trainer.fit(module, datamodule=data)
    assert trainer.callback_metrics["fed/round"] == 1


def test_two_federations_in_one_trainer():
    class Other(Federated):
        state_key = "other"

    with pytest.raises(ValueError, match="two Federated callbacks; leave one of them out"):
        make_trainer(federated(), Other(FedAvg(), 4)).fit(Classifier(), datamodule=Digits(80))


def test_a_stack_needs_an_elementwise_optimiser():
    def lbfgs(params):
        return torch.optim.LBFGS(params, lr=0.1)

    refused(
        "LBFGS is not elementwise, so clients can't train side by side with it; use clients_per_step=1",
        Classifier(optimizer=lbfgs),
        fed=federated(clients_per_step=2),
    )
    fed = federated(clients_per_step="auto")
    with pytest.warns(UserWarning, match="one client at a time, .* because LBFGS is not elementwise"):
        make_trainer(fed, max_epochs=1).fit(Classifier(optimizer=lbfgs), datamodule=Digits(80))
    assert fed.clients_per_step_chosen == 1


class Lazy(Classifier):
    """Its layer learns how wide it is from the first batch, or from a batch in `setup`."""

    def __init__(self, warm: bool) -> None:
        super().__init__(torch.nn.LazyLinear(10))
        self.warm = warm

    def setup(self, stage):
        if self.warm:
            self.backbone(torch.zeros(2, 64))


class Complex(Classifier):
    """Has a complex parameter beside the real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = torch.nn.Parameter(torch.ones(10, dtype=torch.complex64))


def test_complex_parameters_are_refused_with_the_cure():
    refused(r"phase are complex, .* torch\.view_as_real", Complex())


def test_nothing_to_train_is_said():
    refused(r"has nothing to train: no parameter in an optimiser", Classifier().requires_grad_(False))
    module = Classifier(optimizer=lambda params: None)
    with pytest.warns(UserWarning, match="no optimizer"):
        refused("has nothing to train", module)


@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`")
def test_no_data_at_all_is_said():
    with pytest.raises(ValueError, match=r"there is no training data, .* datamodule="):
        make_trainer(federated()).fit(Classifier())


def test_layers_without_a_shape_are_refused_with_the_cure():
    refused(r"backbone\.weight, backbone\.bias have no shape .* run a batch through .* setup", Lazy(False))
    make_trainer(federated(), max_epochs=1).fit(Lazy(True), datamodule=Digits(80))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"mechanism": LDPQ},
            "mechanism must be a mechanism, such as LDPQ.epsilon=1.0.; got the class LDPQ itself",
        ),
        ({"mechanism": "LDPQ"}, "got 'LDPQ'"),
        ({"num_clients": 20.0}, "num_clients must be an integer; got 20.0"),
        ({"num_clients": None}, "num_clients must be an integer; got None"),
        ({"secure_aggregation": True}, r"secure_aggregation must be SecAgg\(\), with its settings; got True"),
        ({"local_epochs": None}, "local_epochs must be an integer; got None"),
        ({"partition": None}, "got None"),
        ({"clients_per_step": None}, "clients_per_step must be an integer or 'auto'; got None"),
        ({"clients_per_step": "all"}, "clients_per_step must be an integer or 'auto'; got 'all'"),
        ({"diagnostics": "yes"}, "diagnostics must be True or False, got 'yes'"),
        ({"seed": "0"}, "seed must be an integer, or None for a private run; got '0'"),
        ({"privacy": 8.0}, "privacy must be PrivacyTarget"),
        ({"ranges": 0.1}, r"ranges must be a rule, such as FixedRange\(0.1\)"),
        ({"partition": "dirichlet"}, r"Dirichlet\(0.5\); got 'dirichlet'"),
        ({"partition": Dirichlet}, "got the class Dirichlet itself"),
        ({"aggregator": "median"}, r"RobustAggregation\('median'\); got 'median'"),
        ({"server_optimizer": "adam"}, "server_optimizer must be a function of the parameters"),
        ({"local_epochs": 1.5}, "local_epochs must be an integer; got 1.5"),
        ({"local_steps": 2.5}, "local_steps must be an integer"),
        ({"ledger": 3}, "ledger must be the ledger of another Federated"),
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
    with pytest.raises(TypeError, match=re.escape(f"{name} must be {words}; got ")):
        Federated(**{"mechanism": LDPQ(1.0), "num_clients": 4, name: object()})


def test_every_argument_has_one_place_and_a_kind():
    """Numpy's integers are integers."""
    arguments = set(signature(Federated.__init__).parameters) - {"self", "local"} | {"patterns"}
    places = [one.name for kind in (Protection, Clients, Local, Server) for one in fields(kind)]
    assert sorted(places) == sorted(arguments)
    words = {"participation", "cohorts", "labels", "buffers", "patterns", "client_metrics", "shared"}
    words |= {"constraints", "target", "weighting", "diagnostics"}  # words, and what has a check of its own
    assert {name for name, _ in KINDS} == set(places) - words
    Federated(LDPQ(1.0), np.int64(4), dropout_probability=np.float64(0.1), seed=np.int32(1))


def test_parameters_that_the_module_does_not_own_are_refused_with_a_cure_that_helps():
    class Loose(Classifier):
        """A scale in a plain list, which no module knows."""

        def __init__(self, owned: bool) -> None:
            super().__init__()
            scale = nn.Parameter(torch.ones(10))
            self.scales = nn.ParameterList([scale]) if owned else [scale]

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.scales[0] * self.backbone(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD([*self.backbone.parameters(), *self.scales], lr=0.1)

    fed = Federated(FedAvg(), 3, seed=0)
    with pytest.raises(
        ValueError, match=r"1 parameters in the optimiser are not the module's \(shapes \(10,"
    ):
        make_trainer(fed).fit(Loose(owned=False), datamodule=Digits(60))
    assert fed.ledger.most_charged == 0
    module = Loose(owned=True)
    make_trainer(Federated(FedAvg(), 3, seed=0)).fit(module, datamodule=Digits(60))
    assert not torch.equal(module.scales[0].detach(), torch.ones(10))
