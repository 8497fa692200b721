import math

import pytest

from lightning_fedq import Cyclic, DisjointOnce, Everybody, FixedSize
from lightning_fedq.mechanisms import LDPQ, CorBin
from lightning_fedq.rounds import RoundPlanner


def test_a_plan_is_a_function_of_seed_and_round():
    planner, again = (RoundPlanner(20, 7, FixedSize(9), dropout_probability=0.3) for _ in range(2))
    plans = [planner.plan(round, CorBin(1.0)) for round in range(4)]
    assert plans == [again.plan(round, CorBin(1.0)) for round in range(4)]
    assert len({plan.cohort for plan in plans}) == 4
    assert RoundPlanner(20, 8, FixedSize(9), 0.3).plan(0, CorBin(1.0)).cohort != plans[0].cohort
    for plan in plans:
        assert [len(group) for group in plan.groups] == [2, 2, 2, 2, 1]
        assert set(plan.survivors) == set(plan.cohort) - plan.dropped


def test_dropouts_are_as_frequent_as_said_and_nobody_is_spared():
    """10,000 chances at p = 0.3: within 5 standard errors (0.023); each of 10 clients at least once."""
    planner = RoundPlanner(10, 0, dropout_probability=0.3)
    dropped = [c for round in range(1000) for c in planner.plan(round, LDPQ(1.0)).dropped]
    assert abs(len(dropped) / 10_000 - 0.3) < 0.023
    assert set(dropped) == set(range(10))


def test_every_pair_of_clients_meets_equally_often():
    """3,000 rounds of 4 clients: each of 6 pairs in a third of them, within 5 standard errors."""
    planner, met = RoundPlanner(4, 0), {}
    for round in range(3000):
        for group in planner.plan(round, CorBin(1.0)).groups:
            met[tuple(sorted(group))] = met.get(tuple(sorted(group)), 0) + 1
    assert len(met) == 6
    assert all(abs(count / 3000 - 1 / 3) < 5 * math.sqrt(2 / 9 / 3000) for count in met.values())


def test_stream_seeds_differ_by_purpose_round_and_client():
    planner = RoundPlanner(3, 0)
    plans = [planner.plan(round, LDPQ(1.0)) for round in range(2)]
    seeds = [p.stream_seed(purpose, c) for p in plans for purpose in ("a", "b") for c in (None, 0, 1)]
    assert len(set(seeds)) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((0, 0), "num_clients must be >= 1, got 0"),
        ((3, 0, FixedSize(4)), "cohorts must have 1 to num_clients = 3 clients, got FixedSize"),
        ((3, 0, Everybody(), 1.0), "dropout_probability must be in \\[0, 1\\), got 1.0"),
    ],
)
def test_senseless_planners_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        RoundPlanner(*arguments)


def test_disjoint_cohorts_ask_everybody_once():
    planner, again = (RoundPlanner(23, 7, DisjointOnce(5)) for _ in range(2))
    assert planner.num_rounds == 4 and RoundPlanner(23, 7, FixedSize(5)).num_rounds is None
    plans = [planner.plan(round, CorBin(1.0)) for round in range(4)]
    assert plans == [again.plan(round, CorBin(1.0)) for round in range(4)]
    asked = [client for plan in plans for client in plan.cohort]
    assert len(asked) == len(set(asked)) == 20
    assert RoundPlanner(23, 8, DisjointOnce(5)).plan(0, CorBin(1.0)).cohort != plans[0].cohort
    words = r"5 rounds of 5 clients need 25 clients, got 23. Use DisjointOnce\(4\) or fewer"
    with pytest.raises(ValueError, match=words):
        planner.plan(4, CorBin(1.0))


def test_cyclic_cohorts_take_turns_and_nobody_comes_back_early():
    planner = RoundPlanner(23, 7, Cyclic(5))
    once = RoundPlanner(23, 7, DisjointOnce(5))
    assert planner.num_rounds is None and planner.separation == 4
    cohorts = [planner.plan(round, CorBin(1.0)).cohort for round in range(14)]
    assert cohorts[:4] == [once.plan(round, CorBin(1.0)).cohort for round in range(4)]
    assert all(cohorts[round] == cohorts[round - 4] for round in range(4, 14))
    for rounds in range(15):
        asked = [client for cohort in cohorts[:rounds] for client in cohort]
        most = max(map(asked.count, asked), default=0)
        assert most == planner.law.max_rounds(rounds, 23) == math.ceil(rounds / 4)
    assert once.law.max_rounds(4, 23) == 1 and FixedSize(5).max_rounds(4, 23) is None
    assert RoundPlanner(23, 7, FixedSize(5)).separation == 1
    assert RoundPlanner(23, 7, Cyclic(23)).separation == 1


def test_every_client_is_dealt_into_every_disjoint_cohort_equally_often():
    """3,000 deals of 6 clients into 3 cohorts: each in a third of the times, within 5 standard errors."""
    deals = [RoundPlanner(6, seed, DisjointOnce(2)) for seed in range(3000)]
    for round in range(3):
        counts = [0] * 6
        for planner in deals:
            for client in planner.plan(round, LDPQ(1.0)).cohort:
                counts[client] += 1
        assert all(abs(count / 3000 - 1 / 3) < 5 * math.sqrt(2 / 9 / 3000) for count in counts)
