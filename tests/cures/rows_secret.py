"""Cures that the conditions of secret cohorts name. A fit that is refused has charged nobody."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import lightning_fedq as fedq
from lightning_fedq._lightning import pl
from lightning_fedq.data import FederatedDataModule
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.training.secret_cohorts import check_processes
from lightning_fedq.wire.entropy_coding import Elias
from tests.cures.rows import row
from tests.digits_run import ManualSteps
from tests.training.test_own_draws import own
from tests.training.test_privacy_target import Line, loader
from tests.training.test_secret_cohorts import NOISE, TARGET, fitted, secret

AGAINST = fedq.PrivacyTarget(80.0, 1e-3, "client")


def fits(*callbacks, mechanism=NOISE, fit=None, make=secret, **settings):
    """A fit of one round."""
    federated = make(mechanism=mechanism, **settings)
    try:
        fitted(federated, *callbacks, **{"rounds": 1, **(fit or {})})
    except ValueError:
        assert federated.ledger.rounds == 0
        raise


class ShortOnes(fedq.DistributedDiscreteGaussian):
    """Spends fewer bits on small numbers."""

    def code(self, context):
        return Elias()


class Grouped(Line):
    """A layer that counts nothing, where `Counted` has one that counts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 1), nn.GroupNorm(1, 1))


class Counted(Line):
    """A layer that counts what it has seen."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))


class ByHand(ManualSteps, Line):
    """Takes its steps itself."""


class Writes(pl.Callback):
    follows_clients = True


class Limits(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        trainer.callbacks[0].ledger.limits = torch.full((20,), 9, dtype=torch.int32)


class Transforms(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        trainer.callbacks[0].engine.transform = lambda clients, updates: updates


class Validated(Line):
    """Can be evaluated."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))


def own_loaders():
    data = loader().dataset
    return FederatedDataModule(
        clients=[DataLoader(Subset(data, [c]), batch_size=1 + c % 2) for c in range(20)]
    )


def condition(words, refused, *cures, **always):
    """Settings, or callbacks, that break a condition, and those that keep it; or cohorts that are known."""

    def run(given, **more):
        settings = {**always, **more}
        return lambda: fits(*given, **settings) if isinstance(given, tuple) else fits(**{**settings, **given})

    row(words, run(refused), *map(run, cures), run(refused, cohort=4))


# ---- settings ---------------------------------------------------------------------------------------
condition("S1, a secret draw: seed={} reveals every cohort. Use", {"seed": 3}, {"seed": None})
row(
    "S5, clients without a limit of their own, but a {} of a {} against {} limits every client",
    lambda: fits(privacy=AGAINST),
    lambda: fits(privacy=TARGET),
    fits,
    lambda: fits(privacy=AGAINST, cohort=4),
)
row(
    "secret cohorts need S1, a draw, but all {} clients take part in every round. Use a size below",
    lambda: fits(cohort=fedq.FixedSize(20, secret=True)),
    lambda: fits(cohort=fedq.FixedSize(19, secret=True)),
    lambda: fits(cohort=20),
)
condition(
    "Secret cohorts need {}, or known cohorts", {"dropout_probability": 0.1}, {"dropout_probability": 0.0}
)
condition("Secret cohorts need {}, or known cohorts", {"deadline": fedq.Deadline(9.0, 1.0)}, {})
condition("Secret cohorts need {}, or known cohorts", {"weighting": "samples"}, {"weighting": "uniform"})
condition("Secret cohorts need {}, or known cohorts", {"aggregator": fedq.RobustAggregation("median")}, {})
condition(
    "S5, clients without memory: clients of {} keep vectors from round to round. Use FedProx, or no",
    {"algorithm": fedq.SCAFFOLD()},
    {"algorithm": fedq.FedProx(0.1)},
    {},
)
condition(
    "S5, clients without memory: buffers='local' stay with every client. Use buffers='share' or 'frozen'",
    {"buffers": "local"},
    {"buffers": "share"},
    {"buffers": "frozen"},
)
condition(
    "S5, clients without memory: personal_parameters={} stay with every client. "
    "Leave personal_parameters out",
    {"personal_parameters": ["layer.bias"]},
    {},
)
condition(
    "S8, no other output that depends on the draw: evaluate_clients writes metrics of clients. Leave",
    {"evaluate_clients": fedq.ClientEvaluation([loader()] * 20)},
    {},
    fit={"module": Validated()},
)
condition(
    "S5, clients without memory: check_isolation=False does not look for memory. Leave check_isolation",
    {"check_isolation": False},
    {},
)
condition(
    "S8, no other output that depends on the draw: diagnostics use the exact mean of the cohort. Use",
    {"diagnostics": True},
    {"diagnostics": False},
)
condition(
    "S8, no other output that depends on the draw: client_metrics={} writes metrics of the drawn clients",
    {"client_metrics": "local"},
    {"client_metrics": "none"},
)
row(
    "S9, a ledger of this training only: the ledger is another federation's. Leave ledger out, and add the",
    lambda: fits(ledger=Ledger(20, repr(NOISE))),
    fits,
    lambda: fits(ledger=Ledger(20, repr(NOISE)), cohort=4),
)
# ---- clients that draw for themselves; where cohorts are known, there are none ------------------------
ADDER = {"make": own, "mechanism": fedq.BandedGaussian(1.0, 2.0, band=1)}
MASKED = ADDER | {"secure_aggregation": fedq.SecAgg(simulation="counted")}
WEIGHTS = ADDER | {"sends": "weights"}
FIXED = {"mechanism": NOISE, "cohort": fedq.FixedSize(4, secret=True)}
KNOWN = {"mechanism": NOISE, "cohort": 4}
row(
    "with secure aggregation, which reveals dropouts and opens no sum of few clients. Leave",
    lambda: fits(**MASKED),
    lambda: fits(**ADDER),
    lambda: fits(**MASKED | FIXED),
    lambda: fits(**MASKED | KNOWN),
)
row(
    "with sends={}, whose sum is a model only if no client is missing. Use sends='updates'",
    lambda: fits(**WEIGHTS),
    lambda: fits(**WEIGHTS | {"sends": "updates"}),
    lambda: fits(**WEIGHTS | FIXED),
    lambda: fits(**WEIGHTS | KNOWN),
)
row(
    "the number of clients decides whether fast_dev_run cuts a round. Use max_epochs=1",
    lambda: fits(**ADDER, fit={"fast_dev_run": True}),
    lambda: fits(**ADDER, fit={"rounds": 1}),
    lambda: fits(**ADDER | KNOWN, fit={"fast_dev_run": True}),
)


