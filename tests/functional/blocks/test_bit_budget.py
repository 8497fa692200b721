import math

import pytest
from scipy.optimize import brentq, minimize_scalar

from lightning_fedq.functional.blocks.bit_budget import best_block_count, bit_epsilon


def test_vectors_of_the_specification():
    """cpa.md section 16, 13: y, 2 y and 2 y / tanh^2 y (3.43298777098 in 40 digits: its last one is off).

    Section 6: epsilon 8 is 4 blocks, and a factor of 3383 for 7,850.
    """
    best = 2.1773189849653067  # the positive root of sinh e = 2 e
    assert (best, best / 2) == pytest.approx((2.1773189850, 1.0886594925), abs=1e-10)
    assert best / math.tanh(best / 2) ** 2 == pytest.approx(3.4329877708, abs=2e-10)
    assert brentq(lambda e: math.sinh(e) - 2 * e, 1, 4) == pytest.approx(best, abs=1e-9)
    least = minimize_scalar(lambda e: e / math.tanh(e / 2) ** 2, bounds=(0.1, 9), method="bounded")
    assert least.x == pytest.approx(best, abs=1e-4)
    assert best_block_count((8.0,), 1, 7850) == 4
    assert 7850 / 4 / math.tanh(1) ** 2 == pytest.approx(3383, abs=1)
    assert 1 / math.tanh(8 / 2 / 7850) ** 2 == pytest.approx(3.85e6, rel=1e-3)


@pytest.mark.parametrize("bits", [1, 3])
@pytest.mark.parametrize("epsilons", [(0.1,), (2.0,), (8.0,), (50.0,), (1e4,), (1.0, 40.0), (math.inf,)])
def test_it_is_the_best_of_all(epsilons, bits):
    def noise(m):
        return sum(1 / (m * math.tanh(e / (2 * m * bits)) ** 2) for e in epsilons)

    assert best_block_count(epsilons, bits, 300) == min(range(1, 301), key=noise)


@pytest.mark.parametrize("bits", [1, 3, 7, 10, 7850])
def test_shared_budgets_never_add_up_to_more(bits):
    from fractions import Fraction

    for epsilon in (0.1, 1.0, 8.0, 1 / 3):
        share = bit_epsilon(epsilon, bits)
        assert bits * Fraction(share) <= Fraction(epsilon)
        assert share == pytest.approx(epsilon / bits, rel=1e-15)
    assert bit_epsilon(math.inf, bits) == math.inf
