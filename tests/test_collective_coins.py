"""The research example: exact against the server, nothing left once a member talks; the plant is seen."""

import math
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "collective_coins.py"
coins = runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_joint_level_is_exactly_that_of_one_coin(size, epsilon):
    assert coins["worst_level"](size, epsilon) == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize("size", [2, 4])
def test_one_talkative_member_leaves_nothing(size):
    assert coins["worst_level"](size, 1.0, known_secret=True) == math.inf


def test_arcs_in_place_of_subsets_leave_nothing():
    """Balanced as well, and given the others' bits a member's bit is certain."""
    assert coins["worst_level"](4, 1.0, coins["rotated"]) == math.inf
    posterior = coins["rotated"](4, 1.0)
    assert {sum(y) for y in posterior} == {2}


@pytest.mark.parametrize(
    ("size", "epsilon", "variance"),
    [(2, 1.0, 0.2689414214), (3, 1.0, 0.4684635451), (4, 0.5, 0.6727026241), (10, 1.0, 0.7456490319)],
)
def test_the_number_of_ones_varies_as_derived(size, epsilon, variance):
    law = coins["balanced"](size, epsilon)
    middle = sum(p * sum(y) for y, p in law.items())
    found = sum(p * (sum(y) - middle) ** 2 for y, p in law.items())
    assert found == pytest.approx(variance, rel=1e-9)


@pytest.mark.parametrize(
    ("size", "epsilon", "share"), [(2, 1.0, 0.538), (4, 1.0, 0.437), (10, 1.0, 0.298), (2, 2.0, 0.238)]
)
def test_the_error_of_a_sum_at_zero(size, epsilon, share):
    """Over that of as many coins of their own: the table of section 4.1."""
    secret = coins["balanced"](size, epsilon)
    own = size / math.tanh(epsilon / 2.0) ** 2
    # all inputs are 0, so what is sent is the secret itself
    error = sum(p * (2 * sum(y) - size) ** 2 for y, p in secret.items()) / math.tanh(epsilon / 2.0) ** 2
    assert error / own == pytest.approx(share, abs=6e-4)
    if size <= 4:
        assert coins["error_of_a_sum"](size, epsilon, secret) == pytest.approx(error)
