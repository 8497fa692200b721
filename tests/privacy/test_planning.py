"""Planning finds the largest setting that keeps the promise, or says why there is none."""

import math

import pytest
import torch

from lightning_fedq import DisjointOnce
from lightning_fedq.functional.divergences import gaussian_epsilon, randomized_response_epsilon
from lightning_fedq.keys.randomness import ClientRandomness, SeededKeys
from lightning_fedq.mechanisms import (
    CPA,
    CSGM,
    LDPQ,
    CorBin,
    FedAvg,
    GaussianNoise,
    LaplaceNoise,
    RotatedAxes,
    RotatedCoins,
)
from lightning_fedq.mechanisms.contract_suite import encode
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.planning import (
    Problem,
    bits_behind,
    fixed_bits,
    make_plan_context,
    plan,
    relative_error,
)
from lightning_fedq.privacy.target import PrivacyTarget
from lightning_fedq.secagg import SecAgg
from tests.described import privacy_report

CANDIDATES = {"LDP-FL": LDPQ(1.0), "CorBin": CorBin(1.0, 5), "FedAvg": FedAvg()}


def problem(clients, params, rounds, epsilon, who, **more):
    return Problem(clients, params, rounds, PrivacyTarget(epsilon, 1e-5, who), **more)


def behind_masks(mechanism, clients, params, **settings):
    context = make_plan_context(mechanism, clients, params)
    return privacy_report(mechanism, context, delta=1e-5, secure_aggregation=True, **settings)


def test_the_setting_meets_the_target_and_little_more_would_not():
    options = plan(problem(50, 1000, 10, 4.0, Adversary.EAVESDROPPER), CANDIDATES)
    assert [option.name for option in options] == ["CorBin", "LDP-FL", "FedAvg"]
    chosen = options[1].mechanism.epsilon_per_coordinate
    assert options[1].epsilon <= 4.0
    charges = 1 if isinstance(options[1].law, DisjointOnce) else 10
    assert randomized_response_epsilon(1.003 * chosen, 1000 * charges, 1e-5) > 4.0
    # close pairs cancel: never worse than half the error of independent bits
    assert options[0].error < options[1].error / 1.9


def test_shared_bits_and_plain_updates_have_no_setting_against_the_server():
    options = {o.name: o for o in plan(problem(50, 1000, 10, 4.0, Adversary.SERVER), CANDIDATES)}
    assert options["LDP-FL"].mechanism is not None
    assert options["CorBin"].mechanism is None
    assert "CorBin can't meet" in options["CorBin"].reason
    assert "FedAvg has no privacy parameter" in options["FedAvg"].reason
    assert options["FedAvg"].verdict == "not possible"


def test_aggregation_buys_a_larger_setting():
    local, central = (
        plan(problem(500, 1000, 1, 4.0, adversary), {"LDP-FL": LDPQ(1.0)})[0].mechanism.epsilon_per_coordinate
        for adversary in (Adversary.SERVER, Adversary.SECAGG_SERVER)
    )
    assert central > 5 * local


def test_the_spec_s_table_of_a_sum():
    """Section 7 of the specification: its rule of 12.5 sqrt(d) / mu clients, 670 for 7,850 at epsilon 8."""
    small = plan(problem(1000, 7850, 30, 8.0, Adversary.SECAGG_SERVER), {"coins": RotatedCoins(1.0, 1.0)})[0]
    assert small.error == pytest.approx(0.42, rel=0.06)
    assert small.ratio == pytest.approx(0.05, abs=0.006)
    assert small.verdict == "no visible loss"
    assert small.clients_needed == pytest.approx(670, rel=0.02)
    assert 8.0 <= small.bits <= 8.5  # modulo 2^8, on 8,192 rotated coordinates


def test_what_no_number_of_clients_brings_down_is_not_promised():
    """An eighth of the rotated coordinates loses 7 |mean|^2 a round: R is 7 / 5 at least in 5 rounds.

    "Good from 99,000 clients" used to be said.
    """
    eighth = RotatedCoins(1.0, 1.0, fraction=0.125)
    few, many = (
        plan(problem(2000, 100, rounds, 8.0, Adversary.SECAGG_SERVER), {"coins": eighth})[0]
        for rounds in (5, 200)
    )
    assert few.ratio > 7 / 5 * 0.75 and few.clients_needed is None
    assert many.clients_needed > 60


def test_the_spec_s_table_of_a_server_that_sees_every_message():
    """Once each with the whole budget: E 31, R 3.5, poor; good from 33 c d clients, c = .133 at epsilon 8."""
    axes = plan(problem(1000, 7850, 30, 8.0, Adversary.SERVER), {"axes": RotatedAxes(1.0, 1.0)})[0]
    assert isinstance(axes.law, DisjointOnce)
    assert axes.epsilon <= 8.0
    assert axes.error == pytest.approx(31.4, rel=0.02)
    assert axes.verdict == "poor"
    assert axes.clients_needed == pytest.approx(33 * 0.133 * 7850, rel=0.03)
    assert axes.bits == pytest.approx(14 / 7850)


def test_gaussian_noise_is_the_textbook_s():
    option = plan(problem(100, 500, 10, 2.0, Adversary.OUTSIDER), {"noise": GaussianNoise(1.0, 1.0)})[0]
    # sensitivity 2 / n of the mean, T rounds: mu^2 = 10 (2 / (n sigma))^2, E = d sigma^2
    sigma = math.sqrt(option.error / 500)
    assert gaussian_epsilon(math.sqrt(10) * 2 / (100 * sigma), 1e-5) == pytest.approx(2.0, rel=0.01)


