"""The accountant against the specification's table, dp_accounting and closed forms."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from lightning_fedq.functional.divergences import gaussian_delta, gaussian_epsilon
from lightning_fedq.mechanisms.interface import CoinSum, GaussianLoss, HiddenPair, NonPrivate, PmfPairs, Slack
from lightning_fedq.privacy.accounting import (
    Rounds,
    check_delta,
    composed_mass,
    spent,
    spent_together,
    with_slack,
)


def coin(epsilon):
    return 1 / (1 + math.exp(epsilon)), 1 / (1 + math.exp(-epsilon))


def bit(epsilon):
    low, high = coin(epsilon)
    return PmfPairs((((high, low), (low, high)),))


def alone(epsilon, clients_alone):
    low, high = coin(epsilon)
    return CoinSum(low, high, (HiddenPair((high, low), (low, high), clients_alone - 1),))


def paired(epsilon, clients_alone):
    low, high = coin(epsilon)
    t = high - low
    return CoinSum(low, high, (HiddenPair((1 - t, t), (1.0, 0.0), clients_alone),))


TABLE = [
    # clients alone, epsilon a bit, compositions, epsilon of a client alone, of a paired one (None: infinite)
    (10, 5.0, 1, 5.00, None),
    (10, 0.1, 1, 0.094, None),
    (100, 1.0, 1, 0.408, 0.556),
    (100, 0.1, 1000, 1.21, 1.32),
    (100, 1.0, 1000, 19.7, 21.1),
    (100, 0.1, 7850 * 50, 45.9, 51.6),
    (500, 1.0, 1000, 7.02, None),
    (500, 0.1, 7850 * 50, 15.3, None),
    (400, 0.5, 1000, 3.41, 3.54),
    (400, 1.0, 1000, 8.04, 8.29),
    (400, 0.1, 7850 * 50, 17.7, 18.6),
    (2000, 0.1, 7850 * 50, 6.51, 6.64),
    (2000, 1.0, 7850, 10.5, 10.6),
    (20_000, 0.1, 7850 * 50, 1.74, 1.74),
    (20_000, 0.1, 11_200_000 * 100, 380.0, None),
    (2_000_000, 0.1, 11_200_000 * 100, 12.3, 12.3),
]


@pytest.mark.parametrize(("clients", "epsilon", "count", "single", "pair"), TABLE)
def test_table_of_the_specification(clients, epsilon, count, single, pair):
    assert spent(alone(epsilon, clients), 1e-5, compositions=count).epsilon == pytest.approx(single, rel=0.01)
    if pair is not None:
        result = spent(paired(epsilon, clients), 1e-5, compositions=count).epsilon
        assert result == pytest.approx(pair, rel=0.01)


@pytest.mark.parametrize(("clients", "epsilon", "mass"), [(10, 5.0, 0.92), (10, 0.1, 8e-5), (100, 5.0, 0.5)])
def test_paired_clients_with_too_few_coins_have_no_epsilon(clients, epsilon, mass):
    result = spent(paired(epsilon, clients), 1e-5)
    assert result.epsilon == math.inf
    assert result.infinite_mass == pytest.approx(mass, rel=0.02)
    assert result.method == "probability of a distinguishing event above delta"


def test_the_papers_setting_is_vacuous():
    assert spent(alone(5.0, 10), 1e-5, compositions=11_200_000, rounds=100).epsilon > 5e9
    assert spent(paired(5.0, 10), 1e-5, compositions=11_200_000, rounds=100).epsilon == math.inf


@pytest.mark.parametrize("past", [0, 1, 4])
def test_rounds_to_come_come_on_top_of_those_that_were_charged(past):
    """The exact Gaussian curve, its mean over the lottery of the rest; with nothing to come, without one."""
    said = []
    for rounds in (0, 1, 4, 24):
        chances = stats.binom.pmf(range(rounds + 1), rounds, 1 / 6)

        def left(epsilon, chances=chances):
            mu = np.sqrt(past + np.arange(len(chances))) / 3.0
            below = stats.norm.cdf(-mu / 2 - epsilon / np.maximum(mu, 1e-9))
            curve = stats.norm.cdf(mu / 2 - epsilon / np.maximum(mu, 1e-9)) - math.exp(epsilon) * below
            return chances @ np.where(mu > 0.0, curve, 0.0) - 1e-5

        said.append(spent(GaussianLoss(3.0), 1e-5, rounds=rounds, participation=1 / 6, past=past).epsilon)
        if past + rounds:
            assert said[-1] == pytest.approx(optimize.brentq(left, 1e-3, 50.0), rel=2e-3)
    assert said == sorted(said)


def test_participation_mixes_the_numbers_of_rounds():
    """The delta of a run is the average over how often the client took part."""
    probability, rounds, level = 0.3, 6, 0.8
    result = spent(bit(level), 1e-3, compositions=5, rounds=rounds, participation=probability)
    average = 0.0
    for k in range(1, rounds + 1):
        weight = math.comb(rounds, k) * probability**k * (1 - probability) ** (rounds - k)
        high = 1 / (1 + math.exp(-level))
        count = 5 * k
        for ones in range(count + 1):
            p = math.comb(count, ones) * high**ones * (1 - high) ** (count - ones)
            q = math.comb(count, ones) * (1 - high) ** ones * high ** (count - ones)
            average += weight * max(p - math.exp(result.epsilon) * q, 0.0)
    assert 0.97e-3 <= average <= 1e-3


def test_no_rounds_cost_nothing():
    assert spent(bit(1.0), 1e-5, rounds=0).epsilon == 0.0
    assert spent(bit(1.0), 1e-5, rounds=9, participation=0.0).epsilon == 0.0


def test_infinite_mass_composes():
    assert composed_mass(0.5, 2) == pytest.approx(0.75)
    assert composed_mass(1e-12, 10**9) == pytest.approx(1e-3, rel=1e-3)
    assert composed_mass(1.0, 3) == 1.0


def test_infinite_mass_of_a_run_is_that_of_all_its_rounds():
    """Ten rounds, half of them the client's, of two units with 1e-7 each; and where that exceeds delta."""
    seldom = PmfPairs((((1.0 - 1e-7, 1e-7), (1.0, 0.0)),))
    run = spent(seldom, 1e-5, compositions=2, rounds=10, participation=0.5)
    assert run.infinite_mass == pytest.approx(1e-6, rel=1e-4)
    assert run.epsilon == 0.0
    more = spent(seldom, 1e-5, compositions=2, rounds=60)
    assert (more.epsilon, more.infinite_mass) == (math.inf, pytest.approx(1.2e-5, rel=1e-4))


