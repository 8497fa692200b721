"""Every client of every cohort is charged for every attempt, who drops out and who comes last included."""

from collections import Counter

import pytest
import torch

from lightning_fedq import FixedSize
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.rounds import RoundEngine, RoundPlanner


class ForgetsTheLast(Ledger):
    """The loop over clients ends one too early."""

    def charge(self, clients, *args, **kwargs):
        super().charge(clients[:-1], *args, **kwargs)


class ForgetsTheFirstClient(Ledger):
    """Client 0 counts as none."""

    def charge(self, clients, *args, **kwargs):
        super().charge([client for client in clients if client], *args, **kwargs)


class ChargesSurvivorsOnly(RoundEngine):
    """Who did not answer in time is not charged, although it may have sent."""

    def start(self):
        plan = super().start()
        self.ledger._get_charges(self.ledger._id)[1][list(plan.dropped)] -= 1
        return plan


def uncharged(kind=RoundEngine, ledger=None):
    """Rounds and attempts that a client was asked in, less those that it is charged for."""
    planner = RoundPlanner(9, 0, FixedSize(5), dropout_probability=0.3)
    engine = kind(LDPQ(1.0), planner, SeededKeys(0), torch.zeros(4), [4], FixedRange(1.0), ledger=ledger)
    asked = Counter()
    for round in range(12):
        for attempt in range(1 + round % 2):
            plan = engine.start()
            asked.update(plan.cohort)
            engine.receive(plan.survivors, torch.zeros(len(plan.survivors), 4))
            if attempt == round % 2:
                engine.finish()
            else:
                engine.abandon()
    missing = {client: n - int(engine.ledger.charges[client]) for client, n in asked.items()}
    return Counter({client: n for client, n in missing.items() if n})


def test_everybody_who_was_asked_is_charged_once_an_attempt():
    assert not uncharged()


@pytest.mark.parametrize("ledger", [ForgetsTheLast, ForgetsTheFirstClient])
def test_a_ledger_that_forgets_a_client_is_caught(ledger):
    assert uncharged(ledger=ledger(9, repr(LDPQ(1.0))))


def test_an_engine_that_charges_survivors_only_is_caught():
    assert uncharged(ChargesSurvivorsOnly)
