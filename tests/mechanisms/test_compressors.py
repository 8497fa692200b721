"""QSGD, TernGrad, DRIVE, EDEN, top-k and random-k: published constants, exact variances, what is sent."""

import math

import numpy as np
import pytest
import torch

from lightning_fedq.functional.rotation import rotate, rotate_back, sign_words
from lightning_fedq.keys.randomness import ClientRandomness, PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import DRIVE, EDEN, QSGD, RandomK, TernGrad, TopK
from lightning_fedq.mechanisms.drive import lloyd_max
from lightning_fedq.mechanisms.interface import NonPrivate
from lightning_fedq.wire.coding import UndecodableError
from tests.one_round import decode, encode, make_context

KINDS = [QSGD(4), TernGrad(), DRIVE(), EDEN(2)]


def errors_of(mechanism, update, count):
    """Decoded vectors of `count` clients of one update, less the update: `(count, dim)`."""
    context = make_context(mechanism, range(count), (len(update),))
    symbols = encode(mechanism, update.expand(count, -1), context).symbols
    rows = [decode(mechanism, symbols[i : i + 1], [i], context).double() for i in range(count)]
    return torch.stack(rows) - update.double()


@pytest.mark.parametrize("mechanism, variance", [(QSGD(4), 0.025), (TernGrad(), 0.12)], ids=repr)
def test_random_rounding_of_three_fifths_and_four_fifths(mechanism, variance):
    """The variances by hand, for (.6, .8); 5,000 draws, 4.5 standard errors."""
    count = 5000
    errors = errors_of(mechanism, torch.tensor([0.6, 0.8]), count)
    assert (errors.mean(0).abs() <= 4.5 * errors.std(0) / math.sqrt(count) + 1e-7).all()
    squares = errors.square().sum(1)
    assert abs(squares.mean().item() - variance) <= 4.5 * squares.std().item() / math.sqrt(count)


@pytest.mark.parametrize("mechanism", [DRIVE(), EDEN(3)], ids=repr)
def test_compiled_passes_send_and_decode_what_whole_tensors_do(mechanism):
    """The formulas on tensors, 1,500 coordinates in 1,536 rotated ones, to the last bit."""
    update = torch.randn(3, 1500, generator=torch.Generator().manual_seed(0))
    update[1] = 0.0
    context = make_context(mechanism, range(3), (1500,))
    rand = ClientRandomness(SeededKeys(0), range(3), 0)
    words = [rand.shared_with_server(client, "rotation").words(sign_words(1536)) for client in range(3)]
    rows = [rotate(row.double().numpy()[None], each)[0] for row, each in zip(update, words, strict=True)]
    rotated = torch.from_numpy(np.stack(rows))
    levels, edges, _ = lloyd_max(mechanism.bits)
    squares = rotated.square().sum(1)
    units = rotated * (1536**0.5 / squares.where(squares > 0, 1.0).sqrt())[:, None]
    picked = torch.bucketize(units, torch.from_numpy(edges))
    along = (rotated * torch.from_numpy(levels)[picked]).sum(1)
    scales = torch.where(squares > 0, squares / along.where(along > 0, 1.0), 0.0).float()
    symbols = mechanism.encode(update, context, rand).symbols
    assert torch.equal(symbols[:, 1:].long(), picked)
    assert torch.equal(symbols[:, 0], scales.view(torch.int32))
    values = scales.double()[:, None] * torch.from_numpy(levels)[picked]
    expected = sum(rotate_back(row.numpy(), each, 1500) for row, each in zip(values, words, strict=True))
    decoded = mechanism.decode(symbols.long(), range(3), context, rand)
    assert torch.equal(decoded, torch.from_numpy(expected).float())


def test_the_quantisers_of_a_normal_are_the_published_ones():
    distortions = (0.36338023, 0.11748185, 0.03454776, 0.00950101)
    for bits, distortion in enumerate(distortions, 1):
        assert lloyd_max(bits)[2] == pytest.approx(distortion, abs=1e-8)
    assert lloyd_max(1)[0][1] == pytest.approx(math.sqrt(2.0 / math.pi), abs=1e-12)
    assert lloyd_max(2)[0][2:] == pytest.approx([0.452780, 1.510418], abs=1e-6)
    assert lloyd_max(3)[0][4:] == pytest.approx([0.245094, 0.756005, 1.343909, 2.151946], abs=1e-6)