def test_dropouts_cost_coins():
    before = CoinSum(*coin(1.0), (HiddenPair((0.5, 0.5), (1.0, 0.0), 40),))
    after = before.after_dropouts([1] * 40 + [2] * 10, 0.2, 1e-6)
    fewest = min(victim.num_coins for victim in after.victims)
    assert 15 < fewest < 40
    assert after.victims[-1].p == (before.high, before.low)
    unchanged = before.after_dropouts([1] * 40 + [2] * 10, 0.0, 1e-6)
    assert unchanged.victims[0].num_coins == 40


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 0.02])
@pytest.mark.parametrize("counted", ["clients", "samples"])
def test_delta_is_checked_and_the_message_says_what_was_counted(delta, counted):
    with pytest.raises(ValueError, match=rf"delta must be > 0 and below 0\.02 = 1 / 50 {counted}, got"):
        check_delta(delta, 50, counted)


def test_a_delta_at_which_rounding_shows_is_refused():
    assert check_delta(1e-12) == 1e-12
    with pytest.raises(ValueError, match="delta must be >= 1e-12, got 1e-14"):
        spent(GaussianLoss(1.0), 1e-14)


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_a_delta_without_a_count_is_checked_too(delta):
    words = r"delta must be > 0 and below 1, got .* one of the clients or samples would"
    with pytest.raises(ValueError, match=words):
        check_delta(delta)


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="compositions >= 1"):
        spent(bit(1.0), 1e-5, compositions=0)
    with pytest.raises(ValueError, match="participation in"):
        spent(bit(1.0), 1e-5, participation=1.5)


