"""`examples/hospitals.py`: each of the four trainings protects what its line says, and nothing else."""

import math

import pytest

from tests.loaded import loaded


@pytest.mark.parametrize(("inside", "release"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_row_and_a_hospital_have_epsilons_of_their_own(inside, release):
    accuracy, row, hospital = loaded("examples/hospitals.py").run(2, inside, release)
    assert 0.0 <= accuracy <= 1.0
    assert (0.5 < row < 10.0) if inside else row == math.inf
    assert (7.8 < hospital <= 8.0) if release else hospital == math.inf
