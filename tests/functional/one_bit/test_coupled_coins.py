import math
from fractions import Fraction

import pytest
import torch

from lightning_fedq.functional.one_bit.coupled_coins import flip_threshold, inner_coin
from lightning_fedq.functional.one_bit.threshold_coin import coin_thresholds
from tests.functional.one_bit.closed_forms import coupled_pair_mse
from tests.functional.one_bit.oracle import coupled_thresholds

BITS = 10
GRID = torch.linspace(-1.0, 1.0, 129, dtype=torch.float64)


def thresholds(epsilon, word_bits=BITS):
    """For every x of the grid: the threshold where the secret is 1, and where it is 0."""
    inner, one = inner_coin(coin_thresholds(epsilon, word_bits)), torch.ones(1, dtype=torch.float64)
    secrets = torch.tensor([True]), torch.tensor([False])
    return [coupled_thresholds(GRID, 0.0 * one, one, inner, secret).tolist() for secret in secrets]


@pytest.mark.parametrize(
    "values, epsilon, expected",
    [((0.3, -0.2), 1.0, 6.81176093), ((0.6, 0.4), 2.0, 2.297866385), ((-0.9, -0.8), 0.5, 31.72826519)],
)
def test_the_spec_s_errors(values, epsilon, expected):
    assert coupled_pair_mse(*values, 1.0, coin_thresholds(epsilon)) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 2.0, 4.0])
def test_given_the_partner_s_bit_every_input_stays_within_the_claimed_level(epsilon):
    """In exact fractions, over 129 x 129 inputs, with coins of 10 bits, where rounding is four million times
    coarser than with the 32 in use."""
    claimed, whole = coin_thresholds(epsilon, BITS), 2**BITS
    told, untold = thresholds(epsilon)
    worst = Fraction(0)
    for partner_told, partner_untold in zip(told, untold, strict=True):
        # the partner holds the complement: a one has partner_untold's chance where this member's secret is 1
        for one, other in ((partner_untold, partner_told), (whole - partner_untold, whole - partner_told)):
            posterior = Fraction(one, one + other)
            for mine_told, mine_untold in zip(told, untold, strict=True):
                chance = posterior * mine_told + (1 - posterior) * mine_untold
                worst = max(worst, chance, whole - chance)
    assert worst <= claimed.high
    assert worst >= claimed.high - 4  # and no more is given away than rounding needs


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 2.0, 5.0])
def test_the_secret_s_holder_learns_what_the_spec_says(epsilon):
    told, untold = thresholds(epsilon, 32)
    levels = (0.301727, 0.902054, 1.518670, 2.627378, 5.689784)
    expected = dict(zip((0.1, 0.5, 1.0, 2.0, 5.0), levels, strict=True))[epsilon]
    for row in (told, untold):
        low, high = min(row), max(row)
        ratio = max(high / low, (2**32 - low) / (2**32 - high))
        assert math.log(ratio) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
def test_each_bit_alone_is_the_one_bit_coin(epsilon):
    inner = inner_coin(coin_thresholds(epsilon))
    told, untold = thresholds(epsilon, 32)
    for x, one, other in zip(GRID.tolist(), told, untold, strict=True):
        exact = inner.low + (x + 1.0) / 2.0 * (inner.high - inner.low)
        assert abs((one + other) / 2 - exact) <= 1.0


@pytest.mark.parametrize("epsilon", [1e-7, 0.1, 1.0, 8.0, 20.0])
def test_the_flips_are_the_fewest_that_hide_the_secret(epsilon):
    coin, whole = coin_thresholds(epsilon), 2**32
    flip = flip_threshold(coin)
    assert 2 * flip * (whole - flip) >= coin.low * whole
    assert 2 * (flip - 1) * (whole - flip + 1) < coin.low * whole
