"""Cures of a rule that says from whom cohorts are drawn."""

import itertools

import lightning_fedq as fedq
from lightning_fedq.rounds import RoundPlanner
from tests.cures.rows import fed, row
from tests.training.test_available import checkpoint, fit, halves, made

COUNT = itertools.count()
COINS = fedq.RotatedCoins(clip_norm=1.0, epsilon=1.0)


def colluding(rule=halves, **settings):
    return made(rule, COINS, secure_aggregation=fedq.SecAgg(**{"max_corrupt": 0.1, **settings}))


row(
    "available names from whom known cohorts are drawn, and {} of all clients; use",
    lambda: fed(num_clients=20, available=halves, participation="cyclic"),
    made,
    lambda: fed(num_clients=20, participation="cyclic"),
)
row(
    "available must name at least clients_per_round = {} of the clients 0 to {}",
    lambda: made(lambda round: range(4)),
    lambda: made(lambda round: range(4), clients_per_round=4),
)
row(
    "available named other clients for round {} when it was asked again; let it follow",
    lambda: RoundPlanner(20, 0, 5, available=lambda round: range(5 + next(COUNT))).named(0),
    lambda: RoundPlanner(20, 0, 5, available=lambda round: range(5 + round)).named(0),
)
row(
    "counts colluders as a draw from all clients has them, and those whom",
    colluding,
    lambda: colluding(active=True, max_dropout=0.0),
    lambda: colluding(max_corrupt=0.0),
    lambda: colluding(None),
)
row(
    "available names other clients for the rounds that were run than it did then; use the rule",
    lambda: checkpoint(lambda round: range(10)),
    lambda: checkpoint(halves),
    lambda: fit(made(lambda round: range(10), seed=1)),
)
