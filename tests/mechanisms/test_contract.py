"""The first round tells which rule of the contract a mechanism breaks; later ones do not look."""

import pytest
import torch

from lightning_fedq.keys.randomness import SeededKeys
from lightning_fedq.mechanisms import LDPQ
from lightning_fedq.mechanisms.contract import BrokenContractError
from lightning_fedq.mechanisms.interface.ranges import FixedRange
from lightning_fedq.rounds import RoundEngine, RoundPlanner
from tests.contract.test_check_mechanism import (
    FloatSymbols,
    ForgetsABit,
    NoAssumptions,
    SaysNothingOfOutsiders,
    TwiceAsLong,
)


def engine_of(mechanism):
    start = torch.zeros(6), (4, 2), FixedRange(1.0)
    return RoundEngine(mechanism, RoundPlanner(4, 0), SeededKeys(0), *start)


def play(mechanism, rounds=1):
    engine = engine_of(mechanism)
    for _ in range(rounds):
        plan = engine.start()
        engine.receive(plan.survivors, torch.full((4, 6), 0.5))
        engine.finish()
    return engine


@pytest.mark.parametrize(
    ("mechanism", "rule", "match"),
    [
        (SaysNothingOfOutsiders(1.0), "single_claim_per_adversary", "has no claim about OUTSIDER"),
        (NoAssumptions(1.0), "single_claim_per_adversary", "has no assumptions"),
        (FloatSymbols(1.0), "integer_symbols", "must return integers, got symbols of torch.float32"),
        (ForgetsABit(1.0), "integer_symbols", r"24 symbols of 1 bits = 24, got 23"),
        (TwiceAsLong(1.0), "decodes_to_the_sum", r"must return shape \(6,\), got \(12,\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_broken_rule_is_told_in_the_first_round(mechanism, rule, match):
    with pytest.raises(BrokenContractError, match=f"^{rule}: .*{match}") as told:
        play(mechanism)
    assert told.value.rule == rule


def test_claims_are_checked_before_anybody_is_charged():
    engine = engine_of(NoAssumptions(1.0))
    with pytest.raises(BrokenContractError):
        engine.start()
    assert engine.ledger.charges.sum() == 0 and engine.plan is None


def test_later_rounds_ask_no_more():
    asked = []

    class Counts(LDPQ):
        def claims(self, context):
            asked.append(context.round)
            return super().claims(context)

    assert play(Counts(1.0), rounds=3).round == 3
    assert asked == [0, 0]  # whether they keep the rules, and whether the ledger has anything to price
