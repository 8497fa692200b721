"""Over a network, too, the law that is priced is the law by which clients are asked."""

import pytest

from lightning_fedq import Available, Cyclic, DisjointOnce, Everybody, FixedSize
from lightning_fedq.mechanisms import CorBin
from lightning_fedq.training.accounts import charged_run
from tests.flower.halves import Halves
from tests.flower.loop import CLIENTS, federated

COIN = CorBin(epsilon_per_coordinate=4.0, shared_bits=5)


def last_two(round):
    return range(CLIENTS - 2, CLIENTS)


@pytest.mark.parametrize(
    "law", [Everybody(), FixedSize(1), Cyclic(1), DisjointOnce(1), Available(last_two, 1)], ids=repr
)
def test_the_server_asks_whom_the_law_draws_and_charges_them(law, tmp_path):
    fed = federated(COIN, cohort=law)
    played = Halves(fed, tmp_path)
    planner = played.server.planner
    assert planner.law is law is fed.planner.law
    assert charged_run(fed, played.server, 0).sampling.law is law
    cohort = planner.plan(0, COIN).cohort
    record = played.round()
    asked = {client for kind, client in played.line.answers if kind == "train"}
    assert asked == set(cohort) and record.cohort_size == len(cohort)
    assert played.server.ledger.charges.nonzero().flatten().tolist() == sorted(cohort)
