"""LDP-FL, CorBin, AugCorBin and groups on the shipped path: laws, errors, couplings, frozen symbols."""

import math

import pytest
import torch

from lightning_fedq.functional.one_bit import threshold_coin as ob
from lightning_fedq.keys.randomness import ClientRandomness, RootKeys
from lightning_fedq.mechanisms import LDPQ, AugCorBin, CorBin
from reproductions.corbin import errors
from tests.functional.one_bit.oracle import one_bit_thresholds
from tests.one_round import decode, encode, make_context

DRAWS = 200_000
ALL = [LDPQ(1.0), *[CorBin(1.0, bits) for bits in (0, 1, 2, 5, 8, 9, 16, 17, 31, 32, None)]]


def bits_of(mechanism, values, clients=None, seed=0, radius=1.0):
    """`(clients, DRAWS)` bits, each client holding one value in every coordinate."""
    clients = tuple(range(len(values))) if clients is None else clients
    context = make_context(mechanism, clients, (DRAWS,), radius=radius)
    updates = torch.tensor(values)[:, None].expand(-1, DRAWS)
    return encode(mechanism, updates, context, clients, seed).symbols, context


@pytest.mark.parametrize("mechanism", ALL, ids=repr)
def test_every_marginal_is_the_coin(mechanism):
    """Binomial test at 5 standard errors: 14 mechanisms, 5 clients, false alarm 4e-5."""
    values = [0.9, -1.0, 0.0, 0.31, 2.0]
    bits, _ = bits_of(mechanism, values)
    for row, value in zip(bits, values, strict=True):
        q = errors.one_probability(value, 0.0, 1.0, 1.0)
        assert abs(row.double().mean().item() - q) < 5 * math.sqrt(q * (1 - q) / DRAWS)


@pytest.mark.parametrize("shared_bits", [0, 1, 2, 5, 32, None])
@pytest.mark.parametrize("values", [(0.3, -0.2), (0.6, 0.5), (-0.1, 0.12)])
def test_pairs_have_the_closed_law_and_error(shared_bits, values):
    """Four outcomes and the error within 4.5 standard errors, 18 cases: false alarm 6e-4 for a fresh seed."""
    mechanism = CorBin(1.0, shared_bits)
    bits, context = bits_of(mechanism, values)
    law = ob.pair_law(*(errors.one_probability(v, 0.0, 1.0, 1.0) for v in values), shared_bits)
    for (one, other), p in zip([(1, 1), (1, 0), (0, 1), (0, 0)], law, strict=True):
        found = ((bits[0] == one) & (bits[1] == other)).double().mean().item()
        assert abs(found - p) <= 4.5 * math.sqrt(max(p * (1 - p), 0.0) / DRAWS) + 1e-9
    squared = (decode(mechanism, bits, (0, 1), context).double() - sum(values)).square()
    expected = errors.pair_mse(*values, 0.0, 1.0, 1.0, shared_bits)
    assert abs(squared.mean().item() - expected) <= 4.5 * squared.std().item() / math.sqrt(DRAWS) + 1e-6


def test_no_shared_bit_no_pair_and_no_privacy_of_ones_own_are_ldp_fl_bit_for_bit():
    values = [0.3, -0.2, 0.8, 0.1]
    reference, _ = bits_of(LDPQ(1.0), values)
    for mechanism in (CorBin(1.0, 0), AugCorBin(1.0, 5, unpaired_fraction=1.0)):
        assert torch.equal(bits_of(mechanism, values)[0], reference)
    alone, _ = bits_of(CorBin(1.0, 5), values[:1])
    assert torch.equal(alone, reference[:1])


def test_swapping_the_roles_of_a_pair_changes_bits_but_not_the_law():
    values, mechanism = (0.3, -0.2), CorBin(1.0, 3)
    first, _ = bits_of(mechanism, values, (0, 1))
    context = make_context(mechanism, (1, 0), (DRAWS,))
    second = encode(mechanism, torch.tensor(values)[:, None].expand(-1, DRAWS), context).symbols
    assert not torch.equal(first, second)
    law = ob.pair_law(*(errors.one_probability(v, 0.0, 1.0, 1.0) for v in values), 3)
    for bits in (first, second):
        both = (bits[0] & bits[1]).double().mean().item()
        assert abs(both - law[0]) < 5 * math.sqrt(law[0] * (1 - law[0]) / DRAWS)


def test_secure_keys_couple_pairs_too():
    """A pair of equal extreme inputs at d = unlimited: outputs agree only as often as 2q - 1 says."""
    mechanism, keys = CorBin(1.0, None), RootKeys()
    context = make_context(mechanism, (0, 1), (DRAWS,))
    bits = mechanism.encode(torch.zeros(2, DRAWS), context, ClientRandomness(keys, (0, 1), 0)).symbols
    assert int((bits[0] == bits[1]).sum()) == 0


def test_group_sizes():
    assert LDPQ(1.0).group_sizes(3) == (1, 1, 1)
    assert CorBin(1.0).group_sizes(5) == (2, 2, 1)
    assert AugCorBin(1.0, 5, 0.2).group_sizes(50) == (2,) * 20 + (1,) * 10
    assert AugCorBin(1.0, 5, 0.0).group_sizes(5) == (2, 2, 1)


def test_both_paths_agree_at_the_smallest_radius():
    """Frequencies of the compiled path within 5 standard errors of the tensor path's thresholds."""
    mechanism, values = LDPQ(1.0), [0.0, 1.0, -1.0, 1e-30]
    coin, one = mechanism.coin, torch.ones(1, dtype=torch.float64)
    thresholds = one_bit_thresholds(torch.tensor(values), 0.0 * one, 1e-300 * one, coin)
    assert thresholds.tolist() == [1 << coin.word_bits - 1, coin.high, coin.low, coin.high]
    bits, _ = bits_of(mechanism, values, radius=1e-300)
    chances = (thresholds.double() / 2**coin.word_bits).tolist()
    for row, chance in zip(bits, chances, strict=True):
        assert abs(row.double().mean().item() - chance) < 5 * math.sqrt(chance * (1 - chance) / DRAWS)
