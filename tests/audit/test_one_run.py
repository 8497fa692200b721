"""Layer C: what right guesses about canaries refute."""

import numpy as np
import pytest
import torch

from lightning_fedq.audit.one_run import canary_coins, judge_guesses, one_run_lower_bound, surest_guesses
from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import LDPQ, CorBin, SignRR
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from tests.audit import plants


def test_one_run_bounds_of_the_literature():
    assert one_run_lower_bound(1000, 1000, 775, 0.0, 1e-3) == pytest.approx(1.0, abs=0.03)
    assert one_run_lower_bound(10_000, 10_000, 7450, 0.0, 1e-3) == pytest.approx(1.0, abs=0.03)
    assert one_run_lower_bound(100, 100, 50, 0.0, 1e-3) == 0.0
    pure, approximate = (one_run_lower_bound(1000, 1000, 900, delta, 1e-3) for delta in (0.0, 1e-5))
    assert 0.0 < approximate < pure
    with pytest.raises(ValueError, match="correct <= guesses <= canaries"):
        one_run_lower_bound(10, 5, 6, 0.0, 1e-3)


def test_only_the_surest_are_guessed():
    assert surest_guesses(np.array([0.1, -3.0, 2.0, 0.0]), 2).tolist() == [0, -1, 1, 0]


def test_coins_are_fair_and_guesses_are_judged():
    coins = canary_coins(10_000, 0)
    assert set(coins.tolist()) == {-1, 1} and abs(coins.sum()) < 400  # 4 standard deviations: 6e-5
    finding = judge_guesses("all", coins, coins, 1.0)
    assert finding.draws == 10_000 and finding.lower_bound > 7.0 and "10000 of 10000" in finding.alarm
    assert judge_guesses("none", coins, 0 * coins, 1.0).lower_bound == 0.0


def through_one_round(mechanism):
    """One client's update carries a canary in every coordinate; the server reads its message."""

    def guess(signs):
        dim = len(signs)
        engine = RoundEngine(
            mechanism, RoundPlanner(2, 5), SeededKeys(6), torch.zeros(dim), [dim], FixedRange(1.0)
        )
        plan = engine.start()
        engine.receive([plan.cohort[0]], torch.from_numpy(signs).float()[None])
        return np.where(engine._sum.integer_sum.numpy() > 0, 1, -1)

    return guess


def played(mechanism):
    """20,000 canaries in one round, judged at a claim of 1."""
    coins = canary_coins(20_000, 0)
    return judge_guesses("canaries", coins, through_one_round(mechanism)(coins), 1.0)


@pytest.mark.parametrize("mechanism", [LDPQ(1.0), CorBin(1.0, 5), SignRR(1.0)])
def test_canaries_in_one_run_stay_within_the_claim(mechanism):
    finding = played(mechanism)
    assert finding.alarm == ""
    assert 0.9 < finding.lower_bound <= 1.0


def test_canaries_in_one_run_catch_a_wrong_coin():
    finding = played(plants.AlphaOffByOne(1.0))
    assert "guesses are right" in finding.alarm
    assert finding.lower_bound > 1.1