def test_a_round_s_target_costs_nothing_over_rounds():
    levels = []
    for over, rounds in (("round", 20), ("run", 1)):
        asked = Problem(500, 500, rounds, PrivacyTarget(4.0, 1e-5, Adversary.OUTSIDER, over))
        levels.append(plan(asked, {"coins": RotatedCoins(1.0, 1.0)})[0].mechanism.epsilon_per_bit)
    assert levels[0] == pytest.approx(levels[1], rel=1e-3)


@pytest.mark.parametrize("who", [Adversary.OUTSIDER, Adversary.CLIENT])
def test_what_a_server_that_may_lie_releases_is_planned_as_the_run_counts_it(who):
    """It may leave a third of the clients out: what was planned for 2.0 was 2.51 (LDP-FL), or no claim."""
    asked = problem(700, 310, 4, 2.0, who, secure_aggregation=SecAgg(active=True))
    drawn = {"LDP-FL": LDPQ(1.0), "coins": RotatedCoins(1.0, 1.0)}
    survivors = SecAgg(active=True).guarantee(700, 700, 1).min_survivors
    for option in plan(asked, drawn):
        counted = behind_masks(option.mechanism, 700, 310, rounds=4, min_survivors=survivors)
        assert 1.99 <= counted.row(who).epsilon_run <= 2.0


def test_a_server_that_may_lie_costs_clients():
    asked, coins = (700, 500, 10, 8.0, Adversary.SECAGG_SERVER), {"coins": RotatedCoins(1.0, 1.0)}
    masks = SecAgg(), SecAgg(active=True)
    honest, lying = (plan(problem(*asked, secure_aggregation=one), coins)[0].error for one in masks)
    assert lying > 1.15 * honest


def test_a_partner_that_may_collude_is_counted():
    """A partner tells the shared word: changes count in l1 then, so pairs are no match for single clients."""
    both = {"coins": RotatedCoins(1.0, 1.0), "paired": RotatedCoins(1.0, 1.0, paired=True)}
    asked, planned = (500, 1000, 10, 8.0, Adversary.SECAGG_SERVER), []
    for masks in (SecAgg(), SecAgg(max_colluding_fraction=0.02)):
        options = plan(problem(*asked, secure_aggregation=masks), both)
        planned.append({option.name: option for option in options})
    trusted, curious = planned
    assert trusted["paired"].error < trusted["coins"].error
    assert curious["paired"].error > 2.5 * curious["coins"].error
    assert curious["coins"].error == pytest.approx(trusted["coins"].error * 500 / 490, rel=0.03)
    for option in curious.values():
        report = behind_masks(option.mechanism, 500, 1000, rounds=10, max_colluding_fraction=0.02)
        spent = report.row(Adversary.SECAGG_SERVER).epsilon_run
        assert option.epsilon == pytest.approx(spent, rel=1e-6) and 7.9 < spent <= 8.0


def test_dropouts_are_paid_for():
    asked, coins = (1000, 1000, 10, 8.0, Adversary.SECAGG_SERVER), {"coins": RotatedCoins(1.0, 1.0)}
    safe, losing = (plan(problem(*asked, dropout_probability=p), coins)[0] for p in (0.0, 0.1))
    assert losing.mechanism.max_dropped_clients > 100
    assert losing.mechanism.epsilon_per_bit < safe.mechanism.epsilon_per_bit
    assert losing.error > safe.error


@pytest.mark.parametrize("params", [16_384, 100_000])
def test_bits_are_of_the_whole_message(params):
    """CPA sends some blocks, however many there are: a cut update would stand for too many of them."""
    found = plan(problem(100, params, 1, 8.0, Adversary.SERVER), {"CPA": CPA(1.0, epsilon_scope="round")})[0]
    context = make_plan_context(found.mechanism, 100, params)
    rand = ClientRandomness(SeededKeys(0), [0], 0)
    message = found.mechanism.encode(torch.zeros(1, params), context, rand)
    assert found.bits == message.num_bits / params


def test_bits_of_coordinates_that_are_not_sent_are_not_planned():
    """The code of a message goes by who is selected; `code` has room for a symbol of all."""
    mechanism = CSGM(clip_value=1.0, noise_multiplier=1.0, sampling_probability=0.25)
    context = make_plan_context(mechanism, 4, 4000)
    message = encode(mechanism, torch.zeros(4, 4000), context)
    assert fixed_bits(mechanism, context) is None and fixed_bits(LDPQ(1.0), context) == 1.0
    assert bits_behind(mechanism, context, None)[0] == pytest.approx(message.num_bits / 16_000, rel=0.1)


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="dropout_probability"):
        problem(5, 5, 5, 1.0, Adversary.SERVER, dropout_probability=1.0)
    with pytest.raises(ValueError, match="clients >= 1"):
        problem(0, 5, 5, 1.0, Adversary.SERVER)


@pytest.mark.parametrize("clip_norm", [1.0, 0.01])
def test_the_error_is_relative_to_an_update_that_is_hardly_clipped(clip_norm):
    """Laplace noise has the variance 8 (clip_norm s)^2; an l1 norm is sqrt(2 d / pi) times the l2 norm."""
    l2, l1 = GaussianNoise(clip_norm, 0.5), LaplaceNoise(clip_norm, 0.5)
    assert relative_error(l1, 10, 1000) == pytest.approx(1000 * 8 * 0.25 / 10 * 2 * 1000 / math.pi, rel=0.01)
    assert relative_error(l2, 10, 1000) == pytest.approx(relative_error(GaussianNoise(1.0, 0.5), 10, 1000))
