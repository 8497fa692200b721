"""Cures of a rule that says from whom cohorts are drawn."""

import itertools

import lightning_fedq as fedq
from tests.cures.rows import row
from tests.training.test_available import checkpoint, fit, halves, made

COUNT = itertools.count()
COINS = fedq.RotatedCoins(clip_norm=1.0, epsilon_per_bit=1.0)


def colluding(rule=halves, **settings):
    return made(rule, COINS, secure_aggregation=fedq.SecAgg(**{"max_colluding_fraction": 0.1, **settings}))


row(
    "{} must name at least {} of the clients 0 to {}",
    lambda: made(lambda round: range(4)),
    lambda: made(lambda round: range(4), size=4),
)
row(
    "{} named different clients in two calls for round {}. Let the rule depend",
    lambda: fedq.Available(lambda round: range(5 + next(COUNT)), 5).list_available(0, 20),
    lambda: fedq.Available(lambda round: range(5 + round), 5).list_available(0, 20),
)
row(
    "assumes a draw from all clients, but the clients of",
    colluding,
    lambda: colluding(active=True, max_dropped_fraction=0.0),
    lambda: colluding(max_colluding_fraction=0.0),
    lambda: colluding(None),
)
row(
    "available names other clients for earlier rounds than it did in the checkpoint. Use the rule",
    lambda: checkpoint(lambda round: range(10)),
    lambda: checkpoint(halves),
    lambda: fit(made(lambda round: range(10), seed=1)),
)
