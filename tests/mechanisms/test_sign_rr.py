import math

import torch

from lightning_fedq.mechanisms.interface import Adversary, CoinSum, PmfPairs
from lightning_fedq.mechanisms.sign_rr import SignRR
from tests.one_round import decode, encode, make_context


def test_the_mean_estimates_the_signs_scaled_by_the_radius():
    mechanism, dim = SignRR(epsilon_per_coordinate=1.0), 40_000
    context = make_context(mechanism, (0, 1), (dim,), radius=0.5, center=0.25)
    updates = torch.tensor([[0.26], [0.9]]).repeat(1, dim)
    estimate = decode(mechanism, encode(mechanism, updates, context).symbols, (0, 1), context).double()
    standard_error = estimate.std() / math.sqrt(dim)
    assert abs(estimate.mean() - (2 * 0.25 + 2 * 0.5)) < 4.9 * standard_error  # false alarm 1e-6
    assert estimate.var() / 4 <= 1.05 * mechanism.noise_variance(context, (0, 1)).item()


def test_a_plain_mean_keeps_the_shrinkage_of_the_coin():
    mechanism, dim = SignRR(epsilon_per_coordinate=1.0, aggregation="plain_mean"), 40_000
    context = make_context(mechanism, (0,), (dim,))
    symbols = encode(mechanism, torch.ones(1, dim), context).symbols
    estimate = decode(mechanism, symbols, (0,), context).double()
    assert set(estimate.tolist()) == {-1.0, 1.0}
    assert abs(estimate.mean() - math.tanh(0.5)) < 4.9 * estimate.std() / math.sqrt(dim)  # 1e-6


def test_zero_has_a_random_sign_unless_asked():
    for positive, ones in ((False, 0.5), (True, math.e / (1 + math.e))):
        mechanism, dim = SignRR(epsilon_per_coordinate=1.0, zero_is_positive=positive), 40_000
        bits = encode(mechanism, torch.zeros(1, dim), make_context(mechanism, (0,), (dim,))).symbols
        assert abs(bits.double().mean() - ones) < 4.9 * math.sqrt(ones * (1 - ones) / dim)  # 1e-6


def test_the_size_of_a_value_does_not_matter():
    mechanism = SignRR(epsilon_per_coordinate=1.0)
    context = make_context(mechanism, (0,), (1000,), center=0.1)
    small = encode(mechanism, torch.full((1, 1000), 0.1001), context).symbols
    assert torch.equal(small, encode(mechanism, torch.full((1, 1000), 1e20), context).symbols)


def test_majority_takes_the_sign_of_the_sum():
    mechanism = SignRR(epsilon_per_coordinate=1.0, aggregation="majority")
    context = make_context(mechanism, (0, 1, 2, 3), (3,), radius=2.0, center=1.0)
    symbols = torch.tensor([[1, 0, 1], [1, 0, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.uint8)
    expected = torch.tensor([12.0, -4.0, 4.0])  # 4 (center +- radius), and center for a draw
    assert torch.equal(decode(mechanism, symbols, (0, 1, 2, 3), context), expected)
    assert torch.equal(decode(mechanism, symbols.sum(0, dtype=torch.int32), (0, 1, 2, 3), context), expected)
    assert mechanism.joint and not SignRR(epsilon_per_coordinate=1.0).joint
    assert mechanism.noise_variance(context, (0, 1)).item() == 4.0


def test_majority_finds_the_sign_of_most():
    """50 clients, 40 positive: P(wrong) < 3e-3 a coordinate at epsilon = 2, measured .0005."""
    mechanism = SignRR(epsilon_per_coordinate=2.0, aggregation="majority")
    context = make_context(mechanism, tuple(range(50)), (1000,))
    updates = torch.ones(50, 1000)
    updates[:10] = -1.0
    estimate = decode(mechanism, encode(mechanism, updates, context).symbols, range(50), context)
    assert (estimate > 0).float().mean() > 0.98


def test_claims_are_those_of_independent_coins():
    mechanism = SignRR(epsilon_per_coordinate=0.5)
    claims = {c.adversary: c for c in mechanism.claims(make_context(mechanism, (0, 1, 2), (7,)))}
    pair = claims[Adversary.SERVER].loss
    assert isinstance(pair, PmfPairs) and math.log(pair.pairs[0][0][0] / pair.pairs[0][1][0]) <= 0.5
    assert isinstance(claims[Adversary.SECAGG_SERVER].loss, CoinSum)
    assert all(claim.compositions == 7 for claim in claims.values())
