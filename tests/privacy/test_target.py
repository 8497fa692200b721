"""The level of a target is found with few accountings, on the safe side, and however low it lies."""

import math
from dataclasses import replace

import pytest

from lightning_fedq.functional.divergences import gaussian_epsilon
from lightning_fedq.mechanisms import CSGM, LDPQ, SIGM, CorBin, PairedCoins, RotatedCoins
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy import target as module
from lightning_fedq.privacy.account import Account
from lightning_fedq.privacy.planning import make_plan_context
from lightning_fedq.privacy.target import PrivacyTarget
from tests.described import Setting, calibrate

TARGET = PrivacyTarget(8.0, 1e-5, Adversary.SECAGG_SERVER)


def behind_masks(mechanism):
    return Setting(make_plan_context(mechanism, 100, 1000), 10, 1e-5, secure_aggregation=True)


@pytest.mark.parametrize(
    "mechanism",
    [LDPQ(1.0), PairedCoins(1.0), pytest.param(RotatedCoins(1.0, 1.0), marks=pytest.mark.slow)],
    ids=repr,
)
def test_a_calibration_accounts_for_few_runs(mechanism, monkeypatch):
    """Five runs or six: an accounting of a large cohort takes tenths of a second."""
    asked, exact = [], Account.epsilon

    def counted(account, adversary, charges, *, secret):
        asked.append(exact(account, adversary, charges, secret=secret))
        return asked[-1]

    monkeypatch.setattr(Account, "epsilon", counted)
    found = calibrate(TARGET, mechanism, behind_masks(mechanism), 10)
    assert len(asked) <= 6
    assert 8.0 * (1 - 3e-4) <= found.epsilon <= 8.0
    account = behind_masks(mechanism).account(found.mechanism)
    assert found.epsilon == exact(account, TARGET.against, 10, secret=False)


def costs(*, jump=None, slope=1.0, scale=3.0):
    """log(epsilon / target) at a log level: a line, or one that jumps."""

    def excess(log_level):
        if jump is not None and log_level > jump:
            return 18.0
        return slope * (log_level - scale)

    return excess


@pytest.mark.parametrize("guess", [-13.0, -2.3, 2.9999, 3.0, 3.0001, 9.0])
@pytest.mark.parametrize("slope", [0.5, 1.0, 2.0])
def test_the_root_is_just_below_the_target(guess, slope):
    found = module._root(costs(slope=slope), -13.8, 9.2, guess, 2e-4)
    assert -2e-4 * max(slope, 1.0) <= slope * (found - 3.0) <= 0.0


@pytest.mark.parametrize("guess", [-13.0, -2.3, 5.0])
def test_where_it_jumps_over_the_target_the_level_before_is_found(guess):
    """A mechanism may refuse to be so loud, or lose its guarantee: infinite from one level to the next."""
    found = module._root(costs(jump=1.0), -13.8, 9.2, guess, 2e-4)
    assert 1.0 - 2e-4 <= found <= 1.0


def test_no_root_is_an_end_or_none():
    assert module._root(costs(scale=20.0), -13.8, 9.2, -2.3, 2e-4) == 9.2
    assert module._root(costs(scale=-20.0), -13.8, 9.2, -2.3, 2e-4) is None


@pytest.mark.parametrize("smallest", [1e-6, 1e-5, 1e-4, 1e-3, 1.0])
def test_the_smallest_level_is_the_one_that_a_mechanism_takes(smallest):
    """1e-6 times ten twice is below 1e-4 as floats, so that 0.001 was taken for the smallest."""

    def at(level):
        if level < smallest:
            raise ValueError("too small")
        return LDPQ(level)

    assert module.find_smallest_level(at) == smallest


def test_a_mechanism_that_takes_no_level_up_to_1_says_so():
    def at(level):
        raise ValueError(f"never {level:g}")

    with pytest.raises(ValueError, match="never 1"):
        module.find_smallest_level(at)


@pytest.mark.parametrize("kind", [SIGM, CSGM])
def test_a_target_is_about_any_two_updates_whatever_the_claim_compares(kind):
    """A coordinate may be at either end of its range: two steps of a claim that tells an update from zero."""
    target, mechanism = PrivacyTarget(4.0, 1e-5, Adversary.OUTSIDER), kind(1.0, 1.0)
    setting = Setting(make_plan_context(mechanism, 100, 20), 5, 1e-5)
    found = calibrate(target, mechanism, setting, 5).mechanism
    true = gaussian_epsilon(2.0 * math.sqrt(20 * 5) / found.noise_multiplier, 1e-5)
    assert true <= 4.0
    low, high = (
        module.affordable(setting.account(found), target.against, 4.0, secret=False, at_least=start)
        for start in (0, 5)
    )
    assert low == high == 5


@pytest.mark.parametrize("adversary", ["server", "server_and_partner", "secagg_server", "client"])
def test_where_no_numbers_help_another_mechanism_is_named_that_does(adversary):
    """CorBin's partner: fewer rounds, more clients and a larger epsilon were said to help, and never did."""
    target = PrivacyTarget(8.0, 1e-5, adversary)
    for clients, rounds, epsilon in ((20, 5, 8.0), (1000, 1, 8.0), (20, 1, 1000.0)):
        asked = PrivacyTarget(epsilon, 1e-5, adversary)
        context = make_plan_context(CorBin(1.0, 5), clients, 100)
        context = replace(context, num_colluding=int(adversary == "secagg_server"))
        setting = Setting(context, rounds, 1e-5, secure_aggregation=True)
        with pytest.raises(ValueError, match="protects every message by itself, such as LDPQ") as error:
            calibrate(asked, CorBin(1.0, 5), setting, rounds)
        assert "fewer rounds" not in str(error.value)
    setting = Setting(make_plan_context(LDPQ(1.0), 20, 100), 5, 1e-5, secure_aggregation=True)
    assert calibrate(target, LDPQ(1.0), setting, 5).epsilon <= 8.0  # the cure, tried
