"""Cures that rounds, budgets of clients, secure aggregation and ranks name."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import torch

import lightning_fedq as fedq
from lightning_fedq.keys.randomness import RootKeys
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.run import ASSUMED
from lightning_fedq.rounds.client import ClientBudget
from tests.cures.rows import fed, fit, row
from tests.digits_run import Classifier
from tests.training.test_distributed_clients import on as ranks_on

MEDIAN = fedq.RobustAggregation("median")
DELTA = 1e-5


def private(mechanism, **settings):
    return fed(mechanism, seed=None, **settings)


def target(**settings):
    return fedq.PrivacyTarget(8.0, **{"delta": DELTA, "adversary": "server", **settings})


def budget(fewest=None, **settings):
    sums = None if fewest is None else replace(ASSUMED, min_survivors=fewest, min_summands=fewest)
    return ClientBudget(target(**settings), 4, sums)


def handed(**settings):
    return fedq.HandedOnGaussian(
        1.0, **{"num_cohorts": 2, "granularity": 0.01, "local_sigma": 0.4, "bits": 16, **settings}
    )


TURNS = {"cohort": fedq.Cyclic(2)}
row(
    "has no noise bound > 0, which weights need. Use weighting='uniform'.",
    lambda: fit(fed(fedq.FedAvg(), weighting="inverse_variance")),
    lambda: fit(fed(fedq.FedAvg(), weighting="uniform")),
)
row(
    "SCAFFOLD needs one torch.optim.SGD without momentum, got {}. Use it, or FedProx.",
    lambda: fit(fed(algorithm=fedq.SCAFFOLD(), local_steps=2), module=momentum()),
    lambda: fit(fed(algorithm=fedq.SCAFFOLD(), local_steps=2), module=Classifier()),
    lambda: fit(fed(algorithm=fedq.FedProx(0.1)), module=momentum()),
)
row(
    "SCAFFOLD needs one learning rate, but the groups of this SGD differ. Give all parameters the same",
    lambda: fit(fed(algorithm=fedq.SCAFFOLD(), local_steps=2), module=two_rates()),
    lambda: fit(fed(algorithm=fedq.SCAFFOLD(), local_steps=2), module=Classifier()),
    lambda: fit(fed(algorithm=fedq.FedProx(0.1)), module=two_rates()),
)
row(
    "needs as many steps as batches, which manual optimisation does not ensure. Use automatic",
    lambda: fit(fed(algorithm=fedq.SCAFFOLD(), local_steps=2), module=by_hand()),
    lambda: fit(fed(algorithm=fedq.SCAFFOLD(), local_steps=2), module=Classifier()),
    lambda: fit(fed(algorithm=fedq.FedProx(0.1)), module=by_hand()),
)
row(
    "A client's own budget is over the run, which means all its messages.",
    lambda: budget(over="round"),
    budget,
)
row(
    "can't enforce a budget against {}. Use adversary='server' or 'server_and_partner'",
    lambda: budget(adversary="outsider"),
    lambda: budget(adversary="server"),
    lambda: budget(adversary="server_and_partner"),
)
row(
    "A client can't verify that the sum hides its message. Use",
    lambda: budget(adversary="secagg_server"),
    lambda: budget(4, adversary="secagg_server"),
    lambda: budget(adversary="server"),
)
row(
    "cancels only in the unweighted sum. Use weighting='uniform', and leave the aggregator out",
    lambda: fed(handed(), weighting="samples", **TURNS),
    lambda: fit(fed(handed(), weighting="uniform", **TURNS)),
)
row(
    "adapts its range to the unweighted mean of all messages. Use weighting='uniform', and leave the",
    lambda: fed(fedq.AdaptiveClip(fedq.GaussianNoise(1.0, 0.1)), weighting="samples"),
    lambda: fit(fed(fedq.AdaptiveClip(fedq.GaussianNoise(1.0, 0.1)), weighting="uniform")),
)
row(
    "sets the range of a round itself. Leave ranges out",
    lambda: fed(fedq.AdaptiveClip(fedq.GaussianNoise(1.0, 0.1)), ranges=fedq.FixedRange(1.0)),
    lambda: fit(fed(fedq.AdaptiveClip(fedq.GaussianNoise(1.0, 0.1)))),
)
row(
    "AdaptiveClip needs a mechanism that clips in l2, got {}. Take GaussianNoise, RotatedCoins,",
    lambda: fedq.AdaptiveClip(fedq.LDPQ(1.0)),
    lambda: fedq.AdaptiveClip(fedq.GaussianNoise(1.0, 0.1)),
    lambda: fedq.AdaptiveClip(fedq.RotatedCoins(1.0)),
    lambda: fedq.AdaptiveClip(fedq.DistributedDiscreteGaussian(1.0, 1.0, 0.1)),
    error=TypeError,
)
row(
    "Per-client filters are impossible with secure aggregation. Leave out the aggregator or",
    lambda: fed(fedq.LDPQ(1.0), aggregator=MEDIAN, secure_aggregation=fedq.SecAgg()),
    lambda: fit(fed(fedq.LDPQ(1.0), secure_aggregation=fedq.SecAgg())),
    lambda: fit(fed(fedq.LDPQ(1.0), aggregator=MEDIAN)),
)
row(
    "Client weights are impossible with secure aggregation. Use",
    lambda: fed(fedq.LDPQ(1.0), weighting="samples", secure_aggregation=fedq.SecAgg()),
    lambda: fit(fed(fedq.LDPQ(1.0), weighting="uniform", secure_aggregation=fedq.SecAgg())),
    lambda: fit(fed(fedq.LDPQ(1.0), weighting="samples")),
)
row(
    "The noise of {} is calibrated for a mean with equal weights. Leave client_weights out",
    lambda: fed(exact(), weighting="samples"),
    lambda: fit(fed(exact(), weighting="uniform")),
)
row(
    "A robust rule or a vote takes no client weights. Leave client_weights out",
    lambda: fed(fedq.LDPQ(1.0), aggregator=MEDIAN, weighting="samples"),
    lambda: fit(fed(fedq.LDPQ(1.0), aggregator=MEDIAN)),
)
row("decodes the whole cohort at once", lambda: fed(exact(), aggregator=MEDIAN), lambda: fit(fed(exact())))
row(
    "needs at least {} clients, a round has {}. Choose fewer Byzantine",
    lambda: fed(fedq.LDPQ(1.0), aggregator=krum(2)),
    lambda: fit(fed(fedq.LDPQ(1.0), aggregator=krum(0))),
    lambda: fit(fed(fedq.LDPQ(1.0), 9, aggregator=krum(2))),
    lambda: fit(fed(fedq.LDPQ(1.0), 9, aggregator=krum(0, 1))),
)
row(
    "needs {} rounds between two participations of a client, this plan has {}. Use {}{}",
    lambda: fed(fedq.BandedGaussian(1.0, 1.0, band=2)),
    lambda: fit(fed(fedq.BandedGaussian(1.0, 1.0, band=2), **TURNS)),
    lambda: fit(fed(fedq.BandedGaussian(1.0, 1.0, band=1))),
)
row(
    "Secure keys can't be copied or pickled, because both owners would draw the same bits. Make a new",
    lambda: copy.copy(RootKeys()),
    lambda: fit(private(fedq.LDPQ(1.0))),
    lambda: copy.copy(fed(fedq.LDPQ(1.0))),
    error=TypeError,
)
row(
    "The ledger is of {} clients of {}, but this federation has {} clients of {}. Use a new Ledger",
    lambda: private(fedq.LDPQ(1.0), ledger=Ledger(4, "LDPQ(2.0)")),
    lambda: fit(private(fedq.LDPQ(1.0), ledger=Ledger(4, repr(fedq.LDPQ(1.0))))),
)
# ---- secure aggregation -----------------------------------------------------------------------------
row(
    "modulus must be above {} x {} = {} and at most 2^63, so that the sum can't wrap, got {}. Raise",
    lambda: fit(fed(fedq.LDPQ(1.0), secure_aggregation=fedq.SecAgg(modulus=3))),
    lambda: fit(fed(fedq.LDPQ(1.0), secure_aggregation=fedq.SecAgg(modulus=64))),
    lambda: fit(fed(fedq.LDPQ(1.0), secure_aggregation=fedq.SecAgg())),
)
row(
    "{} of {} clients must survive, which {} dropouts do not leave. "
    "Lower max_dropped_fraction or the threshold",
    lambda: fedq.SecAgg(threshold=9, max_dropped_fraction=0.5).rules(10, 10),
    lambda: fedq.SecAgg(threshold=9, max_dropped_fraction=0.1).rules(10, 10),
    lambda: fedq.SecAgg(threshold=6, max_dropped_fraction=0.4).rules(10, 10),
)
row(
    "could see more than the sum of a cohort of {}. The probability is above {} a round, at degree {} and",
    lambda: sparse(20, 11, 0.3).rules(1000, 1000),
    lambda: sparse(300, 180, 0.3).rules(1000, 1000),
    lambda: sparse("auto", None, 0.3).rules(1000, 1000),
)
row(
    "lose the sum with probability above 2^-{} at degree {} and threshold {}. Raise degree, lower",
    lambda: sparse(100, 80, 0.01).rules(1000, 1000),
    lambda: sparse(150, 80, 0.01).rules(1000, 1000),
    lambda: sparse(100, 51, 0.01).rules(1000, 1000),
    lambda: sparse("auto", None, 0.01).rules(1000, 1000),
)
row(
    "sums modulo {}, got modulus={}. Leave modulus out",
    lambda: fit(fed(ddg(), secure_aggregation=fedq.SecAgg(modulus=99))),
    lambda: fit(fed(ddg(), secure_aggregation=fedq.SecAgg())),
)
row(
    "hands noise on to clients whom the server names, and a lying server names colluders. Use SecAgg()",
    lambda: fed(handed(), secure_aggregation=fedq.SecAgg(active=True), **TURNS),
    lambda: fit(fed(handed(), secure_aggregation=fedq.SecAgg(), **TURNS)),
    lambda: fit(fed(ddg(), secure_aggregation=fedq.SecAgg(active=True))),
)
row(
    "is not homomorphic: the sum of its messages does not decode. Leave out secure_aggregation or choose",
    lambda: fed(fedq.FedAvg(), secure_aggregation=fedq.SecAgg()),
    lambda: fit(fed(fedq.FedAvg())),
    lambda: fit(fed(fedq.LDPQ(1.0), secure_aggregation=fedq.SecAgg())),
    error=TypeError,
)
# ---- ranks ------------------------------------------------------------------------------------------
row(
    "NCCL needs tensors on GPUs, but this rank's device is {}. Use process_group_backend='gloo' or",
    lambda: ranks_on("cpu", "nccl").backend,
    lambda: ranks_on("cpu", "gloo").backend,
    lambda: ranks_on("cpu", None).backend,
)
row(
    "needs a Federated callback, or each of {} ranks would train on all data. Add Federated to the",
    lambda: ranks_on("cpu").setup(SimpleNamespace(state=SimpleNamespace(fn="fit"))),
    lambda: fit(fed(), strategy="fedq_clients"),
    lambda: fit(fedq.DPSGD(1.0, 1.0, delta=1e-4, seed=1), strategy="auto", devices=1),
)


def momentum():
    return Classifier(optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))


def two_rates():
    def made(params):
        weight, bias = params
        return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.2}], lr=0.1)

    return Classifier(optimizer=made)


def by_hand():
    module = Classifier()
    module.automatic_optimization = False
    module.training_step = lambda batch, batch_idx: None
    return module


def krum(liars, bucket=1):
    return fedq.RobustAggregation("krum", num_byzantine=liars, bucket_size=bucket)


def ddg():
    return fedq.DistributedDiscreteGaussian(1.0, granularity=0.01, local_sigma=0.1, bits=16)


def exact():
    return fedq.AggregateGaussian(1.0, 1.0)


def sparse(degree, threshold, corrupt):
    return fedq.SecAgg(threshold, degree, max_colluding_fraction=corrupt, max_dropped_fraction=0.2)