def counted(layers=Counted, **settings):
    fits(**ADDER | settings, fit={"module": layers(), "data": DataLoader(loader(40).dataset, batch_size=2)})


row(
    "counters in the model ({}) do not change in a round without clients. Use buffers='frozen', or layers",
    counted,
    lambda: counted(buffers="frozen"),
    lambda: counted(Grouped),
    lambda: counted(**KNOWN),
)
# ---- fits -------------------------------------------------------------------------------------------
row(
    "S1, a secret draw: {} processes would know it. Use devices=1",
    lambda: check_processes(SimpleNamespace(world_size=2, strategy=None)),
    lambda: check_processes(SimpleNamespace(world_size=1, strategy=None)),
)
condition("need S4, clients that run the protocol", (fedq.ByzantineClients(0.1, "sign_flip"),), ())
condition(
    "changes updates, or draws batches from its state of every client. Leave it out", (Transforms(),), ()
)
row(
    "S5, clients without memory: streams and clients' own loaders continue where they stopped. Use",
    lambda: fits(fit={"data": own_loaders()}),
    lambda: fits(fit={"data": FederatedDataModule(loader().dataset, batch_size=1)}),
    lambda: fits(fit={"data": own_loaders()}, cohort=4),
)
row(
    "the ledger limits the charges of every client. Use PrivacyBudget(adversary='outsider')",
    lambda: fits(Limits()),
    lambda: fits(fedq.PrivacyBudget(9.0, 1e-3, "outsider")),
    fits,
    lambda: fits(Limits(), cohort=4),
)
condition(
    "max_time ends the run by a clock, which depends on the clients drawn. Use max_epochs",
    (pl.callbacks.Timer("00:01:00:00"),),
    (),
)
row(
    "steps or loss scales depend on the cohort. Use automatic optimisation and 32-true",
    lambda: fits(fit={"module": ByHand()}),
    lambda: fits(fit={"module": Line(), "precision": "32-true"}),
    lambda: fits(fit={"module": ByHand()}, cohort=4),
)
row(
    "so the duration of a round reveals the cohort. Set local_steps",
    lambda: fits(fit={"data": loader(23)}),
    lambda: fits(fit={"data": loader(23)}, local_steps=1),
    lambda: fits(fit={"data": loader(23)}, cohort=4),
)
condition(
    "messages of {} have lengths that depend on updates. Use a fixed code, or secure aggregation",
    {"mechanism": ShortOnes(1.0, 9.0, 0.01)},
    {"mechanism": fedq.DistributedDiscreteGaussian(1.0, 9.0, 0.01)},
    {"mechanism": ShortOnes(1.0, 9.0, 0.01), "secure_aggregation": fedq.SecAgg()},
)
condition("writes values computed from the drawn clients' data. Leave it out", (Writes(),), ())
