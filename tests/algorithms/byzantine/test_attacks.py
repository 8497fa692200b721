import math

import pytest
import torch

from lightning_fedq.algorithms.byzantine import attacks
from lightning_fedq.mechanisms import CPA, LDPQ
from reproductions.cpa.table6 import break_even_fraction
from tests.one_round import context_of, decode, encode

UPDATES = torch.tensor([[1.0, -2.0], [0.5, 4.0]])


def test_update_attacks():
    assert torch.equal(attacks.sign_flip(UPDATES, 2.0), -2 * UPDATES)
    assert torch.equal(attacks.constant(UPDATES, 7.0), torch.full((2, 2), 7.0))
    uniforms = torch.tensor([[0.5, 0.75], [0.0, 1.0]], dtype=torch.float64)
    assert torch.equal(attacks.uniform_noise(UPDATES, 2.0, uniforms), torch.tensor([[0.0, 1.0], [-2.0, 2.0]]))
    assert torch.equal(attacks.gaussian_noise(UPDATES, 0.5, torch.ones(2, 2)), UPDATES + 0.5)
    mean, std = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])
    assert torch.equal(attacks.a_little_is_enough(mean, std, 2, 2.0), torch.tensor([[0.0, 1.5]] * 2))
    assert torch.equal(attacks.inner_product_manipulation(mean, 3, 2.0), torch.tensor([[-2.0, -4.0]] * 3))
    assert torch.equal(attacks.mimic(mean, 2), torch.stack([mean, mean]))


def test_alie_shift_is_the_paper_s():
    """Baruch et al.: n = 50, f = 12 (24 %): s = 26 - 12 = 14 of 38 honest, phi(z) < 24 / 38."""
    assert attacks.alie_shift(50, 12) == pytest.approx(0.336, abs=1e-3)
    for liars in (0, 25):
        with pytest.raises(ValueError, match="ALIE needs between 1 and n / 2 Byzantine clients"):
            attacks.alie_shift(50, liars)


def test_wire_attacks():
    bits = torch.tensor([[0, 1, 1], [1, 0, 0]], dtype=torch.uint8)
    assert attacks.all_ones(bits).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert torch.equal(attacks.inverted(bits), 1 - bits)
    coins = torch.tensor([[True, False, True], [False, False, True]])
    assert attacks.coin_flipped(bits, coins).tolist() == [[1, 1, 0], [1, 0, 1]]
    assert torch.equal(attacks.copied(bits, 1 - bits), 1 - bits)
    words = torch.tensor([[5, 6, 7], [8, 9, 10]])
    assert attacks.garbage(bits, words, 0, 3).tolist() == [[1, 2, 3], [0, 1, 2]]
    assert attacks.garbage(bits, words, 1, 3).tolist() == [[3, 1, 2], [3, 1, 2]]
    with pytest.raises(ValueError, match="partners must have shape"):
        attacks.copied(bits, bits[:1])


def test_the_lever_of_small_epsilons():
    assert [attacks.ldp_amplification(e) for e in (0.1, 0.5, 1.0, 2.0)] == pytest.approx(
        [20.0167, 4.0830, 2.1640, 1.3130], abs=1e-4
    )
    assert attacks.ldp_amplification(0.01) == pytest.approx(200, rel=1e-4)
    assert [break_even_fraction(e) for e in (0.5, 1, 2, 4)] == pytest.approx(
        [0.19673, 0.31606, 0.43233, 0.49084], abs=1e-5
    )
    for call, match in ((lambda: attacks.ldp_amplification(0.0), "epsilon must be > 0"),):
        with pytest.raises(ValueError, match=match):
            call()


@pytest.mark.parametrize("mechanism", [LDPQ(epsilon=0.5), CPA(epsilon=0.5)], ids=["LDPQ", "CPA"])
@pytest.mark.parametrize(
    ("attack", "factor"),
    [
        ("honest", 1.0),
        ("ones", 1 / math.tanh(0.25) / 0.4),
        ("flip", 0.0),
        ("invert", -1.0),
        ("invert, no coin", -1 / math.tanh(0.25)),
    ],
)
def test_mean_contribution_of_each_wire_attack(mechanism, attack, factor):
    """The table of cpa.md section 8, by simulation: what one liar with update .4 contributes on average.

    "ones" is a push for LDP-FL; what it is for CPA depends on the words: see the next test.
    """
    if attack == "ones" and isinstance(mechanism, CPA):
        factor = -factor  # N = 2: the one Hadamard word is +1 at the lower point
    dim, value = 200_000, 0.4
    context = context_of(mechanism, (0,), (dim,))
    updates = torch.full((1, dim), value)
    bits = encode(mechanism, updates, context).symbols
    if attack == "ones":
        bits = attacks.all_ones(bits)
    elif attack == "flip":
        coins = torch.rand(bits.shape, generator=torch.Generator().manual_seed(0)) < 0.5
        bits = attacks.coin_flipped(bits, coins)
    elif attack == "invert":
        bits = attacks.inverted(bits)
    elif attack == "invert, no coin":
        bits = attacks.inverted(encode(type(mechanism)(epsilon=math.inf), updates, context).symbols)
    estimate = decode(mechanism, bits, (0,), context).double()
    # 9 cases at 5 standard errors: false alarm 5e-6.
    error = estimate.std() / math.sqrt(dim)
    assert abs(estimate.mean() - factor * value) < 5 * error + 1e-6


@pytest.mark.parametrize(
    ("words", "levels", "mean"), [("balanced", 2, 0.0), ("balanced", 4, 0.0), ("hadamard", 4, -1.0)]
)
def test_ones_are_noise_for_words_of_either_sign_and_a_push_for_hadamard_words(words, levels, mean):
    """Every Hadamard word is +1 at point 0, so "ones" is a vote for point 0, worth 1/c of an honest one."""
    dim = 100_000
    mechanism = CPA(epsilon=0.5, levels=levels, words=words)
    context = context_of(mechanism, (0,), (dim,))
    estimate = decode(mechanism, torch.ones(1, dim, dtype=torch.uint8), (0,), context).double()
    error = estimate.std() / math.sqrt(dim)
    assert abs(estimate.mean() - mean / math.tanh(0.25)) < 5 * error  # 3 cases: 2e-6