def test_what_top_k_and_random_k_lose_is_the_published_part():
    """Top-k at most 1 - k / d of the square, and all but the largest; random-k d / k - 1 on average."""
    update = torch.randn(1000, generator=torch.Generator().manual_seed(2)).double()
    [lost] = errors_of(TopK(0.1), update.float(), 1)
    assert torch.equal(lost.nonzero()[:, 0], update.abs().argsort()[:900].sort().values)
    assert lost.square().sum() <= 0.9 * update.square().sum()
    square, mechanism = torch.tensor(0.0), RandomK(0.1)
    for round in range(400):
        context = make_context(mechanism, (0, 1), (1000,), round=round)
        symbols = encode(mechanism, update.expand(2, -1), context).symbols
        assert symbols.shape == (2, 100)
        found = decode(mechanism, symbols, (0, 1), context).double() / 2
        assert int((found != 0).sum()) == 100  # the same places at both
        square = square + (found - update).square().sum() / update.square().sum() / 400
    assert square.item() == pytest.approx(9.0, rel=0.05)  # 400 rounds: 5 standard errors


@pytest.mark.parametrize(
    "mechanism, error",
    [(DRIVE(), 0.570796), (EDEN(2), 0.133121), (EDEN(3), 0.035784), (EDEN(4), 0.009592)],
    ids=repr,
)
def test_the_published_error_of_a_rotated_vector(mechanism, error):
    """1,024 normal coordinates, 300 clients: within 1% of the limit, right along the update."""
    update = torch.randn(1024, generator=torch.Generator().manual_seed(2))
    errors = errors_of(mechanism, update, 300)
    found = errors.square().sum(1).mean().item() / update.square().sum().item()
    assert found == pytest.approx(error, rel=0.01)
    mean = errors.mean(0)
    assert abs((mean @ update.double()).item()) / update.square().sum().item() <= 1e-6
    assert mean.square().sum().item() <= 1.3 * errors.square().sum(1).mean().item() / 300


def test_a_scale_of_lengths_alone_would_be_too_short():
    """The plant |x| / |Q(y)|: for one bit the mean is sqrt(2 / pi) of the update, not the update."""
    update = torch.randn(1024, generator=torch.Generator().manual_seed(2))
    context = make_context(DRIVE(), range(50), (1024,))
    symbols = encode(DRIVE(), update.expand(50, -1), context).symbols
    scales = symbols[:, 0].int().view(torch.float32).double()
    planted = update.double().norm() / math.sqrt(1024 * 2.0 / math.pi)
    assert (planted / scales).mean().item() == pytest.approx(math.sqrt(2.0 / math.pi), rel=0.01)


def test_a_message_begins_with_a_scale():
    with pytest.raises(UndecodableError, match="begin with a scale of 4 bytes"):
        QSGD(4).code(make_context(QSGD(4), (0,), (48,))).unpack(b"abc", 49)


@pytest.mark.parametrize("mechanism", KINDS, ids=repr)
def test_zero_is_zero_and_nobody_is_promised_anything(mechanism):
    context = make_context(mechanism, range(3), (48,))
    symbols = encode(mechanism, torch.zeros(3, 48), context).symbols
    assert not decode(mechanism, symbols, range(3), context).any()
    assert all(isinstance(claim.loss, NonPrivate) for claim in mechanism.claims(context))


@pytest.mark.parametrize("mechanism", KINDS, ids=repr)
def test_what_nobody_can_send_is_refused(mechanism):
    context, rand = make_context(mechanism, (0,), (48,)), PublicRandomness(SeededKeys(0), 0)
    symbols = encode(mechanism, torch.ones(1, 48), context).symbols
    assert mechanism.can_send(symbols[0], 0, context, rand)
    for place, value in ((0, 0x7F800000), (0, -1), (1, 9), (1, -9)):
        wrong = symbols.clone()
        wrong[0, place] = value
        assert not mechanism.can_send(wrong[0], 0, context, rand)
        if place:
            with pytest.raises(ValueError, match=r"levels must be within"):
                decode(mechanism, wrong, (0,), context)
    with pytest.raises(ValueError, match="integers of shape"):
        decode(mechanism, symbols[:, 1:], (0,), context)
