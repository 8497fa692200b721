import math

import pytest
import torch

from lightning_fedq.algorithms.byzantine import robust
from lightning_fedq.algorithms.byzantine.aggregation import RobustAggregation, inverse_variance_weights
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import CPA, FedAvg, SignRR
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.rounds import RoundEngine, RoundPlan, RoundPlanner

PLAN = RoundPlan(3, (tuple(range(10)),), frozenset(), 7)


def engine_of(mechanism, num_clients=10, dim=6, **kwargs):
    planner = RoundPlanner(num_clients, seed=0)
    return RoundEngine(mechanism, planner, SeededKeys(0), torch.zeros(dim), (dim,), FixedRange(1.0), **kwargs)


def updates_of(num_clients=10, dim=6):
    return torch.rand(num_clients, dim, generator=torch.Generator().manual_seed(0)) - 0.5


def one_round(engine, updates, stack):
    plan = engine.start()
    for first in range(0, len(plan.survivors), stack):
        clients = plan.survivors[first : first + stack]
        engine.receive(clients, updates[list(clients)].clone())
    return engine.finish()


@pytest.mark.parametrize(
    "rule", ["median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "centered_clipping"]
)
@pytest.mark.parametrize("stack", [1, 4, 10])
def test_the_engine_applies_the_rule_to_decoded_rows(rule, stack):
    updates = updates_of()
    updates[2] = 1e20
    aggregation = RobustAggregation(rule, num_byzantine=2)
    engine = engine_of(FedAvg(), aggregator=aggregation)
    one_round(engine, updates, stack)
    torch.testing.assert_close(engine.weights, aggregation(updates, PLAN))
    assert engine.weights.abs().max() < 1.0


def test_a_mean_of_rows_is_the_mean():
    updates = updates_of()
    engine = engine_of(FedAvg(), aggregator=RobustAggregation("mean"))
    one_round(engine, updates, 3)
    torch.testing.assert_close(engine.weights, updates.mean(0))


def test_buckets_follow_the_plan():
    updates = updates_of()
    aggregation = RobustAggregation("median", bucket_size=3)
    generator = torch.Generator().manual_seed(PLAN.stream_seed("buckets"))
    buckets = robust.bucketing(updates, torch.randperm(10, generator=generator), 3)
    torch.testing.assert_close(aggregation(updates, PLAN), robust.median(buckets))


@pytest.mark.parametrize(
    "mechanism",
    [
        CPA(epsilon=2.0, levels=8, threshold=True, epsilon_scope="bit"),
        SignRR(epsilon_per_coordinate=2.0, aggregation="majority"),
    ],
)
def test_joint_decoders_see_the_whole_cohort_whatever_the_stacks(mechanism):
    updates, results = updates_of(), []
    for stack in (1, 4, 10):
        engine = engine_of(mechanism)
        one_round(engine, updates, stack)
        results.append(engine.weights)
    rand = ClientRandomness(SeededKeys(0), range(10), 0)
    engine = engine_of(mechanism)
    context = engine.context(engine.start())
    symbols = mechanism.encode(updates, context, rand).symbols
    whole = mechanism.decode(symbols, range(10), context, PublicRandomness(SeededKeys(0), 0)) / 10
    for result in results:
        torch.testing.assert_close(result, whole)


def test_breakdown_is_measured_in_buckets():
    RobustAggregation("median").warn_if_broken(10, 0.4)
    with pytest.warns(
        UserWarning, match="median of 5 rows tolerates 2 Byzantine clients, but 4 are expected"
    ):
        RobustAggregation("median", bucket_size=2).warn_if_broken(10, 0.4)


def test_arguments_are_checked():
    for kwargs, match in (
        ({"rule": "best"}, "rule of RobustAggregation must be one of"),
        ({"rule": "krum", "num_byzantine": -1}, "num_byzantine must be >= 0"),
        ({"rule": "median", "bucket_size": 0}, "bucket_size must be >= 1"),
    ):
        with pytest.raises(ValueError, match=match):
            RobustAggregation(**kwargs)
    weights = torch.ones(10)
    with pytest.raises(ValueError, match="Leave client_weights out"):
        engine_of(SignRR(epsilon_per_coordinate=1.0, aggregation="majority"), client_weights=weights)
    with pytest.raises(ValueError, match="but a robust rule needs one row per client"):
        engine_of(
            SignRR(epsilon_per_coordinate=1.0, aggregation="majority"), aggregator=RobustAggregation("median")
        )


@pytest.mark.parametrize(
    "rule", ["mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "centered_clipping"]
)
@pytest.mark.parametrize("bucket_size", [1, 2])
def test_liars_with_nan_and_infinity_break_no_rule(rule, bucket_size):
    updates = updates_of()
    updates[2], updates[5, 0], updates[7] = math.nan, math.inf, 3e38 if rule != "mean" else -math.inf
    aggregation = RobustAggregation(rule, num_byzantine=1, bucket_size=bucket_size)
    engine = engine_of(FedAvg(), aggregator=aggregation)
    record = one_round(engine, updates, 4)
    assert torch.isfinite(engine.weights).all() and engine.weights.abs().max() < 1.0
    assert set(record.non_finite_clients) >= {2, 5}


def test_too_few_answers_abort_the_round():
    engine = engine_of(FedAvg(), aggregator=RobustAggregation("trimmed_mean", num_byzantine=3))
    engine.start()
    engine.receive(range(6), updates_of()[:6])
    record = engine.finish()
    assert record.aborted.endswith("needs 7 clients, 6 answered") and record.metrics()["aborted"] == 1
    assert not engine.weights.any() and engine.round == 1 and engine.ledger.max_charges == 1
    assert one_round(engine, updates_of(), 4).aborted == "" and engine.weights.any()


@pytest.mark.parametrize(
    ("rule", "liars", "bucket_size", "wanted"),
    [("trimmed_mean", 3, 1, 7), ("krum", 2, 2, 9), ("multi_krum", 2, 1, 5), ("median", 4, 3, 1)],
)
def test_the_fewest_clients_are_the_fewest(rule, liars, bucket_size, wanted):
    aggregation = RobustAggregation(rule, liars, bucket_size)
    assert aggregation.min_clients == wanted
    aggregation(torch.zeros(wanted, 3), PLAN)
    if wanted > 1:
        with pytest.raises(ValueError, match="the rule needs"):
            aggregation(torch.zeros(wanted - 1, 3), PLAN)
        with pytest.raises(ValueError, match=f"needs at least {wanted} clients, a round has {wanted - 1}"):
            engine_of(FedAvg(), num_clients=wanted - 1, aggregator=aggregation)


def test_the_noise_bound_of_a_robust_rule_is_that_of_one_row():
    engine = engine_of(CPA(epsilon=1.0, epsilon_scope="bit"), aggregator=RobustAggregation("median"))
    engine.start()
    engine._sum.received = list(range(10))
    single = engine.mechanism.noise_variance(engine._context, [0])
    assert torch.equal(engine._sum.noise_variance(), single)
    assert math.isfinite(single.item())


# ---- weights by noise -------------------------------------------------------------------------------


def test_noise_weights_of_the_specification():
    """cpa.md section 4: epsilon 2 counts 9.67 times as much as 0.5, where only coins make noise."""
    epsilons = (0.5, 2.0, 0.5)
    weights = inverse_variance_weights(CPA(epsilons, dither="plain", epsilon_scope="bit"), (8, 2), 3)
    assert weights.sum().item() == pytest.approx(1.0)
    assert (weights[1] / weights[0]).item() == pytest.approx(9.67, abs=0.005) and weights[0] == weights[2]
    expected = (math.tanh(1.0) / math.tanh(0.25)) ** 2
    assert (weights[1] / weights[0]).item() == pytest.approx(expected, rel=1e-6)
    # A subtracted dither leaves 1 / c^2 - 2 / 3: the better client counts for more.
    finer = inverse_variance_weights(CPA(epsilons, epsilon_scope="bit"), (8, 2), 3)
    expected = (1 / math.tanh(0.25) ** 2 - 2 / 3) / (1 / math.tanh(1.0) ** 2 - 2 / 3)
    assert (finer[1] / finer[0]).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_variance_of_a_mean_weighted_by_noise(weighted):
    """10 clients with epsilon 0.5, 10 with 2: 1 / sum(1 / V) against sum(V) / n^2; and unbiased."""
    dim, epsilons = 40_000, (0.5,) * 10 + (2.0,) * 10
    mechanism = CPA(epsilons, epsilon_scope="bit")
    weights = inverse_variance_weights(mechanism, (dim,), 20) if weighted else None
    value, floats = 0.3, None if weights is None else weights.float()
    engine = engine_of(mechanism, 20, dim, client_weights=floats)
    plan = engine.start()
    engine.receive(plan.survivors, torch.full((20, dim), value))
    engine.finish()
    error = engine.weights.double() - value
    variances = [1 / math.tanh(e / 2) ** 2 - 2 / 3 for e in epsilons]
    expected = 1 / sum(1 / v for v in variances) if weighted else sum(variances) / 400
    # 2 cases, two comparisons at 5 standard errors: false alarm 2e-6.
    squares = error.square()
    assert abs(error.mean()) < 5 * error.std() / math.sqrt(dim)
    assert abs(squares.mean() - expected) < 5 * squares.std() / math.sqrt(dim)


def test_noise_weights_need_noise():
    with pytest.raises(ValueError, match="CPA has no noise bound"):
        inverse_variance_weights(CPA(1.0, threshold=True, epsilon_scope="bit"), (4,), 2)
