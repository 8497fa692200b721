"""A sum beyond float32 has a mean; a mean that is not finite aborts its round, with the cause."""

import torch

from lightning_fedq.aggregation import RobustAggregation
from lightning_fedq.mechanisms import FedAvg
from lightning_fedq.randomness import SeededKeys
from lightning_fedq.ranges import FixedRange
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from lightning_fedq.rounds.running_sum import RunningSum

HUGE = 3.0e38


def engine(weights=None, aggregator=None):
    planner = RoundPlanner(4, 0)
    start = torch.zeros(5)
    return RoundEngine(
        FedAvg(), planner, SeededKeys(0), start, [5], FixedRange(1.0), diagnostics=False,
        client_weights=weights, aggregator=aggregator,
    )  # fmt: skip


def run(server, rows):
    server.start()
    for client, value in enumerate(rows):
        server.receive([client], torch.full((1, 5), value))
    return server.finish()


def test_a_sum_beyond_float32_has_its_mean():
    server = engine()
    record = run(server, [HUGE, HUGE, HUGE, 0.0])
    assert not record.aborted
    torch.testing.assert_close(server.weights, torch.full((5,), 0.75 * HUGE))


def test_one_client_that_weighs_almost_everything_moves_no_model_to_infinity():
    server = engine(torch.tensor([1.0, 1.0, 1.0, 2.0**62]))
    record = run(server, [1.0, 1.0, 1.0, HUGE])
    assert bool(torch.isfinite(server.weights).all()) and not record.aborted


def test_a_mean_that_is_not_finite_aborts_the_round_in_any_round(monkeypatch):
    server = engine()
    assert not run(server, [1.0] * 4).aborted
    with monkeypatch.context() as patched:
        patched.setattr(RunningSum, "total_weight", lambda self: 0.5)  # as weights that are all tiny
        record = run(server, [HUGE] * 4)
    assert "5 of 5 coordinates of the mean are not finite" in record.aborted
    assert torch.equal(server.weights, torch.ones(5))
    assert not run(server, [1.0] * 4).aborted
    assert server.ledger.most_charged == 3


def test_the_cure_that_is_named_bounds_one_client():
    server = engine(aggregator=RobustAggregation("median"))
    assert not run(server, [1.0, 1.0, 1.0, HUGE]).aborted
    torch.testing.assert_close(server.weights, torch.ones(5))
