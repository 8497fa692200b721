"""Cures that callbacks, clients and the training layer name."""

import math
from types import SimpleNamespace

import torch
from torch import nn

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.mechanisms.interface import Adversary
from tests.callbacks import test_langevin as langevin
from tests.cures.rows import Tunable, dpsgd, fed, fit, module_with, row
from tests.cures.rows_commands import fedq as fedq_command, small
from tests.cures.rows_mechanisms import leaky
from tests.digits_run import Classifier, Digits, make_trainer
from tests.leakage.test_monitor import Scores
from tests.training.test_unfreezing import TwoLayers


def lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.1)


class Lazy(Classifier):
    """Its layer learns how wide it is from the first batch, or from a batch in `setup`."""

    def __init__(self, warm: bool) -> None:
        super().__init__(nn.LazyLinear(10))
        self.warm = warm

    def setup(self, stage):
        if self.warm:
            self.backbone(torch.zeros(2, 64))


class Complex(Classifier):
    """Has a complex parameter beside the real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(10, dtype=torch.complex64))


class Real(Classifier):
    """`Complex` with the cure."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.view_as_real(torch.ones(10, dtype=torch.complex64)).clone())

    def training_step(self, batch, batch_idx):
        turned = (self.backbone(batch[0]) * torch.view_as_complex(self.phase)).abs()
        return nn.functional.cross_entropy(turned, batch[1])


def monitor(**settings):
    return fedq.LeakageMonitor(**{"attempts": 4, "num_candidates": 8, **settings})


def chain(mechanism=None, lr=langevin.STEP * langevin.CLIENTS, **settings):
    return langevin.sample(mechanism or fedq.FedAvg(), 3, 0, **settings)


def with_norm():
    return Classifier(nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10)))


def averaged(kind):
    extra = {"swa_lrs": 0.1, "swa_epoch_start": 1} if kind == "StochasticWeightAveraging" else {}
    return getattr(pl.callbacks, kind)(**extra)


def two_sums(private, **settings):
    return fit(
        fedq.Federated(private, 4, seed=None, clients_per_step=1), fedq.PrivacyBudget(50.0, 1e-5, **settings)
    )


def handed(*callbacks):
    """A fit of loaders without a data module."""
    data = Digits(80)
    made = make_trainer(*callbacks, max_epochs=1)
    made.fit(Classifier(), data.train_dataloader(), data.val_dataloader())


class Loads(Classifier):
    """A module with data of its own."""

    def train_dataloader(self):
        return Digits(80).train_dataloader()

    def val_dataloader(self):
        return Digits(80).val_dataloader()


class Swaps(pl.Callback):
    """Gives the data module another loader when the fit has begun."""

    def on_fit_start(self, trainer, pl_module):
        trainer.datamodule.train_dataloader = Digits(80).train_dataloader


def from_loader():
    return FederatedDataModule.from_loader(Digits(80).train_dataloader(), Digits(80).val_dataloader())


