"""`examples/hospitals.py`: each of the four trainings protects what its line says, and nothing else."""

import importlib.util
import math
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "examples" / "hospitals.py"


@pytest.mark.parametrize(("inside", "release"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_row_and_a_hospital_have_epsilons_of_their_own(inside, release):
    spec = importlib.util.spec_from_file_location("hospitals", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    accuracy, row, hospital = module.run(2, inside, release)
    assert 0.0 <= accuracy <= 1.0
    assert (0.5 < row < 10.0) if inside else row == math.inf
    assert (7.8 < hospital <= 8.0) if release else hospital == math.inf
