"""The model goes down in few bits: what clients get, what the server keeps, what is counted and claimed."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_fedq.callbacks import Federated, Langevin
from lightning_fedq.mechanisms import CorBin, FedAvg, GaussianNoise
from lightning_fedq.rounds import Broadcast
from lightning_fedq.secagg import SecAgg
from lightning_fedq.training.user_messages import describe_outcome
from tests.digits_run import Classifier, Digits, make_trainer, weights_of
from tests.flower.loop import LoopGrid, clients, deployment, federated as deployed, simulate

SEGMENTS = 640, 10


def run(bits, mechanism=None, rate=0.5, rounds=3, **settings):
    torch.manual_seed(1)
    federated = Federated(mechanism or FedAvg(), 8, broadcast_bits=bits, **{"seed": 3, **settings})
    module = Classifier(optimizer=lambda params: torch.optim.SGD(params, lr=rate))
    trainer = make_trainer(federated, max_epochs=rounds)
    trainer.fit(module, Digits())
    return federated, module, trainer


@pytest.mark.parametrize("bits", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_hold_the_model_that_clients_get(bits, dtype):
    weights = torch.cat([torch.randn(640), torch.full((10,), 3.0), torch.tensor([-1e38, 3e38])]).to(dtype)
    segments, sent = (640, 10, 2), Broadcast(bits)
    rounded, stream = sent.rounded(weights, segments), sent.pack(weights, segments)
    assert len(stream) == (sent.num_bits(segments) + 7) // 8
    assert torch.equal(sent.unpack(stream, segments, dtype), rounded)
    again = sent.pack(rounded, segments)  # what the server packs is rounded already
    assert torch.equal(sent.unpack(again, segments, dtype), rounded)
    for part, its in zip(weights.split(segments), rounded.split(segments), strict=True):
        half = (part.max().double() - part.min().double()) / (2**bits - 1) / 2
        last_digit = torch.finfo(dtype).eps * part.abs().max().double() / 2  # of its dtype
        assert (its.double() - part.double()).abs().max() <= half * (1 + 1e-6) + last_digit
        assert its.unique().numel() <= 2**bits
    with pytest.raises(ValueError, match="bytes"):
        sent.unpack(stream[:-1], segments, dtype)


def test_downlink_is_counted_and_nothing_else_changes_its_price():
    mechanism = CorBin(epsilon_per_coordinate=2.0, shared_bits=5)
    (full, _, one), (short, _, other_one) = run(None, mechanism, seed=None), run(4, mechanism, seed=None)
    ranges = 64 * len(SEGMENTS)
    for record, other in zip(full.records, short.records, strict=True):
        assert record.downlink_bits == 8 * (32 * 650 + ranges)
        assert other.downlink_bits == 8 * (4 * 650 + 128 * 2 + ranges)
        assert record.uplink_bits == other.uplink_bits
    assert describe_outcome(full, one) == describe_outcome(short, other_one)


def test_the_servers_model_is_kept_in_full():
    """Clients that learn nothing leave it as it was, round after round: rounding does not add up."""
    start = weights_of(Classifier())
    _, module, _ = run(2, rate=1e-9, rounds=5)
    assert (weights_of(module) - start).abs().max() < 1e-6


def test_clients_train_from_what_they_are_sent():
    federated, module, _ = run(3, rounds=1)
    start = weights_of(Classifier())
    sent = Broadcast(3).rounded(start, SEGMENTS)
    assert not torch.equal(sent, start)
    plain = Classifier()
    nn.utils.vector_to_parameters(sent.clone(), plain.parameters())
    other = Federated(FedAvg(), 8, seed=3)
    make_trainer(other, max_epochs=1).fit(plain, Digits())
    moved, expected = weights_of(module) - start, weights_of(plain) - sent
    assert torch.allclose(moved, expected, atol=1e-6) and moved.norm() > 0.1
    assert torch.equal(federated.engine.weights, weights_of(module))


def test_a_round_that_was_given_up_leaves_the_model_in_full():
    class Stops(Classifier):
        def training_step(self, batch, batch_idx):
            if self.trainer.current_epoch == 1:
                raise KeyError("given up")
            return super().training_step(batch, batch_idx)

    torch.manual_seed(1)
    federated, module = Federated(FedAvg(), 8, seed=3, broadcast_bits=2), Stops()
    with pytest.raises(KeyError):
        make_trainer(federated, max_epochs=3).fit(module, Digits())
    _, expected, _ = run(2, rounds=1)
    assert torch.equal(weights_of(module), weights_of(expected))
    assert torch.equal(federated.engine.weights, weights_of(expected))


@pytest.mark.filterwarnings(
    "ignore:node |register|round .* client|the message of client|the keys come:UserWarning"
)
@pytest.mark.parametrize("masked", [False, True])
def test_real_clients_end_with_the_simulations_weights(masked: bool, tmp_path: Any) -> None:
    masks = {"secure_aggregation": SecAgg()} if masked else {}
    mechanism = GaussianNoise(1.0, 0.1) if masked else CorBin(epsilon_per_coordinate=4.0, shared_bits=5)
    make = lambda: deployed(mechanism, broadcast_bits=6, **masks)  # noqa: E731
    expected, plain = simulate(make(), 2), simulate(deployed(mechanism, **masks), 2)
    server = deployment(make(), 2, tmp_path).run(LoopGrid(*clients(make, tmp_path)))[1]
    assert torch.equal(server.engine.weights, expected.engine.weights)
    assert not torch.equal(server.engine.weights, plain.engine.weights)
    assert server.records[0].downlink_bits < plain.records[0].downlink_bits


@pytest.mark.filterwarnings(
    "ignore:node |register|round .* client|the message of client|the keys come:UserWarning"
)
def test_a_client_that_expects_floats_is_told_the_difference(tmp_path: Any) -> None:
    mechanism = CorBin(epsilon_per_coordinate=4.0, shared_bits=5)
    grid = LoopGrid(*clients(lambda: deployed(mechanism), tmp_path))
    with pytest.raises(RuntimeError, match=r"broadcast_bits is .* here and .* there"):
        deployment(deployed(mechanism, broadcast_bits=6), 2, tmp_path).run(grid)


def test_what_is_refused():
    for bits in (0, 17):
        with pytest.raises(ValueError, match=r"broadcast_bits must be in \[1, 16\]"):
            Federated(FedAvg(), 2, broadcast_bits=bits)
    with pytest.raises(TypeError, match="broadcast_bits must be an integer"):
        Federated(FedAvg(), 2, broadcast_bits=2.5)
    chain = Federated(FedAvg(), 4, seed=1, broadcast_bits=8)
    with pytest.raises(ValueError, match="no broadcast_bits"):
        make_trainer(chain, Langevin(0.1)).fit(Classifier(), Digits())
