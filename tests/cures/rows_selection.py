"""Cures that several runs together, secret cohorts and limits on rounds name."""

from pathlib import Path

import torch

from lightning_fedq.commands import run
from lightning_fedq.commands.together import cost_of_config
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.privacy.ledger import Ledger
from tests.cures.rows import row
from tests.cures.rows_commands import fedq, plan, small
from tests.described import privacy_report
from tests.one_round import make_context


def folder_of_one():
    """A run's folder."""
    return str(run.run_config(run.resolve([small()]), "one", Path("runs")))


SECRET = ("--params", "100", "--rounds", "5", "--delta", "1e-4", "--adversary", "outsider")
DRAWN = ("--secret", "--clients_per_round", "6")


def report(**settings):
    mechanism = LDPQ(1.0)
    context = make_context(mechanism, (0, 1))
    return privacy_report(mechanism, context, rounds=2, delta=1e-3, num_clients=8, **settings)


def limited(limit, rounds):
    ledger = Ledger(4, "m")
    ledger.round_limit = limit
    for number in range(rounds):
        ledger.charge((0,), number)


CHARGES = torch.tensor([1] * 8)
row(
    "secret cohorts need {}, or plan for known cohorts",
    lambda: plan(*SECRET, *DRAWN, "--dropout_probability", "0.1"),
    lambda: plan(*SECRET, *DRAWN),
    lambda: plan(*SECRET, "--dropout_probability", "0.1"),
)
row(
    "secret cohorts need S1, a draw from all clients, got {}. Use",
    lambda: plan(*SECRET, "--secret"),
    lambda: plan(*SECRET, *DRAWN),
)
row(
    "{} holds no config.yaml. Give folders of runs that `fedq fit` started.",
    lambda: fedq("privacy", ".", "."),
    lambda: fedq("privacy", folder_of_one(), folder_of_one()),
)
row(
    "Several runs have their own settings. Use no options except --delta and --out.",
    lambda: fedq("privacy", ".", ".", "--rounds", "3"),
    lambda: fedq("privacy", folder_of_one(), folder_of_one(), "--delta", "1e-4"),
)
row(
    "A run needs a known number of rounds, got {}",
    lambda: cost_of_config(small(rounds=-1), 1e-4),
    lambda: cost_of_config(small(rounds=1), 1e-4),
)
row(
    "charges reveal who was drawn, but cohorts are secret. Leave charges out",
    lambda: report(charges=CHARGES, secret_cohorts=""),
    lambda: report(secret_cohorts=""),
    lambda: report(charges=CHARGES),
)
row(
    "The privacy budget allows {} rounds, and round {} would exceed it. Raise the budget, or ",
    lambda: limited(2, 3),
    lambda: limited(3, 3),
    lambda: limited(2, 2),
    error=RuntimeError,
)
