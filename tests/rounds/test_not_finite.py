"""Finite answers whose mean or model float32 can't hold: the round is aborted, with its cause."""

import pytest
import torch

from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.rounds import RoundPlanner
from tests.rounds.test_halves import CLIENTS, DIM, deployed, update_of

LARGEST = 3.4e38


def one_round(server, clients, liars, value=LARGEST):
    plan = server.start()
    task = server.task()
    for client in plan.survivors:
        update = torch.full((DIM,), value) if client in liars else update_of(client, plan.round)
        server.receive_message(clients[client].answer(task, server.weights, update))
    return server.finish()


def everybody(**options):
    return deployed(FedAvg(), planner=RoundPlanner(CLIENTS, CLIENTS), **options)


@pytest.mark.parametrize("liars", [{2}, {1, 2}, {0, 1, 2, 3, 4}])
@pytest.mark.parametrize("samples", [None, 2.0**62])
def test_a_sum_that_float32_cannot_hold_is_divided_first(liars, samples):
    """The sum became infinite, though the mean is a number: the first round ended the server."""
    weights = None if samples is None else torch.tensor([3.0, 3.0, samples, 3.0, 3.0])
    server, clients = everybody(client_weights=weights)
    record = one_round(server, clients, liars)
    share = (torch.ones(CLIENTS) if weights is None else weights).double()
    lies = sum(share[client].item() for client in liars) / share.sum().item()
    assert not record.aborted
    assert server.weights.double().mean().item() == pytest.approx(lies * LARGEST, rel=1e-6)


@pytest.mark.parametrize(
    "optimizer", [None, lambda p: torch.optim.SGD(p, 1.0, momentum=0.9), torch.optim.Adam]
)
def test_a_model_that_is_not_finite_is_never_taken_over(optimizer):
    """Two steps of 3.4e38 were an infinity, and everything after them a NaN."""
    server, clients = everybody(server_optimizer=optimizer)
    everyone, records = set(range(CLIENTS)), []
    for _ in range(3):
        records.append(one_round(server, clients, everyone))
        assert torch.isfinite(server.weights).all()
    assert any("not finite" in record.aborted for record in records)
    good = one_round(server, clients, set())
    assert torch.isfinite(server.weights).all()
    assert not good.aborted
    assert server.ledger.rounds == 4


def test_an_aborted_round_says_what_was_not_finite_and_leaves_the_model():
    server, clients = everybody()
    one_round(server, clients, set(range(CLIENTS)))
    before = server.weights.clone()
    record = one_round(server, clients, set(range(CLIENTS)))
    words = "The model after this round's step is not finite in 12 of 12 coordinates"
    assert record.aborted.startswith(words)
    assert torch.equal(server.weights, before)
    assert record.num_received == CLIENTS
