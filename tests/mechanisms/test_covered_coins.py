"""The loss that takes the smaller of two bounds."""

import math

import numpy as np
import pytest

from lightning_fedq.functional.divergences import gaussian_epsilon
from lightning_fedq.functional.one_bit.hidden_coin import ORDERS, hidden_coin_moments
from lightning_fedq.mechanisms.bases.covered_coins import CoveredCoins
from lightning_fedq.privacy.accounting import ClaimAccountant, spent
from lightning_fedq.privacy.losses import RenyiLoss

LOW, OTHERS, COINS = 0.4, 19, 64
SQUARE = 3.16 * 0.2**2


def loss_of(square=SQUARE, low=LOW, others=OTHERS, coins=COINS):
    moments = hidden_coin_moments(low, 1.0 - low, others)
    divergences = coins * np.log1p(moments * square / coins) / (np.array(ORDERS) - 1.0)
    return CoveredCoins(ORDERS, tuple(divergences.tolist()), "", low, 1.0 - low, others, coins, square)


@pytest.mark.parametrize(("rounds", "ratio"), [(1, 1.15), (10, 1.1), (100, 1.1)])
def test_between_the_gaussian_limit_and_the_divergences(rounds, ratio):
    """The limit is that of small gaps: of one round no bound reaches it, large gaps tell more there."""
    loss = loss_of()
    found = spent(loss, 1e-5, rounds=rounds).epsilon
    variance = 20 * LOW * (1.0 - LOW)  # of a sum of coins that are all low
    limit = gaussian_epsilon(math.sqrt(rounds * SQUARE / variance), 1e-5)
    assert limit < found < 0.97 * RenyiLoss.epsilon(loss, 1e-5, rounds)
    assert found < ratio * limit


def test_rounds_add_up_in_any_way():
    loss = loss_of()
    whole = spent(loss, 1e-5, rounds=6).epsilon
    assert spent(loss.composed(6), 1e-5).epsilon == pytest.approx(whole, rel=1e-9)
    assert loss.composed(2).plus(loss.composed(4)).epsilon(1e-5, 1) == pytest.approx(whole, rel=1e-9)
    accountant = ClaimAccountant()
    accountant.step(loss, 1, 4)
    accountant.step(loss_of(2.0 * SQUARE, coins=2 * COINS), 1, 1)  # twice the coordinates
    assert accountant.get_epsilon(1e-5) == pytest.approx(whole, rel=1e-9)


def test_other_coins_add_up_by_their_divergences():
    one, other = loss_of(), loss_of(others=9)
    both = one.plus(other)
    assert type(both) is RenyiLoss
    assert both.divergences == tuple(a + b for a, b in zip(one.divergences, other.divergences, strict=True))


def test_the_curve_bounds_what_the_closed_form_says():
    loss = loss_of()
    x = np.linspace(-1.0, 1.5, 26)
    curve = loss.curve(x)
    assert (curve <= super(CoveredCoins, loss).curve(x)).all() and (np.diff(curve) <= 0.0).all()
    assert (curve >= np.maximum(-np.expm1(x), 0.0)).all()
    assert float(loss.curve(np.zeros(1))[0]) < 0.8 * float(super(CoveredCoins, loss).curve(np.zeros(1))[0])
    for delta in (1e-2, 1e-3, 1e-6):
        epsilon = loss.epsilon(delta, 1)
        assert float(loss.curve(np.array([epsilon]))[0]) < 2.0 * delta


@pytest.mark.parametrize(("low", "others"), [(0.09, 5), (0.4, 401)])
def test_loud_coins_and_large_cohorts_have_their_divergences(low, others):
    loss = loss_of(low=low, others=others)
    assert loss.epsilon(1e-5, 3) == RenyiLoss.epsilon(loss, 1e-5, 3)


def test_nothing_changes_where_nothing_moves():
    assert loss_of(0.0).epsilon(1e-5, 5) == 0.0


@pytest.mark.parametrize(
    "settings", [{"low": 0.5}, {"num_others": -1}, {"coordinates": 0}, {"square": -1.0}], ids=str
)
def test_senseless_numbers(settings):
    with pytest.raises(ValueError, match=r"low in \(0, 1/2\), num_others >= 0, coordinates >= 1 and square"):
        CoveredCoins((2.0,), (0.1,), **settings)