def test_nothing_private_is_not_added_up():
    with pytest.raises(ValueError, match="no guarantee to account for"):
        spent(NonPrivate("sent as it is"), 1e-5)
    with pytest.raises(TypeError, match=r"Unknown loss object\. Subclass"):
        spent(object(), 1e-5)


# ---- rounds of several kinds -----------------------------------------------------------------------------


def test_rounds_of_one_kind_or_none():
    assert spent_together({}, 1e-5) == 0.0
    assert spent_together({Rounds(bit(0.1), 10): 10}, 1e-5) == pytest.approx(4.30679137252, rel=1e-9)


def test_different_losses_add_up():
    mixed = spent_together({Rounds(bit(0.1), 50): 1, Rounds(bit(0.1000001), 50): 1}, 1e-5)
    assert mixed == pytest.approx(4.30679137252, rel=0.02)
    assert mixed >= 4.30679


@pytest.mark.parametrize("beside", [{}, {Rounds(bit(1.0)): 1}])
def test_what_is_not_known_is_not_added_up(beside):
    with pytest.raises(TypeError, match="Unknown loss"):
        spent_together({Rounds("event"): 1, **beside}, 1e-5)
    with pytest.raises(ValueError, match="no guarantee"):
        spent_together({Rounds(NonPrivate("nothing")): 1, **beside}, 1e-5)


# ---- laws that are known to a distance -------------------------------------------------------------------


def test_where_the_distance_is_too_large_the_ideal_is_named_as_such():
    found = spent(GaussianLoss(0.7), 1e-5, slack=Slack(1e-6))
    ideal = gaussian_epsilon(1 / 0.7, 1e-5)
    assert found.epsilon == math.inf
    assert found.method.endswith(f"(exact arithmetic would give epsilon {ideal:.3g})")


@pytest.mark.parametrize("distance", [1e-12, 1e-8, 1e-7])
def test_the_smallest_epsilon_that_pays_for_the_distance(distance):
    found = with_slack(lambda delta: gaussian_epsilon(0.7, delta), 1e-5, Slack(distance))
    assert gaussian_delta(0.7, found) + (1 + math.exp(found)) * distance <= 1e-5
    less = found - 1e-6
    assert gaussian_delta(0.7, less) + (1 + math.exp(less)) * distance > 1e-5


@pytest.mark.parametrize("distance", [6e-7, 5e-6, 1.0])
def test_a_distance_that_no_epsilon_pays_for(distance):
    """At epsilon 3.14 of mu 0.7 delta is 1e-6, and 24 times the distance is above 1e-5."""
    assert with_slack(lambda delta: gaussian_epsilon(0.7, delta), 1e-5, Slack(distance)) == math.inf


def test_the_distance_holds_for_a_law_that_is_really_off():
    """A response that cheats with chance t = 1e-3: exact delta at the epsilon found is below delta."""
    level, t, delta = 0.5, 1e-3, 0.05
    high = 1 / (1 + math.exp(-level))
    found = spent(bit(level), delta, slack=Slack(t)).epsilon
    p, q = np.array([high + t, 1 - high - t]), np.array([1 - high - t, high + t])
    assert max(p[0] - math.exp(found) * q[0], 0.0) <= delta


def test_the_log_ratio_holds_for_a_law_that_is_really_off():
    """The ends of a response, each times e^r one way or the other: an exact pure epsilon of level + 2 r."""
    found = spent(bit(0.5), 1e-12, slack=Slack(log_ratio=1e-3)).epsilon
    assert found == pytest.approx(0.502, abs=1e-9)


def test_distances_of_several_kinds_are_paid_for():
    one, other = (Rounds(GaussianLoss(5.0), 1, Slack(distance)) for distance in (1e-8, 1e-7))
    alone = spent_together({one: 3}, 1e-5)
    assert alone == spent(GaussianLoss(5.0), 1e-5, rounds=3, slack=Slack(1e-8)).epsilon
    assert spent_together({one: 3, other: 1}, 1e-5) > alone
    mixed = spent_together({one: 3, other: 3}, 1e-5)
    exact = with_slack(lambda d: gaussian_epsilon(math.sqrt(6) / 5.0, d), 1e-5, Slack(3.3e-7))
    assert exact <= mixed <= 1.02 * exact