# ---- callbacks --------------------------------------------------------------------------------------
row(
    "needs one-bit messages, but {} sends others. Use sign_flip.",
    lambda: fit(fed(fedq.GaussianNoise(1.0, 1.0)), fedq.ByzantineClients(0.25, "ones")),
    lambda: fit(fed(fedq.GaussianNoise(1.0, 1.0)), fedq.ByzantineClients(0.25, "sign_flip")),
)
row(
    "The Trainer has two DPSGD callbacks. Leave one of them out.",
    lambda: fit(dpsgd(), SecondDPSGD(1.0, 1.0, delta=1e-4, seed=1)),
    lambda: fit(dpsgd()),
)
row(
    "DPSGD draws its own batches, so it must replace the loader, but fit(...) got one directly. Return it",
    lambda: handed(dpsgd()),
    lambda: make_trainer(dpsgd(), max_epochs=1).fit(Loads()),
    lambda: fit(dpsgd()),
)
row(
    "of a LightningDataModule. Or put DPSGD behind Federated in the callbacks.",
    lambda: handed(dpsgd(), fed()),
    lambda: handed(fed(), dpsgd()),
)
row(
    "DPSGD needs exactly one optimiser, but the module has {}. Put all parameters into one optimiser.",
    lambda: fit(dpsgd(), module=module_with(lambda params: [])),
    lambda: fit(dpsgd()),
)
row(
    "needs a federation, but the Trainer has no Federated callback. Add lightning_fedq.callbacks.Federated",
    lambda: fit(monitor(), module=Scores()),
    lambda: fit(fed(), monitor(), module=Scores()),
)
row(
    "The Trainer has {} Federated callbacks, with {}. Leave all but one out, because a run has",
    lambda: fit(fed(), fed()),
    lambda: fit(fed()),
)
row(
    "bounds gradients that {} would change. Leave one out",
    lambda: fit(fed(algorithm=fedq.FedProx(0.1)), dpsgd()),
    lambda: fit(fed(algorithm=fedq.FedProx(0.1))),
    lambda: fit(fed(), dpsgd()),
)
row(
    "needs equal numbers of steps, but clients' numbers of batches differ. Set local_steps=...",
    lambda: fit(fed(algorithm=fedq.SCAFFOLD()), data=Digits(41)),
    lambda: fit(fed(algorithm=fedq.SCAFFOLD(), local_steps=2), data=Digits(41)),
)
row(
    "send {} coordinates and {} of buffers, but {} sends only {} of {}. Use",
    lambda: fit(fed(fedq.TopK(0.1), algorithm=fedq.ErrorFeedback(0.1)), module=with_norm()),
    lambda: fit(fed(fedq.TopK(0.2368), algorithm=fedq.ErrorFeedback(0.1)), module=with_norm()),
    lambda: fit(fed(fedq.TopK(0.1), algorithm=fedq.ErrorFeedback(0.1))),
)
row("both choose the local", lambda: fit(fed(), dpsgd(), Chooses()), lambda: fit(fed(), dpsgd()))
row(
    ", so clients can't train side by side, got clients_per_step={}. Use",
    lambda: fit(fed(clients_per_step=2), dpsgd()),
    lambda: fit(fed(clients_per_step=1), dpsgd()),
    lambda: fit(fed(clients_per_step="auto"), dpsgd()),
)
row(
    "needs the parameters that were trained when the fit began. Freeze or unfreeze before the fit",
    lambda: fit(fed(), dpsgd(), module=TwoLayers(), max_epochs=2),
    lambda: fit(fed(), dpsgd(), module=TwoLayers(change_at=9), max_epochs=2),
    lambda: fit(fed(), module=TwoLayers(), max_epochs=2),
)
row(
    "keep vectors of the parameters at the start. Freeze or unfreeze before the",
    lambda: fit(fed(algorithm=fedq.SCAFFOLD(), local_steps=2), module=TwoLayers(), max_epochs=2),
    lambda: fit(fed(algorithm=fedq.SCAFFOLD(), local_steps=2), module=TwoLayers(change_at=9), max_epochs=2),
    lambda: fit(fed(algorithm=fedq.FedProx(0.1)), module=TwoLayers(), max_epochs=2),
)
row(
    "Langevin must detect clipped updates. Use Federated(diagnostics=True)",
    lambda: chain(diagnostics=False),
    lambda: chain(diagnostics=True),
)
row(
    "A variance needs 2 samples, got {}. Run more rounds.",
    lambda: fedq.Langevin(0.1).variance,
    lambda: chain().variance,
)
row(
    "The error of {} is not exactly Gaussian with a known variance. Use LayeredGaussian, AggregateGaussian",
    lambda: chain(fedq.CorBin(1.0)),
    lambda: chain(langevin.layered(0.5)),
    lambda: chain(aggregate()),
    lambda: chain(fedq.FedAvg()),
)
row(
    "Missing clients would bias the drift. Let all clients answer in every round.",
    lambda: chain(cohort=2, clients_per_step=2),
    chain,
)
row(
    "broadcast_bits would also round buffers (here {}) on the downlink. Use",
    lambda: fit(fed(broadcast_bits=8), module=with_norm()),
    lambda: fit(fed(broadcast_bits=8, buffers="frozen"), module=with_norm()),
    lambda: fit(fed(broadcast_bits=8, buffers="local"), module=with_norm()),
    lambda: fit(fed(), module=with_norm()),
)
row(
    "Langevin moves the model by the mean update itself. Use sends='updates', server_lr=1.0, no",
    lambda: chain(server_lr=0.5),
    lambda: chain(server_lr=1.0, sends="updates"),
)
row(
    "Round {} was aborted, clipped or had a NaN, so it is no Langevin step. Raise clip_norm, or lower",
    lambda: chain(langevin.layered(0.5, clip_norm=1e-3)),
    lambda: chain(langevin.layered(0.5, clip_norm=40.0)),
)
row(
    "The compressor's variance exceeds 2 step_size = {} by {}. Lower noise_multiplier.",
    lambda: chain(langevin.layered(1.2)),
    lambda: chain(langevin.layered(0.6)),
)
row(
    "LeakageBudget needs {} samples of each client, but clients {} have fewer. Use fewer",
    lambda: fit(fed(leaky(), 40), fedq.LeakageBudget(probe_size=4, attempts=20), module=Scores()),
    lambda: fit(fed(leaky(), 4), fedq.LeakageBudget(probe_size=4, attempts=20), module=Scores()),
)
row(
    "PrivacyBudget has nothing to account for. Add Federated or DPSGD to the callbacks.",
    lambda: fit(fedq.PrivacyBudget(50.0, 1e-5, "server")),
    lambda: two_sums(fedq.LDPQ(0.1), adversary="server"),
    lambda: fit(dpsgd(seed=None), fedq.PrivacyBudget(50.0, 1e-4, "outsider")),
)
row(
    "DPSGD alone protects samples against the outsider, got {}. Use Adversary.OUTSIDER.",
    lambda: fit(dpsgd(seed=None), fedq.PrivacyBudget(50.0, 1e-4, "server")),
    lambda: fit(dpsgd(seed=None), fedq.PrivacyBudget(50.0, 1e-4, Adversary.OUTSIDER)),
)
row(
    "No callback protects a {}. Leave unit out, or add DPSGD.",
    lambda: two_sums(fedq.LDPQ(0.1), adversary="server", unit="sample"),
    lambda: two_sums(fedq.LDPQ(0.1), adversary="server"),
    lambda: fit(dpsgd(seed=None), fedq.PrivacyBudget(50.0, 1e-4, "outsider", unit="sample")),
)
row(
    "The mechanism protects clients, and DPSGD protects samples. Choose the unit of the budget by",
    lambda: fit(fed(fedq.LDPQ(0.1), seed=None), dpsgd(seed=None), fedq.PrivacyBudget(50.0, 1e-4, "outsider")),
    lambda: fit(
        fed(fedq.LDPQ(0.1), seed=None),
        dpsgd(seed=None),
        fedq.PrivacyBudget(50.0, 1e-4, "outsider", unit="client"),
    ),
    lambda: fit(
        fed(fedq.LDPQ(0.1), seed=None),
        dpsgd(seed=None),
        fedq.PrivacyBudget(50.0, 1e-4, "outsider", unit="sample"),
    ),
)
row(
    "No budget can be kept against {}{}: {}. Choose an adversary that the mechanism protects against.",
    lambda: two_sums(fedq.LDPQ(0.1), adversary="secagg_server"),
    lambda: two_sums(fedq.LDPQ(0.1), adversary="server"),
)
row(
    "ReloadBest monitors {}, but validation logged {}. Set monitor to one of these.",
    lambda: fit(fed(), fedq.ReloadBest(monitor="val_loss")),
    lambda: fit(fed(), fedq.ReloadBest(monitor="val_acc")),
)
# ---- clients and federation -------------------------------------------------------------------------
row(
    "is not elementwise, so clients can't train in one step. Use clients_per_step=1",
    lambda: fit(fed(clients_per_step=2), module=module_with(lbfgs)),
    lambda: fit(fed(clients_per_step=1), module=module_with(lbfgs)),
    *(
        lambda kind=kind: fit(fed(clients_per_step=2), module=module_with(lambda p: kind(p, lr=0.01)))
        for kind in (
            torch.optim.SGD,
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.RMSprop,
            torch.optim.Adagrad,
            torch.optim.Adadelta,
        )
    ),
)
row(
    "StochasticWeightAveraging reads all clients' data at the end, without a mechanism, for the",
    lambda: fit(fed(), averaged("StochasticWeightAveraging"), module=with_norm(), max_epochs=3),
    lambda: fit(fed(), averaged("WeightAveraging"), module=with_norm(), max_epochs=3),
)
row(
    "{} asks every client at most once: {} rounds of {} clients need {} clients, got",
    lambda: fit(fed(cohort=fedq.DisjointOnce(2)), max_epochs=3),
    lambda: fit(fed(cohort=fedq.DisjointOnce(1)), max_epochs=3),
)
row(
    "limit_train_batches = {} leaves clients {} without a batch",
    lambda: fit(limit_train_batches=0.2),
    lambda: fit(limit_train_batches=1.0),
    lambda: fit(limit_train_batches=1),
    lambda: fit(fed(num_clients=1), limit_train_batches=0.2),
)
row(
    "corrects a client by its earlier rounds, but {} has none. Use",
    lambda: fed(algorithm=fedq.SCAFFOLD(), cohort=fedq.DisjointOnce(2)),
    *(
        lambda way=way: fit(fed(algorithm=fedq.SCAFFOLD(), local_steps=2, cohort=way))
        for way in (2, fedq.Cyclic(2))
    ),
    lambda: fit(fed(algorithm=fedq.FedProx(0.1), cohort=fedq.DisjointOnce(2))),
)
row(
    "needs the plain mean update. Leave out server_lr, server_optimizer, aggregator, weighting and",
    lambda: fed(algorithm=fedq.SCAFFOLD(), server_lr=0.5),
    lambda: fit(fed(algorithm=fedq.SCAFFOLD(), local_steps=2)),
    lambda: fit(fed(algorithm=fedq.FedProx(0.1), server_lr=0.5)),
)
row(
    "Federated trains all clients on one device, got {} on {} devices. Use Trainer(strategy='auto',",
    lambda: fit(strategy="ddp", devices=1),
    lambda: fit(strategy="auto", devices=1),
    lambda: fit(strategy="fedq_clients", devices=1),
)
row(
    "A val_check_interval in time would validate during a round",
    lambda: fit(val_check_interval="00:00:00:01", check_val_every_n_epoch=1),
    lambda: fit(check_val_every_n_epoch=2, max_epochs=2),
)
row(
    "val_check_interval = {} would validate during a round of {} batches a client",
    lambda: fit(val_check_interval=3, check_val_every_n_epoch=None),
    lambda: fit(check_val_every_n_epoch=2, max_epochs=2),
)
row(
    "have no shape before the first batch (a lazy layer). Run a",
    lambda: fit(module=Lazy(False)),
    lambda: fit(module=Lazy(True)),
    lambda: fit(module=Classifier(nn.Linear(64, 10))),
)
row("are complex, but an update is a vector", lambda: fit(module=Complex()), lambda: fit(module=Real()))
row(
    "Federated has nothing to train, because no parameter in an optimiser requires a gradient",
    lambda: fit(module=Classifier().requires_grad_(False)),
    lambda: fit(module=Classifier()),
)
row(
    "would train on the raw data of all clients at once, without a mechanism. Use a Trainer",
    lambda: fit(fed(), pl.callbacks.LearningRateFinder(num_training_steps=5), module=Tunable()),
    lambda: fit(pl.callbacks.LearningRateFinder(num_training_steps=5), module=Tunable(), data=Digits(400)),
)
# ---- ranks ------------------------------------------------------------------------------------------
row(
    "A privacy target over the run needs a number of rounds, got Trainer(max_epochs={}, max_steps={}). Set",
    lambda: fit(aimed(), max_epochs=-1, max_time="00:00:01:00"),
    lambda: fit(aimed(), max_epochs=2),
    lambda: fit(aimed(), max_epochs=-1, max_steps=8),
    lambda: fit(aimed(over="round"), max_epochs=-1, max_steps=8),
)
row("for {} rounds, but {}", lambda: longer(1, 5), lambda: longer(2, 2), lambda: fit(aimed(), max_epochs=5))


