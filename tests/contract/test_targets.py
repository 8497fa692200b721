"""A privacy target and every mechanism: it is calibrated, or it says by name why it can't be."""

from dataclasses import fields

import pytest

from lightning_fedq import mechanisms as m
from lightning_fedq.mechanisms.interface import Adversary, NonPrivate
from lightning_fedq.privacy.target import PrivacyTarget
from tests.contract.test_mechanisms import ROWS
from tests.described import Setting, calibrate, epsilon_of
from tests.one_round import make_context

PLAIN = ("FedAvg", "CorrelatedQuantization", "SubtractiveDither", "QSGD", "TernGrad")
WITHOUT = {
    name: f"{name} has no privacy parameter that a target could set"
    for name in (*PLAIN, "TopK", "RandomK", "DRIVE", "EDEN")
} | {
    "NearOptimalUtility": "a privacy target can't set NearOptimalUtility, whose noise .* Use GaussianNoise",
    "IrwinHall": "IrwinHall can't be private against an outsider here: .* no pure and no Renyi guarantee",
}
"""What a target can't set, and what is said."""
KINDS = [
    *{type(row): row for row in ROWS}.values(),
    m.CPA(epsilon=20.0, epsilon_scope="round"),
    m.RotatedCoins(clip_norm=8.0, epsilon_per_bit=1.0, bits_per_coordinate=3, paired=True),
]


def setting_of(mechanism):
    return Setting(make_context(mechanism, tuple(range(12)), (40,)), 3, 1e-3, secure_aggregation=True)


@pytest.mark.parametrize("mechanism", KINDS, ids=repr)
def test_a_target_sets_the_free_parameter_and_nothing_else(mechanism):
    setting, name = setting_of(mechanism), type(mechanism).__name__
    claims = setting.claims(mechanism)
    who = next((w for w in Adversary if not isinstance(claims[w].loss, NonPrivate)), Adversary.OUTSIDER)
    target = PrivacyTarget(4.0, 1e-3, who)
    if name in WITHOUT:
        with pytest.raises(ValueError, match=WITHOUT[name]):
            calibrate(target, mechanism, setting, 3)
        return
    found = calibrate(target, mechanism, setting, 3)
    assert 3.9 < epsilon_of(setting, found.mechanism, who, 3) <= 4.0
    names = [field.name for field in fields(mechanism)]
    changed = {name for name in names if getattr(mechanism, name) != getattr(found.mechanism, name)}
    free = {
        *("epsilon", "epsilon_per_bit", "epsilon_per_coordinate", "epsilon_per_message", "delta", "rounds"),
        *("mechanism", "noise_multiplier", "local_sigma", "max_dropped_clients", "granularity"),
    }
    assert changed and changed <= free


def test_whoever_claims_something_can_be_calibrated():
    """No mechanism with a claim is left out by name but the one whose noise follows from data."""
    for mechanism in ROWS:
        claims = setting_of(mechanism).claims(mechanism)
        claimed = any(not isinstance(claim.loss, NonPrivate) for claim in claims.values())
        assert not (claimed and type(mechanism).__name__ in WITHOUT), mechanism


@pytest.mark.parametrize("epsilon", [1e-3, 1.0])
def test_an_mvu_of_a_small_epsilon_is_within_it(epsilon):
    """At 0.001 the rounding to integers used to miss the level by 2.5e-10, and nothing could be built."""
    assert 0.99 * epsilon < m.MVU(epsilon).design.epsilon <= epsilon
