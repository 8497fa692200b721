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