def aimed(**target):
    return fed(
        fedq.LDPQ(1.0),
        seed=None,
        privacy=fedq.PrivacyTarget(500.0, **{"delta": 1e-5, "adversary": "server", **target}),
    )


def longer(first, second):
    """A run, and one that goes on from its checkpoint to another number of rounds."""
    one = aimed()
    trainer = fit(one, max_epochs=first)
    trainer.save_checkpoint("target.ckpt")
    fit(aimed(), ckpt_path="target.ckpt", max_epochs=second)


row(
    "There are no training data, or the training loader is not the clients' own, so it would train",
    lambda: make_trainer(fed()).fit(Classifier()),
    lambda: fit(fed()),
    lambda: fit(fed(), data=from_loader()),
    lambda: fedq_command("fit", small()),
)
row(
    "Use trainer.fit(model, datamodule=FederatedDataModule.from_loader(loader, val_loader))",
    lambda: fit(fed(), Swaps()),
    lambda: fit(fed(), data=from_loader()),
)


class SecondDPSGD(fedq.DPSGD):
    state_key = "second"


class Chooses(pl.Callback):
    """Wants to choose the batches, too."""

    def setup(self, trainer, pl_module, stage):
        next(c for c in trainer.callbacks if isinstance(c, fedq.Federated)).use_batches(SimpleNamespace())


def aggregate():
    """A sum with exactly Gaussian noise, half of what the chain needs."""
    return fedq.AggregateGaussian(40.0, math.sqrt(langevin.STEP) * langevin.CLIENTS / 80.0)
