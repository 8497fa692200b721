"""The server when parameters join and leave."""

import pytest
import torch

from lightning_fedq.mechanisms import CPA, LDPQ, FedAvg, RotatedAxes
from lightning_fedq.mechanisms.interface.ranges import AdaptiveRange, FixedRange
from lightning_fedq.rounds import RoundEngine
from tests.rounds.test_engine import DIM, make_engine, run_round, update_of


def halves(client, round=0):
    return update_of(client, round)[:6]


def test_what_stays_keeps_weights_range_and_server_state():
    engine = make_engine(
        FedAvg(), ranges=AdaptiveRange(), server_optimizer=lambda p: torch.optim.Adam(p, lr=0.1)
    )
    run_round(engine)
    weights, ranges, moments = (
        engine.weights.clone(),
        engine.ranges,
        engine.state_dict()["optimizer"]["state"][0],
    )
    engine.rearrange([torch.full((3,), 7.0), torch.zeros(4)], [None, 1], None)
    assert engine.segments == (3, 4)
    assert torch.equal(engine.weights, torch.cat([torch.full((3,), 7.0), weights[8:]]))
    assert engine.ranges.radius[1] == ranges.radius[1]
    state = engine.state_dict()["optimizer"]["state"][0]
    assert torch.equal(state["exp_avg"], torch.cat([torch.zeros(3), moments["exp_avg"][8:]]))
    assert state["step"] == moments["step"]
    record = run_round(engine, updates=lambda c, r: update_of(c, r)[:7])
    assert record.round == 1 and engine.weights.shape == (7,)


def test_a_round_that_somebody_has_answered_keeps_its_vector():
    engine = make_engine(FedAvg())
    engine.start()
    engine.rearrange([torch.zeros(6)], [None], None)  # nobody yet
    engine.receive([0], halves(0)[None])
    with pytest.raises(RuntimeError, match="can't change in a round that somebody has answered"):
        engine.rearrange([torch.zeros(3)], [None], None)


def test_every_charge_counts_the_longest_vector():
    engine = make_engine(LDPQ(1.0))
    run_round(engine)
    engine.rearrange([torch.zeros(6)], [None], None)
    run_round(engine, updates=halves)
    plan = engine.planner.plan(engine.round, engine.mechanism)
    assert engine.context(plan).dim == 6
    assert engine.charged_context(plan).dim == engine.ledger.dim == DIM
    again = make_engine(LDPQ(1.0))
    again.ledger.load_state_dict(engine.ledger.state_dict())
    assert again.ledger.dim == DIM


@pytest.mark.parametrize("mechanism", [RotatedAxes(0.5, 1.0), CPA(1.0, epsilon_scope="round")])
def test_no_length_covers_another_where_few_coordinates_cost_more(mechanism):
    engine = make_engine(mechanism)
    run_round(engine)
    with pytest.raises(
        ValueError, match=f"can't be charged for vectors of two lengths.*{DIM} coordinates, now 6"
    ):
        engine.rearrange([torch.zeros(6)], [None], None)
    planner, keys, ranges = engine.planner, engine.keys, FixedRange(1.0)
    other = RoundEngine(mechanism, planner, keys, torch.zeros(6), [6], ranges, ledger=engine.ledger)
    with pytest.raises(ValueError, match=rf"parameters = {DIM} \(here 6\)"):
        other.start()
    engine.rearrange([torch.zeros(DIM)], [None], None)
    run_round(engine)
