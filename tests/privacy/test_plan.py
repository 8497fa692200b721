"""Planning finds the largest setting that keeps the promise, or says why there is none."""

import math

import pytest

from lightning_fedq.core import Adversary
from lightning_fedq.functional.one_bit_privacy import randomized_response_epsilon
from lightning_fedq.mechanisms import LDPQ, CorBin, FedAvg
from lightning_fedq.privacy.plan import plan

CANDIDATES = {"LDP-FL": LDPQ, "CorBin": lambda e: CorBin(e, 5), "FedAvg": lambda e: FedAvg()}


def test_the_setting_meets_the_target_and_little_more_would_not():
    options = plan(4.0, 50, 1000, 10, Adversary.EAVESDROPPER, 1e-5, CANDIDATES)
    assert [option.name for option in options] == ["CorBin", "LDP-FL", "FedAvg"]
    chosen = options[1].mechanism.epsilon
    assert options[1].epsilon <= 4.0
    assert randomized_response_epsilon(1.003 * chosen, 10_000, 1e-5) > 4.0
    # close pairs cancel: never worse than half the error of independent bits
    assert options[0].noise_std < options[1].noise_std / math.sqrt(1.9)


def test_shared_bits_and_plain_updates_have_no_setting_against_the_server():
    options = {o.name: o for o in plan(4.0, 50, 1000, 10, Adversary.SERVER, 1e-5, CANDIDATES)}
    assert options["LDP-FL"].mechanism is not None
    assert options["CorBin"].mechanism is None
    assert "excludes one of two updates" in options["CorBin"].reason
    assert options["FedAvg"].reason == "no guarantee: updates are sent as they are"


def test_aggregation_buys_a_larger_setting():
    local, central = (
        plan(4.0, 500, 1000, 1, adversary, 1e-5, {"LDP-FL": LDPQ})[0].mechanism.epsilon
        for adversary in (Adversary.SERVER, Adversary.SECAGG_SERVER)
    )
    assert central > 5 * local


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="target_epsilon > 0"):
        plan(0.0, 5, 5, 5, Adversary.SERVER, 1e-5, CANDIDATES)
    with pytest.raises(ValueError, match="delta must be"):
        plan(1.0, 5, 5, 5, Adversary.SERVER, 0.5, CANDIDATES)
