"""A deployment in one process: the same model as a simulation, and what is refused."""

import pytest
import torch

pytest.importorskip("flwr", reason="needs lightning-fedq[flower]")

from lightning_fedq.mechanisms import CPA, LDPQ, AggregateGaussian, CorBin  # noqa: E402
from lightning_fedq.secagg import SecAgg  # noqa: E402
from tests.flower.loop import LoopGrid, clients, deployment, federated, simulate  # noqa: E402

MECHANISMS = [
    (CorBin(epsilon=4.0, shared_bits=5), {}),
    (LDPQ(epsilon=4.0), {"target": "weights", "smoothing": 0.5}),
    (AggregateGaussian(clip_norm=8.0, noise_multiplier=0.05), {}),
    (CPA(epsilon=2.0), {}),
    (CorBin(epsilon=4.0, shared_bits=5), {"secure_aggregation": SecAgg()}),
]


@pytest.mark.parametrize("mechanism, options", MECHANISMS, ids=lambda value: type(value).__name__)
def test_a_seeded_deployment_ends_with_the_weights_of_the_simulation(mechanism, options, tmp_path):
    make = lambda: federated(mechanism, **options)  # noqa: E731
    expected = simulate(make(), 3)
    grid = LoopGrid(*clients(make, tmp_path))
    trainer, server = deployment(make(), 3, tmp_path).run(grid)
    assert torch.equal(server.engine.weights, expected.engine.weights)
    assert server.engine.ledger.charges.tolist() == expected.engine.ledger.charges.tolist()
    assert [r.uplink_bits for r in server.records] == [r.uplink_bits for r in expected.records]
    assert [r.num_received for r in server.records] == [4, 4, 4]
    assert "val_acc" in trainer.callback_metrics and "fed/uplink_bits" in trainer.callback_metrics
