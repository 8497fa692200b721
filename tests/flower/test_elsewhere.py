"""A deployment whose clients train on a device that is not the CPU (`tests.elsewhere`)."""

import pytest
import torch

from lightning_fedq.mechanisms import CorBin, GaussianNoise
from lightning_fedq.secagg import SecAgg
from tests import elsewhere
from tests.flower import loop

CASES = [
    (CorBin(epsilon_per_coordinate=4.0), None),
    (CorBin(epsilon_per_coordinate=4.0), SecAgg()),
    (GaussianNoise(2.0, 0.02), None),
]


def place():
    return {"accelerator": "auto", "strategy": elsewhere.strategy()}


@pytest.mark.parametrize(("mechanism", "masks"), CASES, ids=repr)
def test_clients_elsewhere_end_with_the_weights_of_the_cpu(mechanism, masks, tmp_path, monkeypatch):
    make = lambda: loop.federated(mechanism, secure_aggregation=masks)  # noqa: E731
    expected = loop.simulate(make(), 2)
    devices, step = set(), loop.Net.training_step

    def noted(net, batch, *rest):
        devices.update({net.device.type, *(part.device.type for part in batch)})
        return step(net, batch, *rest)

    monkeypatch.setattr(loop.Net, "training_step", noted)
    monkeypatch.setattr(loop, "TRAINER", {**loop.TRAINER, **place()})
    quiet = {name: loop.TRAINER[name] for name in ("logger", "enable_progress_bar", "enable_model_summary")}
    grid = loop.LoopGrid(*loop.clients(make, tmp_path, trainer={**quiet, **place()}))
    _, server = loop.deployment(make(), 2, tmp_path).run(grid)
    assert devices == {"elsewhere"} == {server.engine.weights.device.type}
    assert torch.equal(server.engine.weights.cpu(), expected.engine.weights)
