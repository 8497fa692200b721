"""One client's data move nothing else on a device that is not the CPU, either: `tests.elsewhere`."""

import warnings

import pytest
from torch import Tensor

from tests import elsewhere
from tests.canary.reach import differences
from tests.canary.test_canary import FEATURES, _run


@pytest.mark.parametrize(
    "name", ["nothing", "stacks", "a server optimiser (Adam)", "checkpoints every step", "WeightAveraging"]
)
def test_nothing_differs_on_another_device(name, tmp_path):
    """Tensors there are compared by `tests.canary.reach` as any others."""
    setting = FEATURES[name]

    def trainer(folder):
        return {**setting.trainer(folder), "accelerator": "auto", "strategy": elsewhere.strategy()}

    there = setting._replace(trainer=trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, other = (_run(there, tmp_path / str(seed), seed) for seed in (1, 2))
    assert any(value.device == elsewhere.DEVICE for value in one.values() if isinstance(value, Tensor))
    assert differences(one, other) == []
