import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_fedq.functional.rotation import rotate, sign_words
from lightning_fedq.keys.randomness import PublicRandomness, SeededKeys
from lightning_fedq.mechanisms import RotatedAxes
from lightning_fedq.mechanisms.interface import Adversary
from lightning_fedq.privacy.accounting import spent
from tests.one_round import decode, encode, make_context

DENSE = torch.randn(48, generator=torch.Generator().manual_seed(1))
SPARSE = torch.zeros(48).index_fill(0, torch.tensor([7]), -2.0)


def messages_of(mechanism, update, num_clients, round=0):
    context = make_context(mechanism, range(num_clients), (len(update),), round=round)
    return encode(mechanism, update.expand(num_clients, -1), context).symbols, context


@pytest.mark.parametrize("update", [DENSE, SPARSE, torch.zeros(48)], ids=["dense", "one coordinate", "zero"])
def test_the_law_of_a_message_given_the_rotation(update):
    """Chi-square over top axes and others, 6,000 messages, two cells per client class: alarms once in 1e5."""
    mechanism, count = RotatedAxes(epsilon_per_message=2.0, clip_norm=1.0), 6000
    symbols, _ = messages_of(mechanism, update, count)
    choice, rand = mechanism.choice(48), PublicRandomness(SeededKeys(0), 0)
    words = [rand.shared_with_server(client, "rotation").words(sign_words(64)) for client in range(count)]
    rotated = [rotate(update.double().numpy()[None], each)[0] for each in words]
    ranks = []
    for values, symbol in zip(rotated, symbols[:, 0].tolist(), strict=True):
        top = np.sort(np.argpartition(-np.abs(values), choice.num_top - 1)[: choice.num_top])
        signed = np.where(values[top] < 0, top + choice.size, top)
        rest = np.setdiff1d(np.arange(2 * choice.size), signed)
        where = np.flatnonzero(signed == symbol)
        ranks.append(where[0] if len(where) else choice.num_top + np.flatnonzero(rest == symbol)[0])
    seen = np.bincount(ranks, minlength=2 * choice.size)
    top, k = choice.top_probability, choice.num_top
    expected = np.where(np.arange(2 * choice.size) < k, top / k, (1 - top) / (2 * choice.size - k)) * count
    assert stats.chisquare(seen, expected).pvalue > 1e-5


def test_the_mean_points_along_the_update_and_the_error_is_the_formula():
    """8,000 clients of one update; two Hadamard rounds are not a Haar rotation, hence 3% in the error."""
    mechanism, update, count = RotatedAxes(epsilon_per_message=4.0, clip_norm=3.0), DENSE, 8000
    symbols, context = messages_of(mechanism, update, count)
    some = range(0, count, 4)
    parts = torch.stack([decode(mechanism, symbols[i : i + 1], [i], context).double() for i in some])
    mean = decode(mechanism, symbols, range(count), context).double() / count
    direction = update.double() / update.double().norm()
    along = (parts @ direction).std().item() / math.sqrt(count)
    assert abs((mean @ direction).item() - 3.0) <= 5 * along + 0.01 * 3.0
    across = mean - (mean @ direction) * direction
    choice = mechanism.choice(48)
    total = 9.0 * choice.mean_length**-2 * 48 / 64
    assert across.norm().item() <= 1.5 * math.sqrt(total / count)
    assert parts.square().sum(1).mean().item() == pytest.approx(total, rel=0.03)


def test_zero_is_decoded_to_nothing_on_average():
    """The signs of the rotation are fair, so zero has no direction; 5 standard errors, 48 coordinates."""
    mechanism, count = RotatedAxes(epsilon_per_message=8.0, clip_norm=1.0), 8000
    symbols, context = messages_of(mechanism, torch.zeros(48), count)
    mean = decode(mechanism, symbols, range(count), context).double() / count
    scale = math.sqrt(mechanism.noise_variance(context, range(count))[0].item())
    assert mean.abs().max().item() <= 5 * scale


def test_the_message_is_one_axis_in_whole_bits():
    mechanism = RotatedAxes(epsilon_per_message=8.0, clip_norm=1.0)
    for dim, bits in ((1, 1), (2, 2), (48, 7), (7850, 14)):
        symbols, context = messages_of(mechanism, torch.ones(dim), 2)
        assert symbols.shape == (2, 1)
        assert mechanism.code(context).bits_per_symbol == bits


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0, 8.0])
def test_every_view_has_the_message_s_epsilon_once(epsilon):
    mechanism = RotatedAxes(epsilon_per_message=epsilon, clip_norm=1.0)
    claims = mechanism.claims(make_context(mechanism, range(5), (7850,)))
    assert {claim.adversary for claim in claims} == set(Adversary)
    for claim in claims:
        assert claim.compositions == 1
        total = spent(claim.loss, 1e-12, compositions=1, rounds=1)
        assert total.epsilon <= epsilon * (1 + 1e-6)
        assert total.epsilon >= 0.999 * epsilon


def test_only_the_direction_is_sent():
    mechanism = RotatedAxes(epsilon_per_message=4.0, clip_norm=1.0)
    short, _ = messages_of(mechanism, DENSE * 2.0**-20, 50)
    long, _ = messages_of(mechanism, DENSE * 2.0**20, 50)
    assert torch.equal(short, long)
    updates = torch.stack([DENSE / DENSE.norm() * 0.5, DENSE])
    message = encode(mechanism, updates, make_context(mechanism, (0, 1), (48,)))
    assert message.num_clipped == 48


@pytest.mark.parametrize(
    "symbols", [torch.tensor([[128]]), torch.tensor([[-1]]), torch.tensor([[1, 2]]), torch.ones(1, 1)]
)
def test_a_message_that_names_no_axis_is_refused(symbols):
    mechanism = RotatedAxes(epsilon_per_message=1.0, clip_norm=1.0)
    context = make_context(mechanism, (0,), (48,))
    with pytest.raises(ValueError, match=r"symbols must be integers in|messages must"):
        decode(mechanism, symbols, (0,), context)
